/*
 * worker: a process that puts mixed load on other workers, over links that the test creates and destroys. It checks all
 * data.
 *
 * The program uses plain verbs. A test controls it by lines of text, and gets one line for each: `ok` and results as
 * `name=value`. A link is a queue pair with its own region, and is named by a number. The test creates the link's other
 * end, too.
 *
 *     open [FILE]                      opens the device; with FILE, the peers' target is a mapping of FILE, registered
 *                                      with on-demand paging
 *     create LINK                      creates a link; returns qpn, addr and rkey for the peer
 *     connect LINK QPN ADDR RKEY MTU   connects a link to one of a process at the same address
 *     start LINK                       starts the load
 *     drain LINK                       ends the load, and waits for outstanding requests
 *     error LINK                       sets the error state with requests outstanding, and waits for their completions
 *     destroy LINK                     destroys a link; returns its counts, and its first status other than success
 *     report                           returns the counts of all links
 *
 * Each link keeps DEPTH operations outstanding. An operation is a WRITE (some with immediate) and a READ of the same
 * bytes, or an atomic operation, or a SEND. The result of the atomic operation is known because no other operation
 * changes that word. The peer checks the SEND. Messages are numbered, so that lost, duplicate and reordered ones are
 * detected. Odd links have their own completion queue. With -e the load's thread sleeps on completion events; otherwise
 * it polls. With -p it pauses so many microseconds between two polls.
 */
#include "env.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum {
    LINKS_MAX = 16,
    DEPTH = 4,
    RECEIVES = 8,
    MESSAGE_BYTES = 16 << 10,
    TARGET_BYTES = 512 << 10, /* the peer's memory for an operation: its counter, then data */
    LINK_BYTES = DEPTH * TARGET_BYTES,
    WORDS_MAX = 8,
    POLL_MAX = 32,
};

static const double TIMEOUT_S = 60.0;

/* The kind of the operation with this index of a link. */
enum kind { NONE, WRITE_AND_READ, ADD, SWAP, MESSAGE };

struct operation {
    enum kind kind;
    uint64_t seed, counter, expected;
    uint32_t bytes;
    double posted_at;
};

struct message {
    uint64_t number, bytes;
};

struct link {
    bool exists, loaded;
    unsigned index;
    struct ibv_cq *own_cq;
    struct ibv_qp *qp;
    struct ibv_mr *mr;
    uint32_t rkey;
    uint64_t remote;
    struct operation operations[DEPTH];
    unsigned receives_posted;
    uint64_t sent, received; /* numbers of the next messages */
    uint64_t ops, bytes, wrong;
    enum ibv_wc_status status; /* the first other than success */
};

static struct ibv_context *context;
static struct ibv_pd *pd;
static union ibv_gid gid;
static struct ibv_comp_channel *channel;
static struct ibv_cq *shared_cq;
static uint8_t *target, *own; /* written by peers; local buffers */
static struct ibv_mr *own_mr;
static int target_access = ENV_ACCESS & ~IBV_ACCESS_MW_BIND;
static struct link links[LINKS_MAX];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t completed = PTHREAD_COND_INITIALIZER;
static uint64_t random_state, total_ops, total_bytes, total_wrong, total_messages;
static double slowest_s;
static bool use_events;
static unsigned pause_us;
static char *words[WORDS_MAX];

/* ---- numbers and bytes ------------------------------------------------------------------------------------------ */

static uint64_t mix(uint64_t value)
{
    value += 0x9e3779b97f4a7c15u;
    value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9u;
    return value ^ value >> 31;
}

static uint64_t below(uint64_t limit)
{
    return mix(random_state++) % limit;
}

static void fill(uint8_t *bytes, size_t length, uint64_t seed)
{
    for (size_t i = 0; i < length; i += 8) {
        uint64_t word = mix(seed + i);
        memcpy(bytes + i, &word, length - i < 8 ? length - i : 8);
    }
}

static bool is_filled(const uint8_t *bytes, size_t length, uint64_t seed)
{
    for (size_t i = 0; i < length; i += 8) {
        uint64_t word = mix(seed + i);
        if (memcmp(bytes + i, &word, length - i < 8 ? length - i : 8) != 0)
            return false;
    }
    return true;
}

/* A local buffer of a link. Each operation has one to send from and one to read into; those of the receives follow. */
static uint8_t *buffer_of(const struct link *link, unsigned number)
{
    return own + ((size_t)link->index * (2 * DEPTH + RECEIVES) + number) * MESSAGE_BYTES;
}

