/* The limit for get and put: memcpy within one process, from and to random offsets of a region of the same size. */
#include "peer.h"

#include <string.h>

const struct peer peer = {.name = "memcpy", .has_target = false, .has_region = true};

static char *region;
static unsigned done[CONNECTIONS_MAX][DEPTH_MAX], done_count[CONNECTIONS_MAX];

const char *peer_lacks(enum op op, size_t size)
{
    return op == OP_MESSAGE || (op == OP_ATOMIC && size != 8) ? "no other end" : NULL;
}

void peer_open_target(int control)
{
    (void)control;
}

void peer_open_client(int control)
{
    (void)control;
    region = map_memory(options.region, options.memory, NULL);
    fill_region(region);
}

void peer_post(struct connection *connection, enum op op, unsigned slot, uint64_t offset, size_t size)
{
    char *buffer = operation_buffer(connection, slot, size);
    if (op == OP_GET)
        memcpy(buffer, region + offset, size);
    else if (op == OP_PUT)
        memcpy(region + offset, buffer, size);
    else
        *(uint64_t *)buffer = __atomic_fetch_add((uint64_t *)(region + offset), 1, __ATOMIC_SEQ_CST);
    done[connection->index][done_count[connection->index]++] = slot;
}

unsigned peer_reap(struct connection *connection, enum op op, size_t size, unsigned slots[])
{
    (void)op, (void)size;
    unsigned count = done_count[connection->index];
    memcpy(slots, done[connection->index], count * sizeof slots[0]);
    done_count[connection->index] = 0;
    return count;
}
