/*
 * verbs_semantics: statuses and return values on which mlx5, rxe and irdma agree and the man pages say less.
 */
#include "check.h"
#include "lab.h"

enum { PIECE = 256 };

/* The two ends of a connection; each has a completion queue of its own. */
struct pair {
    struct ibv_cq *left_cq, *right_cq;
    struct ibv_qp *left, *right;
};

static struct ibv_qp *qp_of(struct ibv_pd *pd, struct ibv_qp_init_attr init, struct ibv_cq *cq, struct ibv_srq *srq)
{
    init.send_cq = init.recv_cq = cq;
    init.srq = srq;
    struct ibv_qp *qp = ibv_create_qp(pd, &init);
    if (qp == NULL)
        die("no queue pair");
    return qp;
}

/* The left queue pair is the requester: its retries end within half a second. The right one is in `pd`. */
static struct pair pair_in(const struct lab *lab, struct ibv_pd *pd, struct ibv_srq *srq)
{
    struct pair pair = {.left_cq = ibv_create_cq(lab->context, 64, NULL, NULL, 0),
                        .right_cq = ibv_create_cq(lab->context, 64, NULL, NULL, 0)};
    pair.left = qp_of(lab->pd, lab_init(lab, IBV_QPT_RC), pair.left_cq, NULL);
    pair.right = qp_of(pd, lab_init(lab, IBV_QPT_RC), pair.right_cq, srq);
    lab_advance(lab, pair.left, pair.right->qp_num, IBV_QPS_RTR);
    struct ibv_qp_attr attr = lab_attr(lab, 0);
    attr.qp_state = IBV_QPS_RTS, attr.retry_cnt = 1;
    if (ibv_modify_qp(pair.left, &attr, lab_mask(IBV_QPT_RC, IBV_QPS_RTS)) != 0)
        die("the left queue pair does not get ready to send");
    lab_advance(lab, pair.right, pair.left->qp_num, IBV_QPS_RTS);
    return pair;
}

static struct pair pair_of(const struct lab *lab)
{
    return pair_in(lab, lab->pd, NULL);
}

static void part(struct pair *pair)
{
    RETURNS(0, ibv_destroy_qp(pair->left));
    RETURNS(0, ibv_destroy_qp(pair->right));
    RETURNS(0, ibv_destroy_cq(pair->left_cq));
    RETURNS(0, ibv_destroy_cq(pair->right_cq));
}

static struct ibv_sge piece(const struct lab *lab, size_t offset, uint32_t lkey)
{
    return (struct ibv_sge){.addr = (uintptr_t)lab->buffer + offset, .length = PIECE, .lkey = lkey};
}

static int post_recv(const struct lab *lab, struct ibv_qp *qp)
{
    struct ibv_sge sge = piece(lab, LAB_BYTES / 2, lab->mr->lkey);
    struct ibv_recv_wr wr = {.wr_id = 21, .sg_list = &sge, .num_sge = 1}, *bad;
    return ibv_post_recv(qp, &wr, &bad);
}

static int post_send(const struct lab *lab, struct ibv_qp *qp, enum ibv_wr_opcode opcode, uint32_t rkey, uint32_t invalidated)
{
    struct ibv_sge sge = piece(lab, 0, lab->mr->lkey);
    struct ibv_send_wr wr = {.wr_id = 11, .sg_list = &sge, .num_sge = 1, .opcode = opcode}, *bad;
    wr.invalidate_rkey = invalidated;
    wr.wr.rdma.remote_addr = (uintptr_t)lab->buffer + LAB_BYTES / 2, wr.wr.rdma.rkey = rkey;
    return ibv_post_send(qp, &wr, &bad);
}

static int post_invalidate(struct ibv_qp *qp, uint32_t rkey)
{
    struct ibv_send_wr wr = {.wr_id = 12, .opcode = IBV_WR_LOCAL_INV, .invalidate_rkey = rkey}, *bad;
    return ibv_post_send(qp, &wr, &bad);
}

