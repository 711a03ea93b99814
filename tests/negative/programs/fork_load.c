/*
 * fork_load.c: tests fork, signals and dlopen with the functions of the C library that libibverbs.so.1 interposes.
 *
 * usage: fork_load names                   prints the interposed functions that it calls, one a line
 *        fork_load load FORKS              forks while threads call all of them in a loop; each child calls each once
 *        fork_load verbs FORKS             forks while threads open and use devices; each child opens one
 *        fork_load signal SIGNALS          a signal handler makes the first calls, and interrupts malloc and dlopen
 *        fork_load fork-in-signal FORKS    a signal handler forks
 *        fork_load vfork                   a vfork child resets its signals, which must not reset the parent's
 *        fork_load bare FORKS              _Fork and clone run no fork hooks; the child makes async-signal-safe calls
 *        fork_load constructor LIBRARY     LIBRARY's constructor waits for a thread that makes the first calls
 *
 * load and verbs fork in many short processes, because most of the work that a fork may interrupt happens once per
 * process. A child that has not ended after 10 s is reported with its stack, and the program fails.
 */
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/netlink.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <time.h>
#include <unistd.h>

#include "env.h"

enum {
    FORKS_PER_PROCESS = 20,
    THREADS = 4,
    TIMEOUT_S = 10,
    PAGE = 4096,
};

/* The library forwards some of these paths unchanged, and redirects the others to its own tree. */
static const char *const ordinary[] = {"/proc/self/status", "/etc", "/dev/null"};
static const char *const ours[] = {"/sys/class/infiniband/terrace0/ports/1/state", "/sys/class/infiniband",
                                   "/dev/infiniband/uverbs0"};
#define RDMA_CM "/dev/infiniband/rdma_cm"

/* ---- each interposed function, called once ------------------------------------------------------------------- */

typedef void (*any_function)(void);

struct place {
    const char *path;
    int fd; /* an ordinary file, or the connection manager's device */
};

static void close_if_open(int fd)
{
    if (fd >= 0)
        close(fd);
}

#define CALL(type, ...) ((type)function)(__VA_ARGS__)
#define CALLER(name) static void name(any_function function, const struct place *at)
#define UNUSED (void)at
#define BLOCK (1 << 20) /* has a mapping of its own */

typedef int (*open_t)(const char *, int, ...);
typedef int (*openat_t)(int, const char *, int, ...);
typedef int (*stat_t)(const char *, void *);
typedef sighandler_t (*signal_t)(int, sighandler_t);
typedef int (*mask_t)(int, const sigset_t *, sigset_t *);

CALLER(call_open) { close_if_open(CALL(open_t, at->path, O_RDONLY | O_CLOEXEC, 0)); }
CALLER(call_openat) { close_if_open(CALL(openat_t, AT_FDCWD, at->path, O_RDONLY | O_CLOEXEC, 0)); }
CALLER(call_stat)
{
    struct stat status;
    CALL(stat_t, at->path, &status);
}
CALLER(call_xstat)
{
    struct stat status;
    CALL(int (*)(int, const char *, void *), 1, at->path, &status);
}
CALLER(call_fxstatat)
{
    struct stat status;
    CALL(int (*)(int, int, const char *, void *, int), 1, AT_FDCWD, at->path, &status, 0);
}
CALLER(call_fstatat)
{
    struct stat status;
    CALL(int (*)(int, const char *, void *, int), AT_FDCWD, at->path, &status, 0);
}
CALLER(call_statx)
{
    struct statx status;
    CALL(int (*)(int, const char *, int, unsigned, void *), AT_FDCWD, at->path, 0, STATX_BASIC_STATS, &status);
}
CALLER(call_fstat)
{
    struct stat status;
    CALL(int (*)(int, void *), at->fd, &status);
}
CALLER(call_fxstat)
{
    struct stat status;
    CALL(int (*)(int, int, void *), 1, at->fd, &status);
}
CALLER(call_write)
{
    /* The connection manager's command that creates an identifier. */
    struct {
        uint32_t command;
        uint16_t in, out;
        uint64_t uid, response;
        uint16_t port_space;
        uint8_t qp_type, reserved[5];
    } create = {.in = 24, .out = 4, .port_space = 0x106, .qp_type = 2};
    uint32_t id;
    create.response = (uintptr_t)&id;
    CALL(ssize_t (*)(int, const void *, size_t), at->fd, &create, sizeof create);
}
/* A netlink request for the list of RDMA devices. The kernel refuses it where the paths are ordinary. */
static const struct nlmsghdr netlink_request = {
    .nlmsg_len = sizeof netlink_request, .nlmsg_type = (5 << 10) + 1, .nlmsg_flags = NLM_F_REQUEST | NLM_F_DUMP};
