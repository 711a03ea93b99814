//! Captures are readable by Wireshark and never block packets.

mod common;

use std::fs::{File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::*;
use rustix::fs::{CWD, FileType, Mode, OFlags, mknodat};
use rustix::process::{Resource, Rlimit, setrlimit};
use terrace_fabric::fault::FaultyPort;
use terrace_fabric::pcap::{PcapPort, end_pipes};
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

/// Sends 20 packets of 100 bytes, which all arrive.
fn send_20(a: &dyn Port, b: &dyn Port) {
    for number in 0..20 {
        send(a, &path_to(address_of(b)), &packet(number, 100));
    }
    assert_eq!(receive(b, 20).len(), 20);
}

/// A limit stands for a full disk. A write beyond it would end the process by SIGXFSZ.
#[test]
fn a_file_that_cannot_grow_ends_only_the_capture() {
    let path = temporary("limit");
    let a = PcapPort::create(port_at("127.83.4.1"), &path).expect("a file");
    let limit = Rlimit { current: Some(1000), maximum: None };
    setrlimit(Resource::Fsize, limit).expect("a lower limit");
    send_20(&a, &port_at("127.83.4.2"));
    // Its records are whole.
    assert_eq!(frames(&path).len(), 976 / (16 + 28 + 104));
    let _ = std::fs::remove_file(path);
}

#[test]
fn a_full_device_ends_only_the_capture() {
    let a = PcapPort::create(port_at("127.83.4.3"), "/dev/full".as_ref()).expect("a device");
    send_20(&a, &port_at("127.83.4.4"));
}

/// A named pipe and its reader, which does not wait.
fn pipe(name: &str) -> (PathBuf, File) {
    let path = temporary(name);
    let _ = std::fs::remove_file(&path);
    mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).expect("a pipe");
    let nonblocking = OFlags::NONBLOCK.bits() as i32;
    let reader = OpenOptions::new().read(true).custom_flags(nonblocking).open(&path).expect("a reader");
    (path, reader)
}

#[test]
fn packets_do_not_wait_for_the_reader_of_a_pipe() {
    let (path, mut reader) = pipe("slow");
    let a = PcapPort::create(port_at("127.83.8.1"), &path).expect("a pipe");
    let b = port_at("127.83.8.2");
    // More than a pipe holds.
    for number in 0..200 {
        send(&a, &path_to(address_of(&b)), &packet(number, 2000));
        assert_eq!(receive(&b, 1).len(), 1);
    }
    // A reader that goes on gets all of them.
    let copy = temporary("copy");
    let mut bytes = Vec::new();
    let deadline = Instant::now() + Duration::from_secs(10);
    while bytes.len() < 24 + 200 * (16 + 28 + 2004) && Instant::now() < deadline {
        let _ = reader.read_to_end(&mut bytes);
        std::thread::yield_now();
    }
    std::fs::write(&copy, bytes).expect("a file");
    let frames = frames(&copy);
    assert_eq!(frames.len(), 200);
    assert!(frames.iter().all(has_correct_icrc));
    // One that is stopped does not hold up a port that closes, either.
    for number in 0..200 {
        send(&a, &path_to(address_of(&b)), &packet(number, 2000));
    }
    let closing = Instant::now();
    drop(a);
    assert!(closing.elapsed() < Duration::from_secs(5));
    // The pipe is closed by then: a program that opens its device again captures into it.
    drop(PcapPort::create(port_at("127.83.8.1"), &path).expect("the pipe is not locked"));
    [path, copy].iter().for_each(|path| _ = std::fs::remove_file(path));
}

/// A program may call `exit` with its device open.
#[test]
fn a_process_that_ends_leaves_the_rest_to_the_reader() {
    let (path, mut reader) = pipe("exit");
    let a = PcapPort::create(port_at("127.83.10.1"), &path).expect("a pipe");
    let b = port_at("127.83.10.2");
    for number in 0..200 {
        send(&a, &path_to(address_of(&b)), &packet(number, 2000));
    }
    let reading = std::thread::spawn(move || {
        let (mut bytes, deadline) = (Vec::new(), Instant::now() + Duration::from_secs(10));
        let mut is_at_end = false;
        while !is_at_end && Instant::now() < deadline {
            is_at_end = reader.read_to_end(&mut bytes).is_ok();
            std::thread::yield_now();
        }
        (is_at_end, bytes.len())
    });
    end_pipes();
    assert_eq!(reading.join().expect("no panic"), (true, 24 + 200 * (16 + 28 + 2004)));
    let _ = std::fs::remove_file(path);
}

/// The signals that a thread of this process blocks, as a bit mask. `None` if there is no such thread.
fn blocked_signals(thread_name: &str) -> Option<u64> {
    let tasks = std::fs::read_dir("/proc/self/task").expect("threads").flatten();
    let statuses = tasks.flat_map(|task| std::fs::read_to_string(task.path().join("status")));
    let status = statuses.into_iter().find(|status| status.contains(&format!("Name:\t{thread_name}\n")))?;
    let mask = status.lines().find_map(|line| line.strip_prefix("SigBlk:\t"))?;
    u64::from_str_radix(mask, 16).ok()
}

#[test]
fn a_reader_that_ends_costs_only_the_capture() {
    let (path, reader) = pipe("ends");
    let a = PcapPort::create(port_at("127.83.9.1"), &path).expect("a pipe");
    let b = port_at("127.83.9.2");
    send_20(&a, &b);
    // In C programs, unlike here, SIGPIPE ends the process by default.
    let deadline = Instant::now() + Duration::from_secs(10);
    let blocked = loop {
        match blocked_signals("terrace-pcap") {
            Some(blocked) => break blocked,
            None => assert!(Instant::now() < deadline, "no thread writes"),
        }
    };
    assert_ne!(blocked & 1 << (13 - 1), 0, "{blocked:#x}");
    drop(reader);
    send_20(&a, &b);
    let deadline = Instant::now() + Duration::from_secs(10);
    while blocked_signals("terrace-pcap").is_some() {
        assert!(Instant::now() < deadline, "the capture goes on");
        std::thread::yield_now();
    }
    send_20(&a, &b);
    drop(a);
    // Without a reader there is no capture.
    let error = PcapPort::create(port_at("127.83.9.1"), &path).expect_err("no reader");
    assert_eq!(error.kind(), std::io::ErrorKind::NotConnected);
    let _ = std::fs::remove_file(path);
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
