/*
 * The limit for messages: two pinned threads of two processes, which poll words in shared memory. A connection has two rings of
 * slots, one in each direction. A slot has a generation and a message, which is read in place.
 */
#include "peer.h"

#include <fcntl.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

const struct peer peer = {.name = "shm", .has_target = true, .has_region = false};

struct ring_slot {
    _Alignas(64) atomic_ullong generation; /* the number of messages written to the slot */
    _Alignas(64) char data[BYTES_MAX];
    char spacing[4096 + 64]; /* so that small messages do not map to one set of the cache */
};

struct ring {
    struct ring_slot slots[DEPTH_MAX];
};

struct link {
    struct ring rings[2]; /* to the target, to the client */
};

static struct link *links;
static uint64_t sent[CONNECTIONS_MAX], received[CONNECTIONS_MAX];
static unsigned unanswered[CONNECTIONS_MAX][DEPTH_MAX];

const char *peer_lacks(enum op op, size_t size)
{
    (void)size;
    return op == OP_MESSAGE ? NULL : "messages only";
}

static void pin(unsigned processor)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(processor % (unsigned)sysconf(_SC_NPROCESSORS_ONLN), &set);
    sched_setaffinity(0, sizeof set, &set);
}

void peer_open_target(int control)
{
    int fd;
    char path[64];
    links = (struct link *)map_memory(CONNECTIONS_MAX * sizeof *links, SHARED, &fd);
    snprintf(path, sizeof path, "/proc/%d/fd/%d", getpid(), fd);
    send_block(control, path, sizeof path);
    pin(0);
}

void peer_open_client(int control)
{
    char path[64];
    if (receive_block(control, path, sizeof path) != sizeof path)
        die("no path");
    int fd = open(path, O_RDWR);
    links = mmap(NULL, CONNECTIONS_MAX * sizeof *links, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (fd < 0 || links == MAP_FAILED)
        die("cannot map %s", path);
    pin(1);
}

static void write_message(struct ring *ring, uint64_t number, const char *data, size_t size)
{
    struct ring_slot *ring_slot = &ring->slots[number % DEPTH_MAX];
    memcpy(ring_slot->data, data, size);
    atomic_store_explicit(&ring_slot->generation, number / DEPTH_MAX + 1, memory_order_release);
}

static const char *read_message(struct ring *ring, uint64_t number)
{
    struct ring_slot *ring_slot = &ring->slots[number % DEPTH_MAX];
    return atomic_load_explicit(&ring_slot->generation, memory_order_acquire) == number / DEPTH_MAX + 1 ? ring_slot->data : NULL;
}

void peer_post(struct connection *connection, enum op op, unsigned slot, uint64_t offset, size_t size)
{
    (void)op, (void)offset;
    unanswered[connection->index][sent[connection->index] % DEPTH_MAX] = slot;
    write_message(&links[connection->index].rings[0], sent[connection->index]++, operation_buffer(connection, slot, size), size);
}

unsigned peer_reap(struct connection *connection, enum op op, size_t size, unsigned slots[])
{
    (void)op, (void)size;
    unsigned count = 0, i = connection->index;
    for (const char *data; count < DEPTH_MAX && (data = read_message(&links[i].rings[1], received[i])) != NULL; received[i]++) {
        connection->received = data;
        slots[count++] = unanswered[i][received[i] % DEPTH_MAX];
    }
    return count;
}

bool peer_target_polls(enum op op)
{
    return op == OP_MESSAGE;
}

/* At most DEPTH_MAX messages are in flight, so that the answer's slot is free. */
bool peer_progress(enum op op, size_t size, unsigned connection_count)
{
    bool worked = false;
    (void)op;
    for (unsigned i = 0; i < connection_count; i++)
        for (const char *data; (data = read_message(&links[i].rings[0], received[i])) != NULL; received[i]++, worked = true)
            write_message(&links[i].rings[1], received[i], data, size);
    return worked;
}