static void report_error(struct link *link, const char *message)
{
    fprintf(stderr, "worker: link %u: %s\n", link->index, message);
    link->wrong++;
    total_wrong++;
}

/* ---- operations ------------------------------------------------------------------------------------------------- */

enum { RECEIVE = 1 << 8 }; /* a flag in wr_id, below the link's index */

static struct ibv_sge sge_of(uint8_t *at, uint32_t bytes)
{
    return (struct ibv_sge){(uintptr_t)at, bytes, own_mr->lkey};
}

static void post_receive(struct link *link, unsigned number)
{
    struct ibv_sge sge = sge_of(buffer_of(link, 2 * DEPTH + number), MESSAGE_BYTES);
    struct ibv_recv_wr wr = {.wr_id = (uint64_t)link->index << 16 | RECEIVE | number, .sg_list = &sge, .num_sge = 1}, *bad;
    if (ibv_post_recv(link->qp, &wr, &bad) != 0)
        die("a receive is not posted");
    link->receives_posted++;
}

static void post_message(struct link *link, unsigned slot, struct operation *operation, struct ibv_send_wr *wr)
{
    uint8_t *out = buffer_of(link, slot);
    struct message head = {link->sent++, sizeof head + below(MESSAGE_BYTES - sizeof head)};
    memcpy(out, &head, sizeof head);
    fill(out + sizeof head, head.bytes - sizeof head, head.number);
    operation->bytes = (uint32_t)head.bytes;
    struct ibv_sge sge = sge_of(out, operation->bytes);
    struct ibv_send_wr *bad;
    wr->opcode = IBV_WR_SEND, wr->sg_list = &sge;
    if (ibv_post_send(link->qp, wr, &bad) != 0)
        die("a SEND is not posted");
}

static void post_atomic(struct link *link, unsigned slot, struct operation *operation, struct ibv_send_wr *wr)
{
    struct ibv_sge sge = sge_of(buffer_of(link, DEPTH + slot), 8);
    struct ibv_send_wr *bad;
    operation->expected = operation->counter;
    operation->bytes = 8;
    operation->counter = operation->kind == ADD ? operation->counter + operation->seed : operation->seed;
    wr->opcode = operation->kind == ADD ? IBV_WR_ATOMIC_FETCH_AND_ADD : IBV_WR_ATOMIC_CMP_AND_SWP;
    wr->sg_list = &sge;
    wr->wr.atomic.remote_addr = link->remote + slot * TARGET_BYTES, wr->wr.atomic.rkey = link->rkey;
    wr->wr.atomic.compare_add = operation->kind == ADD ? operation->seed : operation->expected, wr->wr.atomic.swap = operation->seed;
    if (ibv_post_send(link->qp, wr, &bad) != 0)
        die("an atomic operation is not posted");
}

static void post_write_and_read(struct link *link, unsigned slot, struct operation *operation, struct ibv_send_wr *read)
{
    operation->bytes = 1 + (uint32_t)below(MESSAGE_BYTES);
    uint64_t remote = link->remote + slot * TARGET_BYTES + 8 + below(TARGET_BYTES - 8 - operation->bytes);
    struct ibv_sge out = sge_of(buffer_of(link, slot), operation->bytes), back = sge_of(buffer_of(link, DEPTH + slot), operation->bytes);
    fill(buffer_of(link, slot), operation->bytes, operation->seed);
    memset(buffer_of(link, DEPTH + slot), 0, operation->bytes);
    read->opcode = IBV_WR_RDMA_READ, read->sg_list = &back;
    read->wr.rdma.remote_addr = remote, read->wr.rdma.rkey = link->rkey;
    struct ibv_send_wr write = {.wr_id = read->wr_id, .next = read, .sg_list = &out, .num_sge = 1,
                                .opcode = IBV_WR_RDMA_WRITE, .wr.rdma = {remote, link->rkey}}, *bad;
    if (below(4) == 0) {
        write.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
        write.imm_data = htonl((uint32_t)link->sent++);
    }
    if (ibv_post_send(link->qp, &write, &bad) != 0)
        die("a WRITE and a READ are not posted");
}

