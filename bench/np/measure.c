/* The client's measurements. Every READ is compared with what belongs there; every WRITE writes what belongs there. */
#include "np.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../peers/clock.h"

enum {
    SAMPLES_MAX = 1 << 17,
    LATENCY_NS = 120000000,
    RATE_NS = 250000000,
    SIGNAL_EVERY = SLOTS / 2,
    FAULTS = 1500,
    FAULTS_NS = 400000000,
    DISK_READS = 2000,
    ROUNDS_OF_OTHERS = 500,
    HOT_PAGES = 8,
};

static double samples[SAMPLES_MAX];
static size_t sample_count;

/* ---- requests ------------------------------------------------------------------------------------------------------ */

static char *buffer_of(const struct client *client, unsigned slot)
{
    return (char *)client->buffers->addr + (size_t)slot * BYTES_MAX;
}

static void post(struct client *client, int pair, enum ibv_wr_opcode opcode, unsigned slot, uint64_t offset, size_t size, bool is_signalled)
{
    struct ibv_sge sge = {(uintptr_t)buffer_of(client, slot), (uint32_t)size, client->buffers->lkey};
    struct ibv_send_wr request = {.wr_id = slot, .sg_list = &sge, .num_sge = 1, .opcode = opcode,
                                  .send_flags = is_signalled ? IBV_SEND_SIGNALED : 0, .wr.rdma = {client->base + offset, client->key}},
                       *bad;
    if (ibv_post_send(client->qps[pair], &request, &bad) != 0)
        die("ibv_post_send");
}

/* The slot of a completion, or -1 if there is none. */
static int poll_once(struct client *client)
{
    struct ibv_wc wc;
    int count = ibv_poll_cq(client->cq, 1, &wc);
    if (count < 0 || (count == 1 && wc.status != IBV_WC_SUCCESS)) {
        fprintf(stderr, "np: %s\n", count < 0 ? "ibv_poll_cq" : ibv_wc_status_str(wc.status));
        exit(1);
    }
    return count == 0 ? -1 : (int)wc.wr_id;
}

static void poll_one(struct client *client)
{
    while (poll_once(client) < 0)
        ;
}

static void prepare_write(struct client *client, unsigned slot, uint64_t offset, size_t size)
{
    uint64_t *words = (uint64_t *)buffer_of(client, slot);
    for (size_t i = 0; i < size / 8; i++)
        words[i] = word_at(offset + i * 8);
}

static void verify_read(struct client *client, unsigned slot, uint64_t offset, size_t size)
{
    const uint64_t *words = (const uint64_t *)buffer_of(client, slot);
    for (size_t i = 0; i < size / 8; i++) {
        if (words[i] != (client->is_filled ? word_at(offset + i * 8) : 0)) {
            fprintf(stderr, "np: wrong data at offset %llu\n", (unsigned long long)(offset + i * 8));
            exit(1);
        }
    }
    memset(buffer_of(client, slot), 0xa5, size);
}

/* The time of one request, alone, from its posting to its completion. */
static double one_request(struct client *client, int pair, enum ibv_wr_opcode opcode, uint64_t offset, size_t size)
{
    bool is_write = opcode == IBV_WR_RDMA_WRITE;
    if (is_write)
        prepare_write(client, 0, offset, size);
    uint64_t begun = ticks_begin();
    post(client, pair, opcode, 0, offset, size, true);
    poll_one(client);
    double ns = ticks_to_ns(ticks_end() - begun);
    if (!is_write)
        verify_read(client, 0, offset, size);
    return ns;
}

/* ---- samples ------------------------------------------------------------------------------------------------------- */

static void add_sample(double ns)
{
    if (sample_count < SAMPLES_MAX)
        samples[sample_count++] = ns;
}

