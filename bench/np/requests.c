/* The client's work requests. Every READ is compared with what belongs there; every WRITE writes what belongs there. */
#include "np.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../peers/clock.h"

/* The clock's frequency is a variable of each file that includes clock.h. */
void calibrate_clock(void)
{
    clock_calibrate();
}

double ns_since(uint64_t begun)
{
    return ticks_to_ns(ticks_end() - begun);
}

char *buffer_of(const struct client *client, unsigned slot)
{
    return (char *)client->buffers->addr + (size_t)slot * BYTES_MAX;
}

void post(struct client *client, int pair, enum ibv_wr_opcode opcode, unsigned slot, uint64_t offset, size_t size, bool is_signalled)
{
    struct ibv_sge sge = {(uintptr_t)buffer_of(client, slot), (uint32_t)size, client->buffers->lkey};
    struct ibv_send_wr request = {.wr_id = slot, .sg_list = &sge, .num_sge = 1, .opcode = opcode,
                                  .send_flags = is_signalled ? IBV_SEND_SIGNALED : 0, .wr.rdma = {client->base + offset, client->key}},
                       *bad;
    if (ibv_post_send(client->qps[pair], &request, &bad) != 0)
        die("ibv_post_send");
}

int poll_once(struct client *client)
{
    struct ibv_wc wc;
    int count = ibv_poll_cq(client->cq, 1, &wc);
    if (count < 0 || (count == 1 && wc.status != IBV_WC_SUCCESS)) {
        fprintf(stderr, "np: %s\n", count < 0 ? "ibv_poll_cq" : ibv_wc_status_str(wc.status));
        exit(1);
    }
    return count == 0 ? -1 : (int)wc.wr_id;
}

void prepare_write(struct client *client, unsigned slot, uint64_t offset, size_t size)
{
    uint64_t *words = (uint64_t *)buffer_of(client, slot);
    for (size_t i = 0; i < size / 8; i++)
        words[i] = word_at(offset + i * 8);
}

void verify_read(struct client *client, unsigned slot, uint64_t offset, size_t size)
{
    const uint64_t *words = (const uint64_t *)buffer_of(client, slot);
    for (size_t i = 0; i < size / 8; i++) {
        if (words[i] != (client->is_filled ? word_at(offset + i * 8) : 0)) {
            fprintf(stderr, "np: wrong data at offset %llu\n", (unsigned long long)(offset + i * 8));
            exit(1);
        }
    }
    memset(buffer_of(client, slot), 0xa5, size);
}

double one_request(struct client *client, int pair, enum ibv_wr_opcode opcode, uint64_t offset, size_t size)
{
    bool is_write = opcode == IBV_WR_RDMA_WRITE;
    if (is_write)
        prepare_write(client, 0, offset, size);
    uint64_t begun = ticks_begin();
    post(client, pair, opcode, 0, offset, size, true);
    while (poll_once(client) < 0)
        ;
    double ns = ns_since(begun);
    if (!is_write)
        verify_read(client, 0, offset, size);
    return ns;
}

const char *name_of(enum ibv_wr_opcode opcode)
{
    return opcode == IBV_WR_RDMA_READ ? "READ" : "WRITE";
}