static int netlink_family(const struct place *at)
{
    return strstr(at->path, "infiniband") != NULL ? NETLINK_RDMA : NETLINK_ROUTE;
}
static int netlink_socket(const struct place *at)
{
    return socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, netlink_family(at));
}
CALLER(call_socket)
{
    close_if_open(CALL(int (*)(int, int, int), AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, netlink_family(at)));
}
CALLER(call_connect)
{
    struct sockaddr_nl kernel = {.nl_family = AF_NETLINK};
    int fd = netlink_socket(at);
    CALL(int (*)(int, const void *, socklen_t), fd, &kernel, sizeof kernel);
    close_if_open(fd);
}
CALLER(call_sendto)
{
    int fd = netlink_socket(at);
    CALL(ssize_t (*)(int, const void *, size_t, int, const void *, socklen_t), fd, &netlink_request,
         sizeof netlink_request, 0, NULL, 0);
    close_if_open(fd);
}
CALLER(call_sendmsg)
{
    struct iovec piece = {(void *)&netlink_request, sizeof netlink_request};
    struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1};
    int fd = netlink_socket(at);
    CALL(ssize_t (*)(int, const void *, int), fd, &message, 0);
    close_if_open(fd);
}
CALLER(call_access) { CALL(int (*)(const char *, int), at->path, R_OK); }
CALLER(call_faccessat) { CALL(int (*)(int, const char *, int, int), AT_FDCWD, at->path, R_OK, 0); }
CALLER(call_readlink)
{
    char target[PATH_MAX];
    CALL(ssize_t (*)(const char *, char *, size_t, size_t), at->path, target, sizeof target, sizeof target);
}
CALLER(call_readlinkat)
{
    char target[PATH_MAX];
    CALL(ssize_t (*)(int, const char *, char *, size_t, size_t), AT_FDCWD, at->path, target, sizeof target, sizeof target);
}
CALLER(call_getxattr)
{
    char value[64];
    CALL(ssize_t (*)(const char *, const char *, void *, size_t), at->path, "user.none", value, sizeof value);
}
CALLER(call_listxattr)
{
    char names[64];
    CALL(ssize_t (*)(const char *, char *, size_t), at->path, names, sizeof names);
}
CALLER(call_realpath)
{
    char found[PATH_MAX];
    CALL(char *(*)(const char *, char *, size_t), at->path, found, sizeof found);
}
CALLER(call_canonicalize) { free(CALL(char *(*)(const char *), at->path)); }
CALLER(call_fopen)
{
    FILE *file = CALL(FILE *(*)(const char *, const char *), at->path, "re");
    if (file != NULL)
        fclose(file);
}
CALLER(call_opendir)
{
    DIR *directory = CALL(DIR *(*)(const char *), at->path);
    if (directory != NULL)
        closedir(directory);
}
CALLER(call_scandir)
{
    typedef int (*scandir_t)(const char *, struct dirent ***, int (*)(const struct dirent *), void *);
    struct dirent **entries;
    int count = CALL(scandir_t, at->path, &entries, NULL, NULL);
    for (int i = 0; i < count; i++)
        free(entries[i]);
    if (count >= 0)
        free(entries);
}
CALLER(call_mmap)
{
    typedef void *(*mmap_t)(void *, size_t, int, int, int, off_t);
    UNUSED;
    void *page = CALL(mmap_t, NULL, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    syscall(SYS_munmap, page, PAGE);
}
static void *raw_page(void)
{
    return (void *)syscall(SYS_mmap, NULL, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
}
CALLER(call_munmap)
{
    UNUSED;
    CALL(int (*)(void *, size_t), raw_page(), PAGE);
}
CALLER(call_madvise)
{
    UNUSED;
    void *page = raw_page();
    CALL(int (*)(void *, size_t, int), page, PAGE, MADV_DONTNEED);
    syscall(SYS_munmap, page, PAGE);
}
CALLER(call_mprotect)
{
    UNUSED;
    void *page = raw_page();
    CALL(int (*)(void *, size_t, int), page, PAGE, PROT_NONE);
    syscall(SYS_munmap, page, PAGE);
}
CALLER(call_mremap)
{
    UNUSED;
    void *moved = CALL(void *(*)(void *, size_t, size_t, int, ...), raw_page(), PAGE, 2 * PAGE, MREMAP_MAYMOVE);
    syscall(SYS_munmap, moved, 2 * PAGE);
}
CALLER(call_free)
{
    UNUSED;
    CALL(void (*)(void *), malloc(BLOCK));
}
CALLER(call_realloc)
{
    UNUSED;
    free(CALL(void *(*)(void *, size_t), malloc(BLOCK), 2 * BLOCK));
}
CALLER(call_reallocarray)
{
    UNUSED;
    free(CALL(void *(*)(void *, size_t, size_t), malloc(BLOCK), 2, BLOCK));
}
static void ignore(int number)
{
    (void)number;
}
CALLER(call_sigaction)
{
    typedef int (*sigaction_t)(int, const struct sigaction *, struct sigaction *);
    UNUSED;
    struct sigaction action = {.sa_handler = ignore}, before;
    CALL(sigaction_t, SIGUSR2, &action, NULL);
    CALL(sigaction_t, SIGBUS, &action, &before);
    CALL(sigaction_t, SIGBUS, &before, NULL);
}
CALLER(call_signal)
{
    UNUSED;
    CALL(signal_t, SIGUSR2, ignore);
    CALL(signal_t, SIGSEGV, SIG_DFL);
}
CALLER(call_mask)
{
    UNUSED;
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGUSR2);
    sigaddset(&set, SIGBUS);
    CALL(mask_t, SIG_BLOCK, &set, NULL);
    CALL(mask_t, SIG_UNBLOCK, &set, NULL);
}

static const struct entry {
    const char *name;
    void (*call)(any_function, const struct place *);
    bool is_signal_safe; /* by signal-safety(7), or because it is a plain system call */
} entries[] = {
    {"__fxstat", call_fxstat, true},
    {"__fxstat64", call_fxstat, true},
    {"__fxstatat", call_fxstatat, true},
    {"__fxstatat64", call_fxstatat, true},
    {"__lxstat", call_xstat, true},
    {"__lxstat64", call_xstat, true},
    {"__open64_2", call_open, true},
    {"__open_2", call_open, true},
    {"__openat64_2", call_openat, true},
    {"__openat_2", call_openat, true},
    {"__readlink_chk", call_readlink, true},
    {"__readlinkat_chk", call_readlinkat, true},
    {"__realpath_chk", call_realpath, false},
    {"__sigaction", call_sigaction, true},
    {"__sysv_signal", call_signal, true},
    {"__xstat", call_xstat, true},
    {"__xstat64", call_xstat, true},
    {"access", call_access, true},
    {"bsd_signal", call_signal, true},
    {"canonicalize_file_name", call_canonicalize, false},
    {"connect", call_connect, true},
    {"eaccess", call_access, true},
    {"euidaccess", call_access, true},
    {"faccessat", call_faccessat, true},
    {"fopen", call_fopen, false},
    {"fopen64", call_fopen, false},
    {"free", call_free, false},
    {"fstat", call_fstat, true},
    {"fstat64", call_fstat, true},
    {"fstatat", call_fstatat, true},
    {"fstatat64", call_fstatat, true},
    {"getxattr", call_getxattr, true},
    {"lgetxattr", call_getxattr, true},
    {"listxattr", call_listxattr, true},
    {"llistxattr", call_listxattr, true},
    {"lstat", call_stat, true},
    {"lstat64", call_stat, true},
    {"madvise", call_madvise, true},
    {"mmap", call_mmap, true},
    {"mmap64", call_mmap, true},
    {"mprotect", call_mprotect, true},
    {"mremap", call_mremap, true},
    {"munmap", call_munmap, true},
    {"open", call_open, true},
    {"open64", call_open, true},
    {"openat", call_openat, true},
    {"openat64", call_openat, true},
    {"opendir", call_opendir, false},
    {"pthread_sigmask", call_mask, true},
    {"readlink", call_readlink, true},
    {"readlinkat", call_readlinkat, true},
    {"realloc", call_realloc, false},
    {"reallocarray", call_reallocarray, false},
    {"realpath", call_realpath, false},
    {"scandir", call_scandir, false},
    {"scandir64", call_scandir, false},
    {"send", call_sendto, true},
    {"sendmsg", call_sendmsg, true},
    {"sendto", call_sendto, true},
    {"sigaction", call_sigaction, true},
    {"signal", call_signal, true},
    {"sigprocmask", call_mask, true},
    {"socket", call_socket, true},
    {"ssignal", call_signal, true},
    {"stat", call_stat, true},
    {"stat64", call_stat, true},
    {"statx", call_statx, true},
    {"sysv_signal", call_signal, true},
    {"write", call_write, true},
};
enum { ENTRIES = sizeof entries / sizeof *entries };
static any_function functions[ENTRIES];

static void find_functions(void)
{
    for (int i = 0; i < ENTRIES; i++) {
        functions[i] = (any_function)dlsym(RTLD_DEFAULT, entries[i].name);
        if (functions[i] == NULL)
            die("no function %s", entries[i].name);
    }
}

/* Calls all entries in order from `first`, or only those that a signal handler may call. */
static void call_each(int first, const char *path, int fd, bool only_signal_safe)
{
    const struct place at = {path, fd};
    for (int i = 0; i < ENTRIES; i++) {
        int which = (first + i) % ENTRIES;
        if (!only_signal_safe || entries[which].is_signal_safe)
            entries[which].call(functions[which], &at);
    }
}

/* Calls each function with ordinary paths, with the library's paths, and with the connection manager's device. */
static void call_all(int first)
{
    int null = syscall(SYS_openat, AT_FDCWD, "/dev/null", O_RDWR | O_CLOEXEC);
    int channel = open(RDMA_CM, O_RDWR | O_CLOEXEC);
    for (int i = 0; i < 3; i++) {
        call_each(first, ordinary[i], null, false);
        call_each(first, ours[i], channel, false);
    }
    close_if_open(channel);
    close_if_open(null);
}

/* ---- children and their timeout ------------------------------------------------------------------------------- */

static void print_file(pid_t pid, const char *name)
{
    char path[64], text[512];
    snprintf(path, sizeof path, "/proc/%d/%s", pid, name);
    int fd = syscall(SYS_openat, AT_FDCWD, path, O_RDONLY);
    ssize_t got = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (got > 0)
        printf("  %s: %.*s\n", name, (int)got, text);
    close_if_open(fd);
}

static void report(pid_t pid, const char *test)
{
    char command[128];
    printf("%s: child %d hangs\n", test, pid);
    print_file(pid, "wchan");
    print_file(pid, "syscall");
    fflush(stdout);
    snprintf(command, sizeof command, "gdb -p %d -batch -ex 'thread apply all bt 12' 2>&1 | grep '^[#T]'", pid);
    if (system(command) != 0)
        printf("  no stack: install gdb\n");
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    fflush(stdout);
}

/* Returns whether a child exits with status 0 in time. */
static bool exits_in_time(pid_t pid, const char *test)
{
    if (pid < 0)
        die("%s: fork: %s", test, strerror(errno));
    double deadline = seconds_now() + TIMEOUT_S;
    for (;;) {
        int status;
        pid_t ended = waitpid(pid, &status, WNOHANG);
        if (ended == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0)
            return true;
        if (ended == pid) {
            printf("%s: child %d ended with status %#x\n", test, pid, status);
            return false;
        }
        if (seconds_now() > deadline) {
            report(pid, test);
            return false;
        }
        usleep(200);
    }
}

/* ---- fork under load ------------------------------------------------------------------------------------------ */

static void *call_in_loop(void *first)
{
    for (int round = (int)(intptr_t)first;; round++)
        call_all(round * 7);
    return NULL;
}

/* Opens a device, connects two of its queue pairs, does READs, and closes all. */
static void use_device(void)
{
    struct env env = env_open();
    struct ibv_qp *left = env_qp(&env, IBV_QPT_RC), *right = env_qp(&env, IBV_QPT_RC);
    env_connect(&env, left, right);
    for (int i = 0; i < 8; i++) {
        struct ibv_mr *mr = ibv_reg_mr(env.pd, env.buffer, ENV_BYTES, ENV_ACCESS);
        struct ibv_sge sge = {(uintptr_t)env.buffer, 64, env.mr->lkey};
        struct ibv_send_wr *bad, wr = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_READ,
                                       .send_flags = IBV_SEND_SIGNALED};
        wr.wr.rdma.remote_addr = (uintptr_t)env.buffer + 4096;
        wr.wr.rdma.rkey = mr->rkey;
        if (ibv_post_send(left, &wr, &bad) != 0 || env_poll(env.cq).status != IBV_WC_SUCCESS)
            die("a READ did not complete");
        ibv_dereg_mr(mr);
    }
    ibv_destroy_qp(left);
    ibv_destroy_qp(right);
    env_close(&env);
}

