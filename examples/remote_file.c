/*
 * remote_file: a memory region that is a file, which grows, is punched and truncated while a peer reads and writes it.
 *
 * The server registers a file with ibv_reg_mr_ex() and never touches it through memory. The client READs, WRITEs and adds by
 * offset in the file. It has the server change the file's layout meanwhile, and checks every byte:
 *
 *     terrace run -- remote_file serve data.bin           (server)
 *     terrace run -- remote_file check 192.0.2.1          (client)
 *
 * Build:  cc -O2 -o remote_file remote_file.c -libverbs
 *         with -I for terrace.h, where rdma-core is older than 60
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define RDMA_CORE_BEFORE_60
#include <terrace.h>

enum {
    IB_PORT = 1,
    DEPTH = 16,
    PIECE = 8192,          /* bytes of a request */
    STABLE = 1 << 20,      /* the file's first bytes, which the client writes all the time */
    COUNTER = STABLE - 64, /* a counter among them */
    GROWN = 3 << 20,       /* the file's length after it has grown */
    HOLE = STABLE + 40000, /* a part that is punched */
    HOLE_BYTES = 700000,
    ROUNDS = 20,
};

struct nic {
    struct ibv_context *context;
    struct ibv_pd *pd;
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    struct ibv_port_attr port;
    union ibv_gid gid;
};

/* What one end has to know of the other. Both ends are of one architecture. */
struct parameters {
    union ibv_gid gid;
    uint32_t qpn, lid, rkey;
};

static void die(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fprintf(stderr, "remote_file: ");
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    exit(1);
}

/* A function that the loaded library need not have. */
static void *function(const char *name)
{
    void *found = dlsym(RTLD_DEFAULT, name);
    if (found == NULL)
        die("this libibverbs has no %s: run the program by `terrace run`", name);
    return found;
}

static struct nic open_nic(void)
{
    struct nic nic = {0};
    struct ibv_device **list = ibv_get_device_list(NULL);
    if (list == NULL || list[0] == NULL)
        die("no RDMA device on this machine");
    nic.context = ibv_open_device(list[0]);
    ibv_free_device_list(list);
    if (nic.context == NULL || ibv_query_port(nic.context, IB_PORT, &nic.port) != 0 ||
        ibv_query_gid(nic.context, IB_PORT, 0, &nic.gid) != 0)
        die("cannot open the device: %s", strerror(errno));
    nic.pd = ibv_alloc_pd(nic.context);
    nic.cq = ibv_create_cq(nic.context, 2 * DEPTH, NULL, NULL, 0);
    struct ibv_qp_init_attr init = {
        .send_cq = nic.cq,
        .recv_cq = nic.cq,
        .cap = {.max_send_wr = 2 * DEPTH, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1},
        .qp_type = IBV_QPT_RC,
        .sq_sig_all = 1,
    };
    nic.qp = ibv_create_qp(nic.pd, &init);
    if (nic.qp == NULL)
        die("cannot create a queue pair: %s", strerror(errno));
    return nic;
}

static void connect_qp(const struct nic *nic, const struct parameters *peer)
{
    struct ibv_qp_attr init = {.qp_state = IBV_QPS_INIT,
                               .port_num = IB_PORT,
                               .qp_access_flags =
                                   IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC};
    struct ibv_qp_attr rtr = {.qp_state = IBV_QPS_RTR,
                              .path_mtu = nic->port.active_mtu,
                              .dest_qp_num = peer->qpn,
                              .max_dest_rd_atomic = DEPTH,
                              .min_rnr_timer = 12,
                              .ah_attr = {.dlid = (uint16_t)peer->lid,
                                          .port_num = IB_PORT,
                                          .is_global = 1,
                                          .grh = {.dgid = peer->gid, .hop_limit = 64}}};
    struct ibv_qp_attr rts = {
        .qp_state = IBV_QPS_RTS, .timeout = 17, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = DEPTH};
    if (ibv_modify_qp(nic->qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) != 0 ||
        ibv_modify_qp(nic->qp, &rtr,
                      IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                          IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER) != 0 ||
        ibv_modify_qp(nic->qp, &rts,
                      IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                          IBV_QP_MAX_QP_RD_ATOMIC) != 0)
        die("cannot connect the queue pair: %s", strerror(errno));
}

static void send_all(int peer, const void *data, size_t bytes)
{
    if (send(peer, data, bytes, MSG_NOSIGNAL) != (ssize_t)bytes)
        die("the other end closed the connection");
}

static void receive_all(int peer, void *data, size_t bytes)
{
    if (recv(peer, data, bytes, MSG_WAITALL) != (ssize_t)bytes)
        die("the other end closed the connection");
}

