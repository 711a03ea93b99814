/*
 * resilient_send: sends numbered messages over reliable connections, and delivers each once across connection failures.
 *
 *     resilient_send serve                       (server: receives until it has all messages)
 *     resilient_send send 192.0.2.1              (client)
 *     resilient_send send --fragile 192.0.2.1    (the same client without its handling of errors, to compare)
 *
 * The program uses plain verbs, and runs on any RDMA device. It shows how to recover from a failed connection. A request
 * ends with "transport retry counter exceeded" when the peer or the network is unreachable for too long, with "RNR retry
 * counter exceeded" when the peer has no receive posted for too long. The queue pair is then in the error state, and
 * the sender cannot know which of the outstanding messages have arrived. So both ends create a new queue pair, the server
 * sends the number of the next message, and the client continues from there.
 *
 * On real hardware such errors are rare. A fault plan tests the code that handles them (docs/fault-plan.md):
 *
 *     terrace run --fault-plan examples/faults.toml -- resilient_send serve
 *     terrace run -- resilient_send send 127.0.0.1
 *
 * Build:  cc -O2 -o resilient_send resilient_send.c -libverbs
 */
#include <arpa/inet.h>
#include <endian.h>
#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <netdb.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <infiniband/verbs.h>

enum { IB_PORT = 1, MESSAGE_LEN = 256, SENDS_IN_FLIGHT = 16, RECEIVES = 1024, ATTEMPTS_MAX = 200 };

struct options {
    const char *tcp_port; /* of the server's listener */
    int gid_index;
    uint64_t count; /* messages */
    bool fragile;   /* end at the first error */
};

struct nic {
    struct ibv_context *context;
    struct ibv_pd *pd;
    struct ibv_cq *cq;
    struct ibv_port_attr port;
    union ibv_gid gid;
    char *buffers; /* RECEIVES or SENDS_IN_FLIGHT of MESSAGE_LEN bytes */
    struct ibv_mr *mr;
};

/* The parameters of one end that the other needs. TCP carries them, every field in network byte order. */
struct parameters {
    uint8_t gid[16];
    uint32_t qpn;
    uint32_t psn;
    uint64_t count; /* from the client: the total of messages */
    uint64_t next;  /* from the server: the next message that it expects */
} __attribute__((packed));

/* A connection, usable until its first error. */
struct connection {
    int tcp;
    struct ibv_qp *qp;
    uint64_t count;
    uint64_t next;
};

static void die(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fprintf(stderr, "resilient_send: ");
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    exit(1);
}

static void pause_ms(long ms)
{
    nanosleep(&(struct timespec){.tv_nsec = ms * 1000000}, NULL);
}

/* Every byte of a message follows from its number, so that the receiver can check it. */
static void write_message(char *buffer, uint64_t number)
{
    for (size_t i = 0; i < MESSAGE_LEN / sizeof number; i++) {
        uint64_t word = htobe64(number * 0x9e3779b97f4a7c15U + i);
        memcpy(buffer + i * sizeof word, &word, sizeof word);
    }
    number = htobe64(number);
    memcpy(buffer, &number, sizeof number);
}

static uint64_t read_message(const char *buffer)
{
    uint64_t number;
    char wanted[MESSAGE_LEN];
    memcpy(&number, buffer, sizeof number);
    number = be64toh(number);
    write_message(wanted, number);
    if (memcmp(buffer, wanted, MESSAGE_LEN) != 0)
        die("a message is corrupt");
    return number;
}

/* ---- the NIC ---------------------------------------------------------------------------------------------------- */

static struct nic open_nic(const struct options *options, int buffer_count)
{
    struct nic nic = {0};
    struct ibv_device **list = ibv_get_device_list(NULL);
    if (list == NULL || list[0] == NULL)
        die("no RDMA device on this machine");
    nic.context = ibv_open_device(list[0]);
    if (nic.context == NULL)
        die("cannot open %s: %s", ibv_get_device_name(list[0]), strerror(errno));
    ibv_free_device_list(list);
    if (ibv_query_port(nic.context, IB_PORT, &nic.port) != 0 ||
        ibv_query_gid(nic.context, IB_PORT, options->gid_index, &nic.gid) != 0)
        die("no GID with index %d", options->gid_index);
    nic.pd = ibv_alloc_pd(nic.context);
    nic.cq = ibv_create_cq(nic.context, 2 * (RECEIVES + SENDS_IN_FLIGHT), NULL, NULL, 0);
    nic.buffers = calloc((size_t)buffer_count, MESSAGE_LEN);
    if (nic.pd == NULL || nic.cq == NULL || nic.buffers == NULL)
        die("cannot create a protection domain and a completion queue: %s", strerror(errno));
    nic.mr = ibv_reg_mr(nic.pd, nic.buffers, (size_t)buffer_count * MESSAGE_LEN, IBV_ACCESS_LOCAL_WRITE);
    if (nic.mr == NULL)
        die("cannot register memory: %s", strerror(errno));
    return nic;
}

