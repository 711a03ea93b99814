/*
 * waiting.c: a library whose constructor waits for a thread, as that of a library with worker threads may. The dynamic
 * linker's lock is held meanwhile, so the functions that the thread calls (`first_calls` of fork_load.c) must not take it.
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
