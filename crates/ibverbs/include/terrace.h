/*
 * terrace.h: what Terrace offers beyond libibverbs. The functions are in its libibverbs.so.1, at version node TERRACE_1.0:
 *
 *     cc -o program program.c $(pkg-config --cflags --libs terrace)
 *
 * A program that is to run with other libraries, too, is linked with -libverbs and finds them by dlsym(RTLD_DEFAULT, ...).
 */
#ifndef TERRACE_H
#define TERRACE_H

#include <infiniband/verbs.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Order of work requests: docs/np-rdma.md ---- */

/*
 * Flags of any send work request, beside enum ibv_send_flags: in send_flags of ibv_post_send() and of the functions below, and in
 * wr_flags of ibv_wr_start(). With `--nic commodity`, requests whose memory does not overlap may pass each other; these flags
 * keep the order of single requests. With `--nic terrace` only READs and atomics can be passed, and both flags order them, too.
 * Other libraries ignore the flags, or refuse the request.
 */
enum terrace_send_flags {
	/* The request is executed when all requests that were posted before it are. */
	TERRACE_SEND_ORDER_BEFORE = 1 << 28,
	/* All requests that are posted after it are executed when this one is. */
	TERRACE_SEND_ORDER_AFTER = 1 << 29,
};

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
	/* enum ibv_send_flags, without IBV_SEND_INLINE, and enum terrace_send_flags. */
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

/* ---- Regions that are files: docs/file-regions.md ---- */

/*
 * Registers the regular file behind a descriptor as a memory region, whose addresses are offsets in the file. The region
 * is all of the file, however long it becomes: an access may reach to the end that the file has at that time. `access` is a
 * mask of enum ibv_access_flags, and permits at most what the descriptor is open for. The program may close the descriptor.
 *
 * Returns NULL and sets errno: EACCES if `access` permits more than the descriptor is open for, or that is open for
 * appending only; EBADF for no descriptor; EOPNOTSUPP for one of something else than a regular file; EMFILE and ENFILE if
 * no descriptor is left and no other file of a region can do without its own.
 */
struct ibv_mr *terrace_bind_file(struct ibv_pd *pd, int fd, int access);

/*
 * Makes the file of such a region `length` bytes long. When this returns, no access beyond a new end is running, and later
 * ones fail. Returns 0 or an errno: EACCES if the region is not writable, EBUSY if another process of this host does not end
 * an access, EINVAL if the region is no file, or that of ftruncate().
 */
int terrace_truncate(struct ibv_mr *mr, uint64_t length);

/*
 * Gives the blocks of a part of the file of such a region back. When this returns, the part reads as zeros; the file is as
 * long as before. Returns 0 or an errno, as above, or that of fallocate().
 */
int terrace_punch(struct ibv_mr *mr, uint64_t offset, uint64_t length);

/*
 * ibv_reg_mr_ex() registers a file, or a part of it, too: with IBV_REG_MR_MASK_FD, and IBV_REG_MR_MASK_FD_OFFSET if the region
 * does not begin where the file does. A length of 0 or SIZE_MAX means the whole file, as in terrace_bind_file().
 *
 * It is in rdma-core 60 and later. A program that is compiled with older headers defines RDMA_CORE_BEFORE_60, and gets
 * declarations with the same names. It calls a function of this name only if the library has it: then dlsym() finds it.
 */
#ifdef RDMA_CORE_BEFORE_60
enum {
	IBV_REG_MR_MASK_IOVA = 1 << 0,
	IBV_REG_MR_MASK_ADDR = 1 << 1,
	IBV_REG_MR_MASK_FD = 1 << 2,
	IBV_REG_MR_MASK_FD_OFFSET = 1 << 3,
	IBV_REG_MR_MASK_DMAH = 1 << 4,
};

struct ibv_dmah;

struct ibv_mr_init_attr {
	size_t length;
	int access;
	uint64_t comp_mask;
	uint64_t iova;
	void *addr;
	int fd;
	uint64_t fd_offset;
	struct ibv_dmah *dmah;
	void *buf;
};

struct ibv_mr *ibv_reg_mr_ex(struct ibv_pd *pd, struct ibv_mr_init_attr *mr_init_attr);
#endif

/* ---- Memory that the program swaps itself: docs/paged-memory.md ---- */

/*
 * Has the program bring pages, because a peer accesses them: it brings them by a thread of its own, and then calls
 * terrace_swap_in(). Called once for each run of absent pages, from any thread that makes progress for the device, which it must
 * not block. Some of the pages may be on their way already by an earlier call, or have come since: the program brings only those
 * that it has taken away. It must not call ibv_dereg_mr(), nor ibv_destroy_qp(), nor ibv_modify_qp() to RESET or ERR: these wait
 * until the call has returned.
 */
typedef void (*terrace_bring_pages)(void *context, void *addr, size_t length);

/*
 * Registers memory that the program itself swaps, such as by userfaultfd or by mapping it anew. `addr` and `length` are
 * multiples of 4096. All pages count as present at first. What `bring` refers to stays valid until the region is
 * deregistered. The program's own work requests must not name absent pages.
 *
 * Returns NULL and sets errno, as ibv_reg_mr() does.
 */
struct ibv_mr *terrace_reg_swapped_mr(struct ibv_pd *pd, void *addr, size_t length, int access, terrace_bring_pages bring,
				      void *context);

/*
 * Tells that the program is about to take whole pages of such a region away. When this returns 0, the NIC does not touch them,
 * and peers find them absent. Returns EBUSY if one of them is in use for a peer (try another one), EINVAL for a range that is
 * not of whole pages of the region.
 */
int terrace_swap_out(struct ibv_mr *mr, void *addr, size_t length);

/*
 * Tells that the program has brought whole pages of such a region. When this returns 0, peers find them present, and the
 * requests that have waited for them are carried out.
 */
int terrace_swap_in(struct ibv_mr *mr, void *addr, size_t length);

#ifdef __cplusplus
}
#endif

#endif
