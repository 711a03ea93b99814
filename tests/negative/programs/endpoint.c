/*
 * endpoint: one end of RDMA connections, controlled by lines of text.
 *
 * A test starts several of these processes, each under `terrace run` with its own address, and connects them with each
 * other, or with a peer of the test. A command is one line of words, and its result is one line: `ok` and results as
 * `name=value`, or `errno N`. The test chooses the names of the objects.
 *
 *     mr NAME KIND BYTES ACCESS [PATH]              KIND: anon, malloc, file, readonly, memfd, huge, hugefd, sparse
 *     map NAME KIND BYTES [PATH]                    the same memory, not registered
 *     filemr NAME PATH ACCESS OPEN [offset=N] [bytes=N]
 *                                                   registers a file, or a part of it, opened with these flags
 *     resize NAME BYTES, punch NAME OFFSET BYTES    terrace_truncate and terrace_punch on such a region
 *     submr|rereg NAME MR OFFSET BYTES ACCESS       registers a part of MR's memory, or re-registers a region there
 *     close|lock NAME                               closes a region's descriptor, or takes a POSIX lock on its file
 *     fill NAME OFFSET BYTES SEED [from=N]          writes the pattern of this seed from its offset N
 *     check NAME OFFSET BYTES SEED [from=N]         counts the bytes that differ from that pattern
 *     word NAME OFFSET [VALUE]                      reads 64 bits, or sets them
 *     hex NAME OFFSET BYTES, bytes NAME OFFSET HEX  reads bytes, or sets them
 *     unmap|protect|truncate|dereg NAME ...
 *     discard NAME OFFSET BYTES dontneed|free       gives the contents of memory up
 *     pageout NAME OFFSET BYTES                     writes a shared mapping to its file, and has its pages leave memory
 *     free NAME                                     unmaps all of the memory that has this name
 *     storm THREADS                                 starts threads that allocate and free memory for ever
 *     move NAME ADDRESS                             mremap(2) of all of the memory onto this address
 *     lengthen ADDRESS BYTES MORE                   mremap(2), by a system call that nothing interposes
 *     remap ADDRESS BYTES MORE                      mremap(2), by the C library's function
 *     replace ADDRESS BYTES, mapped NAME ADDRESS BYTES
 *                                                   unmaps memory and maps private memory there, by system calls that
 *                                                   nothing interposes; gives such memory a name
 *     qp NAME rc|uc|ud                              creates a queue pair and its completion queue
 *     connect NAME ADDRESS QPN [name=value ...]     connects to RTS, through RESET; sets the peer of a UD queue pair
 *     recv NAME ID MR OFFSET BYTES [lkey=N]
 *     post NAME OP ID MR OFFSET BYTES REMOTE RKEY [imm=N|inv=RKEY|compare=N swap=N|add=N|qkey=N|lkey=N]
 *                                                   [order=before|after|both]
 *                                                   OP: send, send_imm, send_inv, write, write_imm, read, add, cas
 *     mw NAME                                       allocates a memory window of type 2
 *     bind NAME ID MW MR OFFSET BYTES ACCESS        binds it to a part of a region, which changes its key
 *     invalidate NAME ID MW, dealloc MW             ends its use, or the window
 *     poll NAME COUNT SECONDS                       returns completions: ID:STATUS:OPCODE:BYTES:FLAGS:IMMEDIATE:SOURCE
 *     arm NAME, wait NAME SECONDS                   requests a completion event, or waits for one
 *     stream NAME MR REMOTE RKEY [span=N]           starts a thread that writes and reads back at full speed, always at
 *                                                   the same address, or throughout N bytes
 *     stop NAME                                     stops that thread
 *     state|error|destroy NAME
 *     events                                        returns the types of the asynchronous events so far
 *     fork MODE MR, reap PID                        MODE: exit, _exit, exec, daemon
 */
#include "env.h"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/memfd.h>
#include <linux/mman.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define RDMA_CORE_BEFORE_60
#include <terrace.h>

enum { NAMES_MAX = 64, WORDS_MAX = 32, STREAM_BYTES = 16 << 10 };

/* The time within which the outstanding requests of a stopped stream must complete. */
static const double STOP_TIMEOUT_S = 8;

struct region {
    char name[16];
    uint8_t *memory;
    size_t bytes;
    int fd;
    struct ibv_mr *mr;
};

struct connection {
    char name[16];
    struct ibv_comp_channel *channel;
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    struct ibv_ah *ah; /* of the peer of a UD queue pair */
    uint32_t peer_qpn;
    pthread_t thread;
    atomic_bool streaming;
    struct region *stream_region;
    uint64_t stream_remote, stream_span;
    uint32_t stream_rkey;
    unsigned long rounds, wrong;
    bool stream_pending; /* a request of the stopped stream has not completed */
    enum ibv_wc_status stream_status;
};

