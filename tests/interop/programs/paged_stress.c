/*
 * paged_stress: the program and two queue pairs of a peer change a file mapping concurrently; every byte is checked.
 *
 * The program uses plain verbs. Its server is meant for `terrace run --dram SIZE`, with a SIZE much below the file's.
 *
 *     paged_stress serve -p PORT -m MIB FILE          registers overlapping regions of FILE with on-demand paging
 *     paged_stress drive -p PORT -t SECONDS HOST      READs, WRITEs and adds; returns 0 if all data was right
 *
 * The file is divided into runs of 1 B to 4 MiB, at any byte. Each run has one of three owners: the server's thread,
 * which stores to it and checks it, or one of two queue pairs. So three writers share pages, but never a byte. The
 * driver keeps a shadow of the file. A READ may cover any range, and is checked where it covers bytes of its queue
 * pair: it must see every WRITE that was posted before it on its queue pair, completed or not. Over TCP the driver also
 * has the server store to the driver's own bytes, which its next READ must see, and load them, which must return the
 * WRITTEN bytes.
 *
 * Build:  cc -O2 -o paged_stress paged_stress.c -libverbs -lpthread
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <infiniband/verbs.h>

enum {
    QPS = 2,
    OWNERS = QPS + 1, /* the last one is the server */
    SERVER = QPS,
    DEPTH = 8, /* requests outstanding on a queue pair */
    REGIONS = 3,
    RUN_MAX = 4 << 20,
    SERVER_RUN_MAX = 1 << 20,
    HOT_BYTES = 8 << 20,
    PSN = 0xffff00, /* PSNs wrap soon */
};

static void die(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fprintf(stderr, "paged_stress: ");
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    exit(1);
}

static double seconds_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* ---- numbers ---------------------------------------------------------------------------------------------------- */

static uint64_t mix(uint64_t value)
{
    value += 0x9e3779b97f4a7c15;
    value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9;
    value = (value ^ value >> 27) * 0x94d049bb133111eb;
    return value ^ value >> 31;
}

static uint64_t draw(uint64_t *state)
{
    return mix((*state)++);
}

static uint64_t below(uint64_t *state, uint64_t limit)
{
    return draw(state) % limit;
}

/* Returns a length from 1 to `max`. Every order of magnitude is equally likely. */
static uint64_t draw_length(uint64_t *state, uint64_t max)
{
    unsigned bits = 0;
    while (max >> (bits + 1) != 0)
        bits++;
    uint64_t top = 1ULL << below(state, bits + 1);
    uint64_t length = top + below(state, top);
    return length < max ? length : max;
}

/* Writes bytes that depend on the seed alone. Some seeds give one repeated byte, like that of an absent page. */
static void fill(uint8_t *bytes, size_t length, uint64_t seed)
{
    static const uint8_t REPEATED[] = {0x00, 0xff, 0xfd};
    if (seed % 16 < sizeof REPEATED) {
        memset(bytes, REPEATED[seed % 16], length);
        return;
    }
    for (size_t i = 0; i < length; i += 8) {
        uint64_t word = draw(&seed);
        memcpy(bytes + i, &word, length - i < 8 ? length - i : 8);
    }
}

static uint64_t hash(const uint8_t *bytes, size_t length)
{
    uint64_t value = 0xcbf29ce484222325;
    for (size_t i = 0; i < length; i++)
        value = (value ^ bytes[i]) * 0x100000001b3;
    return value;
}

/* ---- owners of the runs ----------------------------------------------------------------------------------------- */

struct run {
    uint64_t start, length;
    int owner;
};

struct layout {
    uint64_t size;
    struct run *runs;
    size_t count;
};

/* Both ends make the same layout from the same seed. */
static struct layout make_layout(uint64_t size, uint64_t seed)
{
    struct layout layout = {.size = size};
    size_t capacity = 0;
    for (uint64_t at = 0; at < size;) {
        if (layout.count == capacity) {
            capacity = capacity == 0 ? 1024 : capacity * 2;
            layout.runs = realloc(layout.runs, capacity * sizeof *layout.runs);
        }
        int owner = (int)below(&seed, OWNERS);
        uint64_t length = draw_length(&seed, owner == SERVER ? SERVER_RUN_MAX : RUN_MAX);
        length = length < size - at ? length : size - at;
        layout.runs[layout.count++] = (struct run){at, length, owner};
        at += length;
    }
    return layout;
}

