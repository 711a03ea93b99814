/*
 * UCX by its own API: ucp_get_nbx, ucp_put_nbx, ucp_atomic_op_nbx and tagged messages, one worker and endpoint for each lane.
 * The flavour names the allowed transports (UCX_TLS). UCX allocates the region, as its shared-memory transports need.
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
    /* Completed since the last poll: slots of operations, inboxes with a received message, inboxes whose answer was sent. */
    unsigned done[INBOX_COUNT], done_count, came[INBOX_COUNT], came_count, left[INBOX_COUNT], left_count;
    unsigned asked[DEPTH_MAX], first, count;
};

static struct link links[LANES_MAX];
static ucp_context_h context;
static ucp_mem_h memory;
static void *region;

static bool is_cma(void)
{
    return strncmp(options.flavour, "cma", 3) == 0;
}

/* Whether the client's UCX accesses the memory itself. This UCX does not use CMA for get and put of small sizes. */
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

/* A callback's argument: one of a lane's slots or inboxes. */
static struct mark {
    struct link *link;
    unsigned number;
} marks[LANES_MAX][INBOX_COUNT];

static void on_done(void *request, ucs_status_t status, void *user_data)
{
    struct mark *mark = user_data;
    check(status, "operation");
    mark->link->done[mark->link->done_count++] = mark->number;
    ucp_request_free(request);
}

static void on_left(void *request, ucs_status_t status, void *user_data)
{
    struct mark *mark = user_data;
    check(status, "answer");
    mark->link->left[mark->link->left_count++] = mark->number;
    ucp_request_free(request);
}

static void on_came(void *request, ucs_status_t status, const ucp_tag_recv_info_t *info, void *user_data)
{
    struct mark *mark = user_data;
    (void)info;
    check(status, "receive");
    mark->link->came[mark->link->came_count++] = mark->number;
    ucp_request_free(request);
}

static void on_nothing(void *request, ucs_status_t status, void *user_data)
{
    (void)user_data;
    check(status, "operation");
    ucp_request_free(request);
}

/* Whether the request is complete already; its callback is then not called. */
static bool is_over(ucs_status_ptr_t request, const char *what)
{
    if (UCS_PTR_IS_ERR(request))
        check(UCS_PTR_STATUS(request), what);
    return request == NULL;
}

static ucp_request_param_t param_for(ucp_send_nbx_callback_t callback, struct mark *mark)
{
    return (ucp_request_param_t){
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
        .cb.send = callback,
        .user_data = mark,
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

static void open_worker(struct lane *lane, int control)
{
    struct link *link = lane->own = &links[lane->index];
    ucp_worker_params_t params = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE, .thread_mode = UCS_THREAD_MODE_SINGLE};
    check(ucp_worker_create(context, &params, &link->worker), "worker");
    for (unsigned i = 0; i < INBOX_COUNT; i++)
        marks[lane->index][i] = (struct mark){link, i};
    ucp_address_t *address;
    size_t size;
    check(ucp_worker_get_address(link->worker, &address, &size), "address");
    say(control, address, size);
    ucp_worker_release_address(link->worker, address);
}

static void open_endpoint(struct link *link, const char *address)
{
    ucp_ep_params_t params = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS, .address = (const ucp_address_t *)address};
    check(ucp_ep_create(link->worker, &params, &link->endpoint), "endpoint");
}

static void post_receive(struct lane *lane, unsigned index)
{
    struct link *link = lane->own;
    ucp_request_param_t param = param_for(NULL, &marks[lane->index][index]);
    param.cb.recv = on_came;
    if (is_over(ucp_tag_recv_nbx(link->worker, inbox(lane, index), BYTES_MAX, TAG, UINT64_MAX, &param), "receive"))
        link->came[link->came_count++] = index;
}

static void post_receives(struct lane *lane)
{
    for (unsigned i = 0; i < INBOX_COUNT; i++)
        post_receive(lane, i);
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
        /* Memory that the setup transport can map would be accessed through it. */
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
    for (unsigned i = 0; i < options.lanes; i++) {
        void *packed;
        size_t size;
        uint64_t base = (uint64_t)(uintptr_t)region;
        open_worker(&lanes[i], control);
        check(ucp_rkey_pack(context, memory, &packed, &size), "key");
        say(control, packed, size);
        ucp_rkey_buffer_release(packed);
        say(control, &base, sizeof base);
        hear(control, address, sizeof address);
        open_endpoint(&links[i], address);
        post_receives(&lanes[i]);
    }
    /* Endpoints need progress at both ends to connect. */
    for (; recv(control, &ready, 1, MSG_DONTWAIT) < 0; sched_yield())
        for (unsigned i = 0; i < options.lanes; i++)
            ucp_worker_progress(links[i].worker);
    say(control, &ready, 1);
}

