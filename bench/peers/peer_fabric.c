/*
 * libfabric: fi_read, fi_write, fi_fetch_atomic, fi_send and fi_recv over reliable unconnected endpoints. Each connection has its
 * own endpoint and domain. The flavour names the provider.
 */
#include "peer.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include <rdma/fabric.h>
#include <rdma/fi_atomic.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

const struct peer peer = {.name = "fabric", .has_target = true, .has_region = true};

enum { NAME_MAX_BYTES = 512, REGION_KEY = 0x5e, BUFFER_KEY = 0x5f };

/* The context of an operation. The provider uses the first field. */
struct operation {
    struct fi_context2 context;
    unsigned number;
    bool is_receive;
};

struct link {
    struct fi_info *info;
    struct fid_fabric *fabric;
    struct fid_domain *domain;
    struct fid_av *av;
    struct fid_cq *cq;
    struct fid_ep *endpoint;
    struct fid_mr *region, *buffer;
    void *buffer_descriptor;
    fi_addr_t other;
    uint64_t base, key;
    bool has_atomics;
    struct operation receives[RECEIVES], sends[RECEIVES];
    unsigned done[RECEIVES], done_count, received[RECEIVES], received_count;
    unsigned unanswered[DEPTH_MAX], first, count;
    uint64_t operand;
};

struct peer_info {
    uint64_t base, key;
    size_t name_size;
    char name[NAME_MAX_BYTES];
};

static struct link links[CONNECTIONS_MAX];

const char *peer_lacks(enum op op, size_t size)
{
    if (op == OP_ATOMIC)
        return size != 8 ? "atomics are of 8 bytes" : links[0].endpoint != NULL && !links[0].has_atomics ? "no atomics" : NULL;
    return NULL;
}

static void check(ssize_t status, const char *what)
{
    if (status < 0)
        die("%s: %s", what, fi_strerror((int)-status));
}

/* ---- completions ------------------------------------------------------------------------------------------------- */

/* Handles completions. Returns whether there were any. */
static bool progress(struct link *link)
{
    struct fi_cq_msg_entry entries[DEPTH_MAX];
    ssize_t count = fi_cq_read(link->cq, entries, DEPTH_MAX);
    if (count == -FI_EAGAIN)
        return false;
    if (count == -FI_EAVAIL) {
        struct fi_cq_err_entry error = {0};
        fi_cq_readerr(link->cq, &error, 0);
        die("operation: %s", fi_strerror(error.err));
    }
    check(count, "completions");
    for (ssize_t i = 0; i < count; i++) {
        struct operation *operation = entries[i].op_context;
        if (operation->is_receive)
            link->received[link->received_count++] = operation->number;
        else
            link->done[link->done_count++] = operation->number;
    }
    return true;
}

/* ---- setting up -------------------------------------------------------------------------------------------------- */

static void find_provider(struct link *link, uint64_t atomics)
{
    struct fi_info *hints = fi_allocinfo();
    hints->caps = FI_MSG | FI_RMA | atomics;
    hints->mode = FI_CONTEXT | FI_CONTEXT2;
    hints->ep_attr->type = FI_EP_RDM;
    hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_ENDPOINT;
    hints->domain_attr->threading = FI_THREAD_DOMAIN;
    hints->fabric_attr->prov_name = strdup(options.flavour);
    if (strstr(options.flavour, "tcp") != NULL) {
        /* A write completes after its delivery. The other provider writes into the target's memory directly. */
        hints->tx_attr->op_flags = FI_DELIVERY_COMPLETE;
        hints->addr_format = FI_SOCKADDR_IN;
    }
    const char *node = strstr(options.flavour, "tcp") != NULL ? "127.0.0.1" : NULL;
    int status = fi_getinfo(FI_VERSION(1, 17), node, NULL, node != NULL ? FI_SOURCE : 0, hints, &link->info);
    link->has_atomics = status == 0 && atomics != 0;
    if (status != 0)
        link->info = NULL;
    fi_freeinfo(hints);
}

