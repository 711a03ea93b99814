/*
 * verbs_semantics: tests statuses and return values on which mlx5, rxe and irdma agree, but not the man pages.
 */
#include "check.h"
#include "env.h"

enum { PIECE = 256 };

/* The two ends of a connection, each with its own completion queue. */
struct pair {
    struct ibv_cq *left_cq, *right_cq;
    struct ibv_qp *left, *right;
};

static struct ibv_qp *create_qp_in(struct ibv_pd *pd, struct ibv_qp_init_attr init, struct ibv_cq *cq, struct ibv_srq *srq)
{
    init.send_cq = init.recv_cq = cq;
    init.srq = srq;
    struct ibv_qp *qp = ibv_create_qp(pd, &init);
    if (qp == NULL)
        die("a queue pair cannot be created");
    return qp;
}

/* The left queue pair is the requester, whose retries end within half a second. The right one is in `pd`. */
static struct pair create_pair_in(const struct env *env, struct ibv_pd *pd, struct ibv_srq *srq)
{
    struct pair pair = {.left_cq = ibv_create_cq(env->context, 64, NULL, NULL, 0),
                        .right_cq = ibv_create_cq(env->context, 64, NULL, NULL, 0)};
    pair.left = create_qp_in(env->pd, env_init(env, IBV_QPT_RC), pair.left_cq, NULL);
    pair.right = create_qp_in(pd, env_init(env, IBV_QPT_RC), pair.right_cq, srq);
    env_advance(env, pair.left, pair.right->qp_num, IBV_QPS_RTR);
    struct ibv_qp_attr attr = env_attr(env, 0);
    attr.qp_state = IBV_QPS_RTS, attr.retry_cnt = 1;
    if (ibv_modify_qp(pair.left, &attr, env_mask(IBV_QPT_RC, IBV_QPS_RTS)) != 0)
        die("the left queue pair does not reach RTS");
    env_advance(env, pair.right, pair.left->qp_num, IBV_QPS_RTS);
    return pair;
}

static struct pair create_pair(const struct env *env)
{
    return create_pair_in(env, env->pd, NULL);
}

static void destroy_pair(struct pair *pair)
{
    RETURNS(0, ibv_destroy_qp(pair->left));
    RETURNS(0, ibv_destroy_qp(pair->right));
    RETURNS(0, ibv_destroy_cq(pair->left_cq));
    RETURNS(0, ibv_destroy_cq(pair->right_cq));
}

static struct ibv_sge sge_at(const struct env *env, size_t offset, uint32_t lkey)
{
    return (struct ibv_sge){.addr = (uintptr_t)env->buffer + offset, .length = PIECE, .lkey = lkey};
}

static int post_recv(const struct env *env, struct ibv_qp *qp)
{
    struct ibv_sge sge = sge_at(env, ENV_BYTES / 2, env->mr->lkey);
    struct ibv_recv_wr wr = {.wr_id = 21, .sg_list = &sge, .num_sge = 1}, *bad;
    return ibv_post_recv(qp, &wr, &bad);
}

static int post_send(const struct env *env, struct ibv_qp *qp, enum ibv_wr_opcode opcode, uint32_t rkey, uint32_t invalidated)
{
    struct ibv_sge sge = sge_at(env, 0, env->mr->lkey);
    struct ibv_send_wr wr = {.wr_id = 11, .sg_list = &sge, .num_sge = 1, .opcode = opcode}, *bad;
    wr.invalidate_rkey = invalidated;
    wr.wr.rdma.remote_addr = (uintptr_t)env->buffer + ENV_BYTES / 2, wr.wr.rdma.rkey = rkey;
    return ibv_post_send(qp, &wr, &bad);
}

static int post_invalidate(struct ibv_qp *qp, uint32_t rkey)
{
    struct ibv_send_wr wr = {.wr_id = 12, .opcode = IBV_WR_LOCAL_INV, .invalidate_rkey = rkey}, *bad;
    return ibv_post_send(qp, &wr, &bad);
}

