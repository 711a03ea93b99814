/* The common code of all peers: connecting, verifying, measuring, printing. See peer.h. */
#include "peer.h"

#include <dirent.h>
#include <errno.h>
#include <linux/memfd.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "clock.h"

enum { SAMPLES_MAX = 1 << 18, POINTS_MAX = 256, CHECKS = 256, TIMEOUT_S = 20, EMPTY_POLLS = 256, IDLE_US = 50000, FIRST_IDLE_US = 150000 };

struct options options = {.region = 256u * MIB, .connections = 1, .flavour = ""};
struct connection connections[CONNECTIONS_MAX];

static const char *const OP_NAMES[] = {"get", "put", "message", "atomic"};

struct point {
    enum op op;
    size_t size;
    unsigned depth, threads;
};

/* Sent by the client to the target before and after each point. */
struct command {
    bool begins;
    enum op op;
    size_t size;
    /* The number of the point's threads. The target polls only their connections. */
    unsigned connection_count;
};

noreturn void die(const char *format, ...)
{
    int error = errno;
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "%s: ", peer.name);
    vfprintf(stderr, format, arguments);
    fprintf(stderr, " (errno: %s)\n", strerror(error));
    va_end(arguments);
    exit(1);
}

/* ---- defaults, which a peer's own functions override -------------------------------------------------------------- */

__attribute__((weak)) uint64_t peer_offset_count(size_t size)
{
    return options.region / size;
}

__attribute__((weak)) void peer_prepare(size_t size)
{
    (void)size;
}

__attribute__((weak)) bool peer_target_polls(enum op op)
{
    (void)op;
    return false;
}

__attribute__((weak)) bool peer_progress(enum op op, size_t size, unsigned connection_count)
{
    (void)op, (void)size, (void)connection_count;
    return false;
}

/* ---- connecting ------------------------------------------------------------------------------------------------- */

void send_block(int socket, const void *block, size_t size)
{
    if (send(socket, block, size, MSG_NOSIGNAL) != (ssize_t)size)
        die("the other end does not receive");
}

size_t receive_block(int socket, void *block, size_t capacity)
{
    ssize_t size = recv(socket, block, capacity, 0);
    if (size <= 0)
        die("the other end has closed the connection");
    return (size_t)size;
}

static struct sockaddr_un socket_address(void)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (options.socket_path == NULL || strlen(options.socket_path) >= sizeof address.sun_path)
        die("--socket: not a valid path of a socket");
    strcpy(address.sun_path, options.socket_path);
    return address;
}

int connect_to_socket(int type)
{
    struct sockaddr_un address = socket_address();
    int fd = socket(AF_UNIX, type, 0);
    uint64_t start = clock_ns();
    while (fd >= 0 && connect(fd, (struct sockaddr *)&address, sizeof address) != 0) {
        if (clock_ns() - start > TIMEOUT_S * 1000000000ull)
            die("no target at %s", options.socket_path);
        usleep(2000);
    }
    if (fd < 0)
        die("no socket");
    return fd;
}

static int wait_for_client(void)
{
    struct sockaddr_un address = socket_address();
    int listener = socket(AF_UNIX, SOCK_SEQPACKET, 0);
    if (listener < 0 || bind(listener, (struct sockaddr *)&address, sizeof address) != 0 || listen(listener, 1) != 0)
        die("cannot listen at %s", options.socket_path);
    int control = accept(listener, NULL, NULL);
    if (control < 0)
        die("no client");
    close(listener);
    unlink(options.socket_path);
    return control;
}

/* ---- memory ----------------------------------------------------------------------------------------------------- */

char *map_memory(uint64_t size, enum memory memory, int *fd)
{
    int file = -1;
    bool shared = memory != PRIVATE;
    unsigned flags = MFD_CLOEXEC | (memory == SHARED_HUGE ? MFD_HUGETLB | MFD_HUGE_2MB : 0);
    if (shared && ((file = memfd_create(peer.name, flags)) < 0 || ftruncate(file, (off_t)size) != 0))
        die("no shared memory of %llu bytes", (unsigned long long)size);
    char *mapped = mmap(NULL, size, PROT_READ | PROT_WRITE, shared ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS, file, 0);
    if (mapped == MAP_FAILED)
        die("no memory of %llu bytes", (unsigned long long)size);
    if (fd != NULL)
        *fd = file;
    else if (shared)
        close(file);
    return mapped;
}

