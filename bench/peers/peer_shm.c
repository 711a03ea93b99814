/*
 * The limit for messages: two pinned threads of two processes, which spin on words in shared memory. A lane is two rings of
 * slots, one each way. A message follows the word that announces it, and is read in place.
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

struct box {
    _Alignas(64) atomic_ullong turn; /* how often the slot has been filled */
    _Alignas(64) char data[BYTES_MAX];
    char spacing[4096 + 64]; /* so that small messages do not all map to one set of the cache */
};

struct way {
    struct box boxes[DEPTH_MAX];
};

struct link {
    struct way ways[2]; /* of the client, of the target */
};

static struct link *links;
static uint64_t sent[LANES_MAX], received[LANES_MAX];
static unsigned asked[LANES_MAX][DEPTH_MAX];

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
    links = (struct link *)map_memory(LANES_MAX * sizeof *links, SHARED, &fd);
    snprintf(path, sizeof path, "/proc/%d/fd/%d", getpid(), fd);
    say(control, path, sizeof path);
    pin(0);
}

void peer_open_client(int control)
{
    char path[64];
    if (hear(control, path, sizeof path) != sizeof path)
        die("no path");
    int fd = open(path, O_RDWR);
    links = mmap(NULL, LANES_MAX * sizeof *links, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (fd < 0 || links == MAP_FAILED)
        die("cannot map %s", path);
    pin(1);
}

static void put_message(struct way *way, uint64_t number, const char *data, size_t size)
{
    struct box *box = &way->boxes[number % DEPTH_MAX];
    memcpy(box->data, data, size);
    atomic_store_explicit(&box->turn, number / DEPTH_MAX + 1, memory_order_release);
}

static const char *message(struct way *way, uint64_t number)
{
    struct box *box = &way->boxes[number % DEPTH_MAX];
    return atomic_load_explicit(&box->turn, memory_order_acquire) == number / DEPTH_MAX + 1 ? box->data : NULL;
}

void peer_post(struct lane *lane, enum op op, unsigned slot, uint64_t offset, size_t size)
{
    (void)op, (void)offset;
    asked[lane->index][sent[lane->index] % DEPTH_MAX] = slot;
    put_message(&links[lane->index].ways[0], sent[lane->index]++, outbox(lane, slot, size), size);
}

unsigned peer_reap(struct lane *lane, enum op op, size_t size, unsigned slots[])
{
    (void)op, (void)size;
    unsigned count = 0, i = lane->index;
    for (const char *data; count < DEPTH_MAX && (data = message(&links[i].ways[1], received[i])) != NULL; received[i]++) {
        lane->received = data;
        slots[count++] = asked[i][received[i] % DEPTH_MAX];
    }
    return count;
}

bool peer_target_works(enum op op)
{
    return op == OP_MESSAGE;
}

/* At most as many messages are outstanding as there are slots, so the answer's slot is free. */
bool peer_turn(enum op op, size_t size, unsigned lane_count)
{
    bool worked = false;
    (void)op;
    for (unsigned i = 0; i < lane_count; i++)
        for (const char *data; (data = message(&links[i].ways[0], received[i])) != NULL; received[i]++, worked = true)
            put_message(&links[i].ways[1], received[i], data, size);
    return worked;
}
