/* READs of present pages while a READ of an absent page is outstanding, on its queue pair and on another one. */
#include "np.h"

#include <stdlib.h>

#include "../peers/clock.h"

enum {
    ABSENT_SLOT = 1,
    FIRST_SLOT = 2, /* of the READs of present pages */
    LAST_SLOT = SLOTS - 1,
    PRESENT_BYTES = 8,
    HOT_PAGES = 8,
    REQUESTS = 40, /* READs of absent pages in a slice */
    SLICE_NS = 100000000,
};

/* All pages of the region in a random order; the first ones are accessed so often that they stay. */
struct places {
    uint64_t *offsets;
    size_t next;
};

static struct places new_places(const struct client *client)
{
    size_t count = client->bytes / PAGE;
    struct places places = {.offsets = malloc(count * sizeof(uint64_t)), .next = HOT_PAGES};
    if (places.offsets == NULL)
        die("malloc");
    for (size_t i = 0; i < count; i++) {
        size_t other = (size_t)random() % (i + 1);
        places.offsets[i] = places.offsets[other];
        places.offsets[other] = i * PAGE;
    }
    return places;
}

static uint64_t hot_place(const struct places *places)
{
    return places->offsets[random() % HOT_PAGES];
}

/* What is in a buffer before its READ. */
static const uint64_t EMPTY = 0xa5a5a5a5a5a5a5a5;

static volatile uint64_t *word_of(const struct client *client, unsigned slot)
{
    return (volatile uint64_t *)buffer_of(client, slot);
}

/* The READs of one round: completions are counted, because they come in order. */
struct round {
    unsigned posted, completed; /* READs of present pages */
    bool is_absent_done;
};

static void poll_round(struct client *client, struct round *round)
{
    for (int slot; (slot = poll_once(client)) >= 0;) {
        if (slot == ABSENT_SLOT)
            round->is_absent_done = true;
        else
            round->completed++;
    }
}

/* The time until the data of a READ is there. Its completion may be behind that of an earlier request. */
static double time_to_data(struct client *client, int pair, unsigned slot, uint64_t offset, struct round *round)
{
    *word_of(client, slot) = EMPTY;
    uint64_t begun = ticks_begin();
    post(client, pair, IBV_WR_RDMA_READ, slot, offset, PRESENT_BYTES, true);
    round->posted++;
    while (*word_of(client, slot) == EMPTY)
        poll_round(client, round);
    return ns_since(begun);
}

static void finish_round(struct client *client, struct round *round)
{
    while (round->completed < round->posted)
        poll_round(client, round);
}

/* Reads an absent page by the first queue pair, and present pages by `pair` until it is there. The READs whose data came while it was
 * outstanding count, and the last one before its completion: a NIC that answers in order has only that. */
static void read_beside(struct client *client, int pair, struct places *places, struct series *series)
{
    struct round round = {0};
    uint64_t absent = places->offsets[places->next++], offsets[SLOTS];
    unsigned slot = FIRST_SLOT;
    post(client, 0, IBV_WR_RDMA_READ, ABSENT_SLOT, absent, PAGE, true);
    while (!round.is_absent_done && slot <= LAST_SLOT) {
        offsets[slot] = hot_place(places);
        double ns = time_to_data(client, pair, slot, offsets[slot], &round);
        if (!round.is_absent_done || pair == 0)
            add_sample(series, ns);
        slot++;
    }
    while (!round.is_absent_done)
        poll_round(client, &round);
    finish_round(client, &round);
    verify_read(client, ABSENT_SLOT, absent, PAGE);
    while (slot-- > FIRST_SLOT)
        verify_read(client, slot, offsets[slot], PRESENT_BYTES);
}

static void read_alone(struct client *client, const struct places *places, struct series *series)
{
    for (int i = 0; i < HOT_PAGES; i++) {
        struct round round = {0};
        uint64_t offset = hot_place(places);
        add_sample(series, time_to_data(client, 1, FIRST_SLOT, offset, &round));
        finish_round(client, &round);
        verify_read(client, FIRST_SLOT, offset, PRESENT_BYTES);
    }
}

void measure_others(struct client *client)
{
    calibrate_clock();
    struct places places = new_places(client);
    struct series alone = new_series("READ alone", PRESENT_BYTES), series[QUEUE_PAIRS] = {
        new_series("READ behind an absent page on the queue pair", PRESENT_BYTES),
        new_series("READ beside an absent page on another queue pair", PRESENT_BYTES),
    };
    for (int slice = 0; slice < SLICES; slice++) {
        begin_turn();
        for (int i = 0; i < HOT_PAGES; i++)
            one_request(client, 1, IBV_WR_RDMA_READ, places.offsets[i], PAGE);
        uint64_t end_ns = clock_ns() + SLICE_NS;
        for (int i = 0; i < REQUESTS && (i < QUEUE_PAIRS || clock_ns() < end_ns); i++) {
            read_alone(client, &places, &alone);
            read_beside(client, i % QUEUE_PAIRS, &places, &series[i % QUEUE_PAIRS]);
        }
        end_slice(&alone);
        for (int pair = 0; pair < QUEUE_PAIRS; pair++)
            end_slice(&series[pair]);
        end_turn();
    }
    report_latency(&alone);
    for (int pair = 0; pair < QUEUE_PAIRS; pair++)
        report_latency(&series[pair]);
}
