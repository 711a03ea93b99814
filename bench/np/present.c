/* Memory that is there: latencies, and rates with many requests in flight (figures 7 and 10 of the paper). */
#include "np.h"

#include <stdlib.h>

#include "../peers/clock.h"

enum { SLICE_NS = 15000000, SIGNAL_EVERY = SLOTS / 2 };

static void measure_latency(struct client *client, enum ibv_wr_opcode opcode, size_t size)
{
    struct series series = new_series(name_of(opcode), size);
    uint64_t step = size > PAGE ? size : PAGE;
    for (int slice = 0; slice < SLICES; slice++) {
        begin_turn();
        for (uint64_t end_ns = clock_ns() + SLICE_NS; clock_ns() < end_ns;)
            add_sample(&series, one_request(client, 0, opcode, (uint64_t)random() % (client->bytes / step) * step, size));
        end_slice(&series);
        end_turn();
    }
    report_latency(&series);
}

/* Requests of a ring of buffers at either end. */
static uint64_t offset_of(uint64_t number, size_t size)
{
    return number % SLOTS * (size > 64 ? size : 64);
}

/* The rate with many requests in flight, of which every `step`th is signalled. */
static double rate_of(struct client *client, enum ibv_wr_opcode opcode, size_t size, unsigned step)
{
    unsigned in_flight = 0;
    uint64_t count = 0, begun_ns = clock_ns();
    while (clock_ns() - begun_ns < SLICE_NS) {
        for (; in_flight + step <= SLOTS; in_flight += step)
            for (unsigned i = 0; i < step; i++, count++)
                post(client, 0, opcode, (unsigned)(count % SLOTS), offset_of(count, size), size, i + 1 == step);
        while (poll_once(client) >= 0)
            in_flight -= step;
    }
    while (in_flight > 0)
        in_flight -= poll_once(client) >= 0 ? step : 0;
    return (double)count * 1e9 / (double)(clock_ns() - begun_ns);
}

static void measure_rate(struct client *client, const char *op, enum ibv_wr_opcode opcode, size_t size, unsigned step)
{
    struct series series = new_series(op, size);
    for (int slice = 0; slice < SLICES; slice++) {
        begin_turn();
        for (unsigned slot = 0; slot < SLOTS; slot++)
            prepare_write(client, slot, offset_of(slot, size), size);
        series.slices[series.slice_count++] = rate_of(client, opcode, size, step);
        for (unsigned slot = 0; slot < SLOTS; slot++) {
            if (opcode == IBV_WR_RDMA_READ)
                verify_read(client, slot, offset_of(slot, size), size);
            else
                one_request(client, 0, IBV_WR_RDMA_READ, offset_of(slot, size), size);
        }
        end_turn();
    }
    free(series.samples);
    report_rate(&series);
}

void measure_present(struct client *client)
{
    static const size_t SIZES[] = {8, 64, 512, 4096, 16384, 65536}, RATE_SIZES[] = {8, 512, 4096, 65536};
    calibrate_clock();
    for (uint64_t offset = 0; offset < client->bytes; offset += BYTES_MAX)
        one_request(client, 0, IBV_WR_RDMA_READ, offset, BYTES_MAX);
    for (size_t i = 0; i < sizeof SIZES / sizeof SIZES[0]; i++) {
        measure_latency(client, IBV_WR_RDMA_READ, SIZES[i]);
        measure_latency(client, IBV_WR_RDMA_WRITE, SIZES[i]);
    }
    for (size_t i = 0; i < sizeof RATE_SIZES / sizeof RATE_SIZES[0]; i++) {
        measure_rate(client, "READs", IBV_WR_RDMA_READ, RATE_SIZES[i], 1);
        measure_rate(client, "unsignalled WRITEs", IBV_WR_RDMA_WRITE, RATE_SIZES[i], SIGNAL_EVERY);
        measure_rate(client, "signalled WRITEs", IBV_WR_RDMA_WRITE, RATE_SIZES[i], 1);
    }
}
