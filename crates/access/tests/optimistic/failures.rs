//! Failures, and the end of a queue pair.

use terrace_access::optimistic::{Held, OrderBits};
use terrace_access::proto::{Body, Status};
use terrace_access::region::Knowledge;
use terrace_transport::{SendFlags, SendOp, WcStatus};

use super::harness::{BASE_VA, Harness, Next, PAGE, RKEY};
use super::{OK, done};

#[test]
fn what_the_peer_refuses_ends_the_queue_pair_and_flushes_the_rest() {
    let mut harness = Harness::opened();
    harness.write(1, 0, 8, 0, true);
    harness.versions(2);
    let id = harness.sent_id(|body| matches!(body, Body::Write(_)));
    harness.write(2, 0, 8, 0, true);
    harness.answer(id, done(Status::NoSuchRegion));
    assert!(matches!(harness.next(), Some(Next::Break)));
    assert!(matches!(harness.next(), Some(Next::Complete(1, WcStatus::RemoteAccess))));
    assert!(matches!(harness.next(), Some(Next::Complete(2, WcStatus::Flushed))));
    harness.read(3, 0, 8, 0);
    assert!(matches!(harness.next(), Some(Next::Complete(3, WcStatus::Flushed))));
    assert!(harness.local.held.is_empty());
}

#[test]
fn a_peer_that_is_gone_answers_nothing() {
    let mut harness = Harness::new();
    harness.write(1, 0, 8, 0, true);
    harness.sent_id(|body| matches!(body, Body::Open(_)));
    harness.initiator.handle_peer_gone(harness.now);
    assert!(matches!(harness.next(), Some(Next::Break)));
    assert!(matches!(harness.next(), Some(Next::Complete(1, WcStatus::RetryExceeded))));
    assert!(harness.initiator.is_empty());
}

/// A harness whose first request waits for the description of its region.
fn waiting(op: SendOp) -> Harness {
    let mut harness = Harness::new();
    harness.known = Knowledge::Unknown;
    harness.submit(1, op, 0, 8, SendFlags::SIGNALED, OrderBits::empty());
    harness.idle();
    harness
}

#[test]
fn a_proof_that_the_peer_runs_changes_nothing_and_is_of_the_kind_that_waits() {
    let (va, rkey) = (BASE_VA, RKEY);
    let (read, write) = (SendOp::Read { va, rkey }, SendOp::Write { va, rkey });
    let (swap, add) =
        (SendOp::CompareSwap { va, rkey, compare: 0, swap: 1 }, SendOp::FetchAdd { va, rkey, add: 0 });
    for (op, expected) in [
        (read, (read, 0)),
        (write, (write, 0)),
        (SendOp::WriteImm { va, rkey, imm: 7 }, (write, 0)),
        (SendOp::AtomicWrite { va, rkey }, (write, 0)),
        (swap, (add, 8)),
        (SendOp::FetchAdd { va, rkey, add: 1 }, (add, 8)),
    ] {
        let mut harness = waiting(op);
        assert!(harness.initiator.request_proof());
        let post = harness.post();
        assert_eq!((post.op, post.payload.len()), expected);
        harness.idle();
        assert_eq!(harness.initiator.take_proof(), None);
        harness.succeed(&post);
        assert_eq!(harness.initiator.take_proof(), Some(WcStatus::Success));
        assert_eq!((harness.initiator.take_proof(), harness.initiator.len()), (None, 1));
    }
}

#[test]
fn without_a_request_that_waits_there_is_no_proof() {
    assert!(!Harness::new().initiator.request_proof());
}

#[test]
fn a_proof_that_fails_fails_what_waits() {
    let mut harness = waiting(SendOp::Read { va: BASE_VA, rkey: RKEY });
    harness.initiator.request_proof();
    let post = harness.post();
    harness.complete(&post, WcStatus::RetryExceeded);
    harness.initiator.fail_unfinished(WcStatus::RetryExceeded);
    assert!(matches!(harness.next(), Some(Next::Break)));
    assert!(matches!(harness.next(), Some(Next::Complete(1, WcStatus::RetryExceeded))));
    assert!(harness.initiator.is_empty());
}