static enum memory memory_of(const char *name)
{
    static const char *const names[] = {[PRIVATE] = "private", [SHARED] = "shared", [SHARED_HUGE] = "huge"};
    for (unsigned i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(name, names[i]) == 0)
            return i;
    die("no kind of memory is %s", name);
}

uint64_t word_at(uint64_t offset)
{
    uint64_t mixed = (offset / 8 + 1) * 0x9e3779b97f4a7c15ull;
    mixed = (mixed ^ mixed >> 32) * 0xd6e8feb86659fd93ull;
    return mixed ^ mixed >> 29;
}

static void fill(char *into, uint64_t offset, size_t size, uint64_t flip)
{
    for (size_t at = 0; at < size; at += 8) {
        uint64_t word = word_at(offset + at) ^ flip;
        memcpy(into + at, &word, 8);
    }
}

void fill_region(char *region)
{
    fill(region, 0, options.region, 0);
}

static void compare(const char *found, enum op op, uint64_t offset, size_t size, uint64_t flip)
{
    for (size_t at = 0; at < size; at += 8) {
        uint64_t word;
        memcpy(&word, found + at, 8);
        if (word != (word_at(offset + at) ^ flip))
            die("%s of %zu bytes at %llu: the word at %zu is %016llx, not %016llx", OP_NAMES[op], size,
                (unsigned long long)offset, at, (unsigned long long)word, (unsigned long long)(word_at(offset + at) ^ flip));
    }
}

/* Polls for completions. After EMPTY_POLLS empty polls the thread yields the processor. With more threads than processors, the
 * other end's thread may be runnable, and would wait for the end of a time slice. */
static unsigned reap(struct connection *connection, const struct point *point, unsigned slots[])
{
    unsigned count = peer_reap(connection, point->op, point->size, slots);
    if (count > 0)
        connection->idle = 0;
    else if (++connection->idle % EMPTY_POLLS == 0)
        sched_yield();
    return count;
}

/* ---- verifying -------------------------------------------------------------------------------------------------- */

static void execute_one(struct connection *connection, enum op op, uint64_t offset, size_t size)
{
    unsigned slots[DEPTH_MAX];
    uint64_t start = clock_ns();
    const struct point point = {.op = op, .size = size};
    peer_post(connection, op, 0, offset, size);
    while (reap(connection, &point, slots) == 0)
        if (clock_ns() - start > TIMEOUT_S * 1000000000ull)
            die("%s of %zu bytes: no answer", OP_NAMES[op], size);
}

static void get_and_compare(struct connection *connection, uint64_t offset, size_t size, uint64_t flip)
{
    memset(operation_buffer(connection, 0, size), 0xee, size);
    execute_one(connection, OP_GET, offset, size);
    compare(operation_buffer(connection, 0, size), OP_GET, offset, size, flip);
}

/* Puts other bytes and gets them back. Repeats this with the original bytes. */
static void verify_put(struct connection *connection, uint64_t offset, size_t size)
{
    const uint64_t flips[] = {0x5aa55aa55aa55aa5ull, 0};
    for (int i = 0; i < 2; i++) {
        fill(operation_buffer(connection, 0, size), offset, size, flips[i]);
        execute_one(connection, OP_PUT, offset, size);
        get_and_compare(connection, offset, size, flips[i]);
    }
}

static void verify_message(struct connection *connection, uint64_t offset, size_t size)
{
    fill(operation_buffer(connection, 0, size), offset, size, 0);
    execute_one(connection, OP_MESSAGE, offset, size);
    compare(connection->received, OP_MESSAGE, offset, size, 0);
}