static struct ibv_send_wr bind_wr(const struct env *env, struct ibv_mw *mw, uint32_t rkey)
{
    struct ibv_send_wr wr = {.wr_id = 13, .opcode = IBV_WR_BIND_MW};
    wr.bind_mw.mw = mw, wr.bind_mw.rkey = rkey;
    wr.bind_mw.bind_info = (struct ibv_mw_bind_info){
        .mr = env->mr,
        .addr = (uintptr_t)env->buffer,
        .length = ENV_BYTES,
        .mw_access_flags = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE,
    };
    return wr;
}

/* Posts a bind, which must complete with this status. */
static void check_bind(struct ibv_qp *qp, struct ibv_cq *cq, struct ibv_send_wr wr, enum ibv_wc_status wanted)
{
    struct ibv_send_wr *bad;
    RETURNS(0, ibv_post_send(qp, &wr, &bad));
    struct ibv_wc wc = env_poll(cq);
    CHECK(wc.wr_id == wr.wr_id && wc.status == wanted);
}

/* The key has the window's index and the work request's tag. `mw->rkey` is the key after the bind. */
static void keys_of_windows(const struct env *env)
{
    struct pair pair = create_pair(env);
    struct ibv_mw *mw = ibv_alloc_mw(env->pd, IBV_MW_TYPE_2);
    uint32_t index = mw->rkey & ~0xffu, key = index | ((mw->rkey + 7) & 0xff);
    check_bind(pair.left, pair.left_cq, bind_wr(env, mw, key & 0xff), IBV_WC_SUCCESS);
    CHECK(mw->rkey == key);
    RETURNS(0, post_send(env, pair.right, IBV_WR_RDMA_WRITE, key, 0));
    CHECK(env_poll(pair.right_cq).status == IBV_WC_SUCCESS);
    RETURNS(0, post_invalidate(pair.left, mw->rkey));
    CHECK(env_poll(pair.left_cq).status == IBV_WC_SUCCESS);

    /* Neither wrong upper bits nor a value that the program stores in `mw->rkey` change the index. */
    mw->rkey = 0;
    check_bind(pair.left, pair.left_cq, bind_wr(env, mw, (~index & ~0xffu) | 0x42), IBV_WC_SUCCESS);
    CHECK(mw->rkey == (index | 0x42));

    /* A part of the list fails. */
    struct ibv_mw *other = ibv_alloc_mw(env->pd, IBV_MW_TYPE_2);
    uint32_t before = other->rkey, bad_tag = (before + 1) & 0xff;
    struct ibv_send_wr inv = {.wr_id = 12, .opcode = IBV_WR_LOCAL_INV, .invalidate_rkey = mw->rkey};
    struct ibv_send_wr first = bind_wr(env, mw, 0x17), second = bind_wr(env, other, bad_tag), *bad;
    second.send_flags = IBV_SEND_IP_CSUM;
    inv.next = &first, first.next = &second;
    RETURNS(EINVAL, ibv_post_send(pair.left, &inv, &bad));
    CHECK(bad == &second && mw->rkey == (index | 0x17) && other->rkey == before);
    CHECK(env_poll(pair.left_cq).status == IBV_WC_SUCCESS);
    CHECK(env_poll(pair.left_cq).status == IBV_WC_SUCCESS);
    destroy_pair(&pair);
    RETURNS(0, ibv_dealloc_mw(mw));
    RETURNS(0, ibv_dealloc_mw(other));
}

