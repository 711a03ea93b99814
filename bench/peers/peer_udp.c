/* Bare UDP over the loopback, with both ends polling: the lower bound of packet transports. */
#include "peer.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>

const struct peer peer = {.name = "udp", .has_target = true, .has_region = false};

enum { DATAGRAM_MAX = 65507, RECEIVE_BUFFER = 4 * MIB };

static int sockets[CONNECTIONS_MAX];
static uint64_t sent[CONNECTIONS_MAX], received[CONNECTIONS_MAX];
static unsigned unanswered[CONNECTIONS_MAX][DEPTH_MAX];

const char *peer_lacks(enum op op, size_t size)
{
    return op != OP_MESSAGE ? "messages only" : size > DATAGRAM_MAX ? "longer than a datagram" : NULL;
}

static void open_end(int control)
{
    for (unsigned i = 0; i < options.connections; i++) {
        struct sockaddr_in own = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)}, other;
        socklen_t size = sizeof own;
        int bytes = RECEIVE_BUFFER;
        sockets[i] = socket(AF_INET, SOCK_DGRAM | SOCK_NONBLOCK, 0);
        if (sockets[i] < 0 || bind(sockets[i], (struct sockaddr *)&own, size) != 0 ||
            getsockname(sockets[i], (struct sockaddr *)&own, &size) != 0)
            die("no socket");
        /* This fails without privileges; small messages do not require it. */
        setsockopt(sockets[i], SOL_SOCKET, SO_RCVBUFFORCE, &bytes, sizeof bytes);
        send_block(control, &own, sizeof own);
        receive_block(control, &other, sizeof other);
        if (connect(sockets[i], (struct sockaddr *)&other, sizeof other) != 0)
            die("cannot connect to the other end");
    }
}

void peer_open_target(int control)
{
    open_end(control);
}

void peer_open_client(int control)
{
    open_end(control);
}

void peer_post(struct connection *connection, enum op op, unsigned slot, uint64_t offset, size_t size)
{
    (void)op, (void)offset;
    unanswered[connection->index][sent[connection->index]++ % DEPTH_MAX] = slot;
    if (send(sockets[connection->index], operation_buffer(connection, slot, size), size, 0) != (ssize_t)size)
        die("cannot send %zu bytes", size);
}

unsigned peer_reap(struct connection *connection, enum op op, size_t size, unsigned slots[])
{
    (void)op;
    unsigned i = connection->index;
    ssize_t got = recv(sockets[i], receive_buffer(connection, 0), BYTES_MAX, 0);
    if (got != (ssize_t)size) {
        if (got >= 0 || errno != EAGAIN)
            die("received %zd bytes instead of %zu", got, size);
        return 0;
    }
    connection->received = receive_buffer(connection, 0);
    slots[0] = unanswered[i][received[i]++ % DEPTH_MAX];
    return 1;
}

bool peer_target_polls(enum op op)
{
    return op == OP_MESSAGE;
}

bool peer_progress(enum op op, size_t size, unsigned connection_count)
{
    bool worked = false;
    (void)op, (void)size;
    for (unsigned i = 0; i < connection_count; i++) {
        ssize_t got = recv(sockets[i], receive_buffer(&connections[i], 0), BYTES_MAX, 0);
        if (got > 0 && send(sockets[i], receive_buffer(&connections[i], 0), (size_t)got, 0) != got)
            die("cannot answer %zd bytes", got);
        worked |= got > 0;
    }
    return worked;
}
