/*
 * Work queues that programs can program (cross-channel verbs), for libibverbs.so.1 of Terrace.
 *
 * The names are those that cross-channel programs know from the experimental verbs of Mellanox OFED 4.9
 * (infiniband/verbs_exp.h), so that these programs compile unchanged in what they use of them. The layouts are Terrace's
 * own: a program compiled against the header of OFED must be compiled again.
 *
 * docs/managed-queues.md says what the operations do, and terrace_dv.h where a queue's memory is.
 */
#ifndef INFINIBAND_TERRACE_EXP_H
#define INFINIBAND_TERRACE_EXP_H

#include <infiniband/verbs.h>

#ifdef __cplusplus
extern "C" {
#endif

enum ibv_exp_wr_opcode {
	IBV_EXP_WR_RDMA_WRITE = IBV_WR_RDMA_WRITE,
	IBV_EXP_WR_RDMA_WRITE_WITH_IMM = IBV_WR_RDMA_WRITE_WITH_IMM,
	IBV_EXP_WR_SEND = IBV_WR_SEND,
	IBV_EXP_WR_SEND_WITH_IMM = IBV_WR_SEND_WITH_IMM,
	IBV_EXP_WR_RDMA_READ = IBV_WR_RDMA_READ,
	IBV_EXP_WR_ATOMIC_CMP_AND_SWP = IBV_WR_ATOMIC_CMP_AND_SWP,
	IBV_EXP_WR_ATOMIC_FETCH_AND_ADD = IBV_WR_ATOMIC_FETCH_AND_ADD,
	IBV_EXP_WR_SEND_WITH_INV = 0x48,
	IBV_EXP_WR_SEND_ENABLE = 0x60,
	IBV_EXP_WR_RECV_ENABLE = 0x61,
	IBV_EXP_WR_CQE_WAIT = 0x62,
	IBV_EXP_WR_EXT_MASKED_ATOMIC_CMP_AND_SWP = 0x63,
	IBV_EXP_WR_EXT_MASKED_ATOMIC_FETCH_AND_ADD = 0x64,
	IBV_EXP_WR_NOP = 0x65,
};

/* Of exp_send_flags, which has 64 bits. */
#define IBV_EXP_SEND_FENCE ((uint64_t)IBV_SEND_FENCE)
#define IBV_EXP_SEND_SIGNALED ((uint64_t)IBV_SEND_SIGNALED)
#define IBV_EXP_SEND_SOLICITED ((uint64_t)IBV_SEND_SOLICITED)
#define IBV_EXP_SEND_INLINE ((uint64_t)IBV_SEND_INLINE)
/* The base of the counts of a completion queue or queue pair advances behind this WAIT or ENABLE. */
#define IBV_EXP_SEND_WAIT_EN_LAST (1ULL << 34)
/* Operands of masked atomics are in the work request: always so. */
#define IBV_EXP_SEND_EXT_ATOMIC_INLINE (1ULL << 35)

struct ibv_exp_cmp_swap {
	uint64_t compare_mask;
	uint64_t compare_val;
	uint64_t swap_val;
	uint64_t swap_mask;
};

struct ibv_exp_fetch_add {
	uint64_t add_val;
	uint64_t field_boundary; /* the highest bit of each field */
};

struct ibv_exp_send_wr {
	uint64_t wr_id;
	struct ibv_exp_send_wr *next;
	struct ibv_sge *sg_list;
	int num_sge;
	enum ibv_exp_wr_opcode exp_opcode;
	int reserved;
	union {
		__be32 imm_data;
		uint32_t invalidate_rkey;
	} ex;
	union {
		struct {
			uint64_t remote_addr;
			uint32_t rkey;
		} rdma;
		struct {
			uint64_t remote_addr;
			uint64_t compare_add;
			uint64_t swap;
			uint32_t rkey;
		} atomic;
	} wr;
	union {
		/* CQE_WAIT: until the queue has cq_count completions more than its base. */
		struct {
			struct ibv_cq *cq;
			int32_t cq_count;
		} cqe_wait;
		/* SEND_ENABLE, RECV_ENABLE: wqe_count work requests from the queue's base on; 0: all that are posted. */
		struct {
			struct ibv_qp *qp;
			int32_t wqe_count;
		} wqe_enable;
	} task;
	uint64_t exp_send_flags;
	uint32_t comp_mask; /* 0 */
	union {
		struct {
			uint32_t log_arg_sz; /* 3: operands have 8 bytes */
			uint64_t remote_addr;
			uint32_t rkey;
			union {
				struct {
					union {
						struct ibv_exp_cmp_swap cmp_swap;
						struct ibv_exp_fetch_add fetch_add;
					} op;
				} inline_data;
			} wr_data;
		} masked_atomics;
	} ext_op;
};

enum ibv_exp_qp_init_attr_comp_mask {
	IBV_EXP_QP_INIT_ATTR_PD = 1 << 0,
	IBV_EXP_QP_INIT_ATTR_CREATE_FLAGS = 1 << 2,
	IBV_EXP_QP_INIT_ATTR_ATOMICS_ARG = 1 << 5,
};

enum ibv_exp_qp_create_flags {
	/* The queue pair may have WAIT and ENABLE. Its work queues are in memory. */
	IBV_EXP_QP_CREATE_CROSS_CHANNEL = 1 << 2,
	/* Posting to the send queue, or to the receive queue, enables nothing. */
	IBV_EXP_QP_CREATE_MANAGED_SEND = 1 << 3,
	IBV_EXP_QP_CREATE_MANAGED_RECV = 1 << 4,
	/* Posting may overwrite work requests that were not executed. */
	IBV_EXP_QP_CREATE_IGNORE_SQ_OVERFLOW = 1 << 6,
	IBV_EXP_QP_CREATE_IGNORE_RQ_OVERFLOW = 1 << 7,
};

/* Begins as struct ibv_qp_init_attr. */
struct ibv_exp_qp_init_attr {
	void *qp_context;
	struct ibv_cq *send_cq;
	struct ibv_cq *recv_cq;
	struct ibv_srq *srq;
	struct ibv_qp_cap cap;
	enum ibv_qp_type qp_type;
	int sq_sig_all;
	uint32_t comp_mask;
	struct ibv_pd *pd;
	uint32_t exp_create_flags;
	uint32_t max_atomic_arg; /* bytes: at most 8 */
};

enum ibv_exp_cq_create_flags {
	IBV_EXP_CQ_CREATE_CROSS_CHANNEL = 1 << 0,
};

enum ibv_exp_cq_init_attr_mask {
	IBV_EXP_CQ_INIT_ATTR_FLAGS = 1 << 0,
};

struct ibv_exp_cq_init_attr {
	uint32_t comp_mask;
	uint32_t flags;
};

enum ibv_exp_cq_cap_flags {
	/* A completion that does not fit displaces the oldest. */
	IBV_EXP_CQ_IGNORE_OVERRUN = 1 << 0,
};

/* Of both the mask of ibv_exp_modify_cq() and comp_mask. */
enum ibv_exp_cq_attr_mask {
	IBV_EXP_CQ_MODERATION = 1 << 0, /* accepted, without effect */
	IBV_EXP_CQ_CAP_FLAGS = 1 << 1,
};

enum ibv_exp_cq_attr_comp_mask {
	IBV_EXP_CQ_ATTR_MODERATION = 1 << 0,
	IBV_EXP_CQ_ATTR_CQ_CAP_FLAGS = 1 << 1,
};

struct ibv_exp_cq_attr {
	uint32_t comp_mask;
	struct {
		uint16_t cq_count;
		uint16_t cq_period;
	} moderation;
	uint32_t cq_cap_flags;
};

enum ibv_exp_task_type {
	IBV_EXP_TASK_SEND = 0,
	IBV_EXP_TASK_RECV = 1,
};

struct ibv_exp_task {
	enum ibv_exp_task_type task_type;
	struct {
		struct ibv_qp *qp;
		union {
			struct ibv_exp_send_wr *send_wr;
			struct ibv_recv_wr *recv_wr;
		};
	} item;
	struct ibv_exp_task *next;
	uint32_t comp_mask; /* 0 */
};

struct ibv_qp *ibv_exp_create_qp(struct ibv_context *context, struct ibv_exp_qp_init_attr *attr);

struct ibv_cq *ibv_exp_create_cq(struct ibv_context *context, int cqe, void *cq_context, struct ibv_comp_channel *channel,
				 int comp_vector, struct ibv_exp_cq_init_attr *attr);

/* 0, or an errno. */
int ibv_exp_modify_cq(struct ibv_cq *cq, struct ibv_exp_cq_attr *attr, int attr_mask);

/* 0, or an errno; *bad_wr is then the first work request that is not posted. */
int ibv_exp_post_send(struct ibv_qp *qp, struct ibv_exp_send_wr *wr, struct ibv_exp_send_wr **bad_wr);

/* Posts to several queue pairs. 0, or an errno; *bad_task is then the first task that is not posted as a whole. */
int ibv_exp_post_task(struct ibv_context *context, struct ibv_exp_task *task, struct ibv_exp_task **bad_task);

#ifdef __cplusplus
}
#endif

#endif
