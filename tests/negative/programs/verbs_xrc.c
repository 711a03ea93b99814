/*
 * verbs_xrc: tests XRC domains, their shared receive queues, and the two types of queue pairs.
 */
#include "check.h"
#include "env.h"

#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

enum { FD_AND_FLAGS = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS };

/* A domain with a shared receive queue, which has its own completion queue. */
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

static struct ibv_srq_init_attr_ex queue_attr(const struct env *env, struct ibv_xrcd *xrcd, struct ibv_cq *cq)
{
    return (struct ibv_srq_init_attr_ex){
        .attr = {.max_wr = ENV_DEPTH, .max_sge = ENV_SGES},
        .comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ,
        .srq_type = IBV_SRQT_XRC,
        .pd = env->pd,
        .xrcd = xrcd,
        .cq = cq,
    };
}

static struct xrc xrc_open(const struct env *env)
{
    struct xrc xrc = {.xrcd = open_domain(env->context, -1, O_CREAT)};
    xrc.cq = ibv_create_cq(env->context, ENV_DEPTH, NULL, NULL, 0);
    if (xrc.xrcd == NULL || xrc.cq == NULL)
        die("no XRC domain or completion queue");
    struct ibv_srq_init_attr_ex attr = queue_attr(env, xrc.xrcd, xrc.cq);
    xrc.srq = ibv_create_srq_ex(env->context, &attr);
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

static struct ibv_qp *initiator(const struct env *env)
{
    struct ibv_qp_init_attr init = env_init(env, IBV_QPT_XRC_SEND);
    struct ibv_qp_init_attr_ex attr = {.send_cq = init.send_cq,
                                       .cap = init.cap,
                                       .qp_type = init.qp_type,
                                       .sq_sig_all = 1,
                                       .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
                                       .pd = env->pd,
                                       .send_ops_flags = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_RDMA_WRITE};
    struct ibv_qp *qp = ibv_create_qp_ex(env->context, &attr);
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

/* The file system gives the number of a file that is gone to the next one, which has no domain yet. */
static void domain_of_removed_file(struct ibv_context *context)
{
    struct ibv_xrcd *domains[2];
    for (int i = 0; i < 2; i++) {
        char path[] = "/tmp/verbs_xrc.XXXXXX";
        int fd = mkstemp(path);
        CHECK((domains[i] = open_domain(context, fd, O_CREAT | O_EXCL)) != NULL);
        unlink(path);
        close(fd);
    }
    RETURNS(0, ibv_close_xrcd(domains[0]));
    RETURNS(0, ibv_close_xrcd(domains[1]));
}

static void domains(const struct env *env, struct ibv_context *other)
{
    struct ibv_context *context = env->context;
    struct ibv_xrcd_init_attr attr = {.comp_mask = FD_AND_FLAGS, .fd = -1, .oflags = O_CREAT};
    FAILS(EINVAL, ibv_open_xrcd(context, NULL));
    attr.comp_mask = 0;
    FAILS(EINVAL, ibv_open_xrcd(context, &attr));
    attr.comp_mask = IBV_XRCD_INIT_ATTR_FD;
    FAILS(EINVAL, ibv_open_xrcd(context, &attr));
    attr.comp_mask = IBV_XRCD_INIT_ATTR_OFLAGS;
    FAILS(EINVAL, ibv_open_xrcd(context, &attr));
    attr.comp_mask = FD_AND_FLAGS | IBV_XRCD_INIT_ATTR_RESERVED;
    FAILS(EOPNOTSUPP, ibv_open_xrcd(context, &attr));
    FAILS(EBADF, open_domain(context, 9999, O_CREAT));
    FAILS(EBADF, open_domain(context, -2, O_CREAT));

    /* A file has one domain, for every descriptor of it. */
    char path[] = "/tmp/verbs_xrc.XXXXXX";
    int fd = mkstemp(path), again = open(path, O_RDONLY), pipes[2];
    CHECK(fd >= 0 && again >= 0 && pipe(pipes) == 0);
    FAILS(EAGAIN, open_domain(context, fd, 0));
    struct ibv_xrcd *first = open_domain(context, fd, O_CREAT | O_EXCL);
    CHECK(first != NULL && first->context == context);
    FAILS(EINVAL, open_domain(context, again, O_CREAT | O_EXCL));
    struct ibv_xrcd *second = open_domain(context, again, 0), *third = open_domain(context, fd, O_CREAT);
    CHECK(second != NULL && third != NULL && second != first && third != first);
    FAILS(EAGAIN, open_domain(context, pipes[0], 0));
    /* Another context is another NIC, so it does not share the domain. */
    FAILS(EAGAIN, open_domain(other, fd, 0));
    FAILS(EINVAL, open_domain(other, fd, O_CREAT | O_EXCL));
    struct ibv_xrcd *elsewhere = open_domain(other, fd, O_CREAT);
    CHECK(elsewhere != NULL);

    /* Objects that were created with one handle of the domain are visible with another. */
    struct ibv_qp *qp = target(context, first, NULL), *opened;
    CHECK(qp != NULL);
    CHECK((opened = open_target(context, second, qp->qp_num, NULL)) != NULL);
    FAILS(EINVAL, open_target(other, elsewhere, qp->qp_num ^ 1 << 16, NULL));
    RETURNS(EBUSY, ibv_close_xrcd(first));
    RETURNS(EBUSY, ibv_close_xrcd(second));
    RETURNS(0, ibv_close_xrcd(third));
    RETURNS(0, ibv_destroy_qp(qp));
    RETURNS(0, ibv_close_xrcd(first));
    RETURNS(EBUSY, ibv_close_xrcd(second));
    RETURNS(0, ibv_destroy_qp(opened));
    RETURNS(0, ibv_close_xrcd(second));
    FAILS(EAGAIN, open_domain(context, fd, 0));
    RETURNS(0, ibv_close_xrcd(elsewhere));
    unlink(path);
    close(fd), close(again), close(pipes[0]), close(pipes[1]);
    domain_of_removed_file(context);
}

static void queues(const struct env *env, struct ibv_context *other)
{
    struct xrc xrc = xrc_open(env);
    CHECK(xrc.srqn != 0 && xrc.srqn < 1u << 24);
    struct ibv_srq_init_attr_ex good = queue_attr(env, xrc.xrcd, xrc.cq), attr = good;
    attr.xrcd = NULL;
    FAILS(EINVAL, ibv_create_srq_ex(env->context, &attr));
    attr = good, attr.cq = NULL;
    FAILS(EINVAL, ibv_create_srq_ex(env->context, &attr));
    attr = good, attr.comp_mask &= ~IBV_SRQ_INIT_ATTR_XRCD;
    FAILS(EINVAL, ibv_create_srq_ex(env->context, &attr));
    attr = good, attr.comp_mask &= ~IBV_SRQ_INIT_ATTR_CQ;
    FAILS(EINVAL, ibv_create_srq_ex(env->context, &attr));
    attr = good, attr.comp_mask &= ~IBV_SRQ_INIT_ATTR_PD;
    FAILS(EINVAL, ibv_create_srq_ex(env->context, &attr));
    attr = good, attr.comp_mask |= IBV_SRQ_INIT_ATTR_TM;
    FAILS(EOPNOTSUPP, ibv_create_srq_ex(env->context, &attr));
    attr = good, attr.srq_type = IBV_SRQT_BASIC;
    FAILS(EOPNOTSUPP, ibv_create_srq_ex(env->context, &attr));
    attr = good, attr.attr.max_wr = (uint32_t)env->attr.max_srq_wr + 1;
    FAILS(EINVAL, ibv_create_srq_ex(env->context, &attr));
    struct ibv_xrcd *foreign = open_domain(other, -1, O_CREAT);
    attr = good, attr.xrcd = foreign;
    FAILS(EINVAL, ibv_create_srq_ex(env->context, &attr));
    RETURNS(0, ibv_close_xrcd(foreign));
    RETURNS(EBUSY, ibv_close_xrcd(xrc.xrcd));
    RETURNS(EBUSY, ibv_destroy_cq(xrc.cq));

    /* A queue pair cannot have such a shared receive queue. */
    struct ibv_qp_init_attr init = env_init(env, IBV_QPT_RC);
    init.srq = xrc.srq;
    FAILS(EINVAL, ibv_create_qp(env->pd, &init));
    xrc_close(&xrc);
}

static void queue_pairs(const struct env *env, struct ibv_context *other)
{
    struct xrc xrc = xrc_open(env);
    struct ibv_qp_init_attr_ex attr = {.qp_type = IBV_QPT_XRC_RECV, .comp_mask = IBV_QP_INIT_ATTR_XRCD};
    FAILS(EINVAL, ibv_create_qp_ex(env->context, &attr));
    attr.comp_mask = IBV_QP_INIT_ATTR_PD, attr.pd = env->pd;
    FAILS(EINVAL, ibv_create_qp_ex(env->context, &attr));
    attr.comp_mask = IBV_QP_INIT_ATTR_XRCD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS, attr.xrcd = xrc.xrcd;
    attr.send_ops_flags = IBV_QP_EX_WITH_SEND;
    FAILS(EOPNOTSUPP, ibv_create_qp_ex(env->context, &attr));
    struct ibv_qp_init_attr init = env_init(env, IBV_QPT_XRC_SEND);
    attr = (struct ibv_qp_init_attr_ex){.qp_type = IBV_QPT_XRC_SEND,
                                        .cap = init.cap,
                                        .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
                                        .pd = env->pd};
    FAILS(EINVAL, ibv_create_qp_ex(env->context, &attr));
    attr.send_cq = env->cq, attr.send_ops_flags = IBV_QP_EX_WITH_ATOMIC_WRITE;
    FAILS(EOPNOTSUPP, ibv_create_qp_ex(env->context, &attr));
    attr.comp_mask = IBV_QP_INIT_ATTR_XRCD, attr.xrcd = xrc.xrcd;
    FAILS(EINVAL, ibv_create_qp_ex(env->context, &attr));

    struct ibv_qp *qp = target(env->context, xrc.xrcd, NULL), *plain = env_qp(env, IBV_QPT_RC);
    CHECK(qp != NULL && qp->qp_type == IBV_QPT_XRC_RECV && qp->pd == NULL);
    attr = (struct ibv_qp_init_attr_ex){.qp_type = IBV_QPT_XRC_RECV,
                                        .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_XRCD,
                                        .pd = env->pd,
                                        .xrcd = xrc.xrcd};
    struct ibv_qp *with_pd = ibv_create_qp_ex(env->context, &attr);
    CHECK(with_pd != NULL && with_pd->pd == env->pd);
    RETURNS(0, ibv_destroy_qp(with_pd));
    struct ibv_qp_open_attr good = {.comp_mask = IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_XRCD | IBV_QP_OPEN_ATTR_TYPE,
                                    .qp_num = qp->qp_num,
                                    .xrcd = xrc.xrcd,
                                    .qp_type = IBV_QPT_XRC_RECV},
                            open = good;
    FAILS(EINVAL, ibv_open_qp(env->context, NULL));
    for (unsigned bit = 1; bit < IBV_QP_OPEN_ATTR_RESERVED; bit <<= 1)
        if (bit != IBV_QP_OPEN_ATTR_CONTEXT) {
            open = good, open.comp_mask &= ~bit;
            FAILS(EINVAL, ibv_open_qp(env->context, &open));
        }
    open = good, open.comp_mask |= IBV_QP_OPEN_ATTR_RESERVED;
    FAILS(EOPNOTSUPP, ibv_open_qp(env->context, &open));
    open = good, open.qp_type = IBV_QPT_RC;
    FAILS(EINVAL, ibv_open_qp(env->context, &open));
    open = good, open.xrcd = NULL;
    FAILS(EINVAL, ibv_open_qp(env->context, &open));
    open = good, open.qp_num = plain->qp_num;
    FAILS(EINVAL, ibv_open_qp(env->context, &open));
    open = good, open.qp_num ^= 1;
    FAILS(EINVAL, ibv_open_qp(env->context, &open));
    /* The queue pair is of another process or context. */
    open = good, open.qp_num ^= 1u << 23;
    FAILS(EOPNOTSUPP, ibv_open_qp(env->context, &open));
    FAILS(EOPNOTSUPP, ibv_open_qp(other, &good));
    struct ibv_xrcd *stranger = open_domain(env->context, -1, O_CREAT);
    open = good, open.xrcd = stranger;
    FAILS(EINVAL, ibv_open_qp(env->context, &open));
    RETURNS(0, ibv_close_xrcd(stranger));

    struct ibv_recv_wr recv = {.wr_id = 1}, *bad_recv;
    struct ibv_send_wr send = {.opcode = IBV_WR_SEND, .qp_type.xrc.remote_srqn = xrc.srqn}, *bad_send;
    env_advance(env, qp, plain->qp_num, IBV_QPS_RTR);
    RETURNS(EINVAL, ibv_post_recv(qp, &recv, &bad_recv));
    RETURNS(EINVAL, ibv_post_send(qp, &send, &bad_send));
    struct ibv_qp *sender = initiator(env);
    env_advance(env, sender, plain->qp_num, IBV_QPS_RTS);
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

/* Sends a message of 8 bytes to the queue with the builder. */
static enum ibv_wc_status deliver(const struct env *env, struct ibv_qp *sender, uint32_t srqn)
{
    struct ibv_qp_ex *builder = ibv_qp_to_qp_ex(sender);
    ibv_wr_start(builder);
    builder->wr_id = 5, builder->wr_flags = IBV_SEND_SIGNALED;
    ibv_wr_send(builder);
    ibv_wr_set_xrc_srqn(builder, srqn);
    ibv_wr_set_sge(builder, env->mr->lkey, (uintptr_t)env->buffer, 8);
    RETURNS(0, ibv_wr_complete(builder));
    return env_poll(env->cq).status;
}

/* Both ends take the attributes that RC needs, and ignore those that do not apply to them. */
static void ignored_attributes(const struct env *env)
{
    struct xrc xrc = xrc_open(env);
    struct ibv_qp *qps[] = {initiator(env), target(env->context, xrc.xrcd, NULL)};
    for (int i = 0; i < 2; i++) {
        struct ibv_qp_attr attr = env_attr(env, qps[!i]->qp_num), now;
        for (attr.qp_state = IBV_QPS_INIT; attr.qp_state <= IBV_QPS_RTS; attr.qp_state++)
            RETURNS(0, ibv_modify_qp(qps[i], &attr, env_mask(IBV_QPT_RC, attr.qp_state)));
        struct ibv_qp_init_attr init;
        RETURNS(0, ibv_query_qp(qps[i], &now, IBV_QP_STATE, &init));
        CHECK(now.qp_state == IBV_QPS_RTS);
        bool asks = qps[i]->qp_type == IBV_QPT_XRC_SEND;
        CHECK(asks ? now.max_dest_rd_atomic == 0 && now.max_rd_atomic != 0
                   : now.max_dest_rd_atomic != 0 && now.max_rd_atomic == 0 && now.retry_cnt == 0);
        /* Other attributes still fail. */
        RETURNS(EINVAL, ibv_modify_qp(qps[i], &attr, IBV_QP_QKEY));
    }
    RETURNS(0, ibv_destroy_qp(qps[0]));
    RETURNS(0, ibv_destroy_qp(qps[1]));
    xrc_close(&xrc);
}

/* A target exists while a handle to it exists, and its events go to the remaining handle. */
static void handles_of_target(const struct env *env)
{
    struct xrc xrc = xrc_open(env);
    int first_user, second_user;
    struct ibv_qp *sender = initiator(env), *qp = target(env->context, xrc.xrcd, &first_user);
    struct ibv_qp *other = open_target(env->context, xrc.xrcd, qp->qp_num, &second_user);
    CHECK(other != NULL && other != qp && other->qp_num == qp->qp_num && other->qp_context == &second_user);
    env_advance(env, sender, qp->qp_num, IBV_QPS_RTS);
    env_advance(env, other, sender->qp_num, IBV_QPS_RTR);
    struct ibv_qp_attr attr;
    struct ibv_qp_init_attr init;
    RETURNS(0, ibv_query_qp(qp, &attr, IBV_QP_STATE, &init));
    CHECK(attr.qp_state == IBV_QPS_RTR && attr.dest_qp_num == sender->qp_num && attr.ah_attr.is_global == 1);
    CHECK(init.qp_type == IBV_QPT_XRC_RECV && init.send_cq == NULL && init.recv_cq == NULL && init.srq == NULL);
    CHECK(init.qp_context == &first_user && init.cap.max_send_wr == 0 && init.cap.max_recv_wr == 0);
    RETURNS(0, ibv_destroy_qp(qp));

    struct ibv_sge sge = {.addr = (uintptr_t)env->buffer + 64, .length = 64, .lkey = env->mr->lkey};
    struct ibv_recv_wr recv = {.wr_id = 9, .sg_list = &sge, .num_sge = 1}, *bad;
    RETURNS(0, ibv_post_srq_recv(xrc.srq, &recv, &bad));
    memcpy(env->buffer, "8 bytes!", 8);
    CHECK(deliver(env, sender, xrc.srqn) == IBV_WC_SUCCESS);
    struct ibv_wc wc = env_poll(xrc.cq);
    CHECK(wc.wr_id == 9 && wc.status == IBV_WC_SUCCESS && wc.qp_num == other->qp_num && wc.byte_len == 8);
    CHECK(memcmp(env->buffer + 64, "8 bytes!", 8) == 0);

    /* The queue is not in the domain. */
    CHECK(deliver(env, sender, xrc.srqn ^ 1) == IBV_WC_REM_INV_REQ_ERR);
    struct ibv_async_event event;
    do {
        CHECK(ibv_get_async_event(env->context, &event) == 0 && event.element.qp == other);
        ibv_ack_async_event(&event);
    } while (event.event_type == IBV_EVENT_COMM_EST);
    CHECK(event.event_type == IBV_EVENT_QP_REQ_ERR);

    RETURNS(0, ibv_destroy_qp(other));
    RETURNS(0, ibv_destroy_qp(sender));
    xrc_close(&xrc);
}

/* An extended poll takes several completions at once. Those of a destroyed queue are not polled, those of another one are. */
static void completions_of_destroyed_queue(const struct env *env)
{
    struct ibv_cq_init_attr_ex init = {.cqe = ENV_DEPTH};
    struct ibv_cq_ex *cq = ibv_create_cq_ex(env->context, &init);
    struct ibv_xrcd *xrcd = open_domain(env->context, -1, O_CREAT);
    struct ibv_qp *sender = initiator(env), *qp = target(env->context, xrcd, NULL);
    env_connect(env, sender, qp);
    struct ibv_srq_init_attr_ex attr = queue_attr(env, xrcd, ibv_cq_ex_to_cq(cq));
    struct ibv_srq *queues[] = {ibv_create_srq_ex(env->context, &attr), ibv_create_srq_ex(env->context, &attr)};
    struct ibv_sge sge = {.addr = (uintptr_t)env->buffer + 64, .length = 64, .lkey = env->mr->lkey};
    for (unsigned i = 0; i < 6; i++) {
        struct ibv_recv_wr recv = {.wr_id = i, .sg_list = &sge, .num_sge = 1}, *bad;
        uint32_t srqn = 0;
        RETURNS(0, ibv_get_srq_num(queues[i % 2], &srqn));
        RETURNS(0, ibv_post_srq_recv(queues[i % 2], &recv, &bad));
        CHECK(deliver(env, sender, srqn) == IBV_WC_SUCCESS);
    }
    struct ibv_poll_cq_attr poll = {0};
    RETURNS(0, ibv_start_poll(cq, &poll));
    CHECK(cq->wr_id == 0);
    ibv_end_poll(cq);
    RETURNS(0, ibv_destroy_srq(queues[0]));
    RETURNS(0, ibv_start_poll(cq, &poll));
    CHECK(cq->wr_id == 1);
    RETURNS(0, ibv_next_poll(cq));
    CHECK(cq->wr_id == 3);
    RETURNS(0, ibv_next_poll(cq));
    CHECK(cq->wr_id == 5);
    RETURNS(ENOENT, ibv_next_poll(cq));
    ibv_end_poll(cq);
    RETURNS(0, ibv_destroy_srq(queues[1]));
    RETURNS(0, ibv_destroy_qp(qp));
    RETURNS(0, ibv_destroy_qp(sender));
    RETURNS(0, ibv_destroy_cq(ibv_cq_ex_to_cq(cq)));
    RETURNS(0, ibv_close_xrcd(xrcd));
}

int main(void)
{
    struct env env = env_open();
    CHECK(env.attr.device_cap_flags & IBV_DEVICE_XRC);
    struct ibv_context *other = ibv_open_device(env.context->device);
    domains(&env, other);
    queues(&env, other);
    queue_pairs(&env, other);
    ignored_attributes(&env);
    handles_of_target(&env);
    completions_of_destroyed_queue(&env);
    CHECK(ibv_close_device(other) == 0);
    env_close(&env);
    return check_end();
}
