//! Send queues in memory, one rule each, by UDP and within the host.

#[path = "common/chains.rs"]
mod chains;
mod common;

use chains::*;
use common::*;
use terrace_nic::wqe_format::{SendEntry, opcode};
use terrace_nic::*;

/// Memory for data, behind that of three chains.
const DATA: u64 = 4 * CHAIN_BYTES;

/// Runs a test on a node of each kind.
fn on_each(test: impl Fn(&Node)) {
    [Node::udp(), Node::local()].iter().for_each(test);
}

fn status(wcs: &[Wc]) -> Vec<(u64, WcStatus)> {
    wcs.iter().map(|wc| (wc.wr_id, wc.status)).collect()
}

#[test]
fn an_entry_is_executed_when_it_is_enabled_and_not_before() {
    on_each(|node| {
        let (chain, _other) = Chain::loopback(node, 0, MANAGED);
        node.memory.fill(DATA as usize, b"first...second..");
        let end = chain.post([(copy(node, DATA, DATA + 100, 8), SIGNALED)]);
        std::thread::sleep(std::time::Duration::from_millis(20));
        assert_eq!(chain.qp.send_indexes(), Some((end, 0, 0)));
        // Until it is enabled, its memory is the program's: here the data segment's address.
        let other = (node.memory.addr() + DATA + 8).to_be_bytes();
        node.memory.fill(chain.place(0, 2) as usize + 8, &other);
        chain.qp.enable_send(end).expect("enabled");
        assert_eq!(status(&chain.sent(1)), [(0, WcStatus::Success)]);
        assert_eq!(node.memory.bytes(DATA as usize + 100, 8), b"second..");
    });
}

#[test]
fn a_queue_that_is_not_managed_executes_what_is_posted() {
    on_each(|node| {
        let (chain, _other) = Chain::loopback(node, 0, CONTROL);
        chain.post([(store(node, DATA, b"12345678"), SIGNALED), (nop(), SIGNALED)]);
        let done = chain.sent(2);
        assert_eq!(status(&done), [(0, WcStatus::Success), (1, WcStatus::Success)]);
        assert_eq!((done[0].opcode, done[1].opcode), (WcOpcode::RdmaWrite, WcOpcode::Nop));
        assert_eq!(node.memory.bytes(DATA as usize, 8), b"12345678");
    });
}

#[test]
fn enabling_counts_blocks_and_a_stale_index_is_ignored() {
    on_each(|node| {
        let (chain, _other) = Chain::loopback(node, 0, MANAGED);
        let (control, _end) = Chain::loopback(node, CHAIN_BYTES, CONTROL);
        chain.post((0..6).map(|_| (nop(), SIGNALED)));
        control.post([(enable(&chain.qp, 2), NONE)]);
        chain.wait_executed(2);
        control.post([(enable(&chain.qp, 1), NONE), (enable(&chain.qp, 2), NONE), (nop(), SIGNALED)]);
        control.sent(1);
        assert_eq!(chain.qp.send_indexes(), Some((6, 2, 2)));
        control.post([(enable(&chain.qp, 6), NONE)]);
        chain.wait_executed(6);
        assert_eq!(chain.sent(6).len(), 6);
    });
}

#[test]
fn a_wait_counts_completions_from_the_creation_of_the_queue_also_those_that_nobody_takes() {
    on_each(|node| {
        let (chain, _other) = Chain::loopback(node, 0, Options { cq_depth: 4, ..MANAGED });
        let (control, _end) = Chain::loopback(node, CHAIN_BYTES, CONTROL);
        chain.send_cq.ignore_overrun();
        let wait_for = 20;
        control.post([(wait(&chain.send_cq, wait_for), SIGNALED)]);
        let end = chain.post((0..wait_for).map(|_| (store(node, DATA, b"12345678"), SIGNALED)));
        chain.qp.enable_send(end - 1).expect("enabled");
        chain.wait_executed(end - 1);
        wait_until("19 have completed", || chain.send_cq.count() == wait_for - 1);
        assert_eq!(control.executed(), 0);
        chain.qp.enable_send(end).expect("enabled");
        assert_eq!(status(&control.sent(1)), [(0, WcStatus::Success)]);
        // Of those that did not fit, the newest are there.
        let left: Vec<u64> = chain.sent(4).iter().map(|wc| wc.wr_id).collect();
        assert_eq!(left, [16, 17, 18, 19]);
        // What has come is not waited for.
        control.post([(wait(&chain.send_cq, 3), SIGNALED)]);
        assert_eq!(status(&control.sent(1)), [(1, WcStatus::Success)]);
    });
}

