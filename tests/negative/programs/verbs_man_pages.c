/*
 * verbs_man_pages: tests details of libibverbs' man pages that no other test verifies, with a function for each page.
 */
#include "check.h"
#include "env.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

enum { PIECE = 64, GRH_BYTES = 40 };

static const double SHORTLY_S = 0.05;

static uint8_t *upper_half(const struct env *env)
{
    return env->buffer + ENV_BYTES / 2;
}

static struct ibv_sge sge_at(const struct env *env, void *addr)
{
    return (struct ibv_sge){.addr = (uintptr_t)addr, .length = PIECE, .lkey = env->mr->lkey};
}

/* Creates a queue pair that is connected with itself. */
static struct ibv_qp *create_loopback_with(const struct env *env, struct ibv_qp_init_attr init)
{
    struct ibv_qp *qp = ibv_create_qp(env->pd, &init);
    if (qp == NULL)
        die("a queue pair cannot be created");
    env_advance(env, qp, init.qp_type == IBV_QPT_UD ? 0 : qp->qp_num, IBV_QPS_RTS);
    return qp;
}

static struct ibv_qp *create_loopback(const struct env *env)
{
    return create_loopback_with(env, env_init(env, IBV_QPT_RC));
}

static void receive(const struct env *env, struct ibv_qp *qp, uint64_t wr_id)
{
    struct ibv_sge sge = sge_at(env, upper_half(env));
    struct ibv_recv_wr wr = {.wr_id = wr_id, .sg_list = &sge, .num_sge = 1}, *bad;
    RETURNS(0, ibv_post_recv(qp, &wr, &bad));
}

static void post(const struct env *env, struct ibv_qp *qp, enum ibv_wr_opcode opcode, unsigned flags)
{
    struct ibv_sge sge = sge_at(env, env->buffer);
    struct ibv_send_wr wr = {.wr_id = 1, .sg_list = &sge, .num_sge = 1, .opcode = opcode, .send_flags = flags}, *bad;
    wr.wr.rdma.remote_addr = (uintptr_t)upper_half(env), wr.wr.rdma.rkey = env->mr->rkey;
    RETURNS(0, ibv_post_send(qp, &wr, &bad));
}

static void to_error(struct ibv_qp *qp)
{
    struct ibv_qp_attr error = {.qp_state = IBV_QPS_ERR};
    RETURNS(0, ibv_modify_qp(qp, &error, IBV_QP_STATE));
}

static void drain(const struct env *env, unsigned count)
{
    while (count-- > 0)
        CHECK(env_poll(env->cq).status == IBV_WC_SUCCESS);
}

/* Takes and acknowledges an event if one is pending. Returns whether one was. The channel does not block. */
static bool has_event(const struct env *env)
{
    struct ibv_cq *cq = NULL;
    void *context = (void *)1;
    errno = 0;
    int code = ibv_get_cq_event(env->channel, &cq, &context);
    CHECK(code == 0 || (code == -1 && errno == EAGAIN));
    if (code != 0)
        return false;
    CHECK(cq == env->cq && context == env->cq->cq_context);
    ibv_ack_cq_events(cq, 1);
    return true;
}

/* One request gives one event for any number of completions. Without a request there is no event. */
static void req_notify_cq(const struct env *env)
{
    struct ibv_qp *qp = create_loopback(env);
    post(env, qp, IBV_WR_RDMA_WRITE, 0);
    drain(env, 1);
    CHECK(!has_event(env));
    RETURNS(0, ibv_req_notify_cq(env->cq, 0));
    CHECK(!has_event(env));
    for (int i = 0; i < 3; i++)
        post(env, qp, IBV_WR_RDMA_WRITE, 0);
    drain(env, 3);
    CHECK(has_event(env));
    CHECK(!has_event(env));

    /* A completion is solicited if the sender marked the message, or if it is an error; other completions are not. */
    RETURNS(0, ibv_req_notify_cq(env->cq, 1));
    receive(env, qp, 2);
    post(env, qp, IBV_WR_SEND, 0);
    drain(env, 2);
    CHECK(!has_event(env));
    post(env, qp, IBV_WR_RDMA_WRITE, IBV_SEND_SOLICITED);
    drain(env, 1);
    CHECK(!has_event(env));
    receive(env, qp, 2);
    post(env, qp, IBV_WR_SEND, IBV_SEND_SOLICITED);
    drain(env, 2);
    CHECK(has_event(env));
    RETURNS(0, ibv_req_notify_cq(env->cq, 1));
    receive(env, qp, 2);
    post(env, qp, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_SEND_SOLICITED);
    drain(env, 2);
    CHECK(has_event(env) && !has_event(env));
    RETURNS(0, ibv_req_notify_cq(env->cq, 1));
    receive(env, qp, 2);
    to_error(qp);
    CHECK(env_poll(env->cq).status == IBV_WC_WR_FLUSH_ERR);
    CHECK(has_event(env) && !has_event(env));
    RETURNS(0, ibv_destroy_qp(qp));
}

struct ending {
    struct ibv_cq *cq;
    atomic_bool is_over;
};

static void *destroy_cq_thread(void *arg)
{
    struct ending *ending = arg;
    RETURNS(0, ibv_destroy_cq(ending->cq));
    atomic_store(&ending->is_over, true);
    return NULL;
}

