//! The private symbols that hardware providers bind when they are loaded. perftest loads two of them at start, whatever
//! the device; nothing calls these functions, because no device of theirs is ever found.

use std::ffi::{c_int, c_uint, c_void};
use std::ptr::null_mut;

use crate::errno::{EINVAL, EOPNOTSUPP};

/// Defines functions that answer EOPNOTSUPP, for one private node.
macro_rules! unsupported {
    ($($name:ident)*) => {
        $(
            /// EOPNOTSUPP. The arguments, whatever they are, stay where the calling convention puts them.
            #[unsafe(no_mangle)]
            pub extern "C" fn $name() -> c_int {
                EOPNOTSUPP.0
            }
        )*
    };
}

/// Defines functions that do nothing.
macro_rules! nothing {
    ($($name:ident)*) => {
        $(
            /// Does nothing.
            #[unsafe(no_mangle)]
            pub extern "C" fn $name() {}
        )*
    };
}

/// Defines functions that answer null and EOPNOTSUPP.
macro_rules! null {
    ($($name:ident)*) => {
        $(
            /// Null, and EOPNOTSUPP in `errno`.
            #[unsafe(no_mangle)]
            pub extern "C" fn $name() -> *mut c_void {
                EOPNOTSUPP.set();
                null_mut()
            }
        )*
    };
}

/// Defines functions that answer -1 and EINVAL, as for a device without a directory in sysfs.
macro_rules! no_file {
    ($($name:ident)*) => {
        $(
            /// -1, and EINVAL in `errno`.
            #[unsafe(no_mangle)]
            pub extern "C" fn $name() -> c_int {
                EINVAL.set();
                -1
            }
        )*
    };
}

/// Defines the count of attributes of a chain of command buffers: only the first one's, as there are no chains.
macro_rules! final_num_attrs {
    ($($name:ident)*) => {
        $(
            /// The number of attributes that it is given.
            #[unsafe(no_mangle)]
            pub extern "C" fn $name(num_attrs: c_uint, _link: *mut c_void) -> c_uint {
                num_attrs
            }
        )*
    };
}

/// Whether destroying an object of a device that is gone succeeds: a flag of the library that providers read.
#[unsafe(no_mangle)]
pub static private_34__verbs_allow_disassociate_destroy: bool = false;

/// As above.
#[unsafe(no_mangle)]
pub static private_64__verbs_allow_disassociate_destroy: bool = false;

nothing! {
    private_34____verbs_log
    private_34__verbs_init_cq
    private_34__verbs_register_driver_34
    private_34__verbs_set_ops
    private_34__verbs_uninit_context
    private_64____verbs_log
    private_64__ibv_dmabuf_heap_destroy
    private_64__ibv_dmabuf_heap_free
    private_64__verbs_init_cq
    private_64__verbs_register_driver_64
    private_64__verbs_set_ops
    private_64__verbs_uninit_context
}

null! {
    private_34___verbs_init_and_alloc_context
    private_34__verbs_open_device
    private_64___verbs_init_and_alloc_context
    private_64__ibv_dmabuf_heap_alloc
    private_64__ibv_dmabuf_heap_cc_shared_init
    private_64__verbs_open_device
}

no_file! {
    private_34__ibv_read_ibdev_sysfs_file
    private_64__ibv_read_ibdev_sysfs_file
}

final_num_attrs! {
    private_34____ioctl_final_num_attrs
    private_64____ioctl_final_num_attrs
}