static void open_endpoint(struct connection *connection)
{
    struct link *link = connection->own = &links[connection->index];
    find_provider(link, FI_ATOMIC);
    if (link->info == NULL)
        find_provider(link, 0);
    if (link->info == NULL)
        die("no provider %s with messages and RMA", options.flavour);
    struct fi_cq_attr cq = {.format = FI_CQ_FORMAT_MSG, .size = 4 * RECEIVES, .wait_obj = FI_WAIT_NONE};
    struct fi_av_attr av = {.type = FI_AV_TABLE};
    check(fi_fabric(link->info->fabric_attr, &link->fabric, NULL), "fabric");
    check(fi_domain(link->fabric, link->info, &link->domain, NULL), "domain");
    check(fi_av_open(link->domain, &av, &link->av, NULL), "addresses");
    check(fi_cq_open(link->domain, &cq, &link->cq, NULL), "completion queue");
    check(fi_endpoint(link->domain, link->info, &link->endpoint, NULL), "endpoint");
    check(fi_ep_bind(link->endpoint, &link->av->fid, 0), "addresses");
    check(fi_ep_bind(link->endpoint, &link->cq->fid, FI_TRANSMIT | FI_RECV), "completion queue");
    check(fi_enable(link->endpoint), "enable");
    for (unsigned i = 0; i < RECEIVES; i++) {
        link->receives[i] = (struct operation){.number = i, .is_receive = true};
        link->sends[i] = (struct operation){.number = i};
    }
}

static struct fid_mr *registered(struct link *link, void *memory, size_t size, uint64_t access, uint64_t key)
{
    struct fid_mr *mr;
    check(fi_mr_reg(link->domain, memory, size, access, 0, key, 0, &mr, NULL), "region");
    if (link->info->domain_attr->mr_mode & FI_MR_ENDPOINT) {
        check(fi_mr_bind(mr, &link->endpoint->fid, 0), "region");
        check(fi_mr_enable(mr), "region");
    }
    return mr;
}

static void post_receive(struct connection *connection, unsigned index)
{
    struct link *link = connection->own;
    ssize_t status;
    while ((status = fi_recv(link->endpoint, receive_buffer(connection, index), BYTES_MAX, link->buffer_descriptor, FI_ADDR_UNSPEC,
                             &link->receives[index])) == -FI_EAGAIN)
        progress(link);
    check(status, "receive");
}

static void open_connection(struct connection *connection, char *region, struct peer_info *peer_info)
{
    open_endpoint(connection);
    struct link *link = connection->own;
    link->buffer = registered(link, connection->buffer, CONNECTION_BYTES, FI_READ | FI_WRITE | FI_SEND | FI_RECV, BUFFER_KEY + connection->index * 2u);
    link->buffer_descriptor = fi_mr_desc(link->buffer);
    *peer_info = (struct peer_info){.name_size = NAME_MAX_BYTES};
    check(fi_getname(&link->endpoint->fid, peer_info->name, &peer_info->name_size), "name");
    if (region != NULL) {
        link->region = registered(link, region, options.region, FI_REMOTE_READ | FI_REMOTE_WRITE, REGION_KEY + connection->index * 2u);
        peer_info->key = fi_mr_key(link->region);
        peer_info->base = link->info->domain_attr->mr_mode & FI_MR_VIRT_ADDR ? (uint64_t)(uintptr_t)region : 0;
    }
}

static void connect_addresses(struct connection *connection, const struct peer_info *peer_info)
{
    struct link *link = connection->own;
    link->base = peer_info->base;
    link->key = peer_info->key;
    if (fi_av_insert(link->av, peer_info->name, 1, &link->other, 0, NULL) != 1)
        die("the other end's address is invalid");
    for (unsigned i = 0; i < RECEIVES; i++)
        post_receive(connection, i);
}

void peer_open_target(int control)
{
    struct peer_info own, other;
    char ready, *region = map_memory(options.region, options.memory, NULL);
    fill_region(region);
    for (unsigned i = 0; i < options.connections; i++) {
        open_connection(&connections[i], region, &own);
        send_block(control, &own, sizeof own);
        receive_block(control, &other, sizeof other);
        connect_addresses(&connections[i], &other);
    }
    /* Connections need progress at both ends. */
    for (; recv(control, &ready, 1, MSG_DONTWAIT) < 0; sched_yield())
        for (unsigned i = 0; i < options.connections; i++)
            progress(&links[i]);
    send_block(control, &ready, 1);
}