static struct parameters introduce(const struct nic *nic, int peer, uint32_t rkey)
{
    struct parameters self = {.gid = nic->gid, .qpn = nic->qp->qp_num, .lid = nic->port.lid, .rkey = rkey}, theirs;
    send_all(peer, &self, sizeof self);
    receive_all(peer, &theirs, sizeof theirs);
    connect_qp(nic, &theirs);
    return theirs;
}

/* The byte that the file's grown part has at an offset. */
static uint8_t grown_byte(uint64_t offset)
{
    return (uint8_t)(offset * 2654435761u >> 13);
}

/* ---- server ----------------------------------------------------------------------------------------------------- */

static int listen_and_accept(const char *port)
{
    int listener = socket(AF_INET, SOCK_STREAM, 0), on = 1;
    struct sockaddr_in any = {.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(port))};
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(listener, (struct sockaddr *)&any, sizeof any) != 0 || listen(listener, 1) != 0)
        die("cannot listen on TCP port %s: %s", port, strerror(errno));
    int client = accept(listener, NULL, NULL);
    if (client < 0)
        die("accept: %s", strerror(errno));
    close(listener);
    return client;
}

/* Grows the file as any program does. */
static void grow(int file)
{
    static uint8_t data[GROWN - STABLE];
    for (size_t i = 0; i < sizeof data; i++)
        data[i] = grown_byte(STABLE + i);
    if (pwrite(file, data, sizeof data, STABLE) != (ssize_t)sizeof data)
        die("cannot grow the file: %s", strerror(errno));
}

static int serve(const char *path, const char *port)
{
    int file = open(path, O_RDWR | O_CREAT, 0600);
    if (file < 0 || ftruncate(file, STABLE) != 0)
        die("%s: %s", path, strerror(errno));
    struct nic nic = open_nic();
    struct ibv_mr_init_attr attr = {.comp_mask = IBV_REG_MR_MASK_FD,
                                    .fd = file,
                                    .length = SIZE_MAX, /* as long as the file is */
                                    .access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ |
                                              IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC};
    __typeof__(&ibv_reg_mr_ex) reg_mr_ex = function("ibv_reg_mr_ex");
    __typeof__(&terrace_truncate) truncate_region = function("terrace_truncate");
    __typeof__(&terrace_punch) punch_region = function("terrace_punch");
    struct ibv_mr *mr = reg_mr_ex(nic.pd, &attr);
    if (mr == NULL)
        die("cannot register %s: %s", path, strerror(errno));
    printf("registered %zu bytes of %s\n", mr->length, path);
    fflush(stdout);
    int client = listen_and_accept(port);
    introduce(&nic, client, mr->rkey);
    char command = 0;
    while (command != 'q') {
        receive_all(client, &command, 1);
        int error = 0;
        if (command == 'g')
            grow(file);
        else if (command == 'p')
            error = punch_region(mr, HOLE, HOLE_BYTES);
        else if (command == 't')
            error = truncate_region(mr, STABLE);
        if (error != 0)
            die("the layout does not change: %s", strerror(error));
        send_all(client, &command, 1);
    }
    if (ibv_dereg_mr(mr) != 0 || ibv_destroy_qp(nic.qp) != 0)
        die("cannot end the region");
    return 0;
}

/* ---- client ----------------------------------------------------------------------------------------------------- */

struct client {
    struct nic nic;
    struct ibv_mr *mr;
    uint8_t *slots; /* DEPTH pieces */
    uint8_t *model; /* the file's first bytes as they should be */
    uint32_t rkey;
    int server;
};

static int connect_server(const char *host, const char *port)
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_family = AF_INET}, *found = NULL;
    if (getaddrinfo(host, port, &hints, &found) != 0)
        die("%s is unknown", host);
    for (int tries = 0; tries < 100; tries++) {
        int server = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(server, found->ai_addr, found->ai_addrlen) == 0) {
            freeaddrinfo(found);
            return server;
        }
        close(server);
        nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
    }
    die("cannot connect to %s port %s: %s", host, port, strerror(errno));
    return -1;
}

static void post(const struct client *client, int slot, enum ibv_wr_opcode opcode, uint64_t offset, uint32_t bytes)
{
    struct ibv_sge sge = {
        .addr = (uintptr_t)(client->slots + slot * PIECE), .length = bytes, .lkey = client->mr->lkey};
    struct ibv_send_wr wr = {.wr_id = (uint64_t)slot, .sg_list = &sge, .num_sge = 1, .opcode = opcode}, *bad;
    if (opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
        wr.wr.atomic.remote_addr = offset;
        wr.wr.atomic.rkey = client->rkey;
        wr.wr.atomic.compare_add = 1;
    } else {
        wr.wr.rdma.remote_addr = offset;
        wr.wr.rdma.rkey = client->rkey;
    }
    if (ibv_post_send(client->nic.qp, &wr, &bad) != 0)
        die("cannot post: %s", strerror(errno));
}

