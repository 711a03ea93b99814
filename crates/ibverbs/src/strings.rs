//! Texts for enumerations. Programs print them and test suites compare them, so the texts are those of rdma-core.

use std::ffi::{CStr, c_char, c_int, c_uint};

use crate::abi::{ibv_event_type, ibv_node_type, ibv_port_state, ibv_wc_status};

const UNKNOWN: &CStr = c"unknown";

/// By `ibv_node_type`; -1 is unknown, 0 unused.
const NODE_TYPES: [&CStr; 8] = [
    UNKNOWN,
    c"InfiniBand channel adapter",
    c"InfiniBand switch",
    c"InfiniBand router",
    c"iWARP NIC",
    c"usNIC",
    c"usNIC UDP",
    c"unspecified",
];

/// By `ibv_port_state`.
const PORT_STATES: [&CStr; 6] =
    [c"no state change (NOP)", c"down", c"init", c"armed", c"active", c"active defer"];

/// By `ibv_event_type`; the last entry is newer than the header of this library's version.
const EVENTS: [&CStr; 21] = [
    c"CQ error",
    c"local work queue catastrophic error",
    c"invalid request local work queue error",
    c"local access violation work queue error",
    c"communication established",
    c"send queue drained",
    c"path migrated",
    c"path migration request error",
    c"local catastrophic error",
    c"port active",
    c"port error",
    c"LID change",
    c"P_Key change",
    c"SM change",
    c"SRQ catastrophic error",
    c"SRQ limit reached",
    c"last WQE reached",
    c"client reregistration",
    c"GID table change",
    c"WQ fatal",
    c"Device link speed change",
];

/// By `ibv_wc_status`.
const WC_STATUSES: [&CStr; 24] = [
    c"success",
    c"local length error",
    c"local QP operation error",
    c"local EE context operation error",
    c"local protection error",
    c"Work Request Flushed Error",
    c"memory management operation error",
    c"bad response error",
    c"local access error",
    c"remote invalid request error",
    c"remote access error",
    c"remote operation error",
    c"transport retry counter exceeded",
    c"RNR retry counter exceeded",
    c"local RDD violation error",
    c"remote invalid RD request",
    c"aborted error",
    c"invalid EE context number",
    c"invalid EE context state",
    c"fatal error",
    c"response timeout error",
    c"general error",
    c"TM error",
    c"TM software rendezvous",
];

/// By `ibv_wr_opcode`; 12 and 13 are not assigned.
const WR_OPCODES: [&CStr; 16] = [
    c"rdma-write",
    c"rdma-write-with-imm",
    c"send",
    c"send-with-imm",
    c"rdma-read",
    c"atomic-cmp-and-swp",
    c"atomic-fetch-and-add",
    c"local-inv",
    c"bind-mw",
    c"send-with-inv",
    c"tso",
    c"driver1",
    UNKNOWN,
    UNKNOWN,
    c"flush",
    c"atomic-write",
];

fn text(table: &[&'static CStr], value: i64) -> *const c_char {
    usize::try_from(value).ok().and_then(|index| table.get(index)).unwrap_or(&UNKNOWN).as_ptr()
}

/// `ibv_node_type_str(3)`.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_node_type_str(node_type: ibv_node_type) -> *const c_char {
    text(&NODE_TYPES, i64::from(node_type))
}

/// `ibv_port_state_str(3)`.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_port_state_str(state: ibv_port_state) -> *const c_char {
    text(&PORT_STATES, i64::from(state))
}

/// `ibv_event_type_str(3)`.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_event_type_str(event: ibv_event_type) -> *const c_char {
    text(&EVENTS, i64::from(event))
}

/// The text of a completion's status.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_wc_status_str(status: ibv_wc_status) -> *const c_char {
    text(&WC_STATUSES, i64::from(status))
}

/// The text of a work request's opcode.
pub(crate) fn wr_opcode_text(opcode: c_uint) -> *const c_char {
    text(&WR_OPCODES, i64::from(opcode))
}

/// A link rate: the `ibv_rate` value, the multiple of 2.5 Gb/s if there is one, and the data rate in Mb/s.
struct Rate {
    code: c_uint,
    multiple: Option<c_int>,
    mbps: c_int,
}

