/*
 * regions: memory regions that are files beside ordinary ones: registration, memory, rates of READs.
 *
 *     regions sizes DIR           registrations of 4 KiB to 64 GiB (figure 6 of FileMR)
 *     regions every DIR           registers every file below DIR (figure 7)
 *     regions many COUNT DIR      registers COUNT files of 4 KiB at the same time, and tells their memory
 *     regions rates DIR           READs of a file and of ordinary memory by one queue pair: a turn for each line of the standard
 *                                 input, "memory BYTES DEPTH" or "file BYTES DEPTH"
 *
 * Prints a JSON object per line. Run it by `terrace run`. `pinned` is what a driver does at least that pins pages: mlock.
 *
 * Build:  make build/bench/filemr/regions
 */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define RDMA_CORE_BEFORE_60
#include <terrace.h>

#include "../times.h"

enum {
    IB_PORT = 1,
    ALL = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE,
    REGISTRATIONS = 101, /* of each size and kind; the median counts */
    PINNED = 5,
    DEPTH = 16,
    TURN_US = 100 * 1000,
    RATE_BYTES = 64 << 20,
    READ_BYTES_MAX = 64 << 10,
};

static const uint64_t PINNED_MAX = 4ull << 30; /* an RNIC's limit is the memory of the machine; so is ours */

static void die(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fprintf(stderr, "regions: ");
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    exit(1);
}

struct nic {
    struct ibv_context *context;
    struct ibv_pd *pd;
    struct ibv_mr *(*register_file)(struct ibv_pd *, struct ibv_mr_init_attr *);
};

static struct nic open_nic(void)
{
    struct nic nic = {.register_file = dlsym(RTLD_DEFAULT, "ibv_reg_mr_ex")};
    if (nic.register_file == NULL)
        die("this libibverbs has no ibv_reg_mr_ex: run the program by `terrace run`");
    struct ibv_device **list = ibv_get_device_list(NULL);
    if (list == NULL || list[0] == NULL)
        die("no RDMA device on this machine");
    nic.context = ibv_open_device(list[0]);
    nic.pd = nic.context == NULL ? NULL : ibv_alloc_pd(nic.context);
    if (nic.pd == NULL)
        die("cannot open the device: %s", strerror(errno));
    ibv_free_device_list(list);
    return nic;
}

static struct ibv_mr *register_file(const struct nic *nic, int fd)
{
    struct ibv_mr_init_attr attr = {.length = UINT64_MAX, .access = ALL, .comp_mask = IBV_REG_MR_MASK_FD, .fd = fd};
    struct ibv_mr *mr = nic->register_file(nic->pd, &attr);
    if (mr == NULL)
        die("cannot register a file: %s", strerror(errno));
    return mr;
}

static struct ibv_mr *register_memory(const struct nic *nic, void *memory, uint64_t bytes)
{
    struct ibv_mr *mr = ibv_reg_mr(nic->pd, memory, bytes, ALL);
    if (mr == NULL)
        die("cannot register memory: %s", strerror(errno));
    return mr;
}

static int new_file(const char *directory, uint64_t bytes)
{
    int fd = open(directory, O_TMPFILE | O_RDWR, 0600);
    if (fd < 0 || ftruncate(fd, (off_t)bytes) != 0)
        die("cannot create a file in %s: %s", directory, strerror(errno));
    return fd;
}

static void *map(uint64_t bytes, int flags, int fd)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
    if (memory == MAP_FAILED)
        die("cannot map %llu bytes: %s", (unsigned long long)bytes, strerror(errno));
    return memory;
}

static void print_size(const char *kind, uint64_t bytes, double *times, int count)
{
    qsort(times, (size_t)count, sizeof times[0], ascending);
    printf("{\"kind\": \"%s\", \"bytes\": %llu, \"median_us\": %.2f}\n", kind, (unsigned long long)bytes, times[count / 2]);
}

/* The time to have the pages of fresh memory and to keep them, which a driver needs that pins them. */
static void measure_pinned(uint64_t bytes)
{
    double times[PINNED];
    for (int i = 0; i < PINNED; i++) {
        void *memory = map(bytes, MAP_PRIVATE | MAP_ANONYMOUS, -1);
        madvise(memory, bytes, MADV_NOHUGEPAGE);
        double start = microseconds_now();
        if (mlock(memory, bytes) != 0)
            die("cannot lock %llu bytes: %s", (unsigned long long)bytes, strerror(errno));
        times[i] = microseconds_now() - start;
        munmap(memory, bytes);
    }
    print_size("pinned", bytes, times, PINNED);
}

