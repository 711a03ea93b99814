/*
 * lab.h: a device with the objects that most programs of this directory need. An unexpected failure ends the program at
 * once.
 */
#ifndef LAB_H
#define LAB_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <infiniband/verbs.h>

enum {
    LAB_PORT = 1,
    LAB_BYTES = 64 << 10, /* of the buffer */
    LAB_DEPTH = 16,       /* of the queues of a queue pair */
    LAB_SGES = 2,
    LAB_INLINE = 64,
    LAB_PSN = 0xfffff0, /* close to where PSNs wrap */
    LAB_QKEY = 0x11111111,
};

#define LAB_ACCESS                                                                                             \
    (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC |    \
     IBV_ACCESS_MW_BIND)

struct lab {
    struct ibv_context *context;
    struct ibv_device_attr attr;
    struct ibv_port_attr port;
    union ibv_gid gid;
    struct ibv_pd *pd;
    struct ibv_comp_channel *channel;
    struct ibv_cq *cq; /* events go to `channel` */
    uint8_t *buffer;
    struct ibv_mr *mr; /* of the whole buffer, all access */
};

/* Prints the reason and exits. */
void die(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));

struct lab lab_open(void);
void lab_close(struct lab *lab);

/* The attributes to create a queue pair of this kind. */
struct ibv_qp_init_attr lab_init(const struct lab *lab, enum ibv_qp_type type);
struct ibv_qp *lab_qp(const struct lab *lab, enum ibv_qp_type type);

/* Valid attributes for every transition, for a peer of that number at our own address. */
struct ibv_qp_attr lab_attr(const struct lab *lab, uint32_t peer_qpn);

/* The attributes that a kind of queue pair needs for RESET to INIT, INIT to RTR and RTR to RTS. */
int lab_mask(enum ibv_qp_type type, enum ibv_qp_state to);

/* Takes a queue pair from RESET through the states to `state` (INIT, RTR, RTS or SQD). */
void lab_advance(const struct lab *lab, struct ibv_qp *qp, uint32_t peer_qpn, enum ibv_qp_state state);

/* Two queue pairs in RTS, each the other's peer. */
void lab_connect(const struct lab *lab, struct ibv_qp *left, struct ibv_qp *right);

/* The next completion; gives up after some seconds. */
struct ibv_wc lab_poll(struct ibv_cq *cq);
bool lab_poll_within(struct ibv_cq *cq, struct ibv_wc *wc, double seconds);

void lab_nonblocking(int fd);
double seconds_now(void);

#endif
