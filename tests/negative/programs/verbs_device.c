/*
 * verbs_device: tests the device, its port and tables, protection domains, and unsupported features.
 */
#include "check.h"
#include "env.h"

#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

static void devices(const struct env *env)
{
    int count = -1;
    struct ibv_device **list = ibv_get_device_list(&count);
    CHECK(list != NULL && count == 1 && list[1] == NULL);
    ibv_free_device_list(list);
    ibv_free_device_list(NULL);

    FAILS(EINVAL, ibv_open_device(NULL));
    struct ibv_device foreign = *env->context->device;
    FAILS(EINVAL, ibv_open_device(&foreign));
    MINUS_ONE(EINVAL, ibv_close_device(NULL));
}

static void queries(const struct env *env)
{
    struct ibv_context *context = env->context;
    struct ibv_device_attr attr;
    RETURNS(0, ibv_query_device(context, &attr));
    RETURNS(EINVAL, ibv_query_device(context, NULL));
    RETURNS(EINVAL, ibv_query_device(NULL, &attr));

    struct ibv_device_attr_ex extended;
    struct ibv_query_device_ex_input input = {.comp_mask = 1};
    RETURNS(0, ibv_query_device_ex(context, NULL, &extended));
    RETURNS(EINVAL, ibv_query_device_ex(context, &input, &extended));
    RETURNS(EINVAL, ibv_query_device_ex(context, NULL, NULL));
    struct verbs_context *verbs = verbs_get_ctx(context);
    RETURNS(EINVAL, verbs->query_device_ex(context, NULL, &extended, sizeof attr - 1));
    RETURNS(EINVAL, verbs->query_device_ex(context, NULL, &extended, 0));

    struct ibv_port_attr port;
    RETURNS(0, ibv_query_port(context, ENV_PORT, &port));
    for (int number = 0; number < 256; number++)
        if (number != ENV_PORT)
            RETURNS(EINVAL, ibv_query_port(context, (uint8_t)number, &port));
    CHECK(ibv_query_port(context, ENV_PORT, NULL) == EINVAL);
}

/* All queries of a GID agree. Entries without an address are all zero, and are not listed. */
static void gids(const struct env *env)
{
    struct ibv_gid_entry listed[64];
    ssize_t count = ibv_query_gid_table(env->context, listed, 64, 0);
    CHECK(count >= 1 && count < env->port.gid_tbl_len);
    int found = 0, empty = 0;
    for (int index = 0; index < env->port.gid_tbl_len; index++) {
        const union ibv_gid nothing = {.raw = {0}};
        struct ibv_gid_entry entry;
        union ibv_gid gid;
        memset(&gid, 0xff, sizeof gid);
        CHECK(ibv_query_gid(env->context, ENV_PORT, index, &gid) == 0);
        int code = ibv_query_gid_ex(env->context, ENV_PORT, (uint32_t)index, &entry, 0);
        if (code == ENODATA) {
            empty++;
            CHECK(memcmp(&gid, &nothing, sizeof gid) == 0);
            for (ssize_t i = 0; i < count; i++)
                CHECK(listed[i].gid_index != (uint32_t)index);
            continue;
        }
        CHECK(code == 0 && found < count);
        CHECK(memcmp(&gid, &nothing, sizeof gid) != 0 && memcmp(&gid, &entry.gid, sizeof gid) == 0);
        CHECK(memcmp(&entry, &listed[found], sizeof entry) == 0 && entry.gid_index == (uint32_t)index);
        found++;
    }
    CHECK(found == count && empty >= 1);
}

