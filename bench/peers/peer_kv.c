/*
 * Redis and memcached by their own protocols over a unix socket: GET, SET and INCRBY (incr) of values of the same sizes, one
 * socket for each connection. The store is a separate program. The client sends posted requests together at its next poll for
 * answers, and polls without sleeping. Both are faster than a client library.
 */
#include "peer.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

const struct peer peer = {.name = "kv", .has_target = false, .has_region = false};

enum { KEYS_MAX = 16384, KEY_MAX = 64, TEXT_MAX = 256, SEGMENTS_MAX = 4 * DEPTH_MAX, IN_MAX = 4 * BYTES_MAX, SPACE_MIN = 65536 };

struct request {
    enum op op;
    unsigned slot;
    size_t size;
    char text[TEXT_MAX]; /* the request, without its value */
};

struct link {
    int socket;
    char *in;
    size_t in_start, in_end;
    /* Bytes to send, without a copy. */
    struct iovec segments[SEGMENTS_MAX];
    size_t segment_count;
    struct request requests[DEPTH_MAX];
    unsigned first, count;
};

static struct link links[CONNECTIONS_MAX];
static bool is_redis;

const char *peer_lacks(enum op op, size_t size)
{
    return op == OP_MESSAGE ? "no messages" : op == OP_ATOMIC && size != 8 ? "atomics are of 8 bytes" : NULL;
}

/* Limited for small values, because each has a key. */
uint64_t peer_offset_count(size_t size)
{
    uint64_t offset_count = options.region / size;
    return offset_count < KEYS_MAX ? offset_count : KEYS_MAX;
}

void peer_open_target(int control)
{
    (void)control;
}

void peer_open_client(int control)
{
    (void)control;
    is_redis = strcmp(options.flavour, "redis") == 0;
    for (unsigned i = 0; i < options.connections; i++) {
        links[i].socket = connect_to_socket(SOCK_STREAM);
        links[i].in = map_memory(IN_MAX, PRIVATE, NULL);
        connections[i].own = &links[i];
    }
}

/* ---- requests --------------------------------------------------------------------------------------------------- */

static void append(struct link *link, const void *bytes, size_t size)
{
    if (link->segment_count == SEGMENTS_MAX)
        die("too many segments to send");
    link->segments[link->segment_count++] = (struct iovec){(void *)(uintptr_t)bytes, size};
}

/* The request up to its value. */
static int write_request(char *text, enum op op, const char *key, size_t size)
{
    if (is_redis && op == OP_GET)
        return snprintf(text, TEXT_MAX, "*2\r\n$3\r\nGET\r\n$%zu\r\n%s\r\n", strlen(key), key);
    if (is_redis && op == OP_PUT)
        return snprintf(text, TEXT_MAX, "*3\r\n$3\r\nSET\r\n$%zu\r\n%s\r\n$%zu\r\n", strlen(key), key, size);
    if (is_redis)
        return snprintf(text, TEXT_MAX, "*3\r\n$6\r\nINCRBY\r\n$%zu\r\n%s\r\n$1\r\n1\r\n", strlen(key), key);
    if (op == OP_PUT)
        return snprintf(text, TEXT_MAX, "set %s 0 0 %zu\r\n", key, size);
    return snprintf(text, TEXT_MAX, op == OP_GET ? "get %s\r\n" : "incr %s 1\r\n", key);
}

static void queue_request(struct link *link, enum op op, unsigned slot, const char *key, const char *data, size_t size)
{
    struct request *request = &link->requests[(link->first + link->count++) % DEPTH_MAX];
    request->op = op;
    request->slot = slot;
    request->size = size;
    append(link, request->text, (size_t)write_request(request->text, op, key, size));
    if (op == OP_PUT) {
        append(link, data, size);
        append(link, "\r\n", 2);
    }
}

/* Sends as many bytes as possible without waiting. */
static void send_out(struct link *link)
{
    if (link->segment_count == 0)
        return;
    struct msghdr message = {.msg_iov = link->segments, .msg_iovlen = link->segment_count};
    ssize_t sent = sendmsg(link->socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0 && errno == EAGAIN)
        return;
    if (sent < 0)
        die("the store has closed the connection");
    size_t rest = (size_t)sent, whole = 0;
    while (whole < link->segment_count && rest >= link->segments[whole].iov_len)
        rest -= link->segments[whole++].iov_len;
    link->segment_count -= whole;
    memmove(link->segments, link->segments + whole, link->segment_count * sizeof link->segments[0]);
    if (rest > 0) {
        link->segments[0].iov_base = (char *)link->segments[0].iov_base + rest;
        link->segments[0].iov_len -= rest;
    }
}

