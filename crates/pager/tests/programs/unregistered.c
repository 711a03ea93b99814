/* Memory by a system call of the program's own, which it reads again after a byte has come. */
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { LEN = 16384 };

int main(void) {
    char *memory = (char *)syscall(SYS_mmap, NULL, LEN, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memset(memory, 7, LEN);
    dprintf(1, "%p\n", (void *)memory);
    char byte;
    if (read(0, &byte, 1) != 1)
        return 2;
    for (int at = 0; at < LEN; at++)
        if (memory[at] != 7) {
            dprintf(1, "%d at %d\n", memory[at], at);
            return 1;
        }
    dprintf(1, "verified\n");
    return 0;
}