static void keys_of_windows_by_builder(const struct env *env)
{
    struct ibv_qp_init_attr plain = env_init(env, IBV_QPT_RC);
    struct ibv_qp_init_attr_ex init = {
        .send_cq = plain.send_cq,
        .recv_cq = plain.recv_cq,
        .cap = plain.cap,
        .qp_type = IBV_QPT_RC,
        .sq_sig_all = 1,
        .pd = env->pd,
        .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
        .send_ops_flags = IBV_QP_EX_WITH_BIND_MW,
    };
    struct ibv_qp *qp = ibv_create_qp_ex(env->context, &init);
    env_advance(env, qp, qp->qp_num, IBV_QPS_RTS);
    struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(qp);
    struct ibv_mw *mw = ibv_alloc_mw(env->pd, IBV_MW_TYPE_2);
    uint32_t before = mw->rkey;
    struct ibv_send_wr wr = bind_wr(env, mw, 0);
    ibv_wr_start(ex);
    ex->wr_id = 13, ex->wr_flags = 0;
    ibv_wr_bind_mw(ex, mw, 0x99, &wr.bind_mw.bind_info);
    ibv_wr_abort(ex);
    CHECK(mw->rkey == before);
    ibv_wr_start(ex);
    ibv_wr_bind_mw(ex, mw, 0x99, &wr.bind_mw.bind_info);
    RETURNS(0, ibv_wr_complete(ex));
    CHECK(mw->rkey == ((before & ~0xffu) | 0x99));
    CHECK(env_poll(env->cq).status == IBV_WC_SUCCESS);
    RETURNS(0, ibv_destroy_qp(qp));
    RETURNS(0, ibv_dealloc_mw(mw));
}

/* IBTA class J: the receive ends in error, and the responder sends no answer. */
static void bad_remote_invalidation(const struct env *env, uint32_t rkey)
{
    struct pair pair = create_pair(env);
    RETURNS(0, post_recv(env, pair.right));
    RETURNS(0, post_send(env, pair.left, IBV_WR_SEND_WITH_INV, 0, rkey));
    struct ibv_wc wc = env_poll(pair.right_cq);
    CHECK(wc.wr_id == 21 && wc.status == IBV_WC_REM_INV_REQ_ERR);
    CHECK(env_poll(pair.left_cq).status == IBV_WC_RETRY_EXC_ERR);
    destroy_pair(&pair);
}

static void bad_remote_invalidations(const struct env *env)
{
    struct pair pair = create_pair(env);
    struct ibv_mw *first = ibv_alloc_mw(env->pd, IBV_MW_TYPE_1), *second = ibv_alloc_mw(env->pd, IBV_MW_TYPE_2);
    struct ibv_mw_bind bind = {.bind_info = bind_wr(env, first, 0).bind_mw.bind_info, .send_flags = IBV_SEND_SIGNALED};
    RETURNS(0, ibv_bind_mw(pair.left, first, &bind));
    CHECK(env_poll(pair.left_cq).status == IBV_WC_SUCCESS);
    uint32_t key = second->rkey & ~0xffu;
    check_bind(pair.left, pair.left_cq, bind_wr(env, second, key), IBV_WC_SUCCESS);
    bad_remote_invalidation(env, env->mr->rkey ^ 0xff);
    bad_remote_invalidation(env, env->mr->rkey);
    bad_remote_invalidation(env, first->rkey);
    bad_remote_invalidation(env, key);
    /* The window is still bound, and the peer of its own queue pair may invalidate it. */
    RETURNS(0, post_recv(env, pair.left));
    RETURNS(0, post_send(env, pair.right, IBV_WR_SEND_WITH_INV, 0, key));
    struct ibv_wc wc = env_poll(pair.left_cq);
    CHECK(wc.status == IBV_WC_SUCCESS && (wc.wc_flags & IBV_WC_WITH_INV) && wc.invalidated_rkey == key);
    destroy_pair(&pair);
    RETURNS(0, ibv_dealloc_mw(first));
    RETURNS(0, ibv_dealloc_mw(second));
}