static void post_operation(struct link *link, unsigned slot)
{
    static void (*const POST[])(struct link *, unsigned, struct operation *, struct ibv_send_wr *) = {
        [WRITE_AND_READ] = post_write_and_read, [ADD] = post_atomic, [SWAP] = post_atomic, [MESSAGE] = post_message,
    };
    static const enum kind KINDS[] = {WRITE_AND_READ, WRITE_AND_READ, WRITE_AND_READ, WRITE_AND_READ, ADD, SWAP, MESSAGE, MESSAGE};
    struct operation *operation = &link->operations[slot];
    struct ibv_send_wr wr = {.wr_id = (uint64_t)link->index << 16 | slot, .num_sge = 1, .send_flags = IBV_SEND_SIGNALED};
    operation->kind = KINDS[below(sizeof KINDS / sizeof KINDS[0])];
    operation->seed = mix(random_state++);
    operation->posted_at = seconds_now();
    POST[operation->kind](link, slot, operation, &wr);
}

static bool is_busy(const struct link *link)
{
    for (unsigned slot = 0; slot < DEPTH; slot++)
        if (link->operations[slot].kind != NONE)
            return true;
    return false;
}

/* ---- completions ------------------------------------------------------------------------------------------------ */

static void check_operation(struct link *link, unsigned slot)
{
    struct operation *operation = &link->operations[slot];
    const uint8_t *back = buffer_of(link, DEPTH + slot);
    uint64_t before;
    memcpy(&before, back, sizeof before);
    if (operation->kind == WRITE_AND_READ && !is_filled(back, operation->bytes, operation->seed))
        report_error(link, "a READ returned other bytes than the WRITE before it wrote");
    if ((operation->kind == ADD || operation->kind == SWAP) && before != operation->expected)
        report_error(link, "an atomic operation returned another value than the counter had");
    unsigned requests = operation->kind == WRITE_AND_READ ? 2 : 1;
    link->ops += requests, total_ops += requests;
    link->bytes += operation->bytes * requests, total_bytes += operation->bytes * requests;
    double elapsed = seconds_now() - operation->posted_at;
    slowest_s = elapsed > slowest_s ? elapsed : slowest_s;
}

static void check_received(struct link *link, const struct ibv_wc *wc, unsigned number)
{
    const uint8_t *at = buffer_of(link, 2 * DEPTH + number);
    struct message head;
    memcpy(&head, at, sizeof head);
    if ((wc->wc_flags & IBV_WC_WITH_IMM) != 0) {
        if (ntohl(wc->imm_data) != (uint32_t)link->received)
            report_error(link, "an immediate is out of order");
    } else if (head.number != link->received || head.bytes != wc->byte_len) {
        report_error(link, "a message is out of order");
    } else if (!is_filled(at + sizeof head, head.bytes - sizeof head, head.number)) {
        report_error(link, "a message's bytes are wrong");
    }
    link->received++;
    total_messages++;
}

static void complete(const struct ibv_wc *wc)
{
    struct link *link = &links[wc->wr_id >> 16];
    unsigned number = wc->wr_id & 0xff;
    if (!link->exists)
        die("a completion of a destroyed queue pair");
    if (wc->status != IBV_WC_SUCCESS) {
        link->status = link->status == IBV_WC_SUCCESS ? wc->status : link->status;
        link->loaded = false;
    }
    if ((wc->wr_id & RECEIVE) != 0) {
        link->receives_posted--;
        if (wc->status == IBV_WC_SUCCESS) {
            check_received(link, wc, number);
            post_receive(link, number);
        }
    } else {
        /* The WRITE of a pair completes with an entry only if it fails; its READ is then flushed. */
        if (wc->status == IBV_WC_SUCCESS)
            check_operation(link, number);
        link->operations[number].kind = NONE;
    }
    pthread_cond_broadcast(&completed);
}

static unsigned poll_all(void)
{
    struct ibv_wc wcs[POLL_MAX];
    unsigned total = 0;
    for (unsigned i = 0; i <= LINKS_MAX; i++) {
        struct ibv_cq *cq = i == LINKS_MAX ? shared_cq : links[i].exists ? links[i].own_cq : NULL;
        int got = cq == NULL ? 0 : ibv_poll_cq(cq, POLL_MAX, wcs);
        if (got < 0)
            die("polling failed");
        for (int j = 0; j < got; j++)
            complete(&wcs[j]);
        total += (unsigned)got;
    }
    return total;
}

static void arm_all(void)
{
    for (unsigned i = 0; i <= LINKS_MAX; i++) {
        struct ibv_cq *cq = i == LINKS_MAX ? shared_cq : links[i].exists ? links[i].own_cq : NULL;
        if (cq != NULL && ibv_req_notify_cq(cq, 0) != 0)
            die("no events");
    }
}

/* Takes all pending events. The caller has the lock, because a completion queue must not be destroyed with an
 * unacknowledged event. */
