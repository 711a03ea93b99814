//! A test for each rule of the session about routes and order, with every action checked.

use std::sync::Arc;

use terrace_access::layout::Layout;
use terrace_access::proto::{Body, MESSAGE_BYTES_MAX, Mode, RegionDescription, Source, Status};
use terrace_access::region::{Knowledge, Region};
use terrace_access::session::Action;
use terrace_transport::{Masked, Payload, PostError, SendFlags, SendOp, SendWr, Sge, WcStatus};

use super::harness::*;
use super::server::{LKEY, LOCAL_BASE};

#[test]
fn before_the_start_requests_are_posted_unchanged() {
    let mut harness = Harness::new();
    let op = SendOp::Read { va: BASE_VA, rkey: RKEY };
    harness.post(op, &[(0, 100_000)], SendFlags::FENCE);
    let (posts, calls) = sort(&harness.actions());
    assert_eq!(calls.len(), 0);
    assert_eq!(target_of(&posts[0]), (0, vec![(0, 100_000)]));
    assert_eq!(posts[0].flags, SendFlags::FENCE | SendFlags::SIGNALED);
    harness.complete_post(&posts[0]);
    assert_eq!(harness.completions(), [], "it was not signaled");
}

#[test]
fn present_units_are_read_in_runs_and_absent_pages_fetched_by_one_call() {
    let mut harness = Harness::granted(Mode::OneSided);
    harness.absent(&[2, 4, 5]);
    // From the middle of a page of unit 1 to the middle of one of unit 6.
    let (start, end) = (2 * UNIT - 4096 - 100, 6 * UNIT + 5000);
    harness.read(start, (end - start) as u32, 64);
    let (posts, calls) = sort(&harness.actions());
    let at = |offset: u64| offset - start + 64;
    let places: Vec<Posted> = posts.iter().map(target_of).collect();
    // The first post does not begin at a chunk's boundary, so it ends with its first packet.
    let head_end = (start).next_multiple_of(1024);
    assert_eq!(
        places,
        [
            (start, vec![(at(start), (head_end - start) as u32)]),
            (head_end, vec![(at(head_end), (2 * UNIT - head_end) as u32)]),
            (3 * UNIT, vec![(at(3 * UNIT), UNIT as u32)]),
            (6 * UNIT, vec![(at(6 * UNIT), 5000)]),
        ]
    );
    assert_eq!(calls.len(), 1);
    // Pages 0 to 3 of unit 2, and all of units 4 and 5, from the first wanted page to the last.
    let wanted: Vec<usize> = (0..4).chain(8..16).collect();
    assert_eq!(fetched(&calls[0]), (2 * UNIT, 4 * UNIT as u32, wanted, at(2 * UNIT)));

    posts.iter().for_each(|wr| harness.fill(wr, &[]));
    posts.iter().for_each(|wr| harness.complete_post(wr));
    assert_eq!(harness.completions(), []);
    harness.done(&calls[0], Status::Ok);
    assert_eq!(harness.completions(), [(1001, WcStatus::Success)]);
}

#[test]
fn a_wholly_absent_range_is_not_read() {
    let mut harness = Harness::granted(Mode::OneSided);
    harness.absent(&[3]);
    harness.read(3 * UNIT + 10, 20, 0);
    let (posts, calls) = sort(&harness.actions());
    assert_eq!(posts, []);
    assert_eq!(fetched(&calls[0]), (3 * UNIT + 10, 20, vec![0], 0));
}

#[test]
fn one_chunk_of_each_packet_is_compared() {
    for (chunk, suspects) in [(1, None), (5 * 4, Some(vec![0])), (5 * 4 + 3, None)] {
        let mut harness = Harness::granted(Mode::OneSided);
        harness.read(0, 2 * 4096, 0);
        let (posts, _) = sort(&harness.actions());
        harness.fill(&posts[0], &[]);
        let (start, len) = (chunk * 256, 256);
        let signature = harness.region.signature_page().shared();
        let in_page = start % 4096..start % 4096 + len;
        harness.local.slice(LOCAL_BASE + start as u64, len).copy_from_slice(&signature[in_page]);
        harness.complete_post(&posts[0]);
        match suspects {
            None => assert_eq!(harness.completions(), [(1001, WcStatus::Success)], "chunk {chunk} is data"),
            Some(pages) => {
                let (_, calls) = sort(&harness.actions());
                assert_eq!(fetched(&calls[0]), (4096, 4096, pages, 4096), "chunk {chunk} begins a packet");
            }
        }
    }
}