#[test]
fn a_completion_that_overruns_its_queue_resumes_a_wait_as_well() {
    on_each(|node| {
        let (chain, _other) = Chain::loopback(node, 0, Options { cq_depth: 4, ..MANAGED });
        let (control, _end) = Chain::loopback(node, CHAIN_BYTES, CONTROL);
        control.post([(wait(&chain.send_cq, 5), SIGNALED)]);
        let end = chain.post((0..5).map(|_| (nop(), SIGNALED)));
        chain.qp.enable_send(end).expect("enabled");
        assert_eq!(status(&control.sent(1)), [(0, WcStatus::Success)]);
    });
}

/// Executed at once, a gigabyte would keep the device from receiving for a large part of a second.
#[test]
fn a_long_entry_goes_by_packets() {
    const LONG: u32 = 2 << 20;
    let port = PortConfig { address: Some(LOOPBACK), path: PathChoice::Local, ..PortConfig::default() };
    let node = Node::with(port.device().expect("a port on the loopback"), 8 << 20);
    let (chain, _other) = Chain::loopback(&node, 0, CONTROL);
    let copied = |len| {
        chain.post([(copy(&node, DATA, DATA + u64::from(LONG), len), SIGNALED)]);
        assert_eq!(chain.sent(1)[0].status, WcStatus::Success);
        chain.qp.counters().direct
    };
    wait_until("an entry needs no packets", || copied(8) > 0);
    let data = pattern(LONG as usize, 5);
    node.memory.fill(DATA as usize, &data);
    let before = copied(8);
    assert_eq!(copied(LONG), before);
    assert!(node.memory.bytes(DATA as usize + LONG as usize, LONG as usize) == data);
}

#[test]
fn a_wait_and_an_enable_are_as_long_as_they_say() {
    on_each(|node| {
        let (chain, _other) = Chain::loopback(node, 0, MANAGED);
        let (control, _end) = Chain::loopback(node, CHAIN_BYTES, CONTROL);
        let entries = [wait(&control.send_cq, 1), nop(), enable(&chain.qp, 1), nop(), nop()];
        let end = chain.post(entries.map(|entry| (entry, SIGNALED)));
        for index in [0, 2] {
            // Five segments reach into the next block.
            node.memory.fill(chain.place(index, 0) as usize + 7, &[5]);
        }
        chain.qp.enable_send(end).expect("enabled");
        control.post([(nop(), SIGNALED)]);
        assert_eq!(status(&chain.sent(3)), [0, 2, 4].map(|wr_id| (wr_id, WcStatus::Success)));
        assert_eq!(chain.executed(), end);
    });
}

#[test]
fn completions_before_the_first_wait_count_too() {
    on_each(|node| {
        let (qa, qb) = rc_pair(node, node);
        for round in 0..5 {
            qb.post_recv([node.recv(round, DATA, 64)]).expect("posted");
            qa.post_send([Ok(node.wr(round, SendOp::Send, DATA + 64, 8))]).expect("posted");
            node.completions(2);
        }
        assert_eq!(node.cq.count(), 10);
        let (control, _end) = Chain::loopback(node, 0, CONTROL);
        control.post([(wait(&node.cq, 10), SIGNALED), (wait(&node.cq, 12), SIGNALED)]);
        assert_eq!(status(&control.sent(1)), [(0, WcStatus::Success)]);
        qb.post_recv([node.recv(9, DATA, 64)]).expect("posted");
        qa.post_send([Ok(node.wr(9, SendOp::Send, DATA + 64, 8))]).expect("posted");
        assert_eq!(status(&control.sent(1)), [(1, WcStatus::Success)]);
    });
}

