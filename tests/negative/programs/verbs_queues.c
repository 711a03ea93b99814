/*
 * verbs_queues: tests completion queues and channels, shared receive queues, and address handles.
 */
#include "check.h"
#include "env.h"

#include <limits.h>
#include <stdlib.h>
#include <sys/mman.h>

static void completion_queues(const struct env *env, struct ibv_context *other)
{
    struct ibv_context *context = env->context;
    int most = env->attr.max_cqe;
    FAILS(EINVAL, ibv_create_cq(NULL, 1, NULL, NULL, 0));
    FAILS(EINVAL, ibv_create_cq(context, 0, NULL, NULL, 0));
    FAILS(EINVAL, ibv_create_cq(context, -1, NULL, NULL, 0));
    FAILS(EINVAL, ibv_create_cq(context, INT_MIN, NULL, NULL, 0));
    FAILS(EINVAL, ibv_create_cq(context, INT_MAX, NULL, NULL, 0));
    FAILS(EINVAL, ibv_create_cq(context, most + 1, NULL, NULL, 0));
    FAILS(EINVAL, ibv_create_cq(context, 1, NULL, NULL, -1));
    FAILS(EINVAL, ibv_create_cq(context, 1, NULL, NULL, context->num_comp_vectors));
    FAILS(EINVAL, ibv_create_cq(other, 1, NULL, env->channel, 0));

    struct ibv_cq *cq = ibv_create_cq(context, most, NULL, NULL, 0);
    CHECK(cq != NULL && cq->cqe >= most);
    RETURNS(0, ibv_resize_cq(cq, 1));
    RETURNS(EINVAL, ibv_resize_cq(cq, 0));
    RETURNS(EINVAL, ibv_resize_cq(cq, -1));
    RETURNS(EINVAL, ibv_resize_cq(cq, most + 1));
    RETURNS(EINVAL, ibv_resize_cq(cq, INT_MAX));
    RETURNS(EINVAL, ibv_resize_cq(NULL, 1));

    struct ibv_wc wc;
    CHECK(ibv_poll_cq(cq, 0, &wc) == 0);
    CHECK(ibv_poll_cq(cq, 0, NULL) == 0);
    CHECK(ibv_poll_cq(cq, -1, &wc) < 0);
    CHECK(ibv_poll_cq(cq, INT_MIN, &wc) < 0);
    CHECK(ibv_poll_cq(cq, 1, NULL) < 0);
    /* Arming a queue without a channel is no error, because programs do so inadvertently. */
    RETURNS(0, ibv_req_notify_cq(cq, 0));
    RETURNS(0, ibv_destroy_cq(cq));
    RETURNS(EINVAL, ibv_destroy_cq(NULL));
}

/* A queue cannot be resized below its number of entries. */
static void resize_below_fill(const struct env *env)
{
    struct ibv_cq *cq = ibv_create_cq(env->context, 8, NULL, NULL, 0);
    struct ibv_qp_init_attr init = env_init(env, IBV_QPT_UD);
    init.send_cq = init.recv_cq = cq;
    struct ibv_qp *qp = ibv_create_qp(env->pd, &init);
    env_advance(env, qp, 0, IBV_QPS_INIT);
    struct ibv_recv_wr wr = {.wr_id = 1}, *bad;
    for (int i = 0; i < 4; i++)
        RETURNS(0, ibv_post_recv(qp, &wr, &bad));
    struct ibv_qp_attr error = {.qp_state = IBV_QPS_ERR};
    RETURNS(0, ibv_modify_qp(qp, &error, IBV_QP_STATE));
    RETURNS(EINVAL, ibv_resize_cq(cq, 3));
    CHECK(cq->cqe >= 8);
    RETURNS(0, ibv_resize_cq(cq, 4));
    struct ibv_wc wc[8];
    CHECK(ibv_poll_cq(cq, 8, wc) == 4 && wc[0].status == IBV_WC_WR_FLUSH_ERR);
    RETURNS(EBUSY, ibv_destroy_cq(cq));
    RETURNS(0, ibv_destroy_qp(qp));
    RETURNS(0, ibv_destroy_cq(cq));
}