#[test]
fn a_flushed_check_repeats_what_was_acknowledged() {
    let mut harness = Harness::opened();
    harness.write(1, 63 * PAGE, 8, 0, true);
    harness.write(2, 63 * PAGE + 64, 8, 8, true);
    let (first, second) = (harness.post(), harness.post());
    let check = harness.post();
    harness.succeed(&first);
    harness.complete(&second, WcStatus::RemoteAccess);
    harness.complete(&check, WcStatus::Flushed);
    let id = harness.sent_id(|body| matches!(body, Body::Write(write) if write.va == BASE_VA + 63 * PAGE));
    harness.answer(id, OK);
    assert!(matches!(harness.next(), Some(Next::Break)));
    assert_eq!(harness.completed(), 1);
    assert!(matches!(harness.next(), Some(Next::Complete(2, WcStatus::RemoteAccess))));
}

#[test]
fn a_write_behind_a_failure_ends_with_its_check() {
    let mut harness = Harness::opened();
    harness.local.answer = Held::Later;
    harness.read(1, 0, 8, 0);
    harness.idle();
    harness.local.answer = Held::Now;
    harness.write(2, 63 * PAGE, 8, 64, false);
    harness.post();
    // The local memory of the READ is gone. The WRITE has no completion if it has succeeded.
    harness.initiator.handle_held(harness.now, 1, false);
    assert!(matches!(harness.next(), Some(Next::Break)));
    assert!(matches!(harness.next(), Some(Next::Complete(1, WcStatus::LocalProtection))));
    let check = harness.post();
    assert!(!harness.local.held.is_empty(), "the NIC may send from the memory of the WRITE");
    harness.complete(&check, WcStatus::Flushed);
    assert!(matches!(harness.next(), Some(Next::Complete(2, WcStatus::Flushed))));
    assert!(harness.local.held.is_empty());
}

#[test]
fn an_answer_that_nothing_was_done_fails_the_request() {
    let mut harness = Harness::opened();
    harness.write(1, 0, 8, 0, true);
    harness.versions(2);
    let id = harness.sent_id(|body| matches!(body, Body::Write(_)));
    harness.answer(id, done(Status::Plain));
    assert!(matches!(harness.next(), Some(Next::Break)));
    assert!(matches!(harness.next(), Some(Next::Complete(1, WcStatus::BadResponse))));
    let mut harness = Harness::new();
    let op = SendOp::WriteImm { va: BASE_VA, rkey: RKEY, imm: 9 };
    harness.submit(1, op, 0, 100, SendFlags::SIGNALED, OrderBits::empty());
    let id = harness.sent_id(|body| matches!(body, Body::Hold(_)));
    harness.answer(id, done(Status::Plain));
    assert!(matches!(harness.next(), Some(Next::Break)));
    assert!(matches!(harness.next(), Some(Next::Complete(1, WcStatus::BadResponse))));
}

#[test]
fn a_queue_pair_that_the_program_ends_repeats_nothing() {
    // A READ that the NIC flushes.
    let mut harness = Harness::new();
    harness.read(1, 0, 8, 0);
    let post = harness.post();
    harness.initiator.flush();
    harness.complete(&post, WcStatus::Flushed);
    assert!(matches!(harness.next(), Some(Next::Complete(1, WcStatus::Flushed))));
    harness.idle();
    // A READ that has found a page absent before.
    harness = Harness::new();
    harness.read(1, 0, 8, 0);
    let post = harness.post();
    harness.initiator.flush();
    harness.fill_absent(0, 8, 0);
    harness.succeed(&post);
    assert!(matches!(harness.next(), Some(Next::Complete(1, WcStatus::Flushed))));
    harness.idle();
}

