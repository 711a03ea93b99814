//! Compares bindgen's types and the constants with the installed header and `terrace.h`: a C program prints sizes and offsets, which
//! must equal those in Rust. Needs gcc and libibverbs-dev, which `make setup` installs.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::mem::{offset_of, size_of};
use std::process::Command;

use terrace_ibverbs::abi::terrace::{TERRACE_COMMIT, terrace_append_wr};
use terrace_ibverbs::abi::*;
use terrace_nic::{APPEND_LEN_MAX, WcOpcode};

/// The C name of a field whose Rust name avoids a keyword.
fn c_field(field: &str) -> &str {
    field.strip_suffix('_').unwrap_or(field)
}

/// Sizes, offsets and constants, under the names that the C program prints.
type Layout = BTreeMap<String, usize>;

macro_rules! layouts {
    ($($structure:ident { $($field:ident)* })*) => {
        fn rust_layout() -> Layout {
            let mut layout = Layout::new();
            $(
                layout.insert(stringify!($structure).into(), size_of::<$structure>());
                $(
                    let name = format!("{}.{}", stringify!($structure), c_field(stringify!($field)));
                    layout.insert(name, offset_of!($structure, $field));
                )*
            )*
            layout
        }
    };
}

layouts! {
    ibv_device { _ops node_type transport_type name dev_name dev_path ibdev_path }
    ibv_context { device ops cmd_fd async_fd num_comp_vectors mutex abi_compat }
    ibv_context_ops { _compat_query_device _compat_query_port _compat_alloc_pd _compat_dealloc_pd _compat_reg_mr _compat_rereg_mr _compat_dereg_mr alloc_mw bind_mw dealloc_mw _compat_create_cq poll_cq req_notify_cq _compat_cq_event _compat_resize_cq _compat_destroy_cq _compat_create_srq _compat_modify_srq _compat_query_srq _compat_destroy_srq post_srq_recv _compat_create_qp _compat_query_qp _compat_modify_qp _compat_destroy_qp post_send post_recv _compat_create_ah _compat_destroy_ah _compat_attach_mcast _compat_detach_mcast _compat_async_event }
    ibv_gid_entry { gid gid_index port_num gid_type ndev_ifindex }
    ibv_device_attr { fw_ver node_guid sys_image_guid max_mr_size page_size_cap vendor_id vendor_part_id hw_ver max_qp max_qp_wr device_cap_flags max_sge max_sge_rd max_cq max_cqe max_mr max_pd max_qp_rd_atom max_ee_rd_atom max_res_rd_atom max_qp_init_rd_atom max_ee_init_rd_atom atomic_cap max_ee max_rdd max_mw max_raw_ipv6_qp max_raw_ethy_qp max_mcast_grp max_mcast_qp_attach max_total_mcast_qp_attach max_ah max_fmr max_map_per_fmr max_srq max_srq_wr max_srq_sge max_pkeys local_ca_ack_delay phys_port_cnt }
    ibv_device_attr_ex { orig_attr comp_mask odp_caps completion_timestamp_mask hca_core_clock device_cap_flags_ex tso_caps rss_caps max_wq_type_rq packet_pacing_caps raw_packet_caps tm_caps cq_mod_caps max_dm_size pci_atomic_caps xrc_odp_caps phys_port_cnt_ex }
    ibv_odp_caps { general_caps per_transport_caps }
    ibv_query_device_ex_input { comp_mask }
    ibv_port_attr { state max_mtu active_mtu gid_tbl_len port_cap_flags max_msg_sz bad_pkey_cntr qkey_viol_cntr pkey_tbl_len lid sm_lid lmc max_vl_num sm_sl subnet_timeout init_type_reply active_width active_speed phys_state link_layer flags port_cap_flags2 }
    ibv_async_event { element event_type }
    ibv_wc { wr_id status opcode vendor_err byte_len qp_num src_qp wc_flags pkey_index slid sl dlid_path_bits }
    ibv_mw_bind_info { mr addr length mw_access_flags }
    ibv_pd { context handle }
    ibv_td { context }
    ibv_td_init_attr { comp_mask }
    ibv_mr { context pd addr length handle lkey rkey }
    ibv_mw { context pd rkey handle type_ }
    ibv_global_route { dgid flow_label sgid_index hop_limit traffic_class }
    ibv_grh { version_tclass_flow paylen next_hdr hop_limit sgid dgid }
    ibv_ah_attr { grh dlid sl src_path_bits static_rate is_global port_num }
    ibv_srq_attr { max_wr max_sge srq_limit }
    ibv_srq_init_attr { srq_context attr }
    ibv_srq_init_attr_ex { srq_context attr comp_mask srq_type pd xrcd cq tm_cap }
    ibv_qp_cap { max_send_wr max_recv_wr max_send_sge max_recv_sge max_inline_data }
    ibv_qp_init_attr { qp_context send_cq recv_cq srq cap qp_type sq_sig_all }
    ibv_qp_init_attr_ex { qp_context send_cq recv_cq srq cap qp_type sq_sig_all comp_mask pd xrcd create_flags max_tso_header rwq_ind_tbl rx_hash_conf source_qpn send_ops_flags }
    ibv_qp_attr { qp_state cur_qp_state path_mtu path_mig_state qkey rq_psn sq_psn dest_qp_num qp_access_flags cap ah_attr alt_ah_attr pkey_index alt_pkey_index en_sqd_async_notify sq_draining max_rd_atomic max_dest_rd_atomic min_rnr_timer port_num timeout retry_cnt rnr_retry alt_port_num alt_timeout rate_limit }
    ibv_data_buf { addr length }
    ibv_sge { addr length lkey }
    ibv_send_wr { wr_id next sg_list num_sge opcode send_flags wr qp_type }
    ibv_recv_wr { wr_id next sg_list num_sge }
    ibv_mw_bind { wr_id send_flags bind_info }
    ibv_srq { context srq_context pd handle mutex cond events_completed }
    ibv_qp { context qp_context pd send_cq recv_cq srq handle qp_num state qp_type mutex cond events_completed }
    ibv_qp_ex { qp_base comp_mask wr_id wr_flags wr_atomic_cmp_swp wr_atomic_fetch_add wr_bind_mw wr_local_inv wr_rdma_read wr_rdma_write wr_rdma_write_imm wr_send wr_send_imm wr_send_inv wr_send_tso wr_set_ud_addr wr_set_xrc_srqn wr_set_inline_data wr_set_inline_data_list wr_set_sge wr_set_sge_list wr_start wr_complete wr_abort wr_atomic_write }
    ibv_ece { vendor_id options comp_mask }
    ibv_comp_channel { context fd refcnt }
    ibv_cq { context channel cq_context handle cqe mutex cond comp_events_completed async_events_completed }
    ibv_poll_cq_attr { comp_mask }
    ibv_cq_ex { context channel cq_context handle cqe mutex cond comp_events_completed async_events_completed comp_mask status wr_id start_poll next_poll end_poll read_opcode read_vendor_err read_byte_len read_imm_data read_qp_num read_src_qp read_wc_flags read_slid read_sl read_dlid_path_bits read_completion_ts read_cvlan read_flow_tag read_tm_info read_completion_wallclock_ns }
    ibv_ah { context pd handle }
    ibv_cq_init_attr_ex { cqe cq_context channel comp_vector wc_flags comp_mask flags parent_domain }
    ibv_parent_domain_init_attr { pd td comp_mask alloc free pd_context }
    verbs_context { query_port advise_mr alloc_null_mr read_counters attach_counters_point_flow create_counters destroy_counters reg_dm_mr alloc_dm free_dm modify_flow_action_esp destroy_flow_action create_flow_action_esp modify_qp_rate_limit alloc_parent_domain dealloc_td alloc_td modify_cq post_srq_ops destroy_rwq_ind_table create_rwq_ind_table destroy_wq modify_wq create_wq query_rt_values create_cq_ex priv_ query_device_ex ibv_destroy_flow ABI_placeholder2 ibv_create_flow ABI_placeholder1 open_qp create_qp_ex get_srq_num create_srq_ex open_xrcd close_xrcd _ABI_placeholder3 sz context }
    ib_uverbs_global_route { dgid flow_label sgid_index hop_limit traffic_class reserved }
    ib_uverbs_ah_attr { grh dlid sl src_path_bits static_rate is_global port_num reserved }
    ib_uverbs_qp_attr { qp_attr_mask qp_state cur_qp_state path_mtu path_mig_state qkey rq_psn sq_psn dest_qp_num qp_access_flags ah_attr alt_ah_attr max_send_wr max_recv_wr max_send_sge max_recv_sge max_inline_data pkey_index alt_pkey_index en_sqd_async_notify sq_draining max_rd_atomic max_dest_rd_atomic min_rnr_timer port_num timeout retry_cnt rnr_retry alt_port_num alt_timeout reserved }
    ib_user_path_rec { dgid sgid dlid slid raw_traffic flow_label reversible mtu pkey hop_limit traffic_class numb_path sl mtu_selector rate_selector rate packet_life_time_selector packet_life_time preference }
    ibv_sa_path_rec { dgid sgid dlid slid raw_traffic flow_label hop_limit traffic_class reversible numb_path pkey sl mtu_selector mtu rate_selector rate packet_life_time_selector packet_life_time preference }
    ibv_dm { context memcpy_to_dm memcpy_from_dm comp_mask handle }
    ibv_alloc_dm_attr { length log_align_req comp_mask }
    ibv_values_ex { comp_mask raw_clock }
    terrace_append_wr { wr_id next sg_list num_sge send_flags rkey flags result }
}

