/*
 * env.h: a device with the objects that most programs of this directory need. An unexpected failure ends the program at
 * once.
 */
#ifndef ENV_H
#define ENV_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <infiniband/verbs.h>

enum {
    ENV_PORT = 1,
    ENV_BYTES = 64 << 10, /* the size of the buffer */
    ENV_DEPTH = 16,       /* the depth of a queue pair's queues */
    ENV_SGES = 2,
    ENV_INLINE = 64,
    ENV_PSN = 0xfffff0, /* PSNs wrap soon */
    ENV_QKEY = 0x11111111,
};

#define ENV_ACCESS                                                                                             \
    (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC |    \
     IBV_ACCESS_MW_BIND)

struct env {
    struct ibv_context *context;
    struct ibv_device_attr attr;
    struct ibv_port_attr port;
    union ibv_gid gid;
    struct ibv_pd *pd;
    struct ibv_comp_channel *channel;
    struct ibv_cq *cq; /* events go to `channel` */
    uint8_t *buffer;
    struct ibv_mr *mr; /* the whole buffer, with all access flags */
};

/* Prints the reason and exits. */
void die(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));

struct env env_open(void);
void env_close(struct env *env);

/* Returns the attributes to create a queue pair of this type. */
struct ibv_qp_init_attr env_init(const struct env *env, enum ibv_qp_type type);
struct ibv_qp *env_qp(const struct env *env, enum ibv_qp_type type);

/* Returns attributes that are valid for every transition, for a peer of that number at our own address. */
struct ibv_qp_attr env_attr(const struct env *env, uint32_t peer_qpn);

/* Returns the attributes that a transition to this state needs: RESET to INIT, INIT to RTR or RTR to RTS. */
int env_mask(enum ibv_qp_type type, enum ibv_qp_state to);

/* Takes a queue pair from RESET through the states to `state` (INIT, RTR, RTS or SQD). */
void env_advance(const struct env *env, struct ibv_qp *qp, uint32_t peer_qpn, enum ibv_qp_state state);

/* Connects two queue pairs with each other, to RTS. */
void env_connect(const struct env *env, struct ibv_qp *left, struct ibv_qp *right);

/* Returns the next completion. The program ends after a timeout without one. */
struct ibv_wc env_poll(struct ibv_cq *cq);
bool env_poll_within(struct ibv_cq *cq, struct ibv_wc *wc, double seconds);

void env_nonblocking(int fd);
double seconds_now(void);

#endif
