//! Captures are readable by Wireshark and never block packets.

mod common;

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use common::*;
use terrace_fabric::fault::FaultyPort;
use terrace_fabric::pcap::PcapPort;
use terrace_fabric::{Port, TxBatch};
use terrace_faults::{FaultPlan, Faults};
use terrace_wire::icrc::{self, Flow};
use terrace_wire::{Bth, Extensions, Opcode, Psn, emit_headers};

fn temporary(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("terrace-{}-{name}.pcap", std::process::id()))
}

/// A SEND with an acknowledgement request, for Wireshark to dissect.
fn send_only(psn: u32) -> Vec<u8> {
    let bth = Bth {
        opcode: Opcode::RcSendOnly,
        solicited: false,
        migrated: true,
        pad: 0,
        pkey: 0xffff,
        fecn: false,
        becn: false,
        qpn: 0x1_0011,
        ack_request: true,
        psn: Psn::new(psn),
    };
    let mut bytes = vec![0x5a; 12 + 32];
    emit_headers(&bth, &Extensions::default(), &mut bytes).expect("space");
    bytes
}

/// Each packet's fields as tshark prints them; `None` where tshark is not installed.
fn tshark(path: &std::path::Path, udp_ports: [u16; 2], fields: &[&str]) -> Option<Vec<Vec<String>>> {
    // Wireshark recognizes only the port of instance index 0.
    let decode = udp_ports.map(|port| format!("udp.port=={port},infiniband"));
    let fields: Vec<&str> = fields.iter().flat_map(|field| ["-e", field]).collect();
    let result = Command::new("tshark")
        .args(["-r".as_ref(), path.as_os_str()])
        .args(["-o", "ip.check_checksum:TRUE", "-d", &decode[0], "-d", &decode[1], "-T", "fields"])
        .args(fields)
        .output();
    let Ok(output) = result else {
        eprintln!("skipped: no tshark");
        return None;
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    Some(text.lines().map(|line| line.split('\t').map(str::to_owned).collect()).collect())
}

#[test]
fn wireshark_reads_both_directions() {
    for (index, (left, right)) in [("127.83.1.1", "127.83.1.2"), ("::1", "::1")].into_iter().enumerate() {
        let path = temporary(&format!("both-{index}"));
        let a = PcapPort::create(port_at(left), &path).expect("a file");
        let b = port_at(right);
        let mut tx = TxBatch::new(0);
        for psn in 0..3 {
            push(&mut tx, &path_to(address_of(&b)), &send_only(psn));
        }
        assert!(a.transmit(&mut tx));
        assert_eq!(receive(&b, 3).len(), 3);
        send(&b, &path_to(address_of(&a)), &send_only(77));
        assert_eq!(receive(&a, 1).len(), 1);

        let fields = ["infiniband.bth.psn", "infiniband.bth.destqp", "udp.srcport", "ip.checksum.status"];
        let Some(lines) = tshark(&path, [a.udp_port(), b.udp_port()], &fields) else { return };
        let _ = std::fs::remove_file(&path);
        assert_eq!(lines.len(), 4, "{lines:?}");
        assert_eq!(lines.iter().map(|line| &line[0]).collect::<Vec<_>>(), ["0", "1", "2", "77"]);
        assert!(lines.iter().all(|line| line[1] == "0x010011"), "{lines:?}");
        assert_eq!(lines[3][2], address_of(&b).port().to_string());
        assert!(lines.iter().all(|line| line[3] == if left == "::1" { "" } else { "1" }), "{lines:?}");
    }
}

/// Frames of a capture in this machine's byte order: source, destination, IPv4 identification, RoCEv2 part.
fn frames(path: &std::path::Path) -> Vec<(Flow, u16, Vec<u8>)> {
    let file = std::fs::read(path).expect("the capture");
    let mut frames = Vec::new();
    let mut rest = &file[24..];
    while let Some((header, after)) = rest.split_first_chunk::<16>() {
        let len = u32::from_ne_bytes(header[8..12].try_into().unwrap()) as usize;
        let (frame, after) = after.split_at(len);
        let word = |at: usize| u16::from_be_bytes([frame[at], frame[at + 1]]);
        let addr =
            |at: usize| std::net::Ipv4Addr::new(frame[at], frame[at + 1], frame[at + 2], frame[at + 3]);
        let flow = Flow { source: (addr(12), word(20)).into(), destination: (addr(16), word(22)).into() };
        frames.push((flow, word(4), frame[28..].to_vec()));
        rest = after;
    }
    frames
}

fn has_correct_icrc(frame: &(Flow, u16, Vec<u8>)) -> bool {
    let (bytes, icrc) = frame.2.split_last_chunk::<4>().expect("an ICRC");
    icrc::compute(&frame.0, bytes, frame.1).to_le_bytes() == *icrc
}

#[test]
fn the_icrc_in_the_capture_is_that_of_the_packet() {
    let [sent, received] = [temporary("sent"), temporary("received")];
    let a = PcapPort::create(port_at("127.83.2.1"), &sent).expect("a file");
    let b = PcapPort::create(port_at("127.83.2.2"), &received).expect("a file");
    let mut tx = TxBatch::new(1 << 20);
    for number in 0..100 {
        push(&mut tx, &path_to(address_of(&b)), &packet(number, 2000));
    }
    assert!(a.transmit(&mut tx));
    assert_eq!(receive(&b, 100).len(), 100);
    for path in [&sent, &received] {
        let frames = frames(path);
        assert_eq!(frames.len(), 100);
        assert!(frames.iter().all(has_correct_icrc));
        let _ = std::fs::remove_file(path);
    }
}

#[test]
fn a_capture_inside_a_faulty_port_shows_the_faults() {
    let path = temporary("faults");
    let capture = PcapPort::create(port_at("127.83.3.1"), &path).expect("a file");
    let plan = FaultPlan::parse("corrupt = 0.5\nduplicate = 1.0\nseed = 3").unwrap();
    let a = FaultyPort::new(capture, Arc::new(Faults::new(plan, "test"))).expect("a timer");
    let b = port_at("127.83.3.2");
    let mut tx = TxBatch::new(1 << 20);
    for number in 0..50 {
        push(&mut tx, &path_to(address_of(&b)), &packet(number, 100));
    }
    assert!(a.transmit(&mut tx));
    let received = receive_rest(&b);
    let frames = frames(&path);
    let _ = std::fs::remove_file(&path);
    assert_eq!(frames.len(), 100);
    assert_eq!(frames.iter().filter(|frame| has_correct_icrc(frame)).count(), received.len());
    assert!((20..80).contains(&received.len()));
}

#[test]
fn a_full_disk_ends_only_the_capture() {
    let a = match PcapPort::create(port_at("127.83.4.1"), "/dev/full".as_ref()) {
        Ok(port) => port,
        Err(error) => {
            assert_eq!(error.kind(), std::io::ErrorKind::StorageFull);
            return;
        }
    };
    let b = port_at("127.83.4.2");
    for number in 0..20 {
        send(&a, &path_to(address_of(&b)), &packet(number, 100));
    }
    assert_eq!(receive(&b, 20).len(), 20);
}

#[test]
fn a_file_that_cannot_be_created_is_an_error() {
    assert!(PcapPort::create(port_at("127.83.5.1"), "/nonexistent/file.pcap".as_ref()).is_err());
}

/// The mode does not depend on the umask, because a capture contains the data of all packets.
#[test]
fn a_new_file_is_readable_only_by_its_owner() {
    let path = temporary("private");
    let _port = PcapPort::create(port_at("127.83.7.1"), &path).expect("a file");
    let mode = std::fs::metadata(&path).expect("created").permissions().mode();
    assert_eq!(mode & 0o077, 0, "{mode:o}");
    let _ = std::fs::remove_file(path);
}

#[test]
fn a_file_is_locked_by_the_first_port_until_it_closes() {
    let path = temporary("claimed");
    let first = PcapPort::create(port_at("127.83.6.1"), &path).expect("a file");
    let second = PcapPort::create(port_at("127.83.6.2"), &path).expect_err("the file is taken");
    assert_eq!(second.kind(), std::io::ErrorKind::WouldBlock);
    drop(first);
    assert!(PcapPort::create(port_at("127.83.6.2"), &path).is_ok());
    let _ = std::fs::remove_file(path);
}
