//! Successful operations on a queue pair that is connected to itself, by the C ABI.

mod common;

use std::ffi::c_int;
use std::ptr::null_mut;
use std::time::Duration;

use common::*;
use terrace_ibverbs::abi::newer::{
    IBV_ACCESS_FLUSH_GLOBAL, IBV_ACCESS_FLUSH_PERSISTENT, IBV_QP_EX_WITH_FLUSH, IBV_WC_FLUSH, QpEx,
};
use terrace_ibverbs::abi::terrace::terrace_append_wr;
use terrace_ibverbs::abi::*;

#[test]
fn the_builder_posts_atomic_write_and_flush() {
    let context = open();
    let mut word = [0_u64; 512];
    // SAFETY: objects of this device, and memory that outlives them.
    unsafe {
        let pd = ibv_alloc_pd(context);
        let cq = ibv_create_cq(context, 16, null_mut(), null_mut(), 0);
        let access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_FLUSH_GLOBAL;
        let mr = ibv_reg_mr(pd, word.as_mut_ptr().cast(), 4096, access as c_int);
        assert!(!mr.is_null(), "errno {}", errno());
        let mut init: ibv_qp_init_attr_ex = zero();
        let plain = qp_init(cq, IBV_QPT_RC);
        (init.send_cq, init.recv_cq, init.cap) = (cq, cq, plain.cap);
        (init.qp_type, init.pd) = (IBV_QPT_RC, pd);
        init.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
        init.send_ops_flags = u64::from(IBV_QP_EX_WITH_ATOMIC_WRITE) | IBV_QP_EX_WITH_FLUSH;
        let qp = verbs(context).create_qp_ex.unwrap()(context, &raw mut init);
        assert!(!qp.is_null(), "errno {}", errno());
        connect(qp, (*qp).qp_num);
        let mut attr: ibv_qp_attr = zero();
        attr.qp_access_flags = access;
        assert_eq!(ibv_modify_qp(qp, &raw mut attr, IBV_QP_ACCESS_FLAGS as c_int), 0);

        let ex = ibv_qp_to_qp_ex(qp);
        let value = 0x1122_3344_5566_7788_u64;
        let remote = word.as_ptr() as u64 + 64;
        (*ex).wr_start.unwrap()(ex);
        ((*ex).wr_id, (*ex).wr_flags) = (1, IBV_SEND_SIGNALED);
        (*ex).wr_atomic_write.unwrap()(ex, (*mr).rkey, remote, (&raw const value).cast());
        ((*ex).wr_id, (*ex).wr_flags) = (2, IBV_SEND_SIGNALED);
        (*ex.cast::<QpEx>()).wr_flush.unwrap()(ex, (*mr).rkey, remote, 8, 1, 0);
        assert_eq!((*ex).wr_complete.unwrap()(ex), 0);

        for (wr_id, opcode) in [(1, IBV_WC_ATOMIC_WRITE), (2, IBV_WC_FLUSH)] {
            let wc = completion(context, cq);
            assert_eq!((wc.wr_id, wc.status, wc.opcode), (wr_id, IBV_WC_SUCCESS, opcode));
        }
        assert_eq!((&raw const word[8]).read_volatile(), value);

        assert_eq!(ibv_destroy_qp(qp), 0);
        assert_eq!(ibv_dereg_mr(mr), 0);
        assert_eq!(ibv_destroy_cq(cq), 0);
        assert_eq!(ibv_dealloc_pd(pd), 0);
        assert_eq!(ibv_close_device(context), 0);
    }
}

