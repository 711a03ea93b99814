/* Has many children at a time, all of which store to their copies of memory. usage: forks COUNT */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { WORDS = 512, PAGES = 512 };

static void fill(uint64_t *words, uint64_t stamp) {
    for (size_t page = 0; page < PAGES; page++)
        words[page * WORDS] = stamp + page;
}

static int is_filled(uint64_t *words, uint64_t stamp) {
    for (size_t page = 0; page < PAGES; page++)
        if (words[page * WORDS] != stamp + page)
            return 0;
    return 1;
}

int main(int argc, char **argv) {
    int count = atoi(argc > 1 ? argv[1] : "40"), end[2];
    uint64_t *words = mmap(0, PAGES * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    fill(words, 1);
    if (pipe(end))
        return 2;
    for (int i = 0; i < count; i++) {
        pid_t child = fork();
        if (child < 0)
            return 3;
        if (child == 0) {
            char byte;
            close(end[1]);
            if (!is_filled(words, 1))
                _exit(1);
            fill(words, 2 + i);
            /* The children end together. */
            _exit(read(end[0], &byte, 1) != 0 || !is_filled(words, 2 + i));
        }
    }
    int failed = !is_filled(words, 1);
    close(end[1]);
    for (int i = 0; i < count; i++) {
        int status;
        failed |= wait(&status) < 0 || status;
    }
    puts(failed ? "bytes are wrong" : "verified");
    return failed;
}