/* Waits for the next completion, and returns its status. */
static enum ibv_wc_status next_status(const struct client *client)
{
    struct ibv_wc wc;
    int count;
    while ((count = ibv_poll_cq(client->nic.cq, 1, &wc)) == 0)
        ;
    return count < 0 ? IBV_WC_FATAL_ERR : wc.status;
}

static void wait_for(const struct client *client, int count)
{
    for (int i = 0; i < count; i++) {
        enum ibv_wc_status status = next_status(client);
        if (status != IBV_WC_SUCCESS)
            die("a request failed: %s", ibv_wc_status_str(status));
    }
}

/* WRITEs pieces of the stable part while the server carries a command out, and READs them back. */
static void work_during(struct client *client, char command, unsigned round)
{
    uint64_t offsets[DEPTH];
    for (int slot = 0; slot < DEPTH; slot++) {
        offsets[slot] = ((uint64_t)slot * 4 + round % 4) * PIECE + round * 13 % 64;
        for (int i = 0; i < PIECE; i++)
            client->slots[slot * PIECE + i] = (uint8_t)(round * 31 + (unsigned)slot * 7 + (unsigned)i);
        memcpy(client->model + offsets[slot], client->slots + slot * PIECE, PIECE);
    }
    send_all(client->server, &command, 1);
    for (int slot = 0; slot < DEPTH; slot++)
        post(client, slot, IBV_WR_RDMA_WRITE, offsets[slot], PIECE);
    wait_for(client, DEPTH);
    memset(client->slots, 0xff, DEPTH * PIECE);
    for (int slot = 0; slot < DEPTH; slot++)
        post(client, slot, IBV_WR_RDMA_READ, offsets[slot], PIECE);
    wait_for(client, DEPTH);
    for (int slot = 0; slot < DEPTH; slot++)
        if (memcmp(client->slots + slot * PIECE, client->model + offsets[slot], PIECE) != 0)
            die("the file differs at %llu", (unsigned long long)offsets[slot]);
    post(client, 0, IBV_WR_ATOMIC_FETCH_AND_ADD, COUNTER, 8);
    wait_for(client, 1);
    char done;
    receive_all(client->server, &done, 1);
}

/* Checks the part that has grown, and perhaps has a hole. */
static void check_grown(const struct client *client, bool has_hole)
{
    for (uint64_t offset = STABLE; offset < GROWN; offset += PIECE) {
        post(client, 0, IBV_WR_RDMA_READ, offset, PIECE);
        wait_for(client, 1);
        for (uint64_t at = offset; at < offset + PIECE; at++) {
            bool is_hole = has_hole && at >= HOLE && at < HOLE + HOLE_BYTES;
            if (client->slots[at - offset] != (is_hole ? 0 : grown_byte(at)))
                die("the grown part differs at %llu", (unsigned long long)at);
        }
    }
}

static int check(const char *host, const char *port)
{
    struct client client = {.nic = open_nic(), .slots = malloc(DEPTH * PIECE), .model = calloc(1, STABLE)};
    client.mr = ibv_reg_mr(client.nic.pd, client.slots, DEPTH * PIECE, IBV_ACCESS_LOCAL_WRITE);
    if (client.mr == NULL)
        die("cannot register memory: %s", strerror(errno));
    client.server = connect_server(host, port);
    client.rkey = introduce(&client.nic, client.server, 0).rkey;
    for (unsigned round = 0; round < ROUNDS; round++) {
        work_during(&client, 'g', 3 * round);
        check_grown(&client, false);
        work_during(&client, 'p', 3 * round + 1);
        check_grown(&client, true);
        work_during(&client, 't', 3 * round + 2);
    }
    post(&client, 0, IBV_WR_ATOMIC_FETCH_AND_ADD, COUNTER, 8);
    wait_for(&client, 1);
    uint64_t count;
    memcpy(&count, client.slots, sizeof count);
    if (count != 3 * ROUNDS)
        die("the counter is %llu", (unsigned long long)count);
    /* Beyond the end of the truncated file there is nothing. */
    post(&client, 0, IBV_WR_RDMA_READ, STABLE - 8, 16);
    enum ibv_wc_status status = next_status(&client);
    if (status != IBV_WC_REM_ACCESS_ERR)
        die("a READ beyond the end: %s", ibv_wc_status_str(status));
    char quit = 'q';
    send_all(client.server, &quit, 1);
    receive_all(client.server, &quit, 1);
    printf("%d rounds, every byte as it should be\n", ROUNDS);
    return 0;
}

int main(int count, char **words)
{
    const char *port = count > 3 ? words[3] : "18517";
    if (count > 2 && strcmp(words[1], "serve") == 0)
        return serve(words[2], port);
    if (count > 2 && strcmp(words[1], "check") == 0)
        return check(words[2], port);
    fprintf(stderr, "usage: remote_file serve FILE [TCP-PORT] | check HOST [TCP-PORT]\n");
    return 2;
}
