/*
 * A condition without a processor: the NIC stores 1 if x is 7. A compare and swap changes the opcode of a work request from
 * NOP to WRITE, and only then the work request is enabled.
 *
 *   gcc -I INCLUDE condition.c -o condition -l:libibverbs.so.1
 *   terrace run -- ./condition 7
 *
 * INCLUDE is the folder with infiniband/terrace_exp.h (crates/ibverbs/include).
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <infiniband/terrace_dv.h>
#include <infiniband/terrace_exp.h>

#define ACCESS (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC)

static void *check(void *object, const char *what)
{
	if (!object) {
		perror(what);
		exit(1);
	}
	return object;
}

static void must(int error, const char *what)
{
	if (error) {
		fprintf(stderr, "%s: %s\n", what, strerror(error));
		exit(1);
	}
}

/* Connects a queue pair to itself. */
static void connect_loopback(struct ibv_qp *qp)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = ACCESS };

	must(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS), "INIT");
	attr.qp_state = IBV_QPS_RTR;
	attr.path_mtu = IBV_MTU_1024;
	attr.dest_qp_num = qp->qp_num;
	attr.max_dest_rd_atomic = 1;
	attr.max_rd_atomic = 1;
	attr.min_rnr_timer = 1;
	attr.ah_attr.is_global = 1;
	attr.ah_attr.port_num = 1;
	must(ibv_query_gid(qp->context, 1, 0, &attr.ah_attr.grh.dgid) ? 5 : 0, "GID");
	must(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
					      IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER), "RTR");
	attr.qp_state = IBV_QPS_RTS;
	attr.timeout = 14;
	attr.retry_cnt = 7;
	attr.rnr_retry = 7;
	must(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
					      IBV_QP_MAX_QP_RD_ATOMIC), "RTS");
}

static struct ibv_qp *create(struct ibv_pd *pd, struct ibv_cq *cq, uint32_t flags)
{
	struct ibv_exp_qp_init_attr attr = {
		.send_cq = cq,
		.recv_cq = cq,
		.cap = { .max_send_wr = 16, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 },
		.qp_type = IBV_QPT_RC,
		.comp_mask = IBV_EXP_QP_INIT_ATTR_PD | IBV_EXP_QP_INIT_ATTR_CREATE_FLAGS,
		.pd = pd,
		.exp_create_flags = IBV_EXP_QP_CREATE_CROSS_CHANNEL | flags,
	};
	struct ibv_qp *qp = check(ibv_exp_create_qp(pd->context, &attr), "queue pair");

	connect_loopback(qp);
	return qp;
}

static void await_completion(struct ibv_cq *cq)
{
	struct ibv_wc wc;
	int count;

	while ((count = ibv_poll_cq(cq, 1, &wc)) == 0)
		;
	if (count < 0 || wc.status != IBV_WC_SUCCESS) {
		fprintf(stderr, "completion: %s\n", count < 0 ? "overrun" : ibv_wc_status_str(wc.status));
		exit(1);
	}
}

int main(int argc, char **argv)
{
	/* words: 1, the result, the CAS's result, x. */
	static uint64_t words[4] = { 1 };
	struct ibv_device **devices = check(ibv_get_device_list(NULL), "devices");
	struct ibv_context *context = check(ibv_open_device(check(devices[0], "a device")), "device");
	struct ibv_pd *pd = check(ibv_alloc_pd(context), "protection domain");
	struct ibv_mr *mr = check(ibv_reg_mr(pd, words, sizeof(words), ACCESS), "region");
	struct ibv_cq *cq = check(ibv_create_cq(context, 16, NULL, NULL, 0), "completion queue");
	struct ibv_cq *control_cq = check(ibv_create_cq(context, 16, NULL, NULL, 0), "completion queue");
	struct ibv_qp *managed = create(pd, cq, IBV_EXP_QP_CREATE_MANAGED_SEND);
	struct ibv_qp *control = create(pd, control_cq, 0);
	struct terrace_dv_qp memory;
	struct terrace_dv_obj obj = { .qp = { .in = managed, .out = &memory } };
	struct ibv_sge one = { .addr = (uintptr_t)&words[0], .length = 8, .lkey = mr->lkey };
	struct ibv_sge cas_result = { .addr = (uintptr_t)&words[2], .length = 8, .lkey = mr->lkey };
	struct ibv_exp_send_wr wr = { .exp_opcode = IBV_EXP_WR_RDMA_WRITE, .sg_list = &one, .num_sge = 1 };
	struct ibv_exp_send_wr chain[3] = { { 0 } };
	struct ibv_exp_send_wr *bad;
	struct ibv_mr *queue;
	uint64_t head, as_nop, expected;

	words[3] = argc > 1 ? strtoull(argv[1], NULL, 0) : 7;

	/* if (...) words[1] = 1; */
	wr.wr.rdma.remote_addr = (uintptr_t)&words[1];
	wr.wr.rdma.rkey = mr->rkey;
	wr.exp_send_flags = IBV_EXP_SEND_SIGNALED;
	must(ibv_exp_post_send(managed, &wr, &bad), "post");

	/* The entry is in memory, and may be rewritten: its opcode is byte 3, and bytes 1 and 2 are free for x. */
	must(terrace_dv_init_obj(&obj, TERRACE_DV_OBJ_QP), "memory of the queue");
	queue = check(ibv_reg_mr(pd, memory.sq.buf, (size_t)memory.sq.wqe_cnt * memory.sq.stride, ACCESS), "region");
	memcpy(&head, memory.sq.buf, 8);
	as_nop = head;
	((uint8_t *)&as_nop)[3] = 0;
	expected = as_nop;
	((uint8_t *)&as_nop)[1] = (uint8_t)words[3];
	((uint8_t *)&expected)[1] = 7;
	memcpy(memory.sq.buf, &as_nop, 8);

	chain[0].exp_opcode = IBV_EXP_WR_ATOMIC_CMP_AND_SWP;
	chain[0].sg_list = &cas_result;
	chain[0].num_sge = 1;
	chain[0].wr.atomic.remote_addr = (uintptr_t)memory.sq.buf;
	chain[0].wr.atomic.rkey = queue->rkey;
	chain[0].wr.atomic.compare_add = expected;
	chain[0].wr.atomic.swap = head;
	chain[0].exp_send_flags = IBV_EXP_SEND_SIGNALED;
	chain[0].next = &chain[1];
	chain[1].exp_opcode = IBV_EXP_WR_CQE_WAIT;
	chain[1].task.cqe_wait.cq = control_cq;
	chain[1].task.cqe_wait.cq_count = 1;
	chain[1].next = &chain[2];
	chain[2].exp_opcode = IBV_EXP_WR_SEND_ENABLE;
	chain[2].task.wqe_enable.qp = managed;
	must(ibv_exp_post_send(control, chain, &bad), "chain");

	await_completion(cq);
	printf("x is %llu, so the NIC has stored %llu\n", (unsigned long long)words[3], (unsigned long long)words[1]);
	return 0;
}
