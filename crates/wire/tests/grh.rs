//! The 40-byte GRH area in front of a received datagram.

use std::net::IpAddr;

use terrace_wire::{GRH_LEN, RxMeta, grh, grh_v4, grh_v6};

fn meta(source: &str, destination: &str) -> RxMeta {
    RxMeta {
        source: source.parse().expect("a literal socket address"),
        destination: destination.parse::<IpAddr>().expect("a literal address"),
        gid_index: 0,
        traffic_class: 0x69,
    }
}

#[test]
fn ipv4_header_in_the_last_twenty_bytes() {
    let meta = meta("10.0.0.1:49152", "10.0.0.2");
    let area = grh_v4(&meta, 28);
    assert_eq!(area[..20], [0; 20]);
    // The length is 20 of IP, 8 of UDP, 28 of packet and 4 of ICRC.
    assert_eq!(area[20..30], [0x45, 0x69, 0, 60, 0, 0, 0x40, 0, 64, 17]);
    assert_eq!(area[32..], [10, 0, 0, 1, 10, 0, 0, 2]);
    // RFC 1071: the sum over a valid header, checksum included, is all ones.
    let sum: u32 = area[20..].chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1])).sum();
    assert_eq!((sum & 0xffff) + (sum >> 16), 0xffff);
    assert_eq!(grh::for_packet(&meta, 28), area);
}

#[test]
fn ipv6_header_in_full() {
    let meta = meta("[fd00::1]:49152", "fd00::2");
    let area = grh_v6(&meta, 28);
    assert_eq!(area[..8], [0x66, 0x90, 0, 0, 0, 40, 17, 64]);
    let address = |last| [0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, last];
    assert_eq!((&area[8..24], &area[24..]), (&address(1)[..], &address(2)[..]));
    assert_eq!(grh::for_packet(&meta, 28), area);
}

#[test]
fn ipv4_mapped_addresses_count_as_ipv4() {
    let plain = meta("10.0.0.1:49152", "10.0.0.2");
    let mapped = meta("[::ffff:10.0.0.1]:49152", "::ffff:10.0.0.2");
    assert_eq!(grh::for_packet(&mapped, 28), grh_v4(&plain, 28));
}

#[test]
fn foreign_families_and_lengths_do_not_panic() {
    let v6 = meta("[fd00::1]:1", "fd00::2");
    assert_eq!(grh_v4(&v6, 28)[32..], [0; 8]);
    assert_eq!(grh_v4(&v6, 1 << 20).len(), GRH_LEN);
    let v4 = meta("10.0.0.1:1", "10.0.0.2");
    assert_eq!(grh_v6(&v4, 1 << 20)[18..24], [0xff, 0xff, 10, 0, 0, 1]);
}