unsupported! {
    private_34__execute_ioctl
    private_34__ibv_cmd_advise_mr
    private_34__ibv_cmd_alloc_dm
    private_34__ibv_cmd_alloc_mw
    private_34__ibv_cmd_alloc_pd
    private_34__ibv_cmd_attach_mcast
    private_34__ibv_cmd_close_xrcd
    private_34__ibv_cmd_create_ah
    private_34__ibv_cmd_create_counters
    private_34__ibv_cmd_create_cq
    private_34__ibv_cmd_create_cq_ex
    private_34__ibv_cmd_create_flow
    private_34__ibv_cmd_create_flow_action_esp
    private_34__ibv_cmd_create_qp
    private_34__ibv_cmd_create_qp_ex
    private_34__ibv_cmd_create_qp_ex2
    private_34__ibv_cmd_create_rwq_ind_table
    private_34__ibv_cmd_create_srq
    private_34__ibv_cmd_create_srq_ex
    private_34__ibv_cmd_create_wq
    private_34__ibv_cmd_dealloc_mw
    private_34__ibv_cmd_dealloc_pd
    private_34__ibv_cmd_dereg_mr
    private_34__ibv_cmd_destroy_ah
    private_34__ibv_cmd_destroy_counters
    private_34__ibv_cmd_destroy_cq
    private_34__ibv_cmd_destroy_flow
    private_34__ibv_cmd_destroy_flow_action
    private_34__ibv_cmd_destroy_qp
    private_34__ibv_cmd_destroy_rwq_ind_table
    private_34__ibv_cmd_destroy_srq
    private_34__ibv_cmd_destroy_wq
    private_34__ibv_cmd_detach_mcast
    private_34__ibv_cmd_free_dm
    private_34__ibv_cmd_get_context
    private_34__ibv_cmd_modify_cq
    private_34__ibv_cmd_modify_flow_action_esp
    private_34__ibv_cmd_modify_qp
    private_34__ibv_cmd_modify_qp_ex
    private_34__ibv_cmd_modify_srq
    private_34__ibv_cmd_modify_wq
    private_34__ibv_cmd_open_qp
    private_34__ibv_cmd_open_xrcd
    private_34__ibv_cmd_poll_cq
    private_34__ibv_cmd_post_recv
    private_34__ibv_cmd_post_send
    private_34__ibv_cmd_post_srq_recv
    private_34__ibv_cmd_query_context
    private_34__ibv_cmd_query_device_any
    private_34__ibv_cmd_query_mr
    private_34__ibv_cmd_query_port
    private_34__ibv_cmd_query_qp
    private_34__ibv_cmd_query_srq
    private_34__ibv_cmd_read_counters
    private_34__ibv_cmd_reg_dm_mr
    private_34__ibv_cmd_reg_dmabuf_mr
    private_34__ibv_cmd_reg_mr
    private_34__ibv_cmd_req_notify_cq
    private_34__ibv_cmd_rereg_mr
    private_34__ibv_cmd_resize_cq
    private_64__execute_ioctl
    private_64__ibv_cmd_advise_mr
    private_64__ibv_cmd_alloc_dm
    private_64__ibv_cmd_alloc_dmah
    private_64__ibv_cmd_alloc_mw
    private_64__ibv_cmd_alloc_pd
    private_64__ibv_cmd_attach_mcast
    private_64__ibv_cmd_close_xrcd
    private_64__ibv_cmd_create_ah
    private_64__ibv_cmd_create_counters
    private_64__ibv_cmd_create_cq
    private_64__ibv_cmd_create_cq_ex
    private_64__ibv_cmd_create_cq_ex2
    private_64__ibv_cmd_create_flow
    private_64__ibv_cmd_create_flow_action_esp
    private_64__ibv_cmd_create_qp
    private_64__ibv_cmd_create_qp_ex
    private_64__ibv_cmd_create_qp_ex2
    private_64__ibv_cmd_create_rwq_ind_table
    private_64__ibv_cmd_create_srq
    private_64__ibv_cmd_create_srq_ex
    private_64__ibv_cmd_create_wq
    private_64__ibv_cmd_dealloc_mw
    private_64__ibv_cmd_dealloc_pd
    private_64__ibv_cmd_dereg_mr
    private_64__ibv_cmd_destroy_ah
    private_64__ibv_cmd_destroy_counters
    private_64__ibv_cmd_destroy_cq
    private_64__ibv_cmd_destroy_flow
    private_64__ibv_cmd_destroy_flow_action
    private_64__ibv_cmd_destroy_qp
    private_64__ibv_cmd_destroy_rwq_ind_table
    private_64__ibv_cmd_destroy_srq
    private_64__ibv_cmd_destroy_wq
    private_64__ibv_cmd_detach_mcast
    private_64__ibv_cmd_export_dmabuf_fd
    private_64__ibv_cmd_free_dm
    private_64__ibv_cmd_free_dmah
    private_64__ibv_cmd_get_context
    private_64__ibv_cmd_modify_cq
    private_64__ibv_cmd_modify_flow_action_esp
    private_64__ibv_cmd_modify_qp
    private_64__ibv_cmd_modify_qp_ex
    private_64__ibv_cmd_modify_srq
    private_64__ibv_cmd_modify_wq
    private_64__ibv_cmd_open_qp
    private_64__ibv_cmd_open_xrcd
    private_64__ibv_cmd_poll_cq
    private_64__ibv_cmd_post_recv
    private_64__ibv_cmd_post_send
    private_64__ibv_cmd_post_srq_recv
    private_64__ibv_cmd_query_context
    private_64__ibv_cmd_query_device_any
    private_64__ibv_cmd_query_mr
    private_64__ibv_cmd_query_port
    private_64__ibv_cmd_query_port_speed
    private_64__ibv_cmd_query_qp
    private_64__ibv_cmd_query_srq
    private_64__ibv_cmd_read_counters
    private_64__ibv_cmd_reg_dm_mr
    private_64__ibv_cmd_reg_dmabuf_mr
    private_64__ibv_cmd_reg_mr
    private_64__ibv_cmd_reg_mr_ex
    private_64__ibv_cmd_req_notify_cq
    private_64__ibv_cmd_rereg_mr
    private_64__ibv_cmd_resize_cq
}