static size_t run_at(const struct layout *layout, uint64_t offset)
{
    size_t low = 0, high = layout->count;
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        if (layout->runs[middle].start <= offset)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* Returns the owner's next run at or after an offset, which wraps around at the end of the file. */
static const struct run *run_of(const struct layout *layout, int owner, uint64_t offset)
{
    size_t index = run_at(layout, offset);
    while (layout->runs[index].owner != owner)
        index = (index + 1) % layout->count;
    return &layout->runs[index];
}

static void draw_within(const struct run *run, uint64_t *state, uint64_t *offset, uint64_t *length)
{
    *length = draw_length(state, run->length);
    *offset = run->start + below(state, run->length - *length + 1);
}

/* ---- messages over TCP ------------------------------------------------------------------------------------------ */

struct region {
    uint64_t offset, length, addr;
    uint32_t rkey;
};

struct hello {
    uint64_t size, seed;
    uint8_t gid[16];
    uint32_t qpn[QPS], mtu;
    struct region regions[REGIONS];
};

enum { STORE = 1, LOAD, STOP };

struct command {
    uint64_t kind, offset, length, seed;
};

static void send_all(int peer, const void *message, size_t length)
{
    if (send(peer, message, length, MSG_NOSIGNAL) != (ssize_t)length)
        die("the other end closed the connection");
}

static bool receive_all(int peer, void *message, size_t length)
{
    return recv(peer, message, length, MSG_WAITALL) == (ssize_t)length;
}

/* ---- the NIC ---------------------------------------------------------------------------------------------------- */

struct nic {
    struct ibv_context *context;
    struct ibv_pd *pd;
    struct ibv_cq *cq[QPS];
    struct ibv_qp *qp[QPS];
    struct ibv_port_attr port;
    union ibv_gid gid;
};

static struct nic open_nic(void)
{
    struct ibv_device **list = ibv_get_device_list(NULL);
    struct nic nic = {.context = list == NULL || *list == NULL ? NULL : ibv_open_device(*list)};
    if (nic.context == NULL)
        die("no device: %s", strerror(errno));
    ibv_free_device_list(list);
    nic.pd = ibv_alloc_pd(nic.context);
    if (nic.pd == NULL || ibv_query_port(nic.context, 1, &nic.port) != 0 || ibv_query_gid(nic.context, 1, 0, &nic.gid) != 0)
        die("the device does not work: %s", strerror(errno));
    for (int i = 0; i < QPS; i++) {
        nic.cq[i] = ibv_create_cq(nic.context, DEPTH, NULL, NULL, 0);
        struct ibv_qp_init_attr init = {
            .send_cq = nic.cq[i],
            .recv_cq = nic.cq[i],
            .cap = {.max_send_wr = DEPTH, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1},
            .qp_type = IBV_QPT_RC,
            .sq_sig_all = 1,
        };
        nic.qp[i] = nic.cq[i] == NULL ? NULL : ibv_create_qp(nic.pd, &init);
        if (nic.qp[i] == NULL)
            die("cannot create a queue pair: %s", strerror(errno));
    }
    return nic;
}

static void describe(const struct nic *nic, struct hello *self)
{
    memcpy(self->gid, nic->gid.raw, sizeof self->gid);
    self->mtu = nic->port.active_mtu;
    for (int i = 0; i < QPS; i++)
        self->qpn[i] = nic->qp[i]->qp_num;
}

static void connect_qps(const struct nic *nic, const struct hello *peer)
{
    const int masks[] = {
        IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS,
        IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
            IBV_QP_MIN_RNR_TIMER,
        IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC,
    };
    for (int i = 0; i < QPS; i++) {
        struct ibv_qp_attr attr = {
            .qp_access_flags = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC,
            .path_mtu = peer->mtu < nic->port.active_mtu ? peer->mtu : nic->port.active_mtu,
            .dest_qp_num = peer->qpn[i],
            .rq_psn = PSN,
            .sq_psn = PSN,
            .max_rd_atomic = DEPTH,
            .max_dest_rd_atomic = DEPTH,
            .min_rnr_timer = 7,
            .port_num = 1,
            .ah_attr = {.is_global = 1, .port_num = 1, .grh = {.hop_limit = 64}},
            .timeout = 17, /* half a second, because a busy disk is slow */
            .retry_cnt = 7,
            .rnr_retry = 7,
        };
        memcpy(attr.ah_attr.grh.dgid.raw, peer->gid, sizeof peer->gid);
        for (int step = 0; step < 3; step++) {
            attr.qp_state = (enum ibv_qp_state)(IBV_QPS_INIT + step);
            int error = ibv_modify_qp(nic->qp[i], &attr, masks[step]);
            if (error != 0)
                die("queue pair to state %d: %s", attr.qp_state, strerror(error));
        }
    }
}

/* ---- serve ------------------------------------------------------------------------------------------------------ */

struct server {
    uint8_t *map;
    struct layout layout;
    uint64_t seed;
    pthread_t thread;
    atomic_bool stopping;
    uint64_t stores, wrong;
};

/* Writes the initial content of the file. */
static void prepare_file(int file, uint64_t size, uint64_t seed)
{
    static uint8_t block[RUN_MAX];
    for (uint64_t at = 0; at < size; at += sizeof block) {
        fill(block, sizeof block, mix(seed ^ at) | 15);
        if (pwrite(file, block, sizeof block, (off_t)at) != (ssize_t)sizeof block)
            die("cannot write the file: %s", strerror(errno));
    }
    if (fsync(file) != 0)
        die("cannot write the file: %s", strerror(errno));
    posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
}

/* Stores to the server's own bytes, and checks them against its last stores. */
static void *store_and_load(void *argument)
{
    struct server *server = argument;
    uint64_t state = server->seed ^ 0x5e4e4;
    uint8_t *shadow = malloc(server->layout.size);
    for (size_t i = 0; i < server->layout.count; i++) {
        const struct run *run = &server->layout.runs[i];
        if (run->owner == SERVER)
            memcpy(shadow + run->start, server->map + run->start, run->length);
    }
    while (!server->stopping) {
        const struct run *run = run_of(&server->layout, SERVER, below(&state, server->layout.size));
        uint64_t offset, length;
        draw_within(run, &state, &offset, &length);
        if (memcmp(server->map + offset, shadow + offset, length) != 0 && server->wrong++ == 0)
            fprintf(stderr, "paged_stress: the server's own bytes at %" PRIu64 " (%" PRIu64 ") have changed\n", offset, length);
        fill(shadow + offset, length, draw(&state));
        memcpy(server->map + offset, shadow + offset, length);
        if (++server->stores % 64 == 0)
            usleep(50); /* leaves the processor to other threads */
    }
    free(shadow);
    return NULL;
}

static uint64_t execute(struct server *server, const struct command *command)
{
    if (command->kind != STOP && (command->offset > server->layout.size || command->length > server->layout.size - command->offset))
        die("a command is out of range");
    switch (command->kind) {
    case STORE: fill(server->map + command->offset, command->length, command->seed); return 0;
    case LOAD: return hash(server->map + command->offset, command->length);
    case STOP:
        server->stopping = true;
        pthread_join(server->thread, NULL);
        return server->wrong;
    default: die("an unknown command");
    }
    return 0;
}

static int accept_one(uint16_t port)
{
    int on = 1, listener = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in any = {.sin_family = AF_INET, .sin_port = htons(port)};
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(listener, (struct sockaddr *)&any, sizeof any) != 0 || listen(listener, 1) != 0)
        die("cannot listen on TCP port %u: %s", port, strerror(errno));
    int peer = accept(listener, NULL, NULL);
    if (peer < 0)
        die("accept: %s", strerror(errno));
    close(listener);
    return peer;
}

