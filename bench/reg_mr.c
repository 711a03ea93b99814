/*
 * reg_mr: the time of `ibv_reg_mr` as a function of the size of the memory.
 *
 * Prints one JSON object: for each size the median and the 99th percentile in microseconds. The memory is mapped
 * without reservation and never accessed, so that the times show if a NIC pins or walks pages.
 *
 * Build:  cc -O2 -o reg_mr reg_mr.c -libverbs
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <infiniband/verbs.h>

#include "times.h"

enum { ROUNDS = 1001, WARM_UP_ROUNDS = 50 };

static void fail(const char *what)
{
    fprintf(stderr, "reg_mr: %s: %s\n", what, strerror(errno));
    exit(1);
}

/* Registers and deregisters `length` bytes repeatedly. `times` gets the sorted times of the registrations. */
static void measure(struct ibv_pd *pd, void *memory, size_t length, double times[ROUNDS])
{
    for (int round = -WARM_UP_ROUNDS; round < ROUNDS; round++) {
        double start = microseconds_now();
        struct ibv_mr *mr =
            ibv_reg_mr(pd, memory, length, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE);
        double elapsed = microseconds_now() - start;
        if (mr == NULL)
            fail("ibv_reg_mr");
        if (round >= 0)
            times[round] = elapsed;
        if (ibv_dereg_mr(mr) != 0)
            fail("ibv_dereg_mr");
    }
    qsort(times, ROUNDS, sizeof times[0], ascending);
}

int main(void)
{
    static const size_t LENGTHS[] = {4096, 1UL << 20, 1UL << 30, 64UL << 30};
    enum { LENGTH_COUNT = sizeof LENGTHS / sizeof LENGTHS[0] };
    struct ibv_device **list = ibv_get_device_list(NULL);
    if (list == NULL || list[0] == NULL) {
        fprintf(stderr, "reg_mr: no RDMA device on this machine\n");
        return 1;
    }
    struct ibv_context *context = ibv_open_device(list[0]);
    struct ibv_pd *pd = context == NULL ? NULL : ibv_alloc_pd(context);
    if (pd == NULL)
        fail("cannot open the device");
    void *memory = mmap(NULL, LENGTHS[LENGTH_COUNT - 1], PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED)
        fail("cannot map 64 GiB of address space");
    printf("{\"unit\": \"us\", \"rounds\": %d, \"sizes\": [", ROUNDS);
    for (int i = 0; i < LENGTH_COUNT; i++) {
        static double times[ROUNDS];
        measure(pd, memory, LENGTHS[i], times);
        printf("%s{\"bytes\": %zu, \"median\": %.3f, \"p99\": %.3f}", i == 0 ? "" : ", ", LENGTHS[i], times[ROUNDS / 2],
               times[ROUNDS * 99 / 100]);
    }
    printf("]}\n");
    ibv_dealloc_pd(pd);
    ibv_close_device(context);
    ibv_free_device_list(list);
    return 0;
}