static void close_nic(const struct nic *nic)
{
    ibv_dereg_mr(nic->mr);
    ibv_destroy_cq(nic->cq);
    ibv_dealloc_pd(nic->pd);
    ibv_close_device(nic->context);
    free(nic->buffers);
}

static struct ibv_qp *create_qp(const struct nic *nic)
{
    struct ibv_qp_init_attr init = {
        .send_cq = nic->cq,
        .recv_cq = nic->cq,
        .cap = {.max_send_wr = SENDS_IN_FLIGHT, .max_recv_wr = RECEIVES, .max_send_sge = 1, .max_recv_sge = 1},
        .qp_type = IBV_QPT_RC,
        .sq_sig_all = 1,
    };
    struct ibv_qp *qp = ibv_create_qp(nic->pd, &init);
    if (qp == NULL)
        die("cannot create a queue pair: %s", strerror(errno));
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = IB_PORT};
    int error = ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
    if (error != 0)
        die("queue pair to INIT: %s", strerror(error));
    return qp;
}

/* Takes the queue pair from INIT to RTS towards `peer`. Its retries end after a fraction of a second. */
static void connect_qp(const struct options *options, struct ibv_qp *qp, uint32_t psn, const struct parameters *peer)
{
    struct ibv_qp_attr rtr = {
        .qp_state = IBV_QPS_RTR,
        .path_mtu = IBV_MTU_1024,
        .dest_qp_num = ntohl(peer->qpn),
        .rq_psn = ntohl(peer->psn),
        .min_rnr_timer = 14, /* 1.28 ms */
        .ah_attr = {.port_num = IB_PORT,
                    .is_global = 1,
                    .grh = {.sgid_index = (uint8_t)options->gid_index, .hop_limit = 64}},
    };
    memcpy(rtr.ah_attr.grh.dgid.raw, peer->gid, sizeof peer->gid);
    int error = ibv_modify_qp(qp, &rtr,
                              IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                  IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
    if (error != 0)
        die("queue pair to RTR: %s", strerror(error));
    struct ibv_qp_attr rts = {
        .qp_state = IBV_QPS_RTS, .sq_psn = psn, .timeout = 11 /* 8 ms */, .retry_cnt = 3, .rnr_retry = 3};
    error = ibv_modify_qp(qp, &rts,
                          IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                              IBV_QP_MAX_QP_RD_ATOMIC);
    if (error != 0)
        die("queue pair to RTS: %s", strerror(error));
}

/* ---- connections ------------------------------------------------------------------------------------------------ */

static int listen_at(const char *tcp_port)
{
    int listener = socket(AF_INET6, SOCK_STREAM, 0);
    int on = 1, off = 0;
    struct sockaddr_in6 any = {.sin6_family = AF_INET6, .sin6_port = htons((uint16_t)atoi(tcp_port))};
    if (listener >= 0) {
        setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
        setsockopt(listener, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    }
    if (listener < 0 || bind(listener, (struct sockaddr *)&any, sizeof any) != 0 || listen(listener, 8) != 0)
        die("cannot listen on TCP port %s: %s", tcp_port, strerror(errno));
    return listener;
}

static int connect_tcp(const char *host, const char *tcp_port)
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *found = NULL;
    int error = getaddrinfo(host, tcp_port, &hints, &found);
    if (error != 0)
        die("%s: %s", host, gai_strerror(error));
    int tcp = -1;
    for (struct addrinfo *each = found; each != NULL && tcp < 0; each = each->ai_next) {
        tcp = socket(each->ai_family, each->ai_socktype, each->ai_protocol);
        if (tcp >= 0 && connect(tcp, each->ai_addr, each->ai_addrlen) != 0) {
            close(tcp);
            tcp = -1;
        }
    }
    freeaddrinfo(found);
    return tcp;
}

/* A barrier between both ends. */
static bool rendezvous(int tcp)
{
    char mark = '!';
    return send(tcp, &mark, 1, MSG_NOSIGNAL) == 1 && recv(tcp, &mark, 1, MSG_WAITALL) == 1;
}

static void post_receive(const struct nic *nic, struct ibv_qp *qp, uint64_t slot)
{
    struct ibv_sge sge = {
        .addr = (uintptr_t)nic->buffers + slot * MESSAGE_LEN, .length = MESSAGE_LEN, .lkey = nic->mr->lkey};
    struct ibv_recv_wr wr = {.wr_id = slot, .sg_list = &sge, .num_sge = 1}, *bad;
    int error = ibv_post_recv(qp, &wr, &bad);
    if (error != 0)
        die("cannot post a receive: %s", strerror(error));
}

/* Creates a queue pair and connects it with that of the other end. */
static bool open_connection(const struct nic *nic, const struct options *options, struct connection *connection, int receives)
{
    connection->qp = create_qp(nic);
    for (int slot = 0; slot < receives; slot++)
        post_receive(nic, connection->qp, (uint64_t)slot);
    uint32_t psn = (uint32_t)random() & 0xffffff;
    struct parameters self = {.qpn = htonl(connection->qp->qp_num), .psn = htonl(psn)}, peer;
    self.count = htobe64(connection->count);
    self.next = htobe64(connection->next);
    memcpy(self.gid, nic->gid.raw, sizeof self.gid);
    if (send(connection->tcp, &self, sizeof self, MSG_NOSIGNAL) != (ssize_t)sizeof self ||
        recv(connection->tcp, &peer, sizeof peer, MSG_WAITALL) != (ssize_t)sizeof peer)
        return false;
    connect_qp(options, connection->qp, psn, &peer);
    if (receives > 0)
        connection->count = be64toh(peer.count);
    else
        connection->next = be64toh(peer.next);
    return rendezvous(connection->tcp);
}

/* Ends a connection and discards its remaining completions. */
static void close_connection(const struct nic *nic, struct connection *connection)
{
    struct ibv_wc wc;
    ibv_destroy_qp(connection->qp);
    while (ibv_poll_cq(nic->cq, 1, &wc) > 0)
        ;
    close(connection->tcp);
}

/* ---- serve ------------------------------------------------------------------------------------------------------ */

/* Receives messages until the client has closed the TCP connection, or all have arrived and the client knows that. */
static bool receive_messages(const struct nic *nic, struct connection *connection)
{
    char byte;
    unsigned idle_polls = 0;
    while (connection->next < connection->count) {
        struct ibv_wc wc;
        int found = ibv_poll_cq(nic->cq, 1, &wc);
        if (found < 0)
            die("polling failed");
        if (found == 0) {
            if (++idle_polls % 1000 == 0 && recv(connection->tcp, &byte, 1, MSG_DONTWAIT | MSG_PEEK) == 0)
                return false;
            continue;
        }
        if (wc.status != IBV_WC_SUCCESS) {
            printf("receive: %s\n", ibv_wc_status_str(wc.status));
            return false;
        }
        uint64_t number = read_message(nic->buffers + wc.wr_id * MESSAGE_LEN);
        if (number != connection->next)
            die("message %" PRIu64 " came in place of %" PRIu64, number, connection->next);
        connection->next++;
        post_receive(nic, connection->qp, wc.wr_id);
    }
    return rendezvous(connection->tcp);
}

static int serve(const struct options *options)
{
    struct nic nic = open_nic(options, RECEIVES);
    int listener = listen_at(options->tcp_port);
    struct connection connection = {.count = UINT64_MAX};
    bool complete = false;
    int connections = 0;
    while (!complete) {
        connection.tcp = accept(listener, NULL, NULL);
        if (connection.tcp < 0)
            die("accept: %s", strerror(errno));
        connections++;
        if (open_connection(&nic, options, &connection, RECEIVES))
            complete = receive_messages(&nic, &connection);
        close_connection(&nic, &connection);
    }
    printf("%" PRIu64 " messages, each once and in order, over %d connections\n", connection.next, connections);
    close(listener);
    close_nic(&nic);
    return 0;
}

/* ---- send ------------------------------------------------------------------------------------------------------- */

static void post_send(const struct nic *nic, struct ibv_qp *qp, uint64_t number)
{
    char *buffer = nic->buffers + number % SENDS_IN_FLIGHT * MESSAGE_LEN;
    write_message(buffer, number);
    struct ibv_sge sge = {.addr = (uintptr_t)buffer, .length = MESSAGE_LEN, .lkey = nic->mr->lkey};
    struct ibv_send_wr wr = {.wr_id = number, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND}, *bad;
    int error = ibv_post_send(qp, &wr, &bad);
    if (error != 0)
        die("cannot post message %" PRIu64 ": %s", number, strerror(error));
}

/* Sends from the next message that the server expects. Returns at the first error, which flushes later requests. */
static enum ibv_wc_status send_messages(const struct nic *nic, const struct connection *connection)
{
    uint64_t posted = connection->next, done = connection->next;
    while (done < connection->count) {
        while (posted < connection->count && posted - done < SENDS_IN_FLIGHT)
            post_send(nic, connection->qp, posted++);
        struct ibv_wc wc;
        int found = ibv_poll_cq(nic->cq, 1, &wc);
        if (found < 0)
            die("polling failed");
        if (found == 0)
            continue;
        if (wc.status != IBV_WC_SUCCESS) {
            printf("message %" PRIu64 ": %s\n", wc.wr_id, ibv_wc_status_str(wc.status));
            return wc.status;
        }
        done++;
    }
    return IBV_WC_SUCCESS;
}

static int send_all(const struct options *options, const char *host)
{
    struct nic nic = open_nic(options, SENDS_IN_FLIGHT);
    bool complete = false;
    int connections = 0;
    for (int attempts = 0; !complete && attempts < ATTEMPTS_MAX && (connections == 0 || !options->fragile); attempts++) {
        struct connection connection = {.tcp = connect_tcp(host, options->tcp_port), .count = options->count};
        if (connection.tcp < 0) {
            pause_ms(50);
            continue;
        }
        connections++;
        if (open_connection(&nic, options, &connection, 0))
            complete = send_messages(&nic, &connection) == IBV_WC_SUCCESS && rendezvous(connection.tcp);
        close_connection(&nic, &connection);
    }
    if (complete)
        printf("all messages sent, over %d connections\n", connections);
    else
        printf("not all messages could be sent\n");
    close_nic(&nic);
    return complete ? 0 : 1;
}

/* ---- command line ----------------------------------------------------------------------------------------------- */

static int usage(FILE *out, int status)
{
    fputs("Usage: resilient_send serve [OPTIONS]       receive messages\n"
          "       resilient_send send [OPTIONS] HOST   send messages\n"
          "Options:\n"
          "  -g, --gid INDEX     GID index (default 0)\n"
          "  -p, --port PORT     TCP port of the server (default 18700)\n"
          "  -n, --count COUNT   messages (default 5000)\n"
          "  -f, --fragile       end at the first error\n",
          out);
    return status;
}

static unsigned long number(const char *text, unsigned long min, unsigned long max, const char *name)
{
    char *end = NULL;
    errno = 0;
    unsigned long value = strtoul(text, &end, 10);
    if (errno != 0 || end == text || *end != '\0' || value < min || value > max)
        die("%s must be a number from %lu to %lu", name, min, max);
    return value;
}

int main(int argc, char **argv)
{
    static const struct option LONG[] = {
        {"gid", required_argument, NULL, 'g'}, {"port", required_argument, NULL, 'p'}, {"count", required_argument, NULL, 'n'},
        {"fragile", no_argument, NULL, 'f'},   {"help", no_argument, NULL, 'h'},       {NULL, 0, NULL, 0},
    };
    struct options options = {.tcp_port = "18700", .count = 5000};
    int flag;
    setvbuf(stdout, NULL, _IOLBF, 0);
    while ((flag = getopt_long(argc, argv, "g:p:n:fh", LONG, NULL)) != -1) {
        switch (flag) {
        case 'g': options.gid_index = (int)number(optarg, 0, 255, "the GID index"); break;
        case 'p': number(optarg, 1, 65535, "the TCP port"); options.tcp_port = optarg; break;
        case 'n': options.count = number(optarg, 1, 1000000000, "the count"); break;
        case 'f': options.fragile = true; break;
        case 'h': return usage(stdout, 0);
        default: return usage(stderr, 2);
        }
    }
    if (argc - optind == 1 && strcmp(argv[optind], "serve") == 0)
        return serve(&options);
    if (argc - optind == 2 && strcmp(argv[optind], "send") == 0)
        return send_all(&options, argv[optind + 1]);
    return usage(stderr, 2);
}
