/*
 * own_swap: a program that swaps its registered memory itself, and tells the NIC of each page that leaves and comes.
 *
 * The program has one region of 256 pages, of which it keeps at most 32 in memory. The others are in a file. A thread of
 * its own takes pages away (terrace_swap_out) and brings those that peers need (terrace_swap_in). The main thread is the
 * peer, over a queue pair that is connected to another one of the same process: it WRITEs and READs random pages, and
 * checks what it reads.
 *
 * Build:  cc -O2 -I crates/ibverbs/include -o own_swap own_swap.c -libverbs -lpthread -ldl
 * Run:    terrace run -- ./own_swap [SECONDS]
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "terrace.h"

enum { PAGE = 4096, PAGES = 256, PRESENT_MAX = 32, IB_PORT = 1 };

static __typeof__(&terrace_reg_swapped_mr) reg_swapped_mr;
static __typeof__(&terrace_swap_out) swap_out;
static __typeof__(&terrace_swap_in) swap_in;

static struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    char *memory;
    struct ibv_mr *mr;
    int file;
    bool is_present[PAGES], is_wanted[PAGES], is_over;
    int present_count;
    unsigned next_victim;
    unsigned long out_count, in_count;
} swap = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

static void check(bool is_good, const char *what)
{
    if (!is_good) {
        perror(what);
        exit(1);
    }
}

/* Called by the NIC. The thread of the program brings the pages. */
static void bring(void *context, void *addr, size_t length)
{
    size_t first = ((char *)addr - swap.memory) / PAGE;
    (void)context;
    pthread_mutex_lock(&swap.lock);
    for (size_t page = first; page < first + length / PAGE; page++)
        swap.is_wanted[page] = true;
    pthread_cond_signal(&swap.changed);
    pthread_mutex_unlock(&swap.lock);
}

static void take_away(unsigned page)
{
    char *addr = swap.memory + page * PAGE;
    /* A page that the NIC uses for a peer stays; another one goes. */
    if (swap_out(swap.mr, addr, PAGE) != 0)
        return;
    check(pwrite(swap.file, addr, PAGE, page * PAGE) == PAGE, "pwrite");
    /* An access by mistake fails instead of finding zeros. */
    check(mmap(addr, PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == addr, "mmap");
    swap.is_present[page] = false;
    swap.present_count--;
    swap.out_count++;
}

static void bring_back(unsigned page)
{
    char *addr = swap.memory + page * PAGE;
    swap.is_wanted[page] = false;
    if (!swap.is_present[page]) {
        check(mprotect(addr, PAGE, PROT_READ | PROT_WRITE) == 0, "mprotect");
        check(pread(swap.file, addr, PAGE, page * PAGE) == PAGE, "pread");
        swap.is_present[page] = true;
        swap.present_count++;
        swap.in_count++;
    }
    /* Also for a page that is there: it may have been asked for while it came. */
    check(swap_in(swap.mr, addr, PAGE) == 0, "terrace_swap_in");
}

static void *swapper(void *unused)
{
    (void)unused;
    while (true) {
        unsigned wanted[PAGES], count = 0;
        pthread_mutex_lock(&swap.lock);
        for (unsigned page = 0; page < PAGES; page++)
            if (swap.is_wanted[page]) {
                swap.is_wanted[page] = false;
                wanted[count++] = page;
            }
        if (count == 0 && !swap.is_over && swap.present_count <= PRESENT_MAX)
            pthread_cond_wait(&swap.changed, &swap.lock);
        bool is_over = swap.is_over;
        pthread_mutex_unlock(&swap.lock);
        /* Without the lock: the NIC may call bring() meanwhile. */
        for (unsigned index = 0; index < count; index++)
            bring_back(wanted[index]);
        for (unsigned tries = 0; tries < PAGES && swap.present_count > PRESENT_MAX; tries++) {
            unsigned page = swap.next_victim++ % PAGES;
            if (swap.is_present[page])
                take_away(page);
        }
        if (is_over)
            return NULL;
    }
}

static void connect_pair(struct ibv_qp *qp, struct ibv_qp *peer, const union ibv_gid *gid)
{
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = IB_PORT};
    attr.qp_access_flags = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;
    check(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS), "INIT");
    attr.qp_state = IBV_QPS_RTR;
    attr.path_mtu = IBV_MTU_1024;
    attr.dest_qp_num = peer->qp_num;
    attr.max_dest_rd_atomic = 4;
    attr.min_rnr_timer = 12;
    attr.ah_attr.is_global = 1;
    attr.ah_attr.port_num = IB_PORT;
    attr.ah_attr.grh.dgid = *gid;
    attr.ah_attr.grh.hop_limit = 64;
    check(!ibv_modify_qp(qp, &attr,
                         IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                             IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER),
          "RTR");
    attr.qp_state = IBV_QPS_RTS;
    attr.timeout = 14;
    attr.retry_cnt = 7;
    attr.rnr_retry = 7;
    attr.max_rd_atomic = 4;
    check(!ibv_modify_qp(qp, &attr,
                         IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                             IBV_QP_MAX_QP_RD_ATOMIC),
          "RTS");
}

