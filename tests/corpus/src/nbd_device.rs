//! Any bytes of a client are answered within bounds or end its connection, and leave nothing in flight.

use terrace_nbd::{CONNECTIONS_MAX, Device};

use crate::nbd_memory::MemoryQueue;

const PAGES: u64 = 64;
const OUTPUT_BYTES: usize = 16 << 10;
/// Steps without an end mean that a request is lost.
const STEPS_MAX: usize = 1_000_000;

/// Checks one input.
pub fn check(bytes: &[u8]) {
    let (queue, _) = MemoryQueue::new(PAGES, 16, bytes.len() as u64);
    let mut device = Device::new(queue, CONNECTIONS_MAX);
    let connection = device.connect().expect("the first connection");
    let mut output = Vec::with_capacity(OUTPUT_BYTES);
    // Pieces end at any byte.
    let piece = bytes.first().map_or(1, |first| usize::from(*first) + 1);
    let (mut begin, mut end) = (0, 0);
    for step in 0.. {
        assert!(step < STEPS_MAX, "a request does not end");
        end = bytes.len().min(end + piece);
        let Ok(used) = device.handle_input(connection, &bytes[begin..end]) else { break };
        begin += used;
        let ended = device.advance();
        output.clear();
        device.emit(connection, &mut output, OUTPUT_BYTES).expect("pages that were loaded");
        assert!(output.len() <= OUTPUT_BYTES);
        let has_progressed = used > 0 || ended > 0 || !output.is_empty() || end < bytes.len();
        if !has_progressed && !device.is_busy() {
            break;
        }
    }
    device.disconnect(connection);
    for step in 0.. {
        assert!(step < STEPS_MAX, "an operation does not end");
        if !device.is_busy() {
            break;
        }
        device.advance();
    }
    let free = std::iter::from_fn(|| device.connect()).count();
    assert_eq!(free, CONNECTIONS_MAX, "the connection still has requests or slots");
}
