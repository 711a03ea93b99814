/*
 * verbs_cancel: ends threads by pthread_cancel while they poll, send, or wait for events. The others go on.
 */
#include "check.h"
#include "env.h"

#include <pthread.h>
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

/* Cancels a thread that does this. A thread that could not be cancelled would be joined for ever. */
static void cancel(void *(*what)(void *), struct target *target, useconds_t after_us)
{
    pthread_t thread;
    void *result;
    CHECK(pthread_create(&thread, NULL, what, target) == 0);
    usleep(after_us);
    CHECK(pthread_cancel(thread) == 0);
    CHECK(pthread_join(thread, &result) == 0 && result == PTHREAD_CANCELED);
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
    /* A fork waits for the locks of the device. */
    pid_t child = fork();
    if (child == 0)
        _exit(0);
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status));
    RETURNS(0, ibv_destroy_qp(qp));
    env_close(&env);
    return check_end();
}