struct window {
    char name[16];
    struct ibv_mw *mw;
};

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct window windows[NAMES_MAX];
static struct region regions[NAMES_MAX];
static struct connection connections[NAMES_MAX];
static char *words[WORDS_MAX];
static int word_count;

/* ---- words ------------------------------------------------------------------------------------------------------ */

static const char *word(int index)
{
    if (index >= word_count)
        die("a word is missing after %s", words[0]);
    return words[index];
}

static uint64_t number(int index)
{
    return strtoull(word(index), NULL, 0);
}

/* Returns the value of `name=value` among the words, or the default. */
static uint64_t option(const char *name, uint64_t otherwise)
{
    size_t length = strlen(name);
    for (int i = 1; i < word_count; i++)
        if (strncmp(words[i], name, length) == 0 && words[i][length] == '=')
            return strtoull(words[i] + length + 1, NULL, 0);
    return otherwise;
}

static struct region *region_named(int index)
{
    for (int i = 0; i < NAMES_MAX; i++)
        if (strcmp(regions[i].name, word(index)) == 0)
            return &regions[i];
    die("no region %s", word(index));
}

static struct window *window_named(int index)
{
    for (int i = 0; i < NAMES_MAX; i++)
        if (strcmp(windows[i].name, word(index)) == 0)
            return &windows[i];
    die("no window %s", word(index));
}

static struct connection *connection_named(int index)
{
    for (int i = 0; i < NAMES_MAX; i++)
        if (strcmp(connections[i].name, word(index)) == 0)
            return &connections[i];
    die("no queue pair %s", word(index));
}

static void answer_code(int code)
{
    if (code == 0)
        puts("ok");
    else
        printf("errno %d\n", code);
}

/* ---- memory ----------------------------------------------------------------------------------------------------- */

static bool map(struct region *region, const char *kind, const char *path)
{
    int protection = PROT_READ | PROT_WRITE, flags = MAP_SHARED;
    region->fd = -1;
    if (strcmp(kind, "malloc") == 0) {
        region->memory = malloc(region->bytes);
        return region->memory != NULL;
    }
    if (strcmp(kind, "anon") == 0)
        flags = MAP_PRIVATE | MAP_ANONYMOUS;
    else if (strcmp(kind, "sparse") == 0)
        flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    else if (strcmp(kind, "huge") == 0)
        flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB | MAP_HUGE_2MB;
    else if (strcmp(kind, "memfd") == 0)
        region->fd = memfd_create("endpoint", MFD_CLOEXEC);
    else if (strcmp(kind, "hugefd") == 0)
        region->fd = memfd_create("endpoint", MFD_CLOEXEC | MFD_HUGETLB | MFD_HUGE_2MB);
    else if (strcmp(kind, "readonly") == 0)
        region->fd = open(path, O_RDONLY | O_CLOEXEC), protection = PROT_READ;
    else
        region->fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (region->fd < 0 && (flags & MAP_ANONYMOUS) == 0)
        return false;
    if (region->fd >= 0 && protection != PROT_READ && ftruncate(region->fd, (off_t)region->bytes) != 0)
        return false;
    region->memory = mmap(NULL, region->bytes, protection, flags, region->fd, 0);
    return region->memory != MAP_FAILED;
}

static struct region *free_region(void)
{
    struct region *region = regions;
    while (region->name[0] != '\0')
        region++;
    return region;
}

static void answer_region(struct region *region)
{
    if (region->mr == NULL) {
        answer_code(errno);
        return;
    }
    snprintf(region->name, sizeof region->name, "%s", word(1));
    printf("ok addr=%llu lkey=%u rkey=%u\n", (unsigned long long)(uintptr_t)region->memory, region->mr->lkey,
           region->mr->rkey);
}

static void command_map(void)
{
    struct region *region = free_region();
    region->bytes = number(3);
    bool is_mapped = map(region, word(2), word_count > 4 ? word(4) : NULL);
    if (is_mapped)
        snprintf(region->name, sizeof region->name, "%s", word(1));
    answer_code(is_mapped ? 0 : errno);
}

static void command_mr(void)
{
    struct region *region = free_region();
    region->bytes = number(3);
    if (!map(region, word(2), word_count > 5 ? word(5) : NULL)) {
        answer_code(errno);
        return;
    }
    region->mr = ibv_reg_mr(pd, region->memory, region->bytes, (int)number(4));
    answer_region(region);
}

