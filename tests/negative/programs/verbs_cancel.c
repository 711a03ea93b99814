/*
 * verbs_cancel: ends threads by pthread_cancel while they open, poll, send, or wait for events. The others go on.
 */
#include "check.h"
#include "env.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <pthread.h>
#include <rdma/rdma_user_cm.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

enum { THREADS = 300 };

/* A queue pair that is connected with itself. */
struct target {
    const struct env *env;
    struct ibv_qp *qp;
};

static void *poll_forever(void *argument)
{
    const struct target *target = argument;
    struct ibv_wc wc;
    for (;;) {
        ibv_poll_cq(target->env->cq, 1, &wc);
        pthread_testcancel();
    }
    return NULL;
}

static void *wait_for_completions(void *argument)
{
    const struct target *target = argument;
    struct ibv_cq *cq;
    void *context;
    ibv_get_cq_event(target->env->channel, &cq, &context);
    return NULL;
}

static void *wait_for_events(void *argument)
{
    const struct target *target = argument;
    struct ibv_async_event event;
    ibv_get_async_event(target->env->context, &event);
    return NULL;
}

/* A thread that could not be cancelled would be joined for ever. */
static void join_cancelled(pthread_t thread)
{
    void *result;
    CHECK(pthread_join(thread, &result) == 0 && result == PTHREAD_CANCELED);
}

/* Cancels a thread that does this. */
static void cancel(void *(*what)(void *), struct target *target, useconds_t after_us)
{
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, what, target) == 0);
    usleep(after_us);
    CHECK(pthread_cancel(thread) == 0);
    join_cancelled(thread);
}

/* A fork waits for the locks of the library. */
static void fork_once(void)
{
    pid_t child = fork();
    if (child == 0)
        _exit(0);
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status));
}

/* A call of a thread that is to end at the next cancellation point. */
struct call {
    void (*make)(struct call *);
    struct ibv_device *device;
    struct ibv_context *context;
    struct ibv_xrcd *xrcd;
    int fd;
};

static void *call_cancelled(void *argument)
{
    struct call *call = argument;
    CHECK(pthread_cancel(pthread_self()) == 0);
    call->make(call);
    pthread_testcancel();
    return NULL;
}

/* Makes a call in such a thread. */
static void make_cancelled(struct call *call, void (*make)(struct call *))
{
    pthread_t thread;
    call->make = make;
    CHECK(pthread_create(&thread, NULL, call_cancelled, call) == 0);
    join_cancelled(thread);
    fork_once();
}

static void get_guid(struct call *call)
{
    CHECK(ibv_get_device_guid(call->device) != 0);
}

static void open_device(struct call *call)
{
    call->context = ibv_open_device(call->device);
}

static void open_domain(struct call *call)
{
    struct ibv_xrcd_init_attr attr = {
        .comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS, .fd = call->fd, .oflags = O_CREAT};
    call->xrcd = ibv_open_xrcd(call->context, &attr);
}

/* rdma_bind_addr of a new identifier. Where instance index 0 is taken, this looks at the standard port. */
static void bind_any(struct call *call)
{
    struct rdma_ucm_create_id_resp id = {0};
    struct {
        struct rdma_ucm_cmd_hdr header;
        struct rdma_ucm_create_id body;
    } create = {{RDMA_USER_CM_CMD_CREATE_ID, sizeof(create.body), sizeof(id)},
                {.uid = 1, .response = (uintptr_t)&id, .ps = RDMA_PS_TCP}};
    struct {
        struct rdma_ucm_cmd_hdr header;
        struct rdma_ucm_bind body;
    } bind = {{RDMA_USER_CM_CMD_BIND, sizeof(bind.body), 0}, {.addr_size = sizeof(struct sockaddr_in)}};
    bind.body.addr.ss_family = AF_INET;
    CHECK(write(call->fd, &create, sizeof(create)) == sizeof(create));
    bind.body.id = id.id;
    CHECK(write(call->fd, &bind, sizeof(bind)) == sizeof(bind));
}

/* Threads that are cancelled while they open something leave no lock of the process. */
static void cancel_openers(void)
{
    struct ibv_device **list = ibv_get_device_list(NULL);
    struct call call = {.device = list[0]};
    make_cancelled(&call, get_guid);
    make_cancelled(&call, open_device);
    CHECK(call.context != NULL);
    char path[] = "/tmp/verbs_cancel.XXXXXX";
    CHECK((call.fd = mkstemp(path)) >= 0);
    unlink(path);
    make_cancelled(&call, open_domain);
    CHECK(call.xrcd != NULL);
    close(call.fd);
    CHECK((call.fd = open("/dev/infiniband/rdma_cm", O_RDWR)) >= 0);
    make_cancelled(&call, bind_any);
    close(call.fd);
    RETURNS(0, ibv_close_xrcd(call.xrcd));
    RETURNS(0, ibv_close_device(call.context));
    ibv_free_device_list(list);
}

/* Keeps instance index 0 from this process. Returns the process that has it, and the pipe whose end ends that. */
static pid_t take_instance_0(int *end)
{
    int opened[2], closed[2];
    char byte = 0;
    if (pipe(opened) != 0 || pipe(closed) != 0)
        die("no pipes");
    pid_t child = fork();
    if (child == 0) {
        close(closed[1]);
        struct env env = env_open();
        if (write(opened[1], &byte, 1) != 1 || read(closed[0], &byte, 1) != 0)
            die("the other process is gone");
        env_close(&env);
        _exit(0);
    }
    CHECK(child > 0 && read(opened[0], &byte, 1) == 1);
    *end = closed[1];
    return child;
}

/* A WRITE arrives. */
static void write_once(const struct target *target)
{
    struct ibv_sge from = {(uintptr_t)target->env->buffer, 8, target->env->mr->lkey};
    struct ibv_send_wr wr = {.opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED, .sg_list = &from, .num_sge = 1}, *bad;
    wr.wr.rdma.remote_addr = (uintptr_t)target->env->buffer + 64;
    wr.wr.rdma.rkey = target->env->mr->rkey;
    RETURNS(0, ibv_post_send(target->qp, &wr, &bad));
    struct ibv_wc wc;
    int got;
    while ((got = ibv_poll_cq(target->env->cq, 1, &wc)) == 0)
        usleep(100);
    CHECK(got == 1 && wc.status == IBV_WC_SUCCESS);
}

int main(void)
{
    setvbuf(stdout, NULL, _IOLBF, 0); /* a crash loses no output */
    int end, status;
    pid_t other = take_instance_0(&end);
    cancel_openers();
    close(end);
    CHECK(waitpid(other, &status, 0) == other && status == 0);
    struct env env = env_open();
    struct ibv_qp *qp = env_qp(&env, IBV_QPT_RC);
    struct target target = {&env, qp};
    env_advance(&env, qp, qp->qp_num, IBV_QPS_RTS);
    for (unsigned i = 0; i < THREADS; i++) {
        cancel(poll_forever, &target, i % 7 * 20);
        write_once(&target);
    }
    for (unsigned i = 0; i < 3; i++) {
        cancel(wait_for_completions, &target, 20000);
        cancel(wait_for_events, &target, 20000);
    }
    write_once(&target);
    fork_once();
    RETURNS(0, ibv_destroy_qp(qp));
    env_close(&env);
    return check_end();
}
