/* Bare UDP over the loopback, both ends polling: the least cost of any transport by packets. */
#include "peer.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>

const struct peer peer = {.name = "udp", .has_target = true, .has_region = false};

enum { DATAGRAM_MAX = 65507, RECEIVE_BUFFER = 4 * MIB };

static int sockets[LANES_MAX];
static uint64_t sent[LANES_MAX], received[LANES_MAX];
static unsigned asked[LANES_MAX][DEPTH_MAX];

const char *peer_lacks(enum op op, size_t size)
{
    return op != OP_MESSAGE ? "messages only" : size > DATAGRAM_MAX ? "longer than a datagram" : NULL;
}

static void open_end(int control)
{
    for (unsigned i = 0; i < options.lanes; i++) {
        struct sockaddr_in own = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)}, other;
        socklen_t size = sizeof own;
        int bytes = RECEIVE_BUFFER;
        sockets[i] = socket(AF_INET, SOCK_DGRAM | SOCK_NONBLOCK, 0);
        if (sockets[i] < 0 || bind(sockets[i], (struct sockaddr *)&own, size) != 0 ||
            getsockname(sockets[i], (struct sockaddr *)&own, &size) != 0)
            die("no socket");
        /* May be refused; small messages do not need it. */
        setsockopt(sockets[i], SOL_SOCKET, SO_RCVBUFFORCE, &bytes, sizeof bytes);
        say(control, &own, sizeof own);
        hear(control, &other, sizeof other);
        if (connect(sockets[i], (struct sockaddr *)&other, sizeof other) != 0)
            die("no way to the other end");
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

void peer_post(struct lane *lane, enum op op, unsigned slot, uint64_t offset, size_t size)
{
    (void)op, (void)offset;
    asked[lane->index][sent[lane->index]++ % DEPTH_MAX] = slot;
    if (send(sockets[lane->index], outbox(lane, slot, size), size, 0) != (ssize_t)size)
        die("cannot send %zu bytes", size);
}

unsigned peer_reap(struct lane *lane, enum op op, size_t size, unsigned slots[])
{
    (void)op;
    unsigned i = lane->index;
    ssize_t got = recv(sockets[i], inbox(lane, 0), BYTES_MAX, 0);
    if (got != (ssize_t)size) {
        if (got >= 0 || errno != EAGAIN)
            die("received %zd bytes instead of %zu", got, size);
        return 0;
    }
    lane->received = inbox(lane, 0);
    slots[0] = asked[i][received[i]++ % DEPTH_MAX];
    return 1;
}

bool peer_target_works(enum op op)
{
    return op == OP_MESSAGE;
}

bool peer_turn(enum op op, size_t size, unsigned lane_count)
{
    bool worked = false;
    (void)op, (void)size;
    for (unsigned i = 0; i < lane_count; i++) {
        ssize_t got = recv(sockets[i], inbox(&lanes[i], 0), BYTES_MAX, 0);
        if (got > 0 && send(sockets[i], inbox(&lanes[i], 0), (size_t)got, 0) != got)
            die("cannot answer %zd bytes", got);
        worked |= got > 0;
    }
    return worked;
}
