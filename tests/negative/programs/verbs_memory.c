/*
 * verbs_memory: tests invalid regions, windows and advice.
 */
#include "check.h"
#include "env.h"

#include <sys/mman.h>

static const size_t PAGE = 4096;

static uint8_t *map(size_t length)
{
    uint8_t *memory = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED)
        die("memory cannot be mapped");
    return memory;
}

static void regions(const struct env *env)
{
    struct ibv_pd *pd = env->pd;
    uint8_t *memory = map(3 * PAGE);
    FAILS(EINVAL, ibv_reg_mr(NULL, memory, PAGE, 0));
    FAILS(EINVAL, ibv_reg_mr(pd, memory, SIZE_MAX, 0));
    FAILS(EINVAL, ibv_reg_mr(pd, (void *)(UINTPTR_MAX - PAGE), 2 * PAGE, 0));
    FAILS(EINVAL, ibv_reg_mr_iova(pd, memory, 2 * PAGE, UINT64_MAX - PAGE, 0));

    /* Remote write access needs local write access. */
    FAILS(EINVAL, ibv_reg_mr(pd, memory, PAGE, IBV_ACCESS_REMOTE_WRITE));
    FAILS(EINVAL, ibv_reg_mr(pd, memory, PAGE, IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_REMOTE_READ));
    /* Unknown flags are invalid, except those of the optional range. */
    FAILS(EINVAL, ibv_reg_mr(pd, memory, PAGE, 1 << 10));
    FAILS(EINVAL, ibv_reg_mr(pd, memory, PAGE, 1 << 19));
    FAILS(EINVAL, ibv_reg_mr_iova2(pd, memory, PAGE, 0, 1u << 31));
    struct ibv_mr *mr = ibv_reg_mr_iova2(pd, memory, PAGE, 0, IBV_ACCESS_OPTIONAL_RANGE);
    CHECK(mr != NULL);
    RETURNS(0, ibv_dereg_mr(mr));

    /* Unmapped or partly unmapped memory cannot be registered. */
    FAILS(EFAULT, ibv_reg_mr(pd, NULL, PAGE, 0));
    munmap(memory + PAGE, PAGE);
    FAILS(EFAULT, ibv_reg_mr(pd, memory + PAGE, 1, 0));
    FAILS(EFAULT, ibv_reg_mr(pd, memory, PAGE + 1, 0));
    FAILS(EFAULT, ibv_reg_mr(pd, memory, 3 * PAGE, IBV_ACCESS_LOCAL_WRITE));
    FAILS(EFAULT, ibv_reg_mr(pd, memory, (size_t)1 << 46, 0));
    mr = ibv_reg_mr(pd, memory, 3 * PAGE, IBV_ACCESS_ON_DEMAND);
    CHECK(mr != NULL);
    RETURNS(0, ibv_dereg_mr(mr));

    /* The whole address space needs on-demand paging. */
    FAILS(EINVAL, ibv_reg_mr(pd, memory, SIZE_MAX, IBV_ACCESS_ON_DEMAND));
    mr = ibv_reg_mr(pd, NULL, SIZE_MAX, IBV_ACCESS_ON_DEMAND | IBV_ACCESS_LOCAL_WRITE);
    CHECK(mr != NULL);
    RETURNS(0, ibv_dereg_mr(mr));
    RETURNS(EINVAL, ibv_dereg_mr(NULL));
    munmap(memory, 3 * PAGE);
}