/// Structures that newer headers extend at the end, which older programs do not access.
const GROWING: [&str; 3] = ["ibv_port_attr", "ibv_qp_ex", "verbs_context"];

/// Constants that the code uses, from several enumerations.
const CONSTANTS: [(&str, u64); 30] = [
    ("IBV_WR_SEND_WITH_INV", IBV_WR_SEND_WITH_INV as u64),
    ("IBV_WR_ATOMIC_WRITE", IBV_WR_ATOMIC_WRITE as u64),
    ("IBV_WR_BIND_MW", IBV_WR_BIND_MW as u64),
    ("IBV_WC_ATOMIC_WRITE", IBV_WC_ATOMIC_WRITE as u64),
    ("IBV_WC_RECV_RDMA_WITH_IMM", IBV_WC_RECV_RDMA_WITH_IMM as u64),
    ("IBV_WC_GENERAL_ERR", IBV_WC_GENERAL_ERR as u64),
    ("IBV_WC_WITH_INV", IBV_WC_WITH_INV as u64),
    ("IBV_SEND_INLINE", IBV_SEND_INLINE as u64),
    ("IBV_SEND_SOLICITED", IBV_SEND_SOLICITED as u64),
    ("IBV_QPT_UD", IBV_QPT_UD as u64),
    ("IBV_QPS_ERR", IBV_QPS_ERR as u64),
    ("IBV_QP_RATE_LIMIT", IBV_QP_RATE_LIMIT as u64),
    ("IBV_QP_DEST_QPN", IBV_QP_DEST_QPN as u64),
    ("IBV_QP_EX_WITH_ATOMIC_WRITE", IBV_QP_EX_WITH_ATOMIC_WRITE as u64),
    ("IBV_ACCESS_HUGETLB", IBV_ACCESS_HUGETLB as u64),
    ("IBV_ACCESS_OPTIONAL_FIRST", IB_UVERBS_ACCESS_OPTIONAL_FIRST as u64),
    ("IBV_EVENT_SRQ_LIMIT_REACHED", IBV_EVENT_SRQ_LIMIT_REACHED as u64),
    ("IBV_EVENT_QP_LAST_WQE_REACHED", IBV_EVENT_QP_LAST_WQE_REACHED as u64),
    ("IBV_MTU_4096", IBV_MTU_4096 as u64),
    ("IBV_LINK_LAYER_ETHERNET", IBV_LINK_LAYER_ETHERNET as u64),
    ("IBV_GID_TYPE_ROCE_V2", IBV_GID_TYPE_ROCE_V2 as u64),
    ("IBV_DEVICE_MEM_WINDOW_TYPE_2B", IBV_DEVICE_MEM_WINDOW_TYPE_2B as u64),
    ("IBV_ODP_SUPPORT_SRQ_RECV", IBV_ODP_SUPPORT_SRQ_RECV as u64),
    ("IBV_REREG_MR_CHANGE_ACCESS", IBV_REREG_MR_CHANGE_ACCESS as u64),
    ("IBV_CQ_INIT_ATTR_MASK_PD", IBV_CQ_INIT_ATTR_MASK_PD as u64),
    ("IBV_SRQ_LIMIT", IBV_SRQ_LIMIT as u64),
    ("TERRACE_COMMIT", TERRACE_COMMIT as u64),
    ("TERRACE_WC_APPEND", WcOpcode::Append as u64),
    ("TERRACE_APPEND_LEN_MAX", APPEND_LEN_MAX as u64),
    ("IBV_QP_INIT_ATTR_SEND_OPS_FLAGS", IBV_QP_INIT_ATTR_SEND_OPS_FLAGS as u64),
];