static void command_filemr(void)
{
    struct region *region = free_region();
    *region = (struct region){.fd = open(word(2), (int)number(4) | O_CLOEXEC)};
    if (region->fd < 0) {
        answer_code(errno);
        return;
    }
    struct ibv_mr_init_attr attr = {.comp_mask = IBV_REG_MR_MASK_FD | IBV_REG_MR_MASK_FD_OFFSET,
                                    .fd = region->fd,
                                    .fd_offset = option("offset", 0),
                                    .length = option("bytes", SIZE_MAX),
                                    .access = (int)number(3)};
    __typeof__(&ibv_reg_mr_ex) reg_mr_ex = dlsym(RTLD_DEFAULT, "ibv_reg_mr_ex");
    __typeof__(&terrace_bind_file) bind_file = dlsym(RTLD_DEFAULT, "terrace_bind_file");
    bool is_whole = attr.fd_offset == 0 && attr.length == SIZE_MAX;
    region->mr = is_whole ? bind_file(pd, region->fd, attr.access) : reg_mr_ex(pd, &attr);
    int code = errno;
    if (region->mr == NULL)
        close(region->fd);
    else
        region->bytes = region->mr->length;
    errno = code;
    answer_region(region);
}

static void command_resize(void)
{
    __typeof__(&terrace_truncate) resize = dlsym(RTLD_DEFAULT, "terrace_truncate");
    answer_code(resize(region_named(1)->mr, number(2)));
}

static void command_punch(void)
{
    __typeof__(&terrace_punch) punch = dlsym(RTLD_DEFAULT, "terrace_punch");
    answer_code(punch(region_named(1)->mr, number(2), number(3)));
}

static void command_submr(void)
{
    struct region *within = region_named(2), *region = free_region();
    region->memory = within->memory + number(3), region->bytes = number(4), region->fd = within->fd;
    region->mr = ibv_reg_mr(pd, region->memory, region->bytes, (int)number(5));
    answer_region(region);
}

static void command_rereg(void)
{
    struct region *region = region_named(1), *within = region_named(2);
    uint8_t *memory = within->memory + number(3);
    size_t bytes = number(4);
    if (ibv_rereg_mr(region->mr, IBV_REREG_MR_CHANGE_TRANSLATION | IBV_REREG_MR_CHANGE_ACCESS, NULL, memory, bytes,
                     (int)number(5)) != 0) {
        answer_code(errno);
        return;
    }
    region->memory = memory, region->bytes = bytes, region->fd = within->fd;
    answer_region(region);
}

static void command_close(void)
{
    answer_code(close(region_named(1)->fd) == 0 ? 0 : errno);
}

static void command_lock(void)
{
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    answer_code(fcntl(region_named(1)->fd, F_SETLK, &lock) == 0 ? 0 : errno);
}

static uint8_t pattern(uint64_t offset, uint64_t seed)
{
    uint64_t mixed = (offset + 1) * 0x9e3779b97f4a7c15u ^ (seed + 1) * 0xbf58476d1ce4e5b9u;
    return (uint8_t)(mixed >> 29);
}

static void fill(uint8_t *memory, uint64_t from, uint64_t bytes, uint64_t seed)
{
    for (uint64_t i = 0; i < bytes; i++)
        memory[i] = pattern(from + i, seed);
}

static uint64_t differences(const uint8_t *memory, uint64_t from, uint64_t bytes, uint64_t seed)
{
    uint64_t count = 0;
    for (uint64_t i = 0; i < bytes; i++)
        count += memory[i] != pattern(from + i, seed);
    return count;
}

static void command_fill(void)
{
    fill(region_named(1)->memory + number(2), option("from", number(2)), number(3), number(4));
    puts("ok");
}

static void command_check(void)
{
    uint64_t count = differences(region_named(1)->memory + number(2), option("from", number(2)), number(3), number(4));
    printf("ok differ=%llu\n", (unsigned long long)count);
}

static void command_word(void)
{
    uint8_t *bytes = region_named(1)->memory + number(2);
    uint64_t value = word_count > 3 ? number(3) : 0;
    if (word_count > 3)
        memcpy(bytes, &value, sizeof value);
    memcpy(&value, bytes, sizeof value);
    printf("ok value=%llu\n", (unsigned long long)value);
}

static void command_hex(void)
{
    const uint8_t *bytes = region_named(1)->memory + number(2);
    printf("ok ");
    for (uint64_t i = 0; i < number(3); i++)
        printf("%02x", bytes[i]);
    puts("");
}

