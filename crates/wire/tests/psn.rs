//! Packet sequence numbers modulo 2^24.

use proptest::prelude::*;
use terrace_wire::Psn;

const HALF: u32 = 1 << 23;

#[test]
fn wraps_at_twenty_four_bits() {
    let last = Psn::new(0xff_ffff);
    assert_eq!(last.next(), Psn::new(0));
    assert_eq!(Psn::new(0).minus(1), last);
    assert_eq!(Psn::new(0x1234_5678).get(), 0x34_5678);
    assert_eq!(last.plus(u32::MAX), Psn::new(0xff_fffe));
}

#[test]
fn distance_is_signed_and_minimal() {
    assert_eq!(Psn::new(2).since(Psn::new(0xff_fffe)), 4);
    assert_eq!(Psn::new(0xff_fffe).since(Psn::new(2)), -4);
    assert_eq!(Psn::new(HALF - 1).since(Psn::new(0)), (HALF - 1) as i32);
    assert_eq!(Psn::new(HALF).since(Psn::new(0)), -(HALF as i32));
    assert!(Psn::new(0xff_ffff).is_before(Psn::new(0)));
    assert!(!Psn::new(0).is_before(Psn::new(0)));
}

proptest! {
    #[test]
    fn plus_and_since_agree(start: u32, distance in 0..HALF) {
        let start = Psn::new(start);
        let end = start.plus(distance);
        prop_assert_eq!(end.since(start), distance as i32);
        prop_assert_eq!(start.since(end), -(distance as i32));
        prop_assert_eq!(end.minus(distance), start);
        prop_assert_eq!(start.is_before(end), distance != 0);
    }
}
