/*
 * swap_faults: what it costs when a program touches private memory that has left memory, by three designs.
 *
 *     swap_faults [DIRECTORY]        a directory on a disk; default /var/tmp
 *
 * file      the memory is a shared mapping of a file: the kernel reads the page (crates/vm, decision 52)
 * handler   userfaultfd: a thread reads the page (O_DIRECT) and installs it (UFFDIO_COPY), and wakes the program
 * spinning  the same, and the thread polls its descriptor on the other processor
 *
 * Medians and 99th percentiles of 4,000 touches of random pages, ns. Run on a quiet machine as root.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096, PAGES = 65536, TOUCHES = 4000 };

static char *memory;
static int file, direct, uffd;
static volatile bool is_spinning, is_over;

static void check(bool is_good, const char *what)
{
    if (!is_good) {
        perror(what);
        exit(1);
    }
}

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

static void report(const char *design, const char *what, uint64_t *times)
{
    qsort(times, TOUCHES, sizeof *times, ascending);
    printf("%-9s %-38s %8llu %8llu\n", design, what, (unsigned long long)times[TOUCHES / 2],
           (unsigned long long)times[TOUCHES * 99 / 100]);
    fflush(stdout);
}

/* Touches random pages, each after `before`. */
static void touch(const char *design, const char *what, bool is_store, void (*before)(char *page))
{
    static uint64_t times[TOUCHES];
    for (size_t i = 0; i < TOUCHES; i++) {
        char *page = memory + (size_t)(random() % PAGES) * PAGE;
        if (before != NULL)
            before(page);
        uint64_t begun = now_ns();
        if (is_store)
            *(volatile char *)page += 1;
        else
            (void)*(volatile char *)page;
        times[i] = now_ns() - begun;
    }
    report(design, what, times);
}

static void drop(char *page)
{
    sync_file_range(file, page - memory, PAGE, SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER);
    madvise(page, PAGE, MADV_PAGEOUT);
    posix_fadvise(file, page - memory, PAGE, POSIX_FADV_DONTNEED);
}

static void unmap(char *page)
{
    (void)*(volatile char *)page;
    madvise(page, PAGE, MADV_DONTNEED);
}

static void clean(char *page)
{
    *(volatile char *)page += 1;
    sync_file_range(file, page - memory, PAGE, SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER);
}

static void *handle(void *unused)
{
    (void)unused;
    char *buffer = aligned_alloc(PAGE, PAGE);
    while (!is_over) {
        struct pollfd readable = {.fd = uffd, .events = POLLIN};
        if (poll(&readable, 1, is_spinning ? 0 : 100) == 0)
            continue;
        struct uffd_msg fault;
        if (read(uffd, &fault, sizeof fault) != sizeof fault)
            continue;
        uint64_t addr = fault.arg.pagefault.address & ~(uint64_t)(PAGE - 1);
        check(pread(direct, buffer, PAGE, (off_t)(addr - (uint64_t)(uintptr_t)memory)) == PAGE, "pread");
        struct uffdio_copy copy = {.dst = addr, .src = (uint64_t)(uintptr_t)buffer, .len = PAGE};
        ioctl(uffd, UFFDIO_COPY, &copy);
    }
    free(buffer);
    return NULL;
}

static void withdraw(char *page)
{
    madvise(page, PAGE, MADV_DONTNEED);
}

int main(int argc, char **argv)
{
    const char *directory = argc > 1 ? argv[1] : "/var/tmp";
    file = open(directory, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    check(file >= 0, directory);
    char *bytes = calloc(1, 1 << 20);
    memset(bytes, 7, 1 << 20);
    for (size_t i = 0; i < PAGES / 256; i++)
        check(write(file, bytes, 1 << 20) == 1 << 20, "write");
    check(fsync(file) == 0, "fsync");
    posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
    posix_fadvise(file, 0, 0, POSIX_FADV_RANDOM);
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    direct = open(path, O_RDONLY | O_DIRECT | O_CLOEXEC);
    check(direct >= 0, "O_DIRECT");

    printf("%-9s %-38s %8s %8s\n", "design", "touch", "p50", "p99");
    memory = mmap(NULL, (size_t)PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    check(memory != MAP_FAILED, "mmap");
    madvise(memory, (size_t)PAGES * PAGE, MADV_RANDOM);
    touch("file", "load of a page on the disk", false, drop);
    touch("file", "store to a page on the disk", true, drop);
    touch("file", "load of a page in the page cache", false, unmap);
    touch("file", "store to a page that has been written", true, clean);
    munmap(memory, (size_t)PAGES * PAGE);

    memory = mmap(NULL, (size_t)PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    check(memory != MAP_FAILED, "mmap");
    madvise(memory, (size_t)PAGES * PAGE, MADV_NOHUGEPAGE);
    touch("none", "first touch of private memory", true, NULL);
    uffd = (int)syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);
    check(uffd >= 0, "userfaultfd");
    struct uffdio_api api = {.api = UFFD_API};
    check(ioctl(uffd, UFFDIO_API, &api) == 0, "UFFDIO_API");
    struct uffdio_register all = {.range = {(uint64_t)(uintptr_t)memory, (uint64_t)PAGES * PAGE},
                                  .mode = UFFDIO_REGISTER_MODE_MISSING};
    check(ioctl(uffd, UFFDIO_REGISTER, &all) == 0, "UFFDIO_REGISTER");
    pthread_t thread;
    check(pthread_create(&thread, NULL, handle, NULL) == 0, "pthread_create");
    touch("handler", "load of a page on the disk", false, withdraw);
    is_spinning = true;
    touch("spinning", "load of a page on the disk", false, withdraw);
    is_over = true;
    pthread_join(thread, NULL);
    return 0;
}
