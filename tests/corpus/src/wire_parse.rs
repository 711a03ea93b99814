//! Any bytes are rejected, or parse to a packet whose emitted bytes parse to the same packet.

use terrace_wire::{MAX_HEADER_LEN, Packet, emit_headers};

/// Checks one input.
pub fn check(bytes: &[u8]) {
    let Ok(packet) = Packet::parse(bytes) else { return };
    let info = packet.bth.opcode.info();
    assert!(info.payload || packet.payload.is_empty());

    let mut again = vec![0; MAX_HEADER_LEN];
    let header_len = emit_headers(&packet.bth, &packet.ext, &mut again).expect("what parses can be emitted");
    assert_eq!(header_len, info.header_len);
    assert_eq!(header_len + packet.payload.len() + usize::from(packet.bth.pad), bytes.len());
    again.truncate(header_len);
    again.extend_from_slice(&bytes[header_len..]);
    assert_eq!(Packet::parse(&again), Ok(packet));

    // Only reserved bits may differ, so emitting a second time changes nothing.
    let mut fixed = [0; MAX_HEADER_LEN];
    assert_eq!(emit_headers(&packet.bth, &packet.ext, &mut fixed), Ok(header_len));
    assert_eq!(fixed[..header_len], again[..header_len]);

    // Too small a buffer is an error, never a panic.
    assert!(emit_headers(&packet.bth, &packet.ext, &mut fixed[..header_len - 1]).is_err());
}
