/* Clusters points around known centres by Lloyd's algorithm, and verifies that it finds them. usage: kmeans MIB
 * Prints the seconds of filling and clustering, and a checksum that does not depend on where memory is. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { DIMENSIONS = 15, CLUSTERS = 8, ROUNDS = 8 };

/* 64 bytes. */
struct point {
    float at[DIMENSIONS];
    uint32_t cluster;
};

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static float centre(size_t cluster, size_t dimension)
{
    return (float)((cluster * 7 + dimension * 3) % 11) * 10;
}

int main(int argc, char **argv)
{
    size_t count = (size_t)atoi(argc > 1 ? argv[1] : "64") << 14;
    double begin = now();
    struct point *points = malloc(count * sizeof *points);
    if (!points)
        return 2;
    uint64_t state = 88172645463325252ull;
    for (size_t i = 0; i < count; i++)
        for (size_t d = 0; d < DIMENSIONS; d++) {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            points[i].at[d] = centre(i % CLUSTERS, d) + (float)(state >> 40) / (float)(1 << 24) - 0.5f;
        }
    double means[CLUSTERS][DIMENSIONS];
    for (size_t c = 0; c < CLUSTERS; c++)
        for (size_t d = 0; d < DIMENSIONS; d++)
            means[c][d] = points[c].at[d] + 2;
    for (int round = 0; round < ROUNDS; round++) {
        double sums[CLUSTERS][DIMENSIONS] = {0};
        size_t counts[CLUSTERS] = {0};
        for (size_t i = 0; i < count; i++) {
            double best = INFINITY;
            for (uint32_t c = 0; c < CLUSTERS; c++) {
                double distance = 0;
                for (size_t d = 0; d < DIMENSIONS; d++) {
                    double difference = points[i].at[d] - means[c][d];
                    distance += difference * difference;
                }
                if (distance < best) {
                    best = distance;
                    points[i].cluster = c;
                }
            }
            counts[points[i].cluster]++;
            for (size_t d = 0; d < DIMENSIONS; d++)
                sums[points[i].cluster][d] += points[i].at[d];
        }
        for (size_t c = 0; c < CLUSTERS; c++)
            for (size_t d = 0; d < DIMENSIONS && counts[c]; d++)
                means[c][d] = sums[c][d] / (double)counts[c];
    }
    double seconds = now() - begin;
    uint64_t checksum = 0;
    for (size_t i = 0; i < count; i++) {
        checksum = checksum * 31 + points[i].cluster;
        if (points[i].cluster != i % CLUSTERS) {
            fprintf(stderr, "point %zu is in cluster %u\n", i, points[i].cluster);
            return 1;
        }
    }
    printf("{\"seconds\": %.3f, \"result\": \"%zu points, %016llx\"}\n", seconds, count, (unsigned long long)checksum);
    return 0;
}