static void command_bytes(void)
{
    uint8_t *bytes = region_named(1)->memory + number(2);
    unsigned value;
    for (const char *digits = word(3); sscanf(digits, "%2x", &value) == 1; digits += 2)
        *bytes++ = (uint8_t)value;
    puts("ok");
}

static void command_unmap(void)
{
    answer_code(munmap(region_named(1)->memory + number(2), number(3)) == 0 ? 0 : errno);
}

static void command_protect(void)
{
    answer_code(mprotect(region_named(1)->memory + number(2), number(3), (int)number(4)) == 0 ? 0 : errno);
}

static void command_discard(void)
{
    int advice = strcmp(word(4), "free") == 0 ? MADV_FREE : MADV_DONTNEED;
    answer_code(madvise(region_named(1)->memory + number(2), number(3), advice) == 0 ? 0 : errno);
}

/* Whether the kernel says that no page of a range is in memory. */
static bool is_absent(uint8_t *first, uint64_t bytes)
{
    unsigned char states[(bytes + 4095) / 4096];
    if (mincore(first, bytes, states) != 0)
        return false;
    for (uint64_t i = 0; i < sizeof states; i++)
        if (states[i] & 1)
            return false;
    return true;
}

static void command_pageout(void)
{
    uint8_t *first = region_named(1)->memory + number(2);
    uint64_t bytes = number(3);
    /* The advice passes over pages that another processor has not put on the kernel's lists yet. */
    for (int attempt = 0; attempt < 1000; attempt++) {
        for (uint64_t i = 0; i < bytes; i += 4096) /* pages without an entry in the page table stay */
            (void)*(volatile uint8_t *)(first + i);
        if (msync(first, bytes, MS_SYNC) != 0 || madvise(first, bytes, MADV_PAGEOUT) != 0) {
            answer_code(errno);
            return;
        }
        if (is_absent(first, bytes)) {
            answer_code(0);
            return;
        }
        usleep(1000);
    }
    answer_code(EBUSY);
}

static void command_free(void)
{
    struct region *region = region_named(1);
    region->name[0] = '\0';
    answer_code(munmap(region->memory, region->bytes) == 0 ? 0 : errno);
}

static void command_replace(void)
{
    uint64_t addr = number(1), bytes = number(2);
    syscall(SYS_munmap, addr, bytes);
    addr = (uint64_t)syscall(SYS_mmap, addr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    printf("ok addr=%llu\n", (unsigned long long)addr);
}

static void command_move(void)
{
    struct region *region = region_named(1);
    uint8_t *to = (uint8_t *)number(2);
    void *moved = mremap(region->memory, region->bytes, region->bytes, MREMAP_MAYMOVE | MREMAP_FIXED, to);
    if (moved != MAP_FAILED)
        region->memory = to;
    answer_code(moved == MAP_FAILED ? errno : 0);
}

static void command_lengthen(void)
{
    uint64_t addr = (uint64_t)syscall(SYS_mremap, number(1), number(2), number(3), MREMAP_MAYMOVE);
    printf("ok addr=%llu\n", (unsigned long long)addr);
}

static void command_remap(void)
{
    void *moved = mremap((void *)number(1), number(2), number(3), MREMAP_MAYMOVE);
    if (moved == MAP_FAILED)
        answer_code(errno);
    else
        printf("ok addr=%llu\n", (unsigned long long)(uint64_t)moved);
}

static void *allocate_for_ever(void *seed)
{
    void *blocks[64] = {NULL};
    for (size_t i = (size_t)seed;; i = i * 6364136223846793005u + 1442695040888963407u) {
        free(blocks[i >> 58]);
        blocks[i >> 58] = malloc(i >> 32 & 0xffff);
    }
    return NULL;
}

static void command_storm(void)
{
    for (uint64_t i = 0; i < number(1); i++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, allocate_for_ever, (void *)(uintptr_t)(i + 1)) != 0)
            die("no thread");
        pthread_detach(thread);
    }
    answer_code(0);
}

static void command_mapped(void)
{
    struct region *region = free_region();
    snprintf(region->name, sizeof region->name, "%s", word(1));
    region->memory = (uint8_t *)(uintptr_t)number(2);
    region->bytes = number(3);
    answer_code(0);
}

static void command_truncate(void)
{
    answer_code(ftruncate(region_named(1)->fd, (off_t)number(2)) == 0 ? 0 : errno);
}

static void command_dereg(void)
{
    struct region *region = region_named(1);
    int code = ibv_dereg_mr(region->mr);
    if (code == 0)
        region->name[0] = '\0';
    answer_code(code);
}

/* ---- queue pairs ------------------------------------------------------------------------------------------------ */

