/*
 * verbs_xrc: XRC domains, the shared receive queues in them, and the two kinds of queue pairs.
 */
#include "check.h"
#include "lab.h"

#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

enum { FD_AND_FLAGS = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS };

/* A domain with a shared receive queue of its own completion queue. */
struct xrc {
    struct ibv_xrcd *xrcd;
    struct ibv_cq *cq;
    struct ibv_srq *srq;
    uint32_t srqn;
};

static struct ibv_xrcd *open_domain(struct ibv_context *context, int fd, int oflags)
{
    struct ibv_xrcd_init_attr attr = {.comp_mask = FD_AND_FLAGS, .fd = fd, .oflags = oflags};
    return ibv_open_xrcd(context, &attr);
}

static struct ibv_srq_init_attr_ex queue_attr(const struct lab *lab, struct ibv_xrcd *xrcd, struct ibv_cq *cq)
{
    return (struct ibv_srq_init_attr_ex){
        .attr = {.max_wr = LAB_DEPTH, .max_sge = LAB_SGES},
        .comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ,
        .srq_type = IBV_SRQT_XRC,
        .pd = lab->pd,
        .xrcd = xrcd,
        .cq = cq,
    };
}

static struct xrc xrc_open(const struct lab *lab)
{
    struct xrc xrc = {.xrcd = open_domain(lab->context, -1, O_CREAT)};
    xrc.cq = ibv_create_cq(lab->context, LAB_DEPTH, NULL, NULL, 0);
    if (xrc.xrcd == NULL || xrc.cq == NULL)
        die("no XRC domain or completion queue");
    struct ibv_srq_init_attr_ex attr = queue_attr(lab, xrc.xrcd, xrc.cq);
    xrc.srq = ibv_create_srq_ex(lab->context, &attr);
    if (xrc.srq == NULL || ibv_get_srq_num(xrc.srq, &xrc.srqn) != 0)
        die("no shared receive queue of XRC");
    return xrc;
}

static void xrc_close(struct xrc *xrc)
{
    RETURNS(0, ibv_destroy_srq(xrc->srq));
    RETURNS(0, ibv_destroy_cq(xrc->cq));
    RETURNS(0, ibv_close_xrcd(xrc->xrcd));
}

static struct ibv_qp *initiator(const struct lab *lab)
{
    struct ibv_qp_init_attr init = lab_init(lab, IBV_QPT_XRC_SEND);
    struct ibv_qp_init_attr_ex attr = {.send_cq = init.send_cq,
                                       .cap = init.cap,
                                       .qp_type = init.qp_type,
                                       .sq_sig_all = 1,
                                       .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
                                       .pd = lab->pd,
                                       .send_ops_flags = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_RDMA_WRITE};
    struct ibv_qp *qp = ibv_create_qp_ex(lab->context, &attr);
    if (qp == NULL)
        die("no initiator");
    CHECK(attr.cap.max_recv_wr == 0 && attr.cap.max_recv_sge == 0 && qp->recv_cq == NULL);
    return qp;
}

static struct ibv_qp *target(struct ibv_context *context, struct ibv_xrcd *xrcd, void *user)
{
    struct ibv_qp_init_attr_ex attr = {
        .qp_context = user, .qp_type = IBV_QPT_XRC_RECV, .comp_mask = IBV_QP_INIT_ATTR_XRCD, .xrcd = xrcd};
    return ibv_create_qp_ex(context, &attr);
}

static struct ibv_qp *open_target(struct ibv_context *context, struct ibv_xrcd *xrcd, uint32_t number, void *user)
{
    struct ibv_qp_open_attr attr = {.comp_mask = IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_XRCD |
                                                 IBV_QP_OPEN_ATTR_TYPE | IBV_QP_OPEN_ATTR_CONTEXT,
                                    .qp_num = number,
                                    .xrcd = xrcd,
                                    .qp_context = user,
                                    .qp_type = IBV_QPT_XRC_RECV};
    return ibv_open_qp(context, &attr);
}