#[test]
fn indexes_wrap_at_16_bits_and_executed_entries_are_executed_again() {
    on_each(|node| {
        let (chain, _other) = Chain::loopback(node, 0, Options { blocks: 8, ..MANAGED });
        let add = SendOp::FetchAdd { va: node.memory.addr() + DATA, rkey: node.mr.rkey(), add: 1 };
        let mut entries = vec![(request(add, Payload::Sge(node.sge(DATA + 8, 8))), NONE)];
        entries.extend((1..8).map(|_| (nop(), NONE)));
        chain.post(entries);
        let mut index = 0;
        for _ in 0..9_000 {
            index += 8;
            chain.qp.enable_send(index).expect("enabled");
            chain.wait_executed(index);
        }
        assert!(index > 1 << 16);
        wait_until("all have taken effect", || node.memory.u64_at(DATA as usize) == 9_000);
    });
}

#[test]
fn an_entry_of_several_blocks_may_lie_over_the_end_of_the_queue() {
    on_each(|node| {
        let (chain, _other) = Chain::loopback(node, 0, Options { blocks: 8, ..MANAGED });
        node.memory.fill(DATA as usize, &0x0102_0304_0506_0708u64.to_be_bytes());
        // The conversion of byte order that ODRP describes: a READ whose elements are the bytes of the result, reversed.
        let result = DATA + 64;
        let sges: SgeList = (0..8).map(|byte| node.sge(result + 7 - byte, 1)).collect();
        let op = SendOp::Read { va: node.memory.addr() + DATA, rkey: node.mr.rkey() };
        chain.post((0..6).map(|_| (nop(), NONE)));
        chain.qp.enable_send(6).expect("enabled");
        chain.wait_executed(6);
        let end = chain.post([(request(op, Payload::Sges(sges)), SIGNALED)]);
        assert_eq!(end, 9, "ten segments are three blocks");
        chain.qp.enable_send(end).expect("enabled");
        assert_eq!(status(&chain.sent(1)), [(6, WcStatus::Success)]);
        assert_eq!(node.memory.bytes(result as usize, 8), 0x0102_0304_0506_0708u64.to_le_bytes());
    });
}

#[test]
fn masked_atomics_change_fields() {
    on_each(|node| {
        let (chain, _other) = Chain::loopback(node, 0, CONTROL);
        node.memory.fill(DATA as usize, &0xff00_ff78u64.to_ne_bytes());
        let op = |compare| SendOp::MaskedCompareSwap {
            va: node.memory.addr() + DATA,
            rkey: node.mr.rkey(),
            compare,
            swap: 0x1234_5678,
        };
        let masked =
            |result| Masked { result: node.sge(result, 8), compare_mask: 0xff00, swap_mask: 0xffff_0000 };
        let payload = |result| Payload::Masked(Box::new(masked(result)));
        chain.post([
            (request(op(0xfe00), payload(DATA + 8)), NONE),
            (request(op(0xff00), payload(DATA + 16)), NONE),
            (masked_add(node, DATA, 8 << 3, 0x40, DATA + 24), SIGNALED),
        ]);
        assert_eq!(status(&chain.sent(1)), [(4, WcStatus::Success)]);
        let at = |offset| node.memory.u64_at((DATA + offset) as usize);
        assert_eq!([at(8), at(16), at(24)], [0xff00_ff78, 0xff00_ff78, 0x1234_ff78]);
        assert_eq!(at(0), 0x1234_ff38, "the carry out of bit 6 is lost");
    });
}

