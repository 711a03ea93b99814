//! The cost of the ICRC compared to that of the raw CRC: `cargo bench -p terrace-wire`.
//!
//! Prints nanoseconds per packet, the best of several rounds, since noise on a shared machine only adds time.

use std::hint::black_box;
use std::net::SocketAddr;
use std::time::Instant;

use terrace_wire::icrc::{Flow, Verdict, compute, verify};
use terrace_wire::{Bth, Extensions, MAX_HEADER_LEN, Opcode, Packet, Psn, emit_headers};

const ROUNDS: usize = 40;
const REPEATS: u32 = 20_000;

/// Best time of one call, in nanoseconds.
fn best_ns(mut call: impl FnMut()) -> f64 {
    let round = |_| {
        let start = Instant::now();
        for _ in 0..REPEATS {
            call();
        }
        start.elapsed().as_nanos() as f64 / f64::from(REPEATS)
    };
    (0..ROUNDS).map(round).fold(f64::INFINITY, f64::min)
}

fn flow(family: &str) -> Flow {
    let (source, destination) = match family {
        "v4" => ("10.0.0.1:49152", "10.0.0.2:4791"),
        _ => ("[fd00::1]:49152", "[fd00::2]:4791"),
    };
    let parse = |address: &str| address.parse::<SocketAddr>().expect("a literal address");
    Flow { source: parse(source), destination: parse(destination) }
}

fn icrc() {
    println!("{:>8} {:>10} {:>10} {:>10} {:>10} {:>12}", "bytes", "raw", "v4", "v6", "verify v4", "solve v4");
    for payload in [0, 8, 64, 256, 1024, 4096] {
        let packet: Vec<u8> = (0..12 + 16 + payload).map(|i| (i * 7 + 3) as u8).collect();
        let (v4, v6) = (flow("v4"), flow("v6"));
        let mut sealed = packet.clone();
        sealed.extend(compute(&v4, &packet, 0).to_le_bytes());
        let mut unknown_id = packet.clone();
        unknown_id.extend(compute(&v4, &packet, 0x1234).to_le_bytes());
        assert_eq!(verify(&v4, &unknown_id, 0), Verdict::Good { ip_id: 0x1234 });
        println!(
            "{payload:>8} {:>10.1} {:>10.1} {:>10.1} {:>10.1} {:>12.1}",
            best_ns(|| _ = black_box(crc32fast::hash(black_box(&packet)))),
            best_ns(|| _ = black_box(compute(black_box(&v4), black_box(&packet), 0))),
            best_ns(|| _ = black_box(compute(black_box(&v6), black_box(&packet), 0))),
            best_ns(|| _ = black_box(verify(black_box(&v4), black_box(&sealed), 0))),
            best_ns(|| _ = black_box(verify(black_box(&v4), black_box(&unknown_id), 0))),
        );
    }
}

fn headers() {
    let bth = Bth {
        opcode: Opcode::RcWriteOnly,
        solicited: false,
        migrated: true,
        pad: 0,
        pkey: 0xffff,
        fecn: false,
        becn: false,
        qpn: 17,
        ack_request: true,
        psn: Psn::new(4711),
    };
    let reth = terrace_wire::Reth { va: 0x7f00_0000_1000, rkey: 0x1234, length: 8 };
    let ext = Extensions { reth: Some(reth), ..Extensions::default() };
    let mut buf = [0; MAX_HEADER_LEN + 8];
    let len = emit_headers(&bth, &ext, &mut buf).expect("the buffer suffices");
    let emit = best_ns(|| _ = black_box(emit_headers(black_box(&bth), black_box(&ext), black_box(&mut buf))));
    let parse = best_ns(|| _ = black_box(Packet::parse(black_box(&buf[..len + 8]))));
    println!("\nRC_WRITE_ONLY headers: emit {emit:.1} ns, parse {parse:.1} ns");
}

fn main() {
    println!("ICRC, nanoseconds per packet of BTH, RETH and payload; raw = crc32fast over the same bytes");
    icrc();
    headers();
}
