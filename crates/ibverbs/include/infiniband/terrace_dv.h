/*
 * Where the work queues of a cross-channel queue pair (terrace_exp.h) are in memory, as mlx5dv_init_obj() says for mlx5. The
 * format of their entries is mlx5's, too: docs/managed-queues.md. A program that registers the memory lets work requests
 * rewrite the entries.
 */
#ifndef INFINIBAND_TERRACE_DV_H
#define INFINIBAND_TERRACE_DV_H

#include <infiniband/verbs.h>

#ifdef __cplusplus
extern "C" {
#endif

struct terrace_dv_queue {
	void *buf;
	uint32_t wqe_cnt; /* blocks of a send queue, entries of a receive queue */
	uint32_t stride; /* bytes from one to the next */
};

struct terrace_dv_qp {
	/* dbrec[0]: one past the last receive that may be taken, 16 bits. dbrec[1] is not used. */
	__be32 *dbrec;
	struct terrace_dv_queue sq;
	struct terrace_dv_queue rq; /* null with a shared receive queue */
};

struct terrace_dv_cq {
	uint32_t cqn; /* the number in the wait segment */
	uint32_t cqe_cnt;
};

struct terrace_dv_obj {
	struct {
		struct ibv_qp *in;
		struct terrace_dv_qp *out;
	} qp;
	struct {
		struct ibv_cq *in;
		struct terrace_dv_cq *out;
	} cq;
};

enum terrace_dv_obj_type {
	TERRACE_DV_OBJ_QP = 1 << 0,
	TERRACE_DV_OBJ_CQ = 1 << 1,
};

/* Fills in the objects whose bits are set. 0, or an errno: EOPNOTSUPP for a queue pair whose queues are not in memory. */
int terrace_dv_init_obj(struct terrace_dv_obj *obj, uint64_t obj_type);

#ifdef __cplusplus
}
#endif

#endif