static void *use_devices_in_loop(void *unused)
{
    for (;;)
        use_device();
    return unused;
}

/* Forks while threads run `work`. Returns how many children failed. */
static int fork_under_load(void *(*work)(void *), int threads, void (*in_child)(int), int forks, const char *test)
{
    int failed = 0;
    for (int i = 0; i < threads; i++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, work, (void *)(intptr_t)i) != 0)
            die("a thread cannot be created");
    }
    for (int i = 0; i < forks; i++) {
        usleep(rand() % 3000);
        pid_t child = fork();
        if (child == 0) {
            in_child(i);
            _exit(0);
        }
        failed += !exits_in_time(child, test);
    }
    return failed;
}

static void device_in_child(int number)
{
    (void)number;
    use_device();
}

/* Starts many short processes, each of which forks FORKS_PER_PROCESS times from its start. */
static int run_processes(int forks, const char *mode)
{
    int failed = 0;
    for (int done = 0; done < forks; done += FORKS_PER_PROCESS) {
        pid_t process = fork();
        if (process == 0) {
            char seed[16];
            snprintf(seed, sizeof seed, "%d", done);
            execl("/proc/self/exe", "fork_load", mode, seed, (char *)NULL);
            _exit(127);
        }
        int status;
        waitpid(process, &status, 0);
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
            printf("%s: process %d ended with status %#x\n", mode, process, status);
            failed++;
        }
        fflush(stdout);
    }
    return failed;
}