/* Atomics add 1, so that the results of two successive ones differ by 1. */
static void verify_atomic(struct connection *connection, uint64_t offset)
{
    uint64_t before[2];
    for (int i = 0; i < 2; i++) {
        execute_one(connection, OP_ATOMIC, offset, 8);
        memcpy(&before[i], operation_buffer(connection, 0, 8), 8);
    }
    if (before[1] != before[0] + 1)
        die("atomic at %llu: first %llx, then %llx", (unsigned long long)offset, (unsigned long long)before[0],
            (unsigned long long)before[1]);
}

static uint64_t random_word(uint64_t *state)
{
    uint64_t word = *state;
    word ^= word << 13, word ^= word >> 7, word ^= word << 17;
    return *state = word;
}

static uint64_t random_offset(uint64_t *state, uint64_t offset_count, size_t size)
{
    return (uint64_t)((unsigned __int128)random_word(state) * offset_count >> 64) * size;
}

static void verify(const struct point *point)
{
    uint64_t random = 88172645463325252ull, offset_count = peer_offset_count(point->size);
    struct connection *connection = &connections[point->threads - 1];
    size_t checks = point->size > 4096 ? CHECKS / 8 : CHECKS;
    for (size_t i = 0; i < checks; i++) {
        uint64_t offset = random_offset(&random, offset_count, point->size);
        switch (point->op) {
        case OP_GET: get_and_compare(connection, offset, point->size, 0); break;
        case OP_PUT: verify_put(connection, offset, point->size); break;
        case OP_MESSAGE: verify_message(connection, offset, point->size); break;
        case OP_ATOMIC: verify_atomic(connection, offset); break;
        }
    }
}

/* Whether an earlier point has the same operation, size and threads. */
static bool is_verified(const struct point points[], size_t index)
{
    for (size_t i = 0; i < index; i++)
        if (points[i].op == points[index].op && points[i].size == points[index].size && points[i].threads == points[index].threads)
            return true;
    return false;
}

/* Gets every byte of the region. This also creates page tables and other state of the first use. */
static void sweep(void)
{
    if (!peer.has_region || peer_lacks(OP_GET, MIB) != NULL)
        return;
    for (uint64_t offset = 0; offset < options.region; offset += MIB)
        get_and_compare(&connections[0], offset, MIB, 0);
}

/* ---- processor time --------------------------------------------------------------------------------------------- */

/* The processor time of a process: the run time of its threads in nanoseconds, and `utime+stime` in ticks. */
struct cpu {
    double seconds;
    unsigned long ticks;
};

static double own_cpu_seconds(void)
{
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) + (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1e-6;
}

static struct cpu cpu_of(pid_t pid)
{
    struct cpu cpu = {0, 0};
    char path[300], line[1024] = "";
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *file = fopen(path, "r");
    if (file == NULL || fgets(line, sizeof line, file) == NULL)
        die("process %d has no %s", pid, path);
    fclose(file);
    unsigned long user = 0, system = 0;
    const char *after_name = strrchr(line, ')');
    if (after_name == NULL || sscanf(after_name + 1, " %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lu %lu", &user, &system) != 2)
        die("%s has an unknown format", path);
    cpu.ticks = user + system;
    snprintf(path, sizeof path, "/proc/%d/task", pid);
    DIR *tasks = opendir(path);
    for (struct dirent *task; tasks != NULL && (task = readdir(tasks)) != NULL;) {
        unsigned long long ran = 0;
        snprintf(path, sizeof path, "/proc/%d/task/%s/schedstat", pid, task->d_name);
        file = task->d_name[0] == '.' ? NULL : fopen(path, "r");
        if (file != NULL && fscanf(file, "%llu", &ran) == 1)
            cpu.seconds += (double)ran * 1e-9;
        if (file != NULL)
            fclose(file);
    }
    if (tasks != NULL)
        closedir(tasks);
    return cpu;
}

/* ---- measuring -------------------------------------------------------------------------------------------------- */

struct run {
    const struct point *point;
    struct connection *connection;
    uint64_t duration_ns;
    uint64_t ops, elapsed_ns;
    double loop_ns;        /* mean of before and after the run; see clock.h */
    uint32_t *samples;     /* latencies in ticks of the clock; the last SAMPLES_MAX */
    uint64_t timed_count;
};

