/*
 * terrace.h: what Terrace offers beyond libibverbs. The functions are in its libibverbs.so.1, at version node TERRACE_1.0.
 * A program that is to run with other libraries, too, finds them by dlsym(RTLD_DEFAULT, ...).
 */
#ifndef TERRACE_H
#define TERRACE_H

#include <infiniband/verbs.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- APPEND and COMMIT: docs/append.md ---- */

/* Longest record, in bytes. */
#define TERRACE_APPEND_LEN_MAX (1U << 20)

/* The opcode of an APPEND's completion. Its byte_len is the record's length. */
#define TERRACE_WC_APPEND IBV_WC_DRIVER1

enum terrace_append_flags {
	/* The record and all before it are persistent before the request completes. */
	TERRACE_COMMIT = 1 << 0,
};

/* Adds a record at the end of the peer's region. */
struct terrace_append_wr {
	uint64_t wr_id;
	struct terrace_append_wr *next;
	/* The record: registered memory. Not more elements than the queue pair's max_send_sge. */
	struct ibv_sge *sg_list;
	int num_sge;
	/* enum ibv_send_flags, without IBV_SEND_INLINE. */
	unsigned int send_flags;
	/* The key of the peer's region: one that grows, with IBV_ACCESS_REMOTE_WRITE. */
	uint32_t rkey;
	/* enum terrace_append_flags; other bits must be 0. */
	uint32_t flags;
	/* Registered memory of 8 bytes, with IBV_ACCESS_LOCAL_WRITE: the record's offset, in the byte order of the host. */
	struct ibv_sge result;
};

/*
 * Posts APPENDs to a queue pair of type RC whose peer is Terrace, too; other peers drop them, and the request fails with
 * IBV_WC_RETRY_EXC_ERR. Of the queue pair's limits, max_rd_atomic counts: an APPEND is outstanding as an atomic is.
 * Returns 0 or an errno, as ibv_post_send() does, and then the first request that was not posted in *bad_wr.
 */
int terrace_post_append(struct ibv_qp *qp, struct terrace_append_wr *wr, struct terrace_append_wr **bad_wr);

/*
 * Posts WRITEs (IBV_WR_RDMA_WRITE) that complete when their data are persistent at the peer: each is followed by a FLUSH
 * of its range. It takes two entries of the send queue, IBV_ACCESS_FLUSH_PERSISTENT of the peer's queue pair and region,
 * and its completion has the opcode of FLUSH. If it fails, or the queue pair has sq_sig_all, WRITE and FLUSH have
 * completions of their own, both with this wr_id.
 */
int terrace_post_write_commit(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad_wr);

#ifdef __cplusplus
}
#endif

#endif
