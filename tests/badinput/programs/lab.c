#include "lab.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

static const double PATIENCE_S = 10.0;

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

void lab_nonblocking(int fd)
{
    if (fcntl(fd, F_SETFL, O_NONBLOCK) != 0)
        die("no descriptor");
}

struct lab lab_open(void)
{
    struct lab lab = {0};
    setvbuf(stdout, NULL, _IOLBF, 0); /* no output is lost at a crash */
    struct ibv_device **list = ibv_get_device_list(NULL);
    if (list == NULL || list[0] == NULL)
        die("no RDMA device");
    lab.context = ibv_open_device(list[0]);
    if (lab.context == NULL)
        die("the device does not open");
    ibv_free_device_list(list);
    if (ibv_query_device(lab.context, &lab.attr) != 0 || ibv_query_port(lab.context, LAB_PORT, &lab.port) != 0 ||
        ibv_query_gid(lab.context, LAB_PORT, 0, &lab.gid) != 0)
        die("the device does not answer");
    lab.pd = ibv_alloc_pd(lab.context);
    lab.channel = ibv_create_comp_channel(lab.context);
    lab.cq = ibv_create_cq(lab.context, 256, NULL, lab.channel, 0);
    lab.buffer = mmap(NULL, LAB_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (lab.pd == NULL || lab.channel == NULL || lab.cq == NULL || lab.buffer == MAP_FAILED)
        die("the device gives no objects");
    lab.mr = ibv_reg_mr(lab.pd, lab.buffer, LAB_BYTES, LAB_ACCESS);
    if (lab.mr == NULL)
        die("the buffer is not registered");
    return lab;
}

void lab_close(struct lab *lab)
{
    if (ibv_dereg_mr(lab->mr) != 0 || ibv_destroy_cq(lab->cq) != 0 || ibv_destroy_comp_channel(lab->channel) != 0 ||
        ibv_dealloc_pd(lab->pd) != 0 || ibv_close_device(lab->context) != 0)
        die("an object is in use at the end");
    munmap(lab->buffer, LAB_BYTES);
}

struct ibv_qp_init_attr lab_init(const struct lab *lab, enum ibv_qp_type type)
{
    return (struct ibv_qp_init_attr){
        .send_cq = lab->cq,
        .recv_cq = lab->cq,
        .cap = {.max_send_wr = LAB_DEPTH,
                .max_recv_wr = LAB_DEPTH,
                .max_send_sge = LAB_SGES,
                .max_recv_sge = LAB_SGES,
                .max_inline_data = LAB_INLINE},
        .qp_type = type,
        .sq_sig_all = 1,
    };
}

struct ibv_qp *lab_qp(const struct lab *lab, enum ibv_qp_type type)
{
    struct ibv_qp_init_attr init = lab_init(lab, type);
    struct ibv_qp *qp = ibv_create_qp(lab->pd, &init);
    if (qp == NULL)
        die("no queue pair of type %d", type);
    return qp;
}

struct ibv_qp_attr lab_attr(const struct lab *lab, uint32_t peer_qpn)
{
    return (struct ibv_qp_attr){
        .path_mtu = IBV_MTU_1024,
        .path_mig_state = IBV_MIG_MIGRATED,
        .qkey = LAB_QKEY,
        .rq_psn = LAB_PSN,
        .sq_psn = LAB_PSN,
        .dest_qp_num = peer_qpn,
        .qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC,
        .ah_attr = {.is_global = 1,
                    .port_num = LAB_PORT,
                    .grh = {.dgid = lab->gid, .sgid_index = 0, .hop_limit = 64}},
        .alt_ah_attr = {.is_global = 1, .port_num = LAB_PORT, .grh = {.dgid = lab->gid, .hop_limit = 64}},
        .pkey_index = 0,
        .max_rd_atomic = 4,
        .max_dest_rd_atomic = 4,
        .min_rnr_timer = 12,
        .port_num = LAB_PORT,
        .timeout = 14,
        .retry_cnt = 7,
        .rnr_retry = 7,
        .alt_port_num = LAB_PORT,
        .alt_timeout = 14,
    };
}

int lab_mask(enum ibv_qp_type type, enum ibv_qp_state to)
{
    bool datagram = type == IBV_QPT_UD;
    bool asks = type == IBV_QPT_RC || type == IBV_QPT_XRC_SEND, answers = type == IBV_QPT_RC || type == IBV_QPT_XRC_RECV;
    switch (to) {
    case IBV_QPS_INIT:
        return IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | (datagram ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS);
    case IBV_QPS_RTR:
        return IBV_QP_STATE | (datagram ? 0 : IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN) |
               (answers ? IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER : 0);
    case IBV_QPS_RTS:
        return IBV_QP_STATE | IBV_QP_SQ_PSN |
               (asks ? IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC : 0) |
               (type == IBV_QPT_XRC_RECV ? IBV_QP_TIMEOUT : 0);
    default:
        return IBV_QP_STATE;
    }
}

void lab_advance(const struct lab *lab, struct ibv_qp *qp, uint32_t peer_qpn, enum ibv_qp_state state)
{
    struct ibv_qp_attr attr = lab_attr(lab, peer_qpn);
    for (attr.qp_state = IBV_QPS_INIT; attr.qp_state <= state; attr.qp_state++) {
        int code = ibv_modify_qp(qp, &attr, lab_mask(qp->qp_type, attr.qp_state));
        if (code != 0)
            die("queue pair of type %d does not go to state %d: %s", qp->qp_type, attr.qp_state, strerror(code));
    }
}

void lab_connect(const struct lab *lab, struct ibv_qp *left, struct ibv_qp *right)
{
    lab_advance(lab, left, right->qp_num, IBV_QPS_RTS);
    lab_advance(lab, right, left->qp_num, IBV_QPS_RTS);
}

bool lab_poll_within(struct ibv_cq *cq, struct ibv_wc *wc, double seconds)
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

struct ibv_wc lab_poll(struct ibv_cq *cq)
{
    struct ibv_wc wc;
    if (!lab_poll_within(cq, &wc, PATIENCE_S))
        die("no completion");
    return wc;
}