#[test]
fn a_write_is_committed_and_a_record_is_refused_by_an_ordinary_region() {
    let context = open();
    let mut words: [u64; 512] = std::array::from_fn(|n| n as u64);
    // SAFETY: objects of this device, and memory that outlives them.
    unsafe {
        let pd = ibv_alloc_pd(context);
        let cq = ibv_create_cq(context, 16, null_mut(), null_mut(), 0);
        let access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_FLUSH_PERSISTENT;
        let mr = ibv_reg_mr(pd, words.as_mut_ptr().cast(), 4096, access as c_int);
        let mut init = qp_init(cq, IBV_QPT_RC);
        init.sq_sig_all = 0;
        let qp = ibv_create_qp(pd, &raw mut init);
        connect(qp, (*qp).qp_num);
        let mut attr: ibv_qp_attr = zero();
        attr.qp_access_flags = access;
        assert_eq!(ibv_modify_qp(qp, &raw mut attr, IBV_QP_ACCESS_FLAGS as c_int), 0);

        let base = words.as_ptr() as u64;
        let mut sge = ibv_sge { addr: base, length: 64, lkey: (*mr).lkey };
        let mut write: ibv_send_wr = zero();
        (write.wr_id, write.opcode, write.sg_list, write.num_sge) = (1, IBV_WR_RDMA_WRITE, &raw mut sge, 1);
        write.send_flags = IBV_SEND_SIGNALED;
        (write.wr.rdma.remote_addr, write.wr.rdma.rkey) = (base + 1024, (*mr).rkey);
        let mut bad = null_mut();
        assert_eq!(terrace_post_write_commit(qp, &raw mut write, &raw mut bad), 0);
        let wc = completion(context, cq);
        assert_eq!((wc.wr_id, wc.status, wc.opcode), (1, IBV_WC_SUCCESS, IBV_WC_FLUSH));
        assert_eq!((&raw const words[128 + 7]).read_volatile(), 7);
        write.opcode = IBV_WR_RDMA_READ;
        assert_eq!(terrace_post_write_commit(qp, &raw mut write, &raw mut bad), libc::EINVAL);
        assert_eq!(bad, &raw mut write);

        let mut wr: terrace_append_wr = zero();
        (wr.wr_id, wr.sg_list, wr.num_sge, wr.rkey) = (2, &raw mut sge, 1, (*mr).rkey);
        wr.result = ibv_sge { addr: base + 2048, length: 8, lkey: (*mr).lkey };
        let mut bad = null_mut();
        for (flags, send_flags, result_length, num_sge) in
            [(2, 0, 8, 1), (0, IBV_SEND_INLINE, 8, 1), (0, 0, 4, 1), (0, 0, 8, 99)]
        {
            let mut wrong = terrace_append_wr { flags, send_flags, num_sge, ..std::ptr::read(&raw const wr) };
            wrong.result.length = result_length;
            assert_eq!(terrace_post_append(qp, &raw mut wrong, &raw mut bad), libc::EINVAL);
            assert_eq!(bad, &raw mut wrong);
        }
        assert_eq!(terrace_post_append(null_mut(), &raw mut wr, &raw mut bad), libc::EINVAL);
        assert_eq!(terrace_post_append(qp, &raw mut wr, &raw mut bad), 0);
        // The responder of this queue pair fails, too, perhaps before the requester has the NAK.
        let wc = completion(context, cq);
        assert_eq!(wc.wr_id, 2);
        assert!([IBV_WC_REM_ACCESS_ERR, IBV_WC_WR_FLUSH_ERR].contains(&wc.status), "{}", wc.status);

        assert_eq!(ibv_destroy_qp(qp), 0);
        assert_eq!(ibv_dereg_mr(mr), 0);
        assert_eq!(ibv_destroy_cq(cq), 0);
        assert_eq!(ibv_dealloc_pd(pd), 0);
        assert_eq!(ibv_close_device(context), 0);
    }
}