static struct ibv_send_wr bind_wr(const struct lab *lab, struct ibv_mw *mw, uint32_t rkey)
{
    struct ibv_send_wr wr = {.wr_id = 13, .opcode = IBV_WR_BIND_MW};
    wr.bind_mw.mw = mw, wr.bind_mw.rkey = rkey;
    wr.bind_mw.bind_info = (struct ibv_mw_bind_info){
        .mr = lab->mr,
        .addr = (uintptr_t)lab->buffer,
        .length = LAB_BYTES,
        .mw_access_flags = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE,
    };
    return wr;
}

/* A bind that must be posted; it ends with this status. */
static void bound(struct ibv_qp *qp, struct ibv_cq *cq, struct ibv_send_wr wr, enum ibv_wc_status wanted)
{
    struct ibv_send_wr *bad;
    RETURNS(0, ibv_post_send(qp, &wr, &bad));
    struct ibv_wc wc = lab_poll(cq);
    CHECK(wc.wr_id == wr.wr_id && wc.status == wanted);
}

/* The index is the window's, the tag the work request's; `mw->rkey` is the key from then on. */
static void keys_of_windows(const struct lab *lab)
{
    struct pair pair = pair_of(lab);
    struct ibv_mw *mw = ibv_alloc_mw(lab->pd, IBV_MW_TYPE_2);
    uint32_t index = mw->rkey & ~0xffu, key = index | ((mw->rkey + 7) & 0xff);
    bound(pair.left, pair.left_cq, bind_wr(lab, mw, key & 0xff), IBV_WC_SUCCESS);
    CHECK(mw->rkey == key);
    RETURNS(0, post_send(lab, pair.right, IBV_WR_RDMA_WRITE, key, 0));
    CHECK(lab_poll(pair.right_cq).status == IBV_WC_SUCCESS);
    RETURNS(0, post_invalidate(pair.left, mw->rkey));
    CHECK(lab_poll(pair.left_cq).status == IBV_WC_SUCCESS);

    /* Neither wrong upper bits nor a value that the program stores in `mw->rkey` change the index. */
    mw->rkey = 0;
    bound(pair.left, pair.left_cq, bind_wr(lab, mw, (~index & ~0xffu) | 0x42), IBV_WC_SUCCESS);
    CHECK(mw->rkey == (index | 0x42));

    /* A list that is refused in part. */
    struct ibv_mw *other = ibv_alloc_mw(lab->pd, IBV_MW_TYPE_2);
    uint32_t before = other->rkey, bad_tag = (before + 1) & 0xff;
    struct ibv_send_wr inv = {.wr_id = 12, .opcode = IBV_WR_LOCAL_INV, .invalidate_rkey = mw->rkey};
    struct ibv_send_wr first = bind_wr(lab, mw, 0x17), second = bind_wr(lab, other, bad_tag), *bad;
    second.send_flags = IBV_SEND_IP_CSUM;
    inv.next = &first, first.next = &second;
    RETURNS(EINVAL, ibv_post_send(pair.left, &inv, &bad));
    CHECK(bad == &second && mw->rkey == (index | 0x17) && other->rkey == before);
    CHECK(lab_poll(pair.left_cq).status == IBV_WC_SUCCESS);
    CHECK(lab_poll(pair.left_cq).status == IBV_WC_SUCCESS);
    part(&pair);
    RETURNS(0, ibv_dealloc_mw(mw));
    RETURNS(0, ibv_dealloc_mw(other));
}

