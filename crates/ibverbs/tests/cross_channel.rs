//! Cross-channel verbs by the C ABI: queue pairs whose work queues are in memory, WAIT and ENABLE.

mod common;

use std::ffi::{c_int, c_void};
use std::io::Write;
use std::mem::{offset_of, size_of};
use std::process::{Command, Stdio};
use std::ptr::null_mut;
use std::time::{Duration, Instant};

use common::*;
use terrace_ibverbs::abi::cross_channel::*;
use terrace_ibverbs::abi::*;

unsafe extern "C" {
    fn ibv_exp_create_qp(context: *mut ibv_context, attr: *mut ibv_exp_qp_init_attr) -> *mut ibv_qp;
    fn ibv_exp_create_cq(
        context: *mut ibv_context,
        entries: c_int,
        cq_context: *mut c_void,
        channel: *mut ibv_comp_channel,
        vector: c_int,
        attr: *mut ibv_exp_cq_init_attr,
    ) -> *mut ibv_cq;
    fn ibv_exp_modify_cq(cq: *mut ibv_cq, attr: *mut ibv_exp_cq_attr, mask: c_int) -> c_int;
    fn ibv_exp_post_send(
        qp: *mut ibv_qp,
        wr: *mut ibv_exp_send_wr,
        bad_wr: *mut *mut ibv_exp_send_wr,
    ) -> c_int;
    fn ibv_exp_post_task(
        context: *mut ibv_context,
        task: *mut ibv_exp_task,
        bad_task: *mut *mut ibv_exp_task,
    ) -> c_int;
    fn terrace_dv_init_obj(obj: *mut terrace_dv_obj, types: u64) -> c_int;
}

const SIGNALED: u64 = IBV_SEND_SIGNALED as u64;
const MANAGED: u32 =
    IBV_EXP_QP_CREATE_CROSS_CHANNEL | IBV_EXP_QP_CREATE_MANAGED_SEND | IBV_EXP_QP_CREATE_MANAGED_RECV;

/// A context, and registered memory.
struct World {
    context: *mut ibv_context,
    pd: *mut ibv_pd,
    mr: *mut ibv_mr,
    words: Box<[u64; 512]>,
}

impl World {
    fn new() -> World {
        let context = open();
        let mut words = Box::new([0_u64; 512]);
        let access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
        // SAFETY: objects of this device, and memory that outlives them.
        let (pd, mr) = unsafe {
            let pd = ibv_alloc_pd(context);
            (pd, ibv_reg_mr(pd, words.as_mut_ptr().cast(), 4096, access as c_int))
        };
        assert!(!mr.is_null());
        World { context, pd, mr, words }
    }

    fn cq(&self) -> *mut ibv_cq {
        let mut attr = ibv_exp_cq_init_attr {
            comp_mask: IBV_EXP_CQ_INIT_ATTR_FLAGS,
            flags: IBV_EXP_CQ_CREATE_CROSS_CHANNEL,
        };
        // SAFETY: an open context.
        let cq = unsafe { ibv_exp_create_cq(self.context, 64, null_mut(), null_mut(), 0, &raw mut attr) };
        assert!(!cq.is_null());
        cq
    }

    fn qp_init(&self, cq: *mut ibv_cq, flags: u32) -> ibv_exp_qp_init_attr {
        let mut attr: ibv_exp_qp_init_attr = zero();
        (attr.send_cq, attr.recv_cq, attr.pd) = (cq, cq, self.pd);
        (attr.cap, attr.qp_type) = (qp_init(cq, IBV_QPT_RC).cap, IBV_QPT_RC);
        attr.comp_mask = IBV_EXP_QP_INIT_ATTR_PD | IBV_EXP_QP_INIT_ATTR_CREATE_FLAGS;
        attr.exp_create_flags = flags;
        attr
    }

