/*
 * many: many busy queue pairs and memory regions in many processes, with every byte verified.
 *
 *     many [-p PROCESSES] [-q QUEUE PAIRS] [-m REGIONS] [-d DEPTH] [-b BYTES] [-t SECONDS] [-T THREADS] [-e] [-i]
 *
 * Starts PROCESSES (an even number) with this many queue pairs and regions each. Queue pair j of a process is connected to
 * queue pair j of another one. The partners change from j to j + 1, so that with enough queue pairs every process is
 * connected to every other. A queue pair has DEPTH round trips in flight: a WRITE of BYTES of new data into the partner's
 * memory, and a READ that fetches them back for comparison. The slots are in all regions of the partner, so that all keys
 * are used. With -e threads sleep on completion events instead of polling. With -i no work requests are posted, to measure
 * idle processes.
 *
 * Prints a JSON object after the work, waits for the end of standard input (so that the processes can be inspected), and
 * prints another one about the destruction. Status 0 without errors.
 *
 * Build:  cc -O2 -D_GNU_SOURCE -o many many.c -libverbs -lpthread
 */
#include <dirent.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <infiniband/verbs.h>

enum { PORT = 1, PSN = 0xffff00, POLL_MAX = 64, READS_MAX = 16, PROCESSES_MAX = 128, TIMEOUT_S = 60 };

static const unsigned ACCESS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;

static struct {
    unsigned processes, pairs, regions, depth, bytes, threads;
    double seconds;
    bool events, idle;
} options = {.processes = 2, .pairs = 1, .regions = 1, .depth = 4, .bytes = 256, .threads = 1, .seconds = 2};

/* The results of a process. The parent prints sums or maxima. */
struct result {
    pid_t pid;
    double register_us, create_us, connect_us, destroy_us, deregister_us; /* each */
    double region_bytes, pair_bytes;                                      /* of resident memory, each */
    double cpu_s, seconds;
    uint64_t round_trips, slowest_pair, wrong;
    unsigned descriptors_before, descriptors, threads;
    uint64_t resident_bytes;
};

/* The shared memory of all processes. */
struct shared {
    atomic_uint arrived;
    atomic_bool failed;
    union ibv_gid gid[PROCESSES_MAX];
    uint64_t base[PROCESSES_MAX]; /* address of the slots that partners write to */
    struct result results[PROCESSES_MAX];
    uint32_t numbers[]; /* of the queue pairs of each process, then the keys of the regions of each process */
};

static struct shared *shared;
static unsigned self;

static void die(const char *what)
{
    fprintf(stderr, "many: process %u: %s (errno: %s)\n", self, what, strerror(errno));
    if (shared != NULL)
        shared->failed = true;
    exit(1);
}

static double seconds_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* ---- process state ---------------------------------------------------------------------------------------------- */

static uint64_t resident_bytes(void)
{
    unsigned long total = 0, resident = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (file == NULL || fscanf(file, "%lu %lu", &total, &resident) != 2)
        die("no /proc/self/statm");
    fclose(file);
    return (uint64_t)resident * (uint64_t)sysconf(_SC_PAGESIZE);
}

static unsigned entries(const char *directory)
{
    unsigned count = 0;
    DIR *opened = opendir(directory);
    while (opened != NULL && readdir(opened) != NULL)
        count++;
    if (opened != NULL)
        closedir(opened);
    return count;
}