/* ibv_destroy_cq waits until every event is acknowledged, by any number of calls. */
static void get_cq_event(const struct env *env)
{
    int context;
    struct ibv_cq *cq = ibv_create_cq(env->context, 8, &context, env->channel, 0);
    struct ibv_qp_init_attr init = env_init(env, IBV_QPT_RC);
    init.send_cq = init.recv_cq = cq;
    struct ibv_qp *qp = create_loopback_with(env, init);
    for (int i = 0; i < 3; i++) {
        RETURNS(0, ibv_req_notify_cq(cq, 0));
        post(env, qp, IBV_WR_RDMA_WRITE, 0);
        CHECK(env_poll(cq).status == IBV_WC_SUCCESS);
        struct ibv_cq *told = NULL;
        void *told_context = NULL;
        RETURNS(0, ibv_get_cq_event(env->channel, &told, &told_context));
        CHECK(told == cq && told_context == &context);
    }
    RETURNS(0, ibv_destroy_qp(qp));
    struct ending ending = {.cq = cq};
    pthread_t thread;
    if (pthread_create(&thread, NULL, destroy_cq_thread, &ending) != 0)
        die("a thread cannot be created");
    ibv_ack_cq_events(cq, 1);
    nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
    CHECK(!atomic_load(&ending.is_over));
    ibv_ack_cq_events(cq, 2);
    pthread_join(thread, NULL);
    CHECK(atomic_load(&ending.is_over));
}

/* Tests the table of ibv_post_send(3), which has the opcodes of each type of queue pair. */
static void opcodes(const struct env *env)
{
    enum { UD = 1, UC = 2, RC = 4 };
    static const struct {
        enum ibv_wr_opcode opcode;
        int types;
    } table[] = {
        {IBV_WR_SEND, UD | UC | RC},       {IBV_WR_SEND_WITH_IMM, UD | UC | RC},
        {IBV_WR_RDMA_WRITE, UC | RC},      {IBV_WR_RDMA_WRITE_WITH_IMM, UC | RC},
        {IBV_WR_RDMA_READ, RC},            {IBV_WR_ATOMIC_CMP_AND_SWP, RC},
        {IBV_WR_ATOMIC_FETCH_AND_ADD, RC}, {IBV_WR_LOCAL_INV, UC | RC},
        {IBV_WR_BIND_MW, UC | RC},         {IBV_WR_SEND_WITH_INV, RC},
        {IBV_WR_TSO, 0},
    };
    static const enum ibv_qp_type types[] = {IBV_QPT_UD, IBV_QPT_UC, IBV_QPT_RC};
    struct ibv_mw *mw = ibv_alloc_mw(env->pd, IBV_MW_TYPE_2);
    struct ibv_ah_attr attr = env_attr(env, 0).ah_attr;
    struct ibv_ah *ah = ibv_create_ah(env->pd, &attr);
    for (int type = 0; type < 3; type++) {
        struct ibv_qp *qp = create_loopback_with(env, env_init(env, types[type]));
        to_error(qp); /* accepted work requests complete as flushed */
        for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
            struct ibv_sge sge = {.addr = (uintptr_t)env->buffer, .length = 8, .lkey = env->mr->lkey};
            struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = table[i].opcode}, *bad;
            if (types[type] == IBV_QPT_UD)
                wr.wr.ud.ah = ah;
            if (table[i].opcode == IBV_WR_BIND_MW)
                wr.bind_mw.mw = mw, wr.bind_mw.bind_info = (struct ibv_mw_bind_info){env->mr, sge.addr, 8, 0};
            bool has = table[i].types & 1 << type;
            int code = ibv_post_send(qp, &wr, &bad);
            if (!count_check(code == (has ? 0 : EINVAL), __FILE__, __LINE__, "the table of opcodes"))
                printf("opcode %d of queue pairs of type %d: %s\n", wr.opcode, types[type], check_errno_name(code));
            if (code == 0)
                CHECK(env_poll(env->cq).status == IBV_WC_WR_FLUSH_ERR);
        }
        RETURNS(0, ibv_destroy_qp(qp));
    }
    RETURNS(0, ibv_destroy_ah(ah));
    RETURNS(0, ibv_dealloc_mw(mw));
}

