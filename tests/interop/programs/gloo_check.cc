// Collective operations of gloo over its ibverbs transport. Every rank compares all values.
//
//     gloo_check RANK RANKS DIRECTORY
//
// DIRECTORY is empty at first; the ranks exchange their addresses by files in it.

#include <gloo/allgather_ring.h>
#include <gloo/allreduce_halving_doubling.h>
#include <gloo/allreduce_ring.h>
#include <gloo/barrier_all_to_all.h>
#include <gloo/broadcast_one_to_all.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/ibverbs/device.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <list>
#include <memory>
#include <unistd.h>
#include <vector>

using Values = std::vector<int64_t>;
using Context = std::shared_ptr<gloo::rendezvous::Context>;

static const int COUNTS[] = {1, 1000, 1 << 19};

// gloo aborts if an algorithm is destroyed before its last send has completed, so none is destroyed.
static std::list<std::unique_ptr<gloo::Algorithm>> algorithms;
static std::list<Values> buffers;

static void run(gloo::Algorithm *algorithm)
{
    algorithms.emplace_back(algorithm);
    algorithm->run();
}

static int64_t value(int rank, int index)
{
    return int64_t(rank + 1) * 1000003 + index;
}

static Values &values_of(int rank, int count)
{
    Values &values = buffers.emplace_back(count);
    for (int index = 0; index < count; index++)
        values[index] = value(rank, index);
    return values;
}

static void expect(const char *what, int index, int64_t value, int64_t expected)
{
    if (value == expected)
        return;
    fprintf(stderr, "%s: %lld instead of %lld at %d\n", what, (long long)value, (long long)expected, index);
    _exit(1);
}

static void check_sums(const char *what, const Values &values, int ranks)
{
    for (int index = 0; index < int(values.size()); index++) {
        int64_t sum = 0;
        for (int rank = 0; rank < ranks; rank++)
            sum += value(rank, index);
        expect(what, index, values[index], sum);
    }
}

static void check_allreduce(const Context &context, int count)
{
    Values &ring = values_of(context->rank, count);
    run(new gloo::AllreduceRing<int64_t>(context, {ring.data()}, count));
    check_sums("allreduce, ring", ring, context->size);
    Values &halving = values_of(context->rank, count);
    run(new gloo::AllreduceHalvingDoubling<int64_t>(context, {halving.data()}, count));
    check_sums("allreduce, halving and doubling", halving, context->size);
}

static void check_broadcast(const Context &context, int count)
{
    Values &values = values_of(context->rank, count);
    run(new gloo::BroadcastOneToAll<int64_t>(context, {values.data()}, count));
    for (int index = 0; index < count; index++)
        expect("broadcast", index, values[index], value(0, index));
}

static void check_allgather(const Context &context, int count)
{
    Values &own = values_of(context->rank, count);
    Values &all = buffers.emplace_back(size_t(count) * context->size);
    run(new gloo::AllgatherRing<int64_t>(context, {own.data()}, all.data(), count));
    for (int index = 0; index < int(all.size()); index++)
        expect("allgather", index, all[index], value(index / count, index % count));
}

int main(int argc, char **argv)
{
    if (argc != 4)
        return 2;
    gloo::transport::ibverbs::attr attributes = {};
    attributes.name = "terrace0";
    attributes.port = 1;
    auto device = gloo::transport::ibverbs::CreateDevice(attributes);
    gloo::rendezvous::FileStore store(argv[3]);
    auto context = std::make_shared<gloo::rendezvous::Context>(atoi(argv[1]), atoi(argv[2]));
    context->connectFullMesh(store, device);
    for (int count : COUNTS) {
        check_allreduce(context, count);
        check_broadcast(context, count);
        check_allgather(context, count);
    }
    run(new gloo::BarrierAllToAll(context));
    // The last messages of the barrier reach ranks that still wait for them.
    usleep(500000);
    printf("verified by rank %d of %d\n", context->rank, context->size);
    fflush(stdout);
    _exit(0);
}