static double cpu_seconds(void)
{
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
           (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1e-6;
}

/* The nth barrier of all processes. */
static void barrier(unsigned nth)
{
    double start = seconds_now();
    shared->arrived++;
    while (shared->arrived < nth * options.processes) {
        if (shared->failed || seconds_now() - start > TIMEOUT_S + options.seconds)
            die("other processes do not reach the barrier");
        usleep(200);
    }
}

/* ---- connections and slots -------------------------------------------------------------------------------------- */

/* The process at the other end of queue pair `pair`, by the schedule of a round-robin tournament. */
static unsigned partner(unsigned process, unsigned pair)
{
    unsigned others = options.processes - 1, round = pair % others;
    if (process == others)
        return round * (others + 1) / 2 % others; /* the process without a partner in this round: 2x = round */
    unsigned other = (round + others - process) % others;
    return other == process ? others : other;
}

static unsigned slots_per_pair(void)
{
    unsigned needed = (options.regions + options.pairs - 1) / options.pairs;
    return needed > options.depth ? needed : options.depth;
}

static unsigned slot_count(void)
{
    return slots_per_pair() * options.pairs;
}

/* The first slot of a region. */
static uint64_t first_slot(uint64_t region)
{
    return region * slot_count() / options.regions;
}

static unsigned region_of(uint64_t slot)
{
    uint64_t region = slot * options.regions / slot_count();
    while (region + 1 < options.regions && first_slot(region + 1) <= slot)
        region++;
    return (unsigned)region;
}

static uint32_t *numbers_of(unsigned process)
{
    return shared->numbers + (size_t)process * options.pairs;
}

static uint32_t *keys_of(unsigned process)
{
    return shared->numbers + (size_t)options.processes * options.pairs + (size_t)process * options.regions;
}

/* ---- the work --------------------------------------------------------------------------------------------------- */

struct pair {
    struct ibv_qp *qp;
    unsigned peer, next_slot;
    uint64_t round_trips, posted;
    uint64_t *slot_of, *seed_of; /* by entry of the queue */
};

struct worker {
    pthread_t thread;
    struct ibv_comp_channel *channel;
    struct ibv_cq *cq;
    unsigned index, in_flight;
    uint64_t wrong;
};

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_mr **regions, *own_mr;
static uint8_t *slots, *own; /* target of the partners' WRITEs; source of WRITEs and target of READs */
static struct pair *pairs;
static struct worker *workers;
static atomic_bool stop;

static uint64_t mix(uint64_t value)
{
    value = (value + 0x9e3779b97f4a7c15u) * 0xbf58476d1ce4e5b9u;
    return value ^ value >> 29;
}

static uint64_t *buffer_of(unsigned pair, unsigned entry, bool back)
{
    size_t index = ((size_t)pair * options.depth + entry) * 2 + back;
    return (uint64_t *)(own + index * options.bytes);
}

static void post(struct worker *worker, unsigned index, unsigned entry)
{
    struct pair *pair = &pairs[index];
    uint64_t slot = (uint64_t)pair->next_slot * options.pairs + index, seed = mix(((uint64_t)self << 48 | pair->posted << 16) + index);
    uint64_t *out = buffer_of(index, entry, false), *back = buffer_of(index, entry, true);
    for (unsigned i = 0; i < options.bytes / 8; i++)
        out[i] = mix(seed + i);
    uint64_t remote = shared->base[pair->peer] + slot * options.bytes;
    uint32_t rkey = keys_of(pair->peer)[region_of(slot)];
    struct ibv_sge sges[] = {{(uintptr_t)out, options.bytes, own_mr->lkey}, {(uintptr_t)back, options.bytes, own_mr->lkey}};
    struct ibv_send_wr read = {.wr_id = (uint64_t)index << 16 | entry, .sg_list = &sges[1], .num_sge = 1,
                               .opcode = IBV_WR_RDMA_READ, .send_flags = IBV_SEND_SIGNALED,
                               .wr.rdma = {remote, rkey}};
    struct ibv_send_wr write = {.next = &read, .sg_list = &sges[0], .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
                                .wr.rdma = {remote, rkey}}, *bad;
    if (ibv_post_send(pair->qp, &write, &bad) != 0)
        die("posting failed");
    pair->next_slot = (pair->next_slot + 1) % slots_per_pair();
    pair->seed_of[entry] = seed;
    pair->posted++;
    worker->in_flight++;
}

static void complete(struct worker *worker, const struct ibv_wc *wc)
{
    unsigned index = (unsigned)(wc->wr_id >> 16), entry = wc->wr_id & 0xffff;
    if (wc->status != IBV_WC_SUCCESS) {
        fprintf(stderr, "many: process %u: queue pair %u: %s\n", self, index, ibv_wc_status_str(wc->status));
        die("a request failed");
    }
    struct pair *pair = &pairs[index];
    worker->in_flight--;
    pair->round_trips++;
    uint64_t *back = buffer_of(index, entry, true);
    for (unsigned i = 0; i < options.bytes / 8; i++)
        worker->wrong += back[i] != mix(pair->seed_of[entry] + i);
    if (!stop)
        post(worker, index, entry);
}

/* Sleeps until there are completions. */
static void await_event(struct worker *worker)
{
    struct ibv_cq *cq;
    void *unused;
    struct pollfd waiting = {.fd = worker->channel->fd, .events = POLLIN};
    if (poll(&waiting, 1, 1000) == 1 && ibv_get_cq_event(worker->channel, &cq, &unused) == 0)
        ibv_ack_cq_events(cq, 1);
}

static void *work(void *argument)
{
    struct worker *worker = argument;
    struct ibv_wc wcs[POLL_MAX];
    double last_completion = seconds_now();
    for (unsigned entry = 0; entry < options.depth; entry++)
        for (unsigned index = worker->index; index < options.pairs; index += options.threads)
            post(worker, index, entry);
    bool armed = false;
    while (worker->in_flight > 0) {
        int got = ibv_poll_cq(worker->cq, POLL_MAX, wcs);
        if (got < 0)
            die("polling failed");
        for (int i = 0; i < got; i++)
            complete(worker, &wcs[i]);
        if (got > 0) {
            last_completion = seconds_now();
        } else if (seconds_now() - last_completion > TIMEOUT_S) {
            die("a request does not complete");
        } else if (options.events && armed) {
            await_event(worker);
            armed = false;
        } else if (options.events) {
            if (ibv_req_notify_cq(worker->cq, 0) != 0)
                die("no events");
            armed = true;
        }
    }
    return NULL;
}

/* ---- setup ------------------------------------------------------------------------------------------------------ */

static uint8_t *map(size_t bytes)
{
    uint8_t *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (memory == MAP_FAILED)
        die("no memory");
    return memory;
}

static void open_device(void)
{
    struct ibv_device **list = ibv_get_device_list(NULL);
    context = list == NULL || list[0] == NULL ? NULL : ibv_open_device(list[0]);
    if (context == NULL || (pd = ibv_alloc_pd(context)) == NULL || ibv_query_gid(context, PORT, 0, &shared->gid[self]) != 0)
        die("no device");
    ibv_free_device_list(list);
    size_t own_bytes = (size_t)options.pairs * options.depth * 2 * options.bytes;
    slots = map((size_t)slot_count() * options.bytes);
    own = map(own_bytes);
    own_mr = ibv_reg_mr(pd, own, own_bytes, IBV_ACCESS_LOCAL_WRITE);
    if (own_mr == NULL)
        die("no region");
    shared->base[self] = (uintptr_t)slots;
}

static void register_regions(struct result *result)
{
    uint64_t before = resident_bytes();
    double start = seconds_now();
    for (unsigned i = 0; i < options.regions; i++) {
        uint64_t first = first_slot(i), count = first_slot(i + 1) - first;
        regions[i] = ibv_reg_mr(pd, slots + first * options.bytes, count * options.bytes, (int)ACCESS);
        if (regions[i] == NULL)
            die("no region");
        keys_of(self)[i] = regions[i]->rkey;
    }
    result->register_us = (seconds_now() - start) * 1e6 / options.regions;
    result->region_bytes = (double)(resident_bytes() - before) / options.regions;
}

static void create_pairs(struct result *result)
{
    for (unsigned i = 0; i < options.threads; i++) {
        unsigned entry_count = (options.pairs / options.threads + 1) * options.depth;
        workers[i].index = i;
        workers[i].channel = ibv_create_comp_channel(context);
        workers[i].cq = ibv_create_cq(context, (int)entry_count, NULL, workers[i].channel, 0);
        if (workers[i].cq == NULL)
            die("no completion queue");
    }
    uint64_t before = resident_bytes();
    double start = seconds_now();
    for (unsigned i = 0; i < options.pairs; i++) {
        struct ibv_cq *cq = workers[i % options.threads].cq;
        struct ibv_qp_init_attr init = {.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
                                        .cap = {.max_send_wr = options.depth * 2, .max_recv_wr = 1, .max_send_sge = 1,
                                                .max_recv_sge = 1}};
        pairs[i].qp = ibv_create_qp(pd, &init);
        if (pairs[i].qp == NULL)
            die("no queue pair");
        pairs[i].peer = partner(self, i);
        pairs[i].seed_of = calloc(options.depth, sizeof *pairs[i].seed_of);
        numbers_of(self)[i] = pairs[i].qp->qp_num;
    }
    result->create_us = (seconds_now() - start) * 1e6 / options.pairs;
    result->pair_bytes = (double)(resident_bytes() - before) / options.pairs;
}

static void modify(struct ibv_qp *qp, struct ibv_qp_attr *attr, enum ibv_qp_state state, int mask)
{
    attr->qp_state = state;
    int code = ibv_modify_qp(qp, attr, IBV_QP_STATE | mask);
    if (code != 0) {
        errno = code;
        die("a queue pair does not connect");
    }
}

static void connect_pairs(struct result *result)
{
    double start = seconds_now();
    uint8_t reads = options.depth < READS_MAX ? (uint8_t)options.depth : READS_MAX;
    for (unsigned i = 0; i < options.pairs; i++) {
        struct ibv_qp_attr attr = {
            .path_mtu = IBV_MTU_4096, .rq_psn = PSN, .sq_psn = PSN, .dest_qp_num = numbers_of(pairs[i].peer)[i],
            .qp_access_flags = ACCESS, .max_rd_atomic = reads, .max_dest_rd_atomic = reads, .min_rnr_timer = 12,
            .port_num = PORT, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7,
            .ah_attr = {.is_global = 1, .port_num = PORT, .grh = {.dgid = shared->gid[pairs[i].peer], .hop_limit = 64}},
        };
        modify(pairs[i].qp, &attr, IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
        modify(pairs[i].qp, &attr, IBV_QPS_RTR, IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
               IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
        modify(pairs[i].qp, &attr, IBV_QPS_RTS, IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
               IBV_QP_MAX_QP_RD_ATOMIC);
    }
    result->connect_us = (seconds_now() - start) * 1e6 / options.pairs;
}

static void destroy(struct result *result)
{
    double start = seconds_now();
    for (unsigned i = 0; i < options.pairs; i++)
        if (ibv_destroy_qp(pairs[i].qp) != 0)
            die("a queue pair cannot be destroyed");
    double between = seconds_now();
    for (unsigned i = 0; i < options.regions; i++)
        if (ibv_dereg_mr(regions[i]) != 0)
            die("a region cannot be deregistered");
    result->destroy_us = (between - start) * 1e6 / options.pairs;
    result->deregister_us = (seconds_now() - between) * 1e6 / options.regions;
    for (unsigned i = 0; i < options.threads; i++)
        if (ibv_destroy_cq(workers[i].cq) != 0 || ibv_destroy_comp_channel(workers[i].channel) != 0)
            die("a completion queue cannot be destroyed");
    if (ibv_dereg_mr(own_mr) != 0 || ibv_dealloc_pd(pd) != 0 || ibv_close_device(context) != 0)
        die("the device cannot be closed");
}

/* ---- processes -------------------------------------------------------------------------------------------------- */

static void run_work(struct result *result)
{
    double start = seconds_now(), cpu_before = cpu_seconds();
    for (unsigned i = 0; i < options.threads && !options.idle; i++)
        if (pthread_create(&workers[i].thread, NULL, work, &workers[i]) != 0)
            die("no thread");
    result->threads = entries("/proc/self/task") - 3 - (options.idle ? 0 : options.threads); /* ".", "..", this one */
    usleep((useconds_t)(options.seconds * 1e6));
    stop = true;
    for (unsigned i = 0; i < options.threads && !options.idle; i++) {
        pthread_join(workers[i].thread, NULL);
        result->wrong += workers[i].wrong;
    }
    result->seconds = seconds_now() - start;
    result->cpu_s = cpu_seconds() - cpu_before;
    result->slowest_pair = UINT64_MAX;
    for (unsigned i = 0; i < options.pairs; i++) {
        result->round_trips += pairs[i].round_trips;
        if (pairs[i].round_trips < result->slowest_pair)
            result->slowest_pair = pairs[i].round_trips;
    }
}

/* One of the processes. The first process closes `done` once the destruction may begin. */
static void run_process(int done)
{
    struct result *result = &shared->results[self];
    char unused;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    regions = calloc(options.regions, sizeof *regions);
    pairs = calloc(options.pairs, sizeof *pairs);
    workers = calloc(options.threads, sizeof *workers);
    result->pid = getpid();
    open_device();
    result->descriptors_before = entries("/proc/self/fd");
    register_regions(result);
    create_pairs(result);
    barrier(1);
    connect_pairs(result);
    result->descriptors = entries("/proc/self/fd");
    barrier(2);
    run_work(result);
    result->resident_bytes = resident_bytes();
    barrier(3);
    while (read(done, &unused, 1) > 0)
        ;
    destroy(result);
    exit(0);
}

static double sum_or_max(size_t offset, bool sum)
{
    double total = 0;
    for (unsigned i = 0; i < options.processes; i++) {
        double value = *(double *)((char *)&shared->results[i] + offset);
        total = sum ? total + value : value > total ? value : total;
    }
    return total;
}

#define LARGEST(field) sum_or_max(offsetof(struct result, field), false)

static void print_work(void)
{
    uint64_t round_trips = 0, wrong = 0, slowest = UINT64_MAX, resident = 0;
    unsigned descriptors = 0, threads = 0;
    printf("{\"pids\": [");
    for (unsigned i = 0; i < options.processes; i++) {
        const struct result *result = &shared->results[i];
        printf("%s%d", i == 0 ? "" : ", ", result->pid);
        round_trips += result->round_trips, wrong += result->wrong;
        slowest = result->slowest_pair < slowest ? result->slowest_pair : slowest;
        resident = result->resident_bytes > resident ? result->resident_bytes : resident;
        descriptors = result->descriptors - result->descriptors_before;
        threads = result->threads;
    }
    printf("], \"round_trips\": %llu, \"wrong_words\": %llu, \"slowest_pair_round_trips\": %llu, \"seconds\": %.3f, "
           "\"cpu_s\": %.3f, \"register_us\": %.3f, \"region_bytes\": %.0f, \"create_us\": %.3f, \"connect_us\": %.3f, "
           "\"pair_bytes\": %.0f, \"descriptors_of_objects\": %u, \"threads_of_library\": %u, \"resident_bytes_max\": %llu}\n",
           (unsigned long long)round_trips, (unsigned long long)wrong, (unsigned long long)slowest, LARGEST(seconds),
           sum_or_max(offsetof(struct result, cpu_s), true), LARGEST(register_us), LARGEST(region_bytes), LARGEST(create_us),
           LARGEST(connect_us), LARGEST(pair_bytes), descriptors, threads, (unsigned long long)resident);
    fflush(stdout);
}

static void parse(int argc, char **argv)
{
    int flag;
    while ((flag = getopt(argc, argv, "p:q:m:d:b:t:T:ei")) != -1) {
        unsigned value = optarg == NULL ? 0 : (unsigned)strtoul(optarg, NULL, 10);
        switch (flag) {
        case 'p': options.processes = value; break;
        case 'q': options.pairs = value; break;
        case 'm': options.regions = value; break;
        case 'd': options.depth = value; break;
        case 'b': options.bytes = value; break;
        case 't': options.seconds = strtod(optarg, NULL); break;
        case 'T': options.threads = value; break;
        case 'e': options.events = true; break;
        case 'i': options.idle = true; break;
        default: exit(2);
        }
    }
    bool right = options.processes >= 2 && options.processes <= PROCESSES_MAX && options.processes % 2 == 0 &&
                 options.pairs >= 1 && options.pairs < 1 << 16 && options.regions >= 1 && options.depth >= 1 &&
                 options.bytes >= 8 && options.bytes % 8 == 0 && options.threads >= 1;
    if (!right || optind != argc) {
        fprintf(stderr, "many: an even number of processes up to %d, bytes in multiples of 8, and no zeros\n", PROCESSES_MAX);
        exit(2);
    }
}

int main(int argc, char **argv)
{
    int done[2], status, failures = 0;
    char unused;
    parse(argc, argv);
    size_t bytes = sizeof *shared + sizeof(uint32_t) * options.processes * ((size_t)options.pairs + options.regions);
    shared = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED || pipe(done) != 0)
        die("no memory");
    for (self = 0; self < options.processes; self++) {
        pid_t child = fork();
        if (child < 0)
            die("no process");
        if (child == 0) {
            close(done[1]);
            run_process(done[0]);
        }
    }
    while (shared->arrived < 3 * options.processes && !shared->failed) {
        usleep(1000);
        if (waitpid(-1, &status, WNOHANG) > 0)
            die("a process has ended early");
    }
    if (!shared->failed) {
        print_work();
        while (read(0, &unused, 1) > 0)
            ;
    }
    close(done[1]);
    while (wait(&status) > 0)
        failures += status != 0;
    printf("{\"destroy_us\": %.3f, \"deregister_us\": %.3f}\n", LARGEST(destroy_us), LARGEST(deregister_us));
    for (unsigned i = 0; i < options.processes; i++)
        failures += shared->results[i].wrong != 0;
    return failures == 0 && !shared->failed ? 0 : 1;
}
