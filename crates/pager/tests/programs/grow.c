/* Fills memory, says so, waits for a byte, and verifies it. usage: grow MIB */
#include <stdio.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>

int main(int argc, char **argv) {
    size_t count = (size_t)atoi(argc > 1 ? argv[1] : "64") << 17;
    uint64_t *words = mmap(0, count * 8, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (size_t i = 0; i < count; i++)
        words[i] = i * 0x9e3779b97f4a7c15ull;
    puts("filled");
    fflush(stdout);
    getchar();
    for (size_t i = 0; i < count; i++)
        if (words[i] != i * 0x9e3779b97f4a7c15ull) {
            printf("words[%zu] is wrong\n", i);
            return 1;
        }
    puts("verified");
    return 0;
}
