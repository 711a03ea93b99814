/* Closes all descriptors, uses all numbers that the library's descriptor may have had for a pipe, and has a child write to each. */
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

enum { FIRST = 500, LAST = 540 };

int main(void) {
    int pipes[2];
    if (close_range(3, ~0U, 0) || pipe(pipes))
        return 2;
    for (int number = FIRST; number <= LAST; number++)
        if (dup2(pipes[1], number) != number)
            return 3;
    pid_t child = fork();
    if (child == 0) {
        for (int number = FIRST; number <= LAST; number++)
            if (write(number, "x", 1) != 1)
                _exit(1);
        _exit(0);
    }
    int status;
    char bytes[LAST - FIRST + 1];
    if (waitpid(child, &status, 0) != child || status) {
        printf("the child ends with %x\n", status);
        return 1;
    }
    if (read(pipes[0], bytes, sizeof bytes) != sizeof bytes)
        return 4;
    puts("verified");
    return 0;
}
