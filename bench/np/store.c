/* A store of values of 4 KiB in the server's memory, as the enterprise storage of the paper (6.2): clients get them by READ, and put them by
 * WRITE. Keys are drawn from Zipf's distribution. */
#include "np.h"

#include <math.h>
#include <stdlib.h>

#include "../peers/clock.h"

enum {
    VALUE = PAGE,
    WARM_UP_GETS = 20000,
    GETS = 300, /* in a slice */
    AGAIN_EVERY = 4,
    COLD_EVERY = 8,
    PUT_EVERY = 5,
    SLICE_NS = 60000000,
};
static const double SKEW = 0.99;

struct keys {
    size_t count;
    double *cumulated;
    uint32_t *places; /* of a key's value */
    size_t next_cold; /* from the key that is drawn least */
};

static struct keys new_keys(const struct client *client)
{
    struct keys keys = {.count = client->bytes / VALUE};
    keys.cumulated = malloc(keys.count * sizeof *keys.cumulated);
    keys.places = malloc(keys.count * sizeof *keys.places);
    if (keys.cumulated == NULL || keys.places == NULL)
        die("malloc");
    double sum = 0;
    for (size_t i = 0; i < keys.count; i++) {
        keys.cumulated[i] = sum += pow((double)(i + 1), -SKEW);
        size_t other = (size_t)random() % (i + 1);
        keys.places[i] = keys.places[other];
        keys.places[other] = (uint32_t)i;
    }
    keys.next_cold = keys.count;
    return keys;
}

static uint64_t draw(const struct keys *keys)
{
    double wanted = (double)random() / RAND_MAX * keys->cumulated[keys->count - 1];
    size_t low = 0, high = keys->count - 1;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (keys->cumulated[middle] < wanted)
            low = middle + 1;
        else
            high = middle;
    }
    return (uint64_t)keys->places[low] * VALUE;
}

static uint64_t next_cold(struct keys *keys)
{
    if (--keys->next_cold < keys->count / 2)
        keys->next_cold = keys->count - 1;
    return (uint64_t)keys->places[keys->next_cold] * VALUE;
}

enum { GET, AGAIN, COLD, PUT, OPS };

static void measure_slice(struct client *client, struct keys *keys, struct series series[OPS])
{
    uint64_t end_ns = clock_ns() + SLICE_NS;
    for (int i = 0; i < GETS && (i <= COLD_EVERY || clock_ns() < end_ns); i++) {
        uint64_t place = draw(keys);
        add_sample(&series[GET], one_request(client, 0, IBV_WR_RDMA_READ, place, VALUE));
        if (i % AGAIN_EVERY == 0)
            add_sample(&series[AGAIN], one_request(client, 0, IBV_WR_RDMA_READ, place, VALUE));
        if (i % COLD_EVERY == 0)
            add_sample(&series[COLD], one_request(client, 0, IBV_WR_RDMA_READ, next_cold(keys), VALUE));
        if (i % PUT_EVERY == 0)
            add_sample(&series[PUT], one_request(client, 0, IBV_WR_RDMA_WRITE, draw(keys), VALUE));
    }
    for (int op = 0; op < OPS; op++)
        end_slice(&series[op]);
}

void measure_store(struct client *client)
{
    struct series series[OPS] = {new_series("GET", VALUE), new_series("GET of a present value", VALUE),
                                 new_series("GET of a cold value", VALUE), new_series("PUT", VALUE)};
    struct keys keys = new_keys(client);
    calibrate_clock();
    /* A model of on-demand paging takes a millisecond for a value: it warms up for a while only. */
    uint64_t end_ns = clock_ns() + 2000000000;
    for (int i = 0; i < WARM_UP_GETS && clock_ns() < end_ns; i++)
        one_request(client, 0, IBV_WR_RDMA_READ, draw(&keys), VALUE);
    for (int slice = 0; slice < SLICES; slice++) {
        begin_turn();
        measure_slice(client, &keys, series);
        end_turn();
    }
    for (int op = 0; op < OPS; op++)
        report_latency(&series[op]);
}
