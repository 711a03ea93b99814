/* What needs no server: registration, the control plane (tables 1 and 2 of the paper), and the disk. */
#include "np.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "../peers/clock.h"
#include "terrace.h"

enum { VERIFIED_PAGES = 200 };

/* Posts a work request, and waits for its completion. */
static void wait_for(struct ibv_qp *qp, struct ibv_send_wr *request)
{
    struct ibv_send_wr *bad;
    if (ibv_post_send(qp, request, &bad) != 0)
        die("ibv_post_send");
    struct ibv_wc wc;
    int count;
    while ((count = ibv_poll_cq(qp->send_cq, 1, &wc)) == 0)
        ;
    if (count < 0 || wc.status != IBV_WC_SUCCESS)
        die("a READ");
}

/* ---- registration ---------------------------------------------------------------------------------------------------- */

/* READs pages at random places over a queue pair that is connected to another one of this process. The program has written to every second
 * one, and in an untouched region nobody to the others. */
static void verify_registration(struct ibv_context *context, const struct region *region, struct ibv_mr *mr)
{
    static uint64_t words[PAGE / 8];
    struct ibv_mr *buffer = ibv_reg_mr(mr->pd, words, sizeof words, IBV_ACCESS_LOCAL_WRITE);
    struct ibv_qp *pair[2] = {create_pair(create_cq()), create_pair(create_cq())};
    union ibv_gid gid;
    if (buffer == NULL || ibv_query_gid(context, 1, 0, &gid) != 0)
        die("ibv_reg_mr");
    for (int i = 0; i < 2; i++)
        connect_pair(pair[i], &gid, pair[1 - i]->qp_num);
    for (int i = 0; i < VERIFIED_PAGES; i++) {
        uint64_t page = ((uint64_t)random() << 31 ^ (uint64_t)random()) % (region->bytes / PAGE);
        uint64_t *there = (uint64_t *)((char *)mr->addr + page * PAGE);
        bool is_written = region->is_filled || i % 2 == 0;
        for (size_t word = 0; is_written && word < PAGE / 8; word++)
            there[word] = word_at(page * PAGE + word * 8);
        struct ibv_sge sge = {(uintptr_t)words, sizeof words, buffer->lkey};
        struct ibv_send_wr read = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_READ, .send_flags = IBV_SEND_SIGNALED,
                                   .wr.rdma = {(uintptr_t)there, mr->rkey}};
        wait_for(pair[0], &read);
        for (size_t word = 0; word < PAGE / 8; word++) {
            if (words[word] != (is_written ? word_at(page * PAGE + word * 8) : 0)) {
                fprintf(stderr, "np: wrong data in page %llu\n", (unsigned long long)page);
                exit(1);
            }
        }
    }
    if (ibv_destroy_qp(pair[0]) != 0 || ibv_destroy_qp(pair[1]) != 0)
        die("ibv_destroy_qp");
}

void measure_registration(const struct region *region)
{
    struct ibv_context *context = open_device();
    char *memory = map_region(region);
    int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;
    uint64_t begun = clock_ns();
    struct ibv_mr *mr = ibv_reg_mr(protection_domain(), memory, region->bytes, access);
    double register_us = (double)(clock_ns() - begun) / 1e3;
    if (mr == NULL)
        die("ibv_reg_mr");
    verify_registration(context, region, mr);
    begun = clock_ns();
    if (ibv_dereg_mr(mr) != 0)
        die("ibv_dereg_mr");
    printf("{\"register_us\": %.1f, \"deregister_us\": %.1f}\n", register_us, (double)(clock_ns() - begun) / 1e3);
}

/* ---- the control plane ----------------------------------------------------------------------------------------------- */

enum { PAIRS = 64, REGION_BYTES = 4 << 20, SWAPPED_PAGES = 256 };

/* Memory of the process, in bytes. */
static double resident_bytes(void)
{
    unsigned long pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (file == NULL || fscanf(file, "%*u %lu", &pages) != 1)
        die("/proc/self/statm");
    fclose(file);
    return (double)pages * PAGE;
}

static void print_time(const char *op, size_t size, uint64_t begun_ns, unsigned count)
{
    printf("{\"op\": \"%s\", \"size\": %zu, \"each_us\": %.2f}\n", op, size, (double)(clock_ns() - begun_ns) / 1e3 / count);
}

static void print_bytes(const char *op, double bytes, unsigned count)
{
    printf("{\"op\": \"%s\", \"size\": 0, \"each_bytes\": %.0f}\n", op, bytes / count);
}

static struct ibv_qp *pairs[PAIRS];

static void measure_objects(struct ibv_context *context)
{
    static struct ibv_cq *cqs[PAIRS];
    double before = resident_bytes();
    uint64_t begun = clock_ns();
    for (int i = 0; i < PAIRS; i++)
        cqs[i] = create_cq();
    print_time("create a CQ", 0, begun, PAIRS);
    print_bytes("a CQ", resident_bytes() - before, PAIRS);
    before = resident_bytes();
    begun = clock_ns();
    for (int i = 0; i < PAIRS; i++)
        pairs[i] = create_pair(cqs[0]);
    print_time("create a queue pair", 0, begun, PAIRS);
    union ibv_gid gid;
    if (ibv_query_gid(context, 1, 0, &gid) != 0)
        die("ibv_query_gid");
    begun = clock_ns();
    for (int i = 0; i < PAIRS; i++)
        connect_pair(pairs[i], &gid, pairs[i ^ 1]->qp_num);
    print_time("INIT, RTR and RTS of a queue pair", 0, begun, PAIRS);
    print_bytes("a connected queue pair", resident_bytes() - before, PAIRS);
}

