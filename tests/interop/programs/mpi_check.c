/*
 * mpi_check: typical MPI operations, checked byte by byte: messages around a ring in many sizes, concurrent all-to-all
 * messages, collective sums, and one-sided accesses to a window. MPI chooses the transport (UCX or libfabric), which
 * chooses the verbs.
 *
 * The argument is the number of rounds, 3 by default. Rank 0 prints one line at the end. Any error aborts.
 *
 * Build:  mpicc -O2 -o mpi_check mpi_check.c
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SIZE_MAX_BYTES = 4 << 20, BURST = 64, WINDOW_WORDS = 1 << 16 };

static int rank, ranks;

static void check(int good, const char *message)
{
    if (!good) {
        fprintf(stderr, "mpi_check: rank %d: %s\n", rank, message);
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
}

static unsigned char byte_of(int from, int round, size_t at)
{
    return (unsigned char)((at * 2654435761U >> 13) + (unsigned)from * 31U + (unsigned)round * 7U);
}

static void fill(unsigned char *buffer, size_t length, int from, int round)
{
    for (size_t at = 0; at < length; at++)
        buffer[at] = byte_of(from, round, at);
}

static int is_filled(const unsigned char *buffer, size_t length, int from, int round)
{
    for (size_t at = 0; at < length; at++)
        if (buffer[at] != byte_of(from, round, at))
            return 0;
    return 1;
}

/* Sends messages around a ring, in every size class of the protocols: inline, copied, and fetched by the receiver. */
static void around_the_ring(unsigned char *out, unsigned char *in)
{
    static const int SIZES[] = {0, 1, 8, 200, 1024, 4096, 4097, 20000, 65536, 300001, 1 << 20, SIZE_MAX_BYTES};
    int left = (rank + ranks - 1) % ranks, right = (rank + 1) % ranks;
    for (int round = 0; round < (int)(sizeof SIZES / sizeof *SIZES); round++) {
        int length = SIZES[round];
        MPI_Status status;
        fill(out, (size_t)length, rank, round);
        memset(in, 0, (size_t)length);
        MPI_Sendrecv(out, length, MPI_BYTE, right, round, in, length, MPI_BYTE, left, round, MPI_COMM_WORLD, &status);
        int got;
        MPI_Get_count(&status, MPI_BYTE, &got);
        check(got == length && is_filled(in, (size_t)length, left, round), "a message around the ring is wrong");
    }
}

static void all_to_all(void)
{
    enum { LENGTH = 3000 };
    size_t each = (size_t)BURST * LENGTH;
    unsigned char *out = malloc(each), *in = malloc((size_t)ranks * each);
    MPI_Request *requests = malloc(2U * BURST * (size_t)ranks * sizeof *requests);
    check(out != NULL && in != NULL && requests != NULL, "out of memory");
    int count = 0;
    for (int i = 0; i < BURST; i++) {
        fill(out + (size_t)i * LENGTH, LENGTH, rank, i);
        for (int peer = 0; peer < ranks; peer++) {
            unsigned char *buffer = in + (size_t)peer * each + (size_t)i * LENGTH;
            MPI_Irecv(buffer, LENGTH, MPI_BYTE, peer, i, MPI_COMM_WORLD, &requests[count++]);
        }
    }
    for (int i = BURST - 1; i >= 0; i--) /* not in the order of the receives, so tags have to match */
        for (int peer = 0; peer < ranks; peer++)
            MPI_Isend(out + (size_t)i * LENGTH, LENGTH, MPI_BYTE, peer, i, MPI_COMM_WORLD, &requests[count++]);
    MPI_Waitall(count, requests, MPI_STATUSES_IGNORE);
    for (int peer = 0; peer < ranks; peer++)
        for (int i = 0; i < BURST; i++)
            check(is_filled(in + (size_t)peer * each + (size_t)i * LENGTH, LENGTH, peer, i), "a message of a burst is wrong");
    free(requests);
    free(in);
    free(out);
}

static void sums(void)
{
    enum { COUNT = 50000 };
    long *own = malloc(COUNT * sizeof *own), *sum = malloc(COUNT * sizeof *sum);
    check(own != NULL && sum != NULL, "out of memory");
    for (int i = 0; i < COUNT; i++)
        own[i] = (long)i * (rank + 1);
    MPI_Allreduce(own, sum, COUNT, MPI_LONG, MPI_SUM, MPI_COMM_WORLD);
    for (int i = 0; i < COUNT; i++)
        check(sum[i] == (long)i * ranks * (ranks + 1) / 2, "a sum is wrong");
    free(sum);
    free(own);
}

static void one_sided(void)
{
    long *words;
    MPI_Win window;
    MPI_Win_allocate(WINDOW_WORDS * (MPI_Aint)sizeof *words, sizeof *words, MPI_INFO_NULL, MPI_COMM_WORLD, &words, &window);
    memset(words, 0, WINDOW_WORDS * sizeof *words);
    MPI_Win_fence(0, window);
    int right = (rank + 1) % ranks, left = (rank + ranks - 1) % ranks;
    long *own = malloc(WINDOW_WORDS / 2 * sizeof *own);
    check(own != NULL, "out of memory");
    for (int i = 0; i < WINDOW_WORDS / 2; i++)
        own[i] = rank * 1000000L + i;
    MPI_Put(own, WINDOW_WORDS / 2, MPI_LONG, right, 0, WINDOW_WORDS / 2, MPI_LONG, window);
    long one = 1;
    for (int peer = 0; peer < ranks; peer++)
        for (int i = 0; i < 20; i++)
            MPI_Accumulate(&one, 1, MPI_LONG, peer, WINDOW_WORDS - 1, 1, MPI_LONG, MPI_SUM, window);
    MPI_Win_fence(0, window);
    for (int i = 0; i < WINDOW_WORDS / 2; i++)
        check(words[i] == left * 1000000L + i, "MPI_Put wrote wrong data");
    check(words[WINDOW_WORDS - 1] == 20L * ranks, "an accumulated sum is wrong");
    MPI_Get(own, WINDOW_WORDS / 2, MPI_LONG, right, 0, WINDOW_WORDS / 2, MPI_LONG, window);
    MPI_Win_fence(0, window);
    for (int i = 0; i < WINDOW_WORDS / 2; i++)
        check(own[i] == rank * 1000000L + i, "MPI_Get read wrong data");
    free(own);
    MPI_Win_free(&window);
}

int main(int argc, char **argv)
{
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    unsigned char *out = malloc(SIZE_MAX_BYTES), *in = malloc(SIZE_MAX_BYTES);
    check(out != NULL && in != NULL, "out of memory");
    int rounds = argc > 1 ? atoi(argv[1]) : 3;
    for (int round = 0; round < rounds; round++) {
        around_the_ring(out, in);
        all_to_all();
        sums();
        one_sided();
    }
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == 0)
        printf("mpi_check: %d ranks, all right\n", ranks);
    free(in);
    free(out);
    MPI_Finalize();
    return 0;
}
