//! The target.

use terrace_access::optimistic::{
    Held, Move, RegionAccess, Target, TargetAction, TargetConfig, TargetMemory,
};
use terrace_access::proto::{
    Access, Atomic, AtomicKind, Body, Done, Fetch, Hold, Message, Read, Source, Status, Write,
};
use terrace_transport::Time;

const RKEY: u32 = 4;

struct Memory {
    bytes: Vec<u8>,
    held: Vec<u64>,
    answer: Result<Held, Status>,
}

impl TargetMemory for Memory {
    fn hold(&mut self, token: u64, _: u32, _: u64, _: u32, _: RegionAccess) -> Result<Held, Status> {
        if self.answer.is_ok() {
            self.held.push(token);
        }
        self.answer
    }

    fn release(&mut self, token: u64) {
        let at = self.held.iter().position(|held| *held == token).expect("what is released was held");
        self.held.remove(at);
    }

    fn read(&mut self, _: u32, va: u64, out: &mut [u8]) -> Result<(), Status> {
        out.copy_from_slice(&self.bytes[va as usize..va as usize + out.len()]);
        Ok(())
    }

    fn write(&mut self, _: u32, va: u64, data: &[u8]) -> Result<(), Status> {
        self.bytes[va as usize..va as usize + data.len()].copy_from_slice(data);
        Ok(())
    }

    fn atomic(&mut self, _: u32, va: u64, operation: AtomicKind) -> Result<u64, Status> {
        let AtomicKind::FetchAdd { add } = operation else { return Err(Status::Unsupported) };
        let before = u64::from(self.bytes[va as usize]);
        self.bytes[va as usize] += add as u8;
        Ok(before)
    }
}

struct Harness {
    target: Target,
    memory: Memory,
}

impl Harness {
    fn new(answer: Result<Held, Status>) -> Harness {
        let target = Target::new(TargetConfig {
            call_count_max: 4,
            move_bytes_max: 60,
            hold_ns_max: 1000,
            busy_hold_ns_max: 5000,
        });
        Harness { target, memory: Memory { bytes: vec![1; 100], held: Vec::new(), answer } }
    }

    fn take(&mut self, id: u64, body: Body<'_>) {
        assert!(self.target.handle_message(Time(0), &Message { id, body }, &mut self.memory));
    }

    fn check_answer(&mut self, id: u64, body: Body<'_>) {
        match self.target.poll_action(Time(0)) {
            Some(TargetAction::Send(bytes)) => assert_eq!(Message::decode(&bytes), Ok(Message { id, body })),
            other => panic!("{other:?}"),
        }
    }

    fn is_idle(&mut self) -> bool {
        self.target.poll_action(Time(0)).is_none()
    }
}

fn add(va: u64) -> Body<'static> {
    Body::Atomic(Atomic { rkey: RKEY, va, kind: AtomicKind::FetchAdd { add: 2 } })
}

fn hold() -> Body<'static> {
    Body::Hold(Hold { rkey: RKEY, va: 0, length: 10, access: Access::Write })
}

fn done(status: Status) -> Body<'static> {
    Body::Done(Done::one(status))
}

#[test]
fn a_request_that_comes_twice_is_executed_once_and_answered_twice() {
    let mut harness = Harness::new(Ok(Held::Now));
    for _ in 0..2 {
        harness.take(9, add(8));
        harness.check_answer(9, Body::Value(1));
    }
    assert_eq!((harness.memory.bytes[8], harness.memory.held.len()), (3, 0));
    // While it waits for its page, too.
    harness.memory.answer = Ok(Held::Later);
    harness.take(10, add(8));
    harness.take(10, add(8));
    assert!(harness.is_idle());
    harness.target.handle_held(Time(0), 10, Ok(()), &mut harness.memory);
    harness.check_answer(10, Body::Value(3));
    assert!(harness.is_idle());
}

#[test]
fn short_transfers_are_in_messages() {
    let mut harness = Harness::new(Ok(Held::Now));
    let source = Source::Inline(&[5; 3]);
    harness.take(1, Body::Write(Write { rkey: RKEY, va: 10, length: 3, source }));
    harness.check_answer(1, done(Status::Ok));
    harness.take(2, Body::Fetch(Fetch { rkey: RKEY, va: 9, length: 3 }));
    harness.check_answer(2, Body::Data(&[1, 5, 5]));
    assert!(harness.target.is_empty() && harness.memory.held.is_empty());
}