static void command_qp(void)
{
    struct connection *connection = connections;
    while (connection->name[0] != '\0')
        connection++;
    bool datagram = strcmp(word(2), "ud") == 0;
    connection->channel = ibv_create_comp_channel(context);
    connection->cq = connection->channel == NULL ? NULL : ibv_create_cq(context, 1024, NULL, connection->channel, 0);
    struct ibv_qp_init_attr init = {
        .send_cq = connection->cq,
        .recv_cq = connection->cq,
        .cap = {.max_send_wr = 256, .max_recv_wr = 256, .max_send_sge = 1, .max_recv_sge = 1},
        .qp_type = datagram ? IBV_QPT_UD : strcmp(word(2), "uc") == 0 ? IBV_QPT_UC : IBV_QPT_RC,
        .sq_sig_all = 1,
    };
    connection->qp = connection->cq == NULL ? NULL : ibv_create_qp(pd, &init);
    if (connection->qp == NULL) {
        answer_code(errno);
        return;
    }
    snprintf(connection->name, sizeof connection->name, "%s", word(1));
    printf("ok qpn=%u\n", connection->qp->qp_num);
}

static union ibv_gid gid_of(const char *address)
{
    union ibv_gid gid = {.raw = {[10] = 0xff, [11] = 0xff}};
    if (inet_pton(AF_INET, address, gid.raw + 12) != 1 && inet_pton(AF_INET6, address, gid.raw) != 1)
        die("%s is no address", address);
    return gid;
}

static int create_ah(struct connection *connection, struct ibv_ah_attr *attr, uint32_t peer_qpn)
{
    connection->peer_qpn = peer_qpn;
    connection->ah = ibv_create_ah(pd, attr);
    return connection->ah == NULL ? errno : 0;
}

static void command_connect(void)
{
    struct connection *connection = connection_named(1);
    struct ibv_qp *qp = connection->qp;
    struct ibv_qp_attr attr = {
        .path_mtu = (enum ibv_mtu)option("mtu", IBV_MTU_1024),
        .qkey = ENV_QKEY,
        .rq_psn = (uint32_t)option("rq_psn", ENV_PSN),
        .sq_psn = (uint32_t)option("sq_psn", ENV_PSN),
        .dest_qp_num = (uint32_t)number(3),
        .qp_access_flags = (unsigned)option("access", ENV_ACCESS & ~IBV_ACCESS_MW_BIND),
        .ah_attr = {.is_global = 1,
                    .port_num = ENV_PORT,
                    .grh = {.dgid = gid_of(word(2)), .sgid_index = (uint8_t)option("gid", 0), .hop_limit = 64}},
        .max_rd_atomic = (uint8_t)option("rd_atomic", 16),
        .max_dest_rd_atomic = 16,
        .min_rnr_timer = 1,
        .port_num = ENV_PORT,
        .timeout = (uint8_t)option("timeout", 14),
        .retry_cnt = (uint8_t)option("retry", 7),
        .rnr_retry = (uint8_t)option("rnr", 7),
    };
    int code = 0;
    for (attr.qp_state = IBV_QPS_RESET; code == 0 && attr.qp_state <= IBV_QPS_RTS; attr.qp_state++)
        code = ibv_modify_qp(qp, &attr, env_mask(qp->qp_type, attr.qp_state));
    if (code == 0 && qp->qp_type == IBV_QPT_UD)
        code = create_ah(connection, &attr.ah_attr, attr.dest_qp_num);
    answer_code(code);
}

static struct ibv_sge part_of(const struct region *region, uint64_t offset, uint32_t bytes)
{
    uint32_t lkey = (uint32_t)option("lkey", region->mr == NULL ? 0 : region->mr->lkey);
    return (struct ibv_sge){.addr = (uintptr_t)region->memory + offset, .length = bytes, .lkey = lkey};
}

static void command_recv(void)
{
    struct region *region = region_named(3);
    struct ibv_sge sge = part_of(region, number(4), (uint32_t)number(5));
    struct ibv_recv_wr wr = {.wr_id = number(2), .sg_list = &sge, .num_sge = 1}, *bad;
    answer_code(ibv_post_recv(connection_named(1)->qp, &wr, &bad));
}