static void keys_of_windows_by_builder(const struct lab *lab)
{
    struct ibv_qp_init_attr plain = lab_init(lab, IBV_QPT_RC);
    struct ibv_qp_init_attr_ex init = {
        .send_cq = plain.send_cq,
        .recv_cq = plain.recv_cq,
        .cap = plain.cap,
        .qp_type = IBV_QPT_RC,
        .sq_sig_all = 1,
        .pd = lab->pd,
        .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
        .send_ops_flags = IBV_QP_EX_WITH_BIND_MW,
    };
    struct ibv_qp *qp = ibv_create_qp_ex(lab->context, &init);
    lab_advance(lab, qp, qp->qp_num, IBV_QPS_RTS);
    struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(qp);
    struct ibv_mw *mw = ibv_alloc_mw(lab->pd, IBV_MW_TYPE_2);
    uint32_t before = mw->rkey;
    struct ibv_send_wr wr = bind_wr(lab, mw, 0);
    ibv_wr_start(ex);
    ex->wr_id = 13, ex->wr_flags = 0;
    ibv_wr_bind_mw(ex, mw, 0x99, &wr.bind_mw.bind_info);
    ibv_wr_abort(ex);
    CHECK(mw->rkey == before);
    ibv_wr_start(ex);
    ibv_wr_bind_mw(ex, mw, 0x99, &wr.bind_mw.bind_info);
    RETURNS(0, ibv_wr_complete(ex));
    CHECK(mw->rkey == ((before & ~0xffu) | 0x99));
    CHECK(lab_poll(lab->cq).status == IBV_WC_SUCCESS);
    RETURNS(0, ibv_destroy_qp(qp));
    RETURNS(0, ibv_dealloc_mw(mw));
}

/* IBTA class J: the receive ends in error, and the responder sends no answer. */
static void bad_remote_invalidation(const struct lab *lab, uint32_t rkey)
{
    struct pair pair = pair_of(lab);
    RETURNS(0, post_recv(lab, pair.right));
    RETURNS(0, post_send(lab, pair.left, IBV_WR_SEND_WITH_INV, 0, rkey));
    struct ibv_wc wc = lab_poll(pair.right_cq);
    CHECK(wc.wr_id == 21 && wc.status == IBV_WC_REM_INV_REQ_ERR);
    CHECK(lab_poll(pair.left_cq).status == IBV_WC_RETRY_EXC_ERR);
    part(&pair);
}

static void bad_remote_invalidations(const struct lab *lab)
{
    struct pair pair = pair_of(lab);
    struct ibv_mw *first = ibv_alloc_mw(lab->pd, IBV_MW_TYPE_1), *second = ibv_alloc_mw(lab->pd, IBV_MW_TYPE_2);
    struct ibv_mw_bind bind = {.bind_info = bind_wr(lab, first, 0).bind_mw.bind_info, .send_flags = IBV_SEND_SIGNALED};
    RETURNS(0, ibv_bind_mw(pair.left, first, &bind));
    CHECK(lab_poll(pair.left_cq).status == IBV_WC_SUCCESS);
    uint32_t key = second->rkey & ~0xffu;
    bound(pair.left, pair.left_cq, bind_wr(lab, second, key), IBV_WC_SUCCESS);
    bad_remote_invalidation(lab, lab->mr->rkey ^ 0xff);
    bad_remote_invalidation(lab, lab->mr->rkey);
    bad_remote_invalidation(lab, first->rkey);
    bad_remote_invalidation(lab, key);
    /* The window is still bound, and the peer of its own queue pair may invalidate it. */
    RETURNS(0, post_recv(lab, pair.left));
    RETURNS(0, post_send(lab, pair.right, IBV_WR_SEND_WITH_INV, 0, key));
    struct ibv_wc wc = lab_poll(pair.left_cq);
    CHECK(wc.status == IBV_WC_SUCCESS && (wc.wc_flags & IBV_WC_WITH_INV) && wc.invalidated_rkey == key);
    part(&pair);
    RETURNS(0, ibv_dealloc_mw(first));
    RETURNS(0, ibv_dealloc_mw(second));
}

static void local_invalidation_of_anothers(const struct lab *lab)
{
    struct pair pair = pair_of(lab), others = pair_of(lab);
    struct ibv_mw *mw = ibv_alloc_mw(lab->pd, IBV_MW_TYPE_2);
    uint32_t key = mw->rkey & ~0xffu;
    bound(pair.left, pair.left_cq, bind_wr(lab, mw, key), IBV_WC_SUCCESS);
    RETURNS(0, post_invalidate(others.left, key));
    struct ibv_wc wc = lab_poll(others.left_cq);
    CHECK(wc.wr_id == 12 && wc.status == IBV_WC_LOC_QP_OP_ERR);
    RETURNS(0, post_send(lab, pair.right, IBV_WR_RDMA_WRITE, key, 0));
    CHECK(lab_poll(pair.right_cq).status == IBV_WC_SUCCESS);
    RETURNS(0, post_invalidate(pair.left, key));
    CHECK(lab_poll(pair.left_cq).status == IBV_WC_SUCCESS);
    part(&pair);
    part(&others);
    RETURNS(0, ibv_dealloc_mw(mw));
}