#[test]
fn a_compare_and_swap_on_an_opcode_is_a_condition() {
    on_each(|node| {
        let (chain, _other) = Chain::loopback(node, 0, MANAGED);
        let (control, _end) = Chain::loopback(node, CHAIN_BYTES, CONTROL);
        for (round, x) in [7u64, 8].into_iter().enumerate() {
            // if x == 7 { result = 1 }: x is in the entry's immediate data, beside which the CAS has only NOPs.
            node.memory.fill(DATA as usize, &[0; 8]);
            let at = chain.posted();
            let target = store(node, DATA, &1u64.to_ne_bytes());
            let end = chain.post([(target, SIGNALED), (nop(), SIGNALED)]);
            let place = chain.place(at, 0);
            let mut head: [u8; 8] = node.memory.bytes(place as usize, 8).try_into().expect("8 bytes");
            let write = u64::from_ne_bytes(head);
            (head[0], head[3]) = (x as u8, opcode::NOP);
            node.memory.fill(place as usize, &head);
            head[0] = 7;
            let condition = compare_swap(node, place, u64::from_ne_bytes(head), write, DATA + 8);
            control.post([
                (condition, SIGNALED),
                (wait(&control.send_cq, round as u32 + 1), NONE),
                (enable(&chain.qp, end), NONE),
            ]);
            assert_eq!(status(&control.sent(1)).len(), 1);
            assert!(chain.sent(2).iter().all(|wc| wc.status == WcStatus::Success));
            assert_eq!(node.memory.u64_at(DATA as usize), u64::from(x == 7), "{x}");
        }
    });
}

/// Fills a managed queue of 256 blocks with a loop that counts at `counter`, and enables itself by its queue's length for
/// ever: the masked FAA adds 1 to the upper byte of the big-endian index.
fn endless(node: &Node, chain: &Chain, counter: u64, result: u64) {
    let index_at = chain.place(BLOCKS - 1, 1) + 8;
    let add = SendOp::FetchAdd { va: node.memory.addr() + counter, rkey: node.mr.rkey(), add: 1 };
    let mut entries = vec![
        (request(add, Payload::Sge(node.sge(result, 8))), NONE),
        (masked_add(node, index_at, 1 << 16, 1 << 23, result + 8), NONE),
    ];
    entries.extend((2..BLOCKS - 1).map(|_| (nop(), NONE)));
    // The fence has the entry read again when the FAA is done.
    entries.push((enable(&chain.qp, BLOCKS), SendFlags::FENCE));
    chain.post(entries);
    chain.qp.enable_send(BLOCKS).expect("enabled");
}

#[test]
fn an_endless_chain_leaves_others_their_turns() {
    on_each(|node| {
        let (chain, _other) = Chain::loopback(node, 0, MANAGED);
        endless(node, &chain, DATA, DATA + 8);
        let turns = || node.memory.u64_at(DATA as usize);
        wait_until("it runs", || turns() > 3);
        let (qa, qb) = rc_pair(node, node);
        let (other, _end) = Chain::loopback(node, CHAIN_BYTES, CONTROL);
        for round in 0..50 {
            qb.post_recv([node.recv(round, DATA + 64, 64)]).expect("posted");
            qa.post_send([Ok(node.wr(round, SendOp::Send, DATA + 128, 8))]).expect("posted");
            assert!(node.completions(2).iter().all(|wc| wc.status == WcStatus::Success));
            other.post([(store(node, DATA + 256, b"12345678"), SIGNALED)]);
            assert_eq!(status(&other.sent(1)), [(round, WcStatus::Success)]);
        }
        let before = turns();
        wait_until("it still runs", || turns() > before + 3);
        let error = QpAttr { state: QpState::Err, ..QpAttr::default() };
        chain.qp.modify(&error, QpAttrMask::STATE).expect("ERR");
        wait_until("it has stopped", || {
            chain.qp.send_indexes().is_some_and(|(_, enabled, done)| enabled == done)
        });
    });
}

#[test]
fn a_chain_of_more_bytes_than_a_pass_may_execute_goes_on() {
    let length = 256 << 10;
    on_each(|node| {
        let (chain, _other) = Chain::loopback(node, 0, MANAGED);
        // More than a pass may.
        let end = chain.post((0..64).map(|_| (copy(node, DATA, DATA + length, length as u32), SIGNALED)));
        chain.qp.enable_send(end).expect("enabled");
        assert!(chain.sent(64).iter().all(|wc| wc.status == WcStatus::Success));
    });
}