static void local_invalidation_of_other_domain(const struct env *env)
{
    struct pair pair = create_pair(env), others = create_pair(env);
    struct ibv_mw *mw = ibv_alloc_mw(env->pd, IBV_MW_TYPE_2);
    uint32_t key = mw->rkey & ~0xffu;
    check_bind(pair.left, pair.left_cq, bind_wr(env, mw, key), IBV_WC_SUCCESS);
    RETURNS(0, post_invalidate(others.left, key));
    struct ibv_wc wc = env_poll(others.left_cq);
    CHECK(wc.wr_id == 12 && wc.status == IBV_WC_LOC_QP_OP_ERR);
    RETURNS(0, post_send(env, pair.right, IBV_WR_RDMA_WRITE, key, 0));
    CHECK(env_poll(pair.right_cq).status == IBV_WC_SUCCESS);
    RETURNS(0, post_invalidate(pair.left, key));
    CHECK(env_poll(pair.left_cq).status == IBV_WC_SUCCESS);
    destroy_pair(&pair);
    destroy_pair(&others);
    RETURNS(0, ibv_dealloc_mw(mw));
}

/* Receives of a shared receive queue are checked against its protection domain, not the queue pair's. */
static void domain_of_shared_receives(const struct env *env)
{
    struct ibv_pd *pd = ibv_alloc_pd(env->context);
    struct ibv_mr *mr = ibv_reg_mr(pd, env->buffer, ENV_BYTES, IBV_ACCESS_LOCAL_WRITE);
    for (int own = 0; own < 2; own++) {
        struct ibv_srq_init_attr init = {.attr = {.max_wr = 4, .max_sge = 1}};
        struct ibv_srq *srq = ibv_create_srq(pd, &init);
        struct pair pair = create_pair_in(env, env->pd, srq);
        struct ibv_sge sge = sge_at(env, ENV_BYTES / 2, own ? env->mr->lkey : mr->lkey);
        struct ibv_recv_wr wr = {.wr_id = 22, .sg_list = &sge, .num_sge = 1}, *bad;
        RETURNS(0, ibv_post_srq_recv(srq, &wr, &bad));
        env->buffer[0] = 'a' + own, env->buffer[ENV_BYTES / 2] = 0;
        RETURNS(0, post_send(env, pair.left, IBV_WR_SEND, 0, 0));
        struct ibv_wc wc = env_poll(pair.right_cq);
        CHECK(wc.wr_id == 22 && wc.status == (own ? IBV_WC_LOC_PROT_ERR : IBV_WC_SUCCESS));
        CHECK(env_poll(pair.left_cq).status == (own ? IBV_WC_REM_OP_ERR : IBV_WC_SUCCESS));
        CHECK(env->buffer[ENV_BYTES / 2] == (own ? 0 : 'a'));
        if (!own) { /* The data buffers of its READs are checked against the queue pair's own domain. */
            RETURNS(0, post_send(env, pair.right, IBV_WR_RDMA_READ, env->mr->rkey, 0));
            CHECK(env_poll(pair.right_cq).status == IBV_WC_SUCCESS);
        }
        destroy_pair(&pair);
        RETURNS(0, ibv_destroy_srq(srq));
    }
    RETURNS(0, ibv_dereg_mr(mr));
    RETURNS(0, ibv_dealloc_pd(pd));
}

static void write_with_immediate_and_bad_key(const struct env *env)
{
    struct pair pair = create_pair(env);
    RETURNS(0, post_recv(env, pair.right));
    RETURNS(0, post_recv(env, pair.right));
    RETURNS(0, post_send(env, pair.left, IBV_WR_RDMA_WRITE_WITH_IMM, env->mr->rkey ^ 0xff, 0));
    CHECK(env_poll(pair.left_cq).status == IBV_WC_REM_ACCESS_ERR);
    CHECK(env_poll(pair.right_cq).status == IBV_WC_LOC_ACCESS_ERR);
    CHECK(env_poll(pair.right_cq).status == IBV_WC_WR_FLUSH_ERR);
    destroy_pair(&pair);
}

