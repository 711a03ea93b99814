/*
 * Terrace through the verbs ABI: READ, WRITE, fetch-and-add, SEND and RECV over one RC queue pair for each connection. A
 * plain verbs program, which runs under `terrace run` or on a real RNIC.
 */
#include "peer.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include <infiniband/verbs.h>

const struct peer peer = {.name = "verbs", .has_target = true, .has_region = true};

enum { PORT = 1, PSN = 0x1234, SEND_ID = 1 << 16 };

/* The addresses that each end sends to the other for each connection. */
struct peer_info {
    union ibv_gid gid;
    uint32_t number, key;
    uint64_t base;
};

struct link {
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    struct ibv_mr *buffer;
    struct peer_info other;
    /* Work requests. Each post sets only the fields that change, as in perftest. */
    struct ibv_sge sge;
    struct ibv_send_wr request;
    struct ibv_recv_wr receive;
    /* The slots of messages without an answer, in order. */
    unsigned unanswered[DEPTH_MAX], first, count;
    /* Receives that answers have consumed. They are posted again after the next messages, which do not wait for it. */
    unsigned consumed[RECEIVES], consumed_count;
};

static struct link links[CONNECTIONS_MAX];
static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_mr *region;

const char *peer_lacks(enum op op, size_t size)
{
    return op == OP_ATOMIC && size != 8 ? "atomics are of 8 bytes" : NULL;
}

static void open_device(void)
{
    int count = 0;
    struct ibv_device **devices = ibv_get_device_list(&count);
    if (devices == NULL || count == 0 || (context = ibv_open_device(devices[0])) == NULL)
        die("no RDMA device");
    ibv_free_device_list(devices);
    if ((pd = ibv_alloc_pd(context)) == NULL)
        die("no protection domain");
}

static void prepare(struct link *link)
{
    link->sge.lkey = link->buffer->lkey;
    link->request = (struct ibv_send_wr){.sg_list = &link->sge, .num_sge = 1};
    link->receive = (struct ibv_recv_wr){.sg_list = &link->sge, .num_sge = 1};
}

static void open_link(struct connection *connection)
{
    struct link *link = connection->own = &links[connection->index];
    link->cq = ibv_create_cq(context, 4 * RECEIVES, NULL, NULL, 0);
    link->buffer = ibv_reg_mr(pd, connection->buffer, CONNECTION_BYTES, IBV_ACCESS_LOCAL_WRITE);
    struct ibv_qp_init_attr init = {
        .send_cq = link->cq,
        .recv_cq = link->cq,
        .cap = {.max_send_wr = 2 * RECEIVES, .max_recv_wr = RECEIVES, .max_send_sge = 1, .max_recv_sge = 1},
        .qp_type = IBV_QPT_RC,
        .sq_sig_all = 1,
    };
    if (link->cq == NULL || link->buffer == NULL || (link->qp = ibv_create_qp(pd, &init)) == NULL)
        die("no queue pair");
    prepare(link);
}

static struct peer_info info_of(const struct link *link)
{
    struct peer_info peer_info = {.number = link->qp->qp_num};
    if (ibv_query_gid(context, PORT, 0, &peer_info.gid) != 0)
        die("no address");
    if (region != NULL) {
        peer_info.key = region->rkey;
        peer_info.base = (uint64_t)(uintptr_t)region->addr;
    }
    return peer_info;
}

static void connect_link(struct link *link)
{
    struct ibv_qp_attr attr = {
        .qp_state = IBV_QPS_INIT,
        .port_num = PORT,
        .qp_access_flags = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC,
    };
    if (ibv_modify_qp(link->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) != 0)
        die("INIT");
    attr = (struct ibv_qp_attr){
        .qp_state = IBV_QPS_RTR,
        .path_mtu = IBV_MTU_4096,
        .dest_qp_num = link->other.number,
        .rq_psn = PSN,
        .max_dest_rd_atomic = DEPTH_MAX,
        .min_rnr_timer = 1,
        .ah_attr = {.is_global = 1, .port_num = PORT, .grh = {.dgid = link->other.gid, .hop_limit = 64}},
    };
    if (ibv_modify_qp(link->qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                           IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER) != 0)
        die("RTR");
    attr = (struct ibv_qp_attr){
        .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .sq_psn = PSN, .max_rd_atomic = DEPTH_MAX};
    if (ibv_modify_qp(link->qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                                           IBV_QP_MAX_QP_RD_ATOMIC) != 0)
        die("RTS");
}

static void post_receive(struct connection *connection, unsigned index)
{
    struct link *link = connection->own;
    struct ibv_recv_wr *bad;
    link->sge.addr = (uint64_t)(uintptr_t)receive_buffer(connection, index);
    link->sge.length = BYTES_MAX;
    link->receive.wr_id = index;
    if (ibv_post_recv(link->qp, &link->receive, &bad) != 0)
        die("ibv_post_recv");
}

