/* Touches random pages of private memory, and prints how long those took that were not in memory. usage: touches MIB COUNT
 *
 * Each page has its number, which is verified. Touches of less than 1 us found the page. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

enum { WORDS = 512, PRESENT_NS = 1000 };

static uint64_t now_ns(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

static int ascending(const void *left, const void *right)
{
    uint64_t a = *(const uint64_t *)left, b = *(const uint64_t *)right;
    return a < b ? -1 : a > b;
}

int main(int argc, char **argv)
{
    size_t pages = (size_t)atoi(argc > 1 ? argv[1] : "256") << 8;
    size_t count = (size_t)atoi(argc > 2 ? argv[2] : "20000"), faults = 0;
    volatile uint64_t *memory = mmap(0, pages * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    uint64_t *times = calloc(count, sizeof *times);
    if (memory == MAP_FAILED || !times)
        return 2;
    madvise((void *)memory, pages * 4096, MADV_NOHUGEPAGE);
    madvise((void *)memory, pages * 4096, MADV_RANDOM);
    uint64_t state = 88172645463325252ull;
    for (size_t page = 0; page < pages; page++)
        /* No two pages have the same bytes, and none compresses well. */
        for (size_t word = 0; word < WORDS; word++) {
            state = state * 6364136223846793005ull + 1442695040888963407ull;
            memory[page * WORDS + word] = word ? state : page;
        }
    for (size_t i = 0; i < count; i++) {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        size_t page = (state >> 33) % pages;
        uint64_t begin = now_ns();
        uint64_t word = memory[page * WORDS];
        uint64_t ns = now_ns() - begin;
        if (word != page) {
            fprintf(stderr, "page %zu has %llu\n", page, (unsigned long long)word);
            return 1;
        }
        if (ns >= PRESENT_NS)
            times[faults++] = ns;
    }
    qsort(times, faults, sizeof *times, ascending);
    printf("{\"faults\": %zu, \"p50_us\": %.2f, \"p99_us\": %.2f, \"result\": \"%zu touches right\"}\n", faults,
           faults ? (double)times[faults / 2] / 1e3 : 0, faults ? (double)times[faults * 99 / 100] / 1e3 : 0, count);
    return 0;
}
