/*
 * stopping.c: has a process stop itself (SIGSTOP) in the middle of an access to a same-host peer's memory: behind its next copy from
 * there by the kernel, once the file that TERRACE_STOPPING_FILE names exists. The process removes the file first, so that it stops once.
 */
#define _GNU_SOURCE
#include <signal.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

ssize_t process_vm_readv(pid_t pid, const struct iovec *local, unsigned long local_count, const struct iovec *remote,
                         unsigned long remote_count, unsigned long flags)
{
    ssize_t moved = syscall(SYS_process_vm_readv, pid, local, local_count, remote, remote_count, flags);
    const char *file = getenv("TERRACE_STOPPING_FILE");
    if (moved > 0 && file != NULL && unlink(file) == 0)
        raise(SIGSTOP); /* to this thread: a signal to the process may stop another one first */
    return moved;
}
