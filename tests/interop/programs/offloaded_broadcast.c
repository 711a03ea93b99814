/*
 * offloaded_broadcast: a broadcast along a chain of processes, as persistent collectives (PCX) post it. Every rank between the
 * ends posts its receives, the SENDs to the next rank, and a chain of WAIT and ENABLE once, and then sleeps: the NIC forwards.
 * All ranks compare all bytes.
 *
 *     offloaded_broadcast RANK RANKS DIRECTORY
 *
 * The ranks exchange the numbers of their queue pairs by files in DIRECTORY, which is empty at first.
 *
 * Build:  gcc -I INCLUDE -o offloaded_broadcast offloaded_broadcast.c -l:libibverbs.so.1, Terrace's own. INCLUDE is
 *         crates/ibverbs/include.
 */
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <infiniband/terrace_exp.h>

enum { ROUNDS = 16, BYTES = 100000, LIMIT_S = 40 };

static const char *directory;
static int rank, ranks;
static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_mr *mr;
static uint8_t buffers[ROUNDS][BYTES];

static void fail(const char *what, int error)
{
	fprintf(stderr, "rank %d: %s: %s\n", rank, what, strerror(error));
	exit(1);
}

static void *check(void *object, const char *what)
{
	if (!object)
		fail(what, errno);
	return object;
}

static void must(int error, const char *what)
{
	if (error)
		fail(what, error);
}

static uint8_t byte_of(int round, size_t at)
{
	return (uint8_t)((at * 2654435761U >> 13) + (unsigned)round * 31U);
}

/* ---- exchange by files ---- */

static void publish(const char *name, int of, uint32_t number)
{
	char part[4096], path[4096];
	FILE *file;

	snprintf(path, sizeof(path), "%s/%s-%d", directory, name, of);
	snprintf(part, sizeof(part), "%s/.%s-%d", directory, name, of);
	file = check(fopen(part, "w"), part);
	fprintf(file, "%u", number);
	fclose(file);
	must(rename(part, path) ? errno : 0, path);
}

static uint32_t await(const char *name, int of)
{
	time_t deadline = time(NULL) + LIMIT_S;
	char path[4096];
	uint32_t number;
	FILE *file;

	snprintf(path, sizeof(path), "%s/%s-%d", directory, name, of);
	while (!(file = fopen(path, "r"))) {
		if (time(NULL) > deadline)
			fail(path, ETIMEDOUT);
		usleep(1000);
	}
	must(fscanf(file, "%u", &number) == 1 ? 0 : EINVAL, path);
	fclose(file);
	return number;
}

/* ---- queue pairs ---- */

static struct ibv_qp *create(struct ibv_cq *cq, uint32_t flags)
{
	struct ibv_exp_qp_init_attr attr = {
		.send_cq = cq,
		.recv_cq = cq,
		.cap = { .max_send_wr = 2 * ROUNDS, .max_recv_wr = ROUNDS, .max_send_sge = 1, .max_recv_sge = 1 },
		.qp_type = IBV_QPT_RC,
		.comp_mask = IBV_EXP_QP_INIT_ATTR_PD | IBV_EXP_QP_INIT_ATTR_CREATE_FLAGS,
		.pd = pd,
		.exp_create_flags = IBV_EXP_QP_CREATE_CROSS_CHANNEL | flags,
	};

	return check(ibv_exp_create_qp(context, &attr), "queue pair");
}

static void connect_to(struct ibv_qp *qp, uint32_t number)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1 };

	must(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS), "INIT");
	attr.qp_state = IBV_QPS_RTR;
	attr.path_mtu = IBV_MTU_4096;
	attr.dest_qp_num = number;
	attr.min_rnr_timer = 1;
	attr.ah_attr.is_global = 1;
	attr.ah_attr.port_num = 1;
	must(ibv_query_gid(context, 1, 0, &attr.ah_attr.grh.dgid) ? EIO : 0, "GID");
	must(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
					      IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER), "RTR");
	attr.qp_state = IBV_QPS_RTS;
	attr.timeout = 14;
	attr.retry_cnt = 7;
	attr.rnr_retry = 7;
	must(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
					      IBV_QP_MAX_QP_RD_ATOMIC), "RTS");
}

static struct ibv_sge buffer(int round)
{
	return (struct ibv_sge){ .addr = (uintptr_t)buffers[round], .length = BYTES, .lkey = mr->lkey };
}

static void post_receives(struct ibv_qp *qp)
{
	for (int round = 0; round < ROUNDS; round++) {
		struct ibv_sge sge = buffer(round);
		struct ibv_recv_wr wr = { .wr_id = round, .sg_list = &sge, .num_sge = 1 }, *bad;

		must(ibv_post_recv(qp, &wr, &bad), "receive");
	}
}