    /// A queue pair that is connected to itself.
    fn qp(&self, cq: *mut ibv_cq, flags: u32) -> *mut ibv_qp {
        let mut attr = self.qp_init(cq, flags);
        // SAFETY: objects of this device.
        unsafe {
            let qp = ibv_exp_create_qp(self.context, &raw mut attr);
            assert!(!qp.is_null(), "errno {}", errno());
            connect(qp, (*qp).qp_num);
            qp
        }
    }

    fn address(&self, word: usize) -> u64 {
        &raw const self.words[word] as u64
    }

    fn word(&self, word: usize) -> u64 {
        // SAFETY: a word of this array, which the NIC may change at any time.
        unsafe { (&raw const self.words[word]).read_volatile() }
    }

    fn set(&self, word: usize, value: u64) {
        // SAFETY: the same.
        unsafe { (&raw const self.words[word]).cast_mut().write_volatile(value) };
    }

    fn sge(&self, word: usize) -> ibv_sge {
        // SAFETY: a region.
        ibv_sge { addr: self.address(word), length: 8, lkey: unsafe { (*self.mr).lkey } }
    }

    /// A WRITE of a word to another.
    fn write(&self, wr_id: u64, from: &mut ibv_sge, to: u64, rkey: u32) -> ibv_exp_send_wr {
        let mut wr = request(wr_id, IBV_WR_RDMA_WRITE, SIGNALED);
        (wr.sg_list, wr.num_sge) = (from, 1);
        (wr.wr.rdma.remote_addr, wr.wr.rdma.rkey) = (to, rkey);
        wr
    }

    fn rkey(&self) -> u32 {
        // SAFETY: a region.
        unsafe { (*self.mr).rkey }
    }

    fn poll(&self, cq: *mut ibv_cq) -> Option<ibv_wc> {
        let mut wc: ibv_wc = zero();
        // SAFETY: a completion queue and room for one entry.
        (unsafe { ops(self.context).poll_cq.unwrap()(cq, 1, &raw mut wc) } > 0).then_some(wc)
    }

    /// The cookie of the next completion, which is a success.
    fn completion(&self, cq: *mut ibv_cq) -> u64 {
        let end = Instant::now() + Duration::from_secs(10);
        while Instant::now() < end {
            if let Some(wc) = self.poll(cq) {
                assert_eq!(wc.status, IBV_WC_SUCCESS, "{}", wc.wr_id);
                return wc.wr_id;
            }
        }
        panic!("no completion");
    }

    fn nothing_comes(&self, cq: *mut ibv_cq) {
        let end = Instant::now() + Duration::from_millis(20);
        while Instant::now() < end {
            assert!(self.poll(cq).is_none());
        }
    }
}

fn request(wr_id: u64, opcode: u32, flags: u64) -> ibv_exp_send_wr {
    let mut wr: ibv_exp_send_wr = zero();
    (wr.wr_id, wr.exp_opcode, wr.exp_send_flags) = (wr_id, opcode, flags);
    wr
}

fn enable(qp: *mut ibv_qp, wqe_count: i32, flags: u64) -> ibv_exp_send_wr {
    let mut wr = request(100, IBV_EXP_WR_SEND_ENABLE, flags);
    wr.task.wqe_enable = ExpEnable { qp, wqe_count };
    wr
}

fn wait(cq: *mut ibv_cq, cq_count: i32, flags: u64) -> ibv_exp_send_wr {
    let mut wr = request(200, IBV_EXP_WR_CQE_WAIT, flags);
    wr.task.cqe_wait = ExpWait { cq, cq_count };
    wr
}

/// Posts a list made of these.
fn post(qp: *mut ibv_qp, wrs: &mut [ibv_exp_send_wr]) -> c_int {
    for index in 1..wrs.len() {
        wrs[index - 1].next = &raw mut wrs[index];
    }
    let mut bad = null_mut();
    // SAFETY: a queue pair and a list of work requests.
    unsafe { ibv_exp_post_send(qp, wrs.as_mut_ptr(), &raw mut bad) }
}