/* Receives of a shared receive queue are checked against its protection domain, not the queue pair's. */
static void domain_of_shared_receives(const struct lab *lab)
{
    struct ibv_pd *pd = ibv_alloc_pd(lab->context);
    struct ibv_mr *mr = ibv_reg_mr(pd, lab->buffer, LAB_BYTES, IBV_ACCESS_LOCAL_WRITE);
    for (int own = 0; own < 2; own++) {
        struct ibv_srq_init_attr init = {.attr = {.max_wr = 4, .max_sge = 1}};
        struct ibv_srq *srq = ibv_create_srq(pd, &init);
        struct pair pair = pair_in(lab, lab->pd, srq);
        struct ibv_sge sge = piece(lab, LAB_BYTES / 2, own ? lab->mr->lkey : mr->lkey);
        struct ibv_recv_wr wr = {.wr_id = 22, .sg_list = &sge, .num_sge = 1}, *bad;
        RETURNS(0, ibv_post_srq_recv(srq, &wr, &bad));
        lab->buffer[0] = 'a' + own, lab->buffer[LAB_BYTES / 2] = 0;
        RETURNS(0, post_send(lab, pair.left, IBV_WR_SEND, 0, 0));
        struct ibv_wc wc = lab_poll(pair.right_cq);
        CHECK(wc.wr_id == 22 && wc.status == (own ? IBV_WC_LOC_PROT_ERR : IBV_WC_SUCCESS));
        CHECK(lab_poll(pair.left_cq).status == (own ? IBV_WC_REM_OP_ERR : IBV_WC_SUCCESS));
        CHECK(lab->buffer[LAB_BYTES / 2] == (own ? 0 : 'a'));
        if (!own) { /* Data of its READs is checked against the queue pair's own domain. */
            RETURNS(0, post_send(lab, pair.right, IBV_WR_RDMA_READ, lab->mr->rkey, 0));
            CHECK(lab_poll(pair.right_cq).status == IBV_WC_SUCCESS);
        }
        part(&pair);
        RETURNS(0, ibv_destroy_srq(srq));
    }
    RETURNS(0, ibv_dereg_mr(mr));
    RETURNS(0, ibv_dealloc_pd(pd));
}

static void write_with_immediate_and_bad_key(const struct lab *lab)
{
    struct pair pair = pair_of(lab);
    RETURNS(0, post_recv(lab, pair.right));
    RETURNS(0, post_recv(lab, pair.right));
    RETURNS(0, post_send(lab, pair.left, IBV_WR_RDMA_WRITE_WITH_IMM, lab->mr->rkey ^ 0xff, 0));
    CHECK(lab_poll(pair.left_cq).status == IBV_WC_REM_ACCESS_ERR);
    CHECK(lab_poll(pair.right_cq).status == IBV_WC_LOC_ACCESS_ERR);
    CHECK(lab_poll(pair.right_cq).status == IBV_WC_WR_FLUSH_ERR);
    part(&pair);
}

static struct ibv_cq_ex *extended(const struct lab *lab)
{
    struct ibv_cq_init_attr_ex init = {.cqe = 64, .wc_flags = IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK};
    struct ibv_cq_ex *cq = ibv_create_cq_ex(lab->context, &init);
    if (cq == NULL)
        die("no extended completion queue");
    return cq;
}

/* A queue pair that is its own peer, and completes to `cq`. */
static struct ibv_qp *loop(const struct lab *lab, struct ibv_cq_ex *cq)
{
    struct ibv_qp *qp = qp_of(lab->pd, lab_init(lab, IBV_QPT_RC), ibv_cq_ex_to_cq(cq), NULL);
    lab_advance(lab, qp, qp->qp_num, IBV_QPS_RTS);
    return qp;
}

