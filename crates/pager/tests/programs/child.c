/* Has a child that uses memory. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

int main(void) {
    char *bytes = malloc(1 << 20);
    memset(bytes, 1, 1 << 20);
    pid_t child = fork();
    if (child == 0) {
        memset(bytes, 2, 1 << 20);
        _exit(0);
    }
    int status;
    if (waitpid(child, &status, 0) != child || status || bytes[4096] != 1) {
        printf("the child ends with %x\n", status);
        return 1;
    }
    puts("verified");
    return 0;
}