static void domains(const struct lab *lab, struct ibv_context *other)
{
    struct ibv_context *context = lab->context;
    struct ibv_xrcd_init_attr attr = {.comp_mask = FD_AND_FLAGS, .fd = -1, .oflags = O_CREAT};
    REFUSED(EINVAL, ibv_open_xrcd(context, NULL));
    attr.comp_mask = 0;
    REFUSED(EINVAL, ibv_open_xrcd(context, &attr));
    attr.comp_mask = IBV_XRCD_INIT_ATTR_FD;
    REFUSED(EINVAL, ibv_open_xrcd(context, &attr));
    attr.comp_mask = IBV_XRCD_INIT_ATTR_OFLAGS;
    REFUSED(EINVAL, ibv_open_xrcd(context, &attr));
    attr.comp_mask = FD_AND_FLAGS | IBV_XRCD_INIT_ATTR_RESERVED;
    REFUSED(EOPNOTSUPP, ibv_open_xrcd(context, &attr));
    REFUSED(EBADF, open_domain(context, 9999, O_CREAT));
    REFUSED(EBADF, open_domain(context, -2, O_CREAT));

    /* A file has one domain, for every descriptor of it. */
    char path[] = "/tmp/verbs_xrc.XXXXXX";
    int fd = mkstemp(path), again = open(path, O_RDONLY), pipes[2];
    CHECK(fd >= 0 && again >= 0 && pipe(pipes) == 0);
    REFUSED(EAGAIN, open_domain(context, fd, 0));
    struct ibv_xrcd *first = open_domain(context, fd, O_CREAT | O_EXCL);
    CHECK(first != NULL && first->context == context);
    REFUSED(EINVAL, open_domain(context, again, O_CREAT | O_EXCL));
    struct ibv_xrcd *second = open_domain(context, again, 0), *third = open_domain(context, fd, O_CREAT);
    CHECK(second != NULL && third != NULL && second != first && third != first);
    REFUSED(EAGAIN, open_domain(context, pipes[0], 0));
    /* Another context is another NIC, which does not share the domain. */
    REFUSED(EAGAIN, open_domain(other, fd, 0));
    REFUSED(EINVAL, open_domain(other, fd, O_CREAT | O_EXCL));
    struct ibv_xrcd *elsewhere = open_domain(other, fd, O_CREAT);
    CHECK(elsewhere != NULL);

    /* Objects made through one handle of the domain are found through another. */
    struct ibv_qp *qp = target(context, first, NULL), *opened;
    CHECK(qp != NULL);
    CHECK((opened = open_target(context, second, qp->qp_num, NULL)) != NULL);
    REFUSED(EINVAL, open_target(other, elsewhere, qp->qp_num ^ 1 << 16, NULL));
    RETURNS(EBUSY, ibv_close_xrcd(first));
    RETURNS(EBUSY, ibv_close_xrcd(second));
    RETURNS(0, ibv_close_xrcd(third));
    RETURNS(0, ibv_destroy_qp(qp));
    RETURNS(0, ibv_close_xrcd(first));
    RETURNS(EBUSY, ibv_close_xrcd(second));
    RETURNS(0, ibv_destroy_qp(opened));
    RETURNS(0, ibv_close_xrcd(second));
    REFUSED(EAGAIN, open_domain(context, fd, 0));
    RETURNS(0, ibv_close_xrcd(elsewhere));
    unlink(path);
    close(fd), close(again), close(pipes[0]), close(pipes[1]);
}

