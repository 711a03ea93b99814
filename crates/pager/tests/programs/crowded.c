/* Has a child, which has a child, where at most two descriptors are left: too few for the thread of a child that moves pages.
   usage: crowded MIB LEFT SECONDS */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

static size_t count;

static void fill(uint64_t *words, uint64_t factor) {
    for (size_t i = 0; i < count; i++)
        words[i] = i * factor;
}

static int is_filled(uint64_t *words, uint64_t factor) {
    for (size_t i = 0; i < count; i++)
        if (words[i] != i * factor)
            return 0;
    return 1;
}

int main(int argc, char **argv) {
    count = (size_t)atoi(argc > 1 ? argv[1] : "8") << 17;
    uint64_t *words = mmap(0, count * 8, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    fill(words, 3);
    struct rlimit limit = {64, 64};
    int last = -1;
    if (setrlimit(RLIMIT_NOFILE, &limit))
        return 2;
    for (int fd; (fd = open("/dev/null", O_RDONLY)) >= 0;)
        last = fd;
    for (int left = atoi(argc > 2 ? argv[2] : "2"); left > 0; left--)
        close(last--);
    pid_t child = fork();
    if (child == 0) {
        child = fork();
        int status = 0;
        /* The pager would see the end of a connection. */
        sleep(atoi(argc > 3 ? argv[3] : "1"));
        if (child > 0 && (waitpid(child, &status, 0) != child || status))
            _exit(3);
        if (!is_filled(words, 3))
            _exit(1);
        fill(words, 5);
        _exit(!is_filled(words, 5));
    }
    int status;
    if (waitpid(child, &status, 0) != child || status) {
        printf("the child ends with %x\n", status);
        return 1;
    }
    puts(is_filled(words, 3) ? "verified" : "bytes are wrong");
    return 0;
}