static void send_flags_of_post_send(const struct env *env)
{
    /* ibv_post_send copies inline data, which needs no key. */
    struct ibv_qp *qp = create_loopback(env);
    uint8_t data[ENV_INLINE];
    memset(data, 'i', sizeof data);
    struct ibv_sge sge = {.addr = (uintptr_t)data, .length = sizeof data, .lkey = ~env->mr->lkey};
    struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_INLINE}, *bad;
    wr.wr.rdma.remote_addr = (uintptr_t)upper_half(env), wr.wr.rdma.rkey = env->mr->rkey;
    memset(upper_half(env), 0, sizeof data);
    RETURNS(0, ibv_post_send(qp, &wr, &bad));
    memset(data, 'o', sizeof data);
    drain(env, 1);
    memset(data, 'i', sizeof data);
    CHECK(memcmp(upper_half(env), data, sizeof data) == 0);
    RETURNS(0, ibv_destroy_qp(qp));

    /* With sq_sig_all = 0 only signaled and failed work requests complete with an entry. */
    struct ibv_qp_init_attr init = env_init(env, IBV_QPT_RC);
    init.sq_sig_all = 0;
    qp = create_loopback_with(env, init);
    for (int i = 0; i < 3 * ENV_DEPTH; i++) {
        post(env, qp, IBV_WR_RDMA_WRITE, i % 2 == 0 ? 0 : IBV_SEND_SIGNALED | IBV_SEND_FENCE);
        if (i % 2 != 0)
            drain(env, 1);
    }
    struct ibv_wc wc;
    CHECK(!env_poll_within(env->cq, &wc, SHORTLY_S));
    wr.send_flags = 0, sge.lkey = ~env->mr->lkey, wr.wr_id = 77;
    RETURNS(0, ibv_post_send(qp, &wr, &bad));
    wc = env_poll(env->cq);
    CHECK(wc.wr_id == 77 && wc.status == IBV_WC_LOC_PROT_ERR && wc.qp_num == qp->qp_num);
    RETURNS(0, ibv_destroy_qp(qp));
}

static struct ibv_srq *srq_of(const struct env *env, uint32_t max_wr)
{
    struct ibv_srq_init_attr init = {.attr = {.max_wr = max_wr, .max_sge = 1}};
    struct ibv_srq *srq = ibv_create_srq(env->pd, &init);
    CHECK(srq != NULL && init.attr.max_wr >= max_wr && init.attr.max_sge >= 1);
    return srq;
}

/* The data of a datagram is after 40 bytes, in a receive of the queue pair or of a shared queue. */
static void post_recv(const struct env *env)
{
    struct ibv_ah_attr attr = env_attr(env, 0).ah_attr;
    struct ibv_ah *ah = ibv_create_ah(env->pd, &attr);
    for (int shared = 0; shared < 2; shared++) {
        struct ibv_srq *srq = shared ? srq_of(env, 4) : NULL;
        struct ibv_qp_init_attr init = env_init(env, IBV_QPT_UD);
        init.srq = srq;
        if (shared) /* these are ignored */
            init.cap.max_recv_wr = init.cap.max_recv_sge = UINT32_MAX;
        struct ibv_qp *qp = create_loopback_with(env, init);
        memset(env->buffer, 'd', PIECE), memset(upper_half(env), 0, 2 * PIECE + GRH_BYTES);
        struct ibv_sge sge = {.addr = (uintptr_t)upper_half(env), .length = GRH_BYTES + PIECE, .lkey = env->mr->lkey};
        struct ibv_recv_wr wr = {.wr_id = 5, .sg_list = &sge, .num_sge = 1}, *bad = NULL;
        if (shared) { /* the queue pair's own queue is not used */
            CHECK(ibv_post_recv(qp, &wr, &bad) != 0 && bad == &wr);
            RETURNS(0, ibv_post_srq_recv(srq, &wr, &bad));
        } else {
            RETURNS(0, ibv_post_recv(qp, &wr, &bad));
        }
        struct ibv_sge from = sge_at(env, env->buffer);
        struct ibv_send_wr send = {.wr_id = 1, .sg_list = &from, .num_sge = 1, .opcode = IBV_WR_SEND}, *bad_send;
        send.wr.ud.ah = ah, send.wr.ud.remote_qpn = qp->qp_num, send.wr.ud.remote_qkey = ENV_QKEY;
        RETURNS(0, ibv_post_send(qp, &send, &bad_send));
        for (int i = 0; i < 2; i++) {
            struct ibv_wc wc = env_poll(env->cq);
            CHECK(wc.status == IBV_WC_SUCCESS);
            if (wc.wr_id == 5)
                CHECK(wc.byte_len == GRH_BYTES + PIECE && (wc.wc_flags & IBV_WC_GRH) && wc.src_qp == qp->qp_num);
        }
        CHECK(memcmp(upper_half(env) + GRH_BYTES, env->buffer, PIECE) == 0);
        CHECK(upper_half(env)[GRH_BYTES + PIECE] == 0);
        RETURNS(0, ibv_destroy_qp(qp));
        if (shared)
            RETURNS(0, ibv_destroy_srq(srq));
    }
    RETURNS(0, ibv_destroy_ah(ah));
}