static void post_send(struct link *link, enum ibv_wr_opcode opcode, uint64_t id, const char *data, size_t size)
{
    struct ibv_send_wr *bad;
    link->sge.addr = (uint64_t)(uintptr_t)data;
    link->sge.length = (uint32_t)size;
    link->request.opcode = opcode;
    link->request.wr_id = id;
    if (ibv_post_send(link->qp, &link->request, &bad) != 0)
        die("ibv_post_send");
}

static void open_end(int control, bool sends_first)
{
    for (unsigned i = 0; i < options.connections; i++) {
        struct link *link = &links[i];
        open_link(&connections[i]);
        struct peer_info peer_info = info_of(link);
        if (sends_first)
            send_block(control, &peer_info, sizeof peer_info);
        if (receive_block(control, &link->other, sizeof link->other) != sizeof link->other)
            die("a message of an invalid size from the other end");
        if (!sends_first)
            send_block(control, &peer_info, sizeof peer_info);
        connect_link(link);
        for (unsigned j = 0; j < RECEIVES; j++)
            post_receive(&connections[i], j);
    }
}

void peer_open_target(int control)
{
    open_device();
    char *memory = map_memory(options.region, options.memory, NULL);
    fill_region(memory);
    region = ibv_reg_mr(pd, memory, options.region,
                        IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC);
    if (region == NULL)
        die("no region");
    open_end(control, true);
}

void peer_open_client(int control)
{
    open_device();
    open_end(control, false);
}

void peer_post(struct connection *connection, enum op op, unsigned slot, uint64_t offset, size_t size)
{
    struct link *link = connection->own;
    char *data = operation_buffer(connection, slot, size);
    if (op == OP_MESSAGE) {
        link->unanswered[(link->first + link->count++) % DEPTH_MAX] = slot;
        post_send(link, IBV_WR_SEND, SEND_ID, data, size);
        if (link->consumed_count > 0)
            post_receive(connection, link->consumed[--link->consumed_count]);
    } else if (op == OP_ATOMIC) {
        link->request.wr.atomic.remote_addr = link->other.base + offset;
        link->request.wr.atomic.rkey = link->other.key;
        link->request.wr.atomic.compare_add = 1;
        post_send(link, IBV_WR_ATOMIC_FETCH_AND_ADD, slot, data, size);
    } else {
        link->request.wr.rdma.remote_addr = link->other.base + offset;
        link->request.wr.rdma.rkey = link->other.key;
        post_send(link, op == OP_GET ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE, slot, data, size);
    }
}

static void check(const struct ibv_wc *wc)
{
    if (wc->status != IBV_WC_SUCCESS)
        die("%s", ibv_wc_status_str(wc->status));
}

unsigned peer_reap(struct connection *connection, enum op op, size_t size, unsigned slots[])
{
    struct link *link = connection->own;
    struct ibv_wc wcs[DEPTH_MAX];
    int polled = ibv_poll_cq(link->cq, DEPTH_MAX, wcs);
    unsigned count = 0;
    (void)size;
    if (polled < 0)
        die("ibv_poll_cq");
    for (int i = 0; i < polled; i++) {
        check(&wcs[i]);
        if (wcs[i].wr_id == SEND_ID)
            continue; /* a sent message: the last one may complete while other operations are measured */
        if (op != OP_MESSAGE) {
            slots[count++] = (unsigned)wcs[i].wr_id;
        } else {
            connection->received = receive_buffer(connection, (unsigned)wcs[i].wr_id);
            slots[count++] = link->unanswered[link->first];
            link->first = (link->first + 1) % DEPTH_MAX;
            link->count--;
            link->consumed[link->consumed_count++] = (unsigned)wcs[i].wr_id;
        }
    }
    return count;
}

bool peer_target_polls(enum op op)
{
    return op == OP_MESSAGE;
}

/* Sends each message back from its receive buffer. Answers come first. A receive is posted again after its answer was sent. */
bool peer_progress(enum op op, size_t size, unsigned connection_count)
{
    bool worked = false;
    (void)op, (void)size;
    for (unsigned i = 0; i < connection_count; i++) {
        struct ibv_wc wcs[DEPTH_MAX];
        int polled = ibv_poll_cq(links[i].cq, DEPTH_MAX, wcs);
        for (int j = 0; j < polled; j++) {
            check(&wcs[j]);
            if (wcs[j].opcode == IBV_WC_RECV)
                post_send(&links[i], IBV_WR_SEND, wcs[j].wr_id, receive_buffer(&connections[i], (unsigned)wcs[j].wr_id), wcs[j].byte_len);
            worked = true;
        }
        for (int j = 0; j < polled; j++)
            if (wcs[j].opcode != IBV_WC_RECV)
                post_receive(&connections[i], (unsigned)wcs[j].wr_id);
    }
    return worked;
}