/// Where `terrace.h` is.
const INCLUDE: &str = concat!("-I", env!("CARGO_MANIFEST_DIR"), "/include");

/// The C program: it prints one line for each entry of `layout`.
fn program(layout: &Layout) -> String {
    let mut text = String::from(
        "#include <stddef.h>\n#include <stdio.h>\n#include <infiniband/verbs.h>\n#include <infiniband/sa.h>\n\
         #include <rdma/ib_user_verbs.h>\n#include <terrace.h>\n#include <rdma/ib_user_sa.h>\nint main(void) {\n",
    );
    for name in layout.keys() {
        let value = match name.split_once('.') {
            Some((structure, field)) => format!("offsetof(struct {structure}, {field})"),
            None => format!("sizeof(struct {name})"),
        };
        writeln!(text, "printf(\"{name} %zu\\n\", (size_t){value});").expect("writing to a string");
    }
    for (name, _) in CONSTANTS {
        writeln!(text, "printf(\"{name} %llu\\n\", (unsigned long long){name});")
            .expect("writing to a string");
    }
    text + "return 0; }\n"
}

fn run(source: &str) -> BTreeMap<String, u64> {
    let directory = std::env::temp_dir().join(format!("terrace-layout-{}", std::process::id()));
    std::fs::create_dir_all(&directory).expect("a directory");
    let (file, binary) = (directory.join("layout.c"), directory.join("layout"));
    std::fs::write(&file, source).expect("the program");
    let compiled =
        Command::new("gcc").arg(INCLUDE).arg("-o").args([&binary, &file]).output().expect("gcc is installed");
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let printed = Command::new(&binary).output().expect("the program runs").stdout;
    std::fs::remove_dir_all(directory).expect("the directory is removed");
    let text = String::from_utf8(printed).expect("ASCII");
    let line = |line: &str| {
        let (name, value) = line.split_once(' ').expect("name and value");
        (name.to_owned(), value.parse().expect("a number"))
    };
    text.lines().map(line).collect()
}

#[test]
fn layouts_and_constants_are_those_of_the_installed_header() {
    let mut rust_layout = rust_layout();
    let mut theirs = run(&program(&rust_layout));
    // The structure grows at its beginning, so distances to its end are compared.
    let lengths = (rust_layout["verbs_context"], theirs["verbs_context"]);
    rust_layout
        .iter_mut()
        .filter(|(name, _)| name.starts_with("verbs_context."))
        .for_each(|(_, at)| *at = lengths.0 - *at);
    theirs
        .iter_mut()
        .filter(|(name, _)| name.starts_with("verbs_context."))
        .for_each(|(_, at)| *at = lengths.1 - *at);

    for (name, &value) in &rust_layout {
        let c = theirs[name] as usize;
        let fits = if GROWING.contains(&name.as_str()) { c >= value } else { c == value };
        assert!(fits, "{name}: {value} here, {c} in C");
    }
    for (name, value) in CONSTANTS {
        assert_eq!(theirs[name], value, "{name}");
    }
}

#[test]
fn the_newer_builder_function_is_behind_the_old_structure() {
    assert_eq!(offset_of!(newer::QpEx, wr_flush), size_of::<ibv_qp_ex>());
}
