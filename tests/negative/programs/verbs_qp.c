/*
 * verbs_qp: tests the creation of queue pairs, and every transition and attribute of ibv_modify_qp.
 *
 * The table of transitions is a second copy from the specification (IBTA volume 1, table "QP state transition
 * properties"). A test with the library's own table would detect no error in it.
 */
#include "check.h"
#include "env.h"

#include <stdlib.h>

#define CREATION_REFUSED(wanted, change)                                           \
    do {                                                                           \
        struct ibv_qp_init_attr init = env_init(env, IBV_QPT_RC);                  \
        change;                                                                    \
        errno = 0;                                                                 \
        struct ibv_qp *qp = ibv_create_qp(env->pd, &init);                         \
        check_errno(qp == NULL, errno, (wanted), __FILE__, __LINE__, #change);     \
    } while (0)

static void creation(const struct env *env, struct ibv_context *other)
{
    struct ibv_qp_init_attr good = env_init(env, IBV_QPT_RC);
    FAILS(EINVAL, ibv_create_qp(NULL, &good));
    FAILS(EINVAL, ibv_create_qp(env->pd, NULL));
    CREATION_REFUSED(EINVAL, init.send_cq = NULL);
    CREATION_REFUSED(EINVAL, init.recv_cq = NULL);
    CREATION_REFUSED(EINVAL, init.qp_type = (enum ibv_qp_type)0);
    CREATION_REFUSED(EINVAL, init.qp_type = (enum ibv_qp_type)99);
    CREATION_REFUSED(EINVAL, init.qp_type = (enum ibv_qp_type)-1);
    CREATION_REFUSED(EOPNOTSUPP, init.qp_type = IBV_QPT_RAW_PACKET);
    CREATION_REFUSED(EINVAL, init.qp_type = IBV_QPT_XRC_RECV);
    CREATION_REFUSED(EOPNOTSUPP, init.qp_type = IBV_QPT_DRIVER);

    uint32_t most_wr = (uint32_t)env->attr.max_qp_wr, most_sges = (uint32_t)env->attr.max_sge;
    CREATION_REFUSED(EINVAL, init.cap.max_send_wr = most_wr + 1);
    CREATION_REFUSED(EINVAL, init.cap.max_recv_wr = most_wr + 1);
    CREATION_REFUSED(EINVAL, init.cap.max_send_wr = UINT32_MAX);
    CREATION_REFUSED(EINVAL, init.cap.max_recv_wr = UINT32_MAX);
    CREATION_REFUSED(EINVAL, init.cap.max_send_sge = most_sges + 1);
    CREATION_REFUSED(EINVAL, init.cap.max_recv_sge = most_sges + 1);
    CREATION_REFUSED(EINVAL, init.cap.max_send_sge = UINT32_MAX);
    CREATION_REFUSED(EINVAL, init.cap.max_recv_sge = UINT32_MAX);
    CREATION_REFUSED(EINVAL, init.cap.max_inline_data = UINT32_MAX);

    /* Objects of another device. */
    struct ibv_cq *cq = ibv_create_cq(other, 4, NULL, NULL, 0);
    struct ibv_pd *pd = ibv_alloc_pd(other);
    struct ibv_srq_init_attr srq_init = {.attr = {.max_wr = 4, .max_sge = 1}};
    struct ibv_srq *foreign = ibv_create_srq(pd, &srq_init), *srq = ibv_create_srq(env->pd, &srq_init);
    CREATION_REFUSED(EINVAL, init.send_cq = cq);
    CREATION_REFUSED(EINVAL, init.recv_cq = cq);
    CREATION_REFUSED(EINVAL, init.srq = foreign);
    /* ibv_create_qp(3): only RC and UD queue pairs may use a shared receive queue. */
    CREATION_REFUSED(EINVAL, init.srq = srq; init.qp_type = IBV_QPT_UC);

    /* With a shared queue the sizes of the queue pair's own receive queue are ignored, even if invalid. */
    good.srq = srq, good.cap.max_recv_wr = UINT32_MAX, good.cap.max_recv_sge = UINT32_MAX;
    struct ibv_qp *qp = ibv_create_qp(env->pd, &good);
    CHECK(qp != NULL);
    struct ibv_recv_wr wr = {.wr_id = 1}, *bad = NULL;
    RETURNS(EINVAL, ibv_post_recv(qp, &wr, &bad));
    CHECK(bad == &wr);
    RETURNS(0, ibv_destroy_qp(qp));
    RETURNS(EINVAL, ibv_destroy_qp(NULL));
    RETURNS(0, ibv_destroy_srq(srq));
    RETURNS(0, ibv_destroy_srq(foreign));
    RETURNS(0, ibv_dealloc_pd(pd));
    RETURNS(0, ibv_destroy_cq(cq));
}

static struct ibv_qp_init_attr_ex extended_init(const struct env *env, enum ibv_qp_type type)
{
    struct ibv_qp_init_attr plain = env_init(env, type);
    return (struct ibv_qp_init_attr_ex){
        .send_cq = plain.send_cq,
        .recv_cq = plain.recv_cq,
        .cap = plain.cap,
        .qp_type = type,
        .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
        .pd = env->pd,
        .send_ops_flags = IBV_QP_EX_WITH_SEND,
    };
}

static void extended_creation(const struct env *env)
{
    const struct ibv_qp_init_attr_ex good = extended_init(env, IBV_QPT_RC);
    struct ibv_qp_init_attr_ex init = good;
    init.comp_mask = IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    FAILS(EINVAL, ibv_create_qp_ex(env->context, &init));
    init = good, init.pd = NULL;
    FAILS(EINVAL, ibv_create_qp_ex(env->context, &init));
    init = good, init.comp_mask |= IBV_QP_INIT_ATTR_MAX_TSO_HEADER, init.max_tso_header = 64;
    FAILS(EOPNOTSUPP, ibv_create_qp_ex(env->context, &init));
    init = good, init.comp_mask |= IBV_QP_INIT_ATTR_RX_HASH;
    FAILS(EOPNOTSUPP, ibv_create_qp_ex(env->context, &init));
    init = good, init.comp_mask |= IBV_QP_INIT_ATTR_CREATE_FLAGS, init.create_flags = IBV_QP_CREATE_SOURCE_QPN;
    FAILS(EOPNOTSUPP, ibv_create_qp_ex(env->context, &init));
    init = good, init.send_ops_flags = IBV_QP_EX_WITH_TSO;
    FAILS(EOPNOTSUPP, ibv_create_qp_ex(env->context, &init));
    init = good, init.send_ops_flags = 1ull << 63;
    FAILS(EOPNOTSUPP, ibv_create_qp_ex(env->context, &init));
    init = extended_init(env, IBV_QPT_UD), init.send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE;
    FAILS(EOPNOTSUPP, ibv_create_qp_ex(env->context, &init));
    init = extended_init(env, IBV_QPT_UC), init.send_ops_flags = IBV_QP_EX_WITH_RDMA_READ;
    FAILS(EOPNOTSUPP, ibv_create_qp_ex(env->context, &init));

    struct ibv_qp *plain = env_qp(env, IBV_QPT_RC);
    CHECK(ibv_qp_to_qp_ex(plain) == NULL);
    CHECK(ibv_qp_to_qp_ex(NULL) == NULL);
    RETURNS(0, ibv_destroy_qp(plain));
}

/* ---- transitions ------------------------------------------------------------------------------------------------ */

enum { RC, UC, UD, KINDS };
static const enum ibv_qp_type KIND[KINDS] = {IBV_QPT_RC, IBV_QPT_UC, IBV_QPT_UD};

struct transition {
    enum ibv_qp_state from, to;
    int required[KINDS];
    int optional[KINDS];
};

enum {
    PKEY = IBV_QP_PKEY_INDEX,
    ACCESS = IBV_QP_ACCESS_FLAGS,
    MIGRATION = IBV_QP_ALT_PATH | IBV_QP_PATH_MIG_STATE,
    RUNNING = IBV_QP_CUR_STATE | ACCESS | MIGRATION,
    PATH = IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN,
};

static const struct transition TABLE[] = {
    {IBV_QPS_RESET, IBV_QPS_INIT, {PKEY | IBV_QP_PORT | ACCESS, PKEY | IBV_QP_PORT | ACCESS, PKEY | IBV_QP_PORT | IBV_QP_QKEY}, {0}},
    {IBV_QPS_INIT, IBV_QPS_INIT, {0}, {PKEY | IBV_QP_PORT | ACCESS, PKEY | IBV_QP_PORT | ACCESS, PKEY | IBV_QP_PORT | IBV_QP_QKEY}},
    {IBV_QPS_INIT,
     IBV_QPS_RTR,
     {PATH | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER, PATH, 0},
     {IBV_QP_ALT_PATH | ACCESS | PKEY, IBV_QP_ALT_PATH | ACCESS | PKEY, PKEY | IBV_QP_QKEY}},
    {IBV_QPS_RTR,
     IBV_QPS_RTS,
     {IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC, IBV_QP_SQ_PSN, IBV_QP_SQ_PSN},
     {RUNNING | IBV_QP_MIN_RNR_TIMER, RUNNING, IBV_QP_CUR_STATE | IBV_QP_QKEY}},
    {IBV_QPS_RTS, IBV_QPS_RTS, {0}, {RUNNING | IBV_QP_MIN_RNR_TIMER, RUNNING, IBV_QP_CUR_STATE | IBV_QP_QKEY}},
    {IBV_QPS_RTS, IBV_QPS_SQD, {0}, {IBV_QP_EN_SQD_ASYNC_NOTIFY, IBV_QP_EN_SQD_ASYNC_NOTIFY, IBV_QP_EN_SQD_ASYNC_NOTIFY}},
    {IBV_QPS_SQD, IBV_QPS_RTS, {0}, {RUNNING | IBV_QP_MIN_RNR_TIMER, RUNNING, IBV_QP_CUR_STATE | IBV_QP_QKEY}},
    {IBV_QPS_SQD,
     IBV_QPS_SQD,
     {0},
     {IBV_QP_PORT | IBV_QP_AV | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC |
          IBV_QP_MAX_DEST_RD_ATOMIC | ACCESS | PKEY | IBV_QP_MIN_RNR_TIMER | MIGRATION,
      IBV_QP_AV | ACCESS | PKEY | MIGRATION,
      PKEY | IBV_QP_QKEY}},
    {IBV_QPS_SQE, IBV_QPS_RTS, {0}, {0, IBV_QP_CUR_STATE | ACCESS, IBV_QP_CUR_STATE | IBV_QP_QKEY}},
};

/* Providers differ in these transitions, and no program depends on them. */
static const int NO_MATTER = IBV_QP_CUR_STATE | IBV_QP_RATE_LIMIT;

static const struct transition *find(int kind, enum ibv_qp_state from, enum ibv_qp_state to, struct transition *room)
{
    if (kind == RC && (from == IBV_QPS_SQE || to == IBV_QPS_SQE))
        return NULL;
    /* The specification lets any state go to ERR; Linux excepts RESET, and programs rely on that. */
    if (to == IBV_QPS_RESET || (to == IBV_QPS_ERR && from != IBV_QPS_RESET)) {
        *room = (struct transition){.from = from, .to = to};
        return room;
    }
    for (size_t i = 0; i < sizeof TABLE / sizeof TABLE[0]; i++)
        if (TABLE[i].from == from && TABLE[i].to == to)
            return &TABLE[i];
    return NULL;
}

static enum ibv_qp_state state_of(struct ibv_qp *qp)
{
    struct ibv_qp_attr attr;
    struct ibv_qp_init_attr init;
    if (ibv_query_qp(qp, &attr, IBV_QP_STATE, &init) != 0)
        die("a queue pair cannot be queried");
    return attr.qp_state;
}

/* Creates a queue pair in a state. A send with a local error sets SQE. */
static struct ibv_qp *qp_in(const struct env *env, int kind, enum ibv_qp_state state)
{
    struct ibv_qp *qp = env_qp(env, KIND[kind]);
    if (state == IBV_QPS_ERR) {
        env_advance(env, qp, qp->qp_num, IBV_QPS_INIT);
        struct ibv_qp_attr attr = {.qp_state = IBV_QPS_ERR};
        RETURNS(0, ibv_modify_qp(qp, &attr, IBV_QP_STATE));
    } else if (state == IBV_QPS_SQE) {
        env_advance(env, qp, qp->qp_num, IBV_QPS_RTS);
        struct ibv_qp_attr attr = env_attr(env, qp->qp_num);
        struct ibv_ah *ah = ibv_create_ah(env->pd, &attr.ah_attr);
        struct ibv_sge sge = {.addr = (uintptr_t)env->buffer, .length = 8, .lkey = ~env->mr->lkey};
        struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND}, *bad;
        wr.wr.ud.ah = ah, wr.wr.ud.remote_qpn = qp->qp_num, wr.wr.ud.remote_qkey = ENV_QKEY;
        RETURNS(0, ibv_post_send(qp, &wr, &bad));
        CHECK(env_poll(env->cq).status == IBV_WC_LOC_PROT_ERR);
        RETURNS(0, ibv_destroy_ah(ah));
    } else if (state != IBV_QPS_RESET) {
        env_advance(env, qp, qp->qp_num, state);
    }
    if (state_of(qp) != state)
        die("a queue pair does not reach state %d", state);
    return qp;
}