static struct ibv_cq_ex *extended(const struct env *env)
{
    struct ibv_cq_init_attr_ex init = {.cqe = 64, .wc_flags = IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK};
    struct ibv_cq_ex *cq = ibv_create_cq_ex(env->context, &init);
    if (cq == NULL)
        die("an extended completion queue cannot be created");
    return cq;
}

/* Creates a queue pair that is connected with itself, and completes to `cq`. */
static struct ibv_qp *create_loopback(const struct env *env, struct ibv_cq_ex *cq)
{
    struct ibv_qp *qp = create_qp_in(env->pd, env_init(env, IBV_QPT_RC), ibv_cq_ex_to_cq(cq), NULL);
    env_advance(env, qp, qp->qp_num, IBV_QPS_RTS);
    return qp;
}

/* Starts a poll, and waits for its first entry. */
static void start_poll_when_ready(struct ibv_cq_ex *cq)
{
    struct ibv_poll_cq_attr attr = {0};
    double began = seconds_now();
    while (ibv_start_poll(cq, &attr) == ENOENT)
        if (seconds_now() - began > 10)
            die("no completion");
}

static void wall_clock(const struct env *env)
{
    enum { READS = 20000 };
    struct ibv_cq_ex *cq = extended(env);
    struct ibv_qp *qp = create_loopback(env, cq);
    uint64_t last = 0, backwards = 0;
    for (int round = 0; round < 4; round++) {
        RETURNS(0, post_send(env, qp, IBV_WR_RDMA_WRITE, env->mr->rkey, 0));
        start_poll_when_ready(cq);
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

static void next_after_none(const struct env *env)
{
    struct ibv_cq_ex *cq = extended(env);
    struct ibv_qp *qp = create_loopback(env, cq);
    RETURNS(0, post_send(env, qp, IBV_WR_RDMA_WRITE, env->mr->rkey, 0));
    start_poll_when_ready(cq);
    RETURNS(ENOENT, ibv_next_poll(cq));
    RETURNS(0, post_send(env, qp, IBV_WR_RDMA_READ, env->mr->rkey, 0));
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

static void long_datagram(const struct env *env)
{
    struct ibv_qp *qp = env_qp(env, IBV_QPT_UD);
    env_advance(env, qp, 0, IBV_QPS_RTS);
    struct ibv_ah_attr attr = env_attr(env, 0).ah_attr;
    struct ibv_ah *ah = ibv_create_ah(env->pd, &attr);
    uint32_t mtu = 128u << env->port.active_mtu;
    struct ibv_sge sge = {.addr = (uintptr_t)env->buffer, .length = mtu, .lkey = env->mr->lkey};
    struct ibv_send_wr wr = {.wr_id = 14, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND}, *bad;
    wr.wr.ud.ah = ah, wr.wr.ud.remote_qpn = qp->qp_num, wr.wr.ud.remote_qkey = ENV_QKEY;
    RETURNS(0, ibv_post_send(qp, &wr, &bad));
    CHECK(env_poll(env->cq).status == IBV_WC_SUCCESS);
    sge.length = mtu + 1;
    RETURNS(0, ibv_post_send(qp, &wr, &bad));
    struct ibv_wc wc = env_poll(env->cq);
    CHECK(wc.wr_id == 14 && wc.status == IBV_WC_LOC_LEN_ERR);
    struct ibv_qp_attr now;
    struct ibv_qp_init_attr init;
    RETURNS(0, ibv_query_qp(qp, &now, IBV_QP_STATE, &init));
    CHECK(now.qp_state == IBV_QPS_SQE);
    RETURNS(0, ibv_destroy_qp(qp));
    RETURNS(0, ibv_destroy_ah(ah));
}

/* A verb that returns an errno also sets `errno`. */
#define SETS(wanted, call)        \
    do {                          \
        errno = 0;                \
        RETURNS(wanted, call);    \
        CHECK(errno == (wanted)); \
    } while (0)

static void errno_is_set(const struct env *env)
{
    struct ibv_srq_init_attr init = {.attr = {.max_wr = 4, .max_sge = 1}};
    struct ibv_srq *srq = ibv_create_srq(env->pd, &init);
    struct pair pair = create_pair_in(env, env->pd, srq);
    struct ibv_mw *mw = ibv_alloc_mw(env->pd, IBV_MW_TYPE_2);
    check_bind(pair.left, pair.left_cq, bind_wr(env, mw, 1), IBV_WC_SUCCESS);
    SETS(EBUSY, ibv_dealloc_pd(env->pd));
    SETS(EBUSY, ibv_destroy_cq(pair.left_cq));
    SETS(EBUSY, ibv_destroy_srq(srq));
    SETS(EBUSY, ibv_dereg_mr(env->mr));
    SETS(EBUSY, ibv_destroy_comp_channel(env->channel));
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT};
    SETS(EINVAL, ibv_modify_qp(pair.left, &attr, IBV_QP_STATE));
    SETS(EINVAL, ibv_resize_cq(pair.left_cq, -1));
    destroy_pair(&pair);
    RETURNS(0, ibv_dealloc_mw(mw));
    RETURNS(0, ibv_destroy_srq(srq));
}

static void region_of_no_bytes(const struct env *env)
{
    struct pair pair = create_pair(env);
    struct ibv_mr *mr = ibv_reg_mr(env->pd, env->buffer, 0, ENV_ACCESS);
    CHECK(mr != NULL && mr->length == 0);
    if (mr == NULL)
        return destroy_pair(&pair);
    struct ibv_sge sge = {.addr = (uintptr_t)env->buffer, .length = 0, .lkey = mr->lkey};
    struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE}, *bad;
    wr.wr.rdma.remote_addr = (uintptr_t)env->buffer, wr.wr.rdma.rkey = mr->rkey;
    RETURNS(0, ibv_post_send(pair.left, &wr, &bad));
    CHECK(env_poll(pair.left_cq).status == IBV_WC_SUCCESS);
    RETURNS(0, post_send(env, pair.left, IBV_WR_RDMA_WRITE, mr->rkey, 0));
    CHECK(env_poll(pair.left_cq).status == IBV_WC_REM_ACCESS_ERR);
    RETURNS(0, ibv_dereg_mr(mr));
    mr = ibv_reg_mr(env->pd, NULL, 0, 0);
    CHECK(mr != NULL);
    RETURNS(0, ibv_dereg_mr(mr));
    destroy_pair(&pair);
}

/* Only the inline ibv_bind_mw compares domains at posting. The device detects the other cases at execution. */
static void binds_across_domains(const struct env *env)
{
    struct ibv_pd *pd = ibv_alloc_pd(env->context);
    struct ibv_mr *mr = ibv_reg_mr(pd, env->buffer, ENV_BYTES, ENV_ACCESS);
    struct ibv_mw *first = ibv_alloc_mw(pd, IBV_MW_TYPE_1), *second = ibv_alloc_mw(pd, IBV_MW_TYPE_2);
    struct ibv_mw *own = ibv_alloc_mw(env->pd, IBV_MW_TYPE_2);
    struct ibv_mw_bind bind = {.wr_id = 13, .send_flags = IBV_SEND_SIGNALED};

    /* The window and the region are of one domain, the queue pair of another. */
    struct pair pair = create_pair(env);
    bind.bind_info = bind_wr(env, first, 0).bind_mw.bind_info, bind.bind_info.mr = mr;
    RETURNS(0, ibv_bind_mw(pair.left, first, &bind));
    CHECK(env_poll(pair.left_cq).status == IBV_WC_MW_BIND_ERR);
    destroy_pair(&pair);
    pair = create_pair(env);
    struct ibv_send_wr wr = bind_wr(env, second, 1);
    wr.bind_mw.bind_info.mr = mr;
    check_bind(pair.left, pair.left_cq, wr, IBV_WC_MW_BIND_ERR);
    destroy_pair(&pair);

    /* Only the region is of another domain, then only the window. */
    pair = create_pair(env);
    wr = bind_wr(env, own, 1), wr.bind_mw.bind_info.mr = mr;
    check_bind(pair.left, pair.left_cq, wr, IBV_WC_MW_BIND_ERR);
    destroy_pair(&pair);
    pair = create_pair(env);
    check_bind(pair.left, pair.left_cq, bind_wr(env, second, 2), IBV_WC_MW_BIND_ERR);
    destroy_pair(&pair);

    /* The window can be bound after binds that failed. */
    pair = create_pair(env);
    check_bind(pair.left, pair.left_cq, bind_wr(env, own, 3), IBV_WC_SUCCESS);
    destroy_pair(&pair);
    RETURNS(0, ibv_dealloc_mw(first));
    RETURNS(0, ibv_dealloc_mw(second));
    RETURNS(0, ibv_dealloc_mw(own));
    RETURNS(0, ibv_dereg_mr(mr));
    RETURNS(0, ibv_dealloc_pd(pd));
}

/* The space of the scatter elements can hold inline data, as with rxe. mlx5 rounds up to its blocks of 64 bytes. */
static void inline_capacity(const struct env *env)
{
    enum { SGE_BYTES = 16 };
    const uint32_t requested[] = {0, 1, 100};
    for (size_t i = 0; i < sizeof requested / sizeof *requested; i++) {
        struct ibv_qp_init_attr init = env_init(env, IBV_QPT_RC);
        init.cap.max_inline_data = requested[i];
        struct ibv_qp *qp = ibv_create_qp(env->pd, &init);
        uint32_t granted = init.cap.max_inline_data;
        CHECK(granted >= requested[i] && granted >= ENV_SGES * SGE_BYTES);
        struct ibv_qp_attr attr;
        RETURNS(0, ibv_query_qp(qp, &attr, IBV_QP_CAP, &init));
        CHECK(attr.cap.max_inline_data == granted && init.cap.max_inline_data == granted);
        env_advance(env, qp, qp->qp_num, IBV_QPS_RTS);
        struct ibv_sge sge = {.addr = (uintptr_t)env->buffer, .length = granted}; /* the key is ignored */
        struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_INLINE};
        struct ibv_send_wr *bad;
        wr.wr.rdma.remote_addr = (uintptr_t)env->buffer + ENV_BYTES / 2, wr.wr.rdma.rkey = env->mr->rkey;
        RETURNS(0, ibv_post_send(qp, &wr, &bad));
        CHECK(env_poll(env->cq).status == IBV_WC_SUCCESS);
        sge.length = granted + 1;
        RETURNS(EINVAL, ibv_post_send(qp, &wr, &bad));
        RETURNS(0, ibv_destroy_qp(qp));
    }
    struct ibv_qp_init_attr init = env_init(env, IBV_QPT_RC);
    init.cap.max_send_sge = init.cap.max_inline_data = 0;
    struct ibv_qp *qp = ibv_create_qp(env->pd, &init);
    CHECK(qp != NULL && init.cap.max_inline_data == 0);
    RETURNS(0, ibv_destroy_qp(qp));
}

int main(void)
{
    struct env env = env_open();
    keys_of_windows(&env);
    keys_of_windows_by_builder(&env);
    bad_remote_invalidations(&env);
    local_invalidation_of_other_domain(&env);
    domain_of_shared_receives(&env);
    write_with_immediate_and_bad_key(&env);
    wall_clock(&env);
    next_after_none(&env);
    long_datagram(&env);
    errno_is_set(&env);
    region_of_no_bytes(&env);
    binds_across_domains(&env);
    inline_capacity(&env);
    env_close(&env);
    return check_end();
}