#[test]
fn suspect_pages_are_fetched_by_one_call_after_the_last_post() {
    let mut harness = Harness::granted(Mode::OneSided);
    harness.absent(&[1]);
    harness.read(0, 3 * UNIT as u32, 0);
    let (posts, calls) = sort(&harness.actions());
    assert_eq!((posts.len(), calls.len()), (2, 1));
    // Page 2 of unit 0, page 1 of unit 2.
    posts.iter().for_each(|wr| harness.fill(wr, &[2, 9]));
    harness.complete_post(&posts[0]);
    assert_eq!(harness.actions().len(), 0);
    harness.complete_post(&posts[1]);
    let (_, later) = sort(&harness.actions());
    assert_eq!(later.len(), 1);
    assert_eq!(fetched(&later[0]), (2 * 4096, 8 * 4096, vec![0, 7], 2 * 4096));
    // Units with an absent page are requested by call from now on, without a READ.
    harness.read(2 * UNIT, 8, 0x40_000);
    let (posts, more) = sort(&harness.actions());
    assert_eq!((posts.len(), more.len()), (0, 1));
    harness.done(&more[0], Status::Ok);
    harness.done(&later[0], Status::Ok);
    assert_eq!(harness.completions(), []);
    harness.done(&calls[0], Status::Ok);
    assert_eq!(harness.completions(), [(1001, WcStatus::Success), (1002, WcStatus::Success)]);
}

#[test]
fn lists_are_split_by_element_for_calls_only() {
    let mut harness = Harness::granted(Mode::OneSided);
    let op = SendOp::Read { va: BASE_VA, rkey: RKEY };
    let list = [(100, 5000), (0x9000, 4000), (0x20_000, 3288)];
    harness.post(op, &list, SendFlags::SIGNALED);
    let (posts, _) = sort(&harness.actions());
    assert_eq!(target_of(&posts[0]), (0, list.to_vec()));
    harness.fill(&posts[0], &[1]);
    harness.complete_post(&posts[0]);
    let (_, calls) = sort(&harness.actions());
    let calls: Vec<_> = calls.iter().map(fetched).collect();
    assert_eq!(calls, [(4096, 904, vec![0], 100 + 4096), (5000, 3192, vec![0], 0x9000)]);
}

#[test]
fn calls_in_flight_are_limited_by_the_server() {
    let mut harness = Harness::granted(Mode::OneSided);
    harness.absent(&(0..64).collect::<Vec<_>>());
    (0..40).for_each(|index| harness.read(index * 4096, 4096, index * 4096));
    let actions = harness.actions();
    assert_eq!(request_counts(&actions), [32]);
    let (posts, calls) = sort(&actions);
    assert_eq!((posts.len(), calls.len()), (0, 32));
    assert_eq!(harness.session.calls_in_flight(), 32);
    harness.done(&calls[7], Status::Ok);
    harness.done(&calls[9], Status::Ok);
    let more = request_counts(&harness.actions());
    assert_eq!(more, [2]);
}

/// The number of requests of each call among the actions.
fn request_counts(actions: &[Action]) -> Vec<usize> {
    let count = |action: &Action| match action {
        Action::Call(call) => Some(call.request_count()),
        _ => None,
    };
    actions.iter().filter_map(count).collect()
}

#[test]
fn all_absent_pages_of_a_poll_are_requested_by_one_message() {
    let mut harness = Harness::granted(Mode::OneSided);
    harness.absent(&[1, 3]);
    // Known to be absent: one with two elements, and one behind a write. Found absent by a READ: two.
    let list = [(0, 100), (0x1000, 200)];
    harness.post(SendOp::Read { va: BASE_VA + UNIT, rkey: RKEY }, &list, SendFlags::SIGNALED);
    harness.read(0, 8, 0x2000);
    harness.write(3 * UNIT, 8, 0x3000);
    harness.read(2 * UNIT, 8, 0x4000);
    harness.read(3 * UNIT + 0x2000, 8, 0x5000);
    let actions = harness.actions();
    assert_eq!(request_counts(&actions), [3, 1], "the reads, and the write");
    let (posts, _) = sort(&actions);
    posts.iter().for_each(|wr| harness.fill(wr, &[0, 8]));
    posts.iter().for_each(|wr| harness.complete_post(wr));
    let actions = harness.actions();
    assert_eq!(request_counts(&actions), [2]);
    let (_, calls) = sort(&actions);
    assert_eq!(calls.iter().map(|call| fetched(call).0).collect::<Vec<_>>(), [0, 2 * UNIT]);
    assert_eq!(calls[1].id, calls[0].id + 1);
    // Each request has its own answer.
    harness.done(&calls[1], Status::Busy);
    harness.done(&calls[0], Status::Ok);
    assert_eq!(request_counts(&harness.actions()), []);
    harness.now = harness.session.deadline().expect("the busy one is repeated");
    assert_eq!(request_counts(&harness.actions()), [1]);
}

