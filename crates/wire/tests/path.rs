//! The UDP port that a queue pair number encodes.

use terrace_wire::{QPN_INSTANCE_SHIFT, ROCE_PORT, port_of};

#[test]
fn the_upper_bits_of_a_queue_pair_number_are_the_instance_index() {
    assert_eq!(port_of(0), ROCE_PORT);
    assert_eq!(port_of(0xffff), ROCE_PORT);
    assert_eq!(port_of(3 << QPN_INSTANCE_SHIFT | 17), ROCE_PORT + 3);
    assert_eq!(port_of(0xff_ffff), ROCE_PORT + 255);
    // Bits above the 24 of a queue pair number do not count.
    assert_eq!(port_of(0xff01_0000), ROCE_PORT + 1);
}
