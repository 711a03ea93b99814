//! Every verb returns the errno of its man page for invalid input, and such errors have no side effects.

mod common;

use std::ffi::c_int;
use std::ptr::{null, null_mut};

use common::*;
use libc::{EBUSY, EINVAL, ENOMEM, EOPNOTSUPP};
use terrace_ibverbs::abi::*;

/// The errno of a verb that returned null.
fn errno_of_null<T>(object: *mut T) -> c_int {
    assert!(object.is_null());
    errno()
}

/// A device with a protection domain and a completion queue.
struct Fixture {
    context: *mut ibv_context,
    pd: *mut ibv_pd,
    cq: *mut ibv_cq,
}

impl Fixture {
    fn new() -> Fixture {
        let context = open();
        // SAFETY: an open device.
        unsafe {
            let (pd, cq) = (ibv_alloc_pd(context), ibv_create_cq(context, 100, null_mut(), null_mut(), 0));
            assert!(!pd.is_null() && !cq.is_null());
            Fixture { context, pd, cq }
        }
    }

    fn qp(&self, qp_type: ibv_qp_type) -> *mut ibv_qp {
        let mut init = qp_init(self.cq, qp_type);
        // SAFETY: objects of this device.
        let qp = unsafe { ibv_create_qp(self.pd, &raw mut init) };
        assert!(!qp.is_null());
        qp
    }

    fn close(self) {
        // SAFETY: all other objects are destroyed.
        unsafe {
            assert_eq!(ibv_destroy_cq(self.cq), 0);
            assert_eq!(ibv_dealloc_pd(self.pd), 0);
            assert_eq!(ibv_close_device(self.context), 0);
        }
    }
}

#[test]
fn null_objects_are_errors() {
    // SAFETY: null is the tested input.
    unsafe {
        assert_eq!(errno_of_null(ibv_open_device(null_mut())), EINVAL);
        assert_eq!((ibv_close_device(null_mut()), errno()), (-1, EINVAL));
        assert_eq!(ibv_get_device_guid(null_mut()), 0);
        assert_eq!(ibv_query_device(null_mut(), null_mut()), EINVAL);
        assert_eq!(errno_of_null(ibv_alloc_pd(null_mut())), EINVAL);
        assert_eq!(ibv_dealloc_pd(null_mut()), EINVAL);
        assert_eq!(errno_of_null(ibv_reg_mr(null_mut(), null_mut(), 1, 0)), EINVAL);
        assert_eq!(ibv_dereg_mr(null_mut()), EINVAL);
        assert_eq!(errno_of_null(ibv_create_comp_channel(null_mut())), EINVAL);
        assert_eq!(ibv_destroy_comp_channel(null_mut()), EINVAL);
        assert_eq!((ibv_get_cq_event(null_mut(), null_mut(), null_mut()), errno()), (-1, EINVAL));
        assert_eq!(errno_of_null(ibv_create_cq(null_mut(), 1, null_mut(), null_mut(), 0)), EINVAL);
        assert_eq!(ibv_resize_cq(null_mut(), 1), EINVAL);
        assert_eq!(ibv_destroy_cq(null_mut()), EINVAL);
        assert_eq!(errno_of_null(ibv_create_srq(null_mut(), null_mut())), EINVAL);
        assert_eq!(ibv_modify_srq(null_mut(), null_mut(), 0), EINVAL);
        assert_eq!(ibv_query_srq(null_mut(), null_mut()), EINVAL);
        assert_eq!(ibv_destroy_srq(null_mut()), EINVAL);
        assert_eq!(errno_of_null(ibv_create_qp(null_mut(), null_mut())), EINVAL);
        assert_eq!(ibv_modify_qp(null_mut(), null_mut(), 0), EINVAL);
        assert_eq!(ibv_query_qp(null_mut(), null_mut(), 0, null_mut()), EINVAL);
        assert_eq!(ibv_destroy_qp(null_mut()), EINVAL);
        assert!(ibv_qp_to_qp_ex(null_mut()).is_null());
        assert_eq!(errno_of_null(ibv_create_ah(null_mut(), null_mut())), EINVAL);
        assert_eq!(ibv_destroy_ah(null_mut()), EINVAL);
        assert_eq!((ibv_get_async_event(null_mut(), null_mut()), errno()), (-1, EINVAL));
        ibv_ack_async_event(null_mut());
        ibv_ack_cq_events(null_mut(), 1);
    }
}

