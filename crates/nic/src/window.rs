//! How much queue pairs may have in flight at a port.

use terrace_fabric::Port;

/// Most bytes of one queue pair in flight at a time, however large the receive buffers are.
const WINDOW_BYTES_MAX: usize = 512 << 10;
/// How many queue pairs may send at full speed before a receive buffer overflows.
const WINDOWS_PER_BUFFER: usize = 8;

/// In-flight budget of a device, in windows of one queue pair: more would only wait in the peer's receive buffer, and
/// for longer than the senders wait.
const WINDOWS_IN_FLIGHT: u64 = 2;

/// In-flight bytes of one queue pair at most on such a port.
pub(crate) fn window_bytes(port: &dyn Port) -> usize {
    (port.receive_buffer_bytes() / WINDOWS_PER_BUFFER).min(WINDOW_BYTES_MAX)
}

/// In-flight bytes of all queue pairs of a device at most on such a port.
pub(crate) fn in_flight_bytes_max(port: &dyn Port) -> u64 {
    window_bytes(port) as u64 * WINDOWS_IN_FLIGHT
}