static enum ibv_wr_opcode opcode_of(const char *name)
{
    static const struct {
        const char *name;
        enum ibv_wr_opcode opcode;
    } OPCODES[] = {
        {"send", IBV_WR_SEND},       {"send_imm", IBV_WR_SEND_WITH_IMM},        {"send_inv", IBV_WR_SEND_WITH_INV},
        {"write", IBV_WR_RDMA_WRITE}, {"write_imm", IBV_WR_RDMA_WRITE_WITH_IMM}, {"read", IBV_WR_RDMA_READ},
        {"add", IBV_WR_ATOMIC_FETCH_AND_ADD}, {"cas", IBV_WR_ATOMIC_CMP_AND_SWP},
    };
    for (size_t i = 0; i < sizeof OPCODES / sizeof OPCODES[0]; i++)
        if (strcmp(OPCODES[i].name, name) == 0)
            return OPCODES[i].opcode;
    die("no operation %s", name);
}

static int post_one(struct ibv_qp *qp, struct ibv_send_wr wr, struct ibv_sge sge)
{
    struct ibv_send_wr *bad;
    wr.sg_list = &sge, wr.num_sge = 1;
    return ibv_post_send(qp, &wr, &bad);
}

static unsigned order_flags(void)
{
    static const struct {
        const char *word;
        unsigned flags;
    } orders[] = {
        {"order=before", TERRACE_SEND_ORDER_BEFORE},
        {"order=after", TERRACE_SEND_ORDER_AFTER},
        {"order=both", TERRACE_SEND_ORDER_BEFORE | TERRACE_SEND_ORDER_AFTER},
    };
    for (int i = 1; i < word_count; i++)
        for (size_t order = 0; order < sizeof orders / sizeof *orders; order++)
            if (strcmp(words[i], orders[order].word) == 0)
                return orders[order].flags;
    return 0;
}

static void command_post(void)
{
    struct connection *connection = connection_named(1);
    struct ibv_send_wr wr = {.wr_id = number(3), .opcode = opcode_of(word(2))};
    wr.imm_data = htonl((uint32_t)option("imm", 0));
    wr.send_flags = order_flags();
    if (wr.opcode == IBV_WR_SEND_WITH_INV)
        wr.invalidate_rkey = (uint32_t)option("inv", 0);
    if (connection->qp->qp_type == IBV_QPT_UD) {
        wr.wr.ud.ah = connection->ah, wr.wr.ud.remote_qpn = connection->peer_qpn;
        wr.wr.ud.remote_qkey = (uint32_t)option("qkey", ENV_QKEY);
    } else if (wr.opcode == IBV_WR_ATOMIC_FETCH_AND_ADD || wr.opcode == IBV_WR_ATOMIC_CMP_AND_SWP) {
        wr.wr.atomic.remote_addr = number(7), wr.wr.atomic.rkey = (uint32_t)number(8);
        wr.wr.atomic.compare_add = wr.opcode == IBV_WR_ATOMIC_CMP_AND_SWP ? option("compare", 0) : option("add", 1);
        wr.wr.atomic.swap = option("swap", 0);
    } else {
        wr.wr.rdma.remote_addr = number(7), wr.wr.rdma.rkey = (uint32_t)number(8);
    }
    answer_code(post_one(connection->qp, wr, part_of(region_named(4), number(5), (uint32_t)number(6))));
}

static void command_mw(void)
{
    struct window *window = windows;
    while (window->name[0] != '\0')
        window++;
    window->mw = ibv_alloc_mw(pd, IBV_MW_TYPE_2);
    if (window->mw == NULL) {
        answer_code(errno);
        return;
    }
    snprintf(window->name, sizeof window->name, "%s", word(1));
    puts("ok");
}

static void command_bind(void)
{
    struct window *window = window_named(3);
    struct region *region = region_named(4);
    struct ibv_send_wr wr = {.wr_id = number(2), .opcode = IBV_WR_BIND_MW}, *bad;
    wr.bind_mw.mw = window->mw, wr.bind_mw.rkey = ibv_inc_rkey(window->mw->rkey);
    wr.bind_mw.bind_info.mr = region->mr, wr.bind_mw.bind_info.addr = (uintptr_t)region->memory + number(5);
    wr.bind_mw.bind_info.length = number(6), wr.bind_mw.bind_info.mw_access_flags = (unsigned)number(7);
    int code = ibv_post_send(connection_named(1)->qp, &wr, &bad);
    if (code != 0) {
        answer_code(code);
        return;
    }
    window->mw->rkey = wr.bind_mw.rkey;
    printf("ok rkey=%u\n", window->mw->rkey);
}

static void command_invalidate(void)
{
    struct ibv_send_wr wr = {.wr_id = number(2), .opcode = IBV_WR_LOCAL_INV, .invalidate_rkey = window_named(3)->mw->rkey}, *bad;
    answer_code(ibv_post_send(connection_named(1)->qp, &wr, &bad));
}

