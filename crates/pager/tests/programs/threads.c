/* Threads store to random pages and verify them; some of them fork, move and give up memory. usage: threads MIB SECONDS
 *
 * Each thread has a share of the words of all pages, so pages are shared, and words are not. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { THREADS = 4, WORDS = 512, LEN = 1 << 20 };

static uint64_t *memory;
static size_t pages;
static double end;
static atomic_int errors;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

static uint64_t draw(uint64_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    return *state ^= *state << 17;
}

static void fail(const char *what, size_t page) {
    printf("%s at page %zu\n", what, page);
    errors++;
}

/* Random stores and loads; every word is the count of stores to it. */
static void *access_pages(void *argument) {
    size_t self = (size_t)argument;
    uint64_t state = 88172645463325252ull + self;
    uint32_t *counts = calloc(pages, sizeof *counts);
    while (now() < end && !errors)
        for (int i = 0; i < 1000; i++) {
            size_t page = draw(&state) % pages;
            volatile uint64_t *word = &memory[page * WORDS + self * 8];
            if (*word != counts[page])
                fail("a lost store", page);
            if (draw(&state) % 4 == 0)
                *word = ++counts[page];
        }
    free(counts);
    return 0;
}

/* Memory that comes and goes: unmapped, moved, emptied, and read by a system call. */
static void *change_mappings(void *argument) {
    (void)argument;
    int pipes[2];
    static char bytes[4096];
    if (pipe(pipes))
        return 0;
    for (uint64_t round = 1; now() < end && !errors; round++) {
        uint64_t *mine = mmap(0, LEN, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        for (size_t i = 0; i < LEN / 8; i += WORDS)
            mine[i] = round + i;
        usleep(2000);
        mine = mremap(mine, LEN, 2 * LEN, MREMAP_MAYMOVE);
        for (size_t i = 0; i < LEN / 8; i += WORDS)
            if (mine[i] != round + i || mine[LEN / 8 + i])
                fail("moved memory", i / WORDS);
        usleep(2000);
        if (write(pipes[1], mine + 8 * WORDS, 4096) != 4096 || read(pipes[0], bytes, 4096) != 4096 ||
            memcmp(bytes, mine + 8 * WORDS, 4096))
            fail("a system call", 8);
        madvise(mine, LEN / 2, MADV_DONTNEED);
        for (size_t i = 0; i < LEN / 8; i += WORDS)
            if (mine[i] != (i < LEN / 16 ? 0 : round + i))
                fail("memory that was given up", i / WORDS);
        /* Half of it replaces the first half of other memory, whose second half stays. */
        uint64_t *other = mmap(0, 2 * LEN, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        for (size_t i = 0; i < 2 * LEN / 8; i += WORDS)
            other[i] = ~round;
        mine = mremap(mine, 2 * LEN, LEN, MREMAP_MAYMOVE | MREMAP_FIXED, other);
        for (size_t i = 0; i < 2 * LEN / 8; i += WORDS)
            if (mine[i] != (i < LEN / 16 ? 0 : i < LEN / 8 ? round + i : ~round))
                fail("memory that became shorter", i / WORDS);
        munmap(mine, 2 * LEN);
    }
    return 0;
}

/* Children find the same bytes, whose copies they change. */
static void *fork_children(void *argument) {
    (void)argument;
    uint64_t *mine = mmap(0, LEN, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (uint64_t round = 1; now() < end && !errors; round++) {
        for (size_t i = 0; i < LEN / 8; i += WORDS)
            mine[i] = round + i;
        usleep(20000);
        pid_t child = fork();
        if (child == 0) {
            for (size_t i = 0; i < LEN / 8; i += WORDS)
                if (mine[i] != round + i)
                    _exit(1);
            memset(mine, 0x55, LEN);
            usleep(10000);
            for (size_t i = 0; i < LEN / 8; i++)
                if (mine[i] != 0x5555555555555555ull)
                    _exit(2);
            _exit(0);
        }
        int status;
        waitpid(child, &status, 0);
        if (status)
            fail("a child", status);
        for (size_t i = 0; i < LEN / 8; i += WORDS)
            if (mine[i] != round + i)
                fail("a page that a child has", i / WORDS);
        if (round % 4 == 0 && system("true"))
            fail("a program", 0);
    }
    return 0;
}

int main(int argc, char **argv) {
    if (argc < 3)
        return 2;
    pages = (size_t)atoi(argv[1]) << 8;
    end = now() + atof(argv[2]);
    memory = mmap(0, pages * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    pthread_t threads[THREADS + 2];
    for (size_t i = 0; i < THREADS; i++)
        pthread_create(&threads[i], 0, access_pages, (void *)i);
    pthread_create(&threads[THREADS], 0, change_mappings, 0);
    pthread_create(&threads[THREADS + 1], 0, fork_children, 0);
    for (size_t i = 0; i < THREADS + 2; i++)
        pthread_join(threads[i], 0);
    if (errors)
        return 1;
    puts("verified");
    return 0;
}