static int run_process(const char *test, int seed)
{
    srand(seed);
    bool verbs = strcmp(test, "one-verbs") == 0;
    int failed = verbs ? fork_under_load(use_devices_in_loop, 2, device_in_child, FORKS_PER_PROCESS, test)
                       : fork_under_load(call_in_loop, THREADS, call_all, FORKS_PER_PROCESS, test);
    fflush(stdout);
    _exit(failed != 0);
}

/* ---- signals -------------------------------------------------------------------------------------------------- */

static atomic_int handled;
static int handled_failures;
static bool forks_in_handler;

static void start_timer(int microseconds)
{
    struct itimerval timer = {.it_value.tv_usec = microseconds, .it_interval.tv_usec = microseconds};
    setitimer(ITIMER_REAL, &timer, NULL);
}

static void on_alarm(int number)
{
    (void)number;
    int saved = errno;
    if (forks_in_handler) {
        pid_t child = fork();
        if (child == 0) {
            call_each(handled, ordinary[handled % 3], -1, true);
            _exit(0);
        }
        handled_failures += !exits_in_time(child, "fork in a signal handler");
    } else {
        call_each(handled, ordinary[handled % 3], -1, true);
        /* No action was set before for this signal, so its mask is a new one. */
        struct sigaction action = {.sa_handler = ignore};
        for (int bit = 0; bit < 9; bit++)
            if (handled >> bit & 1)
                sigaddset(&action.sa_mask, SIGRTMIN + bit);
        sigaction(SIGBUS, &action, NULL);
    }
    atomic_fetch_add(&handled, 1);
    errno = saved;
}

