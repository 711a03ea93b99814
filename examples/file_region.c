/*
 * file_region: reads a whole file from another process's memory over RDMA.
 *
 * The program uses plain verbs, and runs on any RDMA device. The server maps a file and registers the mapping as one
 * memory region. Then it neither reads the data nor polls. The client keeps several READs outstanding until it has all
 * of the file, and writes the bytes, in order, to standard output. Another program checks them:
 *
 *     file_region serve data.bin                         (server)
 *     file_region fetch 192.0.2.1 | sha256sum            (client)
 *     sha256sum < data.bin
 *
 * So the program needs no hash library, and the hash covers the bytes that the client really wrote.
 *
 * Build:  cc -O2 -o file_region file_region.c -libverbs
 */
#include <arpa/inet.h>
#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <inttypes.h>
#include <netdb.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <infiniband/verbs.h>

enum { IB_PORT = 1, READS_IN_FLIGHT_MAX = 16 };

struct options {
    const char *device;   /* NULL for the first device */
    const char *tcp_port; /* of the server's listener */
    int gid_index;
    bool odp;       /* register with on-demand paging, for NICs that would pin otherwise */
    uint32_t chunk; /* bytes of one READ */
    unsigned depth; /* READs posted at a time */
};

struct nic {
    struct ibv_context *context;
    struct ibv_pd *pd;
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    struct ibv_device_attr attr;
    struct ibv_port_attr port;
    union ibv_gid gid;
};

/* The parameters of one end that the other needs. TCP carries them, every field in network byte order. */
struct parameters {
    uint8_t gid[16];
    uint32_t qpn;
    uint32_t psn;
    uint32_t mtu; /* enum ibv_mtu */
    uint32_t lid;
    uint32_t reads; /* READs outstanding that this end supports as responder, or as requester */
    uint32_t rkey;
    uint64_t addr;
    uint64_t length;
} __attribute__((packed));

