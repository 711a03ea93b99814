/*
 * private_memory: what the kernel takes to copy another process's private memory, and what it takes to make private memory shared.
 *
 * A child process is the target. It has 256 MiB (or as many MiB as the argument says) of private memory in small pages, as much in huge
 * pages, and as much in a memfd. This process copies from and to random places there, the ways in turns, and prints the median of each in
 * nanoseconds, which includes the clock's time. Then it makes private memory of its own shared, and prints the time and what has changed.
 * docs/decisions/0046-private-memory-is-copied-by-the-kernel.md has results.
 *
 * Build:  make build/bench/private_memory
 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096, HUGE_PAGE = 2 << 20, BYTES_MAX = 1 << 20, LIST_MAX = 32, ROUNDS = 40, CALLS_MAX = 200, CALL_BYTES = 4 << 20 };

/* Memory of the target. Each lies at the same address in both processes. */
enum memory { SMALL_PAGES, HUGE_PAGES, SHARED, MEMORIES };

static char *memories[MEMORIES], *local;
static size_t region_bytes = 256UL << 20;
static pid_t target;
static int shared_file, target_memory;

static void fail(const char *what)
{
    fprintf(stderr, "private_memory: %s: %s\n", what, strerror(errno));
    exit(1);
}

static double nanoseconds_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e9 + (double)now.tv_nsec;
}

static uint64_t random_number(void)
{
    static uint64_t state = 88172645463325252u;
    state ^= state << 13;
    state ^= state >> 7;
    return state ^= state << 17;
}

static char *map(size_t bytes, bool huge)
{
    char *mapped = mmap(NULL, bytes + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED)
        fail("mmap");
    mapped += -(uintptr_t)mapped % HUGE_PAGE;
    if (madvise(mapped, bytes, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE) != 0)
        fail("madvise");
    return mapped;
}

static int make_file(size_t bytes)
{
    int file = memfd_create("private_memory", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, (off_t)bytes) != 0)
        fail("memfd_create");
    return file;
}

static void store_to_each_page(char *memory, size_t bytes)
{
    for (size_t i = 0; i < bytes; i += PAGE)
        ((volatile char *)memory)[i] = 1;
}

static void start_target(void)
{
    int ready[2];
    char byte = 0, path[64];
    memories[SMALL_PAGES] = map(region_bytes, false);
    memories[HUGE_PAGES] = map(region_bytes, true);
    shared_file = make_file(region_bytes);
    memories[SHARED] = mmap(NULL, region_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, shared_file, 0);
    if (memories[SHARED] == MAP_FAILED || pipe(ready) != 0 || (target = fork()) < 0)
        fail("the target's memory");
    if (target == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        for (int i = 0; i < MEMORIES; i++)
            store_to_each_page(memories[i], region_bytes);
        if (write(ready[1], &byte, 1) != 1)
            fail("write");
        for (;;)
            pause();
    }
    snprintf(path, sizeof path, "/proc/%d/mem", target);
    if (read(ready[0], &byte, 1) != 1 || (target_memory = open(path, O_RDONLY | O_CLOEXEC)) < 0)
        fail(path);
    store_to_each_page(memories[SHARED], region_bytes);
}

/* ---- the ways: each copies `count` pieces of `size` bytes, from or to the places in `theirs` -------------------------- */

static struct iovec theirs[LIST_MAX], ours[LIST_MAX + 1];

static ssize_t no_way(size_t size, int count)
{
    return (ssize_t)size * count;
}

static ssize_t empty_call(size_t size, int count)
{
    syscall(SYS_getppid);
    return no_way(size, count);
}

/* Nothing is mapped at address 8: the process is found and checked, and its memory is searched. */
static ssize_t failing_call(size_t size, int count)
{
    struct iovec nowhere = {(void *)8, 8};
    process_vm_readv(target, ours, 1, &nowhere, 1, 0);
    return no_way(size, count);
}

static ssize_t copy(size_t size, int count)
{
    for (int i = 0; i < count; i++)
        memcpy(ours[i].iov_base, theirs[i].iov_base, size);
    return no_way(size, count);
}

static ssize_t read_vm(size_t size, int count)
{
    (void)size;
    return process_vm_readv(target, ours, (unsigned long)count, theirs, (unsigned long)count, 0);
}

static ssize_t read_mem(size_t size, int count)
{
    (void)count;
    return pread(target_memory, local, size, (off_t)(uintptr_t)theirs[0].iov_base);
}