#[test]
fn enable_and_wait_count_from_bases_that_the_last_one_advances() {
    let world = World::new();
    let (cq, control_cq) = (world.cq(), world.cq());
    let (managed, control) = (world.qp(cq, MANAGED), world.qp(control_cq, IBV_EXP_QP_CREATE_CROSS_CHANNEL));
    let mut from = world.sge(0);
    let mut writes: Vec<ibv_exp_send_wr> = (1..=4)
        .map(|index| world.write(index, &mut from, world.address(index as usize), world.rkey()))
        .collect();
    assert_eq!(post(managed, &mut writes), 0);
    world.nothing_comes(cq);
    world.set(0, 77);
    // The second ENABLE is one request beyond the first, which was the last of its base.
    let last = IBV_EXP_SEND_WAIT_EN_LAST;
    let mut chain = [
        enable(managed, 1, last),
        wait(cq, 1, last | SIGNALED),
        enable(managed, 1, last),
        wait(cq, 1, last | SIGNALED),
    ];
    assert_eq!(post(control, &mut chain), 0);
    assert_eq!([world.completion(cq), world.completion(cq)], [1, 2]);
    assert_eq!([world.completion(control_cq), world.completion(control_cq)], [200, 200]);
    world.nothing_comes(cq);
    assert_eq!([1, 2, 3].map(|word| world.word(word)), [77, 77, 0]);
    // 0 means all that are posted; more than that is an error.
    assert_eq!(post(control, &mut [enable(managed, 3, 0)]), libc::EINVAL);
    assert_eq!(post(control, &mut [enable(managed, 0, last)]), 0);
    assert_eq!([world.completion(cq), world.completion(cq)], [3, 4]);
}

#[test]
fn a_work_request_that_is_not_posted_leaves_the_base_where_it_is() {
    let world = World::new();
    let (cq, control_cq) = (world.cq(), world.cq());
    let (managed, control) = (world.qp(cq, MANAGED), world.qp(control_cq, IBV_EXP_QP_CREATE_CROSS_CHANNEL));
    let last = IBV_EXP_SEND_WAIT_EN_LAST;
    assert_eq!(post(managed, &mut [request(1, IBV_EXP_WR_NOP, SIGNALED)]), 0);
    // A managed queue is full of what is not enabled.
    let mut posted = 0;
    while post(managed, &mut [wait(control_cq, 0, 0)]) == 0 {
        posted += 1;
    }
    assert!(posted > 0);
    assert_eq!(post(managed, &mut [wait(control_cq, 1, last)]), libc::ENOMEM);
    assert_eq!(post(managed, &mut [enable(managed, 1, last)]), libc::ENOMEM);
    // Both still count from 0.
    let mut chain =
        [request(2, IBV_EXP_WR_NOP, SIGNALED), wait(control_cq, 1, SIGNALED), enable(managed, 1, 0)];
    assert_eq!(post(control, &mut chain), 0);
    assert_eq!([world.completion(control_cq), world.completion(control_cq)], [2, 200]);
    assert_eq!(world.completion(cq), 1);
    world.nothing_comes(cq);
}