#[test]
fn a_chain_that_is_longer_than_the_transports_queue_goes_on_as_requests_complete() {
    on_each(|node| {
        let (chain, _other) = Chain::loopback(node, 0, Options { max_send_wr: 4, ..MANAGED });
        let end = chain.post((0..200).map(|_| (store(node, DATA, &[9; 16]), SIGNALED)));
        chain.qp.enable_send(end).expect("enabled");
        assert!(chain.sent(200).iter().enumerate().all(|(at, wc)| wc.wr_id == at as u64));
    });
}

#[test]
fn a_bad_entry_stops_its_queue_pair_and_those_behind_it_are_flushed() {
    let foreign = |node: &Node| {
        let pd = node.device.alloc_pd().expect("a protection domain");
        let mr = pd.reg_mr(MrRequest {
            addr: node.memory.addr() + DATA,
            length: 64,
            iova: node.memory.addr() + DATA,
            access: REMOTE_ALL,
            paging: None,
        });
        mr.expect("a region").lkey()
    };
    on_each(|node| {
        let stranger = foreign(node);
        let (other, _end) = Chain::loopback(node, 3 * CHAIN_BYTES, CONTROL);
        let write = SendOp::Write { va: node.memory.addr() + DATA + 64, rkey: node.mr.rkey() };
        let alien = Sge { addr: node.memory.addr() + DATA, length: 8, lkey: stranger };
        let wild = SendOp::Write { va: 0x1000, rkey: node.mr.rkey() };
        let cases = [
            (SendEntry::Wait { cqn: 0x5a5a5a, index: 1 }, WcStatus::LocalQpOperation),
            (SendEntry::EnableSend { qpn: 0x5a5a5a, index: 1 }, WcStatus::LocalQpOperation),
            (SendEntry::EnableSend { qpn: other.qp.qpn(), index: 1 }, WcStatus::LocalQpOperation),
            (SendEntry::EnableRecv { qpn: 0x5a5a5a, index: 1 }, WcStatus::LocalQpOperation),
            (SendEntry::EnableRecv { qpn: other.qp.qpn(), index: 1 }, WcStatus::LocalQpOperation),
            (request(write, Payload::Sge(alien)), WcStatus::LocalProtection),
            (request(wild, Payload::Sge(node.sge(DATA, 8))), WcStatus::RemoteAccess),
        ];
        for (case, expected) in cases {
            let (chain, _other) = Chain::loopback(node, 0, MANAGED);
            let end = chain.post([(nop(), SIGNALED), (case.clone(), SIGNALED), (nop(), NONE)]);
            chain.qp.enable_send(end).expect("enabled");
            let done = chain.sent(3);
            let statuses: Vec<WcStatus> = done.iter().map(|wc| wc.status).collect();
            assert_eq!(statuses, [WcStatus::Success, expected, WcStatus::Flushed], "{case:?}");
            assert_eq!(chain.qp.state(), QpState::Err);
            chain.qp.destroy().expect("destroyed");
        }
    });
}

#[test]
fn an_entry_behind_one_that_will_fail_has_no_effect() {
    on_each(|node| {
        let (target, _end) = Chain::loopback(node, CHAIN_BYTES, MANAGED);
        let enabled = target.post([(nop(), SIGNALED)]);
        let (chain, other) = Chain::loopback(node, 0, CONTROL);
        // The first waits for a receive.
        chain.post([
            (request(SendOp::Send, Payload::Sge(node.sge(DATA, 8))), SIGNALED),
            (SendEntry::Wait { cqn: 0x5a5a5a, index: 1 }, SIGNALED),
            (enable(&target.qp, enabled), SIGNALED),
        ]);
        wait_until("the peer was told that it is not ready", || chain.qp.counters().rnr_naks_received > 0);
        assert_eq!(chain.qp.state(), QpState::Rts);
        other.post_recv([node.recv(9, DATA + 64, 64)]).expect("posted");
        let expected = [WcStatus::Success, WcStatus::LocalQpOperation, WcStatus::Flushed];
        let done = chain.sent(3);
        assert_eq!(status(&done), [0, 1, 2].map(|index| (index, expected[index as usize])));
        assert_eq!(target.qp.send_indexes(), Some((enabled, 0, 0)));
    });
}