static void queues(const struct lab *lab, struct ibv_context *other)
{
    struct xrc xrc = xrc_open(lab);
    CHECK(xrc.srqn != 0 && xrc.srqn < 1u << 24);
    struct ibv_srq_init_attr_ex good = queue_attr(lab, xrc.xrcd, xrc.cq), attr = good;
    attr.xrcd = NULL;
    REFUSED(EINVAL, ibv_create_srq_ex(lab->context, &attr));
    attr = good, attr.cq = NULL;
    REFUSED(EINVAL, ibv_create_srq_ex(lab->context, &attr));
    attr = good, attr.comp_mask &= ~IBV_SRQ_INIT_ATTR_XRCD;
    REFUSED(EINVAL, ibv_create_srq_ex(lab->context, &attr));
    attr = good, attr.comp_mask &= ~IBV_SRQ_INIT_ATTR_CQ;
    REFUSED(EINVAL, ibv_create_srq_ex(lab->context, &attr));
    attr = good, attr.comp_mask &= ~IBV_SRQ_INIT_ATTR_PD;
    REFUSED(EINVAL, ibv_create_srq_ex(lab->context, &attr));
    attr = good, attr.comp_mask |= IBV_SRQ_INIT_ATTR_TM;
    REFUSED(EOPNOTSUPP, ibv_create_srq_ex(lab->context, &attr));
    attr = good, attr.srq_type = IBV_SRQT_BASIC;
    REFUSED(EOPNOTSUPP, ibv_create_srq_ex(lab->context, &attr));
    attr = good, attr.attr.max_wr = (uint32_t)lab->attr.max_srq_wr + 1;
    REFUSED(EINVAL, ibv_create_srq_ex(lab->context, &attr));
    struct ibv_xrcd *foreign = open_domain(other, -1, O_CREAT);
    attr = good, attr.xrcd = foreign;
    REFUSED(EINVAL, ibv_create_srq_ex(lab->context, &attr));
    RETURNS(0, ibv_close_xrcd(foreign));
    RETURNS(EBUSY, ibv_close_xrcd(xrc.xrcd));
    RETURNS(EBUSY, ibv_destroy_cq(xrc.cq));

    /* Queue pairs cannot have it. */
    struct ibv_qp_init_attr init = lab_init(lab, IBV_QPT_RC);
    init.srq = xrc.srq;
    REFUSED(EINVAL, ibv_create_qp(lab->pd, &init));
    xrc_close(&xrc);
}

static void queue_pairs(const struct lab *lab, struct ibv_context *other)
{
    struct xrc xrc = xrc_open(lab);
    struct ibv_qp_init_attr_ex attr = {.qp_type = IBV_QPT_XRC_RECV, .comp_mask = IBV_QP_INIT_ATTR_XRCD};
    REFUSED(EINVAL, ibv_create_qp_ex(lab->context, &attr));
    attr.comp_mask = IBV_QP_INIT_ATTR_PD, attr.pd = lab->pd;
    REFUSED(EINVAL, ibv_create_qp_ex(lab->context, &attr));
    attr.comp_mask = IBV_QP_INIT_ATTR_XRCD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS, attr.xrcd = xrc.xrcd;
    attr.send_ops_flags = IBV_QP_EX_WITH_SEND;
    REFUSED(EOPNOTSUPP, ibv_create_qp_ex(lab->context, &attr));
    struct ibv_qp_init_attr init = lab_init(lab, IBV_QPT_XRC_SEND);
    attr = (struct ibv_qp_init_attr_ex){.qp_type = IBV_QPT_XRC_SEND,
                                        .cap = init.cap,
                                        .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
                                        .pd = lab->pd};
    REFUSED(EINVAL, ibv_create_qp_ex(lab->context, &attr));
    attr.send_cq = lab->cq, attr.send_ops_flags = IBV_QP_EX_WITH_ATOMIC_WRITE;
    REFUSED(EOPNOTSUPP, ibv_create_qp_ex(lab->context, &attr));
    attr.comp_mask = IBV_QP_INIT_ATTR_XRCD, attr.xrcd = xrc.xrcd;
    REFUSED(EINVAL, ibv_create_qp_ex(lab->context, &attr));

    struct ibv_qp *qp = target(lab->context, xrc.xrcd, NULL), *plain = lab_qp(lab, IBV_QPT_RC);
    CHECK(qp != NULL && qp->qp_type == IBV_QPT_XRC_RECV && qp->pd == NULL);
    struct ibv_qp_open_attr good = {.comp_mask = IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_XRCD | IBV_QP_OPEN_ATTR_TYPE,
                                    .qp_num = qp->qp_num,
                                    .xrcd = xrc.xrcd,
                                    .qp_type = IBV_QPT_XRC_RECV},
                            open = good;
    REFUSED(EINVAL, ibv_open_qp(lab->context, NULL));
    for (unsigned bit = 1; bit < IBV_QP_OPEN_ATTR_RESERVED; bit <<= 1)
        if (bit != IBV_QP_OPEN_ATTR_CONTEXT) {
            open = good, open.comp_mask &= ~bit;
            REFUSED(EINVAL, ibv_open_qp(lab->context, &open));
        }
    open = good, open.comp_mask |= IBV_QP_OPEN_ATTR_RESERVED;
    REFUSED(EOPNOTSUPP, ibv_open_qp(lab->context, &open));
    open = good, open.qp_type = IBV_QPT_RC;
    REFUSED(EINVAL, ibv_open_qp(lab->context, &open));
    open = good, open.xrcd = NULL;
    REFUSED(EINVAL, ibv_open_qp(lab->context, &open));
    open = good, open.qp_num = plain->qp_num;
    REFUSED(EINVAL, ibv_open_qp(lab->context, &open));
    open = good, open.qp_num ^= 1;
    REFUSED(EINVAL, ibv_open_qp(lab->context, &open));
    /* Of another process, or context. */
    open = good, open.qp_num ^= 1u << 23;
    REFUSED(EOPNOTSUPP, ibv_open_qp(lab->context, &open));
    REFUSED(EOPNOTSUPP, ibv_open_qp(other, &good));
    struct ibv_xrcd *stranger = open_domain(lab->context, -1, O_CREAT);
    open = good, open.xrcd = stranger;
    REFUSED(EINVAL, ibv_open_qp(lab->context, &open));
    RETURNS(0, ibv_close_xrcd(stranger));

    struct ibv_recv_wr recv = {.wr_id = 1}, *bad_recv;
    struct ibv_send_wr send = {.opcode = IBV_WR_SEND, .qp_type.xrc.remote_srqn = xrc.srqn}, *bad_send;
    lab_advance(lab, qp, plain->qp_num, IBV_QPS_RTR);
    RETURNS(EINVAL, ibv_post_recv(qp, &recv, &bad_recv));
    RETURNS(EINVAL, ibv_post_send(qp, &send, &bad_send));
    struct ibv_qp *sender = initiator(lab);
    lab_advance(lab, sender, plain->qp_num, IBV_QPS_RTS);
    RETURNS(EINVAL, ibv_post_recv(sender, &recv, &bad_recv));
    send.qp_type.xrc.remote_srqn = 1u << 24;
    RETURNS(EINVAL, ibv_post_send(sender, &send, &bad_send));
    send.opcode = IBV_WR_ATOMIC_WRITE, send.qp_type.xrc.remote_srqn = 1;
    RETURNS(EINVAL, ibv_post_send(sender, &send, &bad_send));
    struct ibv_qp_ex *builder = ibv_qp_to_qp_ex(sender);
    ibv_wr_start(builder);
    ibv_wr_send(builder); /* without a queue */
    RETURNS(EINVAL, ibv_wr_complete(builder));
    ibv_wr_start(builder);
    ibv_wr_set_xrc_srqn(builder, 1);
    RETURNS(EINVAL, ibv_wr_complete(builder));

    RETURNS(0, ibv_destroy_qp(sender));
    RETURNS(0, ibv_destroy_qp(plain));
    RETURNS(EBUSY, ibv_close_xrcd(xrc.xrcd));
    RETURNS(0, ibv_destroy_qp(qp));
    xrc_close(&xrc);
}