static int serve(uint16_t port, uint64_t size, uint64_t seed, const char *path)
{
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0)
        die("%s: %s", path, strerror(errno));
    prepare_file(file, size, seed);
    struct server server = {.layout = make_layout(size, seed), .seed = seed};
    server.map = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (server.map == MAP_FAILED)
        die("cannot map %s: %s", path, strerror(errno));
    close(file);

    struct nic nic = open_nic();
    struct hello self = {.size = size,
                         .seed = seed,
                         .regions = {{.offset = 0, .length = size},
                                     {.offset = 777, .length = size - 1777},
                                     {.offset = size / 3 + 1, .length = size / 3}}};
    struct ibv_mr *mrs[REGIONS];
    int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC |
                 IBV_ACCESS_ON_DEMAND;
    for (int i = 0; i < REGIONS; i++) {
        struct region *region = &self.regions[i];
        mrs[i] = ibv_reg_mr(nic.pd, server.map + region->offset, region->length, access);
        if (mrs[i] == NULL)
            die("cannot register %" PRIu64 " bytes: %s", region->length, strerror(errno));
        region->addr = (uintptr_t)mrs[i]->addr;
        region->rkey = mrs[i]->rkey;
    }
    describe(&nic, &self);
    int peer = accept_one(port);
    struct hello theirs;
    send_all(peer, &self, sizeof self);
    if (!receive_all(peer, &theirs, sizeof theirs))
        die("the driver closed the connection");
    connect_qps(&nic, &theirs);
    if (pthread_create(&server.thread, NULL, store_and_load, &server) != 0)
        die("no thread");
    uint64_t ready = 0;
    send_all(peer, &ready, sizeof ready);
    struct command command;
    while (receive_all(peer, &command, sizeof command)) {
        uint64_t answer = execute(&server, &command);
        send_all(peer, &answer, sizeof answer);
    }
    fprintf(stderr, "paged_stress: the server stored %" PRIu64 " times, %" PRIu64 " were wrong\n", server.stores, server.wrong);
    for (int i = 0; i < REGIONS; i++)
        if (ibv_dereg_mr(mrs[i]) != 0)
            die("cannot deregister: %s", strerror(errno));
    return server.stopping && server.wrong == 0 ? 0 : 1;
}

