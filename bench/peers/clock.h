/* A clock for operations of tens of nanoseconds: the processor's time stamp counter with fences, on x86-64. */
#pragma once

#include <stdint.h>
#include <time.h>
#if defined(__x86_64__)
#include <x86intrin.h>
#endif

static double ns_per_tick = 1;

static inline uint64_t clock_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
}

/* Later instructions begin after the reading. Earlier ones, including loads, complete before it. */
static inline uint64_t ticks_begin(void)
{
#if defined(__x86_64__)
    _mm_lfence();
    uint64_t ticks = __rdtsc();
    _mm_lfence();
    return ticks;
#else
    return clock_ns();
#endif
}

static inline uint64_t ticks_end(void)
{
#if defined(__x86_64__)
    _mm_lfence();
    return __rdtsc();
#else
    return clock_ns();
#endif
}

static inline double ticks_to_ns(uint64_t ticks)
{
    return (double)ticks * ns_per_tick;
}

static inline void clock_calibrate(void)
{
    uint64_t start_ns = clock_ns(), start = ticks_end(), now_ns;
    while ((now_ns = clock_ns()) - start_ns < 20000000)
        ;
    ns_per_tick = (double)(now_ns - start_ns) / (double)(ticks_end() - start);
}

/* The time of an iteration of a loop without memory accesses. It doubles while the core's other hardware thread is busy, for
   example with another virtual machine of the host. */
static inline double loop_ns(void)
{
    enum { ITERATIONS = 50000 };
    uint64_t a = 0, b = 0, c = 0, d = 0, e = 0, f = 0, start = ticks_begin();
    for (int i = 0; i < ITERATIONS; i++) {
        a++, b++, c++, d++, e++, f++;
        __asm__ volatile("" : "+r"(a), "+r"(b), "+r"(c), "+r"(d), "+r"(e), "+r"(f));
    }
    return ticks_to_ns(ticks_end() - start) / ITERATIONS;
}

/* The apparent time of an empty operation. */
static inline double clock_overhead_ns(void)
{
    uint64_t least = UINT64_MAX;
    for (int i = 0; i < 1000; i++) {
        uint64_t before = ticks_begin(), ticks = ticks_end() - before;
        least = ticks < least ? ticks : least;
    }
    return ticks_to_ns(least);
}