static void measure_sizes(const char *directory)
{
    struct nic nic = open_nic();
    for (uint64_t bytes = 4096; bytes <= 64ull << 30; bytes *= 16) {
        double times[REGISTRATIONS];
        int fd = new_file(directory, bytes);
        for (int i = 0; i < REGISTRATIONS; i++) {
            double start = microseconds_now();
            struct ibv_mr *mr = register_file(&nic, fd);
            times[i] = microseconds_now() - start;
            ibv_dereg_mr(mr);
        }
        close(fd);
        print_size("file", bytes, times, REGISTRATIONS);
        void *memory = map(bytes, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1);
        for (int i = 0; i < REGISTRATIONS; i++) {
            double start = microseconds_now();
            struct ibv_mr *mr = register_memory(&nic, memory, bytes);
            times[i] = microseconds_now() - start;
            ibv_dereg_mr(mr);
        }
        munmap(memory, bytes);
        print_size("memory", bytes, times, REGISTRATIONS);
        if (bytes <= PINNED_MAX)
            measure_pinned(bytes);
    }
}

static struct {
    struct nic nic;
    bool is_pinned;
    uint64_t files, bytes;
    double us;
} every;

/* Registers a file as a region, or its pages as a driver would that pins them: mapped, read and locked. */
static int visit(const char *path, const struct stat *status, int type, struct FTW *walk)
{
    (void)walk;
    if (type != FTW_F || !S_ISREG(status->st_mode) || status->st_size == 0)
        return 0;
    uint64_t bytes = (uint64_t)status->st_size;
    int fd = open(path, O_RDWR);
    if (fd < 0)
        die("cannot open %s: %s", path, strerror(errno));
    double start = microseconds_now();
    if (every.is_pinned) {
        void *memory = map(bytes, MAP_SHARED, fd);
        if (mlock(memory, bytes) != 0)
            die("cannot lock %s: %s", path, strerror(errno));
        struct ibv_mr *mr = register_memory(&every.nic, memory, bytes);
        every.us += microseconds_now() - start;
        ibv_dereg_mr(mr);
        munmap(memory, bytes);
    } else {
        struct ibv_mr *mr = register_file(&every.nic, fd);
        every.us += microseconds_now() - start;
        ibv_dereg_mr(mr);
    }
    close(fd);
    every.files++;
    every.bytes += bytes;
    return 0;
}

static void measure_every(const char *directory)
{
    every.nic = open_nic();
    for (int is_pinned = 0; is_pinned <= 1; is_pinned++) {
        every.is_pinned = is_pinned;
        every.files = every.bytes = 0;
        every.us = 0;
        if (nftw(directory, visit, 16, FTW_PHYS) != 0)
            die("cannot read %s: %s", directory, strerror(errno));
        printf("{\"kind\": \"%s\", \"files\": %llu, \"bytes\": %llu, \"us\": %.1f}\n", is_pinned ? "pinned" : "file",
               (unsigned long long)every.files, (unsigned long long)every.bytes, every.us);
    }
}

/* Bytes of the process's own memory: neither the pages of files nor what other processes have. */
static uint64_t own_bytes(void)
{
    char line[256];
    uint64_t kib = 0, found;
    FILE *status = fopen("/proc/self/status", "r");
    while (status != NULL && fgets(line, sizeof line, status) != NULL)
        if (sscanf(line, "RssAnon: %lu", &found) == 1 || sscanf(line, "RssShmem: %lu", &found) == 1)
            kib += found;
    if (status == NULL || fclose(status) != 0)
        die("cannot read /proc/self/status");
    return kib << 10;
}

static void measure_many(int count, const char *directory)
{
    struct nic nic = open_nic();
    struct rlimit limit = {.rlim_cur = 20000, .rlim_max = 20000};
    if (setrlimit(RLIMIT_NOFILE, &limit) != 0)
        die("cannot limit descriptors: %s", strerror(errno));
    struct ibv_mr **regions = calloc((size_t)count, sizeof *regions);
    if (regions == NULL)
        die("no memory");
    memset(regions, 1, (size_t)count * sizeof *regions); /* its pages are not the regions' */
    uint64_t before = own_bytes();
    double us = 0;
    for (int i = 0; i < count; i++) {
        int fd = new_file(directory, 4096);
        double start = microseconds_now();
        regions[i] = register_file(&nic, fd);
        us += microseconds_now() - start;
        close(fd);
    }
    printf("{\"files\": %d, \"us\": %.2f, \"own_bytes\": %llu}\n", count, us / count,
           (unsigned long long)(own_bytes() - before));
}

