//! The initiator and the target of NP-RDMA, step by step. `tests/sim` runs both on NICs.

mod failures;
mod harness;
mod target;

use harness::{BASE_VA, Harness, LENT, Next, PAGE, RKEY, TABLE_KEY, region};
use terrace_access::optimistic::{Held, Order, OrderBits};
use terrace_access::proto::{Access, Body, Done, Source, Status};
use terrace_access::region::Knowledge;
use terrace_transport::{SendFlags, SendOp, SendWr, Time, Wc, WcStatus};

const OK: Body<'static> = Body::Done(Done { status: Status::Ok, count: 1 });

fn done(status: Status) -> Body<'static> {
    Body::Done(Done::one(status))
}

fn is_table_read(wr: &SendWr) -> bool {
    matches!(wr.op, SendOp::Read { rkey: TABLE_KEY, .. })
}

#[test]
fn a_read_of_present_pages_needs_nothing_else() {
    let mut harness = Harness::new();
    harness.read(1, 100, 6000, 0);
    let post = harness.post();
    assert_eq!(post.op, SendOp::Read { va: BASE_VA + 100, rkey: RKEY });
    harness.idle();
    harness.succeed(&post);
    assert_eq!(harness.completed(), 1);
    harness.idle();
    assert_eq!((harness.initiator.counters().optimistic, harness.local.held.len()), (1, 0));
}

#[test]
fn a_piece_of_the_signature_page_is_fetched_again_and_delays_no_other_read() {
    let mut harness = Harness::new();
    harness.read(1, 0, 512, 0);
    harness.read(2, PAGE, 512, 1000);
    let (first, second) = (harness.post(), harness.post());
    // One packet carries all of it, so its first chunk suffices.
    harness.fill_absent(0, 256, 0);
    harness.succeed(&first);
    harness.succeed(&second);
    let id = harness
        .sent_id(|body| matches!(body, Body::Fetch(fetch) if fetch.va == BASE_VA && fetch.length == 512));
    harness.idle();
    harness.answer(id, Body::Data(&[7; 512]));
    assert_eq!((harness.completed(), harness.completed()), (1, 2), "in the order of posting");
    assert_eq!(harness.local.bytes[..512], [7; 512]);
    assert_eq!(harness.initiator.counters().signatures, 1);
}

#[test]
fn a_write_is_posted_when_the_versions_before_it_have_arrived() {
    let mut harness = Harness::new();
    harness.write(1, 0, 2 * PAGE as u32, 0, true);
    let id =
        harness.sent_id(|body| matches!(body, Body::Open(open) if open.rkey == RKEY && open.region_id == 6));
    harness.idle();
    harness.answer_open(id);
    let before = harness.post();
    assert!(is_table_read(&before));
    harness.idle();
    harness.bring_versions(&before, 3);
    let write = harness.post();
    assert_eq!(write.op, SendOp::Write { va: BASE_VA, rkey: RKEY });
    let behind = harness.post();
    harness.succeed(&write);
    harness.idle();
    harness.bring_versions(&behind, 3);
    assert_eq!(harness.completed(), 1);
    // They are known now.
    harness.write(2, PAGE, 100, 0, true);
    assert!(!is_table_read(&harness.post()) && is_table_read(&harness.post()));
    // For a while.
    harness.now = Time(2_000_000);
    harness.write(3, 0, 100, 0, true);
    assert!(is_table_read(&harness.post()));
    harness.idle();
}

#[test]
fn unsignaled_writes_share_the_check_of_the_next_signaled_request() {
    let mut harness = Harness::opened();
    for number in 1..=3 {
        harness.write(number, 63 * PAGE + number * 64, 64, number * 64, number == 3);
    }
    let writes = [harness.post(), harness.post(), harness.post()];
    let check = harness.post();
    harness.idle();
    writes.iter().for_each(|write| harness.succeed(write));
    harness.bring_versions(&check, 1);
    assert_eq!(harness.completed(), 3);
    harness.idle();
    assert!(harness.initiator.is_empty());
}

