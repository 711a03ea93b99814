/*
 * UCX by its own API: ucp_get_nbx, ucp_put_nbx, ucp_atomic_op_nbx and tagged messages, one worker and endpoint for each
 * connection.
 * The flavour names the allowed transports (UCX_TLS). UCX allocates the region, as its shared-memory transports require.
 */
#include "peer.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include <ucp/api/ucp.h>

const struct peer peer = {.name = "ucx", .has_target = true, .has_region = true};

enum { BLOB_MAX = 16384, TAG = 1 };

struct link {
    ucp_worker_h worker;
    ucp_ep_h endpoint;
    ucp_rkey_h key;
    uint64_t base;
    /* Completed since the last poll: slots of operations, buffers with a received message, buffers whose answer was sent. */
    unsigned done[RECEIVES], done_count, received[RECEIVES], received_count, answered[RECEIVES], answered_count;
    unsigned unanswered[DEPTH_MAX], first, count;
};

static struct link links[CONNECTIONS_MAX];
static ucp_context_h context;
static ucp_mem_h memory;
static void *region;

static bool is_cma(void)
{
    return strncmp(options.flavour, "cma", 3) == 0;
}

/* Whether the client's UCX accesses the target's memory directly. This UCX does not use CMA for small gets and puts. */
static bool is_direct(void)
{
    return strstr(options.flavour, "tcp") == NULL && !is_cma();
}

const char *peer_lacks(enum op op, size_t size)
{
    return op == OP_ATOMIC && size != 8 ? "atomics are of 8 bytes" : NULL;
}

static void check(ucs_status_t status, const char *what)
{
    if (status != UCS_OK)
        die("%s: %s", what, ucs_status_string(status));
}

/* ---- completions ------------------------------------------------------------------------------------------------- */

/* The argument of a callback: a slot or a receive buffer of a connection. */
static struct operation {
    struct link *link;
    unsigned number;
} operations[CONNECTIONS_MAX][RECEIVES];

static void on_done(void *request, ucs_status_t status, void *user_data)
{
    struct operation *operation = user_data;
    check(status, "operation");
    operation->link->done[operation->link->done_count++] = operation->number;
    ucp_request_free(request);
}

static void on_answered(void *request, ucs_status_t status, void *user_data)
{
    struct operation *operation = user_data;
    check(status, "answer");
    operation->link->answered[operation->link->answered_count++] = operation->number;
    ucp_request_free(request);
}

static void on_received(void *request, ucs_status_t status, const ucp_tag_recv_info_t *info, void *user_data)
{
    struct operation *operation = user_data;
    (void)info;
    check(status, "receive");
    operation->link->received[operation->link->received_count++] = operation->number;
    ucp_request_free(request);
}

static void on_sent(void *request, ucs_status_t status, void *user_data)
{
    (void)user_data;
    check(status, "operation");
    ucp_request_free(request);
}

/* Whether the request is complete already, so that its callback is not called. */
static bool is_complete(ucs_status_ptr_t request, const char *what)
{
    if (UCS_PTR_IS_ERR(request))
        check(UCS_PTR_STATUS(request), what);
    return request == NULL;
}

static ucp_request_param_t param_for(ucp_send_nbx_callback_t callback, struct operation *operation)
{
    return (ucp_request_param_t){
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
        .cb.send = callback,
        .user_data = operation,
    };
}

/* ---- setting up -------------------------------------------------------------------------------------------------- */

static void open_context(void)
{
    ucp_config_t *config;
    check(ucp_config_read(NULL, NULL, &config), "configuration");
    check(ucp_config_modify(config, "TLS", options.flavour), "transports");
    ucp_params_t params = {
        .field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_MT_WORKERS_SHARED,
        .features = UCP_FEATURE_RMA | UCP_FEATURE_AMO64 | UCP_FEATURE_TAG,
        .mt_workers_shared = 1,
    };
    check(ucp_init(&params, config, &context), "context");
    ucp_config_release(config);
}

static void open_worker(struct connection *connection, int control)
{
    struct link *link = connection->own = &links[connection->index];
    ucp_worker_params_t params = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE, .thread_mode = UCS_THREAD_MODE_SINGLE};
    check(ucp_worker_create(context, &params, &link->worker), "worker");
    for (unsigned i = 0; i < RECEIVES; i++)
        operations[connection->index][i] = (struct operation){link, i};
    ucp_address_t *address;
    size_t size;
    check(ucp_worker_get_address(link->worker, &address, &size), "address");
    send_block(control, address, size);
    ucp_worker_release_address(link->worker, address);
}

