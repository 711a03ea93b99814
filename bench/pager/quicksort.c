/* Sorts a permutation by quicksort, and verifies it. usage: quicksort MIB (a power of two)
 * Prints the seconds of filling and sorting. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static void sort(uint64_t *keys, size_t count)
{
    while (count > 16) {
        uint64_t pivot = keys[count / 2];
        size_t i = 0, j = count - 1;
        for (;;) {
            while (keys[i] < pivot)
                i++;
            while (keys[j] > pivot)
                j--;
            if (i >= j)
                break;
            uint64_t key = keys[i];
            keys[i++] = keys[j];
            keys[j--] = key;
        }
        size_t left = j + 1;
        if (left < count - left) {
            sort(keys, left);
            keys += left;
            count -= left;
        } else {
            sort(keys + left, count - left);
            count = left;
        }
    }
    for (size_t i = 1; i < count; i++)
        for (size_t j = i; j > 0 && keys[j - 1] > keys[j]; j--) {
            uint64_t key = keys[j];
            keys[j] = keys[j - 1];
            keys[j - 1] = key;
        }
}

int main(int argc, char **argv)
{
    size_t count = (size_t)atoi(argc > 1 ? argv[1] : "64") << 17;
    double begin = now();
    uint64_t *keys = malloc(count * sizeof *keys);
    if (!keys)
        return 2;
    /* Multiplication by an odd number is a permutation modulo a power of two. */
    for (size_t i = 0; i < count; i++)
        keys[i] = i * 0x9e3779b97f4a7c15ull % count;
    sort(keys, count);
    double seconds = now() - begin;
    for (size_t i = 0; i < count; i++)
        if (keys[i] != i) {
            fprintf(stderr, "keys[%zu] is %llu\n", i, (unsigned long long)keys[i]);
            return 1;
        }
    printf("{\"seconds\": %.3f, \"result\": \"%zu keys sorted\"}\n", seconds, count);
    return 0;
}