/* ---- drive ------------------------------------------------------------------------------------------------------ */

/* An outstanding request. The requests of a queue pair complete in the order of posting. */
struct request {
    enum ibv_wr_opcode opcode;
    uint64_t offset, length;
    uint8_t *buffer;   /* data to send, or received */
    uint8_t *expected; /* result of a READ or an addition */
};

struct queue {
    struct request requests[DEPTH];
    uint64_t posted, done;
};

struct driver {
    struct nic nic;
    struct hello peer;
    struct layout layout;
    uint8_t *shadow;
    struct ibv_mr *mr;
    struct queue queues[QPS];
    uint64_t state, hot;
    int tcp;
    uint64_t counts[5], bytes;
};

static uint64_t call_server(struct driver *driver, uint64_t kind, uint64_t offset, uint64_t length, uint64_t seed)
{
    struct command command = {kind, offset, length, seed};
    uint64_t answer;
    send_all(driver->tcp, &command, sizeof command);
    if (!receive_all(driver->tcp, &answer, sizeof answer))
        die("the server closed the connection");
    return answer;
}

/* The bytes of the reader's runs must be as expected; bytes of other owners are not checked. */
static void check_read(const struct driver *driver, int owner, const struct request *request)
{
    uint64_t end = request->offset + request->length;
    for (size_t i = run_at(&driver->layout, request->offset); i < driver->layout.count && driver->layout.runs[i].start < end; i++) {
        const struct run *run = &driver->layout.runs[i];
        uint64_t from = run->start > request->offset ? run->start : request->offset;
        uint64_t to = run->start + run->length < end ? run->start + run->length : end;
        if (run->owner != owner)
            continue;
        const uint8_t *got = request->buffer + (from - request->offset), *wanted = request->expected + (from - request->offset);
        for (uint64_t at = 0; at < to - from; at++)
            if (got[at] != wanted[at])
                die("READ of %" PRIu64 " bytes at %" PRIu64 ": the byte at %" PRIu64 " is %02x instead of %02x", request->length,
                    request->offset, from + at, got[at], wanted[at]);
    }
}

