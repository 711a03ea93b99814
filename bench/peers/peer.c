/* Shared by all peers: connecting, verifying, measuring, printing. See peer.h. */
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

enum { SAMPLES_MAX = 1 << 18, POINTS_MAX = 256, CHECKS = 256, PATIENCE_S = 20, IDLE_TURNS = 256, SETTLE_US = 50000, FIRST_SETTLE_US = 150000 };

struct options options = {.region = 256u * MIB, .lanes = 1, .flavour = ""};
struct lane lanes[LANES_MAX];

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
    /* The number of the point's threads: the target polls no other lanes. */
    unsigned lane_count;
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

__attribute__((weak)) uint64_t peer_places(size_t size)
{
    return options.region / size;
}

__attribute__((weak)) void peer_prepare(size_t size)
{
    (void)size;
}

__attribute__((weak)) bool peer_target_works(enum op op)
{
    (void)op;
    return false;
}

__attribute__((weak)) bool peer_turn(enum op op, size_t size, unsigned lane_count)
{
    (void)op, (void)size, (void)lane_count;
    return false;
}

/* ---- connecting ------------------------------------------------------------------------------------------------- */

void say(int socket, const void *block, size_t size)
{
    if (send(socket, block, size, MSG_NOSIGNAL) != (ssize_t)size)
        die("the other end does not listen");
}

size_t hear(int socket, void *block, size_t capacity)
{
    ssize_t size = recv(socket, block, capacity, 0);
    if (size <= 0)
        die("the other end has gone");
    return (size_t)size;
}

static struct sockaddr_un meeting_place(void)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (options.meet == NULL || strlen(options.meet) >= sizeof address.sun_path)
        die("--meet needs a path that a socket can have");
    strcpy(address.sun_path, options.meet);
    return address;
}

int connect_to_meet(int type)
{
    struct sockaddr_un address = meeting_place();
    int fd = socket(AF_UNIX, type, 0);
    uint64_t start = clock_ns();
    while (fd >= 0 && connect(fd, (struct sockaddr *)&address, sizeof address) != 0) {
        if (clock_ns() - start > PATIENCE_S * 1000000000ull)
            die("nobody at %s", options.meet);
        usleep(2000);
    }
    if (fd < 0)
        die("no socket");
    return fd;
}

static int wait_for_client(void)
{
    struct sockaddr_un address = meeting_place();
    int listener = socket(AF_UNIX, SOCK_SEQPACKET, 0);
    if (listener < 0 || bind(listener, (struct sockaddr *)&address, sizeof address) != 0 || listen(listener, 1) != 0)
        die("cannot listen at %s", options.meet);
    int control = accept(listener, NULL, NULL);
    if (control < 0)
        die("no client");
    close(listener);
    unlink(options.meet);
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
    die("no memory is %s", name);
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
            die("%s of %zu bytes at %llu: byte %zu on is %016llx and should be %016llx", OP_NAMES[op], size,
                (unsigned long long)offset, at, (unsigned long long)word, (unsigned long long)(word_at(offset + at) ^ flip));
    }
}

/* Polls for completions. After IDLE_TURNS empty polls the thread yields the processor: with more threads than processors, the
 * thread that it waits for may be runnable, and would have to wait for the end of a time slice. */
static unsigned reap(struct lane *lane, const struct point *point, unsigned slots[])
{
    unsigned count = peer_reap(lane, point->op, point->size, slots);
    if (count > 0)
        lane->idle = 0;
    else if (++lane->idle % IDLE_TURNS == 0)
        sched_yield();
    return count;
}

/* ---- verifying -------------------------------------------------------------------------------------------------- */

static void do_one(struct lane *lane, enum op op, uint64_t offset, size_t size)
{
    unsigned slots[DEPTH_MAX];
    uint64_t start = clock_ns();
    const struct point point = {.op = op, .size = size};
    peer_post(lane, op, 0, offset, size);
    while (reap(lane, &point, slots) == 0)
        if (clock_ns() - start > PATIENCE_S * 1000000000ull)
            die("%s of %zu bytes: no answer", OP_NAMES[op], size);
}