/* Waits for the first entry of a poll, which then is open. */
static void start(struct ibv_cq_ex *cq)
{
    struct ibv_poll_cq_attr attr = {0};
    double began = seconds_now();
    while (ibv_start_poll(cq, &attr) == ENOENT)
        if (seconds_now() - began > 10)
            die("no completion");
}

static void wall_clock(const struct lab *lab)
{
    enum { READS = 20000 };
    struct ibv_cq_ex *cq = extended(lab);
    struct ibv_qp *qp = loop(lab, cq);
    uint64_t last = 0, backwards = 0;
    for (int round = 0; round < 4; round++) {
        RETURNS(0, post_send(lab, qp, IBV_WR_RDMA_WRITE, lab->mr->rkey, 0));
        start(cq);
        for (int i = 0; i < READS; i++) {
            uint64_t now = ibv_wc_read_completion_wallclock_ns(cq);
            backwards += now < last;
            last = now;
        }
        ibv_end_poll(cq);
    }
    CHECK(backwards == 0);
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    uint64_t now_ns = (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
    CHECK(last <= now_ns && now_ns - last < 60ull * 1000000000);
    RETURNS(0, ibv_destroy_qp(qp));
    RETURNS(0, ibv_destroy_cq(ibv_cq_ex_to_cq(cq)));
}

static void next_after_none(const struct lab *lab)
{
    struct ibv_cq_ex *cq = extended(lab);
    struct ibv_qp *qp = loop(lab, cq);
    RETURNS(0, post_send(lab, qp, IBV_WR_RDMA_WRITE, lab->mr->rkey, 0));
    start(cq);
    RETURNS(ENOENT, ibv_next_poll(cq));
    RETURNS(0, post_send(lab, qp, IBV_WR_RDMA_READ, lab->mr->rkey, 0));
    double began = seconds_now();
    int code;
    while ((code = ibv_next_poll(cq)) == ENOENT && seconds_now() - began < 10)
        ;
    RETURNS(0, code);
    CHECK(ibv_wc_read_opcode(cq) == IBV_WC_RDMA_READ);
    ibv_end_poll(cq);
    RETURNS(0, ibv_destroy_qp(qp));
    RETURNS(0, ibv_destroy_cq(ibv_cq_ex_to_cq(cq)));
}

static void long_datagram(const struct lab *lab)
{
    struct ibv_qp *qp = lab_qp(lab, IBV_QPT_UD);
    lab_advance(lab, qp, 0, IBV_QPS_RTS);
    struct ibv_ah_attr attr = lab_attr(lab, 0).ah_attr;
    struct ibv_ah *ah = ibv_create_ah(lab->pd, &attr);
    uint32_t mtu = 128u << lab->port.active_mtu;
    struct ibv_sge sge = {.addr = (uintptr_t)lab->buffer, .length = mtu, .lkey = lab->mr->lkey};
    struct ibv_send_wr wr = {.wr_id = 14, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND}, *bad;
    wr.wr.ud.ah = ah, wr.wr.ud.remote_qpn = qp->qp_num, wr.wr.ud.remote_qkey = LAB_QKEY;
    RETURNS(0, ibv_post_send(qp, &wr, &bad));
    CHECK(lab_poll(lab->cq).status == IBV_WC_SUCCESS);
    sge.length = mtu + 1;
    RETURNS(0, ibv_post_send(qp, &wr, &bad));
    struct ibv_wc wc = lab_poll(lab->cq);
    CHECK(wc.wr_id == 14 && wc.status == IBV_WC_LOC_LEN_ERR);
    struct ibv_qp_attr now;
    struct ibv_qp_init_attr init;
    RETURNS(0, ibv_query_qp(qp, &now, IBV_QP_STATE, &init));
    CHECK(now.qp_state == IBV_QPS_SQE);
    RETURNS(0, ibv_destroy_qp(qp));
    RETURNS(0, ibv_destroy_ah(ah));
}

/* A verb that returns an errno leaves it in `errno` as well. */
#define SETS(wanted, call)        \
    do {                          \
        errno = 0;                \
        RETURNS(wanted, call);    \
        CHECK(errno == (wanted)); \
    } while (0)

static void errno_is_set(const struct lab *lab)
{
    struct ibv_srq_init_attr init = {.attr = {.max_wr = 4, .max_sge = 1}};
    struct ibv_srq *srq = ibv_create_srq(lab->pd, &init);
    struct pair pair = pair_in(lab, lab->pd, srq);
    struct ibv_mw *mw = ibv_alloc_mw(lab->pd, IBV_MW_TYPE_2);
    bound(pair.left, pair.left_cq, bind_wr(lab, mw, 1), IBV_WC_SUCCESS);
    SETS(EBUSY, ibv_dealloc_pd(lab->pd));
    SETS(EBUSY, ibv_destroy_cq(pair.left_cq));
    SETS(EBUSY, ibv_destroy_srq(srq));
    SETS(EBUSY, ibv_dereg_mr(lab->mr));
    SETS(EBUSY, ibv_destroy_comp_channel(lab->channel));
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT};
    SETS(EINVAL, ibv_modify_qp(pair.left, &attr, IBV_QP_STATE));
    SETS(EINVAL, ibv_resize_cq(pair.left_cq, -1));
    part(&pair);
    RETURNS(0, ibv_dealloc_mw(mw));
    RETURNS(0, ibv_destroy_srq(srq));
}