/* Tries a transition with a mask. Returns the queue pair if the transition failed, so that it is unchanged. */
static struct ibv_qp *try_mask(const struct env *env, struct ibv_qp *qp, int kind, enum ibv_qp_state from,
                               enum ibv_qp_state to, int mask, bool allowed)
{
    if (qp == NULL)
        qp = qp_in(env, kind, from);
    struct ibv_qp_attr attr = env_attr(env, qp->qp_num);
    attr.qp_state = to, attr.cur_qp_state = from;
    int code = ibv_modify_qp(qp, &attr, IBV_QP_STATE | mask);
    enum ibv_qp_state reached = state_of(qp);
    bool right = allowed ? code == 0 && reached == to : code == EINVAL && reached == from;
    if (!count_check(right, __FILE__, __LINE__, allowed ? "should be allowed" : "should be refused"))
        printf("type %d, state %d to %d with mask %#x: code %d, now in state %d\n", KIND[kind], from, to, mask, code, reached);
    if (code != 0)
        return qp;
    RETURNS(0, ibv_destroy_qp(qp));
    return NULL;
}

/* Tests a transition with its required attributes, without each of them, and with each further attribute. */
static void transition(const struct env *env, int kind, enum ibv_qp_state from, enum ibv_qp_state to)
{
    struct transition room;
    const struct transition *entry = find(kind, from, to, &room);
    int required = entry == NULL ? 0 : entry->required[kind], optional = entry == NULL ? 0 : entry->optional[kind];
    struct ibv_qp *qp = NULL;
    for (int bit = IBV_QP_CUR_STATE; bit <= IBV_QP_RATE_LIMIT; bit <<= 1) {
        if (bit & NO_MATTER)
            continue;
        bool allowed = entry != NULL && (bit & optional);
        if (bit & required)
            qp = try_mask(env, qp, kind, from, to, required & ~bit, false);
        else
            qp = try_mask(env, qp, kind, from, to, required | bit, allowed);
    }
    qp = try_mask(env, qp, kind, from, to, required, entry != NULL);
    if (qp != NULL)
        RETURNS(0, ibv_destroy_qp(qp));
}

