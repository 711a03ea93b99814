/*
 * verbs_post: tests work requests that fail at posting, and those that fail at execution.
 */
#include "check.h"
#include "env.h"

#include <limits.h>
#include <stdlib.h>
#include <sys/mman.h>

static struct ibv_sge sge_of(const struct env *env, uint32_t length)
{
    return (struct ibv_sge){.addr = (uintptr_t)env->buffer, .length = length, .lkey = env->mr->lkey};
}

/* Returns a request to the upper half of the same buffer. */
static struct ibv_send_wr request(const struct env *env, enum ibv_wr_opcode opcode, struct ibv_sge *sge)
{
    struct ibv_send_wr wr = {.wr_id = 1, .sg_list = sge, .num_sge = 1, .opcode = opcode};
    uint64_t remote = (uintptr_t)env->buffer + ENV_BYTES / 2;
    if (opcode == IBV_WR_ATOMIC_CMP_AND_SWP || opcode == IBV_WR_ATOMIC_FETCH_AND_ADD)
        wr.wr.atomic.remote_addr = remote, wr.wr.atomic.rkey = env->mr->rkey;
    else
        wr.wr.rdma.remote_addr = remote, wr.wr.rdma.rkey = env->mr->rkey;
    return wr;
}

/* Checks that a post fails, and that `bad_wr` is the bad request. */
static void check_post_fails(int wanted, struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr *bad_request, int line)
{
    struct ibv_send_wr *bad = NULL;
    check_code(ibv_post_send(qp, wr, &bad), wanted, __FILE__, line, "ibv_post_send");
    if (!count_check(bad == bad_request, __FILE__, line, "bad_wr"))
        puts("bad_wr is another work request");
}

#define POST_REFUSED(wanted, qp, change)                          \
    do {                                                          \
        struct ibv_sge sge = sge_of(env, 8);                      \
        struct ibv_send_wr wr = request(env, IBV_WR_SEND, &sge);  \
        change;                                                   \
        check_post_fails((wanted), (qp), &wr, &wr, __LINE__);              \
    } while (0)

static void states(const struct env *env)
{
    const enum ibv_qp_type types[] = {IBV_QPT_RC, IBV_QPT_UC, IBV_QPT_UD};
    struct ibv_recv_wr receive = {.wr_id = 1}, *bad;
    struct ibv_wc wc;
    for (int i = 0; i < 3; i++) {
        struct ibv_qp *qp = env_qp(env, types[i]);
        struct ibv_qp_attr attr = env_attr(env, qp->qp_num);
        struct ibv_ah *ah = ibv_create_ah(env->pd, &attr.ah_attr);
        POST_REFUSED(EINVAL, qp, wr.wr.ud.ah = ah);
        RETURNS(EINVAL, ibv_post_recv(qp, &receive, &bad));
        CHECK(bad == &receive);
        env_advance(env, qp, qp->qp_num, IBV_QPS_INIT);
        POST_REFUSED(EINVAL, qp, wr.wr.ud.ah = ah);
        RETURNS(0, ibv_post_recv(qp, &receive, &bad));
        attr.qp_state = IBV_QPS_RTR;
        RETURNS(0, ibv_modify_qp(qp, &attr, env_mask(types[i], IBV_QPS_RTR)));
        POST_REFUSED(EINVAL, qp, wr.wr.ud.ah = ah);

        /* In the error state every post is accepted, and completes as flushed. */
        attr.qp_state = IBV_QPS_ERR;
        RETURNS(0, ibv_modify_qp(qp, &attr, IBV_QP_STATE));
        CHECK(env_poll(env->cq).status == IBV_WC_WR_FLUSH_ERR);
        struct ibv_sge sge = sge_of(env, 8);
        struct ibv_send_wr wr = request(env, IBV_WR_SEND, &sge), *bad_send;
        wr.wr.ud.ah = ah;
        RETURNS(0, ibv_post_send(qp, &wr, &bad_send));
        RETURNS(0, ibv_post_recv(qp, &receive, &bad));
        CHECK(env_poll(env->cq).status == IBV_WC_WR_FLUSH_ERR);
        CHECK(env_poll(env->cq).status == IBV_WC_WR_FLUSH_ERR);
        RETURNS(0, ibv_destroy_ah(ah));
        RETURNS(0, ibv_destroy_qp(qp));
        CHECK(ibv_poll_cq(env->cq, 1, &wc) == 0);
    }
}