/* A failed change leaves the region unchanged: its keys, its range, and its use. */
static void changed_regions(const struct env *env)
{
    enum { PD = IBV_REREG_MR_CHANGE_PD, PLACE = IBV_REREG_MR_CHANGE_TRANSLATION, ACCESS = IBV_REREG_MR_CHANGE_ACCESS };
    uint8_t *memory = map(3 * PAGE);
    munmap(memory + 2 * PAGE, PAGE);
    struct ibv_mr *mr = ibv_reg_mr(env->pd, memory, PAGE, ENV_ACCESS);
    struct ibv_mr before = *mr;
    MINUS_ONE(EINVAL, ibv_rereg_mr(NULL, PLACE, NULL, memory, PAGE, 0));
    MINUS_ONE(EINVAL, ibv_rereg_mr(mr, 0, NULL, NULL, 0, 0));
    MINUS_ONE(EINVAL, ibv_rereg_mr(mr, 8, env->pd, memory, PAGE, 0));
    MINUS_ONE(EINVAL, ibv_rereg_mr(mr, PD, NULL, NULL, 0, 0));
    MINUS_ONE(EINVAL, ibv_rereg_mr(mr, PLACE, NULL, NULL, PAGE, 0));
    MINUS_ONE(EINVAL, ibv_rereg_mr(mr, PLACE, NULL, memory, 0, 0));
    MINUS_ONE(EFAULT, ibv_rereg_mr(mr, PLACE, NULL, memory, 3 * PAGE, 0));
    MINUS_ONE(EINVAL, ibv_rereg_mr(mr, PLACE, NULL, memory, PAGE, IBV_ACCESS_LOCAL_WRITE));
    MINUS_ONE(EINVAL, ibv_rereg_mr(mr, ACCESS, NULL, NULL, 0, IBV_ACCESS_REMOTE_WRITE));
    MINUS_ONE(EINVAL, ibv_rereg_mr(mr, ACCESS, NULL, NULL, 0, 1 << 10));
    struct ibv_context *other = ibv_open_device(env->context->device);
    struct ibv_pd *foreign = ibv_alloc_pd(other);
    MINUS_ONE(EINVAL, ibv_rereg_mr(mr, PD, foreign, NULL, 0, 0));
    RETURNS(0, ibv_dealloc_pd(foreign));
    CHECK(ibv_close_device(other) == 0);
    CHECK(memcmp(&before, mr, offsetof(struct ibv_mr, rkey) + sizeof before.rkey) == 0); /* padding follows `rkey` */

    struct ibv_qp *left = env_qp(env, IBV_QPT_RC), *right = env_qp(env, IBV_QPT_RC);
    env_connect(env, left, right);
    struct ibv_sge sge = {.addr = (uintptr_t)env->buffer, .length = 64, .lkey = env->mr->lkey};
    struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE}, *bad;
    wr.wr.rdma.remote_addr = (uintptr_t)memory, wr.wr.rdma.rkey = mr->rkey;
    RETURNS(0, ibv_post_send(left, &wr, &bad));
    CHECK(env_poll(env->cq).status == IBV_WC_SUCCESS);
    RETURNS(0, ibv_destroy_qp(left));
    RETURNS(0, ibv_destroy_qp(right));
    RETURNS(0, ibv_dereg_mr(mr));
    munmap(memory, 3 * PAGE);
}

static int advise(const struct env *env, enum ibv_advise_mr_advice advice, uint32_t flags, uint32_t lkey, void *addr,
                  uint32_t length)
{
    struct ibv_sge sge = {.addr = (uintptr_t)addr, .length = length, .lkey = lkey};
    return ibv_advise_mr(env->pd, advice, flags, &sge, 1);
}