#[test]
fn a_queue_pair_that_the_program_ends_makes_no_call() {
    let op = SendOp::FetchAdd { va: BASE_VA + 8, rkey: RKEY, add: 5 };
    // The peer is busy before the end, or behind it; or the call is not sent yet.
    for case in 0..3 {
        let mut harness = Harness::with(|config| config.call_count_max = 1);
        harness.submit(1, op, 16, 8, SendFlags::SIGNALED, OrderBits::empty());
        let id = harness.sent_id(|body| matches!(body, Body::Atomic(_)));
        match case {
            0 => {
                harness.answer(id, done(Status::Busy));
                harness.initiator.flush();
            }
            1 => harness.initiator.flush(),
            _ => {
                let other = SendOp::FetchAdd { va: BASE_VA + 16, rkey: RKEY, add: 5 };
                harness.submit(2, other, 32, 8, SendFlags::SIGNALED, OrderBits::empty());
                harness.idle();
                harness.initiator.flush();
            }
        }
        // Nothing waits for the peer's answer, which may never come.
        for flushed in 1..=if case == 2 { 2 } else { 1 } {
            assert!(matches!(harness.next(), Some(Next::Complete(of, WcStatus::Flushed)) if of == flushed));
        }
        harness.idle();
        assert!(harness.initiator.is_empty() && harness.initiator.deadline().is_none());
        if case > 0 {
            harness.answer(id, if case == 1 { done(Status::Busy) } else { Body::Value(7) });
            harness.idle();
        }
        assert_eq!(harness.initiator.calls_in_flight(), 0);
    }
}

#[test]
fn the_first_failed_request_has_the_cause() {
    let mut harness = Harness::opened();
    // The second is on the queue pair before the first, whose versions are not known.
    harness.write(1, 0, 8, 0, true);
    harness.write(2, 63 * PAGE, 8, 8, true);
    let (before, second, check) = (harness.post(), harness.post(), harness.post());
    harness.bring_versions(&before, 1);
    let (first, first_check) = (harness.post(), harness.post());
    harness.complete(&second, WcStatus::RemoteAccess);
    for post in [check, first, first_check] {
        harness.complete(&post, WcStatus::Flushed);
    }
    assert!(matches!(harness.next(), Some(Next::Break)));
    assert!(matches!(harness.next(), Some(Next::Complete(1, WcStatus::RemoteAccess))));
    assert!(matches!(harness.next(), Some(Next::Complete(2, WcStatus::Flushed))));
}

#[test]
fn why_the_peer_has_disconnected_may_complete_behind_its_answer() {
    let cases =
        [(WcStatus::RemoteAccess, WcStatus::RemoteAccess), (WcStatus::Flushed, WcStatus::RetryExceeded)];
    for (completed, reported) in cases {
        let mut harness = Harness::opened();
        harness.write(1, 0, 8, 0, true);
        harness.versions(2);
        let id = harness.sent_id(|body| matches!(body, Body::Write(_)));
        harness.write(2, 63 * PAGE, 8, 8, true);
        let (second, check) = (harness.post(), harness.post());
        harness.answer(id, done(Status::Disconnected));
        assert!(matches!(harness.next(), Some(Next::Break)));
        harness.idle();
        harness.complete(&second, completed);
        harness.complete(&check, WcStatus::Flushed);
        assert!(matches!(harness.next(), Some(Next::Complete(1, status)) if status == reported));
        assert!(matches!(harness.next(), Some(Next::Complete(2, WcStatus::Flushed))));
        harness.idle();
        assert!(harness.initiator.is_empty());
    }
}

#[test]
fn the_nic_refuses_unaligned_atomics() {
    let mut harness = Harness::new();
    let op = SendOp::FetchAdd { va: BASE_VA + 4, rkey: RKEY, add: 5 };
    harness.submit(1, op, 16, 8, SendFlags::SIGNALED, OrderBits::empty());
    let post = harness.post();
    assert_eq!(post.op, op);
    harness.complete(&post, WcStatus::RemoteInvalidRequest);
    assert!(matches!(harness.next(), Some(Next::Break)));
    assert!(matches!(harness.next(), Some(Next::Complete(1, WcStatus::RemoteInvalidRequest))));
}
