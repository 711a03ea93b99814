/*
 * fork_allocate ROUNDS malloc|mmap: one thread forks all the time. Another one allocates a block, fills, registers, deregisters
 * and frees it, so that a new block has the addresses of one that was registered. Exit status 1 if a block has other bytes than
 * it was filled with.
 */
#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "env.h"

enum { BYTES = 1 << 20, WORDS = BYTES / sizeof(unsigned long), STEP = 4096 / sizeof(unsigned long) };

static atomic_bool is_over;

static void *fork_in_loop(void *unused)
{
    while (!is_over) {
        pid_t child = fork();
        if (child == 0)
            _exit(0);
        if (child < 0 || waitpid(child, NULL, 0) != child)
            die("fork");
    }
    return unused;
}

static unsigned long *allocate(bool by_malloc)
{
    void *block = by_malloc ? malloc(BYTES)
                            : mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (block == NULL || block == MAP_FAILED)
        die("no memory");
    return block;
}

static void expect(const unsigned long *block, unsigned long value, const char *when)
{
    for (unsigned long i = 0; i < WORDS; i += STEP)
        if (block[i] != value)
            die("%s: word %lu is %lu in place of %lu", when, i, block[i], value);
}

int main(int argc, char **argv)
{
    if (argc != 3)
        die("usage: fork_allocate ROUNDS malloc|mmap");
    bool by_malloc = strcmp(argv[2], "malloc") == 0;
    struct ibv_device **devices = ibv_get_device_list(NULL);
    struct ibv_context *context = ibv_open_device(devices[0]);
    struct ibv_pd *pd = ibv_alloc_pd(context);
    pthread_t forking;
    pthread_create(&forking, NULL, fork_in_loop, NULL);
    for (unsigned long round = 1; round <= strtoul(argv[1], NULL, 10); round++) {
        unsigned long *block = allocate(by_malloc);
        for (unsigned long i = 0; i < WORDS; i += STEP)
            block[i] = round;
        struct ibv_mr *region = ibv_reg_mr(pd, block, BYTES, IBV_ACCESS_LOCAL_WRITE);
        if (region == NULL)
            die("ibv_reg_mr");
        expect(block, round, "registered");
        if (ibv_dereg_mr(region) != 0)
            die("ibv_dereg_mr");
        expect(block, round, "deregistered");
        if (by_malloc)
            free(block);
        else
            munmap(block, BYTES);
    }
    is_over = true;
    pthread_join(forking, NULL);
    return 0;
}