static void command_dealloc(void)
{
    struct window *window = window_named(1);
    int code = ibv_dealloc_mw(window->mw);
    if (code == 0)
        window->name[0] = '\0';
    answer_code(code);
}

static void command_poll(void)
{
    struct ibv_cq *cq = connection_named(1)->cq;
    uint64_t wanted = number(2);
    double timeout_s = strtod(word(3), NULL);
    struct ibv_wc wc = {0};
    printf("ok");
    for (uint64_t got = 0; got < wanted && env_poll_within(cq, &wc, timeout_s); got++)
        printf(" %llu:%d:%d:%u:%u:%u:%u", (unsigned long long)wc.wr_id, wc.status, wc.opcode, wc.byte_len, wc.wc_flags,
               (wc.wc_flags & IBV_WC_WITH_IMM) != 0 ? ntohl(wc.imm_data) : wc.invalidated_rkey, wc.src_qp);
    puts("");
}

static void command_arm(void)
{
    answer_code(ibv_req_notify_cq(connection_named(1)->cq, 0));
}

static void command_wait(void)
{
    struct connection *connection = connection_named(1);
    struct pollfd waiting = {.fd = connection->channel->fd, .events = POLLIN};
    if (poll(&waiting, 1, (int)(strtod(word(2), NULL) * 1000)) != 1) {
        answer_code(ETIMEDOUT);
        return;
    }
    struct ibv_cq *cq;
    void *nothing;
    int code = ibv_get_cq_event(connection->channel, &cq, &nothing) == 0 ? 0 : errno;
    if (code == 0)
        ibv_ack_cq_events(cq, 1);
    answer_code(code);
}

static void command_state(void)
{
    struct ibv_qp_attr attr;
    struct ibv_qp_init_attr init;
    int code = ibv_query_qp(connection_named(1)->qp, &attr, IBV_QP_STATE, &init);
    if (code != 0)
        answer_code(code);
    else
        printf("ok state=%d\n", attr.qp_state);
}

static void command_error(void)
{
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_ERR};
    answer_code(ibv_modify_qp(connection_named(1)->qp, &attr, IBV_QP_STATE));
}

static void command_events(void)
{
    struct ibv_async_event event;
    printf("ok");
    while (ibv_get_async_event(context, &event) == 0) {
        printf(" %d", event.event_type);
        ibv_ack_async_event(&event);
    }
    puts("");
}

static void command_destroy(void)
{
    struct connection *connection = connection_named(1);
    int code = ibv_destroy_qp(connection->qp);
    code = code != 0 || connection->ah == NULL ? code : ibv_destroy_ah(connection->ah);
    connection->ah = NULL;
    code = code != 0 ? code : ibv_destroy_cq(connection->cq);
    code = code != 0 ? code : ibv_destroy_comp_channel(connection->channel);
    if (code == 0)
        connection->name[0] = '\0';
    answer_code(code);
}

/* ---- streams ---------------------------------------------------------------------------------------------------- */

/* WRITEs the first half of the region to the peer's memory, READs it back into the second half, and compares. */
static bool round_trip(struct connection *connection)
{
    struct region *region = connection->stream_region;
    uint64_t offset = connection->rounds * STREAM_BYTES % connection->stream_span;
    uint8_t *sent = region->memory, *back = region->memory + STREAM_BYTES;
    fill(sent, 0, STREAM_BYTES, connection->rounds);
    memset(back, 0, STREAM_BYTES);
    const enum ibv_wr_opcode steps[] = {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ};
    for (int i = 0; i < 2; i++) {
        struct ibv_wc wc;
        struct ibv_send_wr wr = {.wr_id = 1, .opcode = steps[i]};
        wr.wr.rdma.remote_addr = connection->stream_remote + offset, wr.wr.rdma.rkey = connection->stream_rkey;
        if (post_one(connection->qp, wr, part_of(region, i == 0 ? 0 : STREAM_BYTES, STREAM_BYTES)) != 0)
            return false;
        double remaining_s = STOP_TIMEOUT_S;
        while (!env_poll_within(connection->cq, &wc, 0.2)) {
            if (connection->streaming)
                continue;
            remaining_s -= 0.2;
            connection->stream_pending = remaining_s < 0;
            if (connection->stream_pending)
                return false;
        }
        connection->stream_status = wc.status;
        if (wc.status != IBV_WC_SUCCESS)
            return false;
    }
    connection->wrong += differences(back, 0, STREAM_BYTES, connection->rounds);
    connection->rounds++;
    return true;
}

static void *stream(void *argument)
{
    struct connection *connection = argument;
    while (connection->streaming && round_trip(connection))
        ;
    return NULL;
}

