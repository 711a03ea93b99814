/* Turns between programs, and statistics. */
#include "np.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { SAMPLES_MAX = 1 << 16 };

static int turn_in = -1, turn_out = -1;

void take_turns(const char *in, const char *out)
{
    /* Open for both directions, a pipe neither blocks nor ends when the program at its other side does. */
    if ((turn_in = open(in, O_RDWR | O_CLOEXEC)) < 0 || (turn_out = open(out, O_RDWR | O_CLOEXEC)) < 0)
        die(in);
}

/* The driver gives the first turn when all programs are ready. */
static void print_ready(void)
{
    static bool is_printed;
    if (!is_printed)
        printf("{\"ready\": true}\n");
    is_printed = true;
}

void begin_turn(void)
{
    char byte;
    print_ready();
    if (turn_in >= 0 && read(turn_in, &byte, 1) != 1)
        die("the turn");
}

void end_turn(void)
{
    char byte = 0;
    if (turn_out >= 0 && write(turn_out, &byte, 1) != 1)
        die("the turn");
}

struct series new_series(const char *op, size_t size)
{
    struct series series = {.op = op, .size = size, .samples = malloc(SAMPLES_MAX * sizeof(double))};
    if (series.samples == NULL)
        die("malloc");
    return series;
}

void add_sample(struct series *series, double ns)
{
    if (series->count < SAMPLES_MAX)
        series->samples[series->count++] = ns;
}

static int ascending(const void *left, const void *right)
{
    double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

void end_slice(struct series *series)
{
    size_t count = series->count - series->slice_begin;
    if (count == 0 || series->slice_count == SLICES_MAX)
        return;
    double *samples = series->samples + series->slice_begin;
    qsort(samples, count, sizeof *samples, ascending);
    series->slices[series->slice_count++] = samples[count / 2];
    series->slice_begin = series->count;
}

static void print_slices(const struct series *series)
{
    printf("\"slices\": [");
    for (unsigned i = 0; i < series->slice_count; i++)
        printf("%s%.0f", i == 0 ? "" : ", ", series->slices[i]);
    printf("]}\n");
}

void report_latency(struct series *series)
{
    if (series->count == 0) {
        fprintf(stderr, "np: no sample of %s\n", series->op);
        exit(1);
    }
    qsort(series->samples, series->count, sizeof series->samples[0], ascending);
    printf("{\"op\": \"%s\", \"size\": %zu, \"count\": %zu, \"p50_ns\": %.0f, \"p99_ns\": %.0f, ", series->op, series->size, series->count,
           series->samples[series->count / 2], series->samples[series->count * 99 / 100]);
    print_slices(series);
    free(series->samples);
}

void report_rate(const struct series *series)
{
    double sorted[SLICES_MAX];
    for (unsigned i = 0; i < series->slice_count; i++)
        sorted[i] = series->slices[i];
    qsort(sorted, series->slice_count, sizeof sorted[0], ascending);
    double rate = sorted[series->slice_count / 2];
    printf("{\"op\": \"%s\", \"size\": %zu, \"rate\": %.0f, \"bytes_per_s\": %.0f, ", series->op, series->size, rate, rate * (double)series->size);
    print_slices(series);
}