#[test]
fn any_bytes_in_an_entry_do_no_more_than_its_keys_grant() {
    on_each(|node| {
        for opcode in 0..=u8::MAX {
            for segments in [0, 1, 2, 4, 63] {
                let (chain, _other) = Chain::loopback(node, 0, MANAGED);
                let end = chain.post([(nop(), NONE), (nop(), NONE)]);
                let noise: Vec<u8> = (0..128).map(|at: u8| at.wrapping_mul(57) ^ opcode).collect();
                node.memory.fill(chain.place(0, 0) as usize, &noise);
                node.memory.fill(chain.place(0, 0) as usize + 3, &[opcode]);
                node.memory.fill(chain.place(0, 0) as usize + 7, &[segments]);
                chain.qp.enable_send(end).expect("enabled");
                wait_until("it is executed or refused", || chain.executed() >= 1);
                chain.qp.destroy().expect("destroyed");
            }
        }
    });
}

#[test]
fn queues_in_memory_that_is_gone_stop_their_queue_pair() {
    on_each(|node| {
        let region = Buffer::new(&node.pd, CHAIN_BYTES as usize, REMOTE_ALL).expect("memory");
        let init = node.init(QpType::Rc);
        let queue = WorkQueueInit {
            addr: region.addr(),
            lkey: region.mr().lkey(),
            len: 16,
            stride: 64,
            is_managed: true,
            ignores_overflow: false,
        };
        let recv = WorkQueueInit { addr: region.addr() + 8192, ..queue };
        let queues = WorkQueuesInit {
            send: queue,
            recv: Some(recv),
            doorbell_record: region.addr() + 32768,
            doorbell_lkey: region.mr().lkey(),
        };
        let qp = node.pd.create_qp_in_memory(init, queues).expect("a queue pair");
        let other = node.qp(QpType::Rc);
        connect(&qp, node, other.qpn(), &Tuning::default());
        connect(&other, node, qp.qpn(), &Tuning::default());
        let end = qp.post_entries((0..16).map(|wr_id| Ok((nop(), SIGNALED, wr_id)))).expect("posted");
        let full = qp.post_entries([Ok((nop(), SIGNALED, 16))]);
        assert!(matches!(full, Err((0, Error::NoMemory(_)))), "{full:?}");
        drop(region);
        qp.enable_send(end).expect("enabled");
        let done = node.completions(16);
        assert_eq!(done[0].status, WcStatus::LocalProtection);
        assert!(done[1..].iter().all(|wc| wc.status == WcStatus::Flushed));
        assert_eq!(qp.state(), QpState::Err);
    });
}

#[test]
fn reset_forgets_what_was_posted() {
    on_each(|node| {
        let (chain, other) = Chain::loopback(node, 0, MANAGED);
        chain.post((0..5).map(|_| (nop(), SIGNALED)));
        chain.qp.enable_send(3).expect("enabled");
        chain.sent(3);
        let reset = QpAttr { state: QpState::Reset, ..QpAttr::default() };
        chain.qp.modify(&reset, QpAttrMask::STATE).expect("RESET");
        assert_eq!(chain.qp.send_indexes(), Some((0, 0, 0)));
        connect(&chain.qp, node, other.qpn(), &Tuning::default());
        let end = chain.post([(nop(), SIGNALED)]);
        chain.qp.enable_send(end).expect("enabled");
        assert_eq!(status(&chain.sent(1)), [(0, WcStatus::Success)]);
    });
}

#[test]
fn entries_go_the_direct_way_to_a_same_host_peer() {
    let (a, b) = (Node::local(), Node::local());
    let (chain, other) = (Chain::new(&a, 0, CONTROL), b.qp(QpType::Rc));
    connect(&chain.qp, &b, other.qpn(), &Tuning::default());
    connect(&other, &a, chain.qp.qpn(), &Tuning::default());
    wait_until("an entry needs no packets", || {
        chain.post([(store(&b, DATA, b"directly"), SIGNALED)]);
        assert_eq!(chain.sent(1)[0].status, WcStatus::Success);
        chain.qp.counters().direct > 0
    });
    assert_eq!(b.memory.bytes(DATA as usize, 8), b"directly");
}