/* An event is raised once fewer receives are posted than the limit, which is then 0. */
static void modify_srq(const struct env *env)
{
    struct ibv_srq *srq = srq_of(env, 8);
    struct ibv_qp_init_attr init = env_init(env, IBV_QPT_RC);
    init.srq = srq;
    struct ibv_qp *qp = create_loopback_with(env, init);
    struct ibv_sge sge = sge_at(env, upper_half(env));
    struct ibv_recv_wr wr = {.sg_list = &sge, .num_sge = 1}, *bad;
    for (int i = 0; i < 4; i++)
        RETURNS(0, ibv_post_srq_recv(srq, &wr, &bad));
    struct ibv_srq_attr attr = {.srq_limit = 2, .max_wr = 1, .max_sge = UINT32_MAX}; /* only the limit counts */
    RETURNS(0, ibv_modify_srq(srq, &attr, IBV_SRQ_LIMIT));
    RETURNS(0, ibv_query_srq(srq, &attr));
    CHECK(attr.srq_limit == 2 && attr.max_wr == 8);
    struct ibv_async_event event;
    for (int left = 3; left >= 0; left--) {
        post(env, qp, IBV_WR_SEND, 0);
        drain(env, 2);
        errno = 0;
        int code = ibv_get_async_event(env->context, &event);
        if (left != 1) { /* no event at the limit, and one event below it */
            CHECK(code == -1 && errno == EAGAIN);
            continue;
        }
        CHECK(code == 0 && event.event_type == IBV_EVENT_SRQ_LIMIT_REACHED && event.element.srq == srq);
        ibv_ack_async_event(&event);
        RETURNS(0, ibv_query_srq(srq, &attr));
        CHECK(attr.srq_limit == 0);
    }
    if (env->attr.device_cap_flags & IBV_DEVICE_SRQ_RESIZE) {
        attr.max_wr = 16;
        RETURNS(0, ibv_modify_srq(srq, &attr, IBV_SRQ_MAX_WR));
        RETURNS(0, ibv_query_srq(srq, &attr));
        CHECK(attr.max_wr >= 16);
        for (int i = 0; i < 16; i++)
            RETURNS(0, ibv_post_srq_recv(srq, &wr, &bad));
    }
    RETURNS(0, ibv_destroy_qp(qp));
    RETURNS(0, ibv_destroy_srq(srq));
}

/* A resized queue keeps its entries in order, and `cqe` is the new size. */
static void resize_cq(const struct env *env)
{
    struct ibv_cq *cq = ibv_create_cq(env->context, 4, NULL, NULL, 0);
    struct ibv_qp_init_attr init = env_init(env, IBV_QPT_RC);
    init.send_cq = init.recv_cq = cq;
    struct ibv_qp *qp = create_loopback_with(env, init);
    for (uint64_t i = 0; i < 4; i++)
        receive(env, qp, i);
    to_error(qp);
    RETURNS(0, ibv_resize_cq(cq, 64));
    CHECK(cq->cqe >= 64);
    struct ibv_wc wc[4];
    CHECK(ibv_poll_cq(cq, 1, wc) == 1 && wc[0].wr_id == 0);
    RETURNS(0, ibv_resize_cq(cq, 3));
    CHECK(cq->cqe >= 3);
    CHECK(ibv_poll_cq(cq, 4, wc) == 3 && wc[0].wr_id == 1 && wc[1].wr_id == 2 && wc[2].wr_id == 3);
    CHECK(ibv_poll_cq(cq, 4, wc) == 0);
    RETURNS(0, ibv_destroy_qp(qp));
    RETURNS(0, ibv_destroy_cq(cq));
}

/* Destroying an object that is in use fails and does not change it. */
static void destroy_in_use(const struct env *env)
{
    struct ibv_pd *pd = ibv_alloc_pd(env->context);
    struct ibv_ah_attr attr = env_attr(env, 0).ah_attr;
    struct ibv_ah *ah = ibv_create_ah(pd, &attr);
    RETURNS(EBUSY, ibv_dealloc_pd(pd));
    RETURNS(0, ibv_destroy_ah(ah));
    struct ibv_mr *mr = ibv_reg_mr(pd, env->buffer, ENV_BYTES, ENV_ACCESS);
    RETURNS(EBUSY, ibv_dealloc_pd(pd));
    RETURNS(0, ibv_dereg_mr(mr));
    struct ibv_mw *mw = ibv_alloc_mw(pd, IBV_MW_TYPE_2);
    RETURNS(EBUSY, ibv_dealloc_pd(pd));
    RETURNS(0, ibv_dealloc_mw(mw));
    struct ibv_srq_init_attr srq_init = {.attr = {.max_wr = 1, .max_sge = 1}};
    struct ibv_srq *srq = ibv_create_srq(pd, &srq_init);
    RETURNS(EBUSY, ibv_dealloc_pd(pd));
    struct ibv_cq *cq = ibv_create_cq(env->context, 1, NULL, NULL, 0);
    struct ibv_qp_init_attr init = env_init(env, IBV_QPT_RC);
    init.recv_cq = cq, init.srq = srq;
    struct ibv_qp *qp = ibv_create_qp(env->pd, &init);
    RETURNS(EBUSY, ibv_destroy_srq(srq));
    RETURNS(EBUSY, ibv_destroy_cq(cq));
    RETURNS(EBUSY, ibv_destroy_cq(env->cq));
    RETURNS(0, ibv_destroy_qp(qp));
    RETURNS(0, ibv_destroy_srq(srq));
    RETURNS(0, ibv_destroy_cq(cq));
    init.srq = NULL, init.recv_cq = env->cq;
    qp = ibv_create_qp(pd, &init);
    RETURNS(EBUSY, ibv_dealloc_pd(pd));
    RETURNS(0, ibv_destroy_qp(qp));
    RETURNS(0, ibv_dealloc_pd(pd));
}