static void tables(const struct env *env)
{
    struct ibv_context *context = env->context;
    union ibv_gid gid;
    int entries = env->port.gid_tbl_len;
    CHECK(ibv_query_gid(context, ENV_PORT, entries - 1, &gid) == 0);
    MINUS_ONE(EINVAL, ibv_query_gid(context, ENV_PORT, entries, &gid));
    MINUS_ONE(EINVAL, ibv_query_gid(context, ENV_PORT, -1, &gid));
    MINUS_ONE(EINVAL, ibv_query_gid(context, 0, 0, &gid));
    MINUS_ONE(EINVAL, ibv_query_gid(context, ENV_PORT + 1, 0, &gid));
    MINUS_ONE(EINVAL, ibv_query_gid(context, ENV_PORT, 0, NULL));

    struct ibv_gid_entry entry;
    RETURNS(0, ibv_query_gid_ex(context, ENV_PORT, 0, &entry, 0));
    RETURNS(ENODATA, ibv_query_gid_ex(context, ENV_PORT, (uint32_t)entries - 1, &entry, 0));
    RETURNS(EINVAL, ibv_query_gid_ex(context, ENV_PORT, (uint32_t)entries, &entry, 0));
    RETURNS(EINVAL, ibv_query_gid_ex(context, ENV_PORT, UINT32_MAX, &entry, 0));
    RETURNS(EINVAL, ibv_query_gid_ex(context, ENV_PORT + 1, 0, &entry, 0));
    RETURNS(EOPNOTSUPP, ibv_query_gid_ex(context, ENV_PORT, 0, &entry, 1));
    RETURNS(EINVAL, ibv_query_gid_ex(context, ENV_PORT, 0, NULL, 0));
    CHECK(ibv_query_gid_table(context, &entry, 0, 0) == -EINVAL);
    CHECK(ibv_query_gid_table(context, NULL, 16, 0) == -EINVAL);
    CHECK(ibv_query_gid_table(context, &entry, 1, 1) == -EOPNOTSUPP);

    __be16 pkey;
    MINUS_ONE(EINVAL, ibv_query_pkey(context, ENV_PORT, 1, &pkey));
    MINUS_ONE(EINVAL, ibv_query_pkey(context, ENV_PORT, -1, &pkey));
    MINUS_ONE(EINVAL, ibv_query_pkey(context, ENV_PORT + 1, 0, &pkey));
    MINUS_ONE(EINVAL, ibv_query_pkey(context, ENV_PORT, 0, NULL));
    MINUS_ONE(EINVAL, ibv_get_pkey_index(context, ENV_PORT, 0x3412));
    MINUS_ONE(EINVAL, ibv_get_pkey_index(context, ENV_PORT + 1, 0xffff));
}

static void events(const struct env *env)
{
    struct ibv_async_event event;
    struct ibv_cq *cq;
    void *cq_context;
    env_nonblocking(env->context->async_fd);
    MINUS_ONE(EAGAIN, ibv_get_async_event(env->context, &event));
    MINUS_ONE(EINVAL, ibv_get_async_event(NULL, &event));
    env_nonblocking(env->channel->fd);
    MINUS_ONE(EAGAIN, ibv_get_cq_event(env->channel, &cq, &cq_context));
    MINUS_ONE(EINVAL, ibv_get_cq_event(NULL, &cq, &cq_context));
    ibv_ack_async_event(NULL);
    ibv_ack_cq_events(env->cq, 0);
}

/* The name functions must not crash for unknown values. */
static void names(void)
{
    CHECK(ibv_event_type_str((enum ibv_event_type)9999) != NULL);
    CHECK(ibv_event_type_str((enum ibv_event_type)-1) != NULL);
    CHECK(ibv_wc_status_str((enum ibv_wc_status)9999) != NULL);
    CHECK(ibv_node_type_str((enum ibv_node_type)9999) != NULL);
    CHECK(ibv_port_state_str((enum ibv_port_state)9999) != NULL);
    CHECK(ibv_rate_to_mult((enum ibv_rate)9999) == -1);
    CHECK(ibv_rate_to_mbps((enum ibv_rate)9999) == -1);
    CHECK(mult_to_ibv_rate(-7) == IBV_RATE_MAX && mbps_to_ibv_rate(-7) == IBV_RATE_MAX);
}

