/* Pages that nothing has touched, or that are on the disk: latencies, and rates with many requests in flight (figures 8 and 9). */
#include "np.h"

#include <stdlib.h>

#include "../peers/clock.h"

enum {
    REQUESTS = 50,       /* of a slice of latencies */
    LONG_REQUESTS = 20,  /* of more than a page */
    RATE_REQUESTS = 192, /* of a slice of rates */
    LONG_RATE_REQUESTS = 32,
    SLICE_NS = 60000000,
};

/* Places that no request has accessed, in a random order: single pages in the first half of the region, longer ones in the second. */
struct places {
    uint32_t *pages, *blocks;
    size_t page_count, block_count;
};

static uint32_t *shuffled(size_t count)
{
    uint32_t *numbers = malloc(count * sizeof *numbers);
    if (numbers == NULL)
        die("malloc");
    for (size_t i = 0; i < count; i++) {
        size_t other = (size_t)random() % (i + 1);
        numbers[i] = numbers[other];
        numbers[other] = (uint32_t)i;
    }
    return numbers;
}

static uint64_t next_place(const struct client *client, struct places *places, size_t size)
{
    bool is_long = size > PAGE;
    size_t *left = is_long ? &places->block_count : &places->page_count;
    if (*left == 0)
        die("the region is too small");
    --*left;
    return is_long ? client->bytes / 2 + (uint64_t)places->blocks[*left] * BYTES_MAX : (uint64_t)places->pages[*left] * PAGE;
}

static void measure_latency(struct client *client, struct places *places, enum ibv_wr_opcode opcode, size_t size)
{
    struct series series = new_series(name_of(opcode), size);
    int requests = size > PAGE ? LONG_REQUESTS : REQUESTS;
    for (int slice = 0; slice < SLICES; slice++) {
        begin_turn();
        uint64_t end_ns = clock_ns() + SLICE_NS;
        for (int i = 0; i < requests && (i == 0 || clock_ns() < end_ns); i++)
            add_sample(&series, one_request(client, 0, opcode, next_place(client, places, size), size));
        end_slice(&series);
        end_turn();
    }
    report_latency(&series);
}

static double rate_of(struct client *client, struct places *places, enum ibv_wr_opcode opcode, size_t size)
{
    uint64_t offsets[SLOTS], begun_ns = clock_ns();
    int requests = size > PAGE ? LONG_RATE_REQUESTS : RATE_REQUESTS, posted = 0, done = 0;
    while (done < requests) {
        if (clock_ns() - begun_ns > SLICE_NS)
            requests = posted; /* those in flight still count */
        for (; posted < requests && posted - done < SLOTS; posted++) {
            unsigned slot = (unsigned)posted % SLOTS;
            offsets[slot] = next_place(client, places, size);
            if (opcode == IBV_WR_RDMA_WRITE)
                prepare_write(client, slot, offsets[slot], size);
            post(client, 0, opcode, slot, offsets[slot], size, true);
        }
        for (int slot; (slot = poll_once(client)) >= 0; done++)
            if (opcode == IBV_WR_RDMA_READ)
                verify_read(client, (unsigned)slot, offsets[slot], size);
    }
    return (double)done * 1e9 / (double)(clock_ns() - begun_ns);
}

static void measure_rate(struct client *client, struct places *places, enum ibv_wr_opcode opcode, size_t size)
{
    struct series series = new_series(opcode == IBV_WR_RDMA_READ ? "READs" : "WRITEs", size);
    for (int slice = 0; slice < SLICES; slice++) {
        begin_turn();
        series.slices[series.slice_count++] = rate_of(client, places, opcode, size);
        end_turn();
    }
    free(series.samples);
    report_rate(&series);
}

void measure_faults(struct client *client)
{
    static const size_t SIZES[] = {8, 1024, 2048, 4096, 16384, 65536}, RATE_SIZES[] = {8, 4096, 65536};
    static const enum ibv_wr_opcode OPCODES[] = {IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE};
    struct places places = {.page_count = client->bytes / 2 / PAGE, .block_count = client->bytes / 2 / BYTES_MAX};
    calibrate_clock();
    places.pages = shuffled(places.page_count);
    places.blocks = shuffled(places.block_count);
    for (size_t i = 0; i < sizeof SIZES / sizeof SIZES[0]; i++)
        for (int op = 0; op < 2; op++)
            measure_latency(client, &places, OPCODES[op], SIZES[i]);
    for (size_t i = 0; i < sizeof RATE_SIZES / sizeof RATE_SIZES[0]; i++)
        for (int op = 0; op < 2; op++)
            measure_rate(client, &places, OPCODES[op], RATE_SIZES[i]);
}
