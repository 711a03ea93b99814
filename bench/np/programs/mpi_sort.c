/*
 * mpi_sort: sorts keys over all ranks. Each rank draws keys, sorts them, sends each other rank its part (MPI_Alltoallv), and merges what it
 * receives. The buffers of the exchange are long, so that MPI registers them with the NIC.
 *
 * Checks in each round that the keys are in order, within the ranks and across them, and that they are those that were drawn. Rank 0 prints
 * one line. Any error aborts.
 *
 * Build:  make build/bench/np/mpi_sort
 * Run:    mpirun -np 2 mpi_sort MEBIBYTES ROUNDS     MEBIBYTES: of each of a rank's two buffers
 */
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static int rank, ranks;

static void check(int good, const char *message)
{
    if (!good) {
        fprintf(stderr, "mpi_sort: rank %d: %s\n", rank, message);
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
}

static uint64_t mix(uint64_t key)
{
    key = (key ^ (key >> 30)) * 0xbf58476d1ce4e5b9;
    key = (key ^ (key >> 27)) * 0x94d049bb133111eb;
    return key ^ (key >> 31);
}

static uint64_t *new_buffer(size_t bytes)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    check(memory != MAP_FAILED, "no memory");
    return memory;
}

static int ascending(const void *left, const void *right)
{
    uint64_t a = *(const uint64_t *)left, b = *(const uint64_t *)right;
    return (a > b) - (a < b);
}

/* Which rank sorts a key: equal parts of all numbers. */
static int rank_of(uint64_t key)
{
    return (int)((unsigned __int128)key * (unsigned)ranks >> 64);
}

struct sums {
    uint64_t count, sum, mixed;
};

static void add_key(struct sums *sums, uint64_t key)
{
    sums->count++;
    sums->sum += key;
    sums->mixed += mix(key);
}

/* Merges the sorted runs of a buffer, and checks the order. The first key and the last one are stored. */
static struct sums merge(const uint64_t *keys, const int *counts, uint64_t *first, uint64_t *last)
{
    struct sums sums = {0};
    size_t at[64], end[64], from = 0;
    for (int i = 0; i < ranks; i++) {
        at[i] = from;
        end[i] = from += (size_t)counts[i];
    }
    for (;;) {
        int best = -1;
        for (int i = 0; i < ranks; i++)
            if (at[i] < end[i] && (best < 0 || keys[at[i]] < keys[at[best]]))
                best = i;
        if (best < 0)
            return sums;
        uint64_t key = keys[at[best]++];
        check(rank_of(key) == rank && (sums.count == 0 || key >= *last), "a key at the wrong place");
        if (sums.count == 0)
            *first = key;
        *last = key;
        add_key(&sums, key);
    }
}

static void sort_once(uint64_t *out, uint64_t *in, size_t count, size_t room, int round)
{
    int send_counts[64] = {0}, send_starts[64] = {0}, counts[64], starts[64];
    struct sums drawn = {0}, found, all_drawn, all_found;
    for (size_t i = 0; i < count; i++) {
        out[i] = mix(((uint64_t)round << 56) + ((uint64_t)rank << 48) + i);
        add_key(&drawn, out[i]);
        send_counts[rank_of(out[i])]++;
    }
    qsort(out, count, sizeof *out, ascending);
    MPI_Alltoall(send_counts, 1, MPI_INT, counts, 1, MPI_INT, MPI_COMM_WORLD);
    size_t received = 0;
    for (int i = 0; i < ranks; i++) {
        send_starts[i] = i == 0 ? 0 : send_starts[i - 1] + send_counts[i - 1];
        starts[i] = (int)received;
        received += (size_t)counts[i];
    }
    check(received <= room, "too many keys for one rank");
    memset(in, 0xff, room * sizeof *in);
    MPI_Alltoallv(out, send_counts, send_starts, MPI_UINT64_T, in, counts, starts, MPI_UINT64_T, MPI_COMM_WORLD);
    uint64_t first = 0, last = 0, before = 0;
    found = merge(in, counts, &first, &last);
    MPI_Sendrecv(&last, 1, MPI_UINT64_T, (rank + 1) % ranks, 0, &before, 1, MPI_UINT64_T, (rank + ranks - 1) % ranks, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    check(rank == 0 || before <= first, "the ranks are not in order");
    MPI_Allreduce(&drawn, &all_drawn, 3, MPI_UINT64_T, MPI_SUM, MPI_COMM_WORLD);
    MPI_Allreduce(&found, &all_found, 3, MPI_UINT64_T, MPI_SUM, MPI_COMM_WORLD);
    check(memcmp(&all_drawn, &all_found, sizeof all_drawn) == 0, "other keys than were drawn");
}

int main(int argc, char **argv)
{
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    check(argc == 3 && ranks <= 64, "usage: mpi_sort MEBIBYTES ROUNDS");
    size_t bytes = (size_t)atoi(argv[1]) << 20, room = bytes / sizeof(uint64_t), count = room * 15 / 16;
    int rounds = atoi(argv[2]);
    uint64_t *out = new_buffer(bytes), *in = new_buffer(bytes);
    double begun = MPI_Wtime();
    for (int round = 0; round < rounds; round++)
        sort_once(out, in, count, room, round);
    if (rank == 0)
        printf("%d ranks, %zu keys in each of %d rounds, all sorted, %.1f s\n", ranks, count * (size_t)ranks, rounds, MPI_Wtime() - begun);
    MPI_Finalize();
    return 0;
}