#[test]
fn long_transfers_are_moved_while_the_range_is_held() {
    let mut harness = Harness::new(Ok(Held::Now));
    let read = Read { rkey: RKEY, va: 10, length: 30, pages: None, dest_va: 70, dest_rkey: 8 };
    harness.take(1, Body::Read([read].into_iter().collect()));
    let transfer = Move { token: 1, to_peer: true, region: (RKEY, 10), peer: (8, 70), length: 30 };
    assert_eq!(harness.target.poll_action(Time(0)), Some(TargetAction::Move(transfer)));
    assert_eq!(harness.memory.held, [1]);
    harness.target.handle_moved(1, Ok(()), &mut harness.memory);
    harness.check_answer(1, done(Status::Ok));
    let source = Source::Remote { va: 70, rkey: 8 };
    harness.take(2, Body::Write(Write { rkey: RKEY, va: 10, length: 30, source }));
    let transfer = Move { token: 2, to_peer: false, ..transfer };
    assert_eq!(harness.target.poll_action(Time(0)), Some(TargetAction::Move(transfer)));
    harness.target.handle_moved(2, Err(Status::ClientMemory), &mut harness.memory);
    harness.check_answer(2, done(Status::ClientMemory));
    assert!(harness.memory.held.is_empty());
}

/// Takes a read of a peer, of which the target's owner copies the bytes.
fn take_read(harness: &mut Harness, id: u64) {
    let read = Read { rkey: RKEY, va: 10, length: 30, pages: None, dest_va: 70, dest_rkey: 8 };
    harness.take(id, Body::Read([read].into_iter().collect()));
    assert!(matches!(harness.target.poll_action(Time(0)), Some(TargetAction::Move(_))));
    harness.target.handle_copied(id, &mut harness.memory);
}

#[test]
fn a_transfer_is_answered_behind_its_data_and_counts_until_its_end() {
    let mut harness = Harness::new(Ok(Held::Now));
    for id in 0..4 {
        take_read(&mut harness, id);
        harness.check_answer(id, done(Status::Ok));
    }
    assert!(harness.memory.held.is_empty(), "the bytes are copied");
    // The peer has its four answers, and asks again. It is answered when a transfer has ended.
    take_read(&mut harness, 4);
    assert!(harness.is_idle());
    assert_eq!(harness.memory.held, [4]);
    harness.target.handle_moved(0, Ok(()), &mut harness.memory);
    assert!(harness.is_idle(), "it was answered");
    harness.target.handle_moved(4, Ok(()), &mut harness.memory);
    harness.check_answer(4, done(Status::Ok));
    // It acknowledges nothing more.
    assert_eq!(harness.target.poll_action(Time(1000)), Some(TargetAction::Break));
    harness.target.handle_peer_gone(&mut harness.memory);
    assert!(harness.target.is_empty() && harness.memory.held.is_empty());
}

#[test]
fn a_peer_that_asks_for_a_longer_transfer_than_it_may_is_disconnected() {
    for source in [Source::Remote { va: 0, rkey: 8 }, Source::Inline(&[1; 61])] {
        let mut harness = Harness::new(Ok(Held::Now));
        harness.take(1, Body::Write(Write { rkey: RKEY, va: 0, length: 61, source }));
        let is_broken = harness.target.poll_action(Time(0)) == Some(TargetAction::Break);
        assert_eq!(is_broken, matches!(source, Source::Remote { .. }));
    }
}

#[test]
fn a_peer_with_unfinished_transfers_may_not_ask_for_more_than_others() {
    let mut harness = Harness::new(Ok(Held::Now));
    for id in 0..4 {
        take_read(&mut harness, id);
        harness.check_answer(id, done(Status::Ok));
    }
    (4..8).for_each(|id| take_read(&mut harness, id));
    harness.take(8, hold());
    assert_eq!(harness.target.poll_action(Time(0)), Some(TargetAction::Break));
}