#[test]
fn reads_that_do_not_fit_get_a_message_of_their_own() {
    let mut harness = Harness::granted(Mode::RpcOnly);
    let layout = Layout::new(BASE_VA, 1 << 40, 0, 4096).expect("a valid layout");
    let description = RegionDescription { layout, mode: Mode::OneSided, ..*harness.region.description() };
    let region = Arc::new(Region::new(RKEY, description));
    harness.session.start(Mode::OneSided, 0x88);
    harness.known = Knowledge::Extended(region.clone());
    harness.read(0, 1, 0);
    let (posts, calls) = sort(&harness.actions());
    harness.complete_post(&posts[0]);
    harness.done(&calls[0], Status::Ok);
    harness.actions();
    // Two bitmaps of 10 KiB each, and a short one.
    let pages = 10 * 1024 * 8;
    (0..2 * pages + 1).for_each(|page| region.residency().mark_absent(page));
    let offsets = [0, pages as u64 * 4096];
    offsets.iter().for_each(|&offset| harness.read(offset, pages as u32 * 4096, offset));
    harness.read(2 * offsets[1], 8, 2 * offsets[1]);
    let actions = harness.actions();
    assert_eq!(request_counts(&actions), [1, 2]);
    let mut buffer = vec![0; MESSAGE_BYTES_MAX];
    for action in &actions {
        let Action::Call(call) = action else { panic!("{action:?}") };
        assert!(call.encode(&mut buffer).is_ok());
    }
}

#[test]
fn reads_into_one_buffer_do_not_wait_for_each_other_while_all_is_present() {
    let mut harness = Harness::granted(Mode::OneSided);
    (0..10).for_each(|index| harness.read(index * 4096, 4096, 0));
    let (posts, _) = sort(&harness.actions());
    assert_eq!(posts.len(), 10);
    harness.fill(&posts[0], &[0]);
    harness.complete_post(&posts[0]);
    let (_, calls) = sort(&harness.actions());
    assert_eq!(calls.len(), 1);
    // The call's page overwrites the data of the later READs, so they are read again, one by one.
    for wr in &posts[1..] {
        harness.fill(wr, &[]);
        harness.complete_post(wr);
    }
    assert_eq!(harness.actions().len(), 0);
    let mut call = calls[0].clone();
    for index in 1..10 {
        harness.done(&call, Status::Ok);
        let mut actions = harness.actions();
        assert_eq!(actions.len(), 2);
        let (_, mut calls) = sort(&actions.split_off(1));
        let next = calls.pop().expect("a call");
        assert_eq!(fetched(&next).0, index * 4096);
        call = next;
    }
}

#[test]
fn a_fence_waits_for_reads_and_a_send_without_one_does_not() {
    let mut harness = Harness::granted(Mode::OneSided);
    harness.absent(&[0]);
    harness.read(0, 100, 0);
    harness.post(SendOp::Send, &[(0x9000, 10)], SendFlags::empty());
    harness.post(SendOp::Send, &[(0x9000, 11)], SendFlags::FENCE);
    harness.post(SendOp::Send, &[(0x9000, 12)], SendFlags::empty());
    let (posts, calls) = sort(&harness.actions());
    assert_eq!(posts.iter().map(|wr| wr.payload.len()).collect::<Vec<_>>(), [10]);
    harness.done(&calls[0], Status::Ok);
    let actions = harness.actions();
    assert!(matches!(actions[0], Action::Complete(_)));
    let (posts, _) = sort(&actions[1..]);
    assert_eq!(posts.iter().map(|wr| wr.payload.len()).collect::<Vec<_>>(), [11, 12]);
}

