/*
 * What the programs of this benchmark have in common: how they are started, what they measure and how they print it (peer.c).
 * Each peer, in a file of its own, fills in the functions below. The same program is the target, whose memory is reached, and
 * the client, which measures; only a store that somebody else wrote is a target of its own.
 *
 *     peer_NAME target --meet PATH [--region BYTES] [--memory shared|private|huge] [--flavour NAME] [--lanes COUNT]
 *     peer_NAME client --meet PATH ... --points OP:SIZE:DEPTH:THREADS,... [--milliseconds TIME] [--target PID]
 *
 * The client prints a JSON object in a line for each point. PATH is a unix socket: of the target, for what both have to know of
 * each other, or of the store itself.
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
    /* The target posts twice as many receives as messages can be under way: what is answered is there again in time. */
    INBOX_COUNT = 2 * DEPTH_MAX,
    /* Not a power of two, so that small messages do not all fall into one set of the cache. */
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
    enum memory memory;  /* what the target's region is */
    unsigned lanes;
} options;

/* What one thread has: buffers, and the peer's own things. */
struct lane {
    unsigned index;
    char *buffer; /* LANE_BYTES */
    void *own;
    const char *received; /* the last message that came */
    unsigned idle;        /* how often nothing was found since something was */
};

extern struct lane lanes[LANES_MAX];

/* Where the data of operation `slot` is, or goes to: close to each other when they are small. */
static inline char *outbox(const struct lane *lane, unsigned slot, size_t size)
{
    return lane->buffer + slot * (size < 64 ? 64 : size);
}

static inline char *inbox(const struct lane *lane, unsigned index)
{
    return lane->buffer + (size_t)DEPTH_MAX * BYTES_MAX + (size_t)index * INBOX_STRIDE;
}

/* What peer.c offers. */
noreturn void die(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* A block each way over the socket between target and client. */
void say(int socket, const void *block, size_t size);
size_t hear(int socket, void *block, size_t capacity);
/* A connection to the socket at options.meet. */
int connect_to_meet(int type);
/* A mapping of so many bytes. When `fd` is not NULL, it gets the descriptor of shared memory. */
char *map_memory(uint64_t size, enum memory memory, int *fd);
/* Makes all words of a region what their offsets say. */
void fill_region(char *region);
uint64_t word_at(uint64_t offset);

/* ---- what each peer fills in; peer.c has what most of them have, for those that say so ------------------------------ */

extern const struct peer {
    const char *name;
    /* Whether the program has a target of its own, with a region that can be read from one end to the other. */
    bool has_target, has_region;
} peer;

/* NULL, or why there is no such operation. */
const char *peer_lacks(enum op op, size_t size);
/* How many different places operations of a size go to; by default `options.region / size`. */
uint64_t peer_places(size_t size);
/* Sets up either end, `options.lanes` lanes of it; they talk over `control`. */
void peer_open_target(int control);
void peer_open_client(int control);
/* Before the client first uses a size; by default nothing. */
void peer_prepare(size_t size);
/* Whether the target's program has to do something for this operation; then peer_turn() is called over and over, for the
 * first so many lanes. By default it has not. */
bool peer_target_works(enum op op);
bool peer_turn(enum op op, size_t size, unsigned lane_count);
/* Begins an operation. It may be complete when this returns, but is reported by peer_reap() all the same. */
void peer_post(struct lane *lane, enum op op, unsigned slot, uint64_t offset, size_t size);
/* Which operations have completed since, DEPTH_MAX at most. For messages: the answers that came. Does not wait. */
unsigned peer_reap(struct lane *lane, enum op op, size_t size, unsigned slots[]);