#[test]
fn null_attributes_are_errors() {
    let fixture = Fixture::new();
    let qp = fixture.qp(IBV_QPT_RC);
    let (ops, verbs) = (ops(fixture.context), verbs(fixture.context));
    // SAFETY: objects of this device; the other pointers are null.
    unsafe {
        assert_eq!(ibv_query_device(fixture.context, null_mut()), EINVAL);
        assert_eq!(errno_of_null(ibv_create_srq(fixture.pd, null_mut())), EINVAL);
        assert_eq!(errno_of_null(ibv_create_qp(fixture.pd, null_mut())), EINVAL);
        assert_eq!(errno_of_null(ibv_create_ah(fixture.pd, null_mut())), EINVAL);
        assert_eq!(ibv_modify_qp(qp, null_mut(), 0), EINVAL);
        assert_eq!(ibv_query_qp(qp, null_mut(), 0, null_mut()), EINVAL);
        assert_eq!(verbs.query_port.unwrap()(fixture.context, 1, null_mut(), 64), EINVAL);
        assert_eq!(verbs.query_device_ex.unwrap()(fixture.context, null(), null_mut(), 1000), EINVAL);
        assert_eq!(errno_of_null(verbs.create_cq_ex.unwrap()(fixture.context, null_mut())), EINVAL);
        assert_eq!(errno_of_null(verbs.create_qp_ex.unwrap()(fixture.context, null_mut())), EINVAL);
        assert_eq!(errno_of_null(verbs.create_srq_ex.unwrap()(fixture.context, null_mut())), EINVAL);
        assert_eq!(errno_of_null(verbs.alloc_td.unwrap()(fixture.context, null_mut())), EINVAL);
        assert_eq!(errno_of_null(verbs.alloc_parent_domain.unwrap()(fixture.context, null_mut())), EINVAL);
        assert_eq!(errno_of_null(verbs.alloc_dm.unwrap()(fixture.context, null_mut())), EINVAL);
        assert_eq!(verbs.advise_mr.unwrap()(fixture.pd, 0, 0, null_mut(), 3), EINVAL);
        assert_eq!(ops.bind_mw.unwrap()(qp, null_mut(), null_mut()), EINVAL);
        assert_eq!(ops.poll_cq.unwrap()(fixture.cq, 1, null_mut()), -1);
        assert_eq!(ops.poll_cq.unwrap()(fixture.cq, -1, null_mut()), -1);
        assert_eq!(ops.poll_cq.unwrap()(null_mut(), 1, null_mut()), -1);
        assert_eq!(ops.req_notify_cq.unwrap()(null_mut(), 0), EINVAL);
        assert_eq!(ops.post_send.unwrap()(null_mut(), null_mut(), null_mut()), EINVAL);
        assert_eq!(ops.post_recv.unwrap()(null_mut(), null_mut(), null_mut()), EINVAL);
        assert_eq!(ops.post_srq_recv.unwrap()(null_mut(), null_mut(), null_mut()), EINVAL);
        assert_eq!(ibv_destroy_qp(qp), 0);
    }
    fixture.close();
}

#[test]
fn table_indexes_beyond_the_attributes_are_errors() {
    let context = open();
    let (mut gid, mut pkey) = (zero::<ibv_gid>(), 0);
    let mut entries: [ibv_gid_entry; 32] = zero();
    // SAFETY: an open device and space for the answers.
    unsafe {
        assert_eq!(ibv_query_gid(context, 1, 15, &raw mut gid), 0);
        assert_eq!(gid.raw, [0; 16], "an empty entry");
        assert_eq!((ibv_query_gid(context, 1, 16, &raw mut gid), errno()), (-1, EINVAL));
        assert_eq!((ibv_query_gid(context, 1, -1, &raw mut gid), errno()), (-1, EINVAL));
        assert_eq!((ibv_query_gid(context, 2, 0, &raw mut gid), errno()), (-1, EINVAL));
        assert_eq!((ibv_query_pkey(context, 1, 0, &raw mut pkey), pkey), (0, 0xffff));
        assert_eq!((ibv_query_pkey(context, 1, 1, &raw mut pkey), errno()), (-1, EINVAL));
        let size = size_of::<ibv_gid_entry>();
        let all = _ibv_query_gid_table(context, entries.as_mut_ptr(), 32, 0, size);
        assert!((1..=16).contains(&all));
        assert_eq!(entries[0].gid_type, IBV_GID_TYPE_ROCE_V2);
        let too_few = _ibv_query_gid_table(context, entries.as_mut_ptr(), all as usize - 1, 0, size);
        assert_eq!(too_few, -(EINVAL as isize));
        assert_eq!(ibv_close_device(context), 0);
    }
}