/// A list of READs of the first words of `from` into the words behind them, one word each.
fn reads(from: &[u64; 512], mr: &ibv_mr, count: usize) -> (Vec<ibv_sge>, Vec<ibv_send_wr>) {
    let addr = |index: usize| from.as_ptr() as u64 + index as u64 * 8;
    let mut sges: Vec<_> =
        (0..count).map(|n| ibv_sge { addr: addr(256 + n), length: 8, lkey: mr.lkey }).collect();
    let mut wrs: Vec<ibv_send_wr> = (0..count).map(|_| zero()).collect();
    for (n, sge) in sges.iter_mut().enumerate() {
        let next = if n + 1 < count { &raw mut wrs[n + 1] } else { null_mut() };
        let wr = &mut wrs[n];
        (wr.wr_id, wr.opcode, wr.sg_list, wr.num_sge, wr.next) = (n as u64, IBV_WR_RDMA_READ, sge, 1, next);
        wr.wr.rdma.remote_addr = addr(n);
        wr.wr.rdma.rkey = mr.rkey;
    }
    (sges, wrs)
}

#[test]
fn the_bad_work_request_of_a_list_is_named_and_those_before_it_are_posted() {
    const COUNT: usize = 8;
    const BAD: usize = 5;
    let context = open();
    let mut words: [u64; 512] = std::array::from_fn(|n| n as u64);
    // SAFETY: objects of this device, and memory that outlives them.
    unsafe {
        let pd = ibv_alloc_pd(context);
        let cq = ibv_create_cq(context, 16, null_mut(), null_mut(), 0);
        let access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ;
        let mr = ibv_reg_mr(pd, words.as_mut_ptr().cast(), 4096, access as c_int);
        let mut init = qp_init(cq, IBV_QPT_RC);
        let qp = ibv_create_qp(pd, &raw mut init);
        connect(qp, (*qp).qp_num);
        let post = ops(context).post_send.unwrap();
        // The first lists are packets, those after the peer is found may be copied together.
        for round in 0..200 {
            let (_sges, mut wrs) = reads(&words, &*mr, COUNT);
            wrs[BAD].num_sge = if round % 2 == 0 { 1 } else { 3 };
            let mut bad = null_mut();
            let posted = post(qp, &raw mut wrs[0], &raw mut bad);
            let (expected, done) = if round % 2 == 0 { (0, COUNT) } else { (libc::EINVAL, BAD) };
            assert_eq!(posted, expected, "round {round}");
            if posted != 0 {
                assert_eq!(bad, &raw mut wrs[BAD], "round {round}");
            }
            for n in 0..done {
                let wc = completion(context, cq);
                assert_eq!((wc.wr_id, wc.status), (n as u64, IBV_WC_SUCCESS), "round {round}");
                assert_eq!((&raw const words[256 + n]).read_volatile(), n as u64);
                (&raw mut words[256 + n]).write_volatile(0);
            }
        }
        assert_eq!(ibv_destroy_qp(qp), 0);
        assert_eq!(ibv_dereg_mr(mr), 0);
        assert_eq!(ibv_destroy_cq(cq), 0);
        assert_eq!(ibv_dealloc_pd(pd), 0);
        assert_eq!(ibv_close_device(context), 0);
    }
}

#[test]
fn extended_and_plain_polls_share_a_queue() {
    let context = open();
    // SAFETY: objects of this device.
    unsafe {
        let pd = ibv_alloc_pd(context);
        let mut init: ibv_cq_init_attr_ex = zero();
        (init.cqe, init.wc_flags) = (64, u64::from(IBV_WC_EX_WITH_COMPLETION_TIMESTAMP));
        let cq = verbs(context).create_cq_ex.unwrap()(context, &raw mut init);
        assert!(!cq.is_null());
        let mut qp_attr = qp_init(cq.cast(), IBV_QPT_RC);
        let qp = ibv_create_qp(pd, &raw mut qp_attr);
        connect(qp, (*qp).qp_num);
        let mut wr: ibv_send_wr = zero();
        wr.opcode = IBV_WR_RDMA_WRITE;
        for wr_id in 0..3 {
            wr.wr_id = wr_id;
            assert_eq!(ops(context).post_send.unwrap()(qp, &raw mut wr, &mut null_mut()), 0);
        }
        std::thread::sleep(Duration::from_millis(200));
        let mut attr: ibv_poll_cq_attr = zero();
        while (*cq).start_poll.unwrap()(cq, &raw mut attr) != 0 {}
        assert_eq!(((*cq).wr_id, (*cq).status), (0, IBV_WC_SUCCESS));
        assert_eq!((*cq).read_opcode.unwrap()(cq), IBV_WC_RDMA_WRITE);
        assert!((*cq).read_completion_ts.unwrap()(cq) > 0);
        (*cq).end_poll.unwrap()(cq);
        // The completion that the extended poll has prefetched is not lost.
        assert_eq!(completion(context, cq.cast()).wr_id, 1);
        // A prefetched completion is dropped with its queue pair.
        assert_eq!(ibv_destroy_qp(qp), 0);
        assert_eq!((*cq).start_poll.unwrap()(cq, null_mut()), libc::ENOENT);
        assert_eq!(ibv_destroy_cq(cq.cast()), 0);
        assert_eq!(ibv_dealloc_pd(pd), 0);
        assert_eq!(ibv_close_device(context), 0);
    }
}