static ssize_t read_file(size_t size, int count)
{
    (void)count;
    return pread(shared_file, local, size, (char *)theirs[0].iov_base - memories[SHARED]);
}

static ssize_t write_vm(size_t size, int count)
{
    (void)size;
    return process_vm_writev(target, ours, (unsigned long)count, theirs, (unsigned long)count, 0);
}

/* The last byte is a part of its own, so that it is stored last: of both ends, or of the local end only. */
static ssize_t write_vm_parts(size_t size, int count)
{
    struct iovec from[2] = {{local, size - 1}, {local + size - 1, 1}};
    struct iovec to[2] = {{theirs[0].iov_base, size - 1}, {(char *)theirs[0].iov_base + size - 1, 1}};
    (void)count;
    return process_vm_writev(target, from, 2, to, 2, 0);
}

static ssize_t write_vm_local_parts(size_t size, int count)
{
    struct iovec from[2] = {{local, size - 1}, {local + size - 1, 1}};
    (void)count;
    return process_vm_writev(target, from, 2, theirs, 1, 0);
}

/* ---- measuring ------------------------------------------------------------------------------------------------------ */

struct way {
    const char *name;
    ssize_t (*run)(size_t size, int count);
    enum memory memory;
};

struct point {
    const struct way *way;
    size_t size;
    int count;
    double times[ROUNDS * CALLS_MAX];
    int times_count;
};

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void measure(struct point *point)
{
    size_t places = region_bytes / point->size;
    int calls = (int)(CALL_BYTES / (point->size * (size_t)point->count));
    for (int i = 0; i < (calls < CALLS_MAX ? calls : CALLS_MAX); i++) {
        for (int j = 0; j < point->count; j++) {
            theirs[j] = (struct iovec){memories[point->way->memory] + random_number() % places * point->size, point->size};
            ours[j] = (struct iovec){local + (size_t)j * point->size, point->size};
        }
        double start = nanoseconds_now();
        ssize_t moved = point->way->run(point->size, point->count);
        point->times[point->times_count++] = nanoseconds_now() - start;
        if (moved != (ssize_t)point->size * point->count)
            fail(point->way->name);
    }
}

/* Prints a line for each way, a column for each size (or count of pieces of `size` bytes, then per piece). */
static void compare(const char *title, const struct way ways[], int way_count, const size_t sizes[], const int counts[], int columns)
{
    struct point *points = calloc((size_t)(way_count * columns), sizeof *points);
    if (points == NULL)
        fail("calloc");
    for (int i = 0; i < way_count * columns; i++)
        points[i] = (struct point){.way = &ways[i / columns], .size = sizes[i % columns], .count = counts[i % columns]};
    for (int round = 0; round < ROUNDS; round++)
        for (int i = 0; i < way_count * columns; i++)
            measure(&points[i]);
    printf("\n%-46s", title);
    for (int i = 0; i < columns; i++) {
        char head[32];
        snprintf(head, sizeof head, counts[i] > 1 ? "%zu B x %d" : "%zu B", sizes[i], counts[i]);
        printf("%12s", head);
    }
    for (int i = 0; i < way_count * columns; i++) {
        struct point *point = &points[i];
        qsort(point->times, (size_t)point->times_count, sizeof point->times[0], ascending);
        if (i % columns == 0)
            printf("\n%-46s", point->way->name);
        printf("%12.0f", point->times[point->times_count / 2] / point->count);
    }
    printf("\n");
    free(points);
}

#define COUNT(array) ((int)(sizeof(array) / sizeof(array)[0]))

static void compare_ways(void)
{
    static const struct way fixed[] = {
        {"the clock", no_way, SHARED},
        {"getppid", empty_call, SHARED},
        {"process_vm_readv of an address without memory", failing_call, SHARED},
    };
    static const struct way reads[] = {
        {"memcpy from shared memory", copy, SHARED},
        {"pread of the shared memory's file", read_file, SHARED},
        {"process_vm_readv", read_vm, SMALL_PAGES},
        {"pread of /proc/PID/mem", read_mem, SMALL_PAGES},
        {"process_vm_readv, huge pages", read_vm, HUGE_PAGES},
        {"pread of /proc/PID/mem, huge pages", read_mem, HUGE_PAGES},
    };
    static const struct way writes[] = {
        {"process_vm_writev", write_vm, SMALL_PAGES},
        {"the same, last byte apart at both ends", write_vm_parts, SMALL_PAGES},
        {"the same, last byte apart at the local end", write_vm_local_parts, SMALL_PAGES},
    };
    static const struct way lists[] = {
        {"memcpy from shared memory", copy, SHARED},
        {"process_vm_readv", read_vm, SMALL_PAGES},
        {"process_vm_writev", write_vm, SMALL_PAGES},
    };
    static const size_t one[] = {8}, sizes[] = {8, 512, PAGE, 2 * PAGE, 4 * PAGE, 16 * PAGE, BYTES_MAX};
    static const size_t list_sizes[] = {8, 8, 8, 8, PAGE, PAGE, PAGE, PAGE, 4 * PAGE, 4 * PAGE};
    static const int single[] = {1, 1, 1, 1, 1, 1, 1}, counts[] = {1, 2, 16, 32, 1, 2, 16, 32, 1, 16};
    compare("the parts of a call", fixed, COUNT(fixed), one, single, 1);
    compare("READ", reads, COUNT(reads), sizes, single, COUNT(sizes));
    compare("WRITE", writes, COUNT(writes), sizes, single, COUNT(sizes));
    compare("several in one call, per piece", lists, COUNT(lists), list_sizes, counts, COUNT(counts));
}

