/*
 * The parts of `np`: ends.c has the device, the region and the connection of either end; measure.c has the client's measurements; np.c has
 * the command line.
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

/* Serves the region at a unix socket until a signal ends the process. */
noreturn void serve(const char *socket_path, const struct region *region);
/* Registers and deregisters the region, and prints the times. */
void register_region(const struct region *region);
void connect_client(const char *socket_path, struct client *client);

/* Each prints a line of JSON for each measurement. */
void measure_present(struct client *client);
void measure_first_touches(struct client *client);
void measure_absent(struct client *client);
void measure_others(struct client *client);
/* Reads random blocks of a new file at depth 1, past the page cache. */
void measure_disk(const char *path, uint64_t bytes);