/// A queue pair that writes to itself.
struct Loopback {
    context: *mut ibv_context,
    pd: *mut ibv_pd,
    cq: *mut ibv_cq,
    qp: *mut ibv_qp,
}

impl Loopback {
    fn open() -> Loopback {
        let context = open();
        // SAFETY: objects of this device.
        unsafe {
            let pd = ibv_alloc_pd(context);
            let cq = ibv_create_cq(context, 16, null_mut(), null_mut(), 0);
            let mut init = qp_init(cq, IBV_QPT_RC);
            let qp = ibv_create_qp(pd, &raw mut init);
            assert!(!qp.is_null(), "errno {}", errno());
            connect(qp, (*qp).qp_num);
            Loopback { context, pd, cq, qp }
        }
    }

    /// Whether a WRITE of 4 KiB arrives.
    fn writes(&self) -> bool {
        let source = [7_u8; 4096];
        let mut target = [0_u8; 4096];
        let access = (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE) as c_int;
        // SAFETY: objects of this device, and memory that outlives the work request.
        unsafe {
            let from = ibv_reg_mr(self.pd, source.as_ptr().cast_mut().cast(), 4096, 0);
            let to = ibv_reg_mr(self.pd, target.as_mut_ptr().cast(), 4096, access);
            let mut sge = ibv_sge { addr: source.as_ptr() as u64, length: 4096, lkey: (*from).lkey };
            let mut wr: ibv_send_wr = zero();
            (wr.opcode, wr.sg_list, wr.num_sge) = (IBV_WR_RDMA_WRITE, &raw mut sge, 1);
            (wr.wr.rdma.remote_addr, wr.wr.rdma.rkey) = (target.as_mut_ptr() as u64, (*to).rkey);
            assert_eq!(ops(self.context).post_send.unwrap()(self.qp, &raw mut wr, &mut null_mut()), 0);
            let wc = completion(self.context, self.cq);
            assert_eq!((ibv_dereg_mr(from), ibv_dereg_mr(to)), (0, 0));
            wc.status == IBV_WC_SUCCESS && target == source
        }
    }

    fn close(self) {
        // SAFETY: objects of this device.
        unsafe {
            assert_eq!(ibv_destroy_qp(self.qp), 0);
            assert_eq!(ibv_destroy_cq(self.cq), 0);
            assert_eq!(ibv_dealloc_pd(self.pd), 0);
            assert_eq!(ibv_close_device(self.context), 0);
        }
    }
}

#[test]
fn a_forked_child_can_open_its_own_device() {
    let parents = Loopback::open();
    assert!(parents.writes());
    // SAFETY: the child opens the objects that it uses and exits without running the harness's exit handlers.
    unsafe {
        let child = libc::fork();
        if child == 0 {
            let own = Loopback::open();
            let works = own.writes();
            own.close();
            libc::_exit(if works { 0 } else { 1 });
        }
        // The parent posts work requests meanwhile.
        assert!(parents.writes());
        let mut status = -1;
        assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
        assert_eq!(status, 0, "the child failed");
    }
    assert!(parents.writes());
    parents.close();
}