/* Returns the status of a WRITE with this key, over a new queue pair in this domain. */
static enum ibv_wc_status outcome(const struct env *env, struct ibv_pd *pd, uint32_t rkey, uint64_t addr, struct ibv_qp *via)
{
    struct ibv_qp_init_attr init = env_init(env, IBV_QPT_RC);
    struct ibv_qp *asks = ibv_create_qp(env->pd, &init), *answers = via != NULL ? via : ibv_create_qp(pd, &init);
    env_advance(env, asks, answers->qp_num, IBV_QPS_RTS);
    if (via == NULL) {
        env_advance(env, answers, asks->qp_num, IBV_QPS_RTS);
    } else {
        struct ibv_qp_attr attr = env_attr(env, asks->qp_num);
        attr.qp_state = IBV_QPS_RESET;
        RETURNS(0, ibv_modify_qp(via, &attr, IBV_QP_STATE));
        env_advance(env, via, asks->qp_num, IBV_QPS_RTS);
    }
    struct ibv_sge sge = sge_at(env, env->buffer);
    struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE}, *bad;
    wr.wr.rdma.remote_addr = addr, wr.wr.rdma.rkey = rkey;
    RETURNS(0, ibv_post_send(asks, &wr, &bad));
    struct ibv_wc wc = env_poll(env->cq);
    RETURNS(0, ibv_destroy_qp(asks));
    if (via == NULL)
        RETURNS(0, ibv_destroy_qp(answers));
    return wc.status;
}

static void bind_mw(const struct env *env)
{
    struct ibv_qp_init_attr init = env_init(env, IBV_QPT_RC);
    init.sq_sig_all = 0;
    struct ibv_qp *qp = create_loopback_with(env, init);
    struct ibv_mr *mr = ibv_reg_mr(env->pd, env->buffer, ENV_BYTES, ENV_ACCESS);
    struct ibv_mw *mw = ibv_alloc_mw(env->pd, IBV_MW_TYPE_1);
    uint64_t addr = (uintptr_t)upper_half(env);
    CHECK(outcome(env, env->pd, mw->rkey, addr, NULL) == IBV_WC_REM_ACCESS_ERR); /* a new window is not bound */
    struct ibv_mw_bind bind = {.wr_id = 9,
                               .bind_info = {.mr = mr, .addr = addr, .length = PIECE, .mw_access_flags = IBV_ACCESS_REMOTE_WRITE}};
    uint32_t first = mw->rkey;
    RETURNS(0, ibv_bind_mw(qp, mw, &bind)); /* an unsignaled bind completes without an entry */
    struct ibv_wc wc;
    CHECK(!env_poll_within(env->cq, &wc, SHORTLY_S));
    CHECK(mw->rkey != first && mw->rkey >> 8 == first >> 8);
    CHECK(outcome(env, env->pd, mw->rkey, addr, NULL) == IBV_WC_SUCCESS);
    CHECK(outcome(env, env->pd, mw->rkey, addr + 1, NULL) == IBV_WC_REM_ACCESS_ERR);
    RETURNS(EBUSY, ibv_dereg_mr(mr));

    /* A window of type 1 has no own base address. */
    uint32_t bound = mw->rkey;
    bind.send_flags = IBV_SEND_SIGNALED;
    bind.bind_info.mw_access_flags |= IBV_ACCESS_ZERO_BASED;
    RETURNS(EINVAL, ibv_bind_mw(qp, mw, &bind));
    CHECK(mw->rkey == bound);

    /* A bind of 0 bytes unbinds the window. */
    bind.bind_info = (struct ibv_mw_bind_info){.mr = NULL};
    RETURNS(0, ibv_bind_mw(qp, mw, &bind));
    wc = env_poll(env->cq);
    CHECK(wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_BIND_MW && wc.wr_id == 9);
    CHECK(outcome(env, env->pd, mw->rkey, addr, NULL) == IBV_WC_REM_ACCESS_ERR);
    RETURNS(0, ibv_dereg_mr(mr));

    /* A window of type 2 may be zero-based, and deallocation unbinds it. */
    mr = ibv_reg_mr(env->pd, env->buffer, ENV_BYTES, ENV_ACCESS);
    struct ibv_mw *second = ibv_alloc_mw(env->pd, IBV_MW_TYPE_2);
    struct ibv_send_wr wr = {.wr_id = 10, .opcode = IBV_WR_BIND_MW, .send_flags = IBV_SEND_SIGNALED}, *bad;
    wr.bind_mw.mw = second, wr.bind_mw.rkey = 1;
    wr.bind_mw.bind_info = (struct ibv_mw_bind_info){mr, addr, PIECE, IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_ZERO_BASED};
    RETURNS(0, ibv_post_send(qp, &wr, &bad));
    CHECK(env_poll(env->cq).status == IBV_WC_SUCCESS);
    CHECK(outcome(env, env->pd, second->rkey, 0, qp) == IBV_WC_SUCCESS);
    CHECK(outcome(env, env->pd, second->rkey, 1, qp) == IBV_WC_REM_ACCESS_ERR);
    RETURNS(EBUSY, ibv_dereg_mr(mr));
    RETURNS(0, ibv_dealloc_mw(second));
    RETURNS(0, ibv_dereg_mr(mr));

    /* A window for remote atomics or writes needs a region with local write access. */
    mr = ibv_reg_mr(env->pd, env->buffer, ENV_BYTES, IBV_ACCESS_MW_BIND | IBV_ACCESS_REMOTE_READ);
    env_advance(env, (RETURNS(0, ibv_modify_qp(qp, &(struct ibv_qp_attr){.qp_state = IBV_QPS_RESET}, IBV_QP_STATE)), qp),
                qp->qp_num, IBV_QPS_RTS);
    bind.bind_info = (struct ibv_mw_bind_info){mr, addr, PIECE, IBV_ACCESS_REMOTE_ATOMIC};
    RETURNS(0, ibv_bind_mw(qp, mw, &bind));
    CHECK(env_poll(env->cq).status == IBV_WC_MW_BIND_ERR);
    RETURNS(0, ibv_destroy_qp(qp));
    RETURNS(0, ibv_dealloc_mw(mw));
    RETURNS(0, ibv_dereg_mr(mr));
}

