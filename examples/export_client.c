/*
 * export_client: reads, writes and appends to files of another host's exported directory from C.
 *
 *     terrace export /srv/data --listen 192.0.2.7:7447 --rules rules.toml        (server)
 *     export_client 192.0.2.7 put notes.txt < notes.txt                          (client)
 *     export_client 192.0.2.7 append events.log < one-record                     persistent when it ends
 *     export_client 192.0.2.7 get notes.txt
 *     export_client 192.0.2.7 list /
 *
 * Build:  cc -O2 -o export_client export_client.c $(pkg-config --cflags --libs terrace)
 */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <terrace_export.h>

enum {
    PIECE = 1 << 20,
    NEW_MODE = 0644,
};

static void die(const char *format, ...)
{
    int reason = errno;
    va_list args;

    fprintf(stderr, "export_client: ");
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fprintf(stderr, ": %s\n", strerror(reason));
    exit(1);
}

/* Reads standard input until PIECE bytes are there or it ends. */
static size_t read_input(char *buffer)
{
    size_t count = fread(buffer, 1, PIECE, stdin);

    if (ferror(stdin))
        die("standard input");
    return count;
}

static struct terrace_file *open_file(struct terrace_export *connection, const char *path, int flags)
{
    struct terrace_file *file = terrace_export_open(connection, path, flags, NEW_MODE);

    if (!file)
        die("%s", path);
    return file;
}

static void put(struct terrace_export *connection, const char *path, char *buffer)
{
    struct terrace_file *file = open_file(connection, path, O_WRONLY | O_CREAT | O_TRUNC);
    uint64_t offset = 0;
    size_t count;

    while ((count = read_input(buffer)) > 0) {
        if (terrace_file_pwrite(file, buffer, count, offset) < 0)
            die("%s", path);
        offset += count;
    }
    if (terrace_file_commit(file) || terrace_file_close(file))
        die("%s", path);
}

static void append(struct terrace_export *connection, const char *path, char *buffer)
{
    struct terrace_file *file = open_file(connection, path, O_WRONLY | O_CREAT | O_APPEND);
    size_t count = read_input(buffer);
    int64_t offset = terrace_file_append(file, buffer, count, TERRACE_FILE_COMMIT);

    if (offset < 0)
        die("%s", path);
    printf("%zu bytes at %lld\n", count, (long long)offset);
    if (terrace_file_close(file))
        die("%s", path);
}

static void get(struct terrace_export *connection, const char *path, char *buffer)
{
    struct terrace_file *file = open_file(connection, path, O_RDONLY);
    uint64_t offset = 0;
    ssize_t count;

    while ((count = terrace_file_pread(file, buffer, PIECE, offset)) > 0) {
        if (fwrite(buffer, 1, (size_t)count, stdout) != (size_t)count)
            die("standard output");
        offset += (uint64_t)count;
    }
    if (count < 0 || terrace_file_close(file))
        die("%s", path);
}

static int print_entry(void *context, const char *name, const struct stat *attributes)
{
    (void)context;
    printf("%06o %12lld %s\n", attributes->st_mode, (long long)attributes->st_size, name);
    return 0;
}

int main(int argc, char **argv)
{
    struct terrace_export *connection;
    char *buffer;

    if (argc != 4) {
        fprintf(stderr, "usage: export_client HOST[:PORT] put|append|get|list|remove PATH\n");
        return 2;
    }
    buffer = malloc(PIECE);
    if (!buffer)
        die("memory");
    connection = terrace_export_connect(argv[1], 0);
    if (!connection)
        die("%s", argv[1]);
    if (!strcmp(argv[2], "put"))
        put(connection, argv[3], buffer);
    else if (!strcmp(argv[2], "append"))
        append(connection, argv[3], buffer);
    else if (!strcmp(argv[2], "get"))
        get(connection, argv[3], buffer);
    else if (!strcmp(argv[2], "list")) {
        if (terrace_export_readdir(connection, argv[3], print_entry, NULL))
            die("%s", argv[3]);
    } else if (!strcmp(argv[2], "remove")) {
        if (terrace_export_unlink(connection, argv[3]))
            die("%s", argv[3]);
    } else {
        fprintf(stderr, "export_client: unknown command %s\n", argv[2]);
        return 2;
    }
    terrace_export_disconnect(connection);
    free(buffer);
    return 0;
}