/* Executes one request and waits for it. */
static void transfer(struct ibv_qp *qp, struct ibv_cq *cq, enum ibv_wr_opcode opcode, struct ibv_mr *buffer, uint64_t va,
                     uint32_t length)
{
    struct ibv_sge sge = {.addr = (uintptr_t)buffer->addr, .length = length, .lkey = buffer->lkey};
    struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = opcode, .send_flags = IBV_SEND_SIGNALED}, *bad;
    struct ibv_wc wc;
    int count;
    wr.wr.rdma.remote_addr = va;
    wr.wr.rdma.rkey = swap.mr->rkey;
    check(!ibv_post_send(qp, &wr, &bad), "ibv_post_send");
    while ((count = ibv_poll_cq(cq, 1, &wc)) == 0)
        ;
    if (count < 0 || wc.status != IBV_WC_SUCCESS) {
        fprintf(stderr, "own_swap: %s\n", count < 0 ? "ibv_poll_cq" : ibv_wc_status_str(wc.status));
        exit(1);
    }
}

int main(int argc, char **argv)
{
    double seconds = argc > 1 ? atof(argv[1]) : 1;
    int count;
    struct ibv_device **list = ibv_get_device_list(&count);
    check(list && count > 0, "no RDMA device");
    struct ibv_context *context = ibv_open_device(list[0]);
    check(context, "ibv_open_device");
    /* Other libraries do not have them. */
    reg_swapped_mr = (__typeof__(reg_swapped_mr))dlsym(RTLD_DEFAULT, "terrace_reg_swapped_mr");
    swap_out = (__typeof__(swap_out))dlsym(RTLD_DEFAULT, "terrace_swap_out");
    swap_in = (__typeof__(swap_in))dlsym(RTLD_DEFAULT, "terrace_swap_in");
    check(reg_swapped_mr && swap_out && swap_in, "this is not Terrace's libibverbs");
    struct ibv_pd *pd = ibv_alloc_pd(context);
    struct ibv_cq *cq = ibv_create_cq(context, 16, NULL, NULL, 0);
    check(pd && cq, "objects");
    struct ibv_qp_init_attr init = {.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC};
    init.cap = (struct ibv_qp_cap){.max_send_wr = 8, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1};
    struct ibv_qp *left = ibv_create_qp(pd, &init), *right = ibv_create_qp(pd, &init);
    union ibv_gid gid;
    check(left && right && !ibv_query_gid(context, IB_PORT, 0, &gid), "queue pairs");
    connect_pair(left, right, &gid);
    connect_pair(right, left, &gid);

    char name[] = "/var/tmp/own_swap.XXXXXX";
    swap.file = mkstemp(name);
    check(swap.file >= 0 && !unlink(name) && !ftruncate(swap.file, PAGES * PAGE), "a swap file");
    swap.memory = mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    check(swap.memory != MAP_FAILED, "mmap");
    for (int page = 0; page < PAGES; page++)
        swap.is_present[page] = true;
    swap.present_count = PAGES;
    int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;
    swap.mr = reg_swapped_mr(pd, swap.memory, PAGES * PAGE, access, bring, NULL);
    check(swap.mr, "terrace_reg_swapped_mr");
    static unsigned char buffer[4 * PAGE], shadow[PAGES * PAGE];
    struct ibv_mr *buffer_mr = ibv_reg_mr(pd, buffer, sizeof buffer, IBV_ACCESS_LOCAL_WRITE);
    check(buffer_mr, "ibv_reg_mr");
    pthread_t thread;
    check(!pthread_create(&thread, NULL, swapper, NULL), "pthread_create");

    unsigned long requests = 0;
    struct timespec begin, now;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    do {
        uint32_t length = 1 + rand() % sizeof buffer, at = rand() % (PAGES * PAGE - length);
        uint64_t va = (uintptr_t)swap.memory + at;
        if (rand() % 2) {
            for (uint32_t index = 0; index < length; index++)
                shadow[at + index] = buffer[index] = rand();
            transfer(left, cq, IBV_WR_RDMA_WRITE, buffer_mr, va, length);
        } else {
            memset(buffer, 0xee, length);
            transfer(left, cq, IBV_WR_RDMA_READ, buffer_mr, va, length);
            if (memcmp(buffer, shadow + at, length)) {
                fprintf(stderr, "own_swap: wrong bytes at %u\n", at);
                return 1;
            }
        }
        requests++;
        clock_gettime(CLOCK_MONOTONIC, &now);
    } while (now.tv_sec - begin.tv_sec + (now.tv_nsec - begin.tv_nsec) * 1e-9 < seconds);

    pthread_mutex_lock(&swap.lock);
    swap.is_over = true;
    pthread_cond_signal(&swap.changed);
    pthread_mutex_unlock(&swap.lock);
    pthread_join(thread, NULL);
    check(!ibv_destroy_qp(left) && !ibv_destroy_qp(right), "ibv_destroy_qp");
    check(!ibv_dereg_mr(buffer_mr) && !ibv_dereg_mr(swap.mr), "ibv_dereg_mr");
    check(!ibv_destroy_cq(cq) && !ibv_dealloc_pd(pd) && !ibv_close_device(context), "the end");
    printf("%lu requests, %lu pages out, %lu in\n", requests, swap.out_count, swap.in_count);
    return swap.out_count > 0 && swap.in_count > 0 ? 0 : 1;
}