#[test]
fn unsignaled_writes_do_not_wait_for_ever() {
    let mut harness = Harness::opened();
    harness.write(1, 63 * PAGE, 64, 0, false);
    let write = harness.post();
    harness.succeed(&write);
    harness.idle();
    let deadline = harness.initiator.deadline().expect("a check is due");
    harness.now = deadline;
    harness.versions(1);
    harness.idle();
    assert!(harness.initiator.is_empty());
}

#[test]
fn a_request_begins_when_an_unsignaled_one_that_it_waits_for_has_finished() {
    // A SEND waits until the WRITE is checked.
    let mut harness = Harness::opened();
    harness.write(1, 63 * PAGE, 64, 0, false);
    harness.submit(2, SendOp::Send, 64, 8, SendFlags::SIGNALED, OrderBits::empty());
    harness.post();
    harness.versions(1);
    assert_eq!(harness.post().op, SendOp::Send);
    // A request that is ordered, or fenced, waits for a READ.
    let op = SendOp::Read { va: BASE_VA, rkey: RKEY };
    let cases = [(SendFlags::SIGNALED, OrderBits::BEFORE), (SendFlags::FENCE, OrderBits::empty())];
    for (flags, order) in cases {
        harness = Harness::new();
        harness.submit(1, op, 0, 8, SendFlags::empty(), OrderBits::empty());
        harness.submit(2, SendOp::Send, 64, 8, flags, order);
        let read = harness.post();
        harness.idle();
        harness.succeed(&read);
        assert_eq!(harness.post().op, SendOp::Send);
    }
}

#[test]
fn a_write_needs_no_completion_beside_that_of_its_check() {
    let mut harness = Harness::opened();
    harness.write(1, 63 * PAGE, 64, 0, true);
    assert!(!harness.post().flags.contains(SendFlags::SIGNALED));
    harness.versions(1);
    assert_eq!(harness.completed(), 1);
    // If a later one fails, it has succeeded.
    harness.write(2, 63 * PAGE, 64, 0, true);
    harness.write(3, 63 * PAGE, 64, 0, true);
    let (first, second) = (harness.post(), harness.post());
    harness.complete(&second, WcStatus::RemoteAccess);
    let wc = Wc { wr_id: first.wr_id, ..Wc::default() };
    assert!(!harness.initiator.handle_completion(harness.now, &wc, &mut harness.local), "it has ended");
}

#[test]
fn writes_without_completions_leave_room_for_their_check() {
    let mut harness = Harness::opened_with(|config| config.post_count_max = 4);
    (1..5).for_each(|wr_id| harness.write(wr_id, 63 * PAGE, 8, 8 * wr_id, false));
    let is_signaled = [(); 4].map(|()| harness.post().flags.contains(SendFlags::SIGNALED));
    assert_eq!(is_signaled, [false, false, true, false]);
}

#[test]
fn absent_pages_are_not_written_one_sided() {
    let mut harness = Harness::opened();
    harness.write(1, 0, 100, 0, true);
    harness.versions(2);
    let id = harness.sent_id(|body| {
        matches!(body, Body::Write(write) if write.va == BASE_VA && write.source == Source::Inline(&[0x55; 100]))
    });
    harness.idle();
    harness.answer(id, OK);
    assert_eq!(harness.completed(), 1);
    assert_eq!(harness.initiator.counters().absent, 1);
}

#[test]
fn a_page_that_came_or_went_is_repeated_and_so_is_what_was_written_over_it() {
    let mut harness = Harness::opened();
    harness.write(1, 63 * PAGE, 64, 0, false);
    harness.write(2, 63 * PAGE + 32, 64, 64, true);
    // A WRITE to other bytes of the page is not concerned.
    harness.write(3, 63 * PAGE + 512, 64, 128, true);
    let writes = [harness.post(), harness.post(), harness.post()];
    let check = harness.post();
    writes.iter().for_each(|write| harness.succeed(write));
    harness.bring_versions(&check, 3);
    let by_message = |offset: u64| move |body: &Body<'_>| matches!(body, Body::Write(write) if write.va == BASE_VA + 63 * PAGE + offset);
    let first = harness.sent_id(by_message(0));
    let third = harness.sent_id(by_message(512));
    harness.idle();
    harness.answer(first, OK);
    let second = harness.sent_id(by_message(32));
    harness.answer(third, OK);
    harness.idle();
    harness.answer(second, OK);
    assert_eq!((harness.completed(), harness.completed()), (2, 3));
}