static void take_events(void)
{
    struct ibv_cq *cq;
    void *nothing;
    while (ibv_get_cq_event(channel, &cq, &nothing) == 0)
        ibv_ack_cq_events(cq, 1);
}

static void *load(void *argument)
{
    (void)argument;
    for (;;) {
        pthread_mutex_lock(&lock);
        unsigned got = poll_all();
        for (struct link *link = links; link < links + LINKS_MAX; link++)
            for (unsigned slot = 0; link->exists && link->loaded && slot < DEPTH; slot++)
                if (link->operations[slot].kind == NONE)
                    post_operation(link, slot);
        bool sleeps = use_events && got == 0;
        if (sleeps)
            arm_all();
        got += sleeps ? poll_all() : 0;
        pthread_mutex_unlock(&lock);
        struct pollfd waiting = {.fd = channel->fd, .events = POLLIN};
        if (sleeps && got == 0 && poll(&waiting, 1, 20) == 1) {
            pthread_mutex_lock(&lock);
            take_events();
            pthread_mutex_unlock(&lock);
        }
        usleep(pause_us);
    }
    return NULL;
}

/* ---- commands --------------------------------------------------------------------------------------------------- */

static uint64_t number(int index)
{
    if (words[index] == NULL)
        die("a word is missing");
    return strtoull(words[index], NULL, 0);
}

static struct link *link_named(void)
{
    uint64_t index = number(1);
    if (index >= LINKS_MAX)
        die("no such link");
    return &links[index];
}