/* ---- making private memory shared ------------------------------------------------------------------------------------ */

/* Puts a file with the same bytes in place of private memory. A store by another thread meanwhile would be lost. */
static void make_shared(char *memory, size_t bytes)
{
    int file = make_file(bytes);
    for (size_t done = 0; done < bytes;) {
        ssize_t written = pwrite(file, memory + done, bytes - done, (off_t)done);
        if (written <= 0)
            fail("pwrite");
        done += (size_t)written;
    }
    if (mmap(memory, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED)
        fail("mmap");
    close(file);
}

static void time_conversion(size_t bytes)
{
    char *memory = map(bytes, false);
    double start = nanoseconds_now();
    store_to_each_page(memory, bytes);
    double stored = nanoseconds_now();
    make_shared(memory, bytes);
    double converted = nanoseconds_now();
    store_to_each_page(memory, bytes);
    double pages = (double)bytes / PAGE, again = nanoseconds_now();
    printf("%zu MiB made shared: %.2f ms; for each page %.0f ns, and %.0f for the next store to it; its first store took %.0f\n",
           bytes >> 20, (converted - stored) / 1e6, (converted - stored) / pages, (again - converted) / pages,
           (stored - start) / pages);
    munmap(memory, bytes);
}

/* A child that stores to the first byte, and returns what it finds in the second one after this process has stored there. */
static int child_of_fork(volatile char *memory)
{
    int go[2], status = 0;
    char byte = 0;
    if (pipe(go) != 0)
        fail("pipe");
    pid_t child = fork();
    if (child == 0) {
        memory[0] = 2;
        _exit(read(go[0], &byte, 1) == 1 ? memory[1] : 99);
    }
    memory[1] = 3;
    if (child < 0 || write(go[1], &byte, 1) != 1 || waitpid(child, &status, 0) != child)
        fail("fork");
    close(go[0]);
    close(go[1]);
    return WEXITSTATUS(status);
}

static void show_what_changes(bool shared)
{
    char *memory = map(BYTES_MAX, false);
    store_to_each_page(memory, BYTES_MAX);
    if (shared)
        make_shared(memory, BYTES_MAX);
    int of_child = child_of_fork(memory), freed = madvise(memory, PAGE, MADV_FREE) == 0 ? 0 : errno;
    printf("%s: after fork, the child's store is %sseen by the parent, the parent's is %sseen by the child; MADV_FREE: %s; ",
           shared ? "shared " : "private", memory[0] == 2 ? "" : "not ", of_child == 3 ? "" : "not ", strerror(freed));
    memory[0] = 2;
    if (madvise(memory, PAGE, MADV_DONTNEED) != 0)
        fail("madvise");
    printf("after MADV_DONTNEED a byte is %d (it was 2)\n", memory[0]);
    munmap(memory, BYTES_MAX);
}

int main(int argc, char *argv[])
{
    if (argc > 1)
        region_bytes = strtoul(argv[1], NULL, 10) << 20;
    local = malloc((size_t)LIST_MAX * BYTES_MAX);
    if (region_bytes < BYTES_MAX || local == NULL)
        fail("usage: private_memory [MIB]");
    memset(local, 1, (size_t)LIST_MAX * BYTES_MAX);
    start_target();
    compare_ways();
    kill(target, SIGKILL);
    printf("\n");
    time_conversion(1UL << 20);
    time_conversion(64UL << 20);
    time_conversion(1UL << 30);
    show_what_changes(false);
    show_what_changes(true);
    return 0;
}
