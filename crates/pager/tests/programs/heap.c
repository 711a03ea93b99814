/* Small allocations, which heaps have; verified by a child, too. usage: heap MIB THREADS
 *
 * The main thread's heap ends at the program break, other threads' heaps are arenas, and one thread maps memory by a system
 * call of its own. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { VALUES = 6, NODES = 1 << 14, WORDS = 512 };

struct node {
    struct node *next;
    uint64_t value[VALUES];
};

static size_t count;

static struct node *build(size_t seed) {
    struct node *first = 0;
    for (size_t i = 0; i < count; i++) {
        struct node *node = malloc(sizeof *node);
        node->next = first;
        for (int k = 0; k < VALUES; k++)
            node->value[k] = seed + i * VALUES + k;
        first = node;
    }
    return first;
}

static int is_right(const struct node *node, size_t seed) {
    size_t i = count;
    for (; node; node = node->next) {
        i--;
        for (int k = 0; k < VALUES; k++)
            if (node->value[k] != seed + i * VALUES + k)
                return 0;
    }
    return i == 0;
}

/* Builds a list, and another one when half of the first one's nodes are free again. */
static void *work(void *argument) {
    size_t seed = (size_t)argument << 40;
    struct node *first = build(seed);
    if (!is_right(first, seed))
        return "a list";
    for (struct node *node = first; node && node->next; node = node->next) {
        struct node *freed = node->next;
        node->next = freed->next;
        free(freed);
    }
    struct node *second = build(~seed);
    return is_right(second, ~seed) ? 0 : "a second list";
}

static void *map(void *argument) {
    size_t words = count / NODES << 17;
    uint64_t *mapped =
        (uint64_t *)syscall(SYS_mmap, 0, words * 8, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, (off_t)0);
    (void)argument;
    for (size_t i = 0; i < words; i++)
        mapped[i] = i * 0x9e3779b97f4a7c15ull;
    for (size_t i = 0; i < words; i++)
        if (mapped[i] != i * 0x9e3779b97f4a7c15ull)
            return "memory of a system call";
    return 0;
}

int main(int argc, char **argv) {
    count = (size_t)atoi(argc > 1 ? argv[1] : "16") * NODES;
    size_t threads = (size_t)atoi(argc > 2 ? argv[2] : "0");
    struct node *first = build(7);
    pthread_t thread[threads + 1];
    for (size_t i = 0; i < threads; i++)
        pthread_create(&thread[i], 0, i ? work : map, (void *)i);
    int status = 0;
    for (size_t i = 0; i < threads; i++) {
        void *failed;
        pthread_join(thread[i], &failed);
        if (failed && (status = 1))
            printf("%s is wrong\n", (const char *)failed);
    }
    fflush(stdout);
    pid_t child = fork();
    if (child == 0)
        _exit(!is_right(first, 7) || !is_right(build(9), 9));
    int child_status = 0;
    waitpid(child, &child_status, 0);
    if (!is_right(first, 7) && (status = 1))
        puts("the first list is wrong");
    puts(child_status ? "the child's lists are wrong" : status ? "" : "verified");
    return status;
}
