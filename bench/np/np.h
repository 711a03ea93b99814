/*
 * The parts of `np`: ends.c has the device, the region and the connection of either end; requests.c the client's work requests; samples.c
 * turns and statistics; present.c, faults.c, others.c, buffers.c and store.c the client's
 * measurements; costs.c what needs no server; np.c the
 * command line.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdnoreturn.h>

#include <infiniband/verbs.h>

enum {
    PAGE = 4096,
    SLOTS = 64, /* work requests in flight, each with a buffer of its own */
    BYTES_MAX = 64 << 10,
    QUEUE_PAIRS = 2,
};

/* The server's memory. */
struct region {
    uint64_t bytes;
    const char *file; /* NULL: private memory. Otherwise a shared mapping of this new file, registered for on-demand paging. */
    bool is_filled;
};

/* A client's view of its connection. */
struct client {
    struct ibv_cq *cq;
    struct ibv_qp *qps[QUEUE_PAIRS];
    struct ibv_mr *buffers; /* SLOTS buffers of BYTES_MAX */
    uint64_t base, bytes;   /* the server's region */
    uint32_t key;
    bool is_filled;
};

noreturn void die(const char *what);

/* The word at an offset of a filled region. */
static inline uint64_t word_at(uint64_t offset)
{
    return (offset + 8) * 0x9e3779b97f4a7c15ull;
}

/* ---- ends.c ---------------------------------------------------------------------------------------------------------- */

struct ibv_context *open_device(void);
/* The protection domain of the device. */
struct ibv_pd *protection_domain(void);
/* The memory of a region, with its content. */
char *map_region(const struct region *region);
struct ibv_cq *create_cq(void);
struct ibv_qp *create_pair(struct ibv_cq *cq);
void connect_pair(struct ibv_qp *qp, const union ibv_gid *gid, uint32_t number);
/* Serves the region at a unix socket until a signal ends the process. */
noreturn void serve(const char *socket_path, const struct region *region);
void connect_client(const char *socket_path, struct client *client);

/* ---- requests.c ------------------------------------------------------------------------------------------------------ */

/* Before the first measurement. */
void calibrate_clock(void);
/* The time since a reading of ticks_begin(), in nanoseconds. */
double ns_since(uint64_t begun);
char *buffer_of(const struct client *client, unsigned slot);
void post(struct client *client, int pair, enum ibv_wr_opcode opcode, unsigned slot, uint64_t offset, size_t size, bool is_signalled);
/* The slot of a completion, or -1 if there is none. */
int poll_once(struct client *client);
/* Fills a slot's buffer with what belongs to a range of the region. */
void prepare_write(struct client *client, unsigned slot, uint64_t offset, size_t size);
/* Compares a slot's buffer with what belongs to the range, and overwrites the buffer. */
void verify_read(struct client *client, unsigned slot, uint64_t offset, size_t size);
/* The time of one request in slot 0, alone, from its posting to its completion, in nanoseconds. */
double one_request(struct client *client, int pair, enum ibv_wr_opcode opcode, uint64_t offset, size_t size);
const char *name_of(enum ibv_wr_opcode opcode);

/* ---- samples.c ------------------------------------------------------------------------------------------------------- */

/* Measurements are cut into slices. Programs that measure at the same time take turns, a slice each, so that other load on the machine
 * meets all of them. */
enum { SLICES = 10, SLICES_MAX = 256 };

/* The samples of one measurement. */
struct series {
    const char *op;
    size_t size;
    double *samples;
    size_t count, slice_begin;
    double slices[SLICES_MAX]; /* the median of each, or its rate */
    unsigned slice_count;
};

/* Has turns wait for a byte from the pipe `in`, and write one to the pipe `out` at their end. Without pipes, nothing waits. */
void take_turns(const char *in, const char *out);
void begin_turn(void);
void end_turn(void);
struct series new_series(const char *op, size_t size);
void add_sample(struct series *series, double ns);
/* Notes the median of the samples since the last slice. */
void end_slice(struct series *series);
/* Prints a line of JSON, and frees the samples. */
void report_latency(struct series *series);
/* Of a measurement whose slices are rates in requests per second. */
void report_rate(const struct series *series);

/* ---- measurements ---------------------------------------------------------------------------------------------------- */

void measure_present(struct client *client);
void measure_faults(struct client *client);
void measure_others(struct client *client);
void measure_buffers(struct client *client);
void measure_store(struct client *client);
/* Registers the region, compares some of its pages with what a peer READs, and deregisters it. */
void measure_registration(const struct region *region);
/* The control plane: objects, connections and what they take of memory. */
void measure_control(void);
/* Reads random blocks of a new file at depth 1, past the page cache, while another processor is busy; one slice in each turn. */
void measure_disk(const char *path, uint64_t bytes, int busy_cpu, unsigned turns);