#[test]
fn the_program_registers_the_queue_and_a_work_request_rewrites_another() {
    let world = World::new();
    let (cq, control_cq) = (world.cq(), world.cq());
    let (managed, control) = (world.qp(cq, MANAGED), world.qp(control_cq, IBV_EXP_QP_CREATE_CROSS_CHANNEL));
    let (mut qp_out, mut cq_out): (terrace_dv_qp, terrace_dv_cq) = (zero(), zero());
    let mut obj =
        terrace_dv_obj { qp_in: managed, qp_out: &raw mut qp_out, cq_in: cq, cq_out: &raw mut cq_out };
    // SAFETY: objects of this device, and places for the answers.
    let queue = unsafe {
        assert_eq!(terrace_dv_init_obj(&raw mut obj, TERRACE_DV_OBJ_QP | TERRACE_DV_OBJ_CQ), 0);
        let bytes = qp_out.sq.wqe_cnt as usize * qp_out.sq.stride as usize;
        let access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
        ibv_reg_mr(world.pd, qp_out.sq.buf, bytes, access as c_int)
    };
    assert!(!queue.is_null() && qp_out.sq.stride == 64 && cq_out.cqe_cnt >= 64 && !qp_out.rq.buf.is_null());
    let mut from = world.sge(0);
    world.set(0, 5);
    assert_eq!(post(managed, &mut [world.write(1, &mut from, world.address(1), world.rkey())]), 0);
    // The opcode in the entry's first word becomes NOP, by a masked CAS: 8 is WRITE.
    let mut result = world.sge(2);
    let mut change =
        request(2, IBV_EXP_WR_EXT_MASKED_ATOMIC_CMP_AND_SWP, IBV_EXP_SEND_EXT_ATOMIC_INLINE | SIGNALED);
    (change.sg_list, change.num_sge) = (&raw mut result, 1);
    let opcode = u64::from_ne_bytes([0, 0, 0, 0xff, 0, 0, 0, 0]);
    let operands = ExpCompareSwap {
        compare_mask: opcode,
        compare_val: u64::from_ne_bytes([0, 0, 0, 8, 0, 0, 0, 0]),
        swap_val: 0,
        swap_mask: opcode,
    };
    // SAFETY: a region.
    let rkey = unsafe { (*queue).rkey };
    change.masked_atomics = ExpMaskedAtomics {
        log_arg_sz: 3,
        remote_addr: qp_out.sq.buf as u64,
        rkey,
        operands: ExpOperands { cmp_swap: operands },
    };
    let mut chain = [change, wait(control_cq, 1, 0), enable(managed, 0, IBV_EXP_SEND_WAIT_EN_LAST)];
    assert_eq!(post(control, &mut chain), 0);
    assert_eq!(world.completion(control_cq), 2);
    assert_eq!(world.completion(cq), 1, "a NOP completes as well");
    assert_eq!(world.word(1), 0, "the WRITE was not executed");
    assert_eq!(world.word(2).to_ne_bytes()[3], 8);
}

#[test]
fn tasks_post_to_several_queue_pairs_and_receives_wait_for_their_enable() {
    let world = World::new();
    let (cq, control_cq) = (world.cq(), world.cq());
    let (managed, control) = (world.qp(cq, MANAGED), world.qp(control_cq, IBV_EXP_QP_CREATE_CROSS_CHANNEL));
    let mut into = world.sge(8);
    let mut receive: ibv_recv_wr = zero();
    (receive.wr_id, receive.sg_list, receive.num_sge) = (9, &raw mut into, 1);
    let mut from = world.sge(0);
    world.set(0, 99);
    let mut send = request(1, IBV_WR_SEND, SIGNALED);
    (send.sg_list, send.num_sge) = (&raw mut from, 1);
    let mut enable_recv = request(3, IBV_EXP_WR_RECV_ENABLE, 0);
    enable_recv.task.wqe_enable = ExpEnable { qp: managed, wqe_count: 0 };
    let mut enables = [enable_recv, enable(managed, 0, 0)];
    enables[0].next = &raw mut enables[1];
    let mut tasks: [ibv_exp_task; 3] = zero();
    (tasks[0].task_type, tasks[0].qp) = (IBV_EXP_TASK_RECV, managed);
    tasks[0].list = ExpTaskList { recv_wr: &raw mut receive };
    (tasks[1].qp, tasks[1].list) = (managed, ExpTaskList { send_wr: &raw mut send });
    (tasks[2].qp, tasks[2].list) = (control, ExpTaskList { send_wr: enables.as_mut_ptr() });
    for index in 1..tasks.len() {
        tasks[index - 1].next = &raw mut tasks[index];
    }
    // SAFETY: tasks with objects of this device.
    assert_eq!(unsafe { ibv_exp_post_task(world.context, tasks.as_mut_ptr(), null_mut()) }, 0);
    let mut done = [world.completion(cq), world.completion(cq)];
    done.sort_unstable();
    assert_eq!(done, [1, 9]);
    assert_eq!(world.word(8), 99);
}