/* More completions than a queue holds raise an event, fail every later poll, and write nothing out of bounds. */
static void overrun(const struct env *env)
{
    struct ibv_cq *cq = ibv_create_cq(env->context, 2, NULL, NULL, 0);
    struct ibv_qp_init_attr init = env_init(env, IBV_QPT_RC);
    init.send_cq = init.recv_cq = cq;
    struct ibv_qp *qp = ibv_create_qp(env->pd, &init);
    env_advance(env, qp, qp->qp_num, IBV_QPS_INIT);
    struct ibv_recv_wr wr = {.wr_id = 1}, *bad;
    for (int i = 0; i < ENV_DEPTH; i++)
        RETURNS(0, ibv_post_recv(qp, &wr, &bad));
    struct ibv_qp_attr error = {.qp_state = IBV_QPS_ERR};
    RETURNS(0, ibv_modify_qp(qp, &error, IBV_QP_STATE));
    struct ibv_async_event event;
    CHECK(ibv_get_async_event(env->context, &event) == 0);
    CHECK(event.event_type == IBV_EVENT_CQ_ERR && event.element.cq == cq);
    ibv_ack_async_event(&event);
    struct ibv_wc wc[ENV_DEPTH];
    CHECK(ibv_poll_cq(cq, ENV_DEPTH, wc) == 2);
    CHECK(ibv_poll_cq(cq, ENV_DEPTH, wc) < 0);
    RETURNS(0, ibv_destroy_qp(qp));
    RETURNS(0, ibv_destroy_cq(cq));
}

static void extended_completion_queues(const struct env *env, struct ibv_context *other)
{
    struct ibv_context *context = env->context;
    const struct ibv_cq_init_attr_ex good = {.cqe = 4, .wc_flags = IBV_WC_STANDARD_FLAGS};
    struct ibv_cq_init_attr_ex attr = good;
    FAILS(EINVAL, ibv_create_cq_ex(context, NULL));
    attr.cqe = 0;
    FAILS(EINVAL, ibv_create_cq_ex(context, &attr));
    attr.cqe = (uint32_t)env->attr.max_cqe + 1;
    FAILS(EINVAL, ibv_create_cq_ex(context, &attr));
    attr.cqe = UINT32_MAX;
    FAILS(EINVAL, ibv_create_cq_ex(context, &attr));
    attr = good, attr.comp_vector = (uint32_t)context->num_comp_vectors;
    FAILS(EINVAL, ibv_create_cq_ex(context, &attr));
    attr = good, attr.comp_mask = 1u << 31;
    FAILS(EINVAL, ibv_create_cq_ex(context, &attr));
    attr = good, attr.wc_flags = 1ull << 63;
    FAILS(EOPNOTSUPP, ibv_create_cq_ex(context, &attr));
    attr = good, attr.wc_flags |= IBV_WC_EX_WITH_TM_INFO;
    FAILS(EOPNOTSUPP, ibv_create_cq_ex(context, &attr));
    attr = good, attr.comp_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS, attr.flags = 1u << 31;
    FAILS(EOPNOTSUPP, ibv_create_cq_ex(context, &attr));
    attr = good, attr.comp_mask = IBV_CQ_INIT_ATTR_MASK_PD;
    FAILS(EINVAL, ibv_create_cq_ex(context, &attr));
    attr = good, attr.channel = env->channel;
    FAILS(EINVAL, ibv_create_cq_ex(other, &attr));

    attr = good;
    struct ibv_cq_ex *cq = ibv_create_cq_ex(context, &attr);
    struct ibv_poll_cq_attr poll = {.comp_mask = 1};
    RETURNS(EINVAL, ibv_start_poll(cq, &poll));
    poll.comp_mask = 0;
    RETURNS(ENOENT, ibv_start_poll(cq, &poll));
    RETURNS(ENOENT, ibv_start_poll(cq, NULL));
    ibv_end_poll(cq); /* one too many */
    RETURNS(0, ibv_destroy_cq(ibv_cq_ex_to_cq(cq)));
}

static void channels(const struct env *env)
{
    FAILS(EINVAL, ibv_create_comp_channel(NULL));
    RETURNS(EINVAL, ibv_destroy_comp_channel(NULL));
    struct ibv_comp_channel *channel = ibv_create_comp_channel(env->context);
    struct ibv_cq *cq = ibv_create_cq(env->context, 1, NULL, channel, 0);
    RETURNS(EBUSY, ibv_destroy_comp_channel(channel));
    RETURNS(0, ibv_destroy_cq(cq));
    RETURNS(0, ibv_destroy_comp_channel(channel));
}

static struct ibv_srq *srq_of(struct ibv_pd *pd, uint32_t max_wr, uint32_t max_sge)
{
    struct ibv_srq_init_attr init = {.attr = {.max_wr = max_wr, .max_sge = max_sge}};
    return ibv_create_srq(pd, &init);
}