#[test]
fn while_four_checks_are_under_way_writes_share_the_next() {
    let mut harness = Harness::opened();
    let write = |harness: &mut Harness, number| harness.write(number, 63 * PAGE + 64 * number, 64, 0, true);
    let checked = [0, 1, 2, 3].map(|number| {
        write(&mut harness, number);
        (harness.post(), harness.post())
    });
    (4..6).for_each(|number| write(&mut harness, number));
    let writes = [harness.post(), harness.post()];
    harness.idle();
    let mut shared = None;
    for (number, (write, check)) in checked.iter().enumerate() {
        harness.succeed(write);
        harness.bring_versions(check, 1);
        assert_eq!(harness.completed(), number as u64);
        shared = shared.or_else(|| Some(harness.post()));
        harness.idle();
    }
    writes.iter().for_each(|write| harness.succeed(write));
    harness.bring_versions(&shared.expect("the end of a check begins the next"), 1);
    assert_eq!((harness.completed(), harness.completed()), (4, 5));
}

#[test]
fn a_write_with_a_newer_version_than_an_unfinished_one_waits() {
    let mut harness = Harness::opened();
    harness.write(1, 62 * PAGE, 64, 0, true);
    harness.versions(1);
    let (write, check) = (harness.post(), harness.post());
    // The version that it began with is too old by now.
    harness.now = Time(5_000_000);
    harness.write(2, 62 * PAGE, 64, 0, true);
    harness.idle();
    harness.succeed(&write);
    harness.bring_versions(&check, 1);
    assert_eq!(harness.completed(), 1);
    assert!(is_table_read(&harness.post()));
    harness.idle();
}

#[test]
fn atomics_are_two_sided_and_busy_targets_are_asked_again() {
    let mut harness = Harness::new();
    let op = SendOp::FetchAdd { va: BASE_VA + 8, rkey: RKEY, add: 5 };
    harness.submit(1, op, 16, 8, SendFlags::SIGNALED, OrderBits::empty());
    let id = harness.sent_id(|body| matches!(body, Body::Atomic(atomic) if atomic.va == BASE_VA + 8));
    harness.answer(id, done(Status::Busy));
    harness.idle();
    harness.now = harness.initiator.deadline().expect("a retry is due");
    let again = harness.sent_id(|body| matches!(body, Body::Atomic(_)));
    assert_ne!(id, again, "the target has answered the first");
    harness.answer(again, Body::Value(77));
    assert_eq!(harness.completed(), 1);
    assert_eq!(harness.local.bytes[16..24], 77_u64.to_ne_bytes());
}

#[test]
fn without_reverse_access_the_peer_holds_the_range() {
    let mut harness = Harness::opened_with(|config| config.is_reverse_allowed = false);
    harness.write(1, 0, 2000, 0, true);
    harness.versions(2);
    let id = harness.sent_id(
        |body| matches!(body, Body::Hold(hold) if hold.length == 2000 && hold.access == Access::Write),
    );
    harness.idle();
    harness.answer(id, OK);
    let write = harness.post();
    harness.idle();
    harness.succeed(&write);
    assert_eq!(harness.completed(), 1);
    assert_eq!(harness.sent_id(|body| matches!(body, Body::Release)), id);
}