static void command_open(void)
{
    struct ibv_device **list = ibv_get_device_list(NULL);
    context = list == NULL || list[0] == NULL ? NULL : ibv_open_device(list[0]);
    if (context == NULL || ibv_query_gid(context, ENV_PORT, 0, &gid) != 0)
        die("no device");
    ibv_free_device_list(list);
    size_t target_bytes = (size_t)LINKS_MAX * LINK_BYTES, own_bytes = (size_t)LINKS_MAX * (2 * DEPTH + RECEIVES) * MESSAGE_BYTES;
    int fd = words[1] == NULL ? -1 : open(words[1], O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd >= 0) {
        if (ftruncate(fd, (off_t)target_bytes) != 0)
            die("no file");
        target_access |= IBV_ACCESS_ON_DEMAND;
        target = mmap(NULL, target_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    } else {
        target = mmap(NULL, target_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    }
    own = mmap(NULL, own_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    pd = ibv_alloc_pd(context);
    channel = ibv_create_comp_channel(context);
    shared_cq = ibv_create_cq(context, LINKS_MAX * (2 * DEPTH + RECEIVES), NULL, channel, 0);
    own_mr = pd == NULL || own == MAP_FAILED ? NULL : ibv_reg_mr(pd, own, own_bytes, IBV_ACCESS_LOCAL_WRITE);
    pthread_t thread;
    if (target == MAP_FAILED || shared_cq == NULL || own_mr == NULL)
        die("no objects");
    env_nonblocking(channel->fd);
    if (pthread_create(&thread, NULL, load, NULL) != 0)
        die("no thread");
    puts("ok");
}

static void command_create(void)
{
    struct link *link = link_named();
    memset(link, 0, sizeof *link);
    link->index = (unsigned)number(1);
    uint8_t *memory = target + (size_t)link->index * LINK_BYTES;
    for (unsigned slot = 0; slot < DEPTH; slot++)
        memset(memory + slot * TARGET_BYTES, 0, 8);
    if (link->index % 2 == 1)
        link->own_cq = ibv_create_cq(context, 2 * DEPTH + RECEIVES, NULL, channel, 0);
    struct ibv_cq *cq = link->own_cq != NULL ? link->own_cq : shared_cq;
    struct ibv_qp_init_attr init = {.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
                                    .cap = {.max_send_wr = 2 * DEPTH, .max_recv_wr = RECEIVES, .max_send_sge = 1,
                                            .max_recv_sge = 1}};
    link->mr = ibv_reg_mr(pd, memory, LINK_BYTES, target_access);
    link->qp = ibv_create_qp(pd, &init);
    if (link->mr == NULL || link->qp == NULL)
        die("no link");
    link->exists = true;
    printf("ok qpn=%u addr=%llu rkey=%u\n", link->qp->qp_num, (unsigned long long)(uintptr_t)memory, link->mr->rkey);
}

static void command_connect(void)
{
    struct link *link = link_named();
    struct env env = {.gid = gid};
    struct ibv_qp_attr attr = env_attr(&env, (uint32_t)number(2));
    attr.path_mtu = (enum ibv_mtu)number(5);
    attr.min_rnr_timer = 1;
    link->remote = number(3), link->rkey = (uint32_t)number(4);
    for (attr.qp_state = IBV_QPS_INIT; attr.qp_state <= IBV_QPS_RTS; attr.qp_state++)
        if (ibv_modify_qp(link->qp, &attr, env_mask(IBV_QPT_RC, attr.qp_state)) != 0)
            die("a link does not connect");
    for (unsigned i = 0; i < RECEIVES; i++)
        post_receive(link, i);
    puts("ok");
}

static void command_start(void)
{
    link_named()->loaded = true;
    puts("ok");
}

/* Waits until a link has no outstanding requests, and with `receives` no posted receives, which are flushed. */
static bool wait_idle(struct link *link, bool receives)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += (time_t)TIMEOUT_S;
    while (is_busy(link) || (receives && link->receives_posted > 0))
        if (pthread_cond_timedwait(&completed, &lock, &until) == ETIMEDOUT)
            return false;
    return true;
}

static void command_drain(void)
{
    struct link *link = link_named();
    link->loaded = false;
    puts(wait_idle(link, false) ? "ok" : "timeout");
}

static void command_error(void)
{
    struct link *link = link_named();
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_ERR};
    link->loaded = false;
    if (ibv_modify_qp(link->qp, &attr, IBV_QP_STATE) != 0)
        die("a link cannot be set to the error state");
    puts(wait_idle(link, true) ? "ok" : "timeout");
}

static void command_destroy(void)
{
    struct link *link = link_named();
    if (is_busy(link))
        die("a link has outstanding requests");
    if (ibv_destroy_qp(link->qp) != 0 || ibv_dereg_mr(link->mr) != 0 || (link->own_cq != NULL && ibv_destroy_cq(link->own_cq) != 0))
        die("a link cannot be destroyed");
    link->exists = false;
    printf("ok ops=%llu bytes=%llu received=%llu wrong=%llu status=%d\n", (unsigned long long)link->ops,
           (unsigned long long)link->bytes, (unsigned long long)link->received, (unsigned long long)link->wrong, link->status);
}

static void command_report(void)
{
    double now = seconds_now(), oldest = 0;
    for (struct link *link = links; link < links + LINKS_MAX; link++)
        for (unsigned slot = 0; link->exists && slot < DEPTH; slot++)
            if (link->operations[slot].kind != NONE && now - link->operations[slot].posted_at > oldest)
                oldest = now - link->operations[slot].posted_at;
    printf("ok ops=%llu bytes=%llu received=%llu wrong=%llu slowest_ms=%.0f oldest_ms=%.0f\n", (unsigned long long)total_ops,
           (unsigned long long)total_bytes, (unsigned long long)total_messages, (unsigned long long)total_wrong,
           slowest_s * 1e3, oldest * 1e3);
}

static void run(char *line)
{
    static const struct {
        const char *name;
        void (*run)(void);
    } COMMANDS[] = {
        {"open", command_open},   {"create", command_create}, {"connect", command_connect}, {"start", command_start},
        {"drain", command_drain}, {"error", command_error},   {"destroy", command_destroy}, {"report", command_report},
    };
    int count = 0;
    memset(words, 0, sizeof words);
    for (char *next = strtok(line, " \n"); next != NULL && count < WORDS_MAX - 1; next = strtok(NULL, " \n"))
        words[count++] = next;
    for (size_t i = 0; count > 0 && i < sizeof COMMANDS / sizeof COMMANDS[0]; i++)
        if (strcmp(COMMANDS[i].name, words[0]) == 0) {
            pthread_mutex_lock(&lock);
            COMMANDS[i].run();
            pthread_mutex_unlock(&lock);
            fflush(stdout);
            return;
        }
    die("an unknown command");
}

int main(int argc, char **argv)
{
    char line[4096];
    int flag;
    random_state = (uint64_t)getpid() << 32;
    while ((flag = getopt(argc, argv, "ep:s:")) != -1) {
        if (flag == 'e')
            use_events = true;
        else if (flag == 'p')
            pause_us = (unsigned)strtoul(optarg, NULL, 10);
        else if (flag == 's')
            random_state = mix(strtoull(optarg, NULL, 10));
        else
            return 2;
    }
    while (fgets(line, sizeof line, stdin) != NULL)
        run(line);
    return 0;
}