#[test]
fn sizes_out_of_range_are_errors() {
    let fixture = Fixture::new();
    let mut attr: ibv_device_attr = zero();
    // SAFETY: objects of this device.
    unsafe {
        assert_eq!(ibv_query_device(fixture.context, &raw mut attr), 0);
        for entries in [0, -1, attr.max_cqe + 1, c_int::MAX, c_int::MIN] {
            let cq = ibv_create_cq(fixture.context, entries, null_mut(), null_mut(), 0);
            assert_eq!(errno_of_null(cq), EINVAL, "{entries} entries");
            assert_eq!(ibv_resize_cq(fixture.cq, entries), EINVAL, "{entries} entries");
        }
        for vector in [-1, (*fixture.context).num_comp_vectors] {
            let cq = ibv_create_cq(fixture.context, 1, null_mut(), null_mut(), vector);
            assert_eq!(errno_of_null(cq), EINVAL, "vector {vector}");
        }
        let changes: [fn(&mut ibv_qp_cap); 5] = [
            |cap| cap.max_send_wr = u32::MAX,
            |cap| cap.max_recv_wr = u32::MAX,
            |cap| cap.max_send_sge = 1 << 16,
            |cap| cap.max_recv_sge = 1 << 16,
            |cap| cap.max_inline_data = u32::MAX,
        ];
        for change in changes {
            let mut init = qp_init(fixture.cq, IBV_QPT_RC);
            change(&mut init.cap);
            assert_eq!(errno_of_null(ibv_create_qp(fixture.pd, &raw mut init)), EINVAL, "{:?}", init.cap);
        }
        for (max_wr, max_sge) in [(u32::MAX, 1), (0, 1), (1, u32::MAX)] {
            let mut init: ibv_srq_init_attr = zero();
            (init.attr.max_wr, init.attr.max_sge) = (max_wr, max_sge);
            assert_eq!(
                errno_of_null(ibv_create_srq(fixture.pd, &raw mut init)),
                EINVAL,
                "{max_wr} x {max_sge}"
            );
        }
    }
    fixture.close();
}

#[test]
fn unsupported_queue_pair_types_are_errors() {
    let fixture = Fixture::new();
    let kinds = [
        (IBV_QPT_RAW_PACKET, EOPNOTSUPP),
        // An XRC target is created in an XRC domain, for which this verb has no argument.
        (IBV_QPT_XRC_RECV, EINVAL),
        (0, EINVAL),
        (99, EINVAL),
    ];
    // SAFETY: objects of this device.
    unsafe {
        for (kind, why) in kinds {
            let mut init = qp_init(fixture.cq, kind);
            assert_eq!(errno_of_null(ibv_create_qp(fixture.pd, &raw mut init)), why, "kind {kind}");
        }
        let mut without_cq = qp_init(null_mut(), IBV_QPT_RC);
        assert_eq!(errno_of_null(ibv_create_qp(fixture.pd, &raw mut without_cq)), EINVAL);
    }
    fixture.close();
}

#[test]
fn invalid_regions_are_errors() {
    let fixture = Fixture::new();
    let mut bytes = [0_u8; 64];
    let addr = bytes.as_mut_ptr().cast();
    // SAFETY: objects of this device; no work request uses the memory.
    unsafe {
        let remote_only = [IBV_ACCESS_REMOTE_WRITE, IBV_ACCESS_REMOTE_ATOMIC];
        for access in remote_only {
            assert_eq!(errno_of_null(ibv_reg_mr(fixture.pd, addr, 64, access as c_int)), EINVAL);
        }
        assert_eq!(errno_of_null(ibv_reg_mr(fixture.pd, addr, 64, 1 << 15)), EINVAL, "an unknown flag");
        assert_eq!(
            errno_of_null(ibv_reg_mr(fixture.pd, addr, usize::MAX, 0)),
            EINVAL,
            "past the end of memory"
        );
        let mr = ibv_reg_mr(fixture.pd, addr, 64, IBV_ACCESS_LOCAL_WRITE as c_int);
        assert!(!mr.is_null());
        assert_eq!((ibv_rereg_mr(mr, 8, null_mut(), null_mut(), 0, 0), errno()), (-1, EINVAL));
        assert_eq!((ibv_rereg_mr(mr, 1, null_mut(), null_mut(), 0, 0), errno()), (-1, EINVAL));
        assert_eq!((ibv_rereg_mr(mr, 2, null_mut(), null_mut(), 0, 0), errno()), (-1, EINVAL));
        assert_eq!((ibv_rereg_mr(mr, 0, null_mut(), null_mut(), 0, 1), errno()), (-1, EINVAL));
        assert_eq!(ibv_dealloc_pd(fixture.pd), EBUSY);
        assert_eq!(ibv_dereg_mr(mr), 0);
        assert_eq!(
            errno_of_null(ops(fixture.context).alloc_mw.unwrap()(fixture.pd, 3)),
            EINVAL,
            "unknown window type"
        );
    }
    fixture.close();
}

