/*
 * verbs_device: the device, its port and tables, protection domains, and unsupported features.
 */
#include "check.h"
#include "lab.h"

#include <fcntl.h>
#include <stdlib.h>

static void devices(const struct lab *lab)
{
    int count = -1;
    struct ibv_device **list = ibv_get_device_list(&count);
    CHECK(list != NULL && count == 1 && list[1] == NULL);
    ibv_free_device_list(list);
    ibv_free_device_list(NULL);

    REFUSED(EINVAL, ibv_open_device(NULL));
    struct ibv_device foreign = *lab->context->device;
    REFUSED(EINVAL, ibv_open_device(&foreign));
    MINUS_ONE(EINVAL, ibv_close_device(NULL));
}

static void queries(const struct lab *lab)
{
    struct ibv_context *context = lab->context;
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
    RETURNS(0, ibv_query_port(context, LAB_PORT, &port));
    for (int number = 0; number < 256; number++)
        if (number != LAB_PORT)
            RETURNS(EINVAL, ibv_query_port(context, (uint8_t)number, &port));
    CHECK(ibv_query_port(context, LAB_PORT, NULL) == EINVAL);
}

/* All queries of a GID agree; entries without an address are all zero, and not listed. */
static void gids(const struct lab *lab)
{
    struct ibv_gid_entry listed[64];
    ssize_t count = ibv_query_gid_table(lab->context, listed, 64, 0);
    CHECK(count >= 1 && count < lab->port.gid_tbl_len);
    int found = 0, empty = 0;
    for (int index = 0; index < lab->port.gid_tbl_len; index++) {
        const union ibv_gid nothing = {.raw = {0}};
        struct ibv_gid_entry entry;
        union ibv_gid gid;
        memset(&gid, 0xff, sizeof gid);
        CHECK(ibv_query_gid(lab->context, LAB_PORT, index, &gid) == 0);
        int code = ibv_query_gid_ex(lab->context, LAB_PORT, (uint32_t)index, &entry, 0);
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

static void tables(const struct lab *lab)
{
    struct ibv_context *context = lab->context;
    union ibv_gid gid;
    int entries = lab->port.gid_tbl_len;
    CHECK(ibv_query_gid(context, LAB_PORT, entries - 1, &gid) == 0);
    MINUS_ONE(EINVAL, ibv_query_gid(context, LAB_PORT, entries, &gid));
    MINUS_ONE(EINVAL, ibv_query_gid(context, LAB_PORT, -1, &gid));
    MINUS_ONE(EINVAL, ibv_query_gid(context, 0, 0, &gid));
    MINUS_ONE(EINVAL, ibv_query_gid(context, LAB_PORT + 1, 0, &gid));
    MINUS_ONE(EINVAL, ibv_query_gid(context, LAB_PORT, 0, NULL));

    struct ibv_gid_entry entry;
    RETURNS(0, ibv_query_gid_ex(context, LAB_PORT, 0, &entry, 0));
    RETURNS(ENODATA, ibv_query_gid_ex(context, LAB_PORT, (uint32_t)entries - 1, &entry, 0));
    RETURNS(EINVAL, ibv_query_gid_ex(context, LAB_PORT, (uint32_t)entries, &entry, 0));
    RETURNS(EINVAL, ibv_query_gid_ex(context, LAB_PORT, UINT32_MAX, &entry, 0));
    RETURNS(EINVAL, ibv_query_gid_ex(context, LAB_PORT + 1, 0, &entry, 0));
    RETURNS(EOPNOTSUPP, ibv_query_gid_ex(context, LAB_PORT, 0, &entry, 1));
    RETURNS(EINVAL, ibv_query_gid_ex(context, LAB_PORT, 0, NULL, 0));
    CHECK(ibv_query_gid_table(context, &entry, 0, 0) == -EINVAL);
    CHECK(ibv_query_gid_table(context, NULL, 16, 0) == -EINVAL);
    CHECK(ibv_query_gid_table(context, &entry, 1, 1) == -EOPNOTSUPP);

    __be16 pkey;
    MINUS_ONE(EINVAL, ibv_query_pkey(context, LAB_PORT, 1, &pkey));
    MINUS_ONE(EINVAL, ibv_query_pkey(context, LAB_PORT, -1, &pkey));
    MINUS_ONE(EINVAL, ibv_query_pkey(context, LAB_PORT + 1, 0, &pkey));
    MINUS_ONE(EINVAL, ibv_query_pkey(context, LAB_PORT, 0, NULL));
    MINUS_ONE(EINVAL, ibv_get_pkey_index(context, LAB_PORT, 0x3412));
    MINUS_ONE(EINVAL, ibv_get_pkey_index(context, LAB_PORT + 1, 0xffff));
}

static void events(const struct lab *lab)
{
    struct ibv_async_event event;
    struct ibv_cq *cq;
    void *cq_context;
    lab_nonblocking(lab->context->async_fd);
    MINUS_ONE(EAGAIN, ibv_get_async_event(lab->context, &event));
    MINUS_ONE(EINVAL, ibv_get_async_event(NULL, &event));
    lab_nonblocking(lab->channel->fd);
    MINUS_ONE(EAGAIN, ibv_get_cq_event(lab->channel, &cq, &cq_context));
    MINUS_ONE(EINVAL, ibv_get_cq_event(NULL, &cq, &cq_context));
    ibv_ack_async_event(NULL);
    ibv_ack_cq_events(lab->cq, 0);
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

/* A protection domain is busy while an object of it exists. */
static void protection_domains(const struct lab *lab)
{
    REFUSED(EINVAL, ibv_alloc_pd(NULL));
    RETURNS(EINVAL, ibv_dealloc_pd(NULL));

    struct ibv_pd *pd = ibv_alloc_pd(lab->context);
    struct ibv_mr *mr = ibv_reg_mr(pd, lab->buffer, LAB_BYTES, LAB_ACCESS);
    RETURNS(EBUSY, ibv_dealloc_pd(pd));
    RETURNS(0, ibv_dereg_mr(mr));
    struct ibv_mw *mw = ibv_alloc_mw(pd, IBV_MW_TYPE_1);
    RETURNS(EBUSY, ibv_dealloc_pd(pd));
    RETURNS(0, ibv_dealloc_mw(mw));
    struct ibv_srq_init_attr srq_init = {.attr = {.max_wr = 1, .max_sge = 1}};
    struct ibv_srq *srq = ibv_create_srq(pd, &srq_init);
    RETURNS(EBUSY, ibv_dealloc_pd(pd));
    RETURNS(0, ibv_destroy_srq(srq));
    struct ibv_qp_attr attr = lab_attr(lab, 0);
    struct ibv_ah *ah = ibv_create_ah(pd, &attr.ah_attr);
    RETURNS(EBUSY, ibv_dealloc_pd(pd));
    RETURNS(0, ibv_destroy_ah(ah));
    struct ibv_qp_init_attr init = lab_init(lab, IBV_QPT_RC);
    struct ibv_qp *qp = ibv_create_qp(pd, &init);
    RETURNS(EBUSY, ibv_dealloc_pd(pd));
    RETURNS(0, ibv_destroy_qp(qp));
    RETURNS(0, ibv_dealloc_pd(pd));
}

static void parent_domains(const struct lab *lab)
{
    struct ibv_td_init_attr td_init = {.comp_mask = 1};
    REFUSED(EINVAL, ibv_alloc_td(lab->context, &td_init));
    td_init.comp_mask = 0;
    struct ibv_td *td = ibv_alloc_td(lab->context, &td_init);
    struct ibv_pd *pd = ibv_alloc_pd(lab->context);
    struct ibv_parent_domain_init_attr init = {.pd = NULL, .td = td};
    REFUSED(EINVAL, ibv_alloc_parent_domain(lab->context, &init));
    init = (struct ibv_parent_domain_init_attr){.pd = pd, .comp_mask = 1u << 31};
    REFUSED(EOPNOTSUPP, ibv_alloc_parent_domain(lab->context, &init));
    init = (struct ibv_parent_domain_init_attr){.pd = pd, .td = td};
    struct ibv_pd *parent = ibv_alloc_parent_domain(lab->context, &init);
    CHECK(parent != NULL);
    RETURNS(EBUSY, ibv_dealloc_pd(pd));
    RETURNS(EBUSY, ibv_dealloc_td(td));
    init = (struct ibv_parent_domain_init_attr){.pd = parent};
    REFUSED(EINVAL, ibv_alloc_parent_domain(lab->context, &init));
    RETURNS(0, ibv_dealloc_pd(parent));
    RETURNS(0, ibv_dealloc_td(td));

    struct ibv_context *other = ibv_open_device(lab->context->device);
    init = (struct ibv_parent_domain_init_attr){.pd = pd};
    REFUSED(EINVAL, ibv_alloc_parent_domain(other, &init));
    RETURNS(0, ibv_dealloc_pd(pd));
    CHECK(ibv_close_device(other) == 0);
}

/* One more than the device has: ENOMEM; after a deallocation the next one succeeds. */
static void limit_of_protection_domains(const struct lab *lab)
{
    unsigned room = (unsigned)lab->attr.max_pd - 1;
    struct ibv_pd **pds = calloc(room, sizeof *pds);
    for (unsigned i = 0; i < room; i++)
        if ((pds[i] = ibv_alloc_pd(lab->context)) == NULL)
            die("protection domain %u of %u", i, room);
    REFUSED(ENOMEM, ibv_alloc_pd(lab->context));
    RETURNS(0, ibv_dealloc_pd(pds[0]));
    CHECK((pds[0] = ibv_alloc_pd(lab->context)) != NULL);
    for (unsigned i = 0; i < room; i++)
        if (ibv_dealloc_pd(pds[i]) != 0)
            die("protection domain %u is in use", i);
    free(pds);
}

static void not_there(const struct lab *lab)
{
    struct ibv_context *context = lab->context;
    struct ibv_alloc_dm_attr no_length = {.length = 0};
    REFUSED(EINVAL, ibv_alloc_dm(context, &no_length));
    struct ibv_alloc_dm_attr unknown_field = {.length = 64, .comp_mask = 1};
    REFUSED(EINVAL, ibv_alloc_dm(context, &unknown_field));
    struct ibv_alloc_dm_attr too_much = {.length = (size_t)1 << 60};
    REFUSED(ENOMEM, ibv_alloc_dm(context, &too_much));
    struct ibv_counters_init_attr counters = {0};
    REFUSED(EOPNOTSUPP, ibv_create_counters(context, &counters));
    struct ibv_wq_init_attr wq = {.wq_type = IBV_WQT_RQ, .max_wr = 1, .max_sge = 1, .pd = lab->pd, .cq = lab->cq};
    REFUSED(EOPNOTSUPP, ibv_create_wq(context, &wq));
    struct ibv_rwq_ind_table_init_attr table = {0};
    REFUSED(EOPNOTSUPP, ibv_create_rwq_ind_table(context, &table));
    REFUSED(EOPNOTSUPP, ibv_alloc_null_mr(lab->pd));
    REFUSED(EOPNOTSUPP, ibv_reg_dmabuf_mr(lab->pd, 0, 4096, 0, -1, LAB_ACCESS));
    REFUSED(EOPNOTSUPP, ibv_import_device(lab->context->cmd_fd));
    REFUSED(EOPNOTSUPP, ibv_import_pd(context, 1));
    REFUSED(EOPNOTSUPP, ibv_import_mr(lab->pd, 1));

    struct ibv_qp *qp = lab_qp(lab, IBV_QPT_UD);
    struct ibv_ece ece = {0};
    RETURNS(EOPNOTSUPP, ibv_set_ece(qp, &ece));
    RETURNS(EOPNOTSUPP, ibv_query_ece(qp, &ece));
    union ibv_gid group = {.raw = {0xff, 0x0e}};
    RETURNS(EOPNOTSUPP, ibv_attach_mcast(qp, &group, 0));
    RETURNS(EOPNOTSUPP, ibv_detach_mcast(qp, &group, 0));
    struct ibv_flow_attr flow = {.port = LAB_PORT};
    REFUSED(EOPNOTSUPP, ibv_create_flow(qp, &flow));
    struct ibv_modify_cq_attr moderation = {.attr_mask = IBV_CQ_ATTR_MODERATE};
    RETURNS(EOPNOTSUPP, ibv_modify_cq(lab->cq, &moderation));
    RETURNS(0, ibv_destroy_qp(qp));
}

/* Objects that exist when the program closes the device can still be destroyed. */
static void leftovers(void)
{
    struct lab lab = lab_open();
    struct ibv_qp *qp = lab_qp(&lab, IBV_QPT_RC);
    lab_advance(&lab, qp, qp->qp_num, IBV_QPS_RTS);
    CHECK(ibv_close_device(lab.context) == 0);
    RETURNS(0, ibv_destroy_qp(qp));
    RETURNS(0, ibv_dereg_mr(lab.mr));
    RETURNS(0, ibv_destroy_cq(lab.cq));
    RETURNS(0, ibv_destroy_comp_channel(lab.channel));
    RETURNS(0, ibv_dealloc_pd(lab.pd));
}

int main(void)
{
    struct lab lab = lab_open();
    devices(&lab);
    queries(&lab);
    gids(&lab);
    tables(&lab);
    events(&lab);
    names();
    protection_domains(&lab);
    parent_domains(&lab);
    limit_of_protection_domains(&lab);
    not_there(&lab);
    leftovers();
    lab_close(&lab);
    return check_end();
}
