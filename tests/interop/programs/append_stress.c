/*
 * append_stress: many clients append records to one file, and note what was acknowledged.
 *
 *     append_stress serve -p PORT FILE
 *     append_stress append -p PORT -c CLIENT -q QUEUE_PAIRS -n RECORDS -b BYTES_MAX -l LOG HOST
 *     append_stress write  ...     the same with WRITEs to places of the client's own, to compare rates
 *
 * Each record begins with a header that says whose it is; its other bytes follow from that. The client adds a line of struct
 * acknowledged to LOG for each completion, so that the log has what a killed client was told. tests/interop/append.py
 * compares the file with the logs.
 */
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <terrace.h>

enum { IB_PORT = 1, DEPTH = 4, PEERS_MAX = 512, MAGIC = 0x54415052 };

/* Little-endian, as all machines that this runs on. */
struct header {
    uint32_t magic, client, queue, sequence, length, seed;
};

struct acknowledged {
    uint32_t client, queue, sequence, length;
    uint64_t offset;
};

struct parameters {
    union ibv_gid gid;
    uint32_t qpn, rkey;
};

static struct ibv_context *context;
static struct ibv_pd *pd;
static union ibv_gid gid;
static struct ibv_port_attr port_attr;

static void die(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fprintf(stderr, "append_stress: ");
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    exit(1);
}

static void open_nic(void)
{
    struct ibv_device **list = ibv_get_device_list(NULL);
    if (list == NULL || list[0] == NULL || (context = ibv_open_device(list[0])) == NULL ||
        (pd = ibv_alloc_pd(context)) == NULL || ibv_query_gid(context, IB_PORT, 0, &gid) != 0 ||
        ibv_query_port(context, IB_PORT, &port_attr) != 0)
        die("no device: %s", strerror(errno));
}

static struct ibv_qp *new_qp(struct ibv_cq *cq)
{
    struct ibv_qp_init_attr init = {
        .send_cq = cq,
        .recv_cq = cq,
        .cap = {.max_send_wr = DEPTH, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1},
        .qp_type = IBV_QPT_RC,
        .sq_sig_all = 1,
    };
    struct ibv_qp *qp = ibv_create_qp(pd, &init);
    if (qp == NULL)
        die("cannot create a queue pair: %s", strerror(errno));
    return qp;
}

static void connect_qp(struct ibv_qp *qp, const struct parameters *peer)
{
    struct ibv_qp_attr init = {
        .qp_state = IBV_QPS_INIT, .port_num = IB_PORT, .qp_access_flags = IBV_ACCESS_REMOTE_WRITE};
    struct ibv_qp_attr rtr = {
        .qp_state = IBV_QPS_RTR,
        .path_mtu = port_attr.active_mtu,
        .dest_qp_num = peer->qpn,
        .max_dest_rd_atomic = DEPTH,
        .min_rnr_timer = 12,
        .ah_attr = {.port_num = IB_PORT, .is_global = 1, .grh = {.dgid = peer->gid, .hop_limit = 64}}};
    struct ibv_qp_attr rts = {
        .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = DEPTH};
    if (ibv_modify_qp(qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) != 0 ||
        ibv_modify_qp(qp, &rtr,
                      IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                          IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER) != 0 ||
        ibv_modify_qp(qp, &rts,
                      IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                          IBV_QP_MAX_QP_RD_ATOMIC) != 0)
        die("cannot connect a queue pair: %s", strerror(errno));
}

/* ---- server ----------------------------------------------------------------------------------------------------- */

static volatile sig_atomic_t is_over;

static void end(int signal)
{
    (void)signal;
    is_over = 1;
}