static void sends(const struct env *env)
{
    struct ibv_qp *qp = env_qp(env, IBV_QPT_RC), *peer = env_qp(env, IBV_QPT_RC);
    env_connect(env, qp, peer);
    struct ibv_sge list[ENV_SGES + 1];
    for (int i = 0; i <= ENV_SGES; i++)
        list[i] = sge_of(env, 8);
    struct ibv_send_wr *bad;
    RETURNS(0, ibv_post_send(qp, NULL, &bad)); /* an empty list */

    POST_REFUSED(EINVAL, qp, wr.sg_list = list; wr.num_sge = ENV_SGES + 1);
    POST_REFUSED(EINVAL, qp, wr.num_sge = INT_MAX);
    POST_REFUSED(EINVAL, qp, wr.num_sge = -1);
    POST_REFUSED(EINVAL, qp, wr.num_sge = INT_MIN);
    POST_REFUSED(EINVAL, qp, wr.sg_list = NULL);
    POST_REFUSED(EINVAL, qp, wr.opcode = (enum ibv_wr_opcode)99);
    POST_REFUSED(EINVAL, qp, wr.opcode = (enum ibv_wr_opcode)-1);
    POST_REFUSED(EINVAL, qp, wr.opcode = IBV_WR_TSO);
    POST_REFUSED(EINVAL, qp, wr.opcode = IBV_WR_DRIVER1);
    POST_REFUSED(EINVAL, qp, wr.send_flags = IBV_SEND_IP_CSUM);
    POST_REFUSED(EINVAL, qp, wr.send_flags = IBV_SEND_INLINE; sge.length = ENV_BYTES);
    POST_REFUSED(EINVAL, qp, wr.send_flags = IBV_SEND_INLINE; sge.length = UINT32_MAX);
    POST_REFUSED(EINVAL, qp, wr.send_flags = IBV_SEND_INLINE; wr.sg_list = list; wr.num_sge = ENV_SGES;
                 list[0].length = UINT32_MAX; list[1].length = UINT32_MAX);
    POST_REFUSED(EINVAL, qp, sge.length = (1u << 31) + 1);
    /* A READ or atomic cannot return data into inline data, and an atomic needs 8 bytes. */
    POST_REFUSED(EINVAL, qp, wr = request(env, IBV_WR_RDMA_READ, &sge); wr.send_flags = IBV_SEND_INLINE);
    POST_REFUSED(EINVAL, qp, wr = request(env, IBV_WR_ATOMIC_FETCH_AND_ADD, &sge); sge.length = 7);
    POST_REFUSED(EINVAL, qp, wr = request(env, IBV_WR_ATOMIC_CMP_AND_SWP, &sge); wr.num_sge = 0);
    POST_REFUSED(EINVAL, qp, wr = request(env, IBV_WR_ATOMIC_WRITE, &sge); sge.length = 4);
    POST_REFUSED(EINVAL, qp, wr.opcode = IBV_WR_BIND_MW; wr.bind_mw.mw = NULL);

    RETURNS(EINVAL, ibv_post_send(qp, &(struct ibv_send_wr){.num_sge = -1}, &bad));
    struct ibv_wc wc;
    CHECK(ibv_poll_cq(env->cq, 1, &wc) == 0);
    RETURNS(0, ibv_destroy_qp(qp));
    RETURNS(0, ibv_destroy_qp(peer));
}