static void post_sends(struct ibv_qp *qp)
{
	for (int round = 0; round < ROUNDS; round++) {
		struct ibv_sge sge = buffer(round);
		struct ibv_exp_send_wr *bad, wr = { .exp_opcode = IBV_EXP_WR_SEND, .sg_list = &sge, .num_sge = 1,
						    .exp_send_flags = IBV_EXP_SEND_SIGNALED };

		must(ibv_exp_post_send(qp, &wr, &bad), "SEND");
	}
}

/* When a message has come, the SEND of the same bytes is enabled. */
static void post_chain(struct ibv_qp *control, struct ibv_cq *received, struct ibv_qp *next)
{
	for (int round = 0; round < ROUNDS; round++) {
		struct ibv_exp_send_wr enable = { .exp_opcode = IBV_EXP_WR_SEND_ENABLE }, *bad;
		struct ibv_exp_send_wr wait = { .exp_opcode = IBV_EXP_WR_CQE_WAIT, .next = &enable };

		wait.task.cqe_wait.cq = received;
		wait.task.cqe_wait.cq_count = round + 1;
		enable.task.wqe_enable.qp = next;
		enable.task.wqe_enable.wqe_count = round + 1;
		must(ibv_exp_post_send(control, &wait, &bad), "chain");
	}
}

static void await_completions(struct ibv_cq *cq)
{
	time_t deadline = time(NULL) + LIMIT_S;
	struct ibv_wc wc;

	for (int done = 0; done < ROUNDS;) {
		int count = ibv_poll_cq(cq, 1, &wc);

		if (count < 0 || (count && wc.status != IBV_WC_SUCCESS)) {
			fprintf(stderr, "rank %d: completion: %s\n", rank, count < 0 ? "overrun" : ibv_wc_status_str(wc.status));
			exit(1);
		}
		if (time(NULL) > deadline)
			fail("completions", ETIMEDOUT);
		done += count;
	}
}

int main(int argc, char **argv)
{
	struct ibv_device **devices = check(ibv_get_device_list(NULL), "devices");
	struct ibv_cq *received, *sent, *control_cq;
	struct ibv_qp *previous, *next, *control;
	int is_first, is_last;

	if (argc != 4)
		return 2;
	rank = atoi(argv[1]);
	ranks = atoi(argv[2]);
	directory = argv[3];
	is_first = rank == 0;
	is_last = rank == ranks - 1;
	context = check(ibv_open_device(check(devices[0], "a device")), "device");
	pd = check(ibv_alloc_pd(context), "protection domain");
	mr = check(ibv_reg_mr(pd, buffers, sizeof(buffers), IBV_ACCESS_LOCAL_WRITE), "region");
	received = check(ibv_create_cq(context, ROUNDS, NULL, NULL, 0), "completion queue");
	sent = check(ibv_create_cq(context, ROUNDS, NULL, NULL, 0), "completion queue");
	control_cq = check(ibv_create_cq(context, ROUNDS, NULL, NULL, 0), "completion queue");
	previous = create(received, 0);
	next = create(sent, is_first ? 0 : IBV_EXP_QP_CREATE_MANAGED_SEND);
	control = create(control_cq, 0);

	publish("previous", rank, previous->qp_num);
	publish("next", rank, next->qp_num);
	connect_to(control, control->qp_num);
	if (!is_first) {
		connect_to(previous, await("next", rank - 1));
		post_receives(previous);
	}
	if (!is_last)
		connect_to(next, await("previous", rank + 1));
	if (!is_first && !is_last) {
		post_sends(next);
		post_chain(control, received, next);
	}
	publish("ready", rank, 1);

	if (is_first) {
		for (int other = 1; other < ranks; other++)
			await("ready", other);
		for (int round = 0; round < ROUNDS; round++)
			for (size_t at = 0; at < BYTES; at++)
				buffers[round][at] = byte_of(round, at);
		post_sends(next);
		await_completions(sent);
	}
	if (is_last) {
		await_completions(received);
		publish("done", rank, 1);
	}
	/* The ranks between the ends call no verb until the last rank has everything. */
	await("done", ranks - 1);
	if (!is_first && !is_last) {
		await_completions(received);
		await_completions(sent);
	}
	for (int round = 0; round < ROUNDS; round++)
		for (size_t at = 0; at < BYTES; at++)
			if (buffers[round][at] != byte_of(round, at)) {
				fprintf(stderr, "rank %d: message %d differs at byte %zu\n", rank, round, at);
				return 1;
			}
	printf("verified by rank %d of %d\n", rank, ranks);
	return 0;
}
