/*
 * guarded.c: an allocator with the names of the C library's, `__libc_free` too, as tcmalloc and mimalloc have it. Nothing can be
 * read in front of its blocks: a page with the block's length comes first, then one that nobody may access, then the block.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

enum { PAGE = 4096, FRONT = 2 * PAGE };

static size_t *length_of(void *block)
{
    return (size_t *)((char *)block - FRONT);
}
void *memalign(size_t alignment, size_t len)
{
    size_t bytes = FRONT + (len + PAGE - 1) / PAGE * PAGE;
    char *start = MAP_FAILED;
    if (alignment <= PAGE && len < SIZE_MAX / 2)
        start = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED || mprotect(start + PAGE, PAGE, PROT_NONE) != 0) {
        errno = ENOMEM;
        return NULL;
    }
    *length_of(start + FRONT) = len;
    return start + FRONT;
}
void *malloc(size_t len)
{
    return memalign(1, len);
}
void *calloc(size_t count, size_t len)
{
    size_t bytes;
    return memalign(1, __builtin_mul_overflow(count, len, &bytes) ? SIZE_MAX : bytes);
}
void *aligned_alloc(size_t alignment, size_t len)
{
    return memalign(alignment, len);
}
int posix_memalign(void **block, size_t alignment, size_t len)
{
    *block = memalign(alignment, len);
    return *block == NULL ? ENOMEM : 0;
}
void free(void *block)
{
    if (block != NULL)
        munmap((char *)block - FRONT, FRONT + (*length_of(block) + PAGE - 1) / PAGE * PAGE);
}
void __libc_free(void *block) __attribute__((alias("free"), nothrow, leaf));
void *realloc(void *block, size_t len)
{
    void *moved = memalign(1, len);
    if (block != NULL && moved != NULL) {
        memcpy(moved, block, *length_of(block) < len ? *length_of(block) : len);
        free(block);
    }
    return moved;
}