static void advice(const struct env *env)
{
    const enum ibv_advise_mr_advice READ = IBV_ADVISE_MR_ADVICE_PREFETCH;
    const enum ibv_advise_mr_advice WRITE = IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE;
    uint8_t *memory = map(2 * PAGE);
    struct ibv_mr *mr = ibv_reg_mr(env->pd, memory, 2 * PAGE, IBV_ACCESS_ON_DEMAND);
    struct ibv_pd *pd = ibv_alloc_pd(env->context);
    struct ibv_mr *foreign = ibv_reg_mr(pd, memory, 2 * PAGE, IBV_ACCESS_ON_DEMAND | IBV_ACCESS_LOCAL_WRITE);
    RETURNS(0, advise(env, READ, IBV_ADVISE_MR_FLAG_FLUSH, mr->lkey, memory, 2 * PAGE));
    RETURNS(EOPNOTSUPP, advise(env, (enum ibv_advise_mr_advice)7, 0, mr->lkey, memory, PAGE));
    RETURNS(EINVAL, advise(env, READ, 2, mr->lkey, memory, PAGE));
    RETURNS(ENOENT, advise(env, READ, 0, ~mr->lkey, memory, PAGE));
    RETURNS(EPERM, advise(env, READ, 0, foreign->lkey, memory, PAGE));
    RETURNS(EPERM, advise(env, WRITE, 0, mr->lkey, memory, PAGE));
    RETURNS(EFAULT, advise(env, READ, 0, mr->lkey, memory, 2 * PAGE + 1));
    RETURNS(EFAULT, advise(env, READ, 0, mr->lkey, memory - 1, PAGE));
    RETURNS(EINVAL, ibv_advise_mr(env->pd, READ, 0, NULL, 1));
    struct ibv_sge sge = {0};
    RETURNS(EINVAL, ibv_advise_mr(env->pd, READ, 0, &sge, 0));
    munmap(memory + PAGE, PAGE);
    RETURNS(EFAULT, advise(env, READ, IBV_ADVISE_MR_FLAG_FLUSH, mr->lkey, memory, 2 * PAGE));
    RETURNS(0, ibv_dereg_mr(mr));
    RETURNS(0, ibv_dereg_mr(foreign));
    RETURNS(0, ibv_dealloc_pd(pd));
    munmap(memory, PAGE);
}

static struct ibv_mw_bind bind_of(struct ibv_mr *mr, uint64_t addr, uint64_t length, unsigned access)
{
    return (struct ibv_mw_bind){
        .wr_id = 7,
        .send_flags = IBV_SEND_SIGNALED,
        .bind_info = {.mr = mr, .addr = addr, .length = length, .mw_access_flags = access},
    };
}

/* Binds a window of type 1 and returns the status of the bind. */
static enum ibv_wc_status outcome(const struct env *env, struct ibv_mw *mw, struct ibv_mw_bind *bind)
{
    struct ibv_qp *left = env_qp(env, IBV_QPT_RC), *right = env_qp(env, IBV_QPT_RC);
    env_connect(env, left, right);
    int code = ibv_bind_mw(left, mw, bind);
    if (code != 0)
        die("the bind is not posted: %s", strerror(code));
    struct ibv_wc wc = env_poll(env->cq);
    CHECK(wc.wr_id == 7 && (wc.status != IBV_WC_SUCCESS || wc.opcode == IBV_WC_BIND_MW));
    RETURNS(0, ibv_destroy_qp(left));
    RETURNS(0, ibv_destroy_qp(right));
    return wc.status;
}

