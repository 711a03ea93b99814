/* Walks through memory, and moves all of it after each page: pages that come ahead of the walk come while it moves.
 * usage: move MIB COUNT */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

enum { WORDS = 512, PAGE = 4096 };

int main(int argc, char **argv) {
    if (argc < 3)
        return 2;
    size_t pages = (size_t)atoi(argv[1]) << 8, len = pages * PAGE;
    long count = atol(argv[2]);
    /* The two places differ by an odd number of pages: the kernel moves entries one by one, for the longest time. */
    char *places = mmap(0, 2 * len + (4 << 20), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    char *targets[2] = {places, places + len + (1 << 20) + PAGE};
    uint64_t *words = mmap(0, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (size_t page = 0; page < pages; page++)
        words[page * WORDS] = page + 1;
    for (long i = 0; i < count; i++) {
        size_t page = i % pages;
        uint64_t found = words[page * WORDS];
        words = mremap(words, len, len, MREMAP_MAYMOVE | MREMAP_FIXED, targets[i % 2]);
        if (words == MAP_FAILED)
            return 3;
        if (found != page + 1) {
            printf("page %zu has %llu after %ld moves\n", page, (unsigned long long)found, i);
            return 1;
        }
    }
    for (size_t page = 0; page < pages; page++)
        if (words[page * WORDS] != page + 1) {
            printf("page %zu has %llu at the end\n", page, (unsigned long long)words[page * WORDS]);
            return 1;
        }
    puts("verified");
    return 0;
}