#[test]
fn writes_wait_for_reads_of_the_same_bytes_only() {
    let mut harness = Harness::granted(Mode::OneSided);
    harness.absent(&[0]);
    harness.read(0, 4096, 0);
    harness.write(4096, LONG, 0x9000);
    harness.write(4095, LONG, 0x9000);
    harness.write(0x4000, LONG, 0x9000);
    let (posts, calls) = sort(&harness.actions());
    assert_eq!(posts.iter().map(|wr| target_of(wr).0).collect::<Vec<_>>(), [4096]);
    harness.done(&calls[0], Status::Ok);
    let (posts, _) = sort(&harness.actions()[1..]);
    assert_eq!(posts.iter().map(|wr| target_of(wr).0).collect::<Vec<_>>(), [4095, 0x4000]);
}

#[test]
fn calls_wait_only_for_writes_of_the_same_bytes() {
    let mut harness = Harness::granted(Mode::OneSided);
    harness.absent(&[0, 1]);
    harness.write(0, LONG, 0x9000);
    harness.read(0, 100, 0);
    harness.read(UNIT, 100, 0x1000);
    let (posts, calls) = sort(&harness.actions());
    assert_eq!((posts.len(), calls.len()), (1, 1));
    assert_eq!(fetched(&calls[0]).0, UNIT);
    harness.complete_post(&posts[0]);
    let actions = harness.actions();
    let (_, calls) = sort(&actions[1..]);
    assert_eq!(fetched(&calls[0]).0, 0);
}

#[test]
fn a_call_waits_for_the_result_of_a_masked_atomic_in_its_memory() {
    let mut harness = Harness::granted(Mode::OneSided);
    harness.absent(&[1]);
    let result = Sge { addr: LOCAL_BASE + 16, length: 8, lkey: LKEY };
    let masked = Masked { result, compare_mask: u64::MAX, swap_mask: u64::MAX };
    let op = SendOp::MaskedCompareSwap { va: BASE_VA, rkey: RKEY, compare: 0, swap: 1 };
    let payload = Payload::Masked(Box::new(masked));
    let wr = SendWr { wr_id: 1, op, payload, flags: SendFlags::SIGNALED, target: None };
    harness.session.post(wr, &harness.known).expect("the queue is not full");
    let (posts, _) = sort(&harness.actions());
    harness.read(UNIT, 100, 0);
    assert!(harness.actions().is_empty());
    harness.complete_post(&posts[0]);
    let actions = harness.actions();
    let (_, calls) = sort(&actions[1..]);
    assert_eq!(fetched(&calls[0]).0, UNIT);
}

#[test]
fn a_region_that_turns_out_to_be_plain_is_read_one_sidedly() {
    let mut harness = Harness::granted(Mode::RpcOnly);
    harness.read(10, 100, 0);
    let (posts, calls) = sort(&harness.actions());
    assert_eq!(posts.len(), 0);
    harness.done(&calls[0], Status::Plain);
    let (posts, _) = sort(&harness.actions());
    assert_eq!(target_of(&posts[0]), (10, vec![(0, 100)]));
    harness.complete_post(&posts[0]);
    assert_eq!(harness.completions(), [(1001, WcStatus::Success)]);
}

#[test]
fn small_writes_by_rpc_carry_their_data() {
    let mut harness = Harness::granted(Mode::RpcOnly);
    let op = SendOp::Write { va: BASE_VA + 7, rkey: RKEY };
    harness.local.slice(LOCAL_BASE, 3).copy_from_slice(b"abc");
    harness.local.slice(LOCAL_BASE + 100, 2).copy_from_slice(b"de");
    harness.post(op, &[(0, 3), (100, 2)], SendFlags::SIGNALED);
    harness.write(0x1000, 4096, 0x2000);
    harness.write(0x2000, 4097, 0x3000);
    let (posts, calls) = sort(&harness.actions());
    assert_eq!((posts.len(), calls.len()), (0, 3));
    let write = |call: &Sent| match call.message().body {
        Body::Write(write) => (write.va - BASE_VA, write.length, matches!(write.source, Source::Inline(_))),
        other => panic!("{other:?}"),
    };
    assert_eq!(write(&calls[0]), (7, 5, true));
    assert_eq!(write(&calls[1]), (0x1000, 4096, true));
    assert_eq!(write(&calls[2]), (0x2000, 4097, false));
    let Body::Write(first) = calls[0].message().body else { panic!("{calls:?}") };
    assert_eq!(first.source, Source::Inline(b"abcde"));
    let Body::Write(last) = calls[2].message().body else { panic!("{calls:?}") };
    assert_eq!(last.source, Source::Remote { va: LOCAL_BASE + 0x3000, rkey: LKEY });
    calls.iter().for_each(|call| harness.done(call, Status::Ok));
    assert_eq!(harness.completions().len(), 3);
}