static void region_of_no_bytes(const struct lab *lab)
{
    struct pair pair = pair_of(lab);
    struct ibv_mr *mr = ibv_reg_mr(lab->pd, lab->buffer, 0, LAB_ACCESS);
    CHECK(mr != NULL && mr->length == 0);
    if (mr == NULL)
        return part(&pair);
    struct ibv_sge sge = {.addr = (uintptr_t)lab->buffer, .length = 0, .lkey = mr->lkey};
    struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE}, *bad;
    wr.wr.rdma.remote_addr = (uintptr_t)lab->buffer, wr.wr.rdma.rkey = mr->rkey;
    RETURNS(0, ibv_post_send(pair.left, &wr, &bad));
    CHECK(lab_poll(pair.left_cq).status == IBV_WC_SUCCESS);
    RETURNS(0, post_send(lab, pair.left, IBV_WR_RDMA_WRITE, mr->rkey, 0));
    CHECK(lab_poll(pair.left_cq).status == IBV_WC_REM_ACCESS_ERR);
    RETURNS(0, ibv_dereg_mr(mr));
    mr = ibv_reg_mr(lab->pd, NULL, 0, 0);
    CHECK(mr != NULL);
    RETURNS(0, ibv_dereg_mr(mr));
    part(&pair);
}

