/*
 * The common code of the benchmark's programs (peer.c): command line, measurements and output. Each peer implements the
 * functions below in its own file. The same program is the target, which owns the memory, and the client, which measures. For
 * a store (Redis, memcached, NBD) the target is the store itself.
 *
 *     peer_NAME target --socket PATH [--region BYTES] [--memory shared|private|huge] [--flavour NAME] [--connections COUNT]
 *     peer_NAME client --socket PATH ... --points OP:SIZE:DEPTH:THREADS,... [--milliseconds TIME] [--target PID]
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
    CONNECTIONS_MAX = 2,
    /* Twice the messages in flight, so that a receive is posted for each message. */
    RECEIVES = 2 * DEPTH_MAX,
    /* Not a power of two, so that small messages do not all map to one set of the cache. */
    RECEIVE_STRIDE = BYTES_MAX + 65 * 64,
    CONNECTION_BYTES = DEPTH_MAX * BYTES_MAX + RECEIVES * RECEIVE_STRIDE,
};

enum memory {
    PRIVATE,
    SHARED,
    SHARED_HUGE, /* in huge pages */
};

extern struct options {
    const char *socket_path;
    const char *flavour; /* a transport or provider, for peers that have several */
    uint64_t region;     /* bytes */
    enum memory memory;  /* of the target's region */
    unsigned connections;
} options;

/* A thread's connection: its buffers and peer-specific state. */
struct connection {
    unsigned index;
    char *buffer; /* CONNECTION_BYTES */
    void *own;
    const char *received; /* the last message */
    unsigned idle;        /* empty polls since the last completion */
};

extern struct connection connections[CONNECTIONS_MAX];

/* The data buffer of operation `slot`. Small buffers are adjacent. */
static inline char *operation_buffer(const struct connection *connection, unsigned slot, size_t size)
{
    return connection->buffer + slot * (size < 64 ? 64 : size);
}

/* The buffer of a receive. */
static inline char *receive_buffer(const struct connection *connection, unsigned index)
{
    return connection->buffer + (size_t)DEPTH_MAX * BYTES_MAX + (size_t)index * RECEIVE_STRIDE;
}

/* Functions of peer.c. */
noreturn void die(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Send and receive a block over the socket between target and client. */
void send_block(int socket, const void *block, size_t size);
size_t receive_block(int socket, void *block, size_t capacity);
/* A connection to the socket at options.socket_path. */
int connect_to_socket(int type);
/* Maps `size` bytes. If `fd` is not NULL, stores the descriptor of shared memory there. */
char *map_memory(uint64_t size, enum memory memory, int *fd);
/* Sets each word of a region to a function of its offset. */
void fill_region(char *region);
uint64_t word_at(uint64_t offset);

/* ---- implemented by each peer; peer.c has weak defaults where noted ------------------------------------------------- */

extern const struct peer {
    const char *name;
    /* Whether the program has its own target, and whether it has a region that can be read as a whole. */
    bool has_target, has_region;
} peer;

/* NULL, or the reason if the peer lacks this operation. */
const char *peer_lacks(enum op op, size_t size);
/* The number of distinct offsets of operations of a size; by default `options.region / size`. */
uint64_t peer_offset_count(size_t size);
/* Set up `options.connections` connections at either end; the ends communicate over `control`. */
void peer_open_target(int control);
void peer_open_client(int control);
/* Prepares the client's first use of a size; by default nothing. */
void peer_prepare(size_t size);
/* Whether the target's program must poll for this operation; false by default. The target then calls peer_progress()
 * repeatedly, for the first `connection_count` connections. */
bool peer_target_polls(enum op op);
bool peer_progress(enum op op, size_t size, unsigned connection_count);
/* Starts an operation. peer_reap() reports its completion, even if it is complete on return. */
void peer_post(struct connection *connection, enum op op, unsigned slot, uint64_t offset, size_t size);
/* Returns the slots of completed operations (of messages those with an answer), at most DEPTH_MAX, without waiting. */
unsigned peer_reap(struct connection *connection, enum op op, size_t size, unsigned slots[]);
