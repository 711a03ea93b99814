/*
 * Redis and memcached by their own protocols over a unix socket: GET, SET and INCRBY (incr) of values of the same sizes, one connection
 * for each lane. The store is a program of its own. What is posted goes out together when answers are next looked for, and the
 * client looks for them without sleeping: both better than a client library does.
 */
#include "peer.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

const struct peer peer = {.name = "kv", .has_target = false, .has_region = false};

enum { PLACES_MAX = 16384, KEY_MAX = 64, OUT_MAX = DEPTH_MAX * (BYTES_MAX + 256), IN_MAX = 2 * BYTES_MAX };

struct asked {
    enum op op;
    unsigned slot;
    size_t size;
};

struct link {
    int socket;
    char *out, *in;
    size_t out_start, out_end, in_start, in_end;
    struct asked asked[DEPTH_MAX];
    unsigned first, count;
};

static struct link links[LANES_MAX];
static bool is_redis;

const char *peer_lacks(enum op op, size_t size)
{
    return op == OP_MESSAGE ? "no messages" : op == OP_ATOMIC && size != 8 ? "atomics are of 8 bytes" : NULL;
}

/* Fewer for small values, as each has a key. */
uint64_t peer_places(size_t size)
{
    uint64_t places = options.region / size;
    return places < PLACES_MAX ? places : PLACES_MAX;
}

bool peer_target_works(enum op op)
{
    (void)op;
    return false;
}

bool peer_turn(enum op op, size_t size)
{
    (void)op, (void)size;
    return false;
}

void peer_open_target(int control)
{
    (void)control;
}

void peer_open_client(int control)
{
    (void)control;
    is_redis = strcmp(options.flavour, "redis") == 0;
    for (unsigned i = 0; i < options.lanes; i++) {
        links[i].socket = connect_to_meet(SOCK_STREAM);
        links[i].out = map_memory(OUT_MAX, false, NULL);
        links[i].in = map_memory(IN_MAX, false, NULL);
        lanes[i].own = &links[i];
    }
}

/* ---- requests --------------------------------------------------------------------------------------------------- */

static void append(struct link *link, const void *bytes, size_t size)
{
    if (size > OUT_MAX - link->out_end)
        die("requests of more than %d bytes", OUT_MAX);
    memcpy(link->out + link->out_end, bytes, size);
    link->out_end += size;
}

static void ask_redis(struct link *link, enum op op, const char *key, const char *data, size_t size)
{
    char text[256];
    static const char *const NAMES[] = {[OP_GET] = "GET", [OP_PUT] = "SET", [OP_ATOMIC] = "INCRBY"};
    int length = snprintf(text, sizeof text, "*%d\r\n$%zu\r\n%s\r\n$%zu\r\n%s\r\n", op == OP_GET ? 2 : 3, strlen(NAMES[op]), NAMES[op],
                          strlen(key), key);
    append(link, text, (size_t)length);
    if (op == OP_ATOMIC)
        append(link, "$1\r\n1\r\n", 7);
    if (op != OP_PUT)
        return;
    length = snprintf(text, sizeof text, "$%zu\r\n", size);
    append(link, text, (size_t)length);
    append(link, data, size);
    append(link, "\r\n", 2);
}

static void ask_memcached(struct link *link, enum op op, const char *key, const char *data, size_t size)
{
    char text[256];
    int length = op == OP_PUT ? snprintf(text, sizeof text, "set %s 0 0 %zu\r\n", key, size)
                              : snprintf(text, sizeof text, op == OP_GET ? "get %s\r\n" : "incr %s 1\r\n", key);
    append(link, text, (size_t)length);
    if (op == OP_PUT) {
        append(link, data, size);
        append(link, "\r\n", 2);
    }
}

static void ask(struct link *link, enum op op, const char *key, const char *data, size_t size)
{
    if (is_redis)
        ask_redis(link, op, key, data, size);
    else
        ask_memcached(link, op, key, data, size);
}