/* Sends one message of 8 bytes to the queue, by the builder. */
static enum ibv_wc_status deliver(const struct lab *lab, struct ibv_qp *sender, uint32_t srqn)
{
    struct ibv_qp_ex *builder = ibv_qp_to_qp_ex(sender);
    ibv_wr_start(builder);
    builder->wr_id = 5, builder->wr_flags = IBV_SEND_SIGNALED;
    ibv_wr_send(builder);
    ibv_wr_set_xrc_srqn(builder, srqn);
    ibv_wr_set_sge(builder, lab->mr->lkey, (uintptr_t)lab->buffer, 8);
    RETURNS(0, ibv_wr_complete(builder));
    return lab_poll(lab->cq).status;
}

/* Both ends take the attributes that RC needs, and ignore those that do not apply to them. */
static void ignored_attributes(const struct lab *lab)
{
    struct xrc xrc = xrc_open(lab);
    struct ibv_qp *qps[] = {initiator(lab), target(lab->context, xrc.xrcd, NULL)};
    for (int i = 0; i < 2; i++) {
        struct ibv_qp_attr attr = lab_attr(lab, qps[!i]->qp_num), now;
        for (attr.qp_state = IBV_QPS_INIT; attr.qp_state <= IBV_QPS_RTS; attr.qp_state++)
            RETURNS(0, ibv_modify_qp(qps[i], &attr, lab_mask(IBV_QPT_RC, attr.qp_state)));
        struct ibv_qp_init_attr init;
        RETURNS(0, ibv_query_qp(qps[i], &now, IBV_QP_STATE, &init));
        CHECK(now.qp_state == IBV_QPS_RTS);
        bool asks = qps[i]->qp_type == IBV_QPT_XRC_SEND;
        CHECK(asks ? now.max_dest_rd_atomic == 0 && now.max_rd_atomic != 0
                   : now.max_dest_rd_atomic != 0 && now.max_rd_atomic == 0 && now.retry_cnt == 0);
        /* Other attributes are still refused. */
        RETURNS(EINVAL, ibv_modify_qp(qps[i], &attr, IBV_QP_QKEY));
    }
    RETURNS(0, ibv_destroy_qp(qps[0]));
    RETURNS(0, ibv_destroy_qp(qps[1]));
    xrc_close(&xrc);
}