#[test]
fn two_sided_requests_are_not_posted_before_the_peer_has_consented() {
    let mut harness = Harness::with(|config| {
        config.is_two_sided = true;
        config.is_reverse_allowed = false;
    });
    harness.read(1, 0, 512, 0);
    let id = harness.sent_id(|body| matches!(body, Body::Fetch(fetch) if fetch.length == 512));
    harness.answer(id, Body::Data(&[7; 512]));
    assert_eq!(harness.completed(), 1);
    assert_eq!(harness.local.bytes[..512], [7; 512]);
    harness.write(2, 0, 512, 0, true);
    let id = harness.sent_id(|body| matches!(body, Body::Write(write) if write.length == 512));
    harness.answer(id, OK);
    assert_eq!(harness.completed(), 2);
    harness.read(3, 0, 2000, 0);
    let id = harness.sent_id(|body| matches!(body, Body::Hold(hold) if hold.length == 2000));
    harness.answer(id, OK);
    let read = harness.post();
    harness.succeed(&read);
    assert_eq!(harness.completed(), 3);
    assert_eq!(harness.initiator.counters().optimistic, 0);
}

#[test]
fn long_transfers_are_moved_by_the_peer() {
    let mut harness = Harness::new();
    harness.read(1, 0, 3000, 0);
    let post = harness.post();
    harness.fill_absent(0, 3000, 0);
    harness.succeed(&post);
    let id = harness.sent_id(
        |body| matches!(body, Body::Read(reads) if reads[0].length == 3000 && reads[0].dest_va == LENT),
    );
    harness.local.lent.get_mut(&id).expect("memory is lent").fill(7);
    harness.answer(id, OK);
    assert_eq!(harness.completed(), 1);
    assert_eq!(harness.local.bytes[..3000], [7; 3000]);
    let mut harness = Harness::opened();
    harness.local.bytes[..2000].fill(9);
    harness.write(2, 0, 2000, 0, true);
    harness.versions(2);
    let source = Source::Remote { va: LENT, rkey: 8 };
    let id = harness.sent_id(|body| matches!(body, Body::Write(write) if write.source == source));
    assert_eq!(harness.local.lent[&id], [9; 2000]);
    harness.answer(id, OK);
    assert_eq!(harness.completed(), 2);
    assert!(harness.local.lent.is_empty());
}

#[test]
fn what_is_lent_is_taken_back_however_the_call_ends() {
    for status in [Status::Busy, Status::AccessDenied, Status::Ok] {
        let mut harness = Harness::new();
        harness.read(1, 0, 3000, 0);
        let post = harness.post();
        harness.fill_absent(0, 3000, 0);
        harness.succeed(&post);
        let id = harness.sent_id(|body| matches!(body, Body::Read(_)));
        harness.local.is_unmapped = status == Status::Ok;
        let before = harness.local.bytes.clone();
        harness.answer(id, done(status));
        assert!(harness.local.lent.is_empty());
        assert_eq!(harness.local.bytes, before, "nothing has been moved");
        let failure = match status {
            Status::Busy => None,
            Status::Ok => Some(WcStatus::LocalProtection),
            _ => Some(WcStatus::RemoteAccess),
        };
        match (failure, harness.next()) {
            (None, None) => {}
            (Some(_), Some(Next::Break)) => {
                let next = harness.next();
                assert!(
                    matches!(next, Some(Next::Complete(1, status)) if Some(status) == failure),
                    "{next:?}"
                );
            }
            (_, next) => panic!("{next:?}"),
        }
    }
}

#[test]
fn an_immediate_is_sent_when_the_peer_holds_its_data() {
    let mut harness = Harness::new();
    let op = SendOp::WriteImm { va: BASE_VA, rkey: RKEY, imm: 9 };
    harness.submit(1, op, 0, 100, SendFlags::SIGNALED, OrderBits::empty());
    harness.submit(2, SendOp::Send, 200, 10, SendFlags::SIGNALED, OrderBits::empty());
    let id = harness.sent_id(|body| matches!(body, Body::Hold(_)));
    harness.idle();
    harness.answer(id, OK);
    let write = harness.post();
    assert!(matches!(write.op, SendOp::WriteImm { imm: 9, .. }));
    harness.succeed(&write);
    assert!(matches!(harness.next(), Some(Next::Complete(1, WcStatus::Success))));
    assert!(matches!(harness.post().op, SendOp::Send));
}