/// Sets how many descriptors this process may have, and returns how many it might have before.
fn set_descriptors_max(count: libc::rlim_t) -> libc::rlim_t {
    // SAFETY: a structure of integers, which the calls fill and read.
    unsafe {
        let mut limit: libc::rlimit = zero();
        assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit), 0);
        let before = std::mem::replace(&mut limit.rlim_cur, count);
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit), 0);
        before
    }
}

/// Whether this process has a thread that makes progress while the program does not.
fn has_engine() -> bool {
    let threads = std::fs::read_dir("/proc/self/task").expect("threads");
    let names = threads.flatten().filter_map(|thread| std::fs::read(thread.path().join("comm")).ok());
    names.into_iter().any(|name| name == b"terrace-engine\n")
}

/// The links of this process's descriptors.
fn descriptors() -> Vec<String> {
    let entries = std::fs::read_dir("/proc/self/fd").expect("descriptors").flatten();
    let links = entries.filter_map(|entry| std::fs::read_link(entry.path()).ok());
    links.map(|link| link.to_string_lossy().into_owned()).collect()
}

/// Whether this process has a socket by which others forward packets to it.
fn takes_forwarded_packets() -> bool {
    let own = descriptors();
    let names = String::from_utf8_lossy(&std::fs::read("/proc/net/unix").expect("sockets")).into_owned();
    let mut sockets = names.lines().filter(|line| line.contains("@terrace/passing/"));
    sockets.any(|line| {
        line.split_whitespace().nth(6).is_some_and(|inode| own.contains(&format!("socket:[{inode}]")))
    })
}

/// Peers that know only the standard port would never reach a device that was opened without its last descriptors.
#[test]
fn a_device_is_opened_with_all_of_its_sockets_or_not_at_all() {
    // SAFETY: as in the man pages.
    unsafe {
        assert_eq!(ibv_close_device(open()), 0);
        let list = ibv_get_device_list(null_mut());
        set_descriptors_max(256);
        let before = descriptors().len();
        let is_opened = (0..64).any(|room| {
            let held: Vec<_> = std::iter::from_fn(|| std::fs::File::open("/dev/null").ok()).collect();
            let mut held = held.into_iter();
            held.by_ref().take(room).for_each(drop);
            let context = ibv_open_device(*list);
            let error = errno();
            drop(held);
            if context.is_null() {
                assert_eq!(error, libc::EMFILE, "with {room} descriptors");
            } else {
                assert!(takes_forwarded_packets(), "with {room} descriptors");
                assert_eq!(ibv_close_device(context), 0);
            }
            assert_eq!(descriptors().len(), before, "with {room} descriptors");
            !context.is_null()
        });
        assert!(is_opened);
        ibv_free_device_list(list);
    }
}

/// Its engine starts with one of its later calls, when there are descriptors.
#[test]
fn a_forked_child_without_descriptors_gets_an_engine_later() {
    let parents = Loopback::open();
    // SAFETY: the child exits without running the harness's exit handlers.
    unsafe {
        let child = libc::fork();
        if child == 0 {
            let polls = || ops(parents.context).poll_cq.unwrap()(parents.cq, 1, &mut zero());
            let before = set_descriptors_max(0);
            assert_eq!(polls(), 0);
            set_descriptors_max(before);
            let had_none = !has_engine();
            let deadline = std::time::Instant::now() + Duration::from_secs(20);
            while !has_engine() && std::time::Instant::now() < deadline {
                assert_eq!(polls(), 0);
            }
            libc::_exit(if had_none && has_engine() { 0 } else { 1 });
        }
        let mut status = -1;
        assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
        assert_eq!(status, 0, "the child failed");
    }
    parents.close();
}