static void send_out(struct link *link)
{
    while (link->out_start < link->out_end) {
        ssize_t went = send(link->socket, link->out + link->out_start, link->out_end - link->out_start, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (went < 0 && errno == EAGAIN)
            return;
        if (went <= 0)
            die("the store has gone");
        link->out_start += (size_t)went;
    }
    link->out_start = link->out_end = 0;
}

void peer_post(struct lane *lane, enum op op, unsigned slot, uint64_t offset, size_t size)
{
    struct link *link = lane->own;
    char key[KEY_MAX];
    snprintf(key, sizeof key, op == OP_ATOMIC ? "count:%zu:%llu" : "%zu:%llu", size, (unsigned long long)offset);
    /* What could not be sent yet stays where it is; there is room for all that may be under way. */
    if (link->out_start > 0 && size > OUT_MAX - 256 - link->out_end) {
        memmove(link->out, link->out + link->out_start, link->out_end - link->out_start);
        link->out_end -= link->out_start;
        link->out_start = 0;
    }
    ask(link, op, key, outbox(lane, slot, size), size);
    link->asked[(link->first + link->count++) % DEPTH_MAX] = (struct asked){op, slot, size};
}

/* ---- answers ---------------------------------------------------------------------------------------------------- */

/* The length of a line up to its end, or 0 when it is not all there. */
static size_t line_length(const char *start, size_t size)
{
    const char *end = memchr(start, '\n', size);
    return end == NULL ? 0 : (size_t)(end - start) + 1;
}

static noreturn void die_of(const struct link *link, const char *what)
{
    die("%s: %.*s", what, (int)(link->in_end - link->in_start > 80 ? 80 : link->in_end - link->in_start), link->in + link->in_start);
}

/* How many bytes the next answer has, or 0 when it is not all there; `value` is where its value begins. */
static size_t next_answer(const struct link *link, const struct asked *asked, const char **value)
{
    const char *start = link->in + link->in_start;
    size_t there = link->in_end - link->in_start, line = line_length(start, there), size = 0;
    *value = start;
    if (line == 0)
        return 0;
    if (asked->op == OP_PUT) {
        if (strncmp(start, is_redis ? "+OK\r\n" : "STORED\r\n", line) != 0)
            die_of(link, "SET");
        return line;
    }
    if (asked->op == OP_ATOMIC) {
        *value = is_redis ? start + 1 : start;
        if (**value < '0' || **value > '9')
            die_of(link, "INCR");
        return line;
    }
    if (sscanf(start, is_redis ? "$%zu" : "VALUE %*s %*u %zu", &size) != 1 || size != asked->size)
        die_of(link, "GET");
    *value = start + line;
    size_t whole = line + size + (is_redis ? 2 : 2 + 5);
    return whole <= there ? whole : 0;
}

static void receive(struct link *link)
{
    if (link->in_start == link->in_end)
        link->in_start = link->in_end = 0;
    if (link->in_end > IN_MAX / 2) {
        memmove(link->in, link->in + link->in_start, link->in_end - link->in_start);
        link->in_end -= link->in_start;
        link->in_start = 0;
    }
    ssize_t got = recv(link->socket, link->in + link->in_end, IN_MAX - link->in_end, MSG_DONTWAIT);
    if (got == 0 || (got < 0 && errno != EAGAIN))
        die("the store has gone");
    if (got > 0)
        link->in_end += (size_t)got;
}

unsigned peer_reap(struct lane *lane, enum op op, size_t size, unsigned slots[])
{
    struct link *link = lane->own;
    unsigned count = 0;
    size_t length;
    const char *value;
    (void)op;
    send_out(link);
    receive(link);
    while (link->count > 0 && (length = next_answer(link, &link->asked[link->first], &value)) > 0) {
        const struct asked *asked = &link->asked[link->first];
        if (asked->op == OP_GET) {
            memcpy(outbox(lane, asked->slot, size), value, size);
        } else if (asked->op == OP_ATOMIC) {
            uint64_t number = strtoull(value, NULL, 10);
            memcpy(outbox(lane, asked->slot, size), &number, sizeof number);
        }
        slots[count++] = asked->slot;
        link->in_start += length;
        link->first = (link->first + 1) % DEPTH_MAX;
        link->count--;
    }
    return count;
}

/* ---- what is there before anything is measured ------------------------------------------------------------------- */

static void set_and_wait(struct lane *lane, const char *key, const char *data, size_t size, size_t length)
{
    struct link *link = lane->own;
    unsigned slots[DEPTH_MAX];
    ask(link, OP_PUT, key, data, length);
    link->asked[(link->first + link->count++) % DEPTH_MAX] = (struct asked){OP_PUT, 0, size};
    while (link->count == DEPTH_MAX)
        peer_reap(lane, OP_PUT, size, slots);
}

void peer_prepare(size_t size)
{
    struct lane *lane = &lanes[0];
    unsigned slots[DEPTH_MAX];
    char key[KEY_MAX], *data = inbox(lane, 0);
    for (uint64_t place = 0; place < peer_places(size); place++) {
        uint64_t offset = place * size;
        for (size_t at = 0; at < size; at += 8) {
            uint64_t word = word_at(offset + at);
            memcpy(data + at, &word, 8);
        }
        snprintf(key, sizeof key, "%zu:%llu", size, (unsigned long long)offset);
        set_and_wait(lane, key, data, size, size);
        snprintf(key, sizeof key, "count:%zu:%llu", size, (unsigned long long)offset);
        if (size == 8)
            set_and_wait(lane, key, "0", size, 1);
    }
    while (links[0].count > 0)
        peer_reap(lane, OP_PUT, size, slots);
}