static void complete_one(struct driver *driver, int index)
{
    struct queue *queue = &driver->queues[index];
    struct request *request = &queue->requests[queue->done % DEPTH];
    struct ibv_wc wc;
    double deadline = seconds_now() + 30;
    while (ibv_poll_cq(driver->nic.cq[index], 1, &wc) == 0)
        if (seconds_now() > deadline)
            die("a request of %" PRIu64 " bytes at %" PRIu64 " did not complete", request->length, request->offset);
    if (wc.status != IBV_WC_SUCCESS)
        die("opcode %d of %" PRIu64 " bytes at %" PRIu64 ": %s", request->opcode, request->length, request->offset,
            ibv_wc_status_str(wc.status));
    if (wc.wr_id != queue->done)
        die("completions out of order");
    if (request->opcode == IBV_WR_RDMA_READ)
        check_read(driver, index, request);
    if (request->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD && memcmp(request->buffer, request->expected, 8) != 0)
        die("an addition at %" PRIu64 " found another value", request->offset);
    queue->done++;
}

static void drain(struct driver *driver, int index)
{
    while (driver->queues[index].done < driver->queues[index].posted)
        complete_one(driver, index);
}

/* Returns a random one of the regions that contain the range. */
static const struct region *region_with(struct driver *driver, uint64_t offset, uint64_t length)
{
    for (uint64_t i = draw(&driver->state);; i++) {
        const struct region *region = &driver->peer.regions[i % REGIONS];
        if (offset >= region->offset && offset + length <= region->offset + region->length)
            return region;
    }
}

static void post(struct driver *driver, int index, uint64_t add)
{
    struct queue *queue = &driver->queues[index];
    struct request *request = &queue->requests[queue->posted % DEPTH];
    const struct region *region = region_with(driver, request->offset, request->length);
    uint64_t remote = region->addr + (request->offset - region->offset);
    struct ibv_sge sge = {.addr = (uintptr_t)request->buffer, .length = (uint32_t)request->length, .lkey = driver->mr->lkey};
    struct ibv_send_wr wr = {.wr_id = queue->posted, .sg_list = &sge, .num_sge = 1, .opcode = request->opcode}, *bad;
    if (request->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
        wr.wr.atomic.remote_addr = remote;
        wr.wr.atomic.rkey = region->rkey;
        wr.wr.atomic.compare_add = add;
    } else {
        wr.wr.rdma.remote_addr = remote;
        wr.wr.rdma.rkey = region->rkey;
    }
    int error = ibv_post_send(driver->nic.qp[index], &wr, &bad);
    if (error != 0)
        die("cannot post: %s", strerror(error));
    queue->posted++;
    driver->bytes += request->length;
}

/* A WRITE may take effect before an earlier READ is answered, so the driver does not post it over such a READ. */
static bool is_being_read(const struct queue *queue, uint64_t offset, uint64_t length)
{
    for (uint64_t i = queue->done; i < queue->posted; i++) {
        const struct request *other = &queue->requests[i % DEPTH];
        if (other->opcode == IBV_WR_RDMA_READ && other->offset < offset + length && offset < other->offset + other->length)
            return true;
    }
    return false;
}

/* Returns a random offset, mostly in the hot part of the file. */
static uint64_t draw_offset(struct driver *driver)
{
    uint64_t size = driver->layout.size;
    bool hot = below(&driver->state, 10) < 8;
    return hot ? (driver->hot + below(&driver->state, HOT_BYTES)) % size : below(&driver->state, size);
}