/* Single operations, each timed, for half of the time. The clock takes as long as a small operation. */
static void run_timed(struct run *run, uint64_t offset_count)
{
    const struct point *point = run->point;
    uint64_t random = 0x2545f4914f6cdd1dull + run->connection->index, start = clock_ns(), now = start;
    unsigned slots[DEPTH_MAX];
    while (now - start < run->duration_ns / 2) {
        for (int i = 0; i < 16; i++) {
            uint64_t offset = random_offset(&random, offset_count, point->size);
            uint64_t before = ticks_begin();
            peer_post(run->connection, point->op, 0, offset, point->size);
            while (reap(run->connection, point, slots) == 0)
                ;
            uint64_t ticks = ticks_end() - before;
            if (run->samples != NULL)
                run->samples[run->timed_count & (SAMPLES_MAX - 1)] = ticks > UINT32_MAX ? UINT32_MAX : (uint32_t)ticks;
            run->timed_count++;
            if (ticks > 100000)
                break; /* read the time again */
        }
        now = clock_ns();
    }
}

/* Runs operations without timing each, at the point's depth. */
static void run_untimed(struct run *run, uint64_t offset_count)
{
    const struct point *point = run->point;
    uint64_t random = 0x9e3779b97f4a7c15ull + run->connection->index, start = clock_ns(), now = start, polls = 0;
    uint64_t duration_ns = point->depth == 1 ? run->duration_ns / 2 : run->duration_ns;
    unsigned slots[DEPTH_MAX], free_count = point->depth;
    for (unsigned i = 0; i < point->depth; i++)
        slots[i] = i;
    bool stopping = false;
    unsigned in_flight = 0;
    while (!stopping || in_flight > 0) {
        for (unsigned i = 0; i < free_count && !stopping; i++, in_flight++)
            peer_post(run->connection, point->op, slots[i], random_offset(&random, offset_count, point->size), point->size);
        free_count = reap(run->connection, point, slots);
        in_flight -= free_count;
        run->ops += free_count;
        if (polls++ % 16 == 0 || stopping || point->size >= 65536) {
            now = clock_ns();
            stopping = now - start >= duration_ns;
        }
    }
    run->elapsed_ns = clock_ns() - start;
}

static void *run_thread(void *argument)
{
    struct run *run = argument;
    uint64_t offset_count = peer_offset_count(run->point->size);
    double before_ns = loop_ns();
    if (run->point->depth == 1 && run->point->threads == 1)
        run_timed(run, offset_count);
    run_untimed(run, offset_count);
    run->loop_ns = (before_ns + loop_ns()) / 2;
    return NULL;
}

