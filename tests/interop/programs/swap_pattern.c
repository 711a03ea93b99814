/*
 * Writes a pattern to more memory than the machine has, and reads it back, again and again: each page has other bytes, in
 * each pass. Prints a line after each step.
 *
 *   swap_pattern MIB PASSES
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#define PAGE_WORDS 512

static uint64_t next_word(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

static uint64_t seed_of(size_t page, long pass)
{
    return ((page * 0x9e3779b97f4a7c15u) ^ ((uint64_t)pass << 32)) | 1;
}

static void write_page(uint64_t *words, uint64_t state)
{
    for (int i = 0; i < PAGE_WORDS; i++)
        words[i] = next_word(&state);
}

static int is_page_intact(const uint64_t *words, uint64_t state)
{
    for (int i = 0; i < PAGE_WORDS; i++)
        if (words[i] != next_word(&state))
            return 0;
    return 1;
}

int main(int argc, char **argv)
{
    if (argc != 3) {
        fprintf(stderr, "usage: swap_pattern MIB PASSES\n");
        return 2;
    }
    size_t page_count = strtoul(argv[1], NULL, 10) << 8;
    long passes = strtol(argv[2], NULL, 10);
    uint64_t *memory =
        mmap(NULL, page_count << 12, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        perror("mmap");
        return 1;
    }
    for (long pass = 1; pass <= passes; pass++) {
        for (size_t page = 0; page < page_count; page++)
            write_page(memory + page * PAGE_WORDS, seed_of(page, pass));
        printf("pass %ld: written\n", pass);
        fflush(stdout);
        for (size_t page = 0; page < page_count; page++)
            if (!is_page_intact(memory + page * PAGE_WORDS, seed_of(page, pass))) {
                printf("pass %ld: page %zu is wrong\n", pass, page);
                return 1;
            }
        printf("pass %ld: verified\n", pass);
        fflush(stdout);
    }
    return 0;
}