static void post_read(struct driver *driver, int index, struct request *request)
{
    request->offset = draw_offset(driver);
    request->length = draw_length(&driver->state, RUN_MAX);
    if (request->length > driver->layout.size - request->offset)
        request->length = driver->layout.size - request->offset;
    memcpy(request->expected, driver->shadow + request->offset, request->length);
    /* A byte that does not arrive fails the check. */
    memset(request->buffer, 0xa5, request->length);
    post(driver, index, 0);
}

static void post_write(struct driver *driver, int index, struct request *request)
{
    draw_within(run_of(&driver->layout, index, draw_offset(driver)), &driver->state, &request->offset, &request->length);
    while (is_being_read(&driver->queues[index], request->offset, request->length))
        complete_one(driver, index);
    fill(request->buffer, request->length, draw(&driver->state));
    memcpy(driver->shadow + request->offset, request->buffer, request->length);
    post(driver, index, 0);
}

static void post_add(struct driver *driver, int index, struct request *request)
{
    const struct run *run = run_of(&driver->layout, index, draw_offset(driver));
    request->offset = (run->start + 7) & ~7ULL;
    request->length = 8;
    if (request->offset + 8 > run->start + run->length)
        return;
    while (is_being_read(&driver->queues[index], request->offset, 8))
        complete_one(driver, index);
    uint64_t value, add = draw(&driver->state);
    memcpy(&value, driver->shadow + request->offset, 8);
    memcpy(request->expected, &value, 8);
    value += add;
    memcpy(driver->shadow + request->offset, &value, 8);
    post(driver, index, add);
}

/* The server's CPU accesses bytes that the driver wrote or will read. */
static void access_on_server(struct driver *driver, int index, bool store)
{
    uint64_t offset, length, seed = draw(&driver->state);
    draw_within(run_of(&driver->layout, index, draw_offset(driver)), &driver->state, &offset, &length);
    drain(driver, index);
    if (store) {
        call_server(driver, STORE, offset, length, seed);
        fill(driver->shadow + offset, length, seed);
    } else if (call_server(driver, LOAD, offset, length, 0) != hash(driver->shadow + offset, length)) {
        die("the server loads other bytes from %" PRIu64 " (%" PRIu64 ") than were written", offset, length);
    }
}

static void step(struct driver *driver)
{
    int index = (int)below(&driver->state, QPS);
    struct queue *queue = &driver->queues[index];
    while (queue->posted - queue->done == DEPTH || (queue->posted > queue->done && below(&driver->state, 3) == 0))
        complete_one(driver, index);
    struct request *request = &queue->requests[queue->posted % DEPTH];
    uint64_t kind = below(&driver->state, 20);
    int operation = kind < 9 ? 0 : kind < 17 ? 1 : kind < 18 ? 2 : kind < 19 ? 3 : 4;
    driver->counts[operation]++;
    switch (operation) {
    case 0: request->opcode = IBV_WR_RDMA_READ; post_read(driver, index, request); break;
    case 1: request->opcode = IBV_WR_RDMA_WRITE; post_write(driver, index, request); break;
    case 2: request->opcode = IBV_WR_ATOMIC_FETCH_AND_ADD; post_add(driver, index, request); break;
    default: access_on_server(driver, index, operation == 3); break;
    }
}

/* READs the whole file once more, at the end. */
static void check_all(struct driver *driver)
{
    for (int index = 0; index < QPS; index++) {
        struct queue *queue = &driver->queues[index];
        drain(driver, index);
        for (uint64_t at = 0; at < driver->layout.size; at += RUN_MAX) {
            struct request *request = &queue->requests[queue->posted % DEPTH];
            uint64_t rest = driver->layout.size - at;
            request->opcode = IBV_WR_RDMA_READ;
            request->offset = at;
            request->length = rest < RUN_MAX ? rest : RUN_MAX;
            memcpy(request->expected, driver->shadow + at, request->length);
            post(driver, index, 0);
            if (queue->posted - queue->done == DEPTH)
                complete_one(driver, index);
        }
        drain(driver, index);
    }
}

