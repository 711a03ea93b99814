/*
 * verbs_queues: completion queues and channels, shared receive queues, address handles.
 */
#include "check.h"
#include "lab.h"

#include <limits.h>
#include <stdlib.h>
#include <sys/mman.h>

static void completion_queues(const struct lab *lab, struct ibv_context *other)
{
    struct ibv_context *context = lab->context;
    int most = lab->attr.max_cqe;
    REFUSED(EINVAL, ibv_create_cq(NULL, 1, NULL, NULL, 0));
    REFUSED(EINVAL, ibv_create_cq(context, 0, NULL, NULL, 0));
    REFUSED(EINVAL, ibv_create_cq(context, -1, NULL, NULL, 0));
    REFUSED(EINVAL, ibv_create_cq(context, INT_MIN, NULL, NULL, 0));
    REFUSED(EINVAL, ibv_create_cq(context, INT_MAX, NULL, NULL, 0));
    REFUSED(EINVAL, ibv_create_cq(context, most + 1, NULL, NULL, 0));
    REFUSED(EINVAL, ibv_create_cq(context, 1, NULL, NULL, -1));
    REFUSED(EINVAL, ibv_create_cq(context, 1, NULL, NULL, context->num_comp_vectors));
    REFUSED(EINVAL, ibv_create_cq(other, 1, NULL, lab->channel, 0));

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
    /* Arming a queue without a channel is no error: programs do it unaware. */
    RETURNS(0, ibv_req_notify_cq(cq, 0));
    RETURNS(0, ibv_destroy_cq(cq));
    RETURNS(EINVAL, ibv_destroy_cq(NULL));
}