void peer_post(struct connection *connection, enum op op, unsigned slot, uint64_t offset, size_t size)
{
    char key[KEY_MAX];
    snprintf(key, sizeof key, op == OP_ATOMIC ? "count:%zu:%llu" : "%zu:%llu", size, (unsigned long long)offset);
    queue_request(connection->own, op, slot, key, operation_buffer(connection, slot, size), size);
}

/* ---- answers ---------------------------------------------------------------------------------------------------- */

/* The length of a line up to its end, or 0 while it is incomplete. */
static size_t line_length(const char *start, size_t size)
{
    const char *end = memchr(start, '\n', size);
    return end == NULL ? 0 : (size_t)(end - start) + 1;
}

static noreturn void die_of(const struct link *link, const char *what)
{
    die("%s: %.*s", what, (int)(link->in_end - link->in_start > 80 ? 80 : link->in_end - link->in_start), link->in + link->in_start);
}

/* The length of the next answer, or 0 while it is incomplete. `value` is set to the beginning of its value. */
static size_t next_answer(const struct link *link, const struct request *request, const char **value)
{
    const char *start = link->in + link->in_start;
    size_t available = link->in_end - link->in_start, line = line_length(start, available), size = 0;
    *value = start;
    if (line == 0)
        return 0;
    if (request->op == OP_PUT) {
        if (strncmp(start, is_redis ? "+OK\r\n" : "STORED\r\n", line) != 0)
            die_of(link, "SET");
        return line;
    }
    if (request->op == OP_ATOMIC) {
        *value = is_redis ? start + 1 : start;
        if (**value < '0' || **value > '9')
            die_of(link, "INCR");
        return line;
    }
    if (sscanf(start, is_redis ? "$%zu" : "VALUE %*s %*u %zu", &size) != 1 || size != request->size)
        die_of(link, "GET");
    *value = start + line;
    size_t whole = line + size + (is_redis ? 2 : 2 + 5);
    return whole <= available ? whole : 0;
}

static void receive(struct link *link)
{
    if (link->in_start == link->in_end)
        link->in_start = link->in_end = 0;
    if (IN_MAX - link->in_end < SPACE_MIN && link->in_start > 0) {
        memmove(link->in, link->in + link->in_start, link->in_end - link->in_start);
        link->in_end -= link->in_start;
        link->in_start = 0;
    }
    ssize_t got = recv(link->socket, link->in + link->in_end, IN_MAX - link->in_end, MSG_DONTWAIT);
    if (got == 0 || (got < 0 && errno != EAGAIN))
        die("the store has closed the connection");
    if (got > 0)
        link->in_end += (size_t)got;
}

unsigned peer_reap(struct connection *connection, enum op op, size_t size, unsigned slots[])
{
    struct link *link = connection->own;
    unsigned count = 0;
    size_t length;
    const char *value;
    (void)op;
    send_out(link);
    receive(link);
    while (link->count > 0 && (length = next_answer(link, &link->requests[link->first], &value)) > 0) {
        const struct request *request = &link->requests[link->first];
        if (request->op == OP_GET) {
            memcpy(operation_buffer(connection, request->slot, size), value, size);
        } else if (request->op == OP_ATOMIC) {
            uint64_t number = strtoull(value, NULL, 10);
            memcpy(operation_buffer(connection, request->slot, size), &number, sizeof number);
        }
        slots[count++] = request->slot;
        link->in_start += length;
        link->first = (link->first + 1) % DEPTH_MAX;
        link->count--;
    }
    return count;
}

/* ---- initial values ---------------------------------------------------------------------------------------------- */

static void set(struct connection *connection, const char *key, const char *data, size_t size)
{
    struct link *link = connection->own;
    unsigned slots[DEPTH_MAX];
    while (link->count == DEPTH_MAX)
        peer_reap(connection, OP_PUT, size, slots);
    queue_request(link, OP_PUT, 0, key, data, size);
}

void peer_prepare(size_t size)
{
    struct connection *connection = &connections[0];
    unsigned slots[DEPTH_MAX];
    char key[KEY_MAX];
    for (uint64_t index = 0; index < peer_offset_count(size); index++) {
        uint64_t offset = index * size;
        /* At most the last DEPTH_MAX requests are unsent, so that older buffers are free. */
        char *data = receive_buffer(connection, (unsigned)(index % RECEIVES));
        for (size_t at = 0; at < size; at += 8) {
            uint64_t word = word_at(offset + at);
            memcpy(data + at, &word, 8);
        }
        snprintf(key, sizeof key, "%zu:%llu", size, (unsigned long long)offset);
        set(connection, key, data, size);
        snprintf(key, sizeof key, "count:%zu:%llu", size, (unsigned long long)offset);
        if (size == 8)
            set(connection, key, "0", 1);
    }
    while (links[0].count > 0)
        peer_reap(connection, OP_PUT, size, slots);
}
