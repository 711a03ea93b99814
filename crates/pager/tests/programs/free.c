/* Gives pages up by MADV_FREE, by the C library and by system calls, and stores to some of them. usage: free MIB
 *
 * A page that was given up has its bytes or zeros; a store after that stays. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { WORDS = 512, CHUNK = 64, ROUNDS = 2 };

static uint64_t stamp(uint64_t round, size_t page) { return round << 32 | (page + 1); }

int main(int argc, char **argv) {
    size_t pages = (size_t)atoi(argc > 1 ? argv[1] : "16") << 8;
    volatile uint64_t *words = mmap(0, pages * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (size_t page = 0; page < pages; page++)
        words[page * WORDS] = words[page * WORDS + 1] = stamp(0, page);
    for (uint64_t round = 1; round <= ROUNDS; round++)
        for (size_t chunk = 0; chunk + CHUNK <= pages; chunk += CHUNK) {
            uint64_t sum = 0;
            /* Loads: the pages are those of the store, and protected. */
            for (size_t page = chunk; page < chunk + CHUNK; page++)
                sum += words[page * WORDS];
            void *start = (void *)(words + chunk * WORDS);
            int failed = chunk / CHUNK % 2 ? madvise(start, CHUNK * 4096, MADV_FREE)
                                           : syscall(SYS_madvise, start, CHUNK * 4096L, MADV_FREE);
            if (failed || !sum)
                return 2;
            for (size_t page = chunk; page < chunk + CHUNK; page += 2)
                words[page * WORDS] = stamp(round, page);
            for (size_t page = chunk; page < chunk + CHUNK; page++) {
                uint64_t first = words[page * WORDS], second = words[page * WORDS + 1];
                int is_stored = page % 2 == 0;
                if ((is_stored && first != stamp(round, page)) || (second && second != stamp(0, page)) ||
                    (!is_stored && first && first != stamp(round - 1, page) && first != stamp(0, page))) {
                    printf("page %zu has %llx and %llx in round %d\n", page, (unsigned long long)first,
                           (unsigned long long)second, (int)round);
                    return 1;
                }
                /* The next round finds bytes everywhere. */
                words[page * WORDS] = stamp(round, page);
                words[page * WORDS + 1] = stamp(0, page);
            }
        }
    for (size_t page = 0; page < pages / CHUNK * CHUNK; page++)
        if (words[page * WORDS] != stamp(ROUNDS, page) || words[page * WORDS + 1] != stamp(0, page)) {
            printf("page %zu is wrong at the end\n", page);
            return 1;
        }
    puts("verified");
    return 0;
}
