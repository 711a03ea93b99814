/*
 * exhaustion: verbs without free descriptors (`exhaustion descriptors`) or without address space (`exhaustion memory`).
 * Opening and creating then fail with an errno, and succeed again once resources are free.
 */
#include "check.h"
#include "env.h"

#include <dirent.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

static void limit(int resource, rlim_t value)
{
    struct rlimit now;
    if (getrlimit(resource, &now) != 0)
        die("a limit cannot be read");
    now.rlim_cur = value < now.rlim_max ? value : now.rlim_max;
    if (setrlimit(resource, &now) != 0)
        die("the limit cannot be set");
}

static unsigned open_descriptors(void)
{
    unsigned count = 0;
    DIR *directory = opendir("/proc/self/fd");
    for (struct dirent *entry = readdir(directory); entry != NULL; entry = readdir(directory))
        count += entry->d_name[0] != '.' && atoi(entry->d_name) != dirfd(directory);
    closedir(directory);
    return count;
}

static uint64_t address_space(void)
{
    unsigned long pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (file == NULL || fscanf(file, "%lu", &pages) != 1)
        die("no statistics of memory");
    fclose(file);
    return (uint64_t)pages * (uint64_t)sysconf(_SC_PAGESIZE);
}

/* Creates one object of each kind, and uses it once. */
static void use(void)
{
    struct env env = env_open();
    struct ibv_qp *left = env_qp(&env, IBV_QPT_RC), *right = env_qp(&env, IBV_QPT_RC);
    env_connect(&env, left, right);
    struct ibv_sge sge = {.addr = (uintptr_t)env.buffer, .length = 4096, .lkey = env.mr->lkey};
    struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE}, *bad;
    wr.wr.rdma.remote_addr = (uintptr_t)env.buffer + ENV_BYTES / 2, wr.wr.rdma.rkey = env.mr->rkey;
    RETURNS(0, ibv_post_send(left, &wr, &bad));
    CHECK(env_poll(env.cq).status == IBV_WC_SUCCESS);
    RETURNS(0, ibv_destroy_qp(left));
    RETURNS(0, ibv_destroy_qp(right));
    env_close(&env);
}

/* ---- descriptors ------------------------------------------------------------------------------------------------ */

enum { DESCRIPTORS_MAX = 256 };
static int held[DESCRIPTORS_MAX];
static unsigned held_count;

/* Opens all free descriptors except `room`. */
static void exhaust_descriptors(unsigned room)
{
    int fd;
    while ((fd = dup(0)) >= 0)
        held[held_count++] = fd;
    while (room-- > 0)
        close(held[--held_count]);
}

static void release_descriptors(void)
{
    while (held_count > 0)
        close(held[--held_count]);
}

static void descriptors(struct ibv_device *device)
{
    limit(RLIMIT_NOFILE, DESCRIPTORS_MAX);
    unsigned before = open_descriptors();
    bool enough = false;
    /* With too few descriptors, whatever their number, opening fails with EMFILE and leaks no descriptor. */
    for (unsigned room = 0; !enough && room < 64; room++) {
        exhaust_descriptors(room);
        errno = 0;
        struct ibv_context *context = ibv_open_device(device);
        int error = errno;
        enough = context != NULL;
        CHECK(enough ? ibv_close_device(context) == 0 && room > 1 : error == EMFILE);
        release_descriptors();
        CHECK(open_descriptors() == before);
    }
    CHECK(enough);

    struct env env = env_open();
    exhaust_descriptors(0);
    FAILS(EMFILE, ibv_create_comp_channel(env.context));
    FAILS(EMFILE, ibv_open_device(device));
    /* Creating objects without a descriptor still succeeds. */
    struct ibv_qp *qp = env_qp(&env, IBV_QPT_RC);
    RETURNS(0, ibv_destroy_qp(qp));
    release_descriptors();
    struct ibv_comp_channel *channel = ibv_create_comp_channel(env.context);
    CHECK(channel != NULL);
    RETURNS(0, ibv_destroy_comp_channel(channel));
    env_close(&env);
    use();
    CHECK(open_descriptors() == before);
}

/* ---- address space ---------------------------------------------------------------------------------------------- */

/* Checks that a step without memory fails with ENOMEM or EAGAIN. */
static void check_out_of_memory(const void *object, int error, const char *text, uint64_t room)
{
    if (!count_check(object != NULL || error == ENOMEM || error == EAGAIN, __FILE__, __LINE__, text))
        printf("errno %d with %llu KiB left\n", error, (unsigned long long)room >> 10);
}