/* What the client has to know of the server, and the server of the client. */
struct end {
    union ibv_gid gid;
    uint32_t qpn;
    struct {
        uint64_t addr;
        uint32_t rkey;
    } regions[2];
};

static const char *KINDS[2] = {"memory", "file"};

static struct ibv_qp *create_qp(const struct nic *nic, struct ibv_cq *cq, struct end *own)
{
    struct ibv_qp_init_attr init = {
        .send_cq = cq,
        .recv_cq = cq,
        .cap = {.max_send_wr = DEPTH, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1},
        .qp_type = IBV_QPT_RC,
        .sq_sig_all = 1,
    };
    struct ibv_qp *qp = ibv_create_qp(nic->pd, &init);
    if (qp == NULL || ibv_query_gid(nic->context, IB_PORT, 0, &own->gid) != 0)
        die("cannot create a queue pair: %s", strerror(errno));
    own->qpn = qp->qp_num;
    return qp;
}

static void connect_qp(const struct nic *nic, struct ibv_qp *qp, const struct end *peer)
{
    struct ibv_port_attr port;
    struct ibv_qp_attr init = {.qp_state = IBV_QPS_INIT, .port_num = IB_PORT, .qp_access_flags = IBV_ACCESS_REMOTE_READ};
    struct ibv_qp_attr rts = {
        .qp_state = IBV_QPS_RTS, .timeout = 17, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = DEPTH};
    if (ibv_query_port(nic->context, IB_PORT, &port) != 0)
        die("cannot query the port: %s", strerror(errno));
    struct ibv_qp_attr rtr = {
        .qp_state = IBV_QPS_RTR,
        .path_mtu = port.active_mtu,
        .dest_qp_num = peer->qpn,
        .max_dest_rd_atomic = DEPTH,
        .min_rnr_timer = 12,
        .ah_attr = {.port_num = IB_PORT, .is_global = 1, .grh = {.dgid = peer->gid, .hop_limit = 64}}};
    if (ibv_modify_qp(qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) != 0 ||
        ibv_modify_qp(qp, &rtr,
                      IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                          IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER) != 0 ||
        ibv_modify_qp(qp, &rts,
                      IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                          IBV_QP_MAX_QP_RD_ATOMIC) != 0)
        die("cannot connect the queue pair: %s", strerror(errno));
}

static void exchange(int peer, const struct end *own, struct end *other)
{
    if (send(peer, own, sizeof *own, MSG_NOSIGNAL) != sizeof *own ||
        recv(peer, other, sizeof *other, MSG_WAITALL) != sizeof *other)
        die("the other end is gone");
}

/* The content of 8 bytes of either region. */
static uint64_t word_at(uint64_t offset)
{
    return (offset + 1) * 0x9e3779b97f4a7c15;
}

static void serve(int peer, const char *directory)
{
    struct nic nic = open_nic();
    struct end own = {0}, client;
    int fds[2] = {memfd_create("regions", MFD_CLOEXEC), new_file(directory, RATE_BYTES)};
    for (int kind = 0; kind < 2; kind++) {
        if (ftruncate(fds[kind], RATE_BYTES) != 0)
            die("cannot size a file: %s", strerror(errno));
        uint64_t *words = map(RATE_BYTES, MAP_SHARED, fds[kind]);
        for (uint64_t i = 0; i < RATE_BYTES / 8; i++)
            words[i] = word_at(8 * i);
        struct ibv_mr *mr = kind == 0 ? register_memory(&nic, words, RATE_BYTES) : register_file(&nic, fds[1]);
        own.regions[kind].addr = kind == 0 ? (uintptr_t)words : 0;
        own.regions[kind].rkey = mr->rkey;
    }
    struct ibv_cq *cq = ibv_create_cq(nic.context, DEPTH, NULL, NULL, 0);
    struct ibv_qp *qp = create_qp(&nic, cq, &own);
    exchange(peer, &own, &client);
    connect_qp(&nic, qp, &client);
    exchange(peer, &own, &client); /* connected */
    char end;
    (void)!recv(peer, &end, 1, 0); /* until the client ends */
}

struct client {
    struct ibv_qp *qp;
    struct ibv_cq *cq;
    struct ibv_mr *mr;
    uint8_t *buffer;
    struct end server;
    uint64_t seed;
};