#[test]
fn messages_and_order_bits_wait() {
    let mut harness = Harness::new();
    harness.read(1, 0, 8, 0);
    let op = SendOp::Read { va: BASE_VA + PAGE, rkey: RKEY };
    harness.submit(2, op, 64, 8, SendFlags::SIGNALED, OrderBits::BEFORE);
    let first = harness.post();
    harness.idle();
    harness.succeed(&first);
    assert_eq!(harness.completed(), 1);
    let second = harness.post();
    harness.submit(3, op, 128, 8, SendFlags::SIGNALED | SendFlags::FENCE, OrderBits::empty());
    harness.idle();
    harness.succeed(&second);
    assert_eq!(harness.completed(), 2);
    assert!(matches!(harness.post().op, SendOp::Read { .. }));
}

#[test]
fn in_strict_order_reads_follow_each_other() {
    let mut harness = Harness::with(|config| config.order = Order::Strict);
    harness.read(1, 0, 8, 0);
    harness.read(2, PAGE, 8, 64);
    let first = harness.post();
    harness.idle();
    harness.succeed(&first);
    assert_eq!(harness.completed(), 1);
    harness.post();
}

#[test]
fn absent_local_memory_delays_only_its_own_request() {
    let mut harness = Harness::new();
    harness.local.answer = Held::Later;
    harness.read(1, 0, 8, 0);
    harness.idle();
    harness.local.answer = Held::Now;
    harness.read(2, PAGE, 8, 64);
    let second = harness.post();
    harness.initiator.handle_held(harness.now, 0, true);
    let first = harness.post();
    harness.succeed(&second);
    harness.idle();
    harness.succeed(&first);
    assert_eq!((harness.completed(), harness.completed()), (1, 2));
    assert!(harness.local.held.is_empty());
}

/// A status that is no failure is no success either, unless it is `Ok`.

#[test]
fn registrations_of_the_same_memory_are_in_conflict() {
    for other in [Knowledge::Plain, Knowledge::Extended(region(0x9a, 7))] {
        let mut harness = Harness::opened();
        harness.write(1, 63 * PAGE, 64, 0, true);
        harness.known = other;
        let op = |offset| SendOp::Read { va: BASE_VA + 63 * PAGE + offset, rkey: 0x9a };
        harness.submit(2, op(64), 64, 8, SendFlags::SIGNALED, OrderBits::empty());
        harness.submit(3, op(56), 128, 8, SendFlags::SIGNALED, OrderBits::empty());
        let (write, disjoint) = (harness.post(), harness.post());
        assert_eq!(disjoint.op, op(64));
        let check = harness.post();
        harness.succeed(&write);
        harness.succeed(&disjoint);
        harness.idle();
        harness.bring_versions(&check, 1);
        assert_eq!((harness.completed(), harness.completed()), (1, 2));
        assert_eq!(harness.post().op, op(56));
    }
}

#[test]
fn append_returns_data() {
    let mut harness = Harness::new();
    let op = SendOp::Append { rkey: RKEY, commit: true };
    harness.submit(1, op, 0, 72, SendFlags::SIGNALED, OrderBits::empty());
    let append = harness.post();
    assert_eq!(harness.local.held.get(&0), Some(&true), "held for writing");
    // The offset of the record is sent, and what follows it is fenced.
    harness.submit(2, SendOp::Send, 64, 8, SendFlags::SIGNALED, OrderBits::empty());
    harness.idle();
    harness.succeed(&append);
    assert_eq!(harness.completed(), 1);
    let send = harness.post();
    harness.submit(3, op, 0, 32, SendFlags::SIGNALED, OrderBits::empty());
    let append = harness.post();
    harness.submit(4, SendOp::Send, 200, 8, SendFlags::SIGNALED | SendFlags::FENCE, OrderBits::empty());
    harness.idle();
    harness.succeed(&send);
    harness.succeed(&append);
    assert_eq!((harness.completed(), harness.completed()), (2, 3));
    assert!(matches!(harness.post().op, SendOp::Send));
}