static void transitions(const struct env *env)
{
    for (int kind = 0; kind < KINDS; kind++)
        for (int from = IBV_QPS_RESET; from <= IBV_QPS_ERR; from++)
            for (int to = IBV_QPS_RESET; to <= IBV_QPS_ERR; to++)
                if (kind != RC || from != IBV_QPS_SQE)
                    transition(env, kind, from, to);
}

/* ---- values ----------------------------------------------------------------------------------------------------- */

#define VALUE_REFUSED(from, to, change)                                                             \
    do {                                                                                            \
        struct ibv_qp *qp = qp_in(env, RC, (from));                                                 \
        struct ibv_qp_attr attr = env_attr(env, qp->qp_num);                                        \
        attr.qp_state = (to);                                                                       \
        change;                                                                                     \
        int code = ibv_modify_qp(qp, &attr, env_mask(IBV_QPT_RC, (to)));                            \
        if (!count_check(code == EINVAL && state_of(qp) == (from), __FILE__, __LINE__, #change))     \
            printf("code %d\n", code);                                                              \
        RETURNS(0, ibv_destroy_qp(qp));                                                             \
    } while (0)

static void values(const struct env *env)
{
    VALUE_REFUSED(IBV_QPS_RESET, IBV_QPS_INIT, attr.port_num = 0);
    VALUE_REFUSED(IBV_QPS_RESET, IBV_QPS_INIT, attr.port_num = ENV_PORT + 1);
    VALUE_REFUSED(IBV_QPS_RESET, IBV_QPS_INIT, attr.pkey_index = 1);
    VALUE_REFUSED(IBV_QPS_RESET, IBV_QPS_INIT, attr.qp_access_flags = 1u << 31);
    VALUE_REFUSED(IBV_QPS_INIT, IBV_QPS_RTR, attr.path_mtu = (enum ibv_mtu)0);
    VALUE_REFUSED(IBV_QPS_INIT, IBV_QPS_RTR, attr.path_mtu = (enum ibv_mtu)6);
    VALUE_REFUSED(IBV_QPS_INIT, IBV_QPS_RTR, attr.path_mtu = (enum ibv_mtu)-1);
    VALUE_REFUSED(IBV_QPS_INIT, IBV_QPS_RTR, attr.dest_qp_num = 1u << 24);
    VALUE_REFUSED(IBV_QPS_INIT, IBV_QPS_RTR, attr.max_dest_rd_atomic = (uint8_t)(env->attr.max_qp_rd_atom + 1));
    VALUE_REFUSED(IBV_QPS_INIT, IBV_QPS_RTR, attr.min_rnr_timer = 32);
    VALUE_REFUSED(IBV_QPS_INIT, IBV_QPS_RTR, attr.ah_attr.is_global = 0);
    VALUE_REFUSED(IBV_QPS_INIT, IBV_QPS_RTR, attr.ah_attr.port_num = 0);
    VALUE_REFUSED(IBV_QPS_INIT, IBV_QPS_RTR, attr.ah_attr.port_num = ENV_PORT + 1);
    VALUE_REFUSED(IBV_QPS_INIT, IBV_QPS_RTR, attr.ah_attr.grh.sgid_index = 255);
    VALUE_REFUSED(IBV_QPS_INIT, IBV_QPS_RTR, attr.ah_attr.grh.sgid_index = (uint8_t)env->port.gid_tbl_len);
    VALUE_REFUSED(IBV_QPS_INIT, IBV_QPS_RTR, memset(&attr.ah_attr.grh.dgid, 0, 16));
    VALUE_REFUSED(IBV_QPS_RTR, IBV_QPS_RTS, attr.timeout = 32);
    VALUE_REFUSED(IBV_QPS_RTR, IBV_QPS_RTS, attr.retry_cnt = 8);
    VALUE_REFUSED(IBV_QPS_RTR, IBV_QPS_RTS, attr.retry_cnt = 255);
    VALUE_REFUSED(IBV_QPS_RTR, IBV_QPS_RTS, attr.rnr_retry = 8);
    VALUE_REFUSED(IBV_QPS_RTR, IBV_QPS_RTS, attr.max_rd_atomic = (uint8_t)(env->attr.max_qp_init_rd_atom + 1));
    VALUE_REFUSED(IBV_QPS_RESET, (enum ibv_qp_state)7, (void)attr);
    VALUE_REFUSED(IBV_QPS_RESET, (enum ibv_qp_state)-1, (void)attr);

    struct ibv_qp *qp = qp_in(env, RC, IBV_QPS_RTS);
    struct ibv_qp_attr attr = env_attr(env, qp->qp_num);
    struct ibv_qp_init_attr init;
    attr.cur_qp_state = IBV_QPS_INIT;
    RETURNS(EINVAL, ibv_modify_qp(qp, &attr, IBV_QP_CUR_STATE | IBV_QP_MIN_RNR_TIMER));
    RETURNS(EINVAL, ibv_modify_qp(qp, &attr, 1 << 30));
    RETURNS(EINVAL, ibv_modify_qp(qp, &attr, -1));
    RETURNS(EINVAL, ibv_modify_qp(qp, NULL, IBV_QP_STATE));
    RETURNS(EINVAL, ibv_modify_qp(NULL, &attr, IBV_QP_STATE));
    RETURNS(EINVAL, ibv_query_qp(NULL, &attr, 0, &init));
    RETURNS(EINVAL, ibv_query_qp(qp, NULL, 0, &init));
    RETURNS(0, ibv_destroy_qp(qp));
}

/* Tests a path MTU above the port's, if the runner has limited the port's MTU. */
static void path_mtu_above_the_ports(const struct env *env)
{
    for (int mtu = env->port.active_mtu + 1; mtu <= IBV_MTU_4096; mtu++)
        VALUE_REFUSED(IBV_QPS_INIT, IBV_QPS_RTR, attr.path_mtu = (enum ibv_mtu)mtu);
}

/* Random attributes and masks give success or an errno, and the queue pair can still be destroyed. */
static void random_attributes(const struct env *env)
{
    srand(20);
    for (int round = 0; round < 2000; round++) {
        struct ibv_qp *qp = env_qp(env, KIND[rand() % KINDS]);
        for (int step = 0; step < 8; step++) {
            struct ibv_qp_attr attr;
            for (size_t i = 0; i < sizeof attr; i++)
                ((uint8_t *)&attr)[i] = (uint8_t)(rand() >> 7);
            int mask = rand() ^ rand() << 16;
            if (step % 2 == 0) {
                attr.qp_state = (enum ibv_qp_state)(rand() % 8);
                mask = env_mask(qp->qp_type, attr.qp_state);
            }
            int code = ibv_modify_qp(qp, &attr, mask);
            CHECK(code == 0 || code == EINVAL || code == EOPNOTSUPP);
        }
        RETURNS(0, ibv_destroy_qp(qp));
    }
}

int main(void)
{
    struct env env = env_open();
    struct ibv_context *other = ibv_open_device(env.context->device);
    creation(&env, other);
    extended_creation(&env);
    transitions(&env);
    values(&env);
    path_mtu_above_the_ports(&env);
    random_attributes(&env);
    CHECK(ibv_close_device(other) == 0);
    env_close(&env);
    return check_end();
}
