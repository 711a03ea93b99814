/*
 * The common part of the benchmark's programs (peer.c): command line, measurements and output. Each peer, in a file of its own,
 * implements the functions below. The same program is the target, which owns the memory, and the client, which measures; only
 * for a store (Redis, memcached, NBD) the target is the store itself.
 *
 *     peer_NAME target --meet PATH [--region BYTES] [--memory shared|private|huge] [--flavour NAME] [--lanes COUNT]
 *     peer_NAME client --meet PATH ... --points OP:SIZE:DEPTH:THREADS,... [--milliseconds TIME] [--target PID]
 *
 * The client prints a line with a JSON object for each point. PATH is a unix socket: the target's, for setup, or the store's.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdnoreturn.h>

enum op { OP_GET, OP_PUT, OP_MESSAGE, OP_ATOMIC };

enum {
    MIB = 1 << 20,
    BYTES_MAX = MIB, /* of one get, put or message */
    DEPTH_MAX = 16,
    LANES_MAX = 2,
    /* Twice as many receives as messages can be outstanding: an answered one is posted again in time. */
    INBOX_COUNT = 2 * DEPTH_MAX,
    /* Not a power of two, so that small messages do not all map to one set of the cache. */
    INBOX_STRIDE = BYTES_MAX + 65 * 64,
    LANE_BYTES = DEPTH_MAX * BYTES_MAX + INBOX_COUNT * INBOX_STRIDE,
};

enum memory {
    PRIVATE,
    SHARED,
    SHARED_HUGE, /* in huge pages */
};

extern struct options {
    const char *meet;
    const char *flavour; /* a transport or provider, for peers that have several */
    uint64_t region;     /* bytes */
    enum memory memory;  /* of the target's region */
    unsigned lanes;
} options;

/* A thread's buffers and peer-specific state. */
struct lane {
    unsigned index;
    char *buffer; /* LANE_BYTES */
    void *own;
    const char *received; /* the last message */
    unsigned idle;        /* empty polls since the last completion */
};

extern struct lane lanes[LANES_MAX];

/* The data buffer of operation `slot`; small ones lie close to each other. */
static inline char *outbox(const struct lane *lane, unsigned slot, size_t size)
{
    return lane->buffer + slot * (size < 64 ? 64 : size);
}

static inline char *inbox(const struct lane *lane, unsigned index)
{
    return lane->buffer + (size_t)DEPTH_MAX * BYTES_MAX + (size_t)index * INBOX_STRIDE;
}

/* Functions of peer.c. */
noreturn void die(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Send and receive a block over the socket between target and client. */
void say(int socket, const void *block, size_t size);
size_t hear(int socket, void *block, size_t capacity);
/* A connection to the socket at options.meet. */
int connect_to_meet(int type);
/* A mapping of `size` bytes. When `fd` is not NULL, it gets the descriptor of shared memory. */
char *map_memory(uint64_t size, enum memory memory, int *fd);
/* Sets each word of a region to a function of its offset. */
void fill_region(char *region);
uint64_t word_at(uint64_t offset);

/* ---- implemented by each peer; peer.c has weak defaults where noted ------------------------------------------------- */

extern const struct peer {
    const char *name;
    /* Whether the program has a target of its own, and a region that can be read as a whole. */
    bool has_target, has_region;
} peer;

/* NULL, or why the peer lacks this operation. */
const char *peer_lacks(enum op op, size_t size);
/* The number of distinct places for operations of a size; by default `options.region / size`. */
uint64_t peer_places(size_t size);
/* Set up `options.lanes` lanes at either end; the ends communicate over `control`. */
void peer_open_target(int control);
void peer_open_client(int control);
/* Before the client first uses a size; by default nothing. */
void peer_prepare(size_t size);
/* Whether the target's program must work for this operation; the target then calls peer_turn() repeatedly, for the first
 * `lane_count` lanes. By default it need not. */
bool peer_target_works(enum op op);
bool peer_turn(enum op op, size_t size, unsigned lane_count);
/* Starts an operation. It may be complete on return, but peer_reap() reports it all the same. */
void peer_post(struct lane *lane, enum op op, unsigned slot, uint64_t offset, size_t size);
/* The slots of completed operations (messages: those with an answer), DEPTH_MAX at most. Does not wait. */
unsigned peer_reap(struct lane *lane, enum op op, size_t size, unsigned slots[]);