static void post_read(struct client *client, int kind, uint32_t bytes, uint64_t slot, uint64_t *offset)
{
    client->seed = client->seed * 6364136223846793005u + 1442695040888963407u;
    *offset = (client->seed >> 20) % (RATE_BYTES / bytes) * bytes;
    struct ibv_sge sge = {
        .addr = (uintptr_t)client->buffer + slot * bytes, .length = bytes, .lkey = client->mr->lkey};
    struct ibv_send_wr wr = {.wr_id = slot, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_READ}, *bad;
    wr.wr.rdma.remote_addr = client->server.regions[kind].addr + *offset;
    wr.wr.rdma.rkey = client->server.regions[kind].rkey;
    if (ibv_post_send(client->qp, &wr, &bad) != 0)
        die("cannot post a READ: %s", strerror(errno));
}

/* READs for a turn's time. Returns READs per second. The first and the last word of each answer are compared. */
static double run_turn(struct client *client, int kind, uint32_t bytes, int depth)
{
    uint64_t offsets[DEPTH], count = 0;
    double start = microseconds_now(), end = start + TURN_US, now = start;
    for (int slot = 0; slot < depth; slot++)
        post_read(client, kind, bytes, (uint64_t)slot, &offsets[slot]);
    for (int open = depth; open > 0;) {
        struct ibv_wc completions[DEPTH];
        int found = ibv_poll_cq(client->cq, DEPTH, completions);
        for (int i = 0; i < found; i++) {
            uint64_t slot = completions[i].wr_id, first, last;
            if (completions[i].status != IBV_WC_SUCCESS)
                die("a READ of the %s failed: %s", KINDS[kind], ibv_wc_status_str(completions[i].status));
            memcpy(&first, client->buffer + slot * bytes, 8);
            memcpy(&last, client->buffer + (slot + 1) * bytes - 8, 8);
            if (first != word_at(offsets[slot]) || last != word_at(offsets[slot] + bytes - 8))
                die("a READ of the %s got wrong bytes", KINDS[kind]);
            count++;
            now = count % 64 == 0 ? microseconds_now() : now;
            if (now < end)
                post_read(client, kind, bytes, slot, &offsets[slot]);
            else
                open--;
        }
    }
    return (double)count * 1e6 / (microseconds_now() - start);
}

static void measure_rates(const char *directory)
{
    int sockets[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) != 0)
        die("no socket: %s", strerror(errno));
    pid_t server = fork();
    if (server == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        close(sockets[0]);
        serve(sockets[1], directory);
        exit(0);
    }
    close(sockets[1]);
    struct nic nic = open_nic();
    struct client client = {.cq = ibv_create_cq(nic.context, DEPTH, NULL, NULL, 0), .seed = 42};
    struct end own = {0};
    client.buffer = map(DEPTH * READ_BYTES_MAX, MAP_SHARED | MAP_ANONYMOUS, -1);
    client.mr = register_memory(&nic, client.buffer, DEPTH * READ_BYTES_MAX);
    client.qp = create_qp(&nic, client.cq, &own);
    exchange(sockets[0], &own, &client.server);
    connect_qp(&nic, client.qp, &client.server);
    exchange(sockets[0], &own, &client.server);
    puts("{}");
    fflush(stdout);
    char line[64], kind[8];
    while (fgets(line, sizeof line, stdin) != NULL) {
        uint32_t bytes;
        int depth;
        bool is_valid = sscanf(line, "%7s %u %d", kind, &bytes, &depth) == 3 && bytes >= 8 && bytes <= READ_BYTES_MAX && depth >= 1 && depth <= DEPTH;
        if (!is_valid || (strcmp(kind, KINDS[0]) != 0 && strcmp(kind, KINDS[1]) != 0))
            die("not a turn: %s", line);
        printf("{\"per_s\": %.0f}\n", run_turn(&client, strcmp(kind, KINDS[1]) == 0, bytes, depth));
        fflush(stdout);
    }
    close(sockets[0]);
    waitpid(server, NULL, 0);
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "sizes") == 0)
        measure_sizes(argv[2]);
    else if (argc == 3 && strcmp(argv[1], "every") == 0)
        measure_every(argv[2]);
    else if (argc == 4 && strcmp(argv[1], "many") == 0)
        measure_many(atoi(argv[2]), argv[3]);
    else if (argc == 3 && strcmp(argv[1], "rates") == 0)
        measure_rates(argv[2]);
    else {
        fprintf(stderr, "usage: regions sizes DIR | every DIR | many COUNT DIR | rates DIR\n");
        return 2;
    }
    return 0;
}