#[test]
fn what_cannot_be_held_is_refused() {
    let mut harness = Harness::new(Err(Status::Busy));
    harness.take(1, add(8));
    harness.check_answer(1, done(Status::Busy));
    harness.memory.answer = Ok(Held::Later);
    harness.take(2, add(8));
    harness.target.handle_held(Time(0), 2, Err(Status::DeviceError), &mut harness.memory);
    harness.check_answer(2, done(Status::DeviceError));
    assert!(harness.target.is_empty() && harness.memory.held.is_empty());
}

#[test]
fn a_peer_that_holds_a_range_for_too_long_is_disconnected() {
    let mut harness = Harness::new(Ok(Held::Now));
    harness.take(1, hold());
    harness.check_answer(1, done(Status::Ok));
    harness.take(1, Body::Release);
    assert!(harness.memory.held.is_empty() && harness.target.is_empty());
    harness.take(2, hold());
    harness.check_answer(2, done(Status::Ok));
    assert_eq!(harness.target.deadline(), Some(Time(1000)));
    assert_eq!(harness.target.poll_action(Time(1000)), Some(TargetAction::Break));
    assert_eq!(harness.memory.held, [2], "until the queue pairs are in the error state");
    assert_eq!(harness.target.poll_action(Time(1000)), None);
    harness.target.handle_peer_gone(&mut harness.memory);
    assert!(harness.memory.held.is_empty());
}

#[test]
fn a_peer_may_hold_a_range_while_its_requests_go_on() {
    let mut harness = Harness::new(Ok(Held::Now));
    harness.take(1, hold());
    harness.check_answer(1, done(Status::Ok));
    for now in [900, 1800, 2700].map(Time) {
        assert_eq!(harness.target.poll_action(now), None);
        harness.target.note_progress(now);
    }
    assert_eq!(harness.target.poll_action(Time(3699)), None);
    assert_eq!(harness.target.poll_action(Time(3700)), Some(TargetAction::Break));
}

#[test]
fn a_peer_whose_requests_go_on_does_not_hold_a_range_for_ever() {
    let mut harness = Harness::new(Ok(Held::Now));
    harness.take(1, hold());
    harness.check_answer(1, done(Status::Ok));
    for now in (900..5000).step_by(900).map(Time) {
        assert_eq!(harness.target.poll_action(now), None);
        harness.target.note_progress(now);
    }
    assert_eq!(harness.target.deadline(), Some(Time(5000)));
    assert_eq!(harness.target.poll_action(Time(5000)), Some(TargetAction::Break));
}

#[test]
fn a_peer_that_sends_too_much_is_disconnected() {
    let mut harness = Harness::new(Ok(Held::Later));
    for id in 0..4 {
        harness.take(id, hold());
        assert!(harness.is_idle());
    }
    harness.take(4, hold());
    assert_eq!(harness.target.poll_action(Time(0)), Some(TargetAction::Break));
    assert_eq!(harness.memory.held.len(), 4);
}

#[test]
fn answers_take_bounded_memory() {
    let mut harness = Harness::new(Ok(Held::Now));
    for id in (0..100).rev() {
        harness.take(id, add(8));
        assert!(!harness.is_idle());
        harness.memory.bytes[8] = 1;
    }
    harness.take(99, add(8));
    harness.check_answer(99, Body::Value(1));
    assert_eq!(harness.memory.bytes[8], 3, "long forgotten: executed");
}

#[test]
fn a_peer_whose_transfer_does_not_end_is_disconnected() {
    let mut harness = Harness::new(Ok(Held::Later));
    let read = Read { rkey: RKEY, va: 10, length: 30, pages: None, dest_va: 70, dest_rkey: 8 };
    harness.take(1, Body::Read([read].into_iter().collect()));
    assert_eq!(harness.target.deadline(), None, "it waits for its page");
    harness.target.handle_held(Time(500), 1, Ok(()), &mut harness.memory);
    assert!(matches!(harness.target.poll_action(Time(500)), Some(TargetAction::Move(_))));
    assert_eq!(harness.target.deadline(), Some(Time(1500)));
    assert_eq!(harness.target.poll_action(Time(1500)), Some(TargetAction::Break));
    assert_eq!(harness.memory.held, [1], "until the transfer has ended");
    harness.target.handle_peer_gone(&mut harness.memory);
    assert!(harness.memory.held.is_empty());
}
