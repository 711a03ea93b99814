/*
 * waiting.c: a library whose constructor waits for a thread, as libraries do that start workers. The dynamic linker's lock is
 * held meanwhile, so the thread must not need it for what it calls (`first_calls` of fork_load.c).
 */
#include <pthread.h>
#include <stdlib.h>

void first_calls(void);

static void *work(void *unused)
{
    first_calls();
    return unused;
}

__attribute__((constructor)) static void start(void)
{
    pthread_t thread;
    if (pthread_create(&thread, NULL, work, NULL) != 0 || pthread_join(thread, NULL) != 0)
        abort();
}