#[test]
fn invalid_addresses_are_errors() {
    let fixture = Fixture::new();
    let good = || {
        let mut attr: ibv_ah_attr = zero();
        (attr.is_global, attr.port_num) = (1, 1);
        attr.grh.dgid = ibv_gid { raw: [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 127, 0, 0, 1] };
        attr
    };
    let changes: [fn(&mut ibv_ah_attr); 4] = [
        |attr| attr.is_global = 0,
        |attr| attr.grh.sgid_index = 200,
        |attr| attr.grh.dgid = ibv_gid { raw: [0; 16] },
        |attr| attr.port_num = 7,
    ];
    // SAFETY: objects of this device.
    unsafe {
        for change in changes {
            let mut attr = good();
            change(&mut attr);
            assert_eq!(errno_of_null(ibv_create_ah(fixture.pd, &raw mut attr)), EINVAL);
        }
        let ah = ibv_create_ah(fixture.pd, &mut good());
        assert!(!ah.is_null());
        assert_eq!(ibv_dealloc_pd(fixture.pd), EBUSY);
        assert_eq!(ibv_destroy_ah(ah), 0);
    }
    fixture.close();
}

#[test]
fn invalid_transitions_are_errors() {
    let fixture = Fixture::new();
    let qp = fixture.qp(IBV_QPT_RC);
    let mut attr: ibv_qp_attr = zero();
    // SAFETY: objects of this device.
    unsafe {
        for state in [IBV_QPS_RTR, IBV_QPS_RTS, IBV_QPS_SQD, IBV_QPS_SQE, 7, u32::MAX] {
            attr.qp_state = state;
            assert_eq!(ibv_modify_qp(qp, &raw mut attr, IBV_QP_STATE as c_int), EINVAL, "state {state}");
        }
        attr.qp_state = IBV_QPS_INIT;
        assert_eq!(ibv_modify_qp(qp, &raw mut attr, IBV_QP_STATE as c_int), EINVAL, "attributes are missing");
        assert_eq!(ibv_modify_qp(qp, &raw mut attr, -1), EINVAL, "unknown attributes");
        let init = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
        attr.port_num = 2;
        assert_eq!(ibv_modify_qp(qp, &raw mut attr, init as c_int), EINVAL, "unknown port");
        (attr.port_num, attr.pkey_index) = (1, 1);
        assert_eq!(ibv_modify_qp(qp, &raw mut attr, init as c_int), EINVAL, "unknown partition");
        assert_eq!((*qp).state, IBV_QPS_RESET);
        assert_eq!(ibv_destroy_qp(qp), 0);
    }
    fixture.close();
}

#[test]
fn invalid_work_requests_are_errors() {
    let fixture = Fixture::new();
    let qp = fixture.qp(IBV_QPT_RC);
    let ops = ops(fixture.context);
    let (post_send, post_recv) = (ops.post_send.unwrap(), ops.post_recv.unwrap());
    let mut sge = ibv_sge { addr: 0, length: 17, lkey: 0 };
    let good = |sge: &mut ibv_sge| {
        let mut wr: ibv_send_wr = zero();
        (wr.sg_list, wr.num_sge, wr.opcode) = (&raw mut *sge, 1, IBV_WR_SEND);
        wr
    };
    let changes: [fn(&mut ibv_send_wr); 8] = [
        |wr| wr.opcode = 77,
        |wr| wr.opcode = IBV_WR_TSO,
        |wr| wr.num_sge = -1,
        |wr| wr.num_sge = 3,
        |wr| wr.sg_list = null_mut(),
        |wr| wr.send_flags = IBV_SEND_INLINE,
        |wr| wr.opcode = IBV_WR_BIND_MW,
        |wr| wr.send_flags = IBV_SEND_IP_CSUM,
    ];
    // SAFETY: objects of this device, and work requests that fail before their memory is accessed.
    unsafe {
        let mut bad = null_mut();
        let mut wr = good(&mut sge);
        assert_eq!(post_send(qp, &raw mut wr, &raw mut bad), EINVAL, "in RESET");
        connect(qp, (*qp).qp_num);
        for (index, change) in changes.iter().enumerate() {
            // The sixth exceeds the queue pair's inline data.
            sge.length = if index == 5 { 17 } else { 0 };
            let mut wr = good(&mut sge);
            change(&mut wr);
            assert_eq!(post_send(qp, &raw mut wr, &raw mut bad), EINVAL, "change {index}");
            assert!(std::ptr::eq(bad, &raw const wr), "change {index}");
        }
        let mut recv: ibv_recv_wr = zero();
        for count in [-1, 3, c_int::MAX] {
            (recv.sg_list, recv.num_sge) = (&raw mut sge, count);
            let mut bad = null_mut();
            assert_eq!(post_recv(qp, &raw mut recv, &raw mut bad), EINVAL, "{count} elements");
            assert!(std::ptr::eq(bad, &raw const recv));
        }
        (recv.sg_list, recv.num_sge) = (null_mut(), 0);
        for _ in 0..10 {
            assert_eq!(post_recv(qp, &raw mut recv, &mut null_mut()), 0);
        }
        assert_eq!(post_recv(qp, &raw mut recv, &mut null_mut()), ENOMEM, "the queue is full");
        assert_eq!(ibv_destroy_cq(fixture.cq), EBUSY);
        assert_eq!(ibv_dealloc_pd(fixture.pd), EBUSY);
        assert_eq!(ibv_destroy_qp(qp), 0);
    }
    fixture.close();
}

