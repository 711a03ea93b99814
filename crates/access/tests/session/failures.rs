//! A test for each rule of the session about refusals, failures and the end of requests, with every action checked.

use terrace_access::proto::{Body, Mode, Status};
use terrace_access::session::Action;
use terrace_transport::{Time, Wc, WcStatus};

use super::harness::*;

#[test]
fn without_a_grant_nothing_is_fetched() {
    let mut harness = Harness::new();
    // The signature page is not enabled while an unchecked READ is in flight.
    harness.read(0, 100, 0);
    let (unchecked, _) = sort(&harness.actions());
    harness.session.start(Mode::OneSided, 0x88);
    harness.absent(&[0]);
    harness.read(0, 100, 0x1000);
    let (posts, calls) = sort(&harness.actions());
    assert_eq!((posts.len(), calls.len()), (1, 0));
    harness.complete_post(&unchecked[0]);
    let actions = harness.actions();
    let (_, calls) = sort(&actions[1..]);
    let Body::Magic(magic) = calls[0].message().body else { panic!("{calls:?}") };
    assert_eq!((magic.client_qpn, magic.server_qpn, magic.rkey, magic.region_id), (0x77, 0x88, RKEY, 6));
    assert!(magic.on);

    // The peer's NIC may already answer with signature pages: a suspect page waits for the answer.
    harness.fill(&posts[0], &[0]);
    harness.complete_post(&posts[0]);
    assert_eq!(harness.actions().len(), 0);
    harness.done(&calls[0], Status::AccessDenied);
    assert_eq!(harness.completions(), [(1001, WcStatus::Success)], "it was data");
    let deadline = harness.session.deadline().expect("the grant is requested again");
    assert!(deadline > harness.now);
    harness.now = deadline;

    let (_, calls) = sort(&harness.actions());
    harness.read(0, 100, 0x1000);
    let (posts, none) = sort(&harness.actions());
    assert_eq!(none.len(), 0);
    harness.fill(&posts[0], &[0]);
    harness.complete_post(&posts[0]);
    assert_eq!(harness.actions().len(), 0);
    harness.done(&calls[0], Status::Ok);
    let actions = harness.actions();
    assert!(matches!(&actions[..], [Action::Granted(_), Action::Call(_)]), "{actions:?}");
    assert_eq!(harness.session.deadline(), None);
}

#[test]
fn a_region_that_the_server_does_not_know_is_plain() {
    let mut harness = Harness::new();
    harness.session.start(Mode::OneSided, 0x88);
    harness.read(0, 100, 0);
    let (posts, calls) = sort(&harness.actions());
    harness.fill(&posts[0], &[0]);
    harness.complete_post(&posts[0]);
    harness.done(&calls[0], Status::NoSuchRegion);
    let actions = harness.actions();
    assert!(matches!(&actions[..], [Action::Outdated(RKEY), Action::Complete(_)]), "{actions:?}");
    harness.read(0, 0x8001, 0);
    let (posts, _) = sort(&harness.actions());
    assert_eq!(posts.len(), 1, "the READ is posted unchanged");
    assert_eq!(harness.session.deadline(), None);
}

#[test]
fn a_busy_server_gets_the_call_again_after_a_backoff() {
    let mut harness = Harness::granted(Mode::OneSided);
    harness.absent(&[0]);
    harness.read(0, 100, 0);
    let (_, calls) = sort(&harness.actions());
    let mut call = calls[0].clone();
    let mut delay_ns = 0;
    for _ in 0..5 {
        harness.done(&call, Status::Busy);
        assert_eq!(harness.actions().len(), 0);
        let deadline = harness.session.deadline().expect("there is a deadline for the retry");
        assert!(deadline.0 - harness.now.0 > delay_ns, "the delay grows");
        delay_ns = deadline.0 - harness.now.0;
        harness.now = Time(deadline.0 - 1);
        assert_eq!(harness.actions().len(), 0);
        harness.now = deadline;
        let (_, again) = sort(&harness.actions());
        assert_ne!(again[0].id, call.id);
        call = again[0].clone();
    }
    harness.done(&call, Status::Ok);
    assert_eq!(harness.completions(), [(1001, WcStatus::Success)]);
    assert!(!harness.session.handle_done(harness.now, call.id, Status::Ok), "an answer counts once");
}

#[test]
fn after_a_failure_unsent_calls_are_dropped() {
    let mut harness = Harness::granted(Mode::OneSided);
    harness.absent(&[1]);
    harness.write(UNIT, LONG, 0x3000);
    harness.read(UNIT, 100, 0x1000);
    harness.read(0, 100, 0x2000);
    let (posts, calls) = sort(&harness.actions());
    assert_eq!((posts.len(), calls.len()), (2, 0), "the call waits for the write");
    harness.complete_post_with(&posts[0], WcStatus::RemoteAccess);
    harness.complete_post_with(&posts[1], WcStatus::Flushed);
    let flushed = WcStatus::Flushed;
    let expected = [(1001, WcStatus::RemoteAccess), (1002, flushed), (1003, flushed)];
    assert_eq!(harness.completions(), expected);
}