static void shared_receive_queues(const struct env *env)
{
    uint32_t most = (uint32_t)env->attr.max_srq_wr, most_sges = (uint32_t)env->attr.max_srq_sge;
    FAILS(EINVAL, ibv_create_srq(env->pd, NULL));
    FAILS(EINVAL, srq_of(NULL, 1, 1));
    FAILS(EINVAL, srq_of(env->pd, 0, 1));
    FAILS(EINVAL, srq_of(env->pd, most + 1, 1));
    FAILS(EINVAL, srq_of(env->pd, UINT32_MAX, 1));
    FAILS(EINVAL, srq_of(env->pd, 1, most_sges + 1));
    FAILS(EINVAL, srq_of(env->pd, 1, UINT32_MAX));

    struct ibv_srq *srq = srq_of(env->pd, 4, 2);
    struct ibv_sge sges[3] = {{0}};
    struct ibv_recv_wr third = {.wr_id = 3}, second = {.wr_id = 2, .next = &third}, first = {.wr_id = 1, .next = &second};
    struct ibv_recv_wr *bad = NULL;
    second.sg_list = sges, second.num_sge = 3;
    RETURNS(EINVAL, ibv_post_srq_recv(srq, &first, &bad));
    CHECK(bad == &second);
    second.num_sge = -1;
    RETURNS(EINVAL, ibv_post_srq_recv(srq, &first, &bad));
    CHECK(bad == &second);
    second.num_sge = 1, second.sg_list = NULL;
    RETURNS(EINVAL, ibv_post_srq_recv(srq, &second, &bad));
    CHECK(bad == &second);
    second.num_sge = 0;
    /* Two receives are already in it. */
    RETURNS(ENOMEM, ibv_post_srq_recv(srq, &first, &bad));
    CHECK(bad == &third);

    struct ibv_srq_attr attr = {.max_wr = 3, .srq_limit = 5};
    RETURNS(EINVAL, ibv_modify_srq(srq, &attr, IBV_SRQ_MAX_WR));
    RETURNS(EINVAL, ibv_modify_srq(srq, &attr, IBV_SRQ_LIMIT));
    attr.max_wr = 8;
    RETURNS(EINVAL, ibv_modify_srq(srq, &attr, IBV_SRQ_MAX_WR | 1 << 7));
    attr.max_wr = most + 1;
    RETURNS(EINVAL, ibv_modify_srq(srq, &attr, IBV_SRQ_MAX_WR));
    attr.max_wr = 0;
    RETURNS(EINVAL, ibv_modify_srq(srq, &attr, IBV_SRQ_MAX_WR));
    /* If one value is invalid, no value changes. */
    attr = (struct ibv_srq_attr){.max_wr = 8, .srq_limit = 9};
    RETURNS(EINVAL, ibv_modify_srq(srq, &attr, IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT));
    RETURNS(0, ibv_query_srq(srq, &attr));
    CHECK(attr.max_wr == 4 && attr.srq_limit == 0 && attr.max_sge >= 2);
    RETURNS(EINVAL, ibv_modify_srq(srq, NULL, IBV_SRQ_LIMIT));
    RETURNS(EINVAL, ibv_query_srq(srq, NULL));
    uint32_t number;
    RETURNS(EINVAL, ibv_get_srq_num(srq, NULL));
    RETURNS(0, ibv_get_srq_num(srq, &number));

    struct ibv_qp_init_attr init = env_init(env, IBV_QPT_RC);
    init.srq = srq;
    struct ibv_qp *qp = ibv_create_qp(env->pd, &init);
    RETURNS(EBUSY, ibv_destroy_srq(srq));
    RETURNS(0, ibv_destroy_qp(qp));
    RETURNS(0, ibv_destroy_srq(srq));
    RETURNS(EINVAL, ibv_destroy_srq(NULL));
}

static void extended_shared_receive_queues(const struct env *env)
{
    struct ibv_srq_init_attr_ex attr = {.attr = {.max_wr = 1, .max_sge = 1},
                                        .comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD,
                                        .pd = env->pd,
                                        .srq_type = IBV_SRQT_XRC};
    FAILS(EINVAL, ibv_create_srq_ex(env->context, &attr));
    attr.srq_type = IBV_SRQT_TM;
    FAILS(EOPNOTSUPP, ibv_create_srq_ex(env->context, &attr));
    attr.srq_type = (enum ibv_srq_type)77;
    FAILS(EOPNOTSUPP, ibv_create_srq_ex(env->context, &attr));
    attr.srq_type = IBV_SRQT_BASIC, attr.comp_mask = IBV_SRQ_INIT_ATTR_TYPE;
    FAILS(EINVAL, ibv_create_srq_ex(env->context, &attr));
    attr.comp_mask = IBV_SRQ_INIT_ATTR_PD | 1u << 31;
    FAILS(EOPNOTSUPP, ibv_create_srq_ex(env->context, &attr));
}

