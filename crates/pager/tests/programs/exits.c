/* Threads end while the pages of their stacks would have left memory, and are joined. usage: exits MIB
 *
 * They wait and end without a load or store, so only the kernel touches their control blocks, when they have ended. */
#include <linux/futex.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { THREADS = 4, STACK_BYTES = 1 << 20 };

static int is_over;

static void *wait_and_exit(void *argument) {
    volatile char used[STACK_BYTES];
    for (size_t at = 0; at < STACK_BYTES; at += 4096)
        used[at] = 1;
    (void)used[0];
#if defined(__x86_64__)
    register long timeout __asm__("r10") = 0;
    __asm__ volatile("syscall\n\tmov %[exit], %%eax\n\txor %%edi, %%edi\n\tsyscall"
                     :
                     : "a"(SYS_futex), "D"(&is_over), "S"(FUTEX_WAIT), "d"(0), "r"(timeout), [exit] "i"(SYS_exit)
                     : "rcx", "r11", "memory");
#else
    syscall(SYS_futex, &is_over, FUTEX_WAIT, 0, NULL);
    syscall(SYS_exit, 0);
#endif
    return argument;
}

int main(int count, char **arguments) {
    size_t len = (size_t)(count > 1 ? atoi(arguments[1]) : 32) << 20;
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++)
        pthread_create(&threads[i], NULL, wait_and_exit, NULL);
    /* The pager finds memory that came without a message. */
    usleep(500000);
    char *memory = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (int round = 0; round < 3; round++)
        for (size_t at = 0; at < len; at += 4096)
            memset(memory + at, round + 1, 64);
    __atomic_store_n(&is_over, 1, __ATOMIC_SEQ_CST);
    syscall(SYS_futex, &is_over, FUTEX_WAKE, THREADS);
    alarm(20);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    puts("joined");
    return 0;
}
