//! Receive queues in memory, one rule each, by UDP and within the host.

#[path = "common/chains.rs"]
mod chains;
mod common;

use std::sync::Arc;

use chains::*;
use common::*;
use terrace_nic::wqe_format::SendEntry;
use terrace_nic::*;

/// Memory for data, behind that of three chains.
const DATA: u64 = 4 * CHAIN_BYTES;

/// Runs a test on two nodes of each kind, with a queue pair of the first connected to one in the memory of the second.
fn on_each(options: Options, test: impl Fn(&Node, &Arc<QueuePair>, &Node, &Chain)) {
    for (a, b) in [(Node::udp(), Node::udp()), (Node::local(), Node::local())] {
        let (qp, chain) = (a.qp(QpType::Rc), Chain::new(&b, 0, options));
        connect(&qp, &b, chain.qp.qpn(), &Tuning::default());
        connect(&chain.qp, &a, qp.qpn(), &Tuning::default());
        test(&a, &qp, &b, &chain);
    }
}

fn send(node: &Node, qp: &Arc<QueuePair>, bytes: &[u8]) {
    node.memory.fill(DATA as usize, bytes);
    qp.post_send([Ok(node.wr(1, SendOp::Send, DATA, bytes.len() as u32))]).expect("posted");
}

fn receive(node: &Node, wr_id: u64, offset: u64) -> RecvWr {
    RecvWr { wr_id, sges: SgeList::from_slice(&[node.sge(offset, 64)]) }
}

fn received(chain: &Chain, count: usize) -> Vec<(u64, WcStatus)> {
    poll_for(&chain.recv_cq, count).iter().map(|wc| (wc.wr_id, wc.status)).collect()
}

#[test]
fn posting_writes_the_doorbell_record_unless_the_queue_is_managed() {
    on_each(CONTROL, |a, qp, b, chain| {
        assert_eq!(chain.post_recv((0..3).map(|wr_id| receive(b, wr_id, DATA + wr_id * 64))), 3);
        assert_eq!(b.memory.bytes(chain.doorbell_place() as usize, 4), [0, 0, 0, 3]);
        for (round, text) in [b"first...", b"second..", b"third..."].into_iter().enumerate() {
            send(a, qp, text);
            assert_eq!(received(chain, 1), [(round as u64, WcStatus::Success)]);
            assert_eq!(b.memory.bytes((DATA + round as u64 * 64) as usize, 8), text);
            assert_eq!(a.completion().status, WcStatus::Success);
        }
    });
}

#[test]
fn reset_clears_the_doorbell_record_so_that_old_entries_are_not_taken() {
    on_each(CONTROL, |a, qp, b, chain| {
        chain.post_recv((0..3).map(|wr_id| receive(b, wr_id, DATA)));
        let reset = QpAttr { state: QpState::Reset, ..QpAttr::default() };
        for end in [qp, &chain.qp] {
            end.modify(&reset, QpAttrMask::STATE).expect("RESET");
        }
        assert_eq!(b.memory.bytes(chain.doorbell_place() as usize, 4), [0; 4]);
        connect(qp, b, chain.qp.qpn(), &Tuning::default());
        connect(&chain.qp, a, qp.qpn(), &Tuning::default());
        let refused = qp.counters().rnr_naks_received;
        send(a, qp, b"12345678");
        wait_until("the peer was told that it is not ready", || qp.counters().rnr_naks_received > refused);
        chain.post_recv([receive(b, 9, DATA)]);
        assert_eq!(received(chain, 1), [(9, WcStatus::Success)]);
        assert_eq!(a.completion().status, WcStatus::Success);
    });
}

#[test]
fn a_managed_receive_waits_for_its_enable_and_is_read_only_then() {
    on_each(MANAGED, |a, qp, b, chain| {
        let (control, _end) = Chain::loopback(b, CHAIN_BYTES, CONTROL);
        let end = chain.post_recv([receive(b, 7, DATA)]);
        assert_eq!(b.memory.bytes(chain.doorbell_place() as usize, 4), [0; 4]);
        send(a, qp, b"12345678");
        wait_until("the peer was told that it is not ready", || qp.counters().rnr_naks_received > 0);
        let elsewhere = (b.memory.addr() + DATA + 512).to_be_bytes();
        b.memory.fill(chain.recv_place(0) as usize + 8, &elsewhere);
        control.post([(SendEntry::EnableRecv { qpn: chain.qp.qpn(), index: end }, NONE)]);
        assert_eq!(received(chain, 1), [(7, WcStatus::Success)]);
        assert_eq!(b.memory.bytes(DATA as usize + 512, 8), b"12345678");
        assert_eq!(a.completion().status, WcStatus::Success);
    });
}