static void serve(const char *path, int port)
{
    __typeof__(&terrace_bind_file) bind_file = dlsym(RTLD_DEFAULT, "terrace_bind_file");
    int file = open(path, O_RDWR | O_CREAT, 0600);
    if (file < 0 || bind_file == NULL)
        die("%s: %s", path, file < 0 ? strerror(errno) : "no terrace_bind_file in this libibverbs");
    open_nic();
    struct ibv_mr *mr = bind_file(pd, file, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
    struct ibv_cq *cq = ibv_create_cq(context, 16, NULL, NULL, 0);
    if (mr == NULL || cq == NULL)
        die("cannot register %s: %s", path, strerror(errno));
    int listener = socket(AF_INET, SOCK_STREAM, 0), on = 1;
    struct sockaddr_in any = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    struct sigaction action = {.sa_handler = end};
    sigaction(SIGTERM, &action, NULL);
    if (bind(listener, (struct sockaddr *)&any, sizeof any) != 0 || listen(listener, PEERS_MAX) != 0)
        die("cannot listen on port %d: %s", port, strerror(errno));
    /* The listener, and a connection for each queue pair, whose end ends the queue pair. */
    struct pollfd peers[PEERS_MAX] = {{.fd = listener, .events = POLLIN}};
    struct ibv_qp *qps[PEERS_MAX] = {NULL};
    nfds_t count = 1;
    while (!is_over) {
        if (poll(peers, count, 1000) <= 0)
            continue;
        for (nfds_t i = count; i-- > 1;) {
            if (peers[i].revents == 0)
                continue;
            ibv_destroy_qp(qps[i]);
            close(peers[i].fd);
            count--;
            peers[i] = peers[count];
            qps[i] = qps[count];
        }
        if ((peers[0].revents & POLLIN) != 0 && count < PEERS_MAX) {
            int peer = accept(listener, NULL, NULL);
            struct parameters theirs;
            if (peer < 0 || recv(peer, &theirs, sizeof theirs, MSG_WAITALL) != sizeof theirs) {
                close(peer);
                continue;
            }
            struct ibv_qp *qp = new_qp(cq);
            struct parameters own = {.gid = gid, .qpn = qp->qp_num, .rkey = mr->rkey};
            connect_qp(qp, &theirs);
            peers[count] = (struct pollfd){.fd = peer, .events = POLLIN};
            qps[count++] = qp;
            if (send(peer, &own, sizeof own, MSG_NOSIGNAL) != sizeof own)
                shutdown(peer, SHUT_RDWR);
        }
    }
}

/* ---- client ----------------------------------------------------------------------------------------------------- */

struct options {
    const char *host, *log;
    int port, client, queues, records;
    uint32_t bytes_max;
    bool writes;
};

struct queue {
    struct ibv_qp *qp;
    uint32_t rkey, posted, done;
};

static __typeof__(&terrace_post_append) post_append;

static uint32_t mixed(uint32_t x)
{
    x ^= x >> 16;
    x *= 0x7feb352d;
    x ^= x >> 15;
    x *= 0x846ca68b;
    return x ^ x >> 16;
}

static uint32_t fill(const struct options *options, uint8_t *record, uint32_t queue, uint32_t sequence)
{
    uint32_t seed = mixed((uint32_t)options->client * 1000003u + queue * 7919u + sequence);
    uint32_t least = sizeof(struct header), range = options->bytes_max - least;
    /* Half of the records are short. */
    uint32_t length = least + (seed & 1 ? seed >> 1 : (seed >> 1) % 4096) % (range + 1);
    struct header header = {MAGIC, (uint32_t)options->client, queue, sequence, length, seed};
    memcpy(record, &header, sizeof header);
    for (uint32_t i = sizeof header; i < length; i++)
        record[i] = (uint8_t)(seed + i * 131u);
    return length;
}

static int connect_server(const struct options *options)
{
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)options->port)};
    inet_pton(AF_INET, options->host, &to.sin_addr);
    for (int tries = 0; tries < 200; tries++) {
        int peer = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(peer, (struct sockaddr *)&to, sizeof to) == 0)
            return peer;
        close(peer);
        nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
    }
    die("cannot connect to %s port %d", options->host, options->port);
    return -1;
}