/* A protection domain cannot be deallocated while an object of it exists. */
static void protection_domains(const struct env *env)
{
    FAILS(EINVAL, ibv_alloc_pd(NULL));
    RETURNS(EINVAL, ibv_dealloc_pd(NULL));

    struct ibv_pd *pd = ibv_alloc_pd(env->context);
    struct ibv_mr *mr = ibv_reg_mr(pd, env->buffer, ENV_BYTES, ENV_ACCESS);
    RETURNS(EBUSY, ibv_dealloc_pd(pd));
    RETURNS(0, ibv_dereg_mr(mr));
    struct ibv_mw *mw = ibv_alloc_mw(pd, IBV_MW_TYPE_1);
    RETURNS(EBUSY, ibv_dealloc_pd(pd));
    RETURNS(0, ibv_dealloc_mw(mw));
    struct ibv_srq_init_attr srq_init = {.attr = {.max_wr = 1, .max_sge = 1}};
    struct ibv_srq *srq = ibv_create_srq(pd, &srq_init);
    RETURNS(EBUSY, ibv_dealloc_pd(pd));
    RETURNS(0, ibv_destroy_srq(srq));
    struct ibv_qp_attr attr = env_attr(env, 0);
    struct ibv_ah *ah = ibv_create_ah(pd, &attr.ah_attr);
    RETURNS(EBUSY, ibv_dealloc_pd(pd));
    RETURNS(0, ibv_destroy_ah(ah));
    struct ibv_qp_init_attr init = env_init(env, IBV_QPT_RC);
    struct ibv_qp *qp = ibv_create_qp(pd, &init);
    RETURNS(EBUSY, ibv_dealloc_pd(pd));
    RETURNS(0, ibv_destroy_qp(qp));
    RETURNS(0, ibv_dealloc_pd(pd));
}

static void parent_domains(const struct env *env)
{
    struct ibv_td_init_attr td_init = {.comp_mask = 1};
    FAILS(EINVAL, ibv_alloc_td(env->context, &td_init));
    td_init.comp_mask = 0;
    struct ibv_td *td = ibv_alloc_td(env->context, &td_init);
    struct ibv_pd *pd = ibv_alloc_pd(env->context);
    struct ibv_parent_domain_init_attr init = {.pd = NULL, .td = td};
    FAILS(EINVAL, ibv_alloc_parent_domain(env->context, &init));
    init = (struct ibv_parent_domain_init_attr){.pd = pd, .comp_mask = 1u << 31};
    FAILS(EOPNOTSUPP, ibv_alloc_parent_domain(env->context, &init));
    init = (struct ibv_parent_domain_init_attr){.pd = pd, .td = td};
    struct ibv_pd *parent = ibv_alloc_parent_domain(env->context, &init);
    CHECK(parent != NULL);
    RETURNS(EBUSY, ibv_dealloc_pd(pd));
    RETURNS(EBUSY, ibv_dealloc_td(td));
    init = (struct ibv_parent_domain_init_attr){.pd = parent};
    FAILS(EINVAL, ibv_alloc_parent_domain(env->context, &init));
    RETURNS(0, ibv_dealloc_pd(parent));
    RETURNS(0, ibv_dealloc_td(td));

    struct ibv_context *other = ibv_open_device(env->context->device);
    init = (struct ibv_parent_domain_init_attr){.pd = pd};
    FAILS(EINVAL, ibv_alloc_parent_domain(other, &init));
    RETURNS(0, ibv_dealloc_pd(pd));
    CHECK(ibv_close_device(other) == 0);
}

/* Allocating one more than the limit fails with ENOMEM. It succeeds after a deallocation. */
static void limit_of_protection_domains(const struct env *env)
{
    unsigned room = (unsigned)env->attr.max_pd - 1;
    struct ibv_pd **pds = calloc(room, sizeof *pds);
    for (unsigned i = 0; i < room; i++)
        if ((pds[i] = ibv_alloc_pd(env->context)) == NULL)
            die("protection domain %u of %u", i, room);
    FAILS(ENOMEM, ibv_alloc_pd(env->context));
    RETURNS(0, ibv_dealloc_pd(pds[0]));
    CHECK((pds[0] = ibv_alloc_pd(env->context)) != NULL);
    for (unsigned i = 0; i < room; i++)
        if (ibv_dealloc_pd(pds[i]) != 0)
            die("protection domain %u is in use", i);
    free(pds);
}