/* The first READ of a queue pair exchanges keys, and has the rest of its memory allocated. */
static void measure_first_requests(struct ibv_mr *mr)
{
    double before = resident_bytes();
    for (int turn = 0; turn < 2; turn++) {
        uint64_t begun = clock_ns();
        for (int i = 0; i < PAIRS; i++) {
            struct ibv_sge sge = {(uintptr_t)mr->addr, 8, mr->lkey};
            struct ibv_send_wr read = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_READ, .send_flags = IBV_SEND_SIGNALED,
                                       .wr.rdma = {(uintptr_t)mr->addr + REGION_BYTES / 2, mr->rkey}};
            wait_for(pairs[i], &read);
        }
        print_time(turn == 0 ? "first READ of a queue pair" : "second READ of a queue pair", 0, begun, PAIRS);
    }
    print_bytes("a queue pair after its first READ", resident_bytes() - before, PAIRS);
}

static void bring_nothing(void *context, void *addr, size_t length)
{
    (void)context, (void)addr, (void)length;
}

/* The NIC's part of a page's leaving and coming: the page stays where it is. */
static void measure_swap_calls(void)
{
    __typeof__(&terrace_reg_swapped_mr) reg_swapped_mr = dlsym(RTLD_DEFAULT, "terrace_reg_swapped_mr");
    __typeof__(&terrace_swap_out) swap_out = dlsym(RTLD_DEFAULT, "terrace_swap_out");
    __typeof__(&terrace_swap_in) swap_in = dlsym(RTLD_DEFAULT, "terrace_swap_in");
    size_t bytes = (size_t)SWAPPED_PAGES * PAGE;
    char *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (memory == MAP_FAILED || reg_swapped_mr == NULL || swap_out == NULL || swap_in == NULL)
        die("terrace_swap_out");
    int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;
    struct ibv_mr *mr = reg_swapped_mr(protection_domain(), memory, bytes, access, bring_nothing, NULL);
    if (mr == NULL)
        return; /* without --dram nothing is paged */
    uint64_t begun = clock_ns();
    for (int i = 0; i < SWAPPED_PAGES; i++)
        if (swap_out(mr, memory + i * PAGE, PAGE) != 0)
            die("terrace_swap_out");
    print_time("terrace_swap_out of a page", PAGE, begun, SWAPPED_PAGES);
    begun = clock_ns();
    for (int i = 0; i < SWAPPED_PAGES; i++)
        if (swap_in(mr, memory + i * PAGE, PAGE) != 0)
            die("terrace_swap_in");
    print_time("terrace_swap_in of a page", PAGE, begun, SWAPPED_PAGES);
}

void measure_control(void)
{
    double before = resident_bytes();
    uint64_t begun = clock_ns();
    struct ibv_context *context = open_device();
    print_time("open the device", 0, begun, 1);
    print_bytes("an open device", resident_bytes() - before, 1);
    char *memory = mmap(NULL, REGION_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        die("mmap");
    int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;
    struct ibv_mr *mr = ibv_reg_mr(protection_domain(), memory, REGION_BYTES, access);
    if (mr == NULL)
        die("ibv_reg_mr");
    memset(memory, 1, REGION_BYTES);
    measure_objects(context);
    measure_first_requests(mr);
    measure_swap_calls();
}

/* ---- the disk -------------------------------------------------------------------------------------------------------- */

enum { CHUNK = 1 << 20, READS = 12 };

static atomic_bool is_measuring, is_spinning;

/* Keeps a processor busy, as the client's is. While that one sleeps, a read takes up to twice as long. */
static void *spin(void *cpu)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(*(int *)cpu, &set);
    if (sched_setaffinity(0, sizeof set, &set) != 0)
        die("sched_setaffinity");
    for (is_spinning = true; is_measuring;)
        ;
    return NULL;
}

static void measure_slice(int fd, char *chunk, uint64_t bytes, int busy_cpu, struct series *series)
{
    pthread_t thread;
    is_measuring = true;
    is_spinning = false;
    if (pthread_create(&thread, NULL, spin, &busy_cpu) != 0)
        die("pthread_create");
    while (!is_spinning)
        sched_yield();
    for (int i = 0; i < READS; i++) {
        uint64_t begun = ticks_begin();
        if (pread(fd, chunk, PAGE, (off_t)((uint64_t)random() % (bytes / PAGE) * PAGE)) != PAGE)
            die("pread");
        add_sample(series, ticks_to_ns(ticks_end() - begun));
    }
    is_measuring = false;
    pthread_join(thread, NULL);
    end_slice(series);
}

void measure_disk(const char *path, uint64_t bytes, int busy_cpu, unsigned turns)
{
    clock_calibrate();
    int fd = open(path, O_CREAT | O_EXCL | O_RDWR | O_DIRECT | O_CLOEXEC, 0600);
    char *chunk = aligned_alloc(PAGE, CHUNK);
    if (fd < 0 || unlink(path) != 0 || chunk == NULL)
        die(path);
    memset(chunk, 0x5a, CHUNK);
    for (uint64_t offset = 0; offset < bytes; offset += CHUNK)
        if (write(fd, chunk, CHUNK) != CHUNK)
            die("write");
    if (fsync(fd) != 0)
        die("fsync");
    struct series series = new_series("read", PAGE);
    for (unsigned turn = 0; turn < turns; turn++) {
        begin_turn();
        measure_slice(fd, chunk, bytes, busy_cpu, &series);
        end_turn();
    }
    report_latency(&series);
}