/* Opens the device and creates one object of each kind, as far as memory suffices. Returns whether it created all. */
static bool create_objects(struct ibv_device *device, uint64_t room)
{
    struct ibv_pd *pd = NULL;
    struct ibv_comp_channel *channel = NULL;
    struct ibv_cq *cq = NULL;
    struct ibv_srq *srq = NULL;
    struct ibv_qp *qp = NULL;
    struct ibv_mr *mr = NULL;
    static uint8_t buffer[4096];
#define STEP(object, call)                                                       \
    do {                                                                         \
        errno = 0;                                                               \
        (object) = (call);                                                       \
        check_out_of_memory((object), errno, #call, room);                \
        if ((object) == NULL)                                                    \
            goto out;                                                            \
    } while (0)
    struct ibv_context *context;
    STEP(context, ibv_open_device(device));
    STEP(pd, ibv_alloc_pd(context));
    STEP(channel, ibv_create_comp_channel(context));
    STEP(cq, ibv_create_cq(context, 4096, NULL, channel, 0));
    struct ibv_srq_init_attr srq_init = {.attr = {.max_wr = 1024, .max_sge = 4}};
    STEP(srq, ibv_create_srq(pd, &srq_init));
    struct ibv_qp_init_attr init = {.send_cq = cq, .recv_cq = cq, .srq = srq, .cap = {.max_send_wr = 1024, .max_send_sge = 4}, .qp_type = IBV_QPT_RC};
    STEP(qp, ibv_create_qp(pd, &init));
    STEP(mr, ibv_reg_mr(pd, buffer, sizeof buffer, ENV_ACCESS));
#undef STEP
out:
    CHECK(mr == NULL || ibv_dereg_mr(mr) == 0);
    CHECK(qp == NULL || ibv_destroy_qp(qp) == 0);
    CHECK(srq == NULL || ibv_destroy_srq(srq) == 0);
    CHECK(cq == NULL || ibv_destroy_cq(cq) == 0);
    CHECK(channel == NULL || ibv_destroy_comp_channel(channel) == 0);
    CHECK(pd == NULL || ibv_dealloc_pd(pd) == 0);
    CHECK(context == NULL || ibv_close_device(context) == 0);
    return mr != NULL;
}

/* Creates objects until memory is exhausted. */
static void create_until_exhausted(void)
{
    enum { OBJECTS_MAX = 60000 };
    struct env env = env_open();
    struct ibv_cq **cqs = calloc(OBJECTS_MAX, sizeof *cqs);
    struct ibv_qp **qps = calloc(OBJECTS_MAX, sizeof *qps);
    unsigned cq_count = 0, qp_count = 0;
    limit(RLIMIT_AS, address_space() + (4 << 20));
    errno = 0;
    while (cq_count < OBJECTS_MAX && (cqs[cq_count] = ibv_create_cq(env.context, 1024, NULL, NULL, 0)) != NULL)
        cq_count++;
    CHECK(cq_count < OBJECTS_MAX && errno == ENOMEM);
    struct ibv_qp_init_attr init = env_init(&env, IBV_QPT_RC);
    errno = 0;
    while (qp_count < OBJECTS_MAX && (qps[qp_count] = ibv_create_qp(env.pd, &init)) != NULL)
        qp_count++;
    CHECK(qp_count < OBJECTS_MAX && errno == ENOMEM);
    FAILS(ENOMEM, ibv_create_cq(env.context, 1024, NULL, NULL, 0));
    while (qp_count > 0)
        RETURNS(0, ibv_destroy_qp(qps[--qp_count]));
    while (cq_count > 0)
        RETURNS(0, ibv_destroy_cq(cqs[--cq_count]));
    struct ibv_cq *cq = ibv_create_cq(env.context, 1024, NULL, NULL, 0);
    CHECK(cq != NULL);
    RETURNS(0, ibv_destroy_cq(cq));
    limit(RLIMIT_AS, RLIM_INFINITY);
    free(cqs);
    free(qps);
    env_close(&env);
    use();
}

static void memory(struct ibv_device *device)
{
    use();
    bool enough = false;
    for (uint64_t room = 0; !enough && room < 256 << 20; room += room < 2 << 20 ? 64 << 10 : 512 << 10) {
        limit(RLIMIT_AS, address_space() + room);
        enough = create_objects(device, room);
        limit(RLIMIT_AS, RLIM_INFINITY);
    }
    CHECK(enough);
    use();
    create_until_exhausted();
}

int main(int argc, char **argv)
{
    setvbuf(stdout, NULL, _IOLBF, 0);
    struct ibv_device **list = ibv_get_device_list(NULL);
    if (list == NULL || list[0] == NULL)
        die("no RDMA device");
    if (argc == 2 && strcmp(argv[1], "descriptors") == 0)
        descriptors(list[0]);
    else if (argc == 2 && strcmp(argv[1], "memory") == 0)
        memory(list[0]);
    else
        die("usage: exhaustion descriptors|memory");
    ibv_free_device_list(list);
    return check_end();
}
