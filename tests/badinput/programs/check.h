/*
 * check.h: compares the results of verbs with the expected ones.
 *
 * A program of this directory makes many calls that must be refused. Each is one line; only those that go wrong are
 * printed, with their place. The program ends with `return check_end();`.
 */
#ifndef CHECK_H
#define CHECK_H

#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

static unsigned check_count;
static unsigned check_failures;

/* Counts a check. If it failed, prints its place and `what`; the caller prints the rest of the line. */
static inline bool check_note(bool good, const char *file, int line, const char *what)
{
    check_count++;
    if (good)
        return true;
    check_failures++;
    printf("%s:%d: %s: ", file, line, what);
    return false;
}

static inline const char *check_errno_name(int value)
{
    return value == 0 ? "success" : strerrorname_np(value) != NULL ? strerrorname_np(value) : "no errno";
}

static inline void check_code(int got, int wanted, const char *file, int line, const char *what)
{
    if (!check_note(got == wanted, file, line, what))
        printf("%s (%d) instead of %s\n", check_errno_name(got), got, check_errno_name(wanted));
}

static inline void check_errno(bool refused, int got, int wanted, const char *file, int line, const char *what)
{
    if (!refused)
        check_note(false, file, line, what), puts("was not refused");
    else if (!check_note(got == wanted, file, line, what))
        printf("%s instead of %s\n", check_errno_name(got), check_errno_name(wanted));
}

/* A condition. */
#define CHECK(condition)                                                     \
    do {                                                                     \
        if (!check_note((condition), __FILE__, __LINE__, #condition))        \
            puts("does not hold");                                           \
    } while (0)

/* A verb that returns 0 or an errno. */
#define RETURNS(wanted, call) check_code((call), (wanted), __FILE__, __LINE__, #call)

/* A verb that returns an object, or null and errno. */
#define REFUSED(wanted, call)                                                            \
    do {                                                                                 \
        errno = 0;                                                                       \
        const void *object_ = (call);                                                    \
        check_errno(object_ == NULL, errno, (wanted), __FILE__, __LINE__, #call);        \
    } while (0)

/* A verb that returns -1 and errno. */
#define MINUS_ONE(wanted, call)                                                          \
    do {                                                                                 \
        errno = 0;                                                                       \
        int code_ = (call);                                                              \
        check_errno(code_ == -1, errno, (wanted), __FILE__, __LINE__, #call);            \
    } while (0)

static inline int check_end(void)
{
    printf("%u checks, %u failed\n", check_count, check_failures);
    return check_failures == 0 ? 0 : 1;
}

#endif
