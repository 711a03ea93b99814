//! Knowledge of the peers' keys, and when queries for it are sent.

use terrace_access::layout::Layout;
use terrace_access::peers::Peers;
use terrace_access::proto::{Datagram, Described, Mode, RegionDescription, Status};
use terrace_access::region::Knowledge;
use terrace_transport::Time;

const SECOND_NS: u64 = 1_000_000_000;

fn extended(region_id: u64) -> Described {
    let layout = Layout::new(0x1000, 1 << 20, 0, 4096).expect("it makes sense");
    Described::Extended(RegionDescription { layout, pattern_key: [1; 32], region_id, mode: Mode::OneSided })
}

fn tid(ask: Option<Datagram>) -> u64 {
    match ask {
        Some(Datagram::Describe { tid, .. }) => tid,
        other => panic!("{other:?} is no question"),
    }
}

#[test]
fn a_key_is_asked_about_once_and_nobody_waits() {
    let mut peers = Peers::new(77);
    let (known, ask) = peers.look_up(Time(5), &"a", 9);
    assert!(matches!(known, Knowledge::Unknown));
    assert_eq!(ask, Some(Datagram::Describe { tid: 77, rkey: 9 }));
    let (known, ask) = peers.look_up(Time(6), &"a", 9);
    assert!(matches!(known, Knowledge::Unknown) && ask.is_none());
    // Other keys, and the same key of another peer, are independent.
    assert_eq!(tid(peers.look_up(Time(6), &"b", 9).1), 78);
    assert_eq!(tid(peers.look_up(Time(6), &"a", 10).1), 79);

    assert!(peers.handle_description(&"a", 77, 9, &extended(3)));
    let (known, ask) = peers.look_up(Time(7), &"a", 9);
    let Knowledge::Extended(region) = known else { panic!("{known:?}") };
    assert_eq!((region.rkey(), region.description().region_id), (9, 3));
    assert!(ask.is_none());
    assert!(peers.look_up(Time(1000 * SECOND_NS), &"a", 9).1.is_none(), "it stays so");
    let (again, _) = peers.look_up(Time(8), &"a", 9);
    let Knowledge::Extended(again) = again else { panic!("{again:?}") };
    assert!(std::sync::Arc::ptr_eq(&region, &again), "all queue pairs share what is known");
}

#[test]
fn only_answers_to_questions_count() {
    let mut peers = Peers::new(1);
    let asked = tid(peers.look_up(Time(0), &"a", 9).1);
    assert!(!peers.handle_description(&"a", asked + 1, 9, &extended(3)), "nobody asked so");
    assert!(!peers.handle_description(&"b", asked, 9, &extended(3)), "somebody else was asked");
    assert!(!peers.handle_description(&"a", asked, 8, &extended(3)), "about something else");
    assert!(matches!(peers.look_up(Time(1), &"a", 9).0, Knowledge::Unknown));
    assert!(peers.handle_description(&"a", asked, 9, &Described::Plain));
    assert!(!peers.handle_description(&"a", asked, 9, &extended(3)), "an answer counts once");
    assert!(matches!(peers.look_up(Time(1), &"a", 9).0, Knowledge::Plain));
}

#[test]
fn a_silent_peer_is_asked_less_and_less_often() {
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
    // A late answer counts only if it is for the last query.
    let (last, earlier) = tids.split_last().expect("it was asked");
    assert!(earlier.iter().all(|tid| !peers.handle_description(&"a", *tid, 9, &extended(3))));
    assert!(peers.handle_description(&"a", *last, 9, &extended(3)));
}

#[test]
fn a_plain_answer_is_asked_for_again_after_a_minute() {
    let mut peers = Peers::new(1);
    let asked = tid(peers.look_up(Time(0), &"a", 9).1);
    assert!(peers.handle_description(&"a", asked, 9, &Described::Refused(Status::NoSuchRegion)));
    let (known, ask) = peers.look_up(Time(59 * SECOND_NS), &"a", 9);
    assert!(matches!(known, Knowledge::Plain) && ask.is_none());
    let (known, ask) = peers.look_up(Time(61 * SECOND_NS), &"a", 9);
    assert!(matches!(known, Knowledge::Plain), "it counts until there is a better one");
    assert!(peers.handle_description(&"a", tid(ask), 9, &extended(3)));
    assert!(matches!(peers.look_up(Time(61 * SECOND_NS), &"a", 9).0, Knowledge::Extended(_)));
}

#[test]
fn what_is_forgotten_is_asked_about_again() {
    let mut peers = Peers::new(1);
    for rkey in 0..3 {
        let asked = tid(peers.look_up(Time(0), &"a", rkey).1);
        assert!(peers.handle_description(&"a", asked, rkey, &extended(u64::from(rkey))));
    }
    let other = tid(peers.look_up(Time(0), &"b", 0).1);
    peers.forget(&"a", 0);
    let (known, ask) = peers.look_up(Time(1), &"a", 0);
    assert!(matches!(known, Knowledge::Unknown));
    let asked = tid(ask);
    assert!(peers.look_up(Time(1), &"a", 1).1.is_none());
    peers.forget_peer(&"a");
    assert!(!peers.handle_description(&"a", asked, 0, &extended(7)));
    assert!(peers.look_up(Time(1), &"a", 1).1.is_some());
    assert!(peers.handle_description(&"b", other, 0, &extended(7)));
}

#[test]
fn there_is_an_end_to_what_is_kept_in_mind() {
    let mut peers = Peers::new(1);
    for rkey in 0..200_000_u32 {
        assert!(peers.look_up(Time(rkey.into()), &0, rkey).1.is_some());
    }
    assert!(peers.len() <= 65_536, "{} keys", peers.len());
    let (_, ask) = peers.look_up(Time(200_001), &0, 199_999);
    assert!(ask.is_none(), "the last ones are still there");
}