#[test]
fn a_rewritten_doorbell_record_recycles_receives_for_ever() {
    on_each(MANAGED, |a, qp, b, chain| {
        chain.post_recv((0..RECEIVES.into()).map(|wr_id| receive(b, wr_id, DATA)));
        let record = SendOp::Write { va: b.memory.addr() + chain.doorbell_place(), rkey: b.mr.rkey() };
        for round in 0..200u32 {
            if round.is_multiple_of(RECEIVES) {
                let index = (round + RECEIVES) & 0xffff;
                a.memory.fill(DATA as usize + 64, &index.to_be_bytes());
                qp.post_send([Ok(a.wr(2, record, DATA + 64, 4))]).expect("posted");
                assert_eq!(a.completion().status, WcStatus::Success);
            }
            if round % RECEIVES == 1 {
                // An old number changes nothing.
                b.memory.fill(chain.doorbell_place() as usize, &round.to_be_bytes());
            }
            send(a, qp, &round.to_ne_bytes());
            assert_eq!(received(chain, 1), [(u64::from(round % RECEIVES), WcStatus::Success)]);
            assert_eq!(a.completion().status, WcStatus::Success);
        }
    });
}

#[test]
fn a_receive_may_scatter_into_entries_and_into_its_own_doorbell_record() {
    on_each(MANAGED, |a, qp, b, chain| {
        let (work, _other) = Chain::loopback(b, CHAIN_BYTES, Options { blocks: 1, ..MANAGED });
        let (control, _end) = Chain::loopback(b, 2 * CHAIN_BYTES, CONTROL);
        // A queue of one block, which is executed again and again.
        work.post([(copy(b, DATA, DATA + 64, 8), SIGNALED)]);
        b.memory.fill(DATA as usize + 256, b"argument");
        // A message is the address to copy from, and the next number of the doorbell record.
        let sges = SgeList::from_slice(&[b.sge(work.place(0, 2) + 8, 8), b.sge(chain.doorbell_place(), 4)]);
        chain.post_recv((0..RECEIVES.into()).map(|wr_id| RecvWr { wr_id, sges: sges.clone() }));
        b.memory.fill(chain.doorbell_place() as usize, &1u32.to_be_bytes());
        for round in 1..=40u32 {
            control.post([(wait(&chain.recv_cq, round), NONE), (enable(&work.qp, round), NONE)]);
            b.memory.fill(DATA as usize + 64, &[0; 8]);
            let mut message = (b.memory.addr() + DATA + 256).to_be_bytes().to_vec();
            message.extend((round + 1).to_be_bytes());
            send(a, qp, &message);
            assert_eq!(work.sent(1)[0].status, WcStatus::Success);
            assert_eq!(b.memory.bytes(DATA as usize + 64, 8), b"argument", "{round}");
            assert_eq!(received(chain, 1).len(), 1);
            assert_eq!(a.completion().status, WcStatus::Success);
        }
    });
}

#[test]
fn receives_of_a_failed_queue_pair_are_flushed() {
    on_each(CONTROL, |_, _, b, chain| {
        chain.post_recv((0..3).map(|wr_id| receive(b, wr_id, DATA)));
        let error = QpAttr { state: QpState::Err, ..QpAttr::default() };
        chain.qp.modify(&error, QpAttrMask::STATE).expect("ERR");
        assert_eq!(received(chain, 3), [0, 1, 2].map(|wr_id| (wr_id, WcStatus::Flushed)));
    });
}

#[test]
fn receives_that_are_posted_or_enabled_after_the_failure_are_flushed_too() {
    let error = QpAttr { state: QpState::Err, ..QpAttr::default() };
    on_each(CONTROL, |_, _, b, chain| {
        chain.qp.modify(&error, QpAttrMask::STATE).expect("ERR");
        chain.post_recv((0..3).map(|wr_id| receive(b, wr_id, DATA)));
        assert_eq!(received(chain, 3), [0, 1, 2].map(|wr_id| (wr_id, WcStatus::Flushed)));
    });
    on_each(MANAGED, |_, _, b, chain| {
        let (control, _end) = Chain::loopback(b, CHAIN_BYTES, CONTROL);
        chain.qp.modify(&error, QpAttrMask::STATE).expect("ERR");
        let end = chain.post_recv((0..2).map(|wr_id| receive(b, wr_id, DATA)));
        chain.qp.enable_recv(end - 1).expect("enabled");
        assert_eq!(received(chain, 1), [(0, WcStatus::Flushed)]);
        control.post([(SendEntry::EnableRecv { qpn: chain.qp.qpn(), index: end }, NONE)]);
        assert_eq!(received(chain, 1), [(1, WcStatus::Flushed)]);
    });
}

#[test]
fn a_receive_that_is_not_posted_leaves_the_doorbell_record_alone() {
    on_each(CONTROL, |_, _, b, chain| {
        chain.post_recv([receive(b, 0, DATA)]);
        b.memory.fill(chain.doorbell_place() as usize, &[0, 0, 0, 7]);
        let refused = chain.qp.post_receive_entries([Err(Error::Invalid("refused"))]);
        assert_eq!(refused, Err((0, Error::Invalid("refused"))));
        assert_eq!(b.memory.bytes(chain.doorbell_place() as usize, 4), [0, 0, 0, 7]);
    });
}

#[test]
fn a_receive_without_rights_fails_as_hardware_has_it() {
    on_each(CONTROL, |a, qp, b, chain| {
        chain.post_recv([receive(b, 4, DATA)]);
        b.memory.fill(chain.recv_place(0) as usize + 4, &[0xff; 4]);
        send(a, qp, b"12345678");
        assert_eq!(received(chain, 1), [(4, WcStatus::LocalProtection)]);
        assert_eq!(chain.qp.state(), QpState::Err);
        assert_eq!(a.completion().status, WcStatus::RemoteOperation);
    });
}