static void rereg_mr(const struct env *env)
{
    struct ibv_pd *pd = ibv_alloc_pd(env->context);
    struct ibv_mr *mr = ibv_reg_mr(env->pd, env->buffer, ENV_BYTES / 4, ENV_ACCESS);
    uint64_t addr = (uintptr_t)upper_half(env);
    CHECK(outcome(env, env->pd, mr->rkey, addr, NULL) == IBV_WC_REM_ACCESS_ERR);
    RETURNS(0, ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, upper_half(env), ENV_BYTES / 4, 0));
    CHECK(mr->addr == upper_half(env) && mr->length == ENV_BYTES / 4);
    CHECK(outcome(env, env->pd, mr->rkey, addr, NULL) == IBV_WC_SUCCESS);
    CHECK(outcome(env, env->pd, mr->rkey, (uintptr_t)env->buffer, NULL) == IBV_WC_REM_ACCESS_ERR);
    RETURNS(0, ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_PD, pd, NULL, 0, 0));
    CHECK(mr->pd == pd);
    CHECK(outcome(env, env->pd, mr->rkey, addr, NULL) == IBV_WC_REM_ACCESS_ERR);
    CHECK(outcome(env, pd, mr->rkey, addr, NULL) == IBV_WC_SUCCESS);
    RETURNS(EBUSY, ibv_dealloc_pd(pd));
    RETURNS(0, ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS | IBV_REREG_MR_CHANGE_PD, env->pd, NULL, 0, IBV_ACCESS_REMOTE_READ));
    RETURNS(0, ibv_dealloc_pd(pd));
    CHECK(outcome(env, env->pd, mr->rkey, addr, NULL) == IBV_WC_REM_ACCESS_ERR);
    RETURNS(0, ibv_dereg_mr(mr));
}

/* A query returns all attributes as set, for every mask. A failed change changes none of them. */
static void query_qp(const struct env *env)
{
    int context;
    struct ibv_qp_init_attr init = env_init(env, IBV_QPT_RC), told_init;
    init.qp_context = &context;
    struct ibv_qp *qp = ibv_create_qp(env->pd, &init);
    env_advance(env, qp, 0x123, IBV_QPS_RTS);
    struct ibv_qp_attr set = env_attr(env, 0x123), told, again;
    RETURNS(0, ibv_query_qp(qp, &told, IBV_QP_STATE, &told_init));
    RETURNS(0, ibv_query_qp(qp, &told, ~0, &told_init));
    CHECK(told.qp_state == IBV_QPS_RTS && told.path_mtu == set.path_mtu && told.rq_psn == set.rq_psn);
    CHECK(told.sq_psn == set.sq_psn && told.dest_qp_num == 0x123 && told.qp_access_flags == set.qp_access_flags);
    CHECK(told.pkey_index == 0 && told.port_num == ENV_PORT && told.timeout == set.timeout);
    CHECK(told.retry_cnt == set.retry_cnt && told.rnr_retry == set.rnr_retry && told.min_rnr_timer == set.min_rnr_timer);
    CHECK(told.max_rd_atomic == set.max_rd_atomic && told.max_dest_rd_atomic == set.max_dest_rd_atomic);
    CHECK(told.ah_attr.is_global && memcmp(&told.ah_attr.grh.dgid, &set.ah_attr.grh.dgid, sizeof set.ah_attr.grh.dgid) == 0);
    CHECK(told.ah_attr.grh.hop_limit == set.ah_attr.grh.hop_limit && told.ah_attr.port_num == ENV_PORT);
    CHECK(told_init.qp_context == &context && told_init.send_cq == env->cq && told_init.recv_cq == env->cq);
    CHECK(told_init.srq == NULL && told_init.qp_type == IBV_QPT_RC && told_init.sq_sig_all == 1);
    CHECK(memcmp(&told_init.cap, &init.cap, sizeof init.cap) == 0 && memcmp(&told.cap, &init.cap, sizeof init.cap) == 0);
    CHECK(init.cap.max_send_wr >= ENV_DEPTH && init.cap.max_recv_wr >= ENV_DEPTH);
    CHECK(init.cap.max_send_sge >= ENV_SGES && init.cap.max_recv_sge >= ENV_SGES);

    set.min_rnr_timer = 3, set.qp_access_flags = 0, set.cur_qp_state = IBV_QPS_RTR, set.qp_state = IBV_QPS_RTS;
    int mask = IBV_QP_STATE | IBV_QP_MIN_RNR_TIMER | IBV_QP_ACCESS_FLAGS;
    RETURNS(EINVAL, ibv_modify_qp(qp, &set, mask | IBV_QP_CUR_STATE));
    RETURNS(EINVAL, ibv_modify_qp(qp, &set, mask | IBV_QP_DEST_QPN));
    set.min_rnr_timer = 32;
    RETURNS(EINVAL, ibv_modify_qp(qp, &set, mask));
    RETURNS(0, ibv_query_qp(qp, &again, ~0, &told_init));
    CHECK(again.min_rnr_timer == told.min_rnr_timer && again.qp_access_flags == told.qp_access_flags);
    set.min_rnr_timer = 3;
    RETURNS(0, ibv_modify_qp(qp, &set, mask));
    RETURNS(0, ibv_query_qp(qp, &again, ~0, &told_init));
    CHECK(again.min_rnr_timer == 3 && again.qp_access_flags == 0);
    RETURNS(0, ibv_destroy_qp(qp));
}

