/* A load like that of Facebook's ETC pool on memcached, over a unix socket. usage: etc SOCKET ITEMS OPERATIONS
 *
 * After "Workload Analysis of a Large-Scale Key-Value Store" (Atikoglu and others, SIGMETRICS 2012): GETs and SETs 30 to 1,
 * popularity by a power law, sizes of values by a generalized Pareto distribution (scale 214.476, shape 0.348). The bytes of a
 * value follow from its key and its version, and are verified. Prints operations per second and latencies. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { VALUE_MAX = 8192, GETS_PER_SET = 30 };

static uint64_t state = 88172645463325252ull;
static int server;
static char buffer[2 * VALUE_MAX + 256];

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static double draw(void)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (double)(state >> 11) / (double)(1ull << 53);
}

static void fail(const char *what, size_t key)
{
    fprintf(stderr, "key %zu: %s\n", key, what);
    exit(1);
}

static uint64_t mix(uint64_t number)
{
    number = (number ^ number >> 31) * 0x9e3779b97f4a7c15ull;
    return (number ^ number >> 29) * 0xbf58476d1ce4e5b9ull;
}

/* A key's values have one size, so that they stay where they are. */
static size_t size_of(size_t key)
{
    double uniform = (double)(mix(key + 1) >> 11) / (double)(1ull << 53);
    double size = 214.476 / 0.348238 * (pow(1 - uniform, -0.348238) - 1);
    return size < 16 ? 16 : size > VALUE_MAX ? VALUE_MAX : (size_t)size;
}

static void fill(char *value, size_t key, uint32_t version)
{
    size_t size = size_of(key);
    for (size_t at = 0; at < size; at += 8) {
        uint64_t word = mix(key << 32 | version) + at;
        memcpy(value + at, &word, size - at < 8 ? size - at : 8);
    }
}

static void send_all(const char *bytes, size_t count)
{
    while (count > 0) {
        ssize_t sent = write(server, bytes, count);
        if (sent <= 0)
            fail("the server has closed the connection", 0);
        bytes += sent;
        count -= (size_t)sent;
    }
}

/* Receives until the answer ends so. */
static size_t receive(const char *end)
{
    size_t count = 0, length = strlen(end);
    while (count < length || memcmp(buffer + count - length, end, length)) {
        ssize_t received = read(server, buffer + count, sizeof buffer - count);
        if (received <= 0)
            fail("the server has closed the connection", 0);
        count += (size_t)received;
    }
    return count;
}

static void set(size_t key, uint32_t version)
{
    int header = sprintf(buffer, "set key:%zu 0 0 %zu\r\n", key, size_of(key));
    fill(buffer + header, key, version);
    memcpy(buffer + header + size_of(key), "\r\n", 2);
    send_all(buffer, (size_t)header + size_of(key) + 2);
    if (receive("\r\n") != 8 || memcmp(buffer, "STORED", 6))
        fail("is not stored", key);
}

static void get(size_t key, uint32_t version)
{
    static char wanted[VALUE_MAX + 256];
    int header = sprintf(buffer, "get key:%zu\r\n", key);
    send_all(buffer, (size_t)header);
    int before = sprintf(wanted, "VALUE key:%zu 0 %zu\r\n", key, size_of(key));
    fill(wanted + before, key, version);
    size_t length = (size_t)before + size_of(key);
    memcpy(wanted + length, "\r\nEND\r\n", 7);
    for (size_t count = 0; count < length + 7;) {
        ssize_t received = read(server, buffer + count, length + 7 - count);
        if (received <= 0)
            fail("the server has closed the connection", key);
        count += (size_t)received;
        if (memcmp(buffer, "END", 3) == 0)
            fail("is gone", key);
    }
    if (memcmp(buffer, wanted, length + 7))
        fail("has wrong bytes", key);
}

static int ascending(const void *left, const void *right)
{
    float a = *(const float *)left, b = *(const float *)right;
    return a < b ? -1 : a > b;
}

int main(int argc, char **argv)
{
    if (argc < 4)
        return 2;
    size_t items = strtoul(argv[2], 0, 10), count = strtoul(argv[3], 0, 10);
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    strncpy(address.sun_path, argv[1], sizeof address.sun_path - 1);
    server = socket(AF_UNIX, SOCK_STREAM, 0);
    if (connect(server, (struct sockaddr *)&address, sizeof address)) {
        perror(argv[1]);
        return 2;
    }
    uint32_t *versions = calloc(items, sizeof *versions);
    float *times = calloc(count, sizeof *times);
    for (size_t key = 0; key < items; key++)
        set(key, 0);
    double begin = now();
    for (size_t i = 0; i < count; i++) {
        /* Ranks by a power law with exponent 1, and a rank's key is anywhere. */
        size_t rank = (size_t)pow((double)items, draw()) - 1;
        size_t key = mix(rank) % items;
        double started = now();
        if (draw() * (GETS_PER_SET + 1) < 1)
            set(key, ++versions[key]);
        else
            get(key, versions[key]);
        times[i] = (float)(now() - started);
    }
    double seconds = now() - begin;
    qsort(times, count, sizeof *times, ascending);
    printf("{\"seconds\": %.3f, \"per_second\": %.0f, \"p50_us\": %.1f, \"p99_us\": %.1f, \"result\": \"%zu operations right\"}\n",
           seconds, (double)count / seconds, times[count / 2] * 1e6, times[count * 99 / 100] * 1e6, count);
    return 0;
}
