/*
 * A network block device in memory (nbdkit's memory plugin), by libnbd over a unix socket: one socket for each connection, reads and
 * writes of the same sizes at any offset. The server is a separate program. The client polls without sleeping.
 */
#include "peer.h"

#include <stdlib.h>
#include <string.h>

#include <libnbd.h>

const struct peer peer = {.name = "nbd", .has_target = false, .has_region = true};

struct link {
    struct nbd_handle *nbd;
    int64_t cookies[DEPTH_MAX]; /* of each slot; 0 without an operation in flight */
};

static struct link links[CONNECTIONS_MAX];

const char *peer_lacks(enum op op, size_t size)
{
    (void)size;
    return op == OP_MESSAGE ? "no messages" : op == OP_ATOMIC ? "no atomics" : NULL;
}

void peer_open_target(int control)
{
    (void)control;
}

/* Writes the initial content, because the device is empty. */
static void fill_device(struct connection *connection)
{
    struct link *link = connection->own;
    char *data = operation_buffer(connection, 0, MIB);
    for (uint64_t offset = 0; offset < options.region; offset += MIB) {
        for (size_t at = 0; at < MIB; at += 8) {
            uint64_t word = word_at(offset + at);
            memcpy(data + at, &word, 8);
        }
        if (nbd_pwrite(link->nbd, data, MIB, offset, 0) != 0)
            die("%s", nbd_get_error());
    }
}

void peer_open_client(int control)
{
    (void)control;
    for (unsigned i = 0; i < options.connections; i++) {
        struct link *link = connections[i].own = &links[i];
        if ((link->nbd = nbd_create()) == NULL || nbd_connect_unix(link->nbd, options.socket_path) != 0)
            die("%s", nbd_get_error());
    }
    fill_device(&connections[0]);
}

void peer_post(struct connection *connection, enum op op, unsigned slot, uint64_t offset, size_t size)
{
    struct link *link = connection->own;
    char *data = operation_buffer(connection, slot, size);
    link->cookies[slot] = op == OP_GET ? nbd_aio_pread(link->nbd, data, size, offset, NBD_NULL_COMPLETION, 0)
                                       : nbd_aio_pwrite(link->nbd, data, size, offset, NBD_NULL_COMPLETION, 0);
    if (link->cookies[slot] < 0)
        die("%s", nbd_get_error());
}

unsigned peer_reap(struct connection *connection, enum op op, size_t size, unsigned slots[])
{
    struct link *link = connection->own;
    unsigned count = 0;
    (void)op, (void)size;
    if (nbd_poll(link->nbd, 0) < 0)
        die("%s", nbd_get_error());
    for (unsigned slot = 0; slot < DEPTH_MAX; slot++) {
        int done = link->cookies[slot] == 0 ? 0 : nbd_aio_command_completed(link->nbd, (uint64_t)link->cookies[slot]);
        if (done < 0)
            die("%s", nbd_get_error());
        if (done > 0) {
            link->cookies[slot] = 0;
            slots[count++] = slot;
        }
    }
    return count;
}
