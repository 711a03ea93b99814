//! The ICRC check accepts any datagram over any flow. A sealed datagram verifies with any guessed identification, and a
//! verdict of `Good` names an identification that gives the ICRC in the datagram.

use std::net::{IpAddr, SocketAddr};

use crate::decoded;
use arbitrary::Arbitrary;
use terrace_wire::ICRC_LEN;
use terrace_wire::icrc::{Flow, Verdict, compute, seal, verify};

#[derive(Arbitrary, Debug)]
enum Addresses {
    V4([u8; 4], [u8; 4]),
    V6([u8; 16], [u8; 16]),
    /// An error of the caller, which must not panic.
    Mixed([u8; 4], [u8; 16]),
}

#[derive(Arbitrary, Debug)]
struct Input<'a> {
    addresses: Addresses,
    ports: (u16, u16),
    ip_id: u16,
    likely_ip_id: u16,
    datagram: &'a [u8],
}

fn flow(input: &Input) -> Flow {
    let (source, destination): (IpAddr, IpAddr) = match input.addresses {
        Addresses::V4(source, destination) => (source.into(), destination.into()),
        Addresses::V6(source, destination) => (source.into(), destination.into()),
        Addresses::Mixed(source, destination) => (source.into(), destination.into()),
    };
    Flow {
        source: SocketAddr::new(source, input.ports.0),
        destination: SocketAddr::new(destination, input.ports.1),
    }
}

/// Checks one input.
pub fn check(bytes: &[u8]) {
    let Some(input) = decoded::<Input>(bytes) else { return };
    let flow = flow(&input);
    let is_v4 = [flow.source, flow.destination].iter().all(|end| end.ip().to_canonical().is_ipv4());

    if let Verdict::Good { ip_id } = verify(&flow, input.datagram, input.likely_ip_id) {
        let (packet, icrc) =
            input.datagram.split_last_chunk::<ICRC_LEN>().expect("too short a datagram is never good");
        assert_eq!(compute(&flow, packet, ip_id), u32::from_le_bytes(*icrc));
    }

    let mut sealed = input.datagram.to_vec();
    seal(&flow, &mut sealed, input.ip_id);
    let expected = match sealed.len() {
        0..16 => Verdict::Bad,
        _ if is_v4 => Verdict::Good { ip_id: input.ip_id },
        _ => Verdict::Good { ip_id: 0 },
    };
    assert_eq!(verify(&flow, &sealed, input.likely_ip_id), expected);

    // The CRC always detects a one-bit error if the identification is known.
    if let (Verdict::Good { ip_id }, Some(last)) = (expected, sealed.last_mut()) {
        *last ^= 0x80;
        assert_ne!(verify(&flow, &sealed, ip_id), Verdict::Good { ip_id });
    }
}