static void command_stream(void)
{
    struct connection *connection = connection_named(1);
    connection->stream_region = region_named(2);
    connection->stream_remote = number(3), connection->stream_rkey = (uint32_t)number(4);
    connection->stream_span = option("span", STREAM_BYTES);
    connection->stream_pending = false;
    connection->rounds = connection->wrong = 0, connection->stream_status = IBV_WC_SUCCESS;
    connection->streaming = true;
    answer_code(pthread_create(&connection->thread, NULL, stream, connection));
}

static void command_stop(void)
{
    struct connection *connection = connection_named(1);
    connection->streaming = false;
    pthread_join(connection->thread, NULL);
    printf("ok rounds=%lu wrong=%lu status=%d pending=%d\n", connection->rounds, connection->wrong,
           connection->stream_status, connection->stream_pending);
}

/* ---- processes -------------------------------------------------------------------------------------------------- */

/* The child changes its copy of a region and ends. With `daemon` the parent ends and the child continues. */
static void command_fork(void)
{
    const char *mode = word(1);
    struct region *region = word_count > 2 ? region_named(2) : NULL;
    fflush(stdout);
    pid_t child = fork();
    if (child < 0) {
        answer_code(errno);
    } else if (strcmp(mode, "daemon") == 0) {
        if (child > 0)
            exit(0);
        setsid();
        printf("ok pid=%d\n", getpid());
    } else if (child == 0) {
        if (region != NULL)
            memset(region->memory, 0xee, region->bytes);
        if (strcmp(mode, "exec") == 0)
            execlp("true", "true", NULL);
        if (strcmp(mode, "exit") == 0) {
            usleep(200000); /* packets for the parent arrive meanwhile */
            exit(0);
        }
        _exit(0);
    } else {
        printf("ok pid=%d\n", child);
    }
}

static void command_reap(void)
{
    int status;
    answer_code(waitpid((pid_t)number(1), &status, 0) < 0 ? errno : status);
}

static void command_open(void)
{
    struct ibv_device **list = ibv_get_device_list(NULL);
    context = ibv_open_device(list[0]);
    pd = context == NULL ? NULL : ibv_alloc_pd(context);
    if (context != NULL)
        env_nonblocking(context->async_fd);
    answer_code(pd == NULL ? errno : 0);
    ibv_free_device_list(list);
}

static const struct command {
    const char *name;
    void (*run)(void);
} COMMANDS[] = {
    {"open", command_open},       {"mr", command_mr},           {"fill", command_fill},         {"check", command_check},
    {"filemr", command_filemr},   {"resize", command_resize},   {"punch", command_punch},
    {"unmap", command_unmap},     {"protect", command_protect}, {"truncate", command_truncate}, {"dereg", command_dereg},
    {"qp", command_qp},           {"connect", command_connect}, {"recv", command_recv},         {"post", command_post},
    {"poll", command_poll},       {"arm", command_arm},         {"wait", command_wait},         {"state", command_state},
    {"error", command_error},     {"destroy", command_destroy}, {"stream", command_stream},     {"stop", command_stop},
    {"fork", command_fork},       {"reap", command_reap},       {"submr", command_submr},         {"rereg", command_rereg},
    {"close", command_close},     {"lock", command_lock},       {"word", command_word},         {"hex", command_hex},
    {"bytes", command_bytes},     {"mw", command_mw},           {"bind", command_bind},         {"map", command_map},
    {"invalidate", command_invalidate}, {"dealloc", command_dealloc},
    {"discard", command_discard}, {"replace", command_replace}, {"mapped", command_mapped},
    {"lengthen", command_lengthen}, {"storm", command_storm},   {"move", command_move},
    {"remap", command_remap},
    {"pageout", command_pageout}, {"free", command_free},       {"events", command_events},
};

static void run(char *line)
{
    word_count = 0;
    for (char *next = strtok(line, " \n"); next != NULL && word_count < WORDS_MAX; next = strtok(NULL, " \n"))
        words[word_count++] = next;
    for (size_t i = 0; word_count > 0 && i < sizeof COMMANDS / sizeof COMMANDS[0]; i++)
        if (strcmp(COMMANDS[i].name, words[0]) == 0) {
            COMMANDS[i].run();
            fflush(stdout);
            return;
        }
    die("an unknown command");
}

int main(void)
{
    char line[4096];
    setvbuf(stdin, NULL, _IONBF, 0); /* a forked child must not lose buffered lines */
    if (ibv_fork_init() != 0)
        die("ibv_fork_init failed");
    while (fgets(line, sizeof line, stdin) != NULL)
        run(line);
    return 0;
}