#[test]
fn small_writes_to_absent_units_go_by_rpc_and_delay_nothing() {
    let mut harness = Harness::granted(Mode::OneSided);
    harness.absent(&[1]);
    harness.write(UNIT, 4096, 0);
    harness.write(0, 4096, 0x1000);
    harness.write(UNIT - 8, 8, 0x2000);
    harness.write(2 * UNIT - 8, 16, 0x3000);
    harness.write(UNIT + 0x8000, LONG, 0x4000);
    let (posts, calls) = sort(&harness.actions());
    let posts: Vec<_> = posts.iter().map(|wr| target_of(wr).0).collect();
    assert_eq!(posts, [0, UNIT - 8, UNIT + 0x8000]);
    let stored = |call: &Sent| match call.message().body {
        Body::Write(write) => (write.va - BASE_VA, write.length),
        other => panic!("{other:?}"),
    };
    assert_eq!(calls.iter().map(stored).collect::<Vec<_>>(), [(UNIT, 4096), (2 * UNIT - 8, 16)]);
    // A READ waits for earlier writes of the same bytes.
    harness.read(UNIT + 1, 8, 0x8000);
    let (posts, more) = sort(&harness.actions());
    assert_eq!((posts.len(), more.len()), (0, 0));
    harness.done(&calls[0], Status::Ok);
    let (_, more) = sort(&harness.actions()[1..]);
    assert_eq!(more.len(), 1);
}

#[test]
fn a_message_after_a_write_by_rpc_waits_for_the_write() {
    let mut harness = Harness::granted(Mode::RpcOnly);
    harness.write(0, 10, 0);
    harness.post(SendOp::Send, &[(0x9000, 10)], SendFlags::empty());
    harness.read(0x4000, 8, 0x8000);
    let (posts, calls) = sort(&harness.actions());
    assert_eq!((posts.len(), calls.len()), (0, 1));
    harness.done(&calls[0], Status::Ok);
    let (posts, calls) = sort(&harness.actions()[1..]);
    assert_eq!((posts.len(), calls.len()), (1, 1));
}

#[test]
fn writes_by_rpc_wait_for_queued_requests_to_the_same_bytes() {
    let mut harness = Harness::granted(Mode::RpcOnly);
    let add = SendOp::FetchAdd { va: BASE_VA + 8, rkey: RKEY, add: 1 };
    harness.post(add, &[(0x8000, 8)], SendFlags::SIGNALED);
    harness.write(16, 8, 0);
    harness.write(8, 8, 0);
    harness.write(24, 8, 0);
    let (posts, calls) = sort(&harness.actions());
    assert_eq!((posts.len(), calls.len()), (1, 1), "only the first write does not overlap the atomic");
    harness.complete_post(&posts[0]);
    let (posts, calls) = sort(&harness.actions()[1..]);
    assert_eq!((posts.len(), calls.len()), (0, 2));
}

#[test]
fn queues_have_their_configured_limits() {
    let mut harness = Harness::with(|config| (config.request_count_max, config.post_count_max) = (3, 2));
    harness.session.start(Mode::OneSided, 0x88);
    (0..3).for_each(|index| harness.read(index * 4096, 100, index * 100));
    let wr = SendWr {
        wr_id: 9,
        op: SendOp::Send,
        payload: Payload::Sges(Default::default()),
        flags: SendFlags::empty(),
        target: None,
    };
    assert_eq!(harness.session.post(wr, &Knowledge::Plain), Err(PostError::QueueFull));
    let (posts, _) = sort(&harness.actions());
    assert_eq!(posts.len(), 2);
    harness.fill(&posts[0], &[]);
    harness.complete_post(&posts[0]);
    let actions = harness.actions();
    assert!(matches!(&actions[..], [Action::Complete(_), Action::Post(_)]), "{actions:?}");
}

#[test]
fn requests_to_regions_in_plain_mode_are_posted_unchanged() {
    let mut harness = Harness::new();
    let description = RegionDescription { mode: Mode::Plain, ..*harness.region.description() };
    harness.known = Knowledge::Extended(Arc::new(Region::new(RKEY, description)));
    harness.session.start(Mode::OneSided, 0x88);
    harness.read(100, 100_000, 0);
    let (posts, calls) = sort(&harness.actions());
    assert_eq!((posts.len(), calls.len()), (1, 0));
}