static void run(const struct options *options)
{
    post_append = dlsym(RTLD_DEFAULT, "terrace_post_append");
    int log = open(options->log, O_WRONLY | O_CREAT | O_APPEND, 0600);
    if (log < 0 || post_append == NULL)
        die("%s: %s", options->log, log < 0 ? strerror(errno) : "no terrace_post_append in this libibverbs");
    open_nic();
    size_t slots = (size_t)options->queues * DEPTH;
    struct ibv_cq *cq = ibv_create_cq(context, (int)slots, NULL, NULL, 0);
    uint8_t *records = calloc(slots, options->bytes_max);
    uint64_t *offsets = calloc(slots, sizeof *offsets);
    struct ibv_mr *mr = ibv_reg_mr(pd, records, slots * options->bytes_max, 0);
    struct ibv_mr *offsets_mr = ibv_reg_mr(pd, offsets, slots * sizeof *offsets, IBV_ACCESS_LOCAL_WRITE);
    struct queue *queues = calloc((size_t)options->queues, sizeof *queues);
    if (cq == NULL || mr == NULL || offsets_mr == NULL)
        die("cannot make the queues: %s", strerror(errno));
    for (int i = 0; i < options->queues; i++) {
        int peer = connect_server(options);
        queues[i].qp = new_qp(cq);
        struct parameters own = {.gid = gid, .qpn = queues[i].qp->qp_num}, theirs;
        if (send(peer, &own, sizeof own, MSG_NOSIGNAL) != sizeof own ||
            recv(peer, &theirs, sizeof theirs, MSG_WAITALL) != sizeof theirs)
            die("the server closed the connection");
        connect_qp(queues[i].qp, &theirs);
        queues[i].rkey = theirs.rkey;
    }
    struct timespec begun, ended;
    clock_gettime(CLOCK_MONOTONIC, &begun);
    uint64_t bytes = 0, left = (uint64_t)options->queues * (uint64_t)options->records;
    while (left > 0) {
        for (int i = 0; i < options->queues; i++) {
            struct queue *queue = &queues[i];
            while (queue->posted < (uint32_t)options->records && queue->posted - queue->done < DEPTH) {
                size_t slot = (size_t)i * DEPTH + queue->posted % DEPTH;
                uint8_t *record = records + slot * options->bytes_max;
                uint32_t length = fill(options, record, (uint32_t)i, queue->posted);
                struct ibv_sge sge = {(uintptr_t)record, length, mr->lkey};
                int error;
                if (options->writes) {
                    struct ibv_send_wr wr = {.wr_id = (uint64_t)i, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE},
                                       *bad;
                    wr.wr.rdma.remote_addr = slot * options->bytes_max;
                    wr.wr.rdma.rkey = queue->rkey;
                    error = ibv_post_send(queue->qp, &wr, &bad);
                } else {
                    struct terrace_append_wr wr = {.wr_id = (uint64_t)i, .sg_list = &sge, .num_sge = 1, .rkey = queue->rkey}, *bad;
                    wr.result = (struct ibv_sge){(uintptr_t)&offsets[slot], 8, offsets_mr->lkey};
                    error = post_append(queue->qp, &wr, &bad);
                }
                if (error != 0)
                    die("a request was refused: %s", strerror(error));
                queue->posted++;
            }
        }
        struct ibv_wc wc[16];
        int count = ibv_poll_cq(cq, 16, wc);
        for (int j = 0; j < count; j++) {
            if (wc[j].status != IBV_WC_SUCCESS)
                die("a record failed: %s", ibv_wc_status_str(wc[j].status));
            struct queue *queue = &queues[wc[j].wr_id];
            /* The requests of a queue pair complete in order. */
            size_t slot = wc[j].wr_id * DEPTH + queue->done % DEPTH;
            struct header header;
            memcpy(&header, records + slot * options->bytes_max, sizeof header);
            struct acknowledged line = {header.client, header.queue, header.sequence, header.length, offsets[slot]};
            if (!options->writes && write(log, &line, sizeof line) != sizeof line)
                die("the log: %s", strerror(errno));
            queue->done++;
            bytes += header.length;
            left--;
        }
    }
    clock_gettime(CLOCK_MONOTONIC, &ended);
    double seconds = (double)(ended.tv_sec - begun.tv_sec) + 1e-9 * (double)(ended.tv_nsec - begun.tv_nsec);
    printf("%.0f records/s %.1f MB/s\n", options->queues * (double)options->records / seconds, (double)bytes / seconds / 1e6);
}

int main(int argc, char **argv)
{
    struct options options = {.queues = 1, .records = 100, .bytes_max = 4096, .log = "/dev/null"};
    int option;
    if (argc < 2)
        die("usage: append_stress serve|append|write [options] FILE|HOST");
    while ((option = getopt(argc - 1, argv + 1, "p:c:q:n:b:l:")) != -1) {
        switch (option) {
        case 'p': options.port = atoi(optarg); break;
        case 'c': options.client = atoi(optarg); break;
        case 'q': options.queues = atoi(optarg); break;
        case 'n': options.records = atoi(optarg); break;
        case 'b': options.bytes_max = (uint32_t)atoi(optarg); break;
        case 'l': options.log = optarg; break;
        default: return 2;
        }
    }
    if (optind + 1 >= argc || options.bytes_max < sizeof(struct header) || options.bytes_max > TERRACE_APPEND_LEN_MAX)
        die("usage: append_stress serve|append|write [options] FILE|HOST");
    options.host = argv[optind + 1];
    options.writes = strcmp(argv[1], "write") == 0;
    if (strcmp(argv[1], "serve") == 0)
        serve(options.host, options.port);
    else
        run(&options);
    return 0;
}