/* Only the inline ibv_bind_mw compares domains as it posts; the device finds the other cases as it binds. */
static void binds_across_domains(const struct lab *lab)
{
    struct ibv_pd *pd = ibv_alloc_pd(lab->context);
    struct ibv_mr *mr = ibv_reg_mr(pd, lab->buffer, LAB_BYTES, LAB_ACCESS);
    struct ibv_mw *first = ibv_alloc_mw(pd, IBV_MW_TYPE_1), *second = ibv_alloc_mw(pd, IBV_MW_TYPE_2);
    struct ibv_mw *own = ibv_alloc_mw(lab->pd, IBV_MW_TYPE_2);
    struct ibv_mw_bind bind = {.wr_id = 13, .send_flags = IBV_SEND_SIGNALED};

    /* Window and region of one domain, the queue pair of another. */
    struct pair pair = pair_of(lab);
    bind.bind_info = bind_wr(lab, first, 0).bind_mw.bind_info, bind.bind_info.mr = mr;
    RETURNS(0, ibv_bind_mw(pair.left, first, &bind));
    CHECK(lab_poll(pair.left_cq).status == IBV_WC_MW_BIND_ERR);
    part(&pair);
    pair = pair_of(lab);
    struct ibv_send_wr wr = bind_wr(lab, second, 1);
    wr.bind_mw.bind_info.mr = mr;
    bound(pair.left, pair.left_cq, wr, IBV_WC_MW_BIND_ERR);
    part(&pair);

    /* The region alone is of another domain; the window alone. */
    pair = pair_of(lab);
    wr = bind_wr(lab, own, 1), wr.bind_mw.bind_info.mr = mr;
    bound(pair.left, pair.left_cq, wr, IBV_WC_MW_BIND_ERR);
    part(&pair);
    pair = pair_of(lab);
    bound(pair.left, pair.left_cq, bind_wr(lab, second, 2), IBV_WC_MW_BIND_ERR);
    part(&pair);

    /* The window can be bound after binds that failed. */
    pair = pair_of(lab);
    bound(pair.left, pair.left_cq, bind_wr(lab, own, 3), IBV_WC_SUCCESS);
    part(&pair);
    RETURNS(0, ibv_dealloc_mw(first));
    RETURNS(0, ibv_dealloc_mw(second));
    RETURNS(0, ibv_dealloc_mw(own));
    RETURNS(0, ibv_dereg_mr(mr));
    RETURNS(0, ibv_dealloc_pd(pd));
}

/* The space of the scatter elements can hold inline data, as with rxe; mlx5 rounds up to its 64 byte blocks. */
static void inline_room(const struct lab *lab)
{
    enum { SGE_BYTES = 16 };
    const uint32_t asked[] = {0, 1, 100};
    for (size_t i = 0; i < sizeof asked / sizeof *asked; i++) {
        struct ibv_qp_init_attr init = lab_init(lab, IBV_QPT_RC);
        init.cap.max_inline_data = asked[i];
        struct ibv_qp *qp = ibv_create_qp(lab->pd, &init);
        uint32_t granted = init.cap.max_inline_data;
        CHECK(granted >= asked[i] && granted >= LAB_SGES * SGE_BYTES);
        struct ibv_qp_attr attr;
        RETURNS(0, ibv_query_qp(qp, &attr, IBV_QP_CAP, &init));
        CHECK(attr.cap.max_inline_data == granted && init.cap.max_inline_data == granted);
        lab_advance(lab, qp, qp->qp_num, IBV_QPS_RTS);
        struct ibv_sge sge = {.addr = (uintptr_t)lab->buffer, .length = granted}; /* the key is ignored */
        struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_INLINE};
        struct ibv_send_wr *bad;
        wr.wr.rdma.remote_addr = (uintptr_t)lab->buffer + LAB_BYTES / 2, wr.wr.rdma.rkey = lab->mr->rkey;
        RETURNS(0, ibv_post_send(qp, &wr, &bad));
        CHECK(lab_poll(lab->cq).status == IBV_WC_SUCCESS);
        sge.length = granted + 1;
        RETURNS(EINVAL, ibv_post_send(qp, &wr, &bad));
        RETURNS(0, ibv_destroy_qp(qp));
    }
    struct ibv_qp_init_attr init = lab_init(lab, IBV_QPT_RC);
    init.cap.max_send_sge = init.cap.max_inline_data = 0;
    struct ibv_qp *qp = ibv_create_qp(lab->pd, &init);
    CHECK(qp != NULL && init.cap.max_inline_data == 0);
    RETURNS(0, ibv_destroy_qp(qp));
}

int main(void)
{
    struct lab lab = lab_open();
    keys_of_windows(&lab);
    keys_of_windows_by_builder(&lab);
    bad_remote_invalidations(&lab);
    local_invalidation_of_anothers(&lab);
    domain_of_shared_receives(&lab);
    write_with_immediate_and_bad_key(&lab);
    wall_clock(&lab);
    next_after_none(&lab);
    long_datagram(&lab);
    errno_is_set(&lab);
    region_of_no_bytes(&lab);
    binds_across_domains(&lab);
    inline_room(&lab);
    lab_close(&lab);
    return check_end();
}
