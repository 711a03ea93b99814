//! The client's knowledge of peers' rkeys, and the schedule of queries.

use terrace_access::layout::Layout;
use terrace_access::peers::Peers;
use terrace_access::proto::{Datagram, Described, Mode, RegionDescription, Status};
use terrace_access::region::Knowledge;
use terrace_transport::Time;

const SECOND_NS: u64 = 1_000_000_000;

fn extended(region_id: u64) -> Described {
    let layout = Layout::new(0x1000, 1 << 20, 0, 4096).expect("a valid layout");
    Described::Extended(RegionDescription { layout, signature_key: [1; 32], region_id, mode: Mode::OneSided })
}

fn tid(query: Option<Datagram>) -> u64 {
    match query {
        Some(Datagram::Describe { tid, .. }) => tid,
        other => panic!("{other:?} is no query"),
    }
}

#[test]
fn a_key_is_queried_once_and_no_access_waits() {
    let mut peers = Peers::new(77);
    let (known, query) = peers.look_up(Time(5), &"a", 9);
    assert!(matches!(known, Knowledge::Unknown));
    assert_eq!(query, Some(Datagram::Describe { tid: 77, rkey: 9 }));
    let (known, query) = peers.look_up(Time(6), &"a", 9);
    assert!(matches!(known, Knowledge::Unknown) && query.is_none());
    // Other keys, and the same key of another peer, are independent.
    assert_eq!(tid(peers.look_up(Time(6), &"b", 9).1), 78);
    assert_eq!(tid(peers.look_up(Time(6), &"a", 10).1), 79);

    assert!(peers.handle_description(&"a", 77, 9, &extended(3)));
    let (known, query) = peers.look_up(Time(7), &"a", 9);
    let Knowledge::Extended(region) = known else { panic!("{known:?}") };
    assert_eq!((region.rkey(), region.description().region_id), (9, 3));
    assert!(query.is_none());
    assert!(
        peers.look_up(Time(1000 * SECOND_NS), &"a", 9).1.is_none(),
        "an extended key is not queried again"
    );
    let (again, _) = peers.look_up(Time(8), &"a", 9);
    let Knowledge::Extended(again) = again else { panic!("{again:?}") };
    assert!(std::sync::Arc::ptr_eq(&region, &again), "all queue pairs share the region");
}

#[test]
fn only_responses_to_outstanding_queries_count() {
    let mut peers = Peers::new(1);
    let queried = tid(peers.look_up(Time(0), &"a", 9).1);
    assert!(!peers.handle_description(&"a", queried + 1, 9, &extended(3)), "no query has this id");
    assert!(!peers.handle_description(&"b", queried, 9, &extended(3)), "another peer was queried");
    assert!(!peers.handle_description(&"a", queried, 8, &extended(3)), "another key was queried");
    assert!(matches!(peers.look_up(Time(1), &"a", 9).0, Knowledge::Unknown));
    assert!(peers.handle_description(&"a", queried, 9, &Described::Plain));
    assert!(!peers.handle_description(&"a", queried, 9, &extended(3)), "a response counts once");
    assert!(matches!(peers.look_up(Time(1), &"a", 9).0, Knowledge::Plain));
}

#[test]
fn the_interval_of_queries_to_a_silent_peer_doubles() {
    let mut peers = Peers::new(1);
    let mut tids = Vec::new();
    let mut times = Vec::new();
    for now_ms in 0..400_000 {
        if let (_, Some(Datagram::Describe { tid, .. })) = peers.look_up(Time(now_ms * 1_000_000), &"a", 9) {
            tids.push(tid);
            times.push(now_ms);
        }
    }
    let gaps: Vec<u64> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(gaps.windows(2).all(|pair| pair[0] <= pair[1]), "{gaps:?}");
    assert_eq!((gaps[0], gaps[1], gaps.last()), (10, 20, Some(&60_000)));
    // A late response counts only if it is for the last query.
    let (last, earlier) = tids.split_last().expect("queries were sent");
    assert!(earlier.iter().all(|tid| !peers.handle_description(&"a", *tid, 9, &extended(3))));
    assert!(peers.handle_description(&"a", *last, 9, &extended(3)));
}

#[test]
fn a_plain_key_is_queried_again_after_a_minute() {
    let mut peers = Peers::new(1);
    let queried = tid(peers.look_up(Time(0), &"a", 9).1);
    assert!(peers.handle_description(&"a", queried, 9, &Described::Refused(Status::NoSuchRegion)));
    let (known, query) = peers.look_up(Time(59 * SECOND_NS), &"a", 9);
    assert!(matches!(known, Knowledge::Plain) && query.is_none());
    let (known, query) = peers.look_up(Time(61 * SECOND_NS), &"a", 9);
    assert!(matches!(known, Knowledge::Plain), "it counts until the next response");
    assert!(peers.handle_description(&"a", tid(query), 9, &extended(3)));
    assert!(matches!(peers.look_up(Time(61 * SECOND_NS), &"a", 9).0, Knowledge::Extended(_)));
}

#[test]
fn removed_keys_are_queried_again() {
    let mut peers = Peers::new(1);
    for rkey in 0..3 {
        let queried = tid(peers.look_up(Time(0), &"a", rkey).1);
        assert!(peers.handle_description(&"a", queried, rkey, &extended(u64::from(rkey))));
    }
    let other = tid(peers.look_up(Time(0), &"b", 0).1);
    peers.remove(&"a", 0);
    let (known, query) = peers.look_up(Time(1), &"a", 0);
    assert!(matches!(known, Knowledge::Unknown));
    let queried = tid(query);
    assert!(peers.look_up(Time(1), &"a", 1).1.is_none());
    peers.remove_peer(&"a");
    assert!(!peers.handle_description(&"a", queried, 0, &extended(7)));
    assert!(peers.look_up(Time(1), &"a", 1).1.is_some());
    assert!(peers.handle_description(&"b", other, 0, &extended(7)));
}

#[test]
fn the_table_has_a_limit() {
    let mut peers = Peers::new(1);
    for rkey in 0..200_000_u32 {
        assert!(peers.look_up(Time(rkey.into()), &0, rkey).1.is_some());
    }
    assert!(peers.len() <= 65_536, "{} keys", peers.len());
    let (_, query) = peers.look_up(Time(200_001), &0, 199_999);
    assert!(query.is_none(), "the newest keys are still there");
}