static void make_buffers(struct driver *driver)
{
    size_t length = (size_t)QPS * DEPTH * RUN_MAX;
    uint8_t *buffers = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    driver->mr = buffers == MAP_FAILED ? NULL : ibv_reg_mr(driver->nic.pd, buffers, length, IBV_ACCESS_LOCAL_WRITE);
    if (driver->mr == NULL)
        die("cannot register the buffers: %s", strerror(errno));
    for (int index = 0; index < QPS; index++)
        for (int i = 0; i < DEPTH; i++) {
            driver->queues[index].requests[i].buffer = buffers + (size_t)(index * DEPTH + i) * RUN_MAX;
            driver->queues[index].requests[i].expected = malloc(RUN_MAX);
        }
    driver->shadow = malloc(driver->layout.size);
    for (uint64_t at = 0; at < driver->layout.size; at += RUN_MAX)
        fill(driver->shadow + at, RUN_MAX, mix(driver->peer.seed ^ at) | 15);
}

static int drive(uint16_t port, double seconds, const char *host)
{
    struct driver driver = {.nic = open_nic(), .tcp = socket(AF_INET, SOCK_STREAM, 0)};
    struct sockaddr_in server = {.sin_family = AF_INET, .sin_port = htons(port)};
    if (inet_pton(AF_INET, host, &server.sin_addr) != 1 ||
        connect(driver.tcp, (struct sockaddr *)&server, sizeof server) != 0)
        die("cannot connect to %s: %s", host, strerror(errno));
    struct hello self = {0};
    describe(&driver.nic, &self);
    uint64_t ready;
    if (!receive_all(driver.tcp, &driver.peer, sizeof driver.peer))
        die("the server closed the connection");
    send_all(driver.tcp, &self, sizeof self);
    connect_qps(&driver.nic, &driver.peer);
    driver.layout = make_layout(driver.peer.size, driver.peer.seed);
    driver.state = driver.peer.seed ^ 0xd41e;
    make_buffers(&driver);
    if (!receive_all(driver.tcp, &ready, sizeof ready))
        die("the server closed the connection");

    double started = seconds_now(), moved = started;
    for (double now = started; now - started < seconds; now = seconds_now()) {
        if (now - moved > 0.5) {
            moved = now;
            driver.hot = below(&driver.state, driver.layout.size);
        }
        for (int i = 0; i < 16; i++)
            step(&driver);
    }
    check_all(&driver);
    uint64_t wrong = call_server(&driver, STOP, 0, 0, 0);
    printf("reads %" PRIu64 " writes %" PRIu64 " adds %" PRIu64 " stores %" PRIu64 " loads %" PRIu64 " mib %" PRIu64
           " wrong %" PRIu64 "\n",
           driver.counts[0], driver.counts[1], driver.counts[2], driver.counts[3], driver.counts[4], driver.bytes >> 20, wrong);
    return wrong == 0 ? 0 : 1;
}

/* ---- command line ----------------------------------------------------------------------------------------------- */

int main(int argc, char **argv)
{
    uint16_t port = 18601;
    uint64_t mib = 64, seed = 1;
    double seconds = 10;
    int flag;
    while ((flag = getopt(argc, argv, "p:m:s:t:")) != -1) {
        switch (flag) {
        case 'p': port = (uint16_t)atoi(optarg); break;
        case 'm': mib = strtoull(optarg, NULL, 10); break;
        case 's': seed = strtoull(optarg, NULL, 10); break;
        case 't': seconds = strtod(optarg, NULL); break;
        default: return 2;
        }
    }
    if (argc - optind == 2 && strcmp(argv[optind], "serve") == 0 && mib > 0)
        return serve(port, mib << 20, mix(seed), argv[optind + 1]);
    if (argc - optind == 2 && strcmp(argv[optind], "drive") == 0)
        return drive(port, seconds, argv[optind + 1]);
    fputs("Usage: paged_stress serve [-p PORT] [-m MIB] [-s SEED] FILE\n"
          "       paged_stress drive [-p PORT] [-t SECONDS] HOST\n",
          stderr);
    return 2;
}