#[test]
fn the_builder_reports_errors_at_the_end() {
    let fixture = Fixture::new();
    let create = verbs(fixture.context).create_qp_ex.unwrap();
    let mut init: ibv_qp_init_attr_ex = zero();
    let plain = qp_init(fixture.cq, IBV_QPT_RC);
    (init.send_cq, init.recv_cq, init.cap, init.qp_type) =
        (plain.send_cq, plain.recv_cq, plain.cap, plain.qp_type);
    init.pd = fixture.pd;
    init.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    // SAFETY: objects of this device; failed steps access no memory.
    unsafe {
        init.send_ops_flags = u64::from(IBV_QP_EX_WITH_TSO);
        assert_eq!(errno_of_null(create(fixture.context, &raw mut init)), EOPNOTSUPP);
        init.send_ops_flags = u64::from(IBV_QP_EX_WITH_SEND);
        let qp = create(fixture.context, &raw mut init);
        connect(qp, (*qp).qp_num);
        let ex = ibv_qp_to_qp_ex(qp);
        let steps: [fn(*mut ibv_qp_ex); 7] = [
            |ex| (*ex).wr_rdma_write.unwrap()(ex, 1, 2),
            |ex| (*ex).wr_set_sge.unwrap()(ex, 1, 2, 3),
            |ex| {
                (*ex).wr_send.unwrap()(ex);
                (*ex).wr_set_inline_data.unwrap()(ex, null_mut(), 17);
            },
            |ex| {
                (*ex).wr_send.unwrap()(ex);
                (*ex).wr_set_sge_list.unwrap()(ex, 1_000_000, null());
            },
            |ex| {
                (*ex).wr_send.unwrap()(ex);
                (*ex).wr_set_ud_addr.unwrap()(ex, null_mut(), 1, 1);
            },
            |ex| (*ex).wr_send_tso.unwrap()(ex, null_mut(), 0, 0),
            |ex| (*ex).wr_bind_mw.unwrap()(ex, null_mut(), 0, null()),
        ];
        for (index, step) in steps.iter().enumerate() {
            (*ex).wr_start.unwrap()(ex);
            step(ex);
            assert_eq!((*ex).wr_complete.unwrap()(ex), EINVAL, "step {index}");
        }
        (*ex).wr_start.unwrap()(ex);
        (*ex).wr_rdma_write.unwrap()(ex, 1, 2);
        (*ex).wr_abort.unwrap()(ex);
        assert_eq!((*ex).wr_complete.unwrap()(ex), EINVAL, "no work request was begun");
        assert_eq!(ibv_destroy_qp(qp), 0);
    }
    fixture.close();
}

#[test]
fn undestroyed_objects_outlive_the_device() {
    let fixture = Fixture::new();
    let qp = fixture.qp(IBV_QPT_UD);
    // SAFETY: the wrong order is the tested input.
    unsafe {
        assert_eq!(ibv_close_device(fixture.context), 0);
        assert_eq!(ibv_destroy_qp(qp), 0);
        assert_eq!(ibv_destroy_cq(fixture.cq), 0);
        assert_eq!(ibv_dealloc_pd(fixture.pd), 0);
    }
}