static void flush(struct link *link)
{
    ucp_request_param_t param = {0};
    ucs_status_ptr_t request = ucp_ep_flush_nbx(link->endpoint, &param);
    if (is_over(request, "flush"))
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
    for (unsigned i = 0; i < options.lanes; i++) {
        /* In the order in which the target sends it. */
        struct link *link = &links[i];
        struct lane *lane = &lanes[i];
        hear(control, address, sizeof address);
        hear(control, key, sizeof key);
        hear(control, &link->base, sizeof link->base);
        open_worker(lane, control);
        open_endpoint(link, address);
        check(ucp_ep_rkey_unpack(link->endpoint, key, &link->key), "key");
        post_receives(lane);
    }
    for (unsigned i = 0; i < options.lanes; i++)
        flush(&links[i]);
    say(control, &ready, 1);
    hear(control, &ready, 1);
}

/* ---- operations -------------------------------------------------------------------------------------------------- */

static void post_put(struct lane *lane, unsigned slot, uint64_t address, size_t size)
{
    struct link *link = lane->own;
    ucp_request_param_t param = param_for(is_direct() ? on_done : on_nothing, &marks[lane->index][slot]);
    bool over = is_over(ucp_put_nbx(link->endpoint, outbox(lane, slot, size), size, address, link->key, &param), "put");
    if (!is_direct()) {
        /* Locally complete when the data has left; complete at the target when flushed. */
        param.cb.send = on_done;
        over = is_over(ucp_ep_flush_nbx(link->endpoint, &param), "flush");
    }
    if (over)
        link->done[link->done_count++] = slot;
}

void peer_post(struct lane *lane, enum op op, unsigned slot, uint64_t offset, size_t size)
{
    static const uint64_t one = 1;
    struct link *link = lane->own;
    char *data = outbox(lane, slot, size);
    ucp_request_param_t param = param_for(on_done, &marks[lane->index][slot]);
    bool over = false;
    switch (op) {
    case OP_GET: over = is_over(ucp_get_nbx(link->endpoint, data, size, link->base + offset, link->key, &param), "get"); break;
    case OP_PUT: post_put(lane, slot, link->base + offset, size); break;
    case OP_ATOMIC:
        param.op_attr_mask |= UCP_OP_ATTR_FIELD_REPLY_BUFFER | UCP_OP_ATTR_FIELD_DATATYPE;
        param.reply_buffer = data;
        param.datatype = ucp_dt_make_contig(8);
        over = is_over(ucp_atomic_op_nbx(link->endpoint, UCP_ATOMIC_OP_ADD, &one, 1, link->base + offset, link->key, &param), "atomic");
        break;
    case OP_MESSAGE:
        link->asked[(link->first + link->count++) % DEPTH_MAX] = slot;
        param.cb.send = on_nothing;
        is_over(ucp_tag_send_nbx(link->endpoint, data, size, TAG, &param), "message");
        break;
    }
    if (over)
        link->done[link->done_count++] = slot;
}

static unsigned reap_messages(struct lane *lane, unsigned slots[])
{
    struct link *link = lane->own;
    unsigned count = 0, came = link->came_count;
    /* A posted receive may find a message at once; the next poll handles it. */
    unsigned indices[INBOX_COUNT];
    memcpy(indices, link->came, came * sizeof indices[0]);
    link->came_count = 0;
    for (unsigned i = 0; i < came; i++) {
        lane->received = inbox(lane, indices[i]);
        slots[count++] = link->asked[link->first];
        link->first = (link->first + 1) % DEPTH_MAX;
        link->count--;
        post_receive(lane, indices[i]);
    }
    return count;
}

unsigned peer_reap(struct lane *lane, enum op op, size_t size, unsigned slots[])
{
    struct link *link = lane->own;
    (void)size;
    if (link->done_count == 0)
        ucp_worker_progress(link->worker);
    if (op == OP_MESSAGE)
        return reap_messages(lane, slots);
    unsigned count = link->done_count;
    memcpy(slots, link->done, count * sizeof slots[0]);
    link->done_count = 0;
    return count;
}

/* Where the client accesses the memory itself, the target's program sleeps. */
bool peer_target_works(enum op op)
{
    return op == OP_MESSAGE || !is_direct();
}

static void answer(struct lane *lane, unsigned index, size_t size)
{
    struct link *link = lane->own;
    ucp_request_param_t param = param_for(on_left, &marks[lane->index][index]);
    if (is_over(ucp_tag_send_nbx(link->endpoint, inbox(lane, index), size, TAG, &param), "answer"))
        link->left[link->left_count++] = index;
}

bool peer_turn(enum op op, size_t size, unsigned lane_count)
{
    bool worked = false;
    (void)op;
    for (unsigned i = 0; i < lane_count; i++) {
        struct link *link = &links[i];
        worked |= ucp_worker_progress(link->worker) != 0;
        while (link->came_count > 0) {
            unsigned index = link->came[0];
            memmove(link->came, link->came + 1, --link->came_count * sizeof link->came[0]);
            answer(&lanes[i], index, size);
        }
        while (link->left_count > 0)
            post_receive(&lanes[i], link->left[--link->left_count]);
    }
    return worked;
}
