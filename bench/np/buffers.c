/* What a client pays that may not keep its memory pinned (figure 1 of the paper): a registration for each READ, or READs into a small
 * buffer and copies. */
#include "np.h"

#include <stdlib.h>
#include <string.h>

#include "../peers/clock.h"

enum { PIECE = 64, SLICE_NS = 20000000, REQUESTS_EACH = 5 };

static const size_t SIZES[] = {64, 128, 192};
enum { SIZE_COUNT = sizeof SIZES / sizeof SIZES[0] };

static void read_at_once(struct client *client, uint64_t offset, size_t size)
{
    one_request(client, 0, IBV_WR_RDMA_READ, offset, size);
}

static void read_registered(struct client *client, uint64_t offset, size_t size)
{
    struct ibv_mr *kept = client->buffers;
    client->buffers = ibv_reg_mr(kept->pd, kept->addr, size, IBV_ACCESS_LOCAL_WRITE);
    if (client->buffers == NULL)
        die("ibv_reg_mr");
    one_request(client, 0, IBV_WR_RDMA_READ, offset, size);
    if (ibv_dereg_mr(client->buffers) != 0)
        die("ibv_dereg_mr");
    client->buffers = kept;
}

static void read_in_pieces(struct client *client, uint64_t offset, size_t size)
{
    static char copy[256];
    for (size_t at = 0; at < size; at += PIECE) {
        struct ibv_sge sge = {(uintptr_t)buffer_of(client, 0), PIECE, client->buffers->lkey};
        struct ibv_send_wr request = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_READ, .send_flags = IBV_SEND_SIGNALED,
                                      .wr.rdma = {client->base + offset + at, client->key}}, *bad;
        if (ibv_post_send(client->qps[0], &request, &bad) != 0)
            die("ibv_post_send");
        while (poll_once(client) < 0)
            ;
        memcpy(copy + at, buffer_of(client, 0), PIECE);
    }
    memcpy(buffer_of(client, 0), copy, size);
    verify_read(client, 0, offset, size);
}

static const struct {
    const char *op;
    void (*read)(struct client *client, uint64_t offset, size_t size);
} WAYS[] = {
    {"READs into registered memory", read_at_once},
    {"READs, each with a registration", read_registered},
    {"READs of 64 B, copied", read_in_pieces},
};
enum { WAY_COUNT = sizeof WAYS / sizeof WAYS[0] };

/* Each sample is five READs of each size. */
void measure_buffers(struct client *client)
{
    struct series series[WAY_COUNT];
    calibrate_clock();
    for (int way = 0; way < WAY_COUNT; way++)
        series[way] = new_series(WAYS[way].op, REQUESTS_EACH * (64 + 128 + 192));
    for (int slice = 0; slice < SLICES; slice++) {
        begin_turn();
        for (int way = 0; way < WAY_COUNT; way++) {
            for (uint64_t end_ns = clock_ns() + SLICE_NS; clock_ns() < end_ns;) {
                uint64_t begun = ticks_begin();
                for (int i = 0; i < SIZE_COUNT * REQUESTS_EACH; i++)
                    WAYS[way].read(client, (uint64_t)random() % (client->bytes / PAGE) * PAGE, SIZES[i / REQUESTS_EACH]);
                add_sample(&series[way], ns_since(begun));
            }
            end_slice(&series[way]);
        }
        end_turn();
    }
    for (int way = 0; way < WAY_COUNT; way++)
        report_latency(&series[way]);
}