#[test]
fn granted_sizes_can_be_posted() {
    let world = World::new();
    let cq = world.cq();
    let mut init = world.qp_init(cq, IBV_EXP_QP_CREATE_CROSS_CHANNEL);
    (init.cap.max_send_wr, init.cap.max_inline_data) = (0, 973);
    // SAFETY: objects of this device.
    let qp = unsafe {
        assert!(ibv_exp_create_qp(world.context, &raw mut init).is_null(), "no entry holds so much");
        init.cap.max_inline_data = 972;
        let qp = ibv_exp_create_qp(world.context, &raw mut init);
        assert!(!qp.is_null() && init.cap.max_send_wr > 0, "errno {}", errno());
        connect(qp, (*qp).qp_num);
        qp
    };
    world.set(0, 77);
    let mut from = ibv_sge { length: 972, ..world.sge(0) };
    let mut write = world.write(1, &mut from, world.address(256), world.rkey());
    write.exp_send_flags |= IBV_SEND_INLINE as u64;
    assert_eq!(post(qp, &mut [write]), 0);
    assert_eq!(world.completion(cq), 1);
    assert_eq!(world.word(256), 77);
}

#[test]
fn what_cannot_be_is_refused() {
    let world = World::new();
    let cq = world.cq();
    let (plain, cross) = (world.qp(cq, 0), world.qp(cq, IBV_EXP_QP_CREATE_CROSS_CHANNEL));
    assert_eq!(post(plain, &mut [wait(cq, 1, 0)]), libc::EINVAL);
    assert_eq!(post(cross, &mut [wait(null_mut(), 1, 0)]), libc::EINVAL);
    assert_eq!(post(cross, &mut [wait(cq, -1, 0)]), libc::EINVAL);
    assert_eq!(post(cross, &mut [enable(null_mut(), 1, 0)]), libc::EINVAL);
    assert_eq!(post(cross, &mut [enable(cross, 0, 0)]), libc::EINVAL, "not managed");
    assert_eq!(post(cross, &mut [request(1, 0x7f, 0)]), libc::EINVAL);
    assert_eq!(post(plain, &mut [request(1, IBV_EXP_WR_NOP, SIGNALED)]), 0);
    assert_eq!(world.completion(cq), 1);
    let mut attr = ibv_exp_cq_attr { comp_mask: 0, cq_count: 0, cq_period: 0, cq_cap_flags: 2 };
    // SAFETY: objects of this device.
    unsafe {
        assert_eq!(ibv_exp_modify_cq(cq, &raw mut attr, IBV_EXP_CQ_CAP_FLAGS as c_int), libc::EINVAL);
        attr.cq_cap_flags = IBV_EXP_CQ_IGNORE_OVERRUN;
        assert_eq!(ibv_exp_modify_cq(cq, &raw mut attr, IBV_EXP_CQ_CAP_FLAGS as c_int), 0);
        let mut out: terrace_dv_qp = zero();
        let mut obj: terrace_dv_obj = zero();
        (obj.qp_in, obj.qp_out) = (plain, &raw mut out);
        assert_eq!(terrace_dv_init_obj(&raw mut obj, TERRACE_DV_OBJ_QP), libc::EOPNOTSUPP);
        let mut init: ibv_exp_qp_init_attr = zero();
        init.comp_mask = 1 << 4;
        assert!(ibv_exp_create_qp(world.context, &raw mut init).is_null());
    }
}