static int ascending(const void *left, const void *right)
{
    double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

static void report_latency(const char *op, size_t size)
{
    if (sample_count == 0) {
        fprintf(stderr, "np: no sample of %s\n", op);
        exit(1);
    }
    qsort(samples, sample_count, sizeof samples[0], ascending);
    printf("{\"op\": \"%s\", \"size\": %zu, \"count\": %zu, \"p50_ns\": %.0f, \"p99_ns\": %.0f}\n", op, size, sample_count,
           samples[sample_count / 2], samples[sample_count * 99 / 100]);
    sample_count = 0;
}

static const char *name_of(enum ibv_wr_opcode opcode)
{
    return opcode == IBV_WR_RDMA_READ ? "READ" : "WRITE";
}

/* ---- memory that is there ------------------------------------------------------------------------------------------ */

static uint64_t random_offset(const struct client *client, size_t size)
{
    uint64_t step = size > PAGE ? size : PAGE;
    return (uint64_t)random() % (client->bytes / step) * step;
}

static void measure_latency(struct client *client, enum ibv_wr_opcode opcode, size_t size)
{
    uint64_t end_ns = clock_ns() + LATENCY_NS;
    while (clock_ns() < end_ns)
        add_sample(one_request(client, 0, opcode, random_offset(client, size), size));
    report_latency(name_of(opcode), size);
}

/* Where the WRITEs of a slot go: each to pages of its own, and small ones to different sets of the cache. */
static uint64_t offset_of(unsigned slot, size_t size)
{
    return (uint64_t)slot * BYTES_MAX + (size <= 64 ? slot * 64 : 0);
}

/* WRITEs with many in flight. Of unsignalled ones every SIGNAL_EVERYth is signalled, so that there is an end to wait for. */
static void measure_rate(struct client *client, size_t size, bool is_signalled)
{
    unsigned step = is_signalled ? 1 : SIGNAL_EVERY, in_flight = 0;
    uint64_t count = 0;
    for (unsigned slot = 0; slot < SLOTS; slot++)
        prepare_write(client, slot, offset_of(slot, size), size);
    uint64_t begun_ns = clock_ns(), now_ns;
    while ((now_ns = clock_ns()) - begun_ns < RATE_NS) {
        for (; in_flight + step <= SLOTS; in_flight += step) {
            for (unsigned i = 0; i < step; i++, count++) {
                unsigned slot = (unsigned)(count % SLOTS);
                post(client, 0, IBV_WR_RDMA_WRITE, slot, offset_of(slot, size), size, i + 1 == step);
            }
        }
        while (poll_once(client) >= 0)
            in_flight -= step;
    }
    for (; in_flight > 0; in_flight -= step)
        poll_one(client);
    double seconds = (double)(clock_ns() - begun_ns) / 1e9;
    printf("{\"op\": \"%s WRITE\", \"size\": %zu, \"count\": %llu, \"rate\": %.0f, \"bytes_per_s\": %.0f}\n",
           is_signalled ? "signalled" : "unsignalled", size, (unsigned long long)count, (double)count / seconds,
           (double)count * (double)size / seconds);
    for (unsigned slot = 0; slot < SLOTS; slot++)
        one_request(client, 0, IBV_WR_RDMA_READ, offset_of(slot, size), size);
}

void measure_present(struct client *client)
{
    static const size_t SIZES[] = {8, 64, 512, 4096, 16384, 65536}, RATE_SIZES[] = {8, 4096, 65536};
    clock_calibrate();
    for (uint64_t offset = 0; offset < client->bytes; offset += BYTES_MAX)
        one_request(client, 0, IBV_WR_RDMA_READ, offset, BYTES_MAX);
    for (size_t i = 0; i < sizeof SIZES / sizeof SIZES[0]; i++)
        measure_latency(client, IBV_WR_RDMA_READ, SIZES[i]);
    for (size_t i = 0; i < sizeof RATE_SIZES / sizeof RATE_SIZES[0]; i++) {
        measure_rate(client, RATE_SIZES[i], true);
        measure_rate(client, RATE_SIZES[i], false);
    }
}

/* ---- pages that nothing has touched, or that are on the disk --------------------------------------------------------- */

/* All pages of the region in a random order. */
static uint32_t *shuffled_pages(const struct client *client)
{
    size_t count = client->bytes / PAGE;
    uint32_t *pages = malloc(count * sizeof *pages);
    if (pages == NULL)
        die("malloc");
    for (size_t i = 0; i < count; i++) {
        size_t other = (size_t)random() % (i + 1);
        pages[i] = pages[other];
        pages[other] = (uint32_t)i;
    }
    return pages;
}

/* Takes some pages, one for each request. */
static const uint32_t *measure_faults(struct client *client, const uint32_t *pages, enum ibv_wr_opcode opcode, size_t size)
{
    uint64_t end_ns = clock_ns() + FAULTS_NS;
    for (int i = 0; i < FAULTS && clock_ns() < end_ns; i++)
        add_sample(one_request(client, 0, opcode, (uint64_t)*pages++ * PAGE, size));
    report_latency(name_of(opcode), size);
    return pages;
}

void measure_first_touches(struct client *client)
{
    clock_calibrate();
    const uint32_t *pages = shuffled_pages(client);
    for (size_t size = 8; size <= 1024; size *= 128) {
        pages = measure_faults(client, pages, IBV_WR_RDMA_READ, size);
        pages = measure_faults(client, pages, IBV_WR_RDMA_WRITE, size);
    }
}

void measure_absent(struct client *client)
{
    clock_calibrate();
    const uint32_t *pages = shuffled_pages(client);
    pages = measure_faults(client, pages, IBV_WR_RDMA_READ, 8);
    pages = measure_faults(client, pages, IBV_WR_RDMA_READ, PAGE);
    measure_faults(client, pages, IBV_WR_RDMA_WRITE, 8);
}

/* ---- READs of present pages while one of an absent page is outstanding --------------------------------------------- */

enum { ABSENT_SLOT = 1, PRESENT_SLOT = 2, PRESENT_BYTES = 8 };

/* Reads an absent page by the first queue pair, and present pages by `pair` until it is there. Adds the times of the READs that were
 * posted while it was outstanding. */
static void read_beside(struct client *client, int pair, uint32_t absent, const uint32_t *hot)
{
    post(client, 0, IBV_WR_RDMA_READ, ABSENT_SLOT, (uint64_t)absent * PAGE, PAGE, true);
    for (bool is_outstanding = true; is_outstanding;) {
        uint64_t offset = (uint64_t)hot[random() % HOT_PAGES] * PAGE, begun = ticks_begin();
        post(client, pair, IBV_WR_RDMA_READ, PRESENT_SLOT, offset, PRESENT_BYTES, true);
        for (int slot; (slot = poll_once(client)) != PRESENT_SLOT;)
            is_outstanding &= slot != ABSENT_SLOT;
        double ns = ticks_to_ns(ticks_end() - begun);
        verify_read(client, PRESENT_SLOT, offset, PRESENT_BYTES);
        if (is_outstanding || pair == 0)
            add_sample(ns);
        if (pair == 0)
            break; /* it was behind the other one */
    }
    verify_read(client, ABSENT_SLOT, (uint64_t)absent * PAGE, PAGE);
}

static void read_hot(struct client *client, const uint32_t *hot, bool is_sampled)
{
    for (int i = 0; i < HOT_PAGES; i++) {
        double ns = one_request(client, 1, IBV_WR_RDMA_READ, (uint64_t)hot[i] * PAGE, PRESENT_BYTES);
        if (is_sampled)
            add_sample(ns);
    }
}

void measure_others(struct client *client)
{
    static const char *const NAMES[] = {"READ behind it on the queue pair", "READ beside it on another queue pair"};
    clock_calibrate();
    const uint32_t *hot = shuffled_pages(client), *pages = hot + HOT_PAGES;
    for (int pair = 0; pair < QUEUE_PAIRS; pair++) {
        for (int i = 0; i < ROUNDS_OF_OTHERS; i++) {
            read_hot(client, hot, false);
            read_beside(client, pair, *pages++, hot);
        }
        report_latency(NAMES[pair], PRESENT_BYTES);
    }
    for (int i = 0; i < ROUNDS_OF_OTHERS; i++)
        read_hot(client, hot, true);
    report_latency("READ alone", PRESENT_BYTES);
}

/* ---- the disk ------------------------------------------------------------------------------------------------------ */

void measure_disk(const char *path, uint64_t bytes)
{
    enum { CHUNK = 1 << 20 };
    clock_calibrate();
    int fd = open(path, O_CREAT | O_EXCL | O_RDWR | O_DIRECT | O_CLOEXEC, 0600);
    char *chunk = aligned_alloc(PAGE, CHUNK);
    if (fd < 0 || unlink(path) != 0 || chunk == NULL)
        die(path);
    memset(chunk, 0x5a, CHUNK);
    for (uint64_t offset = 0; offset < bytes; offset += CHUNK)
        if (write(fd, chunk, CHUNK) != CHUNK)
            die("write");
    if (fsync(fd) != 0)
        die("fsync");
    for (int i = 0; i < DISK_READS; i++) {
        uint64_t begun = ticks_begin();
        if (pread(fd, chunk, PAGE, (off_t)((uint64_t)random() % (bytes / PAGE) * PAGE)) != PAGE)
            die("pread");
        add_sample(ticks_to_ns(ticks_end() - begun));
    }
    report_latency("read", PAGE);
}
