#include "env.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

static const double TIMEOUT_S = 10.0;

void die(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fprintf(stderr, " (errno: %s)\n", strerror(errno));
    exit(2);
}

double seconds_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

void env_nonblocking(int fd)
{
    if (fcntl(fd, F_SETFL, O_NONBLOCK) != 0)
        die("a descriptor does not become nonblocking");
}

struct env env_open(void)
{
    struct env env = {0};
    setvbuf(stdout, NULL, _IOLBF, 0); /* a crash loses no output */
    struct ibv_device **list = ibv_get_device_list(NULL);
    if (list == NULL || list[0] == NULL)
        die("no RDMA device");
    env.context = ibv_open_device(list[0]);
    if (env.context == NULL)
        die("the device does not open");
    ibv_free_device_list(list);
    if (ibv_query_device(env.context, &env.attr) != 0 || ibv_query_port(env.context, ENV_PORT, &env.port) != 0 ||
        ibv_query_gid(env.context, ENV_PORT, 0, &env.gid) != 0)
        die("the device cannot be queried");
    env.pd = ibv_alloc_pd(env.context);
    env.channel = ibv_create_comp_channel(env.context);
    env.cq = ibv_create_cq(env.context, 256, NULL, env.channel, 0);
    env.buffer = mmap(NULL, ENV_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (env.pd == NULL || env.channel == NULL || env.cq == NULL || env.buffer == MAP_FAILED)
        die("an object cannot be created");
    env.mr = ibv_reg_mr(env.pd, env.buffer, ENV_BYTES, ENV_ACCESS);
    if (env.mr == NULL)
        die("the buffer is not registered");
    return env;
}

void env_close(struct env *env)
{
    if (ibv_dereg_mr(env->mr) != 0 || ibv_destroy_cq(env->cq) != 0 || ibv_destroy_comp_channel(env->channel) != 0 ||
        ibv_dealloc_pd(env->pd) != 0 || ibv_close_device(env->context) != 0)
        die("an object is in use at the end");
    munmap(env->buffer, ENV_BYTES);
}

struct ibv_qp_init_attr env_init(const struct env *env, enum ibv_qp_type type)
{
    return (struct ibv_qp_init_attr){
        .send_cq = env->cq,
        .recv_cq = env->cq,
        .cap = {.max_send_wr = ENV_DEPTH,
                .max_recv_wr = ENV_DEPTH,
                .max_send_sge = ENV_SGES,
                .max_recv_sge = ENV_SGES,
                .max_inline_data = ENV_INLINE},
        .qp_type = type,
        .sq_sig_all = 1,
    };
}

struct ibv_qp *env_qp(const struct env *env, enum ibv_qp_type type)
{
    struct ibv_qp_init_attr init = env_init(env, type);
    struct ibv_qp *qp = ibv_create_qp(env->pd, &init);
    if (qp == NULL)
        die("no queue pair of type %d", type);
    return qp;
}

struct ibv_qp_attr env_attr(const struct env *env, uint32_t peer_qpn)
{
    return (struct ibv_qp_attr){
        .path_mtu = IBV_MTU_1024,
        .path_mig_state = IBV_MIG_MIGRATED,
        .qkey = ENV_QKEY,
        .rq_psn = ENV_PSN,
        .sq_psn = ENV_PSN,
        .dest_qp_num = peer_qpn,
        .qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC,
        .ah_attr = {.is_global = 1,
                    .port_num = ENV_PORT,
                    .grh = {.dgid = env->gid, .sgid_index = 0, .hop_limit = 64}},
        .alt_ah_attr = {.is_global = 1, .port_num = ENV_PORT, .grh = {.dgid = env->gid, .hop_limit = 64}},
        .pkey_index = 0,
        .max_rd_atomic = 4,
        .max_dest_rd_atomic = 4,
        .min_rnr_timer = 12,
        .port_num = ENV_PORT,
        .timeout = 14,
        .retry_cnt = 7,
        .rnr_retry = 7,
        .alt_port_num = ENV_PORT,
        .alt_timeout = 14,
    };
}

int env_mask(enum ibv_qp_type type, enum ibv_qp_state to)
{
    bool datagram = type == IBV_QPT_UD;
    bool is_requester = type == IBV_QPT_RC || type == IBV_QPT_XRC_SEND, is_responder = type == IBV_QPT_RC || type == IBV_QPT_XRC_RECV;
    switch (to) {
    case IBV_QPS_INIT:
        return IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | (datagram ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS);
    case IBV_QPS_RTR:
        return IBV_QP_STATE | (datagram ? 0 : IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN) |
               (is_responder ? IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER : 0);
    case IBV_QPS_RTS:
        return IBV_QP_STATE | IBV_QP_SQ_PSN |
               (is_requester ? IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC : 0) |
               (type == IBV_QPT_XRC_RECV ? IBV_QP_TIMEOUT : 0);
    default:
        return IBV_QP_STATE;
    }
}

void env_advance(const struct env *env, struct ibv_qp *qp, uint32_t peer_qpn, enum ibv_qp_state state)
{
    struct ibv_qp_attr attr = env_attr(env, peer_qpn);
    for (attr.qp_state = IBV_QPS_INIT; attr.qp_state <= state; attr.qp_state++) {
        int code = ibv_modify_qp(qp, &attr, env_mask(qp->qp_type, attr.qp_state));
        if (code != 0)
            die("queue pair of type %d does not go to state %d: %s", qp->qp_type, attr.qp_state, strerror(code));
    }
}

void env_connect(const struct env *env, struct ibv_qp *left, struct ibv_qp *right)
{
    env_advance(env, left, right->qp_num, IBV_QPS_RTS);
    env_advance(env, right, left->qp_num, IBV_QPS_RTS);
}

bool env_poll_within(struct ibv_cq *cq, struct ibv_wc *wc, double seconds)
{
    double start = seconds_now();
    for (;;) {
        int got = ibv_poll_cq(cq, 1, wc);
        if (got < 0)
            die("polling failed");
        if (got == 1)
            return true;
        if (seconds_now() - start > seconds)
            return false;
    }
}

struct ibv_wc env_poll(struct ibv_cq *cq)
{
    struct ibv_wc wc;
    if (!env_poll_within(cq, &wc, TIMEOUT_S))
        die("no completion");
    return wc;
}