/// Sizes and offsets here and in the headers, and the example of the documentation.
#[test]
fn the_headers_compile_and_have_this_layout() {
    let include = concat!(env!("CARGO_MANIFEST_DIR"), "/include");
    let facts = [
        ("sizeof(struct ibv_exp_send_wr)", size_of::<ibv_exp_send_wr>()),
        ("offsetof(struct ibv_exp_send_wr, exp_opcode)", offset_of!(ibv_exp_send_wr, exp_opcode)),
        ("offsetof(struct ibv_exp_send_wr, ex)", offset_of!(ibv_exp_send_wr, ex)),
        ("offsetof(struct ibv_exp_send_wr, wr)", offset_of!(ibv_exp_send_wr, wr)),
        ("offsetof(struct ibv_exp_send_wr, task)", offset_of!(ibv_exp_send_wr, task)),
        ("offsetof(struct ibv_exp_send_wr, exp_send_flags)", offset_of!(ibv_exp_send_wr, exp_send_flags)),
        ("offsetof(struct ibv_exp_send_wr, ext_op)", offset_of!(ibv_exp_send_wr, masked_atomics)),
        (
            "offsetof(struct ibv_exp_send_wr, ext_op.masked_atomics.wr_data)",
            offset_of!(ibv_exp_send_wr, masked_atomics) + offset_of!(ExpMaskedAtomics, operands),
        ),
        ("sizeof(struct ibv_exp_qp_init_attr)", size_of::<ibv_exp_qp_init_attr>()),
        ("offsetof(struct ibv_exp_qp_init_attr, comp_mask)", offset_of!(ibv_exp_qp_init_attr, comp_mask)),
        ("offsetof(struct ibv_exp_qp_init_attr, pd)", offset_of!(ibv_exp_qp_init_attr, pd)),
        ("sizeof(struct ibv_exp_cq_attr)", size_of::<ibv_exp_cq_attr>()),
        ("sizeof(struct ibv_exp_cq_init_attr)", size_of::<ibv_exp_cq_init_attr>()),
        ("sizeof(struct ibv_exp_task)", size_of::<ibv_exp_task>()),
        ("offsetof(struct ibv_exp_task, item)", offset_of!(ibv_exp_task, qp)),
        ("offsetof(struct ibv_exp_task, next)", offset_of!(ibv_exp_task, next)),
        ("sizeof(struct terrace_dv_qp)", size_of::<terrace_dv_qp>()),
        ("offsetof(struct terrace_dv_qp, rq)", offset_of!(terrace_dv_qp, rq)),
        ("sizeof(struct terrace_dv_obj)", size_of::<terrace_dv_obj>()),
        ("sizeof(struct terrace_dv_cq)", size_of::<terrace_dv_cq>()),
        ("IBV_EXP_WR_SEND_ENABLE", IBV_EXP_WR_SEND_ENABLE as usize),
        ("IBV_EXP_WR_CQE_WAIT", IBV_EXP_WR_CQE_WAIT as usize),
        ("IBV_EXP_WR_NOP", IBV_EXP_WR_NOP as usize),
        ("IBV_EXP_SEND_WAIT_EN_LAST", IBV_EXP_SEND_WAIT_EN_LAST as usize),
        ("IBV_EXP_QP_CREATE_MANAGED_RECV", IBV_EXP_QP_CREATE_MANAGED_RECV as usize),
    ];
    let checks: String = facts
        .iter()
        .map(|(name, value)| format!("_Static_assert({name} == {value}, \"{name}\");\n"))
        .collect();
    let includes =
        "#include <stddef.h>\n#include <infiniband/terrace_exp.h>\n#include <infiniband/terrace_dv.h>\n";
    let layout = format!("{includes}{checks}");
    let example = include_str!("../../../examples/condition.c");
    for source in [layout.as_str(), example] {
        let mut gcc = Command::new("gcc")
            .args(["-x", "c", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-I", include, "-"])
            .stdin(Stdio::piped())
            .spawn()
            .expect("gcc is installed");
        gcc.stdin.take().expect("a pipe").write_all(source.as_bytes()).expect("gcc reads");
        assert!(gcc.wait().expect("gcc ends").success(), "gcc has said why");
    }
}