static void address_handles(const struct env *env)
{
    const struct ibv_ah_attr good = env_attr(env, 0).ah_attr;
    struct ibv_ah_attr attr = good;
    FAILS(EINVAL, ibv_create_ah(env->pd, NULL));
    FAILS(EINVAL, ibv_create_ah(NULL, &attr));
    attr.is_global = 0;
    FAILS(EINVAL, ibv_create_ah(env->pd, &attr));
    attr = good, attr.port_num = 0;
    FAILS(EINVAL, ibv_create_ah(env->pd, &attr));
    attr.port_num = ENV_PORT + 1;
    FAILS(EINVAL, ibv_create_ah(env->pd, &attr));
    attr = good, attr.grh.sgid_index = (uint8_t)(env->port.gid_tbl_len - 1);
    FAILS(EINVAL, ibv_create_ah(env->pd, &attr));
    attr.grh.sgid_index = 255;
    FAILS(EINVAL, ibv_create_ah(env->pd, &attr));
    attr = good, memset(&attr.grh.dgid, 0, sizeof attr.grh.dgid);
    FAILS(EINVAL, ibv_create_ah(env->pd, &attr));
    attr.grh.dgid.raw[0] = 0xff, attr.grh.dgid.raw[1] = 0x0e, attr.grh.dgid.raw[15] = 1;
    FAILS(EINVAL, ibv_create_ah(env->pd, &attr));
    attr = good, attr.grh.dgid.raw[12] = 239;
    struct ibv_ah *group = ibv_create_ah(env->pd, &attr);
    CHECK(group != NULL);
    RETURNS(0, ibv_destroy_ah(group));
    memcpy(&attr.grh.dgid, "\x20\x01\x0d\xb8\0\0\0\0\0\0\0\0\0\0\0\1", 16);
    FAILS(EINVAL, ibv_create_ah(env->pd, &attr));
    RETURNS(EINVAL, ibv_destroy_ah(NULL));

    /* The completion must be that of a datagram. */
    uint8_t area[40];
    struct ibv_wc wc = {.wc_flags = IBV_WC_GRH};
    for (int filler = 0; filler < 256; filler++) {
        memset(area, filler, sizeof area);
        CHECK(ibv_init_ah_from_wc(env->context, ENV_PORT, &wc, (struct ibv_grh *)area, &attr) == -1);
        CHECK(ibv_create_ah_from_wc(env->pd, &wc, (struct ibv_grh *)area, ENV_PORT) == NULL);
    }
    MINUS_ONE(EINVAL, ibv_init_ah_from_wc(env->context, ENV_PORT, &wc, NULL, &attr));
    MINUS_ONE(EINVAL, ibv_init_ah_from_wc(env->context, ENV_PORT, NULL, (struct ibv_grh *)area, &attr));
}

/* Creating one more than the limit fails with ENOMEM. It succeeds after a destruction. */
static void limits(const struct env *env)
{
    unsigned room = (unsigned)env->attr.max_cq - 1;
    struct ibv_cq **cqs = calloc(room, sizeof *cqs);
    for (unsigned i = 0; i < room; i++)
        if ((cqs[i] = ibv_create_cq(env->context, 1, NULL, NULL, 0)) == NULL)
            die("completion queue %u of %u", i, room);
    FAILS(ENOMEM, ibv_create_cq(env->context, 1, NULL, NULL, 0));
    RETURNS(0, ibv_destroy_cq(cqs[0]));
    CHECK((cqs[0] = ibv_create_cq(env->context, 1, NULL, NULL, 0)) != NULL);
    for (unsigned i = 0; i < room; i++)
        RETURNS(0, ibv_destroy_cq(cqs[i]));
    free(cqs);

    room = (unsigned)env->attr.max_srq;
    struct ibv_srq **srqs = calloc(room, sizeof *srqs);
    for (unsigned i = 0; i < room; i++)
        if ((srqs[i] = srq_of(env->pd, 1, 1)) == NULL)
            die("shared receive queue %u of %u", i, room);
    FAILS(ENOMEM, srq_of(env->pd, 1, 1));
    for (unsigned i = 0; i < room; i++)
        RETURNS(0, ibv_destroy_srq(srqs[i]));
    free(srqs);
}

int main(void)
{
    struct env env = env_open();
    struct ibv_context *other = ibv_open_device(env.context->device);
    completion_queues(&env, other);
    resize_below_fill(&env);
    overrun(&env);
    extended_completion_queues(&env, other);
    channels(&env);
    shared_receive_queues(&env);
    extended_shared_receive_queues(&env);
    address_handles(&env);
    limits(&env);
    CHECK(ibv_close_device(other) == 0);
    env_close(&env);
    return check_end();
}