/* The requests before the bad one are posted; those after it are not. */
static void lists(const struct env *env)
{
    struct ibv_qp *qp = env_qp(env, IBV_QPT_RC), *peer = env_qp(env, IBV_QPT_RC);
    env_connect(env, qp, peer);
    struct ibv_sge sge = sge_of(env, 8);
    struct ibv_send_wr wr[3];
    for (int i = 2; i >= 0; i--) {
        wr[i] = request(env, IBV_WR_RDMA_WRITE, &sge);
        wr[i].wr_id = (uint64_t)i, wr[i].next = i == 2 ? NULL : &wr[i + 1];
    }
    wr[1].opcode = (enum ibv_wr_opcode)77;
    check_post_fails(EINVAL, qp, &wr[0], &wr[1], __LINE__);
    struct ibv_wc wc = env_poll(env->cq);
    CHECK(wc.wr_id == 0 && wc.status == IBV_WC_SUCCESS);
    CHECK(!env_poll_within(env->cq, &wc, 0.05));

    struct ibv_recv_wr third = {.wr_id = 3}, second = {.wr_id = 2, .next = &third, .num_sge = ENV_SGES + 1, .sg_list = &sge};
    struct ibv_recv_wr first = {.wr_id = 1, .next = &second}, *bad = NULL;
    RETURNS(EINVAL, ibv_post_recv(qp, &first, &bad));
    CHECK(bad == &second);
    second.num_sge = INT_MIN;
    RETURNS(EINVAL, ibv_post_recv(qp, &second, &bad));
    CHECK(bad == &second);
    second.num_sge = 1, second.sg_list = NULL;
    RETURNS(EINVAL, ibv_post_recv(qp, &second, &bad));
    CHECK(bad == &second);
    RETURNS(0, ibv_post_recv(qp, NULL, &bad));
    for (int i = 1; i < ENV_DEPTH; i++)
        RETURNS(0, ibv_post_recv(qp, &third, &bad));
    RETURNS(ENOMEM, ibv_post_recv(qp, &third, &bad));
    CHECK(bad == &third);
    RETURNS(0, ibv_destroy_qp(qp));
    RETURNS(0, ibv_destroy_qp(peer));
}

/* The queue is full while the peer does not respond, and accepts requests afterwards. */
static void full_queue(const struct env *env)
{
    struct ibv_qp *qp = env_qp(env, IBV_QPT_RC), *peer = env_qp(env, IBV_QPT_RC);
    env_advance(env, qp, peer->qp_num, IBV_QPS_RTS);
    struct ibv_sge sge = sge_of(env, 8);
    struct ibv_send_wr wr = request(env, IBV_WR_RDMA_WRITE, &sge), *bad;
    for (int i = 0; i < ENV_DEPTH; i++)
        RETURNS(0, ibv_post_send(qp, &wr, &bad));
    check_post_fails(ENOMEM, qp, &wr, &wr, __LINE__);
    env_advance(env, peer, qp->qp_num, IBV_QPS_RTS);
    for (int i = 0; i < ENV_DEPTH; i++)
        CHECK(env_poll(env->cq).status == IBV_WC_SUCCESS);
    RETURNS(0, ibv_post_send(qp, &wr, &bad));
    CHECK(env_poll(env->cq).status == IBV_WC_SUCCESS);
    RETURNS(0, ibv_destroy_qp(qp));
    RETURNS(0, ibv_destroy_qp(peer));
}