static void open_endpoint(struct link *link, const char *address)
{
    ucp_ep_params_t params = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS, .address = (const ucp_address_t *)address};
    check(ucp_ep_create(link->worker, &params, &link->endpoint), "endpoint");
}

static void post_receive(struct connection *connection, unsigned index)
{
    struct link *link = connection->own;
    ucp_request_param_t param = param_for(NULL, &operations[connection->index][index]);
    param.cb.recv = on_received;
    if (is_complete(ucp_tag_recv_nbx(link->worker, receive_buffer(connection, index), BYTES_MAX, TAG, UINT64_MAX, &param), "receive"))
        link->received[link->received_count++] = index;
}

static void post_receives(struct connection *connection)
{
    for (unsigned i = 0; i < RECEIVES; i++)
        post_receive(connection, i);
}

static void map_region(void)
{
    ucp_mem_map_params_t params = {
        .field_mask = UCP_MEM_MAP_PARAM_FIELD_LENGTH | UCP_MEM_MAP_PARAM_FIELD_FLAGS,
        .length = options.region,
        .flags = UCP_MEM_MAP_ALLOCATE,
    };
    ucp_mem_attr_t attr = {.field_mask = UCP_MEM_ATTR_FIELD_ADDRESS};
    if (is_cma()) {
        /* UCX would access memory that the setup transport can map through that transport. */
        params.field_mask = UCP_MEM_MAP_PARAM_FIELD_LENGTH | UCP_MEM_MAP_PARAM_FIELD_ADDRESS;
        params.address = map_memory(options.region, options.memory, NULL);
    }
    check(ucp_mem_map(context, &params, &memory), "region");
    check(ucp_mem_query(memory, &attr), "region");
    region = attr.address;
    fill_region(region);
}

void peer_open_target(int control)
{
    char ready, address[BLOB_MAX];
    open_context();
    map_region();
    for (unsigned i = 0; i < options.connections; i++) {
        void *packed;
        size_t size;
        uint64_t base = (uint64_t)(uintptr_t)region;
        open_worker(&connections[i], control);
        check(ucp_rkey_pack(context, memory, &packed, &size), "key");
        send_block(control, packed, size);
        ucp_rkey_buffer_release(packed);
        send_block(control, &base, sizeof base);
        receive_block(control, address, sizeof address);
        open_endpoint(&links[i], address);
        post_receives(&connections[i]);
    }
    /* Endpoints need progress at both ends to connect. */
    for (; recv(control, &ready, 1, MSG_DONTWAIT) < 0; sched_yield())
        for (unsigned i = 0; i < options.connections; i++)
            ucp_worker_progress(links[i].worker);
    send_block(control, &ready, 1);
}

static void flush(struct link *link)
{
    ucp_request_param_t param = {0};
    ucs_status_ptr_t request = ucp_ep_flush_nbx(link->endpoint, &param);
    if (is_complete(request, "flush"))
        return;
    for (; ucp_request_check_status(request) == UCS_INPROGRESS; sched_yield())
        ucp_worker_progress(link->worker);
    check(ucp_request_check_status(request), "flush");
    ucp_request_free(request);
}

void peer_open_client(int control)
{
    char ready = 1, address[BLOB_MAX], key[BLOB_MAX];
    open_context();
    for (unsigned i = 0; i < options.connections; i++) {
        /* The order is that in which the target sends. */
        struct link *link = &links[i];
        struct connection *connection = &connections[i];
        receive_block(control, address, sizeof address);
        receive_block(control, key, sizeof key);
        receive_block(control, &link->base, sizeof link->base);
        open_worker(connection, control);
        open_endpoint(link, address);
        check(ucp_ep_rkey_unpack(link->endpoint, key, &link->key), "key");
        post_receives(connection);
    }
    for (unsigned i = 0; i < options.connections; i++)
        flush(&links[i]);
    send_block(control, &ready, 1);
    receive_block(control, &ready, 1);
}

/* ---- operations -------------------------------------------------------------------------------------------------- */