static int compare_samples(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

static void print_point(const struct point *point, const struct run runs[], double client_cpu, struct cpu before, struct cpu after)
{
    uint64_t ops = 0;
    double rate = 0;
    for (unsigned i = 0; i < point->threads; i++) {
        ops += runs[i].ops + runs[i].timed_count;
        rate += (double)runs[i].ops / ((double)runs[i].elapsed_ns * 1e-9);
    }
    printf("{\"op\": \"%s\", \"size\": %zu, \"depth\": %u, \"threads\": %u, \"ops\": %llu, \"rate\": %.1f, ",
           OP_NAMES[point->op], point->size, point->depth, point->threads, (unsigned long long)ops, rate);
    if (runs[0].timed_count > 0) {
        uint32_t *samples = runs[0].samples;
        size_t count = runs[0].timed_count < SAMPLES_MAX ? runs[0].timed_count : SAMPLES_MAX, last = count - 1;
        qsort(samples, count, sizeof samples[0], compare_samples);
        printf("\"p50_ns\": %.1f, \"p99_ns\": %.1f, ", ticks_to_ns(samples[last / 2]), ticks_to_ns(samples[last * 99 / 100]));
    }
    printf("\"loop_ns\": %.3f, ", runs[0].loop_ns);
    printf("\"client_cpu_s\": %.6f, \"target_cpu_s\": %.9f, \"target_ticks\": %lu}\n", client_cpu, after.seconds - before.seconds,
           after.ticks - before.ticks);
    fflush(stdout);
}

static void run_threads(struct run runs[], const struct point *point, uint64_t duration_ns, uint32_t *samples)
{
    pthread_t threads[CONNECTIONS_MAX];
    for (unsigned i = 0; i < point->threads; i++) {
        runs[i] = (struct run){.point = point, .connection = &connections[i], .duration_ns = duration_ns, .samples = samples};
        if (i > 0 && pthread_create(&threads[i], NULL, run_thread, &runs[i]) != 0)
            die("no thread");
    }
    run_thread(&runs[0]);
    for (unsigned i = 1; i < point->threads; i++)
        pthread_join(threads[i], NULL);
}

static void send_command(int control, bool begins, const struct point *point)
{
    struct command command = {.begins = begins, .op = point->op, .size = point->size, .connection_count = point->threads};
    if (control < 0)
        return;
    send_block(control, &command, sizeof command);
    receive_block(control, &command, sizeof command);
}

/* `idle_us`: the time for the target to finish the work of earlier points. */
static void measure(int control, pid_t target, const struct point *point, unsigned idle_us, unsigned milliseconds, uint32_t *samples)
{
    struct run runs[CONNECTIONS_MAX];
    uint64_t duration_ns = milliseconds * 1000000ull;
    send_command(control, true, point);
    run_threads(runs, point, duration_ns / 8, NULL); /* warm-up */
    usleep(idle_us); /* the target goes to sleep */
    struct cpu before = {0, 0}, after = {0, 0};
    if (target > 0)
        before = cpu_of(target);
    double client_before = own_cpu_seconds();
    run_threads(runs, point, duration_ns, samples);
    double client_cpu = own_cpu_seconds() - client_before;
    if (target > 0)
        after = cpu_of(target);
    send_command(control, false, point);
    print_point(point, runs, client_cpu, before, after);
}

/* ---- the two roles ---------------------------------------------------------------------------------------------- */

/* Polls, or sleeps if the operation needs no polls, until the client ends the point. */
static bool serve_point(int control, struct command *command)
{
    unsigned idle = 0;
    ssize_t size = -1;
    bool polls = peer_target_polls(command->op);
    while (size < 0) {
        idle = polls && peer_progress(command->op, command->size, command->connection_count) ? 0 : idle + 1;
        if (!polls || idle % EMPTY_POLLS == EMPTY_POLLS - 1)
            size = recv(control, command, sizeof *command, polls ? MSG_DONTWAIT : 0);
        if (idle % EMPTY_POLLS == EMPTY_POLLS - 1)
            sched_yield();
    }
    return size == sizeof *command;
}

static void open_connections(void)
{
    for (unsigned i = 0; i < options.connections; i++)
        connections[i] = (struct connection){.index = i, .buffer = map_memory(CONNECTION_BYTES, false, NULL)};
}

static int run_target(void)
{
    int control = wait_for_client();
    pid_t pid = getpid();
    send_block(control, &pid, sizeof pid);
    open_connections();
    peer_open_target(control);
    struct command command;
    if (receive_block(control, &command, sizeof command) != sizeof command)
        die("a command of an invalid size");
    for (bool is_connected = true; is_connected;) {
        send_block(control, &command, sizeof command);
        is_connected = serve_point(control, &command);
    }
    return 0;
}

/* Prepares each size once. */
static void prepare(const struct point points[], size_t count)
{
    for (size_t i = 0; i < count; i++) {
        bool is_new = peer_lacks(points[i].op, points[i].size) == NULL;
        for (size_t j = 0; j < i; j++)
            is_new = is_new && (points[j].size != points[i].size || peer_lacks(points[j].op, points[j].size) != NULL);
        if (is_new)
            peer_prepare(points[i].size);
    }
}

static int run_client(pid_t target, const struct point points[], size_t count, unsigned milliseconds)
{
    int control = -1;
    clock_calibrate();
    if (peer.has_target) {
        control = connect_to_socket(SOCK_SEQPACKET);
        if (receive_block(control, &target, sizeof target) != sizeof target)
            die("no process id");
    }
    open_connections();
    peer_open_client(control);
    uint32_t *samples = (uint32_t *)map_memory(SAMPLES_MAX * sizeof samples[0], false, NULL);
    memset(samples, 0, SAMPLES_MAX * sizeof samples[0]);
    printf("{\"clock_ns\": %.1f}\n", clock_overhead_ns());
    const struct point whole = {OP_GET, MIB, 1, 1};
    prepare(points, count);
    send_command(control, true, &whole);
    sweep();
    send_command(control, false, &whole);
    /* Verification precedes all measurements, which change the region. Atomics are verified last, because they change it, too. */
    for (size_t i = 0; i < 2 * count; i++) {
        const struct point *point = &points[i % count];
        if (is_verified(points, i % count) || (point->op == OP_ATOMIC) != (i >= count) || peer_lacks(point->op, point->size) != NULL)
            continue;
        send_command(control, true, point);
        verify(point);
        send_command(control, false, point);
    }
    for (size_t i = 0; i < count; i++) {
        const char *reason = peer_lacks(points[i].op, points[i].size);
        if (reason == NULL)
            measure(control, target, &points[i], i == 0 ? FIRST_IDLE_US : points[i].op != points[i - 1].op ? IDLE_US : 500,
                    milliseconds, samples);
        else
            printf("{\"op\": \"%s\", \"size\": %zu, \"depth\": %u, \"threads\": %u, \"missing\": \"%s\"}\n", OP_NAMES[points[i].op],
                   points[i].size, points[i].depth, points[i].threads, reason);
    }
    fflush(stdout);
    return 0;
}

static size_t parse_points(char *text, struct point points[])
{
    size_t count = 0;
    for (char *rest, *word = strtok_r(text, ",", &rest); word != NULL; word = strtok_r(NULL, ",", &rest)) {
        char name[16];
        struct point point = {0};
        if (count == POINTS_MAX || sscanf(word, "%15[a-z]:%zu:%u:%u", name, &point.size, &point.depth, &point.threads) != 4)
            die("--points: %s is not OP:SIZE:DEPTH:THREADS", word);
        while (strcmp(OP_NAMES[point.op], name) != 0)
            if (++point.op > OP_ATOMIC)
                die("--points: no operation %s", name);
        if (point.size % 8 != 0 || point.size == 0 || point.size > BYTES_MAX || point.depth == 0 || point.depth > DEPTH_MAX ||
            point.threads == 0 || point.threads > options.connections)
            die("--points: %s is out of range", word);
        points[count++] = point;
    }
    return count;
}

int main(int count, char **arguments)
{
    static struct point points[POINTS_MAX];
    char *wanted = NULL;
    unsigned milliseconds = 100;
    pid_t target = 0;
    for (int i = 2; i + 1 < count; i += 2) {
        const char *name = arguments[i];
        char *value = arguments[i + 1];
        if (strcmp(name, "--socket") == 0)
            options.socket_path = value;
        else if (strcmp(name, "--region") == 0)
            options.region = strtoull(value, NULL, 10);
        else if (strcmp(name, "--memory") == 0)
            options.memory = memory_of(value);
        else if (strcmp(name, "--flavour") == 0)
            options.flavour = value;
        else if (strcmp(name, "--connections") == 0)
            options.connections = (unsigned)atoi(value);
        else if (strcmp(name, "--points") == 0)
            wanted = value;
        else if (strcmp(name, "--milliseconds") == 0)
            milliseconds = (unsigned)atoi(value);
        else if (strcmp(name, "--target") == 0)
            target = atoi(value);
        else
            die("unknown option %s", name);
    }
    if (options.connections == 0 || options.connections > CONNECTIONS_MAX || options.region < MIB || options.region % MIB != 0 || milliseconds == 0)
        die("--connections, --region or --milliseconds is out of range");
    if (count > 1 && strcmp(arguments[1], "target") == 0 && peer.has_target)
        return run_target();
    if (count > 1 && strcmp(arguments[1], "client") == 0 && wanted != NULL)
        return run_client(target, points, parse_points(wanted, points), milliseconds);
    die("usage: see peer.h");
}