/* Calls the C library's own function, because the handler must make the first interposed calls. */
static void install_alarm(void)
{
    typedef int (*sigaction_t)(int, const struct sigaction *, struct sigaction *);
    struct sigaction action = {.sa_handler = on_alarm, .sa_flags = SA_RESTART};
    void *libc = dlopen("libc.so.6", RTLD_NOW | RTLD_NOLOAD);
    if (libc == NULL || ((sigaction_t)dlsym(libc, "sigaction"))(SIGALRM, &action, NULL) != 0)
        die("a handler cannot be installed");
}

static void start_watchdog(const char *test)
{
    pid_t worker = fork();
    if (worker != 0)
        _exit(exits_in_time(worker, test) ? 0 : 1);
}

/* The compiler must not optimize the allocation away. */
static void allocate(size_t size)
{
    void *volatile memory = malloc(size);
    free(memory);
}

static int signals(int count)
{
    start_watchdog("signal");
    install_alarm();
    start_timer(200);
    while (handled < count / 2) {
        for (int size = 1; size < 4096; size *= 2)
            allocate(size);
        void *library = dlopen("libm.so.6", RTLD_NOW);
        if (library != NULL)
            dlclose(library);
    }
    /* Repeats the test after the library has installed its own fault handlers. */
    start_timer(0);
    struct env env = env_open();
    start_timer(500);
    while (handled < count)
        for (int size = 2048; size < 1 << 16; size += 512)
            allocate(size);
    start_timer(0);
    env_close(&env);
    _exit(0);
}