static void unsupported_features(const struct env *env)
{
    struct ibv_context *context = env->context;
    struct ibv_alloc_dm_attr no_length = {.length = 0};
    FAILS(EINVAL, ibv_alloc_dm(context, &no_length));
    struct ibv_alloc_dm_attr unknown_field = {.length = 64, .comp_mask = 1};
    FAILS(EINVAL, ibv_alloc_dm(context, &unknown_field));
    struct ibv_alloc_dm_attr too_much = {.length = (size_t)1 << 60};
    FAILS(ENOMEM, ibv_alloc_dm(context, &too_much));
    struct ibv_counters_init_attr counters = {0};
    FAILS(EOPNOTSUPP, ibv_create_counters(context, &counters));
    struct ibv_wq_init_attr wq = {.wq_type = IBV_WQT_RQ, .max_wr = 1, .max_sge = 1, .pd = env->pd, .cq = env->cq};
    FAILS(EOPNOTSUPP, ibv_create_wq(context, &wq));
    struct ibv_rwq_ind_table_init_attr table = {0};
    FAILS(EOPNOTSUPP, ibv_create_rwq_ind_table(context, &table));
    FAILS(EOPNOTSUPP, ibv_alloc_null_mr(env->pd));
    FAILS(EOPNOTSUPP, ibv_reg_dmabuf_mr(env->pd, 0, 4096, 0, -1, ENV_ACCESS));
    FAILS(EOPNOTSUPP, ibv_import_device(env->context->cmd_fd));
    FAILS(EINVAL, ibv_import_device(-1));
    FAILS(EINVAL, ibv_import_device(env->context->async_fd));
    int other_device = open("/dev/zero", O_RDONLY);
    FAILS(ENODEV, ibv_import_device(other_device));
    CHECK(close(other_device) == 0);
    FAILS(EOPNOTSUPP, ibv_import_pd(context, 1));
    FAILS(EOPNOTSUPP, ibv_import_mr(env->pd, 1));

    struct ibv_qp *qp = env_qp(env, IBV_QPT_UD);
    struct ibv_ece ece = {0};
    RETURNS(EOPNOTSUPP, ibv_set_ece(qp, &ece));
    RETURNS(EOPNOTSUPP, ibv_query_ece(qp, &ece));
    struct ibv_flow_attr flow = {.port = ENV_PORT};
    FAILS(EOPNOTSUPP, ibv_create_flow(qp, &flow));
    struct ibv_modify_cq_attr moderation = {.attr_mask = IBV_CQ_ATTR_MODERATE};
    RETURNS(EOPNOTSUPP, ibv_modify_cq(env->cq, &moderation));
    RETURNS(0, ibv_destroy_qp(qp));
}

/* Objects that exist when the program closes the device can still be destroyed. */
static void destroy_after_close(void)
{
    struct env env = env_open();
    struct ibv_qp *qp = env_qp(&env, IBV_QPT_RC);
    env_advance(&env, qp, qp->qp_num, IBV_QPS_RTS);
    CHECK(ibv_close_device(env.context) == 0);
    RETURNS(0, ibv_destroy_qp(qp));
    RETURNS(0, ibv_dereg_mr(env.mr));
    RETURNS(0, ibv_destroy_cq(env.cq));
    RETURNS(0, ibv_destroy_comp_channel(env.channel));
    RETURNS(0, ibv_dealloc_pd(env.pd));
}

int main(void)
{
    struct env env = env_open();
    devices(&env);
    queries(&env);
    gids(&env);
    tables(&env);
    events(&env);
    names();
    protection_domains(&env);
    parent_domains(&env);
    limit_of_protection_domains(&env);
    unsupported_features(&env);
    destroy_after_close();
    env_close(&env);
    return check_end();
}
