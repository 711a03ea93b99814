/* The device, the region and the connection of either end. */
#include "np.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { PORT = 1, PSN = 0x1234, READS_MAX = 16, FILL_BYTES = 1 << 20 };

/* The numbers that each end sends to the other. */
struct numbers {
    union ibv_gid gid;
    uint32_t pairs[QUEUE_PAIRS], key, is_filled;
    uint64_t base, bytes;
};

static struct ibv_context *context;
static struct ibv_pd *pd;

noreturn void die(const char *what)
{
    perror(what);
    exit(1);
}

struct ibv_context *open_device(void)
{
    struct ibv_device **devices = ibv_get_device_list(NULL);
    if (devices == NULL || devices[0] == NULL || (context = ibv_open_device(devices[0])) == NULL)
        die("no RDMA device");
    ibv_free_device_list(devices);
    if ((pd = ibv_alloc_pd(context)) == NULL)
        die("no protection domain");
    return context;
}

struct ibv_pd *protection_domain(void)
{
    return pd;
}

/* ---- the region --------------------------------------------------------------------------------------------------- */

static void fill_words(uint64_t *words, uint64_t offset, size_t bytes)
{
    for (size_t i = 0; i < bytes / 8; i++)
        words[i] = word_at(offset + i * 8);
}

/* Makes a file, and has all of its pages leave the page cache. The file is deleted when the process ends. */
static int make_file(const struct region *region)
{
    int fd = open(region->file, O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
    if (fd < 0 || unlink(region->file) != 0 || ftruncate(fd, (off_t)region->bytes) != 0)
        die(region->file);
    static uint64_t words[FILL_BYTES / 8];
    for (uint64_t offset = 0; region->is_filled && offset < region->bytes; offset += FILL_BYTES) {
        fill_words(words, offset, FILL_BYTES);
        if (write(fd, words, FILL_BYTES) != FILL_BYTES)
            die("write");
    }
    if (fsync(fd) != 0 || posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) != 0)
        die("fsync");
    return fd;
}

char *map_region(const struct region *region)
{
    int fd = region->file == NULL ? -1 : make_file(region);
    int flags = region->file == NULL ? MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE : MAP_SHARED;
    char *memory = mmap(NULL, region->bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
    if (memory == MAP_FAILED)
        die("mmap");
    if (region->file == NULL && region->is_filled)
        fill_words((uint64_t *)memory, 0, region->bytes);
    return memory;
}

/* ---- the connection ----------------------------------------------------------------------------------------------- */

struct ibv_qp *create_pair(struct ibv_cq *cq)
{
    struct ibv_qp_init_attr init = {
        .send_cq = cq,
        .recv_cq = cq,
        .cap = {.max_send_wr = 4 * SLOTS, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1},
        .qp_type = IBV_QPT_RC,
    };
    struct ibv_qp *qp = ibv_create_qp(pd, &init);
    if (qp == NULL)
        die("ibv_create_qp");
    return qp;
}

static void modify(struct ibv_qp *qp, struct ibv_qp_attr *attr, enum ibv_qp_state state, int mask)
{
    attr->qp_state = state;
    if (ibv_modify_qp(qp, attr, IBV_QP_STATE | mask) != 0)
        die("ibv_modify_qp");
}

void connect_pair(struct ibv_qp *qp, const union ibv_gid *gid, uint32_t number)
{
    struct ibv_qp_attr attr = {
        .path_mtu = IBV_MTU_4096, .rq_psn = PSN, .sq_psn = PSN, .dest_qp_num = number, .port_num = PORT,
        .qp_access_flags = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE, .max_rd_atomic = READS_MAX, .max_dest_rd_atomic = READS_MAX,
        .min_rnr_timer = 1, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7,
        .ah_attr = {.is_global = 1, .port_num = PORT, .grh = {.dgid = *gid, .hop_limit = 64}},
    };
    modify(qp, &attr, IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
    modify(qp, &attr, IBV_QPS_RTR, IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
           IBV_QP_MIN_RNR_TIMER);
    modify(qp, &attr, IBV_QPS_RTS, IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC);
}

/* Creates this end's queue pairs, and connects them to those of the end at the other side of the socket. */
static void connect_pairs(int fd, struct ibv_cq *cq, struct ibv_qp *qps[QUEUE_PAIRS], struct numbers *own, struct numbers *other)
{
    if (ibv_query_gid(context, PORT, 0, &own->gid) != 0)
        die("ibv_query_gid");
    for (int i = 0; i < QUEUE_PAIRS; i++)
        own->pairs[i] = (qps[i] = create_pair(cq))->qp_num;
    if (write(fd, own, sizeof *own) != sizeof *own || recv(fd, other, sizeof *other, MSG_WAITALL) != sizeof *other)
        die("the other end's numbers");
    for (int i = 0; i < QUEUE_PAIRS; i++)
        connect_pair(qps[i], &other->gid, other->pairs[i]);
    /* A request must not reach a queue pair that is not ready. */
    char byte = 0;
    if (write(fd, &byte, 1) != 1 || read(fd, &byte, 1) != 1)
        die("the other end");
}

struct ibv_cq *create_cq(void)
{
    struct ibv_cq *cq = ibv_create_cq(context, 8 * SLOTS, NULL, NULL, 0);
    if (cq == NULL)
        die("ibv_create_cq");
    return cq;
}

static int open_socket(const char *path, struct sockaddr_un *addr)
{
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    *addr = (struct sockaddr_un){.sun_family = AF_UNIX};
    if (fd < 0 || strlen(path) >= sizeof addr->sun_path)
        die("socket");
    strcpy(addr->sun_path, path);
    return fd;
}

noreturn void serve(const char *socket_path, const struct region *region)
{
    open_device();
    int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;
    access |= region->file == NULL ? 0 : IBV_ACCESS_ON_DEMAND;
    struct ibv_mr *mr = ibv_reg_mr(pd, map_region(region), region->bytes, access);
    if (mr == NULL)
        die("ibv_reg_mr");
    struct sockaddr_un addr;
    int listener = open_socket(socket_path, &addr);
    if (bind(listener, (struct sockaddr *)&addr, sizeof addr) != 0 || listen(listener, 1) != 0)
        die(socket_path);
    int fd = accept(listener, NULL, NULL);
    if (fd < 0)
        die("accept");
    struct ibv_qp *qps[QUEUE_PAIRS];
    struct numbers own = {.key = mr->rkey, .base = (uintptr_t)mr->addr, .bytes = region->bytes, .is_filled = region->is_filled}, other;
    connect_pairs(fd, create_cq(), qps, &own, &other);
    /* The driver reads the counters of this process after the client has ended. */
    for (;;)
        pause();
}

void connect_client(const char *socket_path, struct client *client)
{
    open_device();
    size_t bytes = (size_t)SLOTS * BYTES_MAX;
    char *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (memory == MAP_FAILED || (client->buffers = ibv_reg_mr(pd, memory, bytes, IBV_ACCESS_LOCAL_WRITE)) == NULL)
        die("the client's buffers");
    struct sockaddr_un addr;
    int fd = open_socket(socket_path, &addr);
    if (connect(fd, (struct sockaddr *)&addr, sizeof addr) != 0)
        die(socket_path);
    client->cq = create_cq();
    struct numbers own = {0}, other;
    connect_pairs(fd, client->cq, client->qps, &own, &other);
    client->base = other.base;
    client->bytes = other.bytes;
    client->key = other.key;
    client->is_filled = other.is_filled != 0;
}