/* Shared receive queues are for RC and UD. */
static void create_qp(const struct env *env)
{
    struct ibv_srq *srq = srq_of(env, 1);
    struct ibv_qp_init_attr init = env_init(env, IBV_QPT_UC);
    init.srq = srq;
    FAILS(EINVAL, ibv_create_qp(env->pd, &init));
    RETURNS(0, ibv_destroy_srq(srq));
}

/* Many requests may use an address handle, which does not refer to its attributes after creation. */
static void create_ah(const struct env *env)
{
    struct ibv_ah_attr attr = env_attr(env, 0).ah_attr;
    struct ibv_ah *first = ibv_create_ah(env->pd, &attr), *second = ibv_create_ah(env->pd, &attr);
    memset(&attr, 0xff, sizeof attr);
    CHECK(first != NULL && second != NULL && first != second && first->pd == env->pd && first->context == env->context);
    RETURNS(0, ibv_destroy_ah(first));
    struct ibv_qp *qp = create_loopback_with(env, env_init(env, IBV_QPT_UD));
    struct ibv_sge sge = sge_at(env, env->buffer);
    struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND}, *bad;
    wr.wr.ud.ah = second, wr.wr.ud.remote_qpn = qp->qp_num, wr.wr.ud.remote_qkey = ENV_QKEY;
    for (int i = 0; i < 3; i++) {
        RETURNS(0, ibv_post_send(qp, &wr, &bad));
        drain(env, 1);
    }
    RETURNS(0, ibv_destroy_qp(qp));
    RETURNS(0, ibv_destroy_ah(second));
}

/* The completion of a datagram and its first 40 bytes suffice to answer it. */
static void create_ah_from_wc(const struct env *env)
{
    struct ibv_qp *qp = create_loopback_with(env, env_init(env, IBV_QPT_UD));
    struct ibv_ah_attr attr = env_attr(env, 0).ah_attr;
    struct ibv_ah *ah = ibv_create_ah(env->pd, &attr);
    for (int answers = 0; answers < 2; answers++) {
        struct ibv_sge to = {.addr = (uintptr_t)upper_half(env), .length = GRH_BYTES + PIECE, .lkey = env->mr->lkey};
        struct ibv_recv_wr receive = {.wr_id = 5, .sg_list = &to, .num_sge = 1}, *bad_receive;
        RETURNS(0, ibv_post_recv(qp, &receive, &bad_receive));
        struct ibv_sge from = sge_at(env, env->buffer);
        struct ibv_send_wr wr = {.wr_id = 1, .sg_list = &from, .num_sge = 1, .opcode = IBV_WR_SEND}, *bad;
        wr.wr.ud.ah = ah, wr.wr.ud.remote_qpn = qp->qp_num, wr.wr.ud.remote_qkey = ENV_QKEY;
        RETURNS(0, ibv_post_send(qp, &wr, &bad));
        struct ibv_wc wc = {0}, received = {0};
        for (int i = 0; i < 2; i++) {
            wc = env_poll(env->cq);
            CHECK(wc.status == IBV_WC_SUCCESS);
            if (wc.wr_id == 5)
                received = wc;
        }
        CHECK(received.wr_id == 5 && received.src_qp == qp->qp_num);
        struct ibv_grh *grh = (struct ibv_grh *)upper_half(env);
        memset(&attr, 0, sizeof attr);
        CHECK(ibv_init_ah_from_wc(env->context, ENV_PORT, &received, grh, &attr) == 0);
        CHECK(attr.is_global && attr.port_num == ENV_PORT && memcmp(&attr.grh.dgid, &env->gid, sizeof env->gid) == 0);
        RETURNS(0, ibv_destroy_ah(ah));
        ah = ibv_create_ah_from_wc(env->pd, &received, grh, ENV_PORT);
        CHECK(ah != NULL);
    }
    RETURNS(0, ibv_destroy_ah(ah));
    RETURNS(0, ibv_destroy_qp(qp));
}