static void other_services(const struct env *env)
{
    struct ibv_qp *uc = env_qp(env, IBV_QPT_UC), *ud = env_qp(env, IBV_QPT_UD);
    env_advance(env, uc, uc->qp_num, IBV_QPS_RTS);
    env_advance(env, ud, 0, IBV_QPS_RTS);
    struct ibv_qp_attr attr = env_attr(env, ud->qp_num);
    struct ibv_ah *ah = ibv_create_ah(env->pd, &attr.ah_attr);
    const enum ibv_wr_opcode not_on_uc[] = {IBV_WR_RDMA_READ, IBV_WR_ATOMIC_CMP_AND_SWP, IBV_WR_ATOMIC_FETCH_AND_ADD,
                                            IBV_WR_ATOMIC_WRITE};
    for (int i = 0; i < 4; i++) {
        POST_REFUSED(EINVAL, uc, wr = request(env, not_on_uc[i], &sge));
        POST_REFUSED(EINVAL, ud, wr.opcode = not_on_uc[i]; wr.wr.ud.ah = ah);
    }
    POST_REFUSED(EINVAL, ud, wr.opcode = IBV_WR_RDMA_WRITE; wr.wr.ud.ah = ah);
    POST_REFUSED(EINVAL, ud, wr.opcode = IBV_WR_SEND_WITH_INV; wr.wr.ud.ah = ah);
    POST_REFUSED(EINVAL, ud, wr.wr.ud.ah = NULL);
    /* A datagram has at most one packet. */
    struct ibv_wc wc;
    CHECK(ibv_poll_cq(env->cq, 1, &wc) == 0);
    RETURNS(0, ibv_destroy_ah(ah));
    RETURNS(0, ibv_destroy_qp(uc));
    RETURNS(0, ibv_destroy_qp(ud));
}

/* ---- errors at execution ---------------------------------------------------------------------------------------- */

/* Posts to a new pair and returns the status. After a success the next request must succeed, else be flushed. */
static enum ibv_wc_status outcome(const struct env *env, struct ibv_send_wr *wr)
{
    struct ibv_qp *qp = env_qp(env, IBV_QPT_RC), *peer = env_qp(env, IBV_QPT_RC);
    env_connect(env, qp, peer);
    struct ibv_send_wr behind = {.wr_id = 2, .opcode = IBV_WR_RDMA_WRITE}, *bad;
    wr->next = &behind;
    RETURNS(0, ibv_post_send(qp, wr, &bad));
    struct ibv_wc first = env_poll(env->cq), second = env_poll(env->cq);
    CHECK(first.wr_id == 1 && first.qp_num == qp->qp_num && second.wr_id == 2);
    CHECK(second.status == (first.status == IBV_WC_SUCCESS ? IBV_WC_SUCCESS : IBV_WC_WR_FLUSH_ERR));
    RETURNS(0, ibv_destroy_qp(qp));
    RETURNS(0, ibv_destroy_qp(peer));
    struct ibv_async_event event;
    if (first.status != IBV_WC_SUCCESS && first.status != IBV_WC_LOC_PROT_ERR) {
        CHECK(ibv_get_async_event(env->context, &event) != 0); /* destroyed with the queue pair */
    }
    return first.status;
}