const fn rate(code: c_uint, multiple: c_int, mbps: c_int) -> Rate {
    Rate { code, multiple: if multiple == 0 { None } else { Some(multiple) }, mbps }
}

/// IBTA volume 1, table of static rates; only rates that are multiples of 2.5 Gb/s per lane have a multiple, and
/// a few others that existing programs use.
const RATES: [Rate; 23] = [
    rate(2, 1, 2500),
    rate(5, 2, 5000),
    rate(3, 4, 10_000),
    rate(6, 8, 20_000),
    rate(4, 12, 30_000),
    rate(7, 16, 40_000),
    rate(8, 24, 60_000),
    rate(9, 32, 80_000),
    rate(10, 48, 120_000),
    rate(11, 0, 14_062),
    rate(12, 0, 56_250),
    rate(13, 0, 112_500),
    rate(14, 0, 168_750),
    rate(15, 0, 25_781),
    rate(16, 0, 103_125),
    rate(17, 0, 206_250),
    rate(18, 0, 309_375),
    rate(19, 11, 28_125),
    rate(20, 20, 53_125),
    rate(21, 160, 425_000),
    rate(22, 240, 637_500),
    rate(23, 320, 850_000),
    rate(24, 480, 1_275_000),
];

/// `IBV_RATE_MAX`: the port's rate; the result for a rate that has no code.
const RATE_MAX: c_uint = 0;

/// `ibv_rate_to_mult(3)`: -1 for a rate that is no multiple of 2.5 Gb/s.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_rate_to_mult(code: c_uint) -> c_int {
    RATES.iter().find(|rate| rate.code == code).and_then(|rate| rate.multiple).unwrap_or(-1)
}

/// `mult_to_ibv_rate(3)`.
#[unsafe(no_mangle)]
pub extern "C" fn mult_to_ibv_rate(multiple: c_int) -> c_uint {
    RATES.iter().find(|rate| rate.multiple == Some(multiple)).map_or(RATE_MAX, |rate| rate.code)
}

/// `ibv_rate_to_mbps(3)`: -1 for an unknown rate.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_rate_to_mbps(code: c_uint) -> c_int {
    RATES.iter().find(|rate| rate.code == code).map_or(-1, |rate| rate.mbps)
}

/// `mbps_to_ibv_rate(3)`.
#[unsafe(no_mangle)]
pub extern "C" fn mbps_to_ibv_rate(mbps: c_int) -> c_uint {
    RATES.iter().find(|rate| rate.mbps == mbps).map_or(RATE_MAX, |rate| rate.code)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: *const c_char) -> &'static str {
        // SAFETY: every answer of this module is a C string literal.
        unsafe { CStr::from_ptr(text) }.to_str().expect("ASCII")
    }

    #[test]
    fn texts_are_those_of_rdma_core() {
        assert_eq!(read(ibv_wc_status_str(0)), "success");
        assert_eq!(read(ibv_wc_status_str(12)), "transport retry counter exceeded");
        assert_eq!(read(ibv_wc_status_str(24)), "unknown");
        assert_eq!(read(ibv_wc_status_str(u32::MAX)), "unknown");
        assert_eq!(read(ibv_node_type_str(1)), "InfiniBand channel adapter");
        assert_eq!(read(ibv_node_type_str(-1)), "unknown");
        assert_eq!(read(ibv_event_type_str(16)), "last WQE reached");
        assert_eq!(read(ibv_port_state_str(4)), "active");
        assert_eq!(read(wr_opcode_text(14)), "flush");
    }

    #[test]
    fn rates_round_trip() {
        for rate in &RATES {
            assert_eq!(mbps_to_ibv_rate(ibv_rate_to_mbps(rate.code)), rate.code);
            if rate.multiple.is_some() {
                assert_eq!(mult_to_ibv_rate(ibv_rate_to_mult(rate.code)), rate.code);
            }
        }
        assert_eq!(ibv_rate_to_mult(16), -1);
        assert_eq!(ibv_rate_to_mbps(99), -1);
        assert_eq!(mult_to_ibv_rate(3), 0);
        assert_eq!(mbps_to_ibv_rate(-1), 0);
    }
}