/* SQ_DRAINED is raised only if it was requested. */
static void sq_drained(const struct env *env)
{
    struct ibv_qp *qp = create_loopback(env);
    struct ibv_async_event event;
    for (int requested = 0; requested < 2; requested++) {
        struct ibv_qp_attr attr = {.qp_state = IBV_QPS_SQD, .en_sqd_async_notify = (uint8_t)requested};
        RETURNS(0, ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY));
        if (requested) {
            RETURNS(0, ibv_get_async_event(env->context, &event));
            CHECK(event.event_type == IBV_EVENT_SQ_DRAINED && event.element.qp == qp);
            ibv_ack_async_event(&event);
        }
        MINUS_ONE(EAGAIN, ibv_get_async_event(env->context, &event));
        struct ibv_qp_init_attr init;
        RETURNS(0, ibv_query_qp(qp, &attr, IBV_QP_STATE, &init));
        CHECK(attr.qp_state == IBV_QPS_SQD && attr.sq_draining == 0);
        /* A work request that is posted now waits for RTS. */
        post(env, qp, IBV_WR_RDMA_WRITE, 0);
        struct ibv_wc wc;
        CHECK(!env_poll_within(env->cq, &wc, SHORTLY_S));
        attr.qp_state = IBV_QPS_RTS;
        RETURNS(0, ibv_modify_qp(qp, &attr, IBV_QP_STATE));
        drain(env, 1);
    }
    RETURNS(0, ibv_destroy_qp(qp));
}

static union ibv_gid ipv4_gid(uint8_t first, uint8_t last)
{
    return (union ibv_gid){.raw = {[10] = 0xff, [11] = 0xff, [12] = first, [15] = last}};
}

/* UD queue pairs are attached to multicast groups, within the limits of the device attributes. */
static void attach_mcast(const struct env *env)
{
    CHECK(env->attr.max_mcast_grp > 0 && env->attr.max_mcast_qp_attach > 0);
    CHECK(env->attr.max_total_mcast_qp_attach == env->attr.max_mcast_grp * env->attr.max_mcast_qp_attach);
    struct ibv_qp *qp = env_qp(env, IBV_QPT_UD), *reliable = env_qp(env, IBV_QPT_RC);
    union ibv_gid group = ipv4_gid(239, 9), unicast = ipv4_gid(127, 1), without_address = {.raw = {0xff, 0x0e, [15] = 9}};
    RETURNS(EINVAL, ibv_attach_mcast(NULL, &group, 0));
    RETURNS(EINVAL, ibv_attach_mcast(qp, NULL, 0));
    RETURNS(EINVAL, ibv_attach_mcast(qp, &unicast, 0));
    RETURNS(EINVAL, ibv_attach_mcast(reliable, &group, 0));
    RETURNS(EADDRNOTAVAIL, ibv_attach_mcast(qp, &without_address, 0));
    RETURNS(EINVAL, ibv_detach_mcast(qp, &group, 0));
    RETURNS(0, ibv_attach_mcast(qp, &group, 0));
    RETURNS(0, ibv_attach_mcast(qp, &group, 0));
    RETURNS(EBUSY, ibv_destroy_qp(qp));
    RETURNS(0, ibv_detach_mcast(qp, &group, 0));
    RETURNS(EINVAL, ibv_detach_mcast(qp, &group, 0));
    for (int i = 0; i < env->attr.max_mcast_grp; i++) {
        group = ipv4_gid(238, i);
        RETURNS(0, ibv_attach_mcast(qp, &group, 0));
    }
    group = ipv4_gid(239, 9);
    RETURNS(ENOMEM, ibv_attach_mcast(qp, &group, 0));
    for (int i = 0; i < env->attr.max_mcast_grp; i++) {
        group = ipv4_gid(238, i);
        RETURNS(0, ibv_detach_mcast(qp, &group, 0));
    }
    RETURNS(0, ibv_destroy_qp(qp));
    RETURNS(0, ibv_destroy_qp(reliable));
}

static void *destroy_qp_thread(void *arg)
{
    RETURNS(0, ibv_destroy_qp(arg));
    return NULL;
}

/* ibv_get_async_event returns -1 without an event. ibv_destroy_qp waits until its events are acknowledged. */
static void get_async_event(const struct env *env)
{
    struct ibv_async_event event;
    MINUS_ONE(EAGAIN, ibv_get_async_event(env->context, &event));
    struct ibv_srq *srq = srq_of(env, 1);
    struct ibv_qp_init_attr init = env_init(env, IBV_QPT_RC);
    init.srq = srq;
    struct ibv_qp *qp = create_loopback_with(env, init);
    to_error(qp);
    RETURNS(0, ibv_get_async_event(env->context, &event));
    CHECK(event.event_type == IBV_EVENT_QP_LAST_WQE_REACHED && event.element.qp == qp);
    pthread_t thread;
    if (pthread_create(&thread, NULL, destroy_qp_thread, qp) != 0)
        die("a thread cannot be created");
    nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
    CHECK(pthread_tryjoin_np(thread, NULL) == EBUSY);
    ibv_ack_async_event(&event);
    pthread_join(thread, NULL);
    RETURNS(0, ibv_destroy_srq(srq));
}

int main(void)
{
    struct env env = env_open();
    env_nonblocking(env.channel->fd);
    env_nonblocking(env.context->async_fd);
    req_notify_cq(&env);
    get_cq_event(&env);
    opcodes(&env);
    send_flags_of_post_send(&env);
    post_recv(&env);
    modify_srq(&env);
    resize_cq(&env);
    destroy_in_use(&env);
    bind_mw(&env);
    rereg_mr(&env);
    query_qp(&env);
    create_qp(&env);
    create_ah(&env);
    create_ah_from_wc(&env);
    sq_drained(&env);
    attach_mcast(&env);
    get_async_event(&env);
    env_close(&env);
    return check_end();
}