/* A queue cannot be resized below its number of entries. */
static void resize_below_fill(const struct lab *lab)
{
    struct ibv_cq *cq = ibv_create_cq(lab->context, 8, NULL, NULL, 0);
    struct ibv_qp_init_attr init = lab_init(lab, IBV_QPT_UD);
    init.send_cq = init.recv_cq = cq;
    struct ibv_qp *qp = ibv_create_qp(lab->pd, &init);
    lab_advance(lab, qp, 0, IBV_QPS_INIT);
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

/* More completions than the queue holds: an event, an error from then on, and nothing written out of bounds. */
static void overrun(const struct lab *lab)
{
    struct ibv_cq *cq = ibv_create_cq(lab->context, 2, NULL, NULL, 0);
    struct ibv_qp_init_attr init = lab_init(lab, IBV_QPT_RC);
    init.send_cq = init.recv_cq = cq;
    struct ibv_qp *qp = ibv_create_qp(lab->pd, &init);
    lab_advance(lab, qp, qp->qp_num, IBV_QPS_INIT);
    struct ibv_recv_wr wr = {.wr_id = 1}, *bad;
    for (int i = 0; i < LAB_DEPTH; i++)
        RETURNS(0, ibv_post_recv(qp, &wr, &bad));
    struct ibv_qp_attr error = {.qp_state = IBV_QPS_ERR};
    RETURNS(0, ibv_modify_qp(qp, &error, IBV_QP_STATE));
    struct ibv_async_event event;
    CHECK(ibv_get_async_event(lab->context, &event) == 0);
    CHECK(event.event_type == IBV_EVENT_CQ_ERR && event.element.cq == cq);
    ibv_ack_async_event(&event);
    struct ibv_wc wc[LAB_DEPTH];
    CHECK(ibv_poll_cq(cq, LAB_DEPTH, wc) == 2);
    CHECK(ibv_poll_cq(cq, LAB_DEPTH, wc) < 0);
    RETURNS(0, ibv_destroy_qp(qp));
    RETURNS(0, ibv_destroy_cq(cq));
}

static void extended_completion_queues(const struct lab *lab, struct ibv_context *other)
{
    struct ibv_context *context = lab->context;
    const struct ibv_cq_init_attr_ex good = {.cqe = 4, .wc_flags = IBV_WC_STANDARD_FLAGS};
    struct ibv_cq_init_attr_ex attr = good;
    REFUSED(EINVAL, ibv_create_cq_ex(context, NULL));
    attr.cqe = 0;
    REFUSED(EINVAL, ibv_create_cq_ex(context, &attr));
    attr.cqe = (uint32_t)lab->attr.max_cqe + 1;
    REFUSED(EINVAL, ibv_create_cq_ex(context, &attr));
    attr.cqe = UINT32_MAX;
    REFUSED(EINVAL, ibv_create_cq_ex(context, &attr));
    attr = good, attr.comp_vector = (uint32_t)context->num_comp_vectors;
    REFUSED(EINVAL, ibv_create_cq_ex(context, &attr));
    attr = good, attr.comp_mask = 1u << 31;
    REFUSED(EINVAL, ibv_create_cq_ex(context, &attr));
    attr = good, attr.wc_flags = 1ull << 63;
    REFUSED(EOPNOTSUPP, ibv_create_cq_ex(context, &attr));
    attr = good, attr.wc_flags |= IBV_WC_EX_WITH_TM_INFO;
    REFUSED(EOPNOTSUPP, ibv_create_cq_ex(context, &attr));
    attr = good, attr.comp_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS, attr.flags = 1u << 31;
    REFUSED(EOPNOTSUPP, ibv_create_cq_ex(context, &attr));
    attr = good, attr.comp_mask = IBV_CQ_INIT_ATTR_MASK_PD;
    REFUSED(EINVAL, ibv_create_cq_ex(context, &attr));
    attr = good, attr.channel = lab->channel;
    REFUSED(EINVAL, ibv_create_cq_ex(other, &attr));

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

static void channels(const struct lab *lab)
{
    REFUSED(EINVAL, ibv_create_comp_channel(NULL));
    RETURNS(EINVAL, ibv_destroy_comp_channel(NULL));
    struct ibv_comp_channel *channel = ibv_create_comp_channel(lab->context);
    struct ibv_cq *cq = ibv_create_cq(lab->context, 1, NULL, channel, 0);
    RETURNS(EBUSY, ibv_destroy_comp_channel(channel));
    RETURNS(0, ibv_destroy_cq(cq));
    RETURNS(0, ibv_destroy_comp_channel(channel));
}

static struct ibv_srq *srq_of(struct ibv_pd *pd, uint32_t max_wr, uint32_t max_sge)
{
    struct ibv_srq_init_attr init = {.attr = {.max_wr = max_wr, .max_sge = max_sge}};
    return ibv_create_srq(pd, &init);
}

static void shared_receive_queues(const struct lab *lab)
{
    uint32_t most = (uint32_t)lab->attr.max_srq_wr, most_sges = (uint32_t)lab->attr.max_srq_sge;
    REFUSED(EINVAL, ibv_create_srq(lab->pd, NULL));
    REFUSED(EINVAL, srq_of(NULL, 1, 1));
    REFUSED(EINVAL, srq_of(lab->pd, 0, 1));
    REFUSED(EINVAL, srq_of(lab->pd, most + 1, 1));
    REFUSED(EINVAL, srq_of(lab->pd, UINT32_MAX, 1));
    REFUSED(EINVAL, srq_of(lab->pd, 1, most_sges + 1));
    REFUSED(EINVAL, srq_of(lab->pd, 1, UINT32_MAX));

    struct ibv_srq *srq = srq_of(lab->pd, 4, 2);
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
    /* With one invalid value no value changes. */
    attr = (struct ibv_srq_attr){.max_wr = 8, .srq_limit = 9};
    RETURNS(EINVAL, ibv_modify_srq(srq, &attr, IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT));
    RETURNS(0, ibv_query_srq(srq, &attr));
    CHECK(attr.max_wr == 4 && attr.srq_limit == 0 && attr.max_sge >= 2);
    RETURNS(EINVAL, ibv_modify_srq(srq, NULL, IBV_SRQ_LIMIT));
    RETURNS(EINVAL, ibv_query_srq(srq, NULL));
    uint32_t number;
    RETURNS(EINVAL, ibv_get_srq_num(srq, NULL));
    RETURNS(0, ibv_get_srq_num(srq, &number));

    struct ibv_qp_init_attr init = lab_init(lab, IBV_QPT_RC);
    init.srq = srq;
    struct ibv_qp *qp = ibv_create_qp(lab->pd, &init);
    RETURNS(EBUSY, ibv_destroy_srq(srq));
    RETURNS(0, ibv_destroy_qp(qp));
    RETURNS(0, ibv_destroy_srq(srq));
    RETURNS(EINVAL, ibv_destroy_srq(NULL));
}

static void extended_shared_receive_queues(const struct lab *lab)
{
    struct ibv_srq_init_attr_ex attr = {.attr = {.max_wr = 1, .max_sge = 1},
                                        .comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD,
                                        .pd = lab->pd,
                                        .srq_type = IBV_SRQT_XRC};
    REFUSED(EINVAL, ibv_create_srq_ex(lab->context, &attr));
    attr.srq_type = IBV_SRQT_TM;
    REFUSED(EOPNOTSUPP, ibv_create_srq_ex(lab->context, &attr));
    attr.srq_type = (enum ibv_srq_type)77;
    REFUSED(EOPNOTSUPP, ibv_create_srq_ex(lab->context, &attr));
    attr.srq_type = IBV_SRQT_BASIC, attr.comp_mask = IBV_SRQ_INIT_ATTR_TYPE;
    REFUSED(EINVAL, ibv_create_srq_ex(lab->context, &attr));
    attr.comp_mask = IBV_SRQ_INIT_ATTR_PD | 1u << 31;
    REFUSED(EOPNOTSUPP, ibv_create_srq_ex(lab->context, &attr));
}

static void address_handles(const struct lab *lab)
{
    const struct ibv_ah_attr good = lab_attr(lab, 0).ah_attr;
    struct ibv_ah_attr attr = good;
    REFUSED(EINVAL, ibv_create_ah(lab->pd, NULL));
    REFUSED(EINVAL, ibv_create_ah(NULL, &attr));
    attr.is_global = 0;
    REFUSED(EINVAL, ibv_create_ah(lab->pd, &attr));
    attr = good, attr.port_num = 0;
    REFUSED(EINVAL, ibv_create_ah(lab->pd, &attr));
    attr.port_num = LAB_PORT + 1;
    REFUSED(EINVAL, ibv_create_ah(lab->pd, &attr));
    attr = good, attr.grh.sgid_index = (uint8_t)(lab->port.gid_tbl_len - 1);
    REFUSED(EINVAL, ibv_create_ah(lab->pd, &attr));
    attr.grh.sgid_index = 255;
    REFUSED(EINVAL, ibv_create_ah(lab->pd, &attr));
    attr = good, memset(&attr.grh.dgid, 0, sizeof attr.grh.dgid);
    REFUSED(EINVAL, ibv_create_ah(lab->pd, &attr));
    attr.grh.dgid.raw[0] = 0xff, attr.grh.dgid.raw[1] = 0x0e, attr.grh.dgid.raw[15] = 1;
    REFUSED(EINVAL, ibv_create_ah(lab->pd, &attr));
    attr = good, attr.grh.dgid.raw[12] = 224;
    REFUSED(EINVAL, ibv_create_ah(lab->pd, &attr));
    memcpy(&attr.grh.dgid, "\x20\x01\x0d\xb8\0\0\0\0\0\0\0\0\0\0\0\1", 16);
    REFUSED(EINVAL, ibv_create_ah(lab->pd, &attr));
    RETURNS(EINVAL, ibv_destroy_ah(NULL));

    /* From a completion that is not of a datagram. */
    uint8_t area[40];
    struct ibv_wc wc = {.wc_flags = IBV_WC_GRH};
    for (int filler = 0; filler < 256; filler++) {
        memset(area, filler, sizeof area);
        CHECK(ibv_init_ah_from_wc(lab->context, LAB_PORT, &wc, (struct ibv_grh *)area, &attr) == -1);
        CHECK(ibv_create_ah_from_wc(lab->pd, &wc, (struct ibv_grh *)area, LAB_PORT) == NULL);
    }
    MINUS_ONE(EINVAL, ibv_init_ah_from_wc(lab->context, LAB_PORT, &wc, NULL, &attr));
    MINUS_ONE(EINVAL, ibv_init_ah_from_wc(lab->context, LAB_PORT, NULL, (struct ibv_grh *)area, &attr));
}

/* One more than the device has: ENOMEM; after a destruction the next one succeeds. */
static void limits(const struct lab *lab)
{
    unsigned room = (unsigned)lab->attr.max_cq - 1;
    struct ibv_cq **cqs = calloc(room, sizeof *cqs);
    for (unsigned i = 0; i < room; i++)
        if ((cqs[i] = ibv_create_cq(lab->context, 1, NULL, NULL, 0)) == NULL)
            die("completion queue %u of %u", i, room);
    REFUSED(ENOMEM, ibv_create_cq(lab->context, 1, NULL, NULL, 0));
    RETURNS(0, ibv_destroy_cq(cqs[0]));
    CHECK((cqs[0] = ibv_create_cq(lab->context, 1, NULL, NULL, 0)) != NULL);
    for (unsigned i = 0; i < room; i++)
        RETURNS(0, ibv_destroy_cq(cqs[i]));
    free(cqs);

    room = (unsigned)lab->attr.max_srq;
    struct ibv_srq **srqs = calloc(room, sizeof *srqs);
    for (unsigned i = 0; i < room; i++)
        if ((srqs[i] = srq_of(lab->pd, 1, 1)) == NULL)
            die("shared receive queue %u of %u", i, room);
    REFUSED(ENOMEM, srq_of(lab->pd, 1, 1));
    for (unsigned i = 0; i < room; i++)
        RETURNS(0, ibv_destroy_srq(srqs[i]));
    free(srqs);
}

int main(void)
{
    struct lab lab = lab_open();
    struct ibv_context *other = ibv_open_device(lab.context->device);
    completion_queues(&lab, other);
    resize_below_fill(&lab);
    overrun(&lab);
    extended_completion_queues(&lab, other);
    channels(&lab);
    shared_receive_queues(&lab);
    extended_shared_receive_queues(&lab);
    address_handles(&lab);
    limits(&lab);
    CHECK(ibv_close_device(other) == 0);
    lab_close(&lab);
    return check_end();
}
