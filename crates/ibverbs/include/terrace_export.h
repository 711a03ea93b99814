/*
 * terrace_export.h: a client of exported directories (docs/export.md). The functions are in Terrace's libibverbs.so.1, at version
 * node TERRACE_1.0:
 *
 *     cc -o program program.c $(pkg-config --cflags --libs terrace)
 *
 * Functions that return a pointer or a number return NULL or -1 for an error, and set errno to the reason: that of the system
 * call of the same name on the server, and
 *
 *     ETIMEDOUT   the server does not answer within the time, or nobody serves there
 *     EIO         the answer was lost, and the call may have been done or not; or the server's host has restarted, and what
 *                 was not committed may be lost; or the disk fails
 *     ESTALE      the file does not exist any more, or the right to access it was revoked
 *     ENOLCK      a lock of the file was lost with the connection
 *     EINVAL      a null pointer, or an argument that the call does not take
 *
 * Paths are relative to the exported directory, also if they begin with a slash. All functions may be called by several threads
 * at once, except that nothing may use an object while it is closed, and none by a child of the process that connected.
 */
#ifndef TERRACE_EXPORT_H
#define TERRACE_EXPORT_H

#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A connection to an export. */
struct terrace_export;

/* An open file. */
struct terrace_file;

enum terrace_file_append_flags {
	/* The record and all before it are persistent when the call returns. */
	TERRACE_FILE_COMMIT = 1 << 0,
};

/*
 * Connects to an export at `server`: HOST or HOST:PORT, by default port 7447. Of a name's addresses, the first one is used at
 * which an export answers. Each request to the server ends within `timeout_ms`,
 * connecting again included; 0 means 30 seconds. A call may make several requests: one for a path and then one for
 * the file.
 */
struct terrace_export *terrace_export_connect(const char *server, unsigned int timeout_ms);

/* Ends the connection, when the last file of it is closed. */
void terrace_export_disconnect(struct terrace_export *connection);

/*
 * Opens a regular file. `flags` are O_RDONLY, O_WRONLY or O_RDWR, with O_CREAT, O_EXCL, O_TRUNC and O_APPEND; others are EINVAL.
 * With O_APPEND the file may be appended to, and not written by offset.
 */
struct terrace_file *terrace_export_open(struct terrace_export *connection, const char *path, int flags, mode_t mode);

int terrace_export_stat(struct terrace_export *connection, const char *path, struct stat *attributes);
int terrace_export_chmod(struct terrace_export *connection, const char *path, mode_t mode);
int terrace_export_mkdir(struct terrace_export *connection, const char *path, mode_t mode);
int terrace_export_rmdir(struct terrace_export *connection, const char *path);
int terrace_export_unlink(struct terrace_export *connection, const char *path);
int terrace_export_rename(struct terrace_export *connection, const char *path, const char *new_path);
int terrace_export_symlink(struct terrace_export *connection, const char *target, const char *path);

/* Makes a file's attributes, or a directory's names, persistent. */
int terrace_export_sync(struct terrace_export *connection, const char *path);

/* Takes a name of a directory and the attributes of its file. Another value than 0 ends the listing. */
typedef int (*terrace_entry)(void *context, const char *name, const struct stat *attributes);

/*
 * Calls `entry` for each name of a directory, except "." and ".." and those whose attributes the client may not see. Returns 0, or
 * the first other value that `entry` has returned. The listing waits for the server up to twice the connection's timeout, however
 * many requests it makes; ETIMEDOUT: that was not enough.
 */
int terrace_export_readdir(struct terrace_export *connection, const char *path, terrace_entry entry, void *context);

/* Reads up to `length` bytes from an offset on; fewer if the file ends before. Returns how many. */
ssize_t terrace_file_pread(struct terrace_file *file, void *buffer, size_t length, uint64_t offset);

/* Writes all of `length` bytes from an offset on. A file that ends before becomes longer. Returns `length`. */
ssize_t terrace_file_pwrite(struct terrace_file *file, const void *buffer, size_t length, uint64_t offset);

/*
 * Appends a record of up to 1 MiB at the end of the file, whole and once, and returns its offset. `flags` are of enum
 * terrace_file_append_flags. ENOSPC: the disk is full, and nothing was appended.
 */
int64_t terrace_file_append(struct terrace_file *file, const void *record, size_t length, unsigned int flags);

/* Makes all acknowledged writes and appends of the file persistent. */
int terrace_file_commit(struct terrace_file *file);

int terrace_file_stat(struct terrace_file *file, struct stat *attributes);
int terrace_file_truncate(struct terrace_file *file, uint64_t length);

/* Gives the blocks of a range back, which reads as zeros then. */
int terrace_file_punch(struct terrace_file *file, uint64_t offset, uint64_t length);

/*
 * Locks the whole file for an owner that the caller chooses, as flock() does: LOCK_SH, LOCK_EX or LOCK_UN. EWOULDBLOCK if it cannot
 * be had within `timeout_ms`.
 */
int terrace_file_flock(struct terrace_file *file, uint64_t owner, int operation, unsigned int timeout_ms);

/* Closes the file, and waits until its key is revoked. The object is freed also if this fails. */
int terrace_file_close(struct terrace_file *file);

#ifdef __cplusplus
}
#endif

#endif