/* A target lives while a handle to it exists, and its events go to the remaining handle. */
static void holders(const struct lab *lab)
{
    struct xrc xrc = xrc_open(lab);
    int first_user, second_user;
    struct ibv_qp *sender = initiator(lab), *qp = target(lab->context, xrc.xrcd, &first_user);
    struct ibv_qp *other = open_target(lab->context, xrc.xrcd, qp->qp_num, &second_user);
    CHECK(other != NULL && other != qp && other->qp_num == qp->qp_num && other->qp_context == &second_user);
    lab_advance(lab, sender, qp->qp_num, IBV_QPS_RTS);
    lab_advance(lab, other, sender->qp_num, IBV_QPS_RTR);
    struct ibv_qp_attr attr;
    struct ibv_qp_init_attr init;
    RETURNS(0, ibv_query_qp(qp, &attr, IBV_QP_STATE, &init));
    CHECK(attr.qp_state == IBV_QPS_RTR && attr.dest_qp_num == sender->qp_num && attr.ah_attr.is_global == 1);
    CHECK(init.qp_type == IBV_QPT_XRC_RECV && init.send_cq == NULL && init.recv_cq == NULL && init.srq == NULL);
    CHECK(init.qp_context == &first_user && init.cap.max_send_wr == 0 && init.cap.max_recv_wr == 0);
    RETURNS(0, ibv_destroy_qp(qp));

    struct ibv_sge sge = {.addr = (uintptr_t)lab->buffer + 64, .length = 64, .lkey = lab->mr->lkey};
    struct ibv_recv_wr recv = {.wr_id = 9, .sg_list = &sge, .num_sge = 1}, *bad;
    RETURNS(0, ibv_post_srq_recv(xrc.srq, &recv, &bad));
    memcpy(lab->buffer, "8 bytes!", 8);
    CHECK(deliver(lab, sender, xrc.srqn) == IBV_WC_SUCCESS);
    struct ibv_wc wc = lab_poll(xrc.cq);
    CHECK(wc.wr_id == 9 && wc.status == IBV_WC_SUCCESS && wc.qp_num == other->qp_num && wc.byte_len == 8);
    CHECK(memcmp(lab->buffer + 64, "8 bytes!", 8) == 0);

    /* A queue that is not in the domain. */
    CHECK(deliver(lab, sender, xrc.srqn ^ 1) == IBV_WC_REM_INV_REQ_ERR);
    struct ibv_async_event event;
    do {
        CHECK(ibv_get_async_event(lab->context, &event) == 0 && event.element.qp == other);
        ibv_ack_async_event(&event);
    } while (event.event_type == IBV_EVENT_COMM_EST);
    CHECK(event.event_type == IBV_EVENT_QP_REQ_ERR);

    RETURNS(0, ibv_destroy_qp(other));
    RETURNS(0, ibv_destroy_qp(sender));
    xrc_close(&xrc);
}

int main(void)
{
    struct lab lab = lab_open();
    CHECK(lab.attr.device_cap_flags & IBV_DEVICE_XRC);
    struct ibv_context *other = ibv_open_device(lab.context->device);
    domains(&lab, other);
    queues(&lab, other);
    queue_pairs(&lab, other);
    ignored_attributes(&lab);
    holders(&lab);
    CHECK(ibv_close_device(other) == 0);
    lab_close(&lab);
    return check_end();
}