static int forks_in_signals(int count)
{
    start_watchdog("fork-in-signal");
    forks_in_handler = true;
    install_alarm();
    start_timer(2000);
    while (handled < count)
        call_each(handled, ordinary[handled % 3], -1, true);
    start_timer(0);
    _exit(handled_failures != 0);
}

/* ---- vfork, _Fork, clone -------------------------------------------------------------------------------------- */

static void exit_with_success(int number)
{
    (void)number;
    _exit(0);
}

static bool vfork_and_reset(void)
{
    static const struct sigaction reset = {.sa_handler = SIG_DFL};
    pid_t child = vfork();
    if (child == 0) {
        sigaction(SIGSEGV, &reset, NULL);
        execl("/bin/true", "true", (char *)NULL);
        _exit(127);
    }
    return exits_in_time(child, "vfork");
}

static int check_vfork(void)
{
    struct sigaction action = {.sa_handler = exit_with_success}, now;
    struct env env = env_open();
    sigaction(SIGSEGV, &action, NULL);
    if (!vfork_and_reset())
        return 1;
    sigaction(SIGSEGV, NULL, &now);
    if (now.sa_handler != exit_with_success) {
        printf("vfork: the child has reset its parent's handler\n");
        return 1;
    }
    env_close(&env);
    *(volatile char *)raw_page() = 1; /* a fault: the handler ends the program */
    return 1;
}

static int in_clone(void *number)
{
    call_each((int)(intptr_t)number, ordinary[(intptr_t)number % 3], -1, true);
    _exit(0);
}

static int bare_forks(int forks)
{
    int failed = 0;
    void *stack = mmap(NULL, 64 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);
    for (int i = 0; i < THREADS; i++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, call_in_loop, (void *)(intptr_t)i) != 0)
            die("a thread cannot be created");
    }
    for (int i = 0; i < forks; i++) {
        usleep(rand() % 3000);
        pid_t child;
        if (i % 2 == 0)
            child = clone(in_clone, (char *)stack + 64 * PAGE, SIGCHLD, (void *)(intptr_t)i);
        else if ((child = _Fork()) == 0)
            in_clone((void *)(intptr_t)i);
        failed += !exits_in_time(child, i % 2 == 0 ? "clone" : "_Fork");
    }
    _exit(failed != 0);
}

/* ---- constructors --------------------------------------------------------------------------------------------- */

/* Called by the thread of the library's constructor. */
void first_calls(void)
{
    for (int i = 0; i < 3; i++)
        call_each(i, ordinary[i], -1, false);
}

static int constructor(const char *library)
{
    start_watchdog("constructor");
    if (dlopen(library, RTLD_NOW) == NULL)
        die("%s", dlerror());
    _exit(0);
}

int main(int argc, char **argv)
{
    const char *mode = argc > 1 ? argv[1] : "", *argument = argc > 2 ? argv[2] : "0";
    int number = atoi(argument);
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (strcmp(mode, "names") == 0) {
        for (int i = 0; i < ENTRIES; i++)
            puts(entries[i].name);
        return 0;
    }
    if (strcmp(mode, "load") == 0)
        return run_processes(number, "one-load") != 0;
    if (strcmp(mode, "verbs") == 0)
        return run_processes(number, "one-verbs") != 0;
    find_functions();
    if (strncmp(mode, "one-", 4) == 0)
        return run_process(mode, number);
    if (strcmp(mode, "signal") == 0)
        return signals(number);
    if (strcmp(mode, "fork-in-signal") == 0)
        return forks_in_signals(number);
    if (strcmp(mode, "vfork") == 0)
        return check_vfork();
    if (strcmp(mode, "bare") == 0)
        return bare_forks(number);
    if (strcmp(mode, "constructor") == 0)
        return constructor(argument);
    fprintf(stderr, "fork_load: the comment at the start of its source lists the arguments\n");
    return 2;
}