static void post_put(struct connection *connection, unsigned slot, uint64_t address, size_t size)
{
    struct link *link = connection->own;
    ucp_request_param_t param = param_for(is_direct() ? on_done : on_sent, &operations[connection->index][slot]);
    bool done = is_complete(ucp_put_nbx(link->endpoint, operation_buffer(connection, slot, size), size, address, link->key, &param), "put");
    if (!is_direct()) {
        /* The put is complete locally when the data was sent, and at the target after the flush. */
        param.cb.send = on_done;
        done = is_complete(ucp_ep_flush_nbx(link->endpoint, &param), "flush");
    }
    if (done)
        link->done[link->done_count++] = slot;
}

void peer_post(struct connection *connection, enum op op, unsigned slot, uint64_t offset, size_t size)
{
    static const uint64_t one = 1;
    struct link *link = connection->own;
    char *data = operation_buffer(connection, slot, size);
    ucp_request_param_t param = param_for(on_done, &operations[connection->index][slot]);
    bool done = false;
    switch (op) {
    case OP_GET: done = is_complete(ucp_get_nbx(link->endpoint, data, size, link->base + offset, link->key, &param), "get"); break;
    case OP_PUT: post_put(connection, slot, link->base + offset, size); break;
    case OP_ATOMIC:
        param.op_attr_mask |= UCP_OP_ATTR_FIELD_REPLY_BUFFER | UCP_OP_ATTR_FIELD_DATATYPE;
        param.reply_buffer = data;
        param.datatype = ucp_dt_make_contig(8);
        done = is_complete(ucp_atomic_op_nbx(link->endpoint, UCP_ATOMIC_OP_ADD, &one, 1, link->base + offset, link->key, &param), "atomic");
        break;
    case OP_MESSAGE:
        link->unanswered[(link->first + link->count++) % DEPTH_MAX] = slot;
        param.cb.send = on_sent;
        is_complete(ucp_tag_send_nbx(link->endpoint, data, size, TAG, &param), "message");
        break;
    }
    if (done)
        link->done[link->done_count++] = slot;
}

static unsigned reap_messages(struct connection *connection, unsigned slots[])
{
    struct link *link = connection->own;
    unsigned count = 0, received = link->received_count;
    /* A posted receive may complete at once. The next poll handles it. */
    unsigned indices[RECEIVES];
    memcpy(indices, link->received, received * sizeof indices[0]);
    link->received_count = 0;
    for (unsigned i = 0; i < received; i++) {
        connection->received = receive_buffer(connection, indices[i]);
        slots[count++] = link->unanswered[link->first];
        link->first = (link->first + 1) % DEPTH_MAX;
        link->count--;
        post_receive(connection, indices[i]);
    }
    return count;
}

unsigned peer_reap(struct connection *connection, enum op op, size_t size, unsigned slots[])
{
    struct link *link = connection->own;
    (void)size;
    if (link->done_count == 0)
        ucp_worker_progress(link->worker);
    if (op == OP_MESSAGE)
        return reap_messages(connection, slots);
    unsigned count = link->done_count;
    memcpy(slots, link->done, count * sizeof slots[0]);
    link->done_count = 0;
    return count;
}

/* If the client accesses the memory directly, the target's program sleeps. */
bool peer_target_polls(enum op op)
{
    return op == OP_MESSAGE || !is_direct();
}

static void answer(struct connection *connection, unsigned index, size_t size)
{
    struct link *link = connection->own;
    ucp_request_param_t param = param_for(on_answered, &operations[connection->index][index]);
    if (is_complete(ucp_tag_send_nbx(link->endpoint, receive_buffer(connection, index), size, TAG, &param), "answer"))
        link->answered[link->answered_count++] = index;
}

bool peer_progress(enum op op, size_t size, unsigned connection_count)
{
    bool worked = false;
    (void)op;
    for (unsigned i = 0; i < connection_count; i++) {
        struct link *link = &links[i];
        worked |= ucp_worker_progress(link->worker) != 0;
        while (link->received_count > 0) {
            unsigned index = link->received[0];
            memmove(link->received, link->received + 1, --link->received_count * sizeof link->received[0]);
            answer(&connections[i], index, size);
        }
        while (link->answered_count > 0)
            post_receive(&connections[i], link->answered[--link->answered_count]);
    }
    return worked;
}
