/*
 * check.h: compares the results of verbs with the expected ones.
 *
 * A program of this directory makes many invalid calls, which must fail. Each call is one line. Only failed checks are
 * printed, with their file and line. The program ends with `return check_end();`.
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

/* Counts a check. If it failed, prints its file, line and text; the caller prints the rest of the line. */
static inline bool count_check(bool good, const char *file, int line, const char *text)
{
    check_count++;
    if (good)
        return true;
    check_failures++;
    printf("%s:%d: %s: ", file, line, text);
    return false;
}

static inline const char *check_errno_name(int value)
{
    return value == 0 ? "success" : strerrorname_np(value) != NULL ? strerrorname_np(value) : "no errno";
}

static inline void check_code(int got, int wanted, const char *file, int line, const char *text)
{
    if (!count_check(got == wanted, file, line, text))
        printf("%s (%d) instead of %s\n", check_errno_name(got), got, check_errno_name(wanted));
}

static inline void check_errno(bool failed, int got, int wanted, const char *file, int line, const char *text)
{
    if (!failed)
        count_check(false, file, line, text), puts("succeeded");
    else if (!count_check(got == wanted, file, line, text))
        printf("%s instead of %s\n", check_errno_name(got), check_errno_name(wanted));
}

/* Checks a condition. */
#define CHECK(condition)                                                     \
    do {                                                                     \
        if (!count_check((condition), __FILE__, __LINE__, #condition))        \
            puts("is false");                                           \
    } while (0)

/* Checks a verb that returns 0 or an errno. */
#define RETURNS(wanted, call) check_code((call), (wanted), __FILE__, __LINE__, #call)

/* Checks a verb that returns an object, or null and sets errno: it must fail with this errno. */
#define FAILS(wanted, call)                                                            \
    do {                                                                                 \
        errno = 0;                                                                       \
        const void *object_ = (call);                                                    \
        check_errno(object_ == NULL, errno, (wanted), __FILE__, __LINE__, #call);        \
    } while (0)

/* Checks a verb that returns -1 and sets errno. */
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