static void die(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fprintf(stderr, "file_region: ");
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

/* ---- the NIC ---------------------------------------------------------------------------------------------------- */

static struct ibv_context *open_device(const char *wanted)
{
    int count = 0;
    struct ibv_device **list = ibv_get_device_list(&count);
    if (list == NULL || count == 0)
        die("no RDMA device on this machine");
    struct ibv_device *chosen = wanted == NULL ? list[0] : NULL;
    for (int i = 0; i < count && chosen == NULL; i++)
        if (strcmp(ibv_get_device_name(list[i]), wanted) == 0)
            chosen = list[i];
    if (chosen == NULL)
        die("no RDMA device named %s", wanted);
    struct ibv_context *context = ibv_open_device(chosen);
    if (context == NULL)
        die("cannot open %s: %s", ibv_get_device_name(chosen), strerror(errno));
    ibv_free_device_list(list);
    return context;
}

static struct nic open_nic(const struct options *options)
{
    struct nic nic = {.context = open_device(options->device)};
    if (ibv_query_device(nic.context, &nic.attr) != 0 || ibv_query_port(nic.context, IB_PORT, &nic.port) != 0)
        die("cannot query the device: %s", strerror(errno));
    if (ibv_query_gid(nic.context, IB_PORT, options->gid_index, &nic.gid) != 0)
        die("no GID with index %d", options->gid_index);
    nic.pd = ibv_alloc_pd(nic.context);
    nic.cq = ibv_create_cq(nic.context, (int)options->depth, NULL, NULL, 0);
    if (nic.pd == NULL || nic.cq == NULL)
        die("cannot create a protection domain and a completion queue: %s", strerror(errno));
    struct ibv_qp_init_attr init = {
        .send_cq = nic.cq,
        .recv_cq = nic.cq,
        .cap = {.max_send_wr = options->depth, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1},
        .qp_type = IBV_QPT_RC,
        .sq_sig_all = 1,
    };
    nic.qp = ibv_create_qp(nic.pd, &init);
    if (nic.qp == NULL)
        die("cannot create a queue pair: %s", strerror(errno));
    return nic;
}

static struct parameters introduce(const struct nic *nic, uint32_t psn, uint32_t reads, const struct ibv_mr *mr)
{
    struct parameters self = {
        .qpn = htonl(nic->qp->qp_num),
        .psn = htonl(psn),
        .mtu = htonl(nic->port.active_mtu),
        .lid = htonl(nic->port.lid),
        .reads = htonl(reads),
    };
    memcpy(self.gid, nic->gid.raw, sizeof self.gid);
    if (mr != NULL) {
        self.rkey = htonl(mr->rkey);
        self.addr = htobe64((uintptr_t)mr->addr);
        self.length = htobe64(mr->length);
    }
    return self;
}

/* Takes the queue pair from RESET to RTS towards `peer`. */
static void connect_qp(const struct nic *nic, const struct options *options, uint32_t psn, uint32_t reads,
                       const struct parameters *peer)
{
    struct ibv_qp_attr init = {
        .qp_state = IBV_QPS_INIT, .port_num = IB_PORT, .qp_access_flags = IBV_ACCESS_REMOTE_READ};
    int error = ibv_modify_qp(nic->qp, &init,
                              IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
    if (error != 0)
        die("queue pair to INIT: %s", strerror(error));

    uint32_t peer_mtu = ntohl(peer->mtu);
    struct ibv_qp_attr rtr = {
        .qp_state = IBV_QPS_RTR,
        .path_mtu = peer_mtu < nic->port.active_mtu ? (enum ibv_mtu)peer_mtu : nic->port.active_mtu,
        .dest_qp_num = ntohl(peer->qpn),
        .rq_psn = ntohl(peer->psn),
        .max_dest_rd_atomic = (uint8_t)reads,
        .min_rnr_timer = 12,
        .ah_attr = {.dlid = (uint16_t)ntohl(peer->lid),
                    .port_num = IB_PORT,
                    .is_global = 1,
                    .grh = {.sgid_index = (uint8_t)options->gid_index, .hop_limit = 64}},
    };
    memcpy(rtr.ah_attr.grh.dgid.raw, peer->gid, sizeof peer->gid);
    error = ibv_modify_qp(nic->qp, &rtr,
                          IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                              IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
    if (error != 0)
        die("queue pair to RTR: %s", strerror(error));

    /* Half a second, because the server may have to read the data from a busy disk. */
    struct ibv_qp_attr rts = {.qp_state = IBV_QPS_RTS,
                              .sq_psn = psn,
                              .timeout = 17,
                              .retry_cnt = 7,
                              .rnr_retry = 7,
                              .max_rd_atomic = (uint8_t)reads};
    error = ibv_modify_qp(nic->qp, &rts,
                          IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                              IBV_QP_MAX_QP_RD_ATOMIC);
    if (error != 0)
        die("queue pair to RTS: %s", strerror(error));
}

static void close_nic(const struct nic *nic)
{
    ibv_destroy_qp(nic->qp);
    ibv_destroy_cq(nic->cq);
    ibv_dealloc_pd(nic->pd);
    ibv_close_device(nic->context);
}

/* ---- TCP connection to the other end ---------------------------------------------------------------------------- */

static int accept_client(const char *tcp_port)
{
    int listener = socket(AF_INET6, SOCK_STREAM, 0);
    int on = 1, off = 0;
    struct sockaddr_in6 any = {.sin6_family = AF_INET6, .sin6_port = htons((uint16_t)atoi(tcp_port))};
    if (listener >= 0) {
        setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
        setsockopt(listener, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    }
    if (listener < 0 || bind(listener, (struct sockaddr *)&any, sizeof any) != 0 || listen(listener, 1) != 0)
        die("cannot listen on TCP port %s: %s", tcp_port, strerror(errno));
    int client = accept(listener, NULL, NULL);
    if (client < 0)
        die("accept: %s", strerror(errno));
    close(listener);
    return client;
}

static int connect_server(const char *host, const char *tcp_port)
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *found = NULL;
    int error = getaddrinfo(host, tcp_port, &hints, &found);
    if (error != 0)
        die("%s: %s", host, gai_strerror(error));
    int server = -1;
    for (struct addrinfo *each = found; each != NULL && server < 0; each = each->ai_next) {
        server = socket(each->ai_family, each->ai_socktype, each->ai_protocol);
        if (server >= 0 && connect(server, each->ai_addr, each->ai_addrlen) != 0) {
            close(server);
            server = -1;
        }
    }
    freeaddrinfo(found);
    if (server < 0)
        die("cannot connect to %s port %s: %s", host, tcp_port, strerror(errno));
    return server;
}

static struct parameters swap_introductions(int peer, const struct parameters *self)
{
    struct parameters theirs;
    if (send(peer, self, sizeof *self, MSG_NOSIGNAL) != (ssize_t)sizeof *self ||
        recv(peer, &theirs, sizeof theirs, MSG_WAITALL) != (ssize_t)sizeof theirs)
        die("the other end closed the connection");
    return theirs;
}

/* A barrier between both ends. It delays READs until the queue pair is ready, and deregistration until after the last
 * READ. */
static bool rendezvous(int peer)
{
    char mark = '!';
    return send(peer, &mark, 1, MSG_NOSIGNAL) == 1 && recv(peer, &mark, 1, MSG_WAITALL) == 1;
}

static uint32_t reads_at_a_time(int device_limit)
{
    return (uint32_t)(device_limit < READS_IN_FLIGHT_MAX ? device_limit : READS_IN_FLIGHT_MAX);
}

/* ---- serve ------------------------------------------------------------------------------------------------------ */

static int serve(const struct options *options, const char *path)
{
    int file = open(path, O_RDONLY);
    struct stat status;
    if (file < 0 || fstat(file, &status) != 0)
        die("%s: %s", path, strerror(errno));
    if (status.st_size == 0)
        die("%s is empty", path);
    size_t length = (size_t)status.st_size;
    void *mapping = mmap(NULL, length, PROT_READ, MAP_SHARED, file, 0);
    if (mapping == MAP_FAILED)
        die("cannot map %s: %s", path, strerror(errno));

    struct nic nic = open_nic(options);
    int access = IBV_ACCESS_REMOTE_READ | (options->odp ? IBV_ACCESS_ON_DEMAND : 0);
    double start = seconds_now();
    struct ibv_mr *mr = ibv_reg_mr(nic.pd, mapping, length, access);
    if (mr == NULL)
        die("cannot register %zu bytes: %s", length, strerror(errno));
    fprintf(stderr, "file_region: serving %zu MiB of %s, registered in %.1f us; waiting on TCP port %s\n",
            length >> 20, path, (seconds_now() - start) * 1e6, options->tcp_port);

    int client = accept_client(options->tcp_port);
    uint32_t psn = (uint32_t)getpid() & 0xffffff;
    uint32_t reads = reads_at_a_time(nic.attr.max_qp_rd_atom);
    struct parameters self = introduce(&nic, psn, reads, mr);
    struct parameters peer = swap_introductions(client, &self);
    connect_qp(&nic, options, psn, reads, &peer);
    bool complete = rendezvous(client) && rendezvous(client);

    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    fprintf(stderr, "file_region: %s; resident at most %ld MiB\n",
            complete ? "the client has the whole file" : "the client closed the connection", usage.ru_maxrss >> 10);
    ibv_dereg_mr(mr);
    close_nic(&nic);
    return complete ? 0 : 1;
}

/* ---- fetch ------------------------------------------------------------------------------------------------------ */

struct transfer {
    const struct nic *nic;
    uint32_t chunk;
    unsigned depth;
    char *ring; /* `depth` slots of `chunk` bytes; READ number n uses slot n mod depth */
    uint32_t lkey;
    uint64_t addr;
    uint32_t rkey;
    uint64_t length;
};

static uint32_t chunk_length(const struct transfer *transfer, uint64_t index)
{
    uint64_t rest = transfer->length - index * transfer->chunk;
    return rest < transfer->chunk ? (uint32_t)rest : transfer->chunk;
}

static void post_read(const struct transfer *transfer, uint64_t index)
{
    struct ibv_sge sge = {
        .addr = (uintptr_t)(transfer->ring + (index % transfer->depth) * transfer->chunk),
        .length = chunk_length(transfer, index),
        .lkey = transfer->lkey,
    };
    struct ibv_send_wr read = {
        .wr_id = index,
        .sg_list = &sge,
        .num_sge = 1,
        .opcode = IBV_WR_RDMA_READ,
        .wr.rdma = {.remote_addr = transfer->addr + index * transfer->chunk, .rkey = transfer->rkey},
    };
    struct ibv_send_wr *bad = NULL;
    int error = ibv_post_send(transfer->nic->qp, &read, &bad);
    if (error != 0)
        die("cannot post READ %" PRIu64 ": %s", index, strerror(error));
}

static void write_out(const char *bytes, size_t length)
{
    while (length > 0) {
        ssize_t written = write(STDOUT_FILENO, bytes, length);
        if (written < 0 && errno == EINTR)
            continue;
        if (written <= 0)
            die("cannot write the data: %s", strerror(errno));
        bytes += written;
        length -= (size_t)written;
    }
}

/* Prints a progress line. A terminal shows one line, which is overwritten. */
static void report(const struct transfer *transfer, uint64_t done, double started, bool last)
{
    static double reported;
    bool terminal = isatty(STDERR_FILENO);
    double now = seconds_now();
    if (!last && now - reported < (terminal ? 0.25 : 2.0))
        return;
    reported = now;
    fprintf(stderr, "%sfile_region: %" PRIu64 " of %" PRIu64 " MiB, %.0f MiB/s%s", terminal ? "\r" : "", done >> 20,
            transfer->length >> 20, (double)done / (1 << 20) / (now - started), terminal && !last ? "   " : "\n");
}

/* READs of one queue pair complete in the order of posting, so the data can be written out as it arrives. */
static void read_all(const struct transfer *transfer)
{
    uint64_t count = (transfer->length + transfer->chunk - 1) / transfer->chunk;
    uint64_t posted = 0, done = 0;
    double started = seconds_now();
    while (posted < count && posted < transfer->depth)
        post_read(transfer, posted++);
    while (done < count) {
        struct ibv_wc wc;
        int polled = ibv_poll_cq(transfer->nic->cq, 1, &wc);
        if (polled < 0)
            die("cannot poll the completion queue");
        if (polled == 0)
            continue;
        if (wc.status != IBV_WC_SUCCESS)
            die("READ %" PRIu64 ": %s", wc.wr_id, ibv_wc_status_str(wc.status));
        if (wc.wr_id != done)
            die("READ %" PRIu64 " completed before READ %" PRIu64, wc.wr_id, done);
        write_out(transfer->ring + (done % transfer->depth) * transfer->chunk, chunk_length(transfer, done));
        done++;
        if (posted < count)
            post_read(transfer, posted++);
        report(transfer, done == count ? transfer->length : done * transfer->chunk, started, done == count);
    }
}

static int fetch(const struct options *options, const char *host)
{
    if (isatty(STDOUT_FILENO))
        die("the file would go to the terminal; redirect it, for example: file_region fetch %s | sha256sum", host);
    struct nic nic = open_nic(options);
    size_t ring_length = (size_t)options->depth * options->chunk;
    char *ring = aligned_alloc(4096, ring_length);
    if (ring == NULL)
        die("no memory for %zu bytes of buffers", ring_length);
    struct ibv_mr *mr = ibv_reg_mr(nic.pd, ring, ring_length, IBV_ACCESS_LOCAL_WRITE);
    if (mr == NULL)
        die("cannot register %zu bytes: %s", ring_length, strerror(errno));

    int server = connect_server(host, options->tcp_port);
    uint32_t psn = (uint32_t)getpid() & 0xffffff;
    uint32_t own_limit = reads_at_a_time(nic.attr.max_qp_init_rd_atom);
    struct parameters self = introduce(&nic, psn, own_limit, NULL);
    struct parameters peer = swap_introductions(server, &self);
    uint32_t peer_limit = ntohl(peer.reads);
    connect_qp(&nic, options, psn, own_limit < peer_limit ? own_limit : peer_limit, &peer);
    if (!rendezvous(server))
        die("the server closed the connection");

    struct transfer transfer = {
        .nic = &nic,
        .chunk = options->chunk,
        .depth = options->depth,
        .ring = ring,
        .lkey = mr->lkey,
        .addr = be64toh(peer.addr),
        .rkey = ntohl(peer.rkey),
        .length = be64toh(peer.length),
    };
    read_all(&transfer);
    bool complete = rendezvous(server);
    ibv_dereg_mr(mr);
    close_nic(&nic);
    free(ring);
    return complete ? 0 : 1;
}

/* ---- command line ----------------------------------------------------------------------------------------------- */

static void usage(FILE *out)
{
    fputs("Usage: file_region serve [OPTIONS] FILE     serve FILE to one client\n"
          "       file_region fetch [OPTIONS] HOST     READ it to standard output\n"
          "Options:\n"
          "  -d, --device NAME   RDMA device (default: the first one)\n"
          "  -g, --gid INDEX     GID index (default 0)\n"
          "  -p, --port PORT     TCP port of the server (default 18600)\n"
          "  -c, --chunk BYTES   size of one READ, a multiple of 4096 (default 1048576)\n"
          "  -n, --depth COUNT   READs posted at a time (default 16)\n"
          "  -o, --odp           register with on-demand paging\n",
          out);
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
        {"device", required_argument, NULL, 'd'}, {"gid", required_argument, NULL, 'g'},
        {"port", required_argument, NULL, 'p'},   {"chunk", required_argument, NULL, 'c'},
        {"depth", required_argument, NULL, 'n'},  {"odp", no_argument, NULL, 'o'},
        {"help", no_argument, NULL, 'h'},         {NULL, 0, NULL, 0},
    };
    struct options options = {.tcp_port = "18600", .chunk = 1 << 20, .depth = READS_IN_FLIGHT_MAX};
    int flag;
    while ((flag = getopt_long(argc, argv, "d:g:p:c:n:oh", LONG, NULL)) != -1) {
        switch (flag) {
        case 'd': options.device = optarg; break;
        case 'g': options.gid_index = (int)number(optarg, 0, 255, "the GID index"); break;
        case 'p': number(optarg, 1, 65535, "the TCP port"); options.tcp_port = optarg; break;
        case 'c': options.chunk = (uint32_t)number(optarg, 4096, 1UL << 30, "the chunk size") & ~4095U; break;
        case 'n': options.depth = (unsigned)number(optarg, 1, 1024, "the depth"); break;
        case 'o': options.odp = true; break;
        case 'h': usage(stdout); return 0;
        default: usage(stderr); return 2;
        }
    }
    if (argc - optind == 2 && strcmp(argv[optind], "serve") == 0)
        return serve(&options, argv[optind + 1]);
    if (argc - optind == 2 && strcmp(argv[optind], "fetch") == 0)
        return fetch(&options, argv[optind + 1]);
    usage(stderr);
    return 2;
}