static void invalid_binds(const struct env *env)
{
    FAILS(EINVAL, ibv_alloc_mw(env->pd, (enum ibv_mw_type)0));
    FAILS(EINVAL, ibv_alloc_mw(env->pd, (enum ibv_mw_type)3));

    struct ibv_pd *pd = ibv_alloc_pd(env->context);
    struct ibv_mr *foreign = ibv_reg_mr(pd, env->buffer, ENV_BYTES, ENV_ACCESS);
    struct ibv_mr *unbindable = ibv_reg_mr(env->pd, env->buffer, ENV_BYTES, ENV_ACCESS & ~IBV_ACCESS_MW_BIND);
    struct ibv_mw *first = ibv_alloc_mw(env->pd, IBV_MW_TYPE_1), *second = ibv_alloc_mw(env->pd, IBV_MW_TYPE_2);
    struct ibv_mw *strange = ibv_alloc_mw(pd, IBV_MW_TYPE_1);
    struct ibv_qp *qp = env_qp(env, IBV_QPT_RC), *datagram = env_qp(env, IBV_QPT_UD);
    env_advance(env, qp, qp->qp_num, IBV_QPS_RTS);
    env_advance(env, datagram, 0, IBV_QPS_RTS);
    struct ibv_qp *reset = env_qp(env, IBV_QPT_RC);
    uint64_t addr = (uintptr_t)env->buffer;

    struct ibv_mw_bind bind = bind_of(env->mr, addr, PAGE, IBV_ACCESS_REMOTE_READ);
    RETURNS(EINVAL, ibv_bind_mw(qp, second, &bind));
    RETURNS(EINVAL, ibv_bind_mw(reset, first, &bind));
    RETURNS(EINVAL, ibv_bind_mw(datagram, first, &bind));
    RETURNS(EPERM, ibv_bind_mw(qp, strange, &bind));
    bind = bind_of(foreign, addr, PAGE, IBV_ACCESS_REMOTE_READ);
    RETURNS(EPERM, ibv_bind_mw(qp, first, &bind));
    bind = bind_of(NULL, addr, PAGE, IBV_ACCESS_REMOTE_READ);
    RETURNS(EINVAL, ibv_bind_mw(qp, first, &bind));
    CHECK(ibv_poll_cq(env->cq, 1, &(struct ibv_wc){0}) == 0);

    /* The execution of the bind detects these errors. */
    bind = bind_of(unbindable, addr, PAGE, IBV_ACCESS_REMOTE_READ);
    CHECK(outcome(env, first, &bind) == IBV_WC_MW_BIND_ERR);
    bind = bind_of(env->mr, addr + ENV_BYTES - PAGE, PAGE + 1, IBV_ACCESS_REMOTE_READ);
    CHECK(outcome(env, first, &bind) == IBV_WC_MW_BIND_ERR);
    bind = bind_of(env->mr, UINT64_MAX - 8, PAGE, IBV_ACCESS_REMOTE_READ);
    CHECK(outcome(env, first, &bind) == IBV_WC_MW_BIND_ERR);
    bind = bind_of(env->mr, addr, PAGE, 1u << 11);
    CHECK(outcome(env, first, &bind) == IBV_WC_MW_BIND_ERR);

    RETURNS(0, ibv_destroy_qp(qp));
    RETURNS(0, ibv_destroy_qp(datagram));
    RETURNS(0, ibv_destroy_qp(reset));
    RETURNS(0, ibv_dealloc_mw(first));
    RETURNS(0, ibv_dealloc_mw(second));
    RETURNS(0, ibv_dealloc_mw(strange));
    RETURNS(0, ibv_dereg_mr(foreign));
    RETURNS(0, ibv_dereg_mr(unbindable));
    RETURNS(0, ibv_dealloc_pd(pd));
}

/* A region with a bound window can be neither deregistered nor changed. */
static void windows_in_use(const struct env *env)
{
    struct ibv_mr *mr = ibv_reg_mr(env->pd, env->buffer, ENV_BYTES, ENV_ACCESS);
    struct ibv_mw *mw = ibv_alloc_mw(env->pd, IBV_MW_TYPE_1);
    struct ibv_mw_bind bind = bind_of(mr, (uintptr_t)env->buffer, PAGE, IBV_ACCESS_REMOTE_READ);
    CHECK(outcome(env, mw, &bind) == IBV_WC_SUCCESS);
    RETURNS(EBUSY, ibv_dereg_mr(mr));
    MINUS_ONE(EBUSY, ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, IBV_ACCESS_LOCAL_WRITE));
    RETURNS(0, ibv_dealloc_mw(mw));
    RETURNS(0, ibv_dereg_mr(mr));
}

int main(void)
{
    struct env env = env_open();
    regions(&env);
    changed_regions(&env);
    advice(&env);
    invalid_binds(&env);
    windows_in_use(&env);
    env_close(&env);
    return check_end();
}
