/*
 * local: writes and appends to a local file, timed one by one, for bench/filemr/latency.py.
 *
 *     local DIR
 *
 * Reads a command a line, and prints a JSON object for each:
 *
 *     pwrite COUNT            pwrite of 1 KiB at random offsets, each followed by fdatasync
 *     msync COUNT             the same by a mapping and msync
 *     pmemlog BYTES COUNT     records of Debian's libpmemlog, each persistent when pmemlog_append returns
 *
 * Build:  make build/bench/filemr/local
 */
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <libpmemlog.h>

#include "../times.h"

enum {
    WRITE_BYTES = 1 << 10,
    PAGE_BYTES = 4096,
    COUNT_MAX = 1 << 20,
};
static const size_t FILE_BYTES = 64 << 20, LOG_BYTES = 256 << 20;

static void die(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fprintf(stderr, "local: ");
    vfprintf(stderr, format, args);
    fprintf(stderr, ": %m\n");
    va_end(args);
    exit(1);
}

/* The steps of each operation of a command, in microseconds. */
static double first[COUNT_MAX], second[COUNT_MAX], all[COUNT_MAX];

static void note(size_t at, double begin, double written, double end)
{
    first[at] = written - begin;
    second[at] = end - written;
    all[at] = end - begin;
}

static void print_medians(size_t count)
{
    qsort(first, count, sizeof *first, ascending);
    qsort(second, count, sizeof *second, ascending);
    qsort(all, count, sizeof *all, ascending);
    printf("{\"write_us\": %.2f, \"commit_us\": %.2f, \"us\": %.2f, \"p99_us\": %.2f}\n", first[count / 2], second[count / 2],
           all[count / 2], all[count * 99 / 100]);
}

static off_t random_offset(void)
{
    return (off_t)(random() % (long)(FILE_BYTES / WRITE_BYTES)) * WRITE_BYTES;
}

static int open_file(const char *directory)
{
    static char block[1 << 20];
    char path[4096];
    snprintf(path, sizeof path, "%s/local.data", directory);
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    if (fd < 0)
        die("cannot make %s", path);
    memset(block, 1, sizeof block);
    for (size_t at = 0; at < FILE_BYTES; at += sizeof block)
        if (pwrite(fd, block, sizeof block, (off_t)at) != (ssize_t)sizeof block)
            die("cannot write %s", path);
    if (fsync(fd) != 0)
        die("cannot synchronize %s", path);
    return fd;
}

static void run_pwrite(int fd, size_t count)
{
    char data[WRITE_BYTES];
    memset(data, 2, sizeof data);
    for (size_t at = 0; at < count; at++) {
        off_t offset = random_offset();
        double begin = microseconds_now();
        if (pwrite(fd, data, sizeof data, offset) != (ssize_t)sizeof data)
            die("pwrite");
        double written = microseconds_now();
        if (fdatasync(fd) != 0)
            die("fdatasync");
        note(at, begin, written, microseconds_now());
    }
}

static void run_msync(int fd, size_t count)
{
    static char *mapping;
    if (mapping == NULL) {
        mapping = mmap(NULL, FILE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (mapping == MAP_FAILED)
            die("mmap");
    }
    for (size_t at = 0; at < count; at++) {
        off_t offset = random_offset();
        double begin = microseconds_now();
        memset(mapping + offset, (int)at, WRITE_BYTES);
        double written = microseconds_now();
        if (msync(mapping + offset / PAGE_BYTES * PAGE_BYTES, PAGE_BYTES, MS_SYNC) != 0)
            die("msync");
        note(at, begin, written, microseconds_now());
    }
}

static void run_pmemlog(const char *directory, size_t bytes, size_t count)
{
    static PMEMlogpool *log;
    static char data[1 << 20];
    if (log == NULL) {
        char path[4096];
        snprintf(path, sizeof path, "%s/local.pmemlog", directory);
        unlink(path);
        log = pmemlog_create(path, LOG_BYTES, 0600);
        if (log == NULL)
            die("pmemlog_create: %s", pmemlog_errormsg());
    }
    if (bytes > sizeof data)
        die("a record of %zu bytes is too long", bytes);
    for (size_t at = 0; at < count; at++) {
        double begin = microseconds_now();
        if (pmemlog_append(log, data, bytes) != 0) {
            /* It is full: begin anew, untimed. */
            pmemlog_rewind(log);
            begin = microseconds_now();
            if (pmemlog_append(log, data, bytes) != 0)
                die("pmemlog_append: %s", pmemlog_errormsg());
        }
        double end = microseconds_now();
        note(at, begin, end, end);
    }
}

int main(int argc, char **argv)
{
    char line[256];
    if (argc != 2) {
        fprintf(stderr, "usage: local DIR\n");
        return 2;
    }
    int fd = open_file(argv[1]);
    setlinebuf(stdout);
    puts("{}");
    while (fgets(line, sizeof line, stdin) != NULL) {
        size_t bytes, count;
        if (sscanf(line, "pwrite %zu", &count) == 1 && count > 0 && count <= COUNT_MAX)
            run_pwrite(fd, count);
        else if (sscanf(line, "msync %zu", &count) == 1 && count > 0 && count <= COUNT_MAX)
            run_msync(fd, count);
        else if (sscanf(line, "pmemlog %zu %zu", &bytes, &count) == 2 && count > 0 && count <= COUNT_MAX)
            run_pmemlog(argv[1], bytes, count);
        else {
            fprintf(stderr, "local: unknown command: %s", line);
            return 2;
        }
        print_medians(count);
    }
    return 0;
}