static void get_and_compare(struct lane *lane, uint64_t offset, size_t size, uint64_t flip)
{
    memset(outbox(lane, 0, size), 0xee, size);
    do_one(lane, OP_GET, offset, size);
    compare(outbox(lane, 0, size), OP_GET, offset, size, flip);
}

/* Puts other bytes and gets them back; then does the same with the original ones. */
static void verify_put(struct lane *lane, uint64_t offset, size_t size)
{
    const uint64_t flips[] = {0x5aa55aa55aa55aa5ull, 0};
    for (int i = 0; i < 2; i++) {
        fill(outbox(lane, 0, size), offset, size, flips[i]);
        do_one(lane, OP_PUT, offset, size);
        get_and_compare(lane, offset, size, flips[i]);
    }
}

static void verify_message(struct lane *lane, uint64_t offset, size_t size)
{
    fill(outbox(lane, 0, size), offset, size, 0);
    do_one(lane, OP_MESSAGE, offset, size);
    compare(lane->received, OP_MESSAGE, offset, size, 0);
}

/* Atomics add 1, here and while measuring: the results of two in a row differ by 1. */
static void verify_atomic(struct lane *lane, uint64_t offset)
{
    uint64_t before[2];
    for (int i = 0; i < 2; i++) {
        do_one(lane, OP_ATOMIC, offset, 8);
        memcpy(&before[i], outbox(lane, 0, 8), 8);
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

static uint64_t random_offset(uint64_t *state, uint64_t places, size_t size)
{
    return (uint64_t)((unsigned __int128)random_word(state) * places >> 64) * size;
}

static void verify(const struct point *point)
{
    uint64_t random = 88172645463325252ull, places = peer_places(point->size);
    struct lane *lane = &lanes[point->threads - 1];
    size_t checks = point->size > 4096 ? CHECKS / 8 : CHECKS;
    for (size_t i = 0; i < checks; i++) {
        uint64_t offset = random_offset(&random, places, point->size);
        switch (point->op) {
        case OP_GET: get_and_compare(lane, offset, point->size, 0); break;
        case OP_PUT: verify_put(lane, offset, point->size); break;
        case OP_MESSAGE: verify_message(lane, offset, point->size); break;
        case OP_ATOMIC: verify_atomic(lane, offset); break;
        }
    }
}

/* Whether an earlier point is of the same kind. */
static bool is_verified(const struct point points[], size_t index)
{
    for (size_t i = 0; i < index; i++)
        if (points[i].op == points[index].op && points[i].size == points[index].size && points[i].threads == points[index].threads)
            return true;
    return false;
}

/* Gets every byte of the region. This also creates page tables and other state of first use. */
static void sweep(void)
{
    if (!peer.has_region || peer_lacks(OP_GET, MIB) != NULL)
        return;
    for (uint64_t offset = 0; offset < options.region; offset += MIB)
        get_and_compare(&lanes[0], offset, MIB, 0);
}

/* ---- processor time --------------------------------------------------------------------------------------------- */

/* Of a process: the run time of its threads, to the nanosecond, and `utime+stime` in ticks. */
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
        die("%s is not understood", path);
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
    struct lane *lane;
    uint64_t duration_ns;
    uint64_t ops, elapsed_ns;
    double loop_ns;        /* before and after it: see clock.h */
    uint32_t *samples;     /* ticks of the clock each; the last SAMPLES_MAX of them */
    uint64_t timed_count;
};

/* One operation at a time, each timed, for half of the time: the clock takes as long as a small operation. */
static void run_alone(struct run *run, uint64_t places)
{
    const struct point *point = run->point;
    uint64_t random = 0x2545f4914f6cdd1dull + run->lane->index, start = clock_ns(), now = start;
    unsigned slots[DEPTH_MAX];
    while (now - start < run->duration_ns / 2) {
        for (int i = 0; i < 16; i++) {
            uint64_t offset = random_offset(&random, places, point->size);
            uint64_t before = ticks_begin();
            peer_post(run->lane, point->op, 0, offset, point->size);
            while (reap(run->lane, point, slots) == 0)
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

/* Keeps as many operations outstanding as the depth says. */
static void run_deep(struct run *run, uint64_t places)
{
    const struct point *point = run->point;
    uint64_t random = 0x9e3779b97f4a7c15ull + run->lane->index, start = clock_ns(), now = start, turns = 0;
    uint64_t duration_ns = point->depth == 1 ? run->duration_ns / 2 : run->duration_ns;
    unsigned slots[DEPTH_MAX], free_count = point->depth;
    for (unsigned i = 0; i < point->depth; i++)
        slots[i] = i;
    bool stopping = false;
    unsigned under_way = 0;
    while (!stopping || under_way > 0) {
        for (unsigned i = 0; i < free_count && !stopping; i++, under_way++)
            peer_post(run->lane, point->op, slots[i], random_offset(&random, places, point->size), point->size);
        free_count = reap(run->lane, point, slots);
        under_way -= free_count;
        run->ops += free_count;
        if (turns++ % 16 == 0 || stopping || point->size >= 65536) {
            now = clock_ns();
            stopping = now - start >= duration_ns;
        }
    }
    run->elapsed_ns = clock_ns() - start;
}

static void *run_thread(void *argument)
{
    struct run *run = argument;
    uint64_t places = peer_places(run->point->size);
    double before_ns = loop_ns();
    if (run->point->depth == 1 && run->point->threads == 1)
        run_alone(run, places);
    run_deep(run, places);
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
    pthread_t threads[LANES_MAX];
    for (unsigned i = 0; i < point->threads; i++) {
        runs[i] = (struct run){.point = point, .lane = &lanes[i], .duration_ns = duration_ns, .samples = samples};
        if (i > 0 && pthread_create(&threads[i], NULL, run_thread, &runs[i]) != 0)
            die("no thread");
    }
    run_thread(&runs[0]);
    for (unsigned i = 1; i < point->threads; i++)
        pthread_join(threads[i], NULL);
}

static void tell_target(int control, bool begins, const struct point *point)
{
    struct command command = {.begins = begins, .op = point->op, .size = point->size, .lane_count = point->threads};
    if (control < 0)
        return;
    say(control, &command, sizeof command);
    hear(control, &command, sizeof command);
}

/* `settle_us`: time for the target to finish work of earlier points. */
static void measure(int control, pid_t target, const struct point *point, unsigned settle_us, unsigned milliseconds, uint32_t *samples)
{
    struct run runs[LANES_MAX];
    uint64_t duration_ns = milliseconds * 1000000ull;
    tell_target(control, true, point);
    run_threads(runs, point, duration_ns / 8, NULL); /* to warm up */
    usleep(settle_us); /* time for a target to go to sleep */
    struct cpu before = {0, 0}, after = {0, 0};
    if (target > 0)
        before = cpu_of(target);
    double client_before = own_cpu_seconds();
    run_threads(runs, point, duration_ns, samples);
    double client_cpu = own_cpu_seconds() - client_before;
    if (target > 0)
        after = cpu_of(target);
    tell_target(control, false, point);
    print_point(point, runs, client_cpu, before, after);
}

/* ---- the two roles ---------------------------------------------------------------------------------------------- */

/* Works, or sleeps if the peer needs no work, until the client ends the point. */
static bool serve_point(int control, struct command *command)
{
    unsigned idle = 0;
    ssize_t size = -1;
    bool works = peer_target_works(command->op);
    while (size < 0) {
        idle = works && peer_turn(command->op, command->size, command->lane_count) ? 0 : idle + 1;
        if (!works || idle % IDLE_TURNS == IDLE_TURNS - 1)
            size = recv(control, command, sizeof *command, works ? MSG_DONTWAIT : 0);
        if (idle % IDLE_TURNS == IDLE_TURNS - 1)
            sched_yield();
    }
    return size == sizeof *command;
}

static void open_lanes(void)
{
    for (unsigned i = 0; i < options.lanes; i++)
        lanes[i] = (struct lane){.index = i, .buffer = map_memory(LANE_BYTES, false, NULL)};
}

static int be_target(void)
{
    int control = wait_for_client();
    pid_t pid = getpid();
    say(control, &pid, sizeof pid);
    open_lanes();
    peer_open_target(control);
    struct command command;
    if (hear(control, &command, sizeof command) != sizeof command)
        die("a command of the wrong size");
    for (bool goes_on = true; goes_on;) {
        say(control, &command, sizeof command);
        goes_on = serve_point(control, &command);
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

static int be_client(pid_t target, const struct point points[], size_t count, unsigned milliseconds)
{
    int control = -1;
    clock_calibrate();
    if (peer.has_target) {
        control = connect_to_meet(SOCK_SEQPACKET);
        if (hear(control, &target, sizeof target) != sizeof target)
            die("no process id");
    }
    open_lanes();
    peer_open_client(control);
    uint32_t *samples = (uint32_t *)map_memory(SAMPLES_MAX * sizeof samples[0], false, NULL);
    memset(samples, 0, SAMPLES_MAX * sizeof samples[0]);
    printf("{\"clock_ns\": %.1f}\n", clock_overhead_ns());
    const struct point whole = {OP_GET, MIB, 1, 1};
    prepare(points, count);
    tell_target(control, true, &whole);
    sweep();
    tell_target(control, false, &whole);
    /* Verification precedes all measurements, which change the region; atomics come last, for they change it, too. */
    for (size_t i = 0; i < 2 * count; i++) {
        const struct point *point = &points[i % count];
        if (is_verified(points, i % count) || (point->op == OP_ATOMIC) != (i >= count) || peer_lacks(point->op, point->size) != NULL)
            continue;
        tell_target(control, true, point);
        verify(point);
        tell_target(control, false, point);
    }
    for (size_t i = 0; i < count; i++) {
        const char *reason = peer_lacks(points[i].op, points[i].size);
        if (reason == NULL)
            measure(control, target, &points[i], i == 0 ? FIRST_SETTLE_US : points[i].op != points[i - 1].op ? SETTLE_US : 500,
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
            point.threads == 0 || point.threads > options.lanes)
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
        if (strcmp(name, "--meet") == 0)
            options.meet = value;
        else if (strcmp(name, "--region") == 0)
            options.region = strtoull(value, NULL, 10);
        else if (strcmp(name, "--memory") == 0)
            options.memory = memory_of(value);
        else if (strcmp(name, "--flavour") == 0)
            options.flavour = value;
        else if (strcmp(name, "--lanes") == 0)
            options.lanes = (unsigned)atoi(value);
        else if (strcmp(name, "--points") == 0)
            wanted = value;
        else if (strcmp(name, "--milliseconds") == 0)
            milliseconds = (unsigned)atoi(value);
        else if (strcmp(name, "--target") == 0)
            target = atoi(value);
        else
            die("no option %s", name);
    }
    if (options.lanes == 0 || options.lanes > LANES_MAX || options.region < MIB || options.region % MIB != 0 || milliseconds == 0)
        die("--lanes, --region or --milliseconds is out of range");
    if (count > 1 && strcmp(arguments[1], "target") == 0 && peer.has_target)
        return be_target();
    if (count > 1 && strcmp(arguments[1], "client") == 0 && wanted != NULL)
        return be_client(target, points, parse_points(wanted, points), milliseconds);
    die("usage: see peer.h");
}
