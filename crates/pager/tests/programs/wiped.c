/* Has a child that lacks memory which has left its parent: one half by MADV_DONTFORK, one by MADV_WIPEONFORK. usage: wiped MIB */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif

static size_t count;

static uint64_t *map(void *at, int flags) {
    return mmap(at, count * 8, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
}

static void fill(uint64_t *words) {
    for (size_t i = 0; i < count; i++)
        words[i] = i + 1;
}

/* How many words are not as they were filled, times a factor. */
static size_t count_wrong(uint64_t *words, uint64_t factor) {
    size_t wrong = 0;
    for (size_t i = 0; i < count; i++)
        wrong += words[i] != (i + 1) * factor;
    return wrong;
}

int main(int argc, char **argv) {
    count = (size_t)atoi(argc > 1 ? argv[1] : "8") << 17;
    uint64_t *absent = map(0, 0), *wiped = map(0, 0), *inherited = map(0, 0);
    fill(absent), fill(wiped), fill(inherited);
    if (madvise(absent, count * 8, MADV_DONTFORK) || madvise(wiped, count * 8, MADV_WIPEONFORK))
        return 2;
    pid_t child = fork();
    if (child == 0) {
        /* The preloaded library takes memory for itself at the end of this hole. */
        count /= 2;
        if (map(absent, MAP_FIXED_NOREPLACE) != absent)
            _exit(1);
        size_t wrong[] = {count_wrong(absent, 0), count_wrong(wiped, 0), count_wrong(inherited, 1)};
        if (wrong[0] || wrong[1] || wrong[2])
            printf("%zu %zu %zu words are wrong\n", wrong[0], wrong[1], wrong[2]);
        fflush(stdout);
        _exit(wrong[0] || wrong[1] || wrong[2]);
    }
    int status;
    if (waitpid(child, &status, 0) != child || status)
        return 3;
    puts(count_wrong(absent, 1) || count_wrong(wiped, 1) || count_wrong(inherited, 1) ? "bytes are wrong" : "verified");
    return 0;
}