#[test]
fn memory_that_cannot_be_read_is_a_local_error() {
    let mut harness = Harness::granted(Mode::OneSided);
    harness.read(0, 100, 0);
    harness.read(0, 100, 200);
    let (posts, _) = sort(&harness.actions());
    harness.local.is_gone = true;
    harness.complete_post(&posts[0]);
    let actions = harness.actions();
    let [Action::Break, Action::Complete(wc)] = &actions[..] else { panic!("{actions:?}") };
    assert_eq!((wc.wr_id, wc.status), (1001, WcStatus::LocalProtection));
    harness.complete_post_with(&posts[1], WcStatus::Flushed);
    assert_eq!(harness.completions(), [(1002, WcStatus::Flushed)]);
    harness.read(0, 100, 0);
    assert_eq!(harness.completions(), [(1003, WcStatus::Flushed)]);
}

#[test]
fn each_server_status_has_a_completion_status() {
    let statuses = [
        (Status::NoSuchRegion, WcStatus::RemoteAccess),
        (Status::AccessDenied, WcStatus::RemoteAccess),
        (Status::OutOfRange, WcStatus::RemoteAccess),
        (Status::Invalid, WcStatus::RemoteInvalidRequest),
        (Status::DeviceError, WcStatus::RemoteOperation),
        (Status::NoSpace, WcStatus::RemoteOperation),
        (Status::ClientMemory, WcStatus::LocalProtection),
        (Status::Unsupported, WcStatus::RemoteInvalidRequest),
    ];
    for (status, expected) in statuses {
        let mut harness = Harness::granted(Mode::OneSided);
        harness.absent(&[0]);
        harness.read(0, 100, 0);
        let (_, calls) = sort(&harness.actions());
        harness.done(&calls[0], status);
        let actions = harness.actions();
        let [Action::Break, Action::Complete(wc)] = &actions[..] else { panic!("{actions:?}") };
        assert_eq!((wc.status, wc.vendor_err, wc.qpn), (expected, status as u32, 0x77));
    }
}

#[test]
fn a_flushed_request_completes_after_the_answers_to_its_calls() {
    let mut harness = Harness::granted(Mode::OneSided);
    harness.absent(&[1]);
    harness.read(0, 100, 0);
    harness.read(UNIT, 100, 0x1000);
    harness.read(0, 100, 0x2000);
    let (posts, calls) = sort(&harness.actions());
    harness.complete_post_with(&posts[0], WcStatus::RemoteAccess);
    assert_eq!(harness.completions(), [(1001, WcStatus::RemoteAccess)]);
    harness.complete_post_with(&posts[1], WcStatus::Flushed);
    assert_eq!(harness.completions(), [], "the second one's call may still complete_post data");
    harness.done(&calls[0], Status::Ok);
    assert_eq!(harness.completions(), [(1002, WcStatus::Flushed), (1003, WcStatus::Flushed)]);
}

#[test]
fn work_requests_that_cannot_be_posted_are_flushed() {
    let mut harness = Harness::granted(Mode::OneSided);
    (0..3).for_each(|index| harness.read(index * 4096, 100, index * 100));
    let (posts, _) = sort(&harness.actions());
    assert!(harness.session.handle_refused(posts[1].wr_id));
    assert!(harness.session.handle_refused(posts[2].wr_id));
    assert!(!harness.session.handle_refused(posts[2].wr_id));
    harness.fill(&posts[0], &[]);
    harness.complete_post(&posts[0]);
    let actions = harness.actions();
    assert!(matches!(actions[0], Action::Break));
    let statuses = actions[1..].iter().map(|action| match action {
        Action::Complete(wc) => (wc.wr_id, wc.status),
        other => panic!("{other:?}"),
    });
    let flushed = WcStatus::Flushed;
    let expected = [(1001, WcStatus::Success), (1002, flushed), (1003, flushed)];
    assert_eq!(statuses.collect::<Vec<_>>(), expected);
}

#[test]
fn after_reset_only_calls_in_flight_remain() {
    let mut harness = Harness::granted(Mode::OneSided);
    harness.absent(&[1]);
    harness.read(0, 100, 0);
    harness.read(UNIT, 100, 0x1000);
    let (posts, calls) = sort(&harness.actions());
    harness.session.reset();
    assert!(harness.session.is_empty());
    assert_eq!(harness.session.mode(), None);
    assert_eq!(harness.session.calls_in_flight(), 1);
    let wc = Wc { wr_id: posts[0].wr_id, ..Wc::default() };
    assert!(!harness.session.handle_completion(&wc, &harness.local), "the post is older than the reset");
    harness.done(&calls[0], Status::DeviceError);
    assert_eq!(harness.session.calls_in_flight(), 0);
    harness.read(0, 100, 0);
    let (posts, _) = sort(&harness.actions());
    harness.complete_post(&posts[0]);
    assert_eq!(harness.completions(), [(1003, WcStatus::Success)]);
}