void peer_open_client(int control)
{
    struct peer_info own, other;
    char ready = 1;
    for (unsigned i = 0; i < options.connections; i++) {
        receive_block(control, &other, sizeof other);
        open_connection(&connections[i], NULL, &own);
        send_block(control, &own, sizeof own);
        connect_addresses(&connections[i], &other);
    }
    for (unsigned i = 0; i < options.connections; i++) {
        unsigned slots[DEPTH_MAX];
        peer_post(&connections[i], OP_GET, 0, 0, 8);
        while (peer_reap(&connections[i], OP_GET, 8, slots) == 0)
            sched_yield();
    }
    send_block(control, &ready, 1);
    receive_block(control, &ready, 1);
}

/* ---- operations -------------------------------------------------------------------------------------------------- */

static ssize_t start(struct connection *connection, enum op op, unsigned slot, uint64_t address, size_t size)
{
    struct link *link = connection->own;
    void *descriptor = link->buffer_descriptor, *operation = &link->sends[slot];
    char *data = operation_buffer(connection, slot, size);
    switch (op) {
    case OP_GET: return fi_read(link->endpoint, data, size, descriptor, link->other, address, link->key, operation);
    case OP_PUT: return fi_write(link->endpoint, data, size, descriptor, link->other, address, link->key, operation);
    case OP_MESSAGE: return fi_send(link->endpoint, data, size, descriptor, link->other, operation);
    case OP_ATOMIC: break;
    }
    link->operand = 1;
    return fi_fetch_atomic(link->endpoint, &link->operand, 1, NULL, data, descriptor, link->other, address, link->key, FI_UINT64, FI_SUM,
                           operation);
}

void peer_post(struct connection *connection, enum op op, unsigned slot, uint64_t offset, size_t size)
{
    struct link *link = connection->own;
    ssize_t status;
    if (op == OP_MESSAGE)
        link->unanswered[(link->first + link->count++) % DEPTH_MAX] = slot;
    while ((status = start(connection, op, slot, link->base + offset, size)) == -FI_EAGAIN)
        progress(link);
    check(status, "operation");
}

unsigned peer_reap(struct connection *connection, enum op op, size_t size, unsigned slots[])
{
    struct link *link = connection->own;
    unsigned count = 0;
    (void)size;
    progress(link);
    if (op != OP_MESSAGE) {
        count = link->done_count;
        memcpy(slots, link->done, count * sizeof slots[0]);
        link->done_count = 0;
        return count;
    }
    link->done_count = 0; /* sent messages */
    while (count < link->received_count) {
        unsigned index = link->received[count];
        connection->received = receive_buffer(connection, index);
        slots[count++] = link->unanswered[link->first];
        link->first = (link->first + 1) % DEPTH_MAX;
        link->count--;
    }
    unsigned indices[RECEIVES];
    memcpy(indices, link->received, count * sizeof indices[0]);
    link->received_count = 0;
    for (unsigned i = 0; i < count; i++)
        post_receive(connection, indices[i]);
    return count;
}

/* Providers need progress at both ends. */
bool peer_target_polls(enum op op)
{
    (void)op;
    return true;
}

bool peer_progress(enum op op, size_t size, unsigned connection_count)
{
    bool worked = false;
    (void)op;
    for (unsigned i = 0; i < connection_count; i++) {
        struct link *link = &links[i];
        worked |= progress(link);
        while (link->received_count > 0) {
            unsigned index = link->received[0];
            memmove(link->received, link->received + 1, --link->received_count * sizeof link->received[0]);
            ssize_t status;
            while ((status = fi_send(link->endpoint, receive_buffer(&connections[i], index), size, link->buffer_descriptor, link->other,
                                     &link->sends[index])) == -FI_EAGAIN)
                progress(link);
            check(status, "answer");
        }
        while (link->done_count > 0)
            post_receive(&connections[i], link->done[--link->done_count]);
    }
    return worked;
}
