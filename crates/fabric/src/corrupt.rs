//! Corruption that a receiver can detect.

use terrace_wire::icrc::{self, Flow, Verdict};

/// Flips the given bit (modulo the packet's length), and further bits until a receiver can detect the corruption. The
/// ICRC does not cover some bits, and with IPv4 some corruption looks like another identification.
pub(crate) fn corrupt(flow: &Flow, packet: &mut [u8], bit: u32) {
    let bits = packet.len() * 8;
    for bit in (0..bits).map(|step| (bit as usize + step) % bits) {
        packet[bit / 8] ^= 1 << (bit % 8);
        if icrc::verify(flow, packet, 0) == Verdict::Bad {
            return;
        }
    }
}