#define ENDS_WITH(wanted, op, change)                                                    \
    do {                                                                                 \
        struct ibv_sge sge = sge_of(env, 8);                                             \
        struct ibv_send_wr wr = request(env, (op), &sge);                                \
        change;                                                                          \
        enum ibv_wc_status got = outcome(env, &wr);                                      \
        if (!count_check(got == (wanted), __FILE__, __LINE__, #op " " #change))           \
            printf("%s instead of %s\n", ibv_wc_status_str(got), ibv_wc_status_str(wanted)); \
    } while (0)

static void local_memory(const struct env *env)
{
    struct ibv_pd *pd = ibv_alloc_pd(env->context);
    struct ibv_mr *foreign = ibv_reg_mr(pd, env->buffer, ENV_BYTES, ENV_ACCESS);
    struct ibv_mr *constant = ibv_reg_mr(env->pd, env->buffer, ENV_BYTES, IBV_ACCESS_REMOTE_READ);
    struct ibv_mr *gone = ibv_reg_mr(env->pd, env->buffer, ENV_BYTES, ENV_ACCESS);
    uint32_t gone_key = gone->lkey;
    RETURNS(0, ibv_dereg_mr(gone));

    ENDS_WITH(IBV_WC_LOC_PROT_ERR, IBV_WR_RDMA_WRITE, sge.lkey = 0);
    ENDS_WITH(IBV_WC_LOC_PROT_ERR, IBV_WR_RDMA_WRITE, sge.lkey = UINT32_MAX);
    ENDS_WITH(IBV_WC_LOC_PROT_ERR, IBV_WR_RDMA_WRITE, sge.lkey ^= 1);
    ENDS_WITH(IBV_WC_LOC_PROT_ERR, IBV_WR_RDMA_WRITE, sge.lkey = gone_key);
    ENDS_WITH(IBV_WC_LOC_PROT_ERR, IBV_WR_RDMA_WRITE, sge.lkey = foreign->lkey);
    ENDS_WITH(IBV_WC_LOC_PROT_ERR, IBV_WR_RDMA_WRITE, sge.addr -= 1);
    ENDS_WITH(IBV_WC_LOC_PROT_ERR, IBV_WR_RDMA_WRITE, sge.addr += ENV_BYTES - 7);
    ENDS_WITH(IBV_WC_LOC_PROT_ERR, IBV_WR_RDMA_WRITE, sge.addr = UINT64_MAX - 3);
    ENDS_WITH(IBV_WC_LOC_PROT_ERR, IBV_WR_RDMA_WRITE, sge.length = ENV_BYTES + 1);
    ENDS_WITH(IBV_WC_LOC_PROT_ERR, IBV_WR_RDMA_READ, sge.lkey = constant->lkey);
    ENDS_WITH(IBV_WC_LOC_PROT_ERR, IBV_WR_ATOMIC_FETCH_AND_ADD, sge.lkey = constant->lkey);
    ENDS_WITH(IBV_WC_SUCCESS, IBV_WR_RDMA_WRITE, sge.lkey = constant->lkey);
    /* An empty range may have any key and address. */
    ENDS_WITH(IBV_WC_SUCCESS, IBV_WR_RDMA_WRITE, sge.length = 0; sge.lkey = 0; sge.addr = 0);

    RETURNS(0, ibv_dereg_mr(foreign));
    RETURNS(0, ibv_dereg_mr(constant));
    RETURNS(0, ibv_dealloc_pd(pd));
}

static void remote_memory(const struct env *env)
{
    struct ibv_pd *pd = ibv_alloc_pd(env->context);
    struct ibv_mr *foreign = ibv_reg_mr(pd, env->buffer, ENV_BYTES, ENV_ACCESS);
    struct ibv_mr *closed = ibv_reg_mr(env->pd, env->buffer, ENV_BYTES, IBV_ACCESS_LOCAL_WRITE);
    const enum ibv_wc_status ACCESS = IBV_WC_REM_ACCESS_ERR, REQUEST = IBV_WC_REM_INV_REQ_ERR;

    ENDS_WITH(ACCESS, IBV_WR_RDMA_WRITE, wr.wr.rdma.rkey ^= 1);
    ENDS_WITH(ACCESS, IBV_WR_RDMA_READ, wr.wr.rdma.rkey = 0);
    ENDS_WITH(ACCESS, IBV_WR_RDMA_READ, wr.wr.rdma.rkey = foreign->rkey);
    ENDS_WITH(ACCESS, IBV_WR_RDMA_READ, wr.wr.rdma.rkey = closed->rkey);
    ENDS_WITH(ACCESS, IBV_WR_RDMA_WRITE, wr.wr.rdma.rkey = closed->rkey);
    ENDS_WITH(ACCESS, IBV_WR_ATOMIC_FETCH_AND_ADD, wr.wr.atomic.rkey = closed->rkey);
    ENDS_WITH(ACCESS, IBV_WR_RDMA_READ, wr.wr.rdma.remote_addr = (uintptr_t)env->buffer - 1);
    ENDS_WITH(ACCESS, IBV_WR_RDMA_WRITE, wr.wr.rdma.remote_addr = (uintptr_t)env->buffer + ENV_BYTES - 7);
    ENDS_WITH(ACCESS, IBV_WR_RDMA_WRITE, wr.wr.rdma.remote_addr = UINT64_MAX);
    ENDS_WITH(ACCESS, IBV_WR_RDMA_READ, wr.wr.rdma.remote_addr = UINT64_MAX - 6);
    ENDS_WITH(REQUEST, IBV_WR_ATOMIC_FETCH_AND_ADD, wr.wr.atomic.remote_addr += 4);
    ENDS_WITH(REQUEST, IBV_WR_ATOMIC_WRITE, wr.wr.rdma.remote_addr += 1);
    ENDS_WITH(IBV_WC_SUCCESS, IBV_WR_RDMA_WRITE, (void)wr);

    RETURNS(0, ibv_dereg_mr(foreign));
    RETURNS(0, ibv_dereg_mr(closed));
    RETURNS(0, ibv_dealloc_pd(pd));
}

/* ---- ibv_wr_* --------------------------------------------------------------------------------------------------- */

static struct ibv_qp *builder_qp(const struct env *env, enum ibv_qp_type type, uint64_t operations)
{
    struct ibv_qp_init_attr plain = env_init(env, type);
    struct ibv_qp_init_attr_ex init = {
        .send_cq = plain.send_cq,
        .recv_cq = plain.recv_cq,
        .cap = plain.cap,
        .qp_type = type,
        .sq_sig_all = 1,
        .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
        .pd = env->pd,
        .send_ops_flags = operations,
    };
    struct ibv_qp *qp = ibv_create_qp_ex(env->context, &init);
    if (qp == NULL)
        die("no queue pair with a builder");
    return qp;
}

#define BUILD(wanted, steps)                                                      \
    do {                                                                          \
        ibv_wr_start(qpx);                                                        \
        steps;                                                                    \
        check_code(ibv_wr_complete(qpx), (wanted), __FILE__, __LINE__, #steps);   \
    } while (0)

static void builder(const struct env *env)
{
    struct ibv_qp *qp = builder_qp(env, IBV_QPT_RC, IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_BIND_MW);
    struct ibv_qp *peer = env_qp(env, IBV_QPT_RC);
    struct ibv_qp_ex *qpx = ibv_qp_to_qp_ex(qp);
    struct ibv_sge list[ENV_SGES + 1];
    for (int i = 0; i <= ENV_SGES; i++)
        list[i] = sge_of(env, 8);
    uint64_t remote = (uintptr_t)env->buffer + ENV_BYTES / 2;
    uint32_t rkey = env->mr->rkey;

    BUILD(EINVAL, ibv_wr_rdma_write(qpx, rkey, remote)); /* in RESET */
    env_connect(env, qp, peer);
    RETURNS(EINVAL, ibv_wr_complete(qpx)); /* without a start */
    ibv_wr_abort(qpx);
    BUILD(0, (void)0);
    BUILD(EINVAL, ibv_wr_send(qpx)); /* an operation that was not requested at creation */
    BUILD(EINVAL, ibv_wr_rdma_read(qpx, rkey, remote));
    BUILD(EINVAL, ibv_wr_send_tso(qpx, NULL, 0, 0));
    BUILD(EINVAL, ibv_wr_set_sge(qpx, list[0].lkey, list[0].addr, 8)); /* without a request */
    BUILD(EINVAL, ibv_wr_rdma_write(qpx, rkey, remote); ibv_wr_set_sge_list(qpx, ENV_SGES + 1, list));
    BUILD(EINVAL, ibv_wr_rdma_write(qpx, rkey, remote); ibv_wr_set_sge_list(qpx, SIZE_MAX, list));
    BUILD(EINVAL, ibv_wr_rdma_write(qpx, rkey, remote); ibv_wr_set_sge_list(qpx, 1, NULL));
    BUILD(EINVAL, ibv_wr_rdma_write(qpx, rkey, remote); ibv_wr_set_inline_data(qpx, env->buffer, ENV_BYTES));
    BUILD(EINVAL, ibv_wr_rdma_write(qpx, rkey, remote); ibv_wr_set_inline_data(qpx, env->buffer, SIZE_MAX));
    BUILD(EINVAL, ibv_wr_rdma_write(qpx, rkey, remote); ibv_wr_set_inline_data(qpx, NULL, 8));
    struct ibv_data_buf parts[2] = {{.addr = env->buffer, .length = SIZE_MAX}, {.addr = env->buffer, .length = SIZE_MAX}};
    BUILD(EINVAL, ibv_wr_rdma_write(qpx, rkey, remote); ibv_wr_set_inline_data_list(qpx, 2, parts));
    BUILD(EINVAL, ibv_wr_rdma_write(qpx, rkey, remote); ibv_wr_set_inline_data_list(qpx, SIZE_MAX, parts));
    BUILD(EINVAL, ibv_wr_rdma_write(qpx, rkey, remote); ibv_wr_set_xrc_srqn(qpx, 1));
    BUILD(EINVAL, ibv_wr_bind_mw(qpx, NULL, 1, &(struct ibv_mw_bind_info){.mr = env->mr}));

    /* One bad request fails the whole list. */
    BUILD(EINVAL, ibv_wr_rdma_write(qpx, rkey, remote); ibv_wr_set_sge(qpx, list[0].lkey, list[0].addr, 8);
          ibv_wr_send(qpx));
    BUILD(EINVAL, ibv_wr_rdma_write(qpx, rkey, remote); ibv_wr_set_sge(qpx, list[0].lkey, list[0].addr, 8);
          ibv_wr_rdma_write(qpx, rkey, remote); ibv_wr_set_sge(qpx, list[0].lkey, list[0].addr, UINT32_MAX));
    BUILD(ENOMEM, for (int i = 0; i <= ENV_DEPTH; i++) ibv_wr_rdma_write(qpx, rkey, remote));
    struct ibv_wc wc;
    CHECK(!env_poll_within(env->cq, &wc, 0.05));
    BUILD(0, ibv_wr_rdma_write(qpx, rkey, remote); ibv_wr_set_sge(qpx, list[0].lkey, list[0].addr, 8));
    CHECK(env_poll(env->cq).status == IBV_WC_SUCCESS);
    RETURNS(0, ibv_destroy_qp(qp));
    RETURNS(0, ibv_destroy_qp(peer));

    qp = builder_qp(env, IBV_QPT_UD, IBV_QP_EX_WITH_SEND), qpx = ibv_qp_to_qp_ex(qp);
    env_advance(env, qp, 0, IBV_QPS_RTS);
    BUILD(EINVAL, ibv_wr_send(qpx)); /* without an address */
    BUILD(EINVAL, ibv_wr_send(qpx); ibv_wr_set_ud_addr(qpx, NULL, qp->qp_num, ENV_QKEY));
    RETURNS(0, ibv_destroy_qp(qp));
}

/* A batch larger than the free part of the queue is not posted at all. */
static void builder_with_full_queue(const struct env *env)
{
    struct ibv_qp *qp = builder_qp(env, IBV_QPT_RC, IBV_QP_EX_WITH_RDMA_WRITE), *peer = env_qp(env, IBV_QPT_RC);
    struct ibv_qp_ex *qpx = ibv_qp_to_qp_ex(qp);
    uint64_t remote = (uintptr_t)env->buffer + ENV_BYTES / 2;
    env_advance(env, qp, peer->qp_num, IBV_QPS_RTS);
    BUILD(0, for (int i = 0; i < ENV_DEPTH - 1; i++) ibv_wr_rdma_write(qpx, env->mr->rkey, remote));
    BUILD(ENOMEM, for (int i = 0; i < 2; i++) ibv_wr_rdma_write(qpx, env->mr->rkey, remote));
    env_advance(env, peer, qp->qp_num, IBV_QPS_RTS);
    for (int i = 0; i < ENV_DEPTH - 1; i++)
        CHECK(env_poll(env->cq).status == IBV_WC_SUCCESS);
    struct ibv_wc wc;
    CHECK(!env_poll_within(env->cq, &wc, 0.05));
    RETURNS(0, ibv_destroy_qp(qp));
    RETURNS(0, ibv_destroy_qp(peer));
}

/* Random attributes give an errno or a completion. Pointers are valid, because no library can check them. */
static void random_requests(const struct env *env)
{
    srand(20);
    for (int round = 0; round < 300; round++) {
        enum ibv_qp_type type = (enum ibv_qp_type[]){IBV_QPT_RC, IBV_QPT_UC, IBV_QPT_UD}[rand() % 3];
        struct ibv_qp *qp = env_qp(env, type), *peer = env_qp(env, type);
        env_connect(env, qp, peer);
        struct ibv_qp_attr attr = env_attr(env, peer->qp_num);
        struct ibv_ah *ah = ibv_create_ah(env->pd, &attr.ah_attr);
        for (int step = 0; step < 20; step++) {
            struct ibv_sge list[ENV_SGES];
            for (int i = 0; i < ENV_SGES; i++) {
                list[i] = sge_of(env, (uint32_t)rand() % 64);
                if (rand() % 4 == 0)
                    list[i].lkey = (uint32_t)rand();
                if (rand() % 4 == 0)
                    list[i].addr += (uint64_t)rand() << rand() % 40;
            }
            struct ibv_send_wr wr = {.wr_id = 1, .sg_list = list, .num_sge = rand() % 5 - 1, .opcode = (enum ibv_wr_opcode)(rand() % 20)}, *bad;
            wr.send_flags = (unsigned)rand() % 64 & ~IBV_SEND_INLINE; /* its address must be valid */
            wr.imm_data = (uint32_t)rand();
            wr.wr.rdma.remote_addr = (uintptr_t)env->buffer + (uint32_t)rand() % ENV_BYTES;
            wr.wr.rdma.rkey = rand() % 4 == 0 ? (uint32_t)rand() : env->mr->rkey;
            if (type == IBV_QPT_UD)
                wr.wr.ud.ah = ah, wr.wr.ud.remote_qpn = rand() % 2 ? peer->qp_num : (uint32_t)rand();
            if (wr.opcode == IBV_WR_BIND_MW)
                wr.bind_mw.mw = NULL;
            int code = ibv_post_send(qp, &wr, &bad);
            CHECK(code == 0 || ((code == EINVAL || code == ENOMEM) && bad == &wr));
            struct ibv_recv_wr receive = {.wr_id = 2, .sg_list = list, .num_sge = rand() % 5 - 1}, *bad_receive;
            code = ibv_post_recv(peer, &receive, &bad_receive);
            CHECK(code == 0 || ((code == EINVAL || code == ENOMEM) && bad_receive == &receive));
            struct ibv_wc wc[4];
            CHECK(ibv_poll_cq(env->cq, 4, wc) >= 0);
        }
        RETURNS(0, ibv_destroy_ah(ah));
        RETURNS(0, ibv_destroy_qp(qp));
        RETURNS(0, ibv_destroy_qp(peer));
    }
}

int main(void)
{
    struct env env = env_open();
    env_nonblocking(env.context->async_fd);
    states(&env);
    sends(&env);
    lists(&env);
    full_queue(&env);
    other_services(&env);
    local_memory(&env);
    remote_memory(&env);
    builder(&env);
    builder_with_full_queue(&env);
    random_requests(&env);
    env_close(&env);
    return check_end();
}
