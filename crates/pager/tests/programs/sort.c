/* Sorts an array, and verifies it: the keys are a permutation of 0..count. usage: sort MIB (a power of two) */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

static void swap(uint64_t *a, uint64_t *b) {
    uint64_t t = *a;
    *a = *b;
    *b = t;
}

static void sort(uint64_t *keys, size_t count) {
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
            swap(&keys[i++], &keys[j--]);
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
        for (size_t j = i; j > 0 && keys[j - 1] > keys[j]; j--)
            swap(&keys[j - 1], &keys[j]);
}

int main(int argc, char **argv) {
    size_t count = (size_t)atoi(argc > 1 ? argv[1] : "64") << 17;
    uint64_t *keys = malloc(count * sizeof *keys);
    if (!keys)
        return 2;
    /* Multiplication by an odd number is a permutation modulo a power of two. */
    for (size_t i = 0; i < count; i++)
        keys[i] = i * 0x9e3779b97f4a7c15ull % count;
    sort(keys, count);
    for (size_t i = 0; i < count; i++)
        if (keys[i] != i) {
            printf("keys[%zu] is %llu\n", i, (unsigned long long)keys[i]);
            return 1;
        }
    puts("sorted");
    free(keys);
    return 0;
}
