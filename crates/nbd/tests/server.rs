//! A device at its socket: published clients, clients that break the protocol, and the end of the server.

mod common;
#[path = "common/served.rs"]
mod served;

use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Command, Output};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use common::MemoryQueue;
use served::{Served, reply, request};
use terrace_nbd::{CONNECTIONS_MAX, Server};

const MIB: u64 = 1 << 20;

fn is_closed(socket: &mut UnixStream) -> bool {
    let mut rest = Vec::new();
    // A reset closes as well.
    socket
        .read_to_end(&mut rest)
        .map_or_else(|error| error.kind() != std::io::ErrorKind::WouldBlock, |_| true)
}

/// The output of a published program, or `None`, and a line, if it is not installed.
fn run(program: &str, arguments: &[&str]) -> Option<String> {
    match Command::new("timeout").arg("60").arg(program).args(arguments).output() {
        Ok(Output { status, .. }) if status.code() == Some(127) => {
            println!("skipped: {program} is not installed (scripts/setup.sh test)");
            None
        }
        Ok(Output { status, stdout, stderr }) => {
            let text = String::from_utf8_lossy(&stdout).into_owned() + &String::from_utf8_lossy(&stderr);
            assert!(status.success(), "{program} {arguments:?}: {status}: {text}");
            Some(text)
        }
        Err(error) => panic!("timeout(1): {error}"),
    }
}

fn write_file(path: &Path, bytes: u64) -> Vec<u8> {
    let mut state = 1u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 24) as u8
    };
    let content: Vec<u8> = (0..bytes).map(|_| next()).collect();
    std::fs::write(path, &content).expect("a file");
    content
}

#[test]
fn nbdinfo_shows_the_export() {
    let served = Served::new(64 * MIB);
    let Some(text) = run("nbdinfo", &[&served.uri()]) else { return };
    for line in [
        "export-size: 67108864",
        "can_multi_conn: true",
        "can_trim: true",
        "can_zero: true",
        "block_size_maximum: 4194304",
    ] {
        assert!(text.contains(line), "{line}: {text}");
    }
    let list = run("nbdinfo", &["--list", &served.uri()]).expect("it is installed");
    assert!(list.contains("export=\"\""), "{list}");
}

#[test]
fn nbdcopy_copies_by_several_connections() {
    let served = Served::new(32 * MIB);
    let (from, to) = (served.directory.path().join("from"), served.directory.path().join("to"));
    let content = write_file(&from, 32 * MIB);
    let text = |path: &Path| path.to_str().expect("a path").to_owned();
    if run("nbdcopy", &["--connections=4", "--requests=64", &text(&from), &served.uri()]).is_none() {
        return;
    }
    run("nbdcopy", &["--connections=4", &served.uri(), &text(&to)]);
    assert!(std::fs::read(to).expect("a copy") == content);
    assert_eq!(served.control.stored_pages.load(Ordering::Relaxed), 8192);
}

#[test]
fn qemu_io_writes_reads_zeroes_and_discards() {
    let served = Served::new(16 * MIB);
    let uri = served.uri();
    let commands = [
        "write -P 0x11 0 3M",
        "write -P 0x22 5000 700",
        "read -P 0x11 0 4k",
        "read -P 0x22 5000 700",
        "write -z 4096 8192",
        "read -P 0 4096 8192",
        "discard 1M 1M",
        "read -P 0 1M 1M",
        "read -P 0x11 2M 1M",
        "aio_write -P 0x33 8M 2M",
        "aio_write -P 0x44 10M 2M",
        "aio_flush",
        "read -P 0x33 8M 2M",
        "read -P 0x44 10M 2M",
        "flush",
    ];
    let mut arguments = vec!["-f", "raw", "-d", "unmap"];
    commands.iter().for_each(|command| arguments.extend(["-c", command]));
    arguments.push(&uri);
    let Some(text) = run("qemu-io", &arguments) else { return };
    assert!(!text.contains("verification failed"), "{text}");
}

#[test]
fn fio_verifies_random_writes() {
    let served = Served::new(16 * MIB);
    let uri = format!("--uri={}", served.uri());
    let engines = Command::new("fio").arg("--enghelp").output();
    if !engines.is_ok_and(|output| String::from_utf8_lossy(&output.stdout).contains("nbd")) {
        println!("skipped: fio with its nbd engine is not installed");
        return;
    }
    let arguments = [
        "--name=verify",
        "--ioengine=nbd",
        &uri,
        "--size=16M",
        "--rw=randrw",
        "--bsrange=512-64k",
        "--blockalign=512",
        "--iodepth=32",
        "--verify=crc32c",
        "--verify_fatal=1",
        "--randseed=1",
    ];
    let directory = served.directory.path().to_str().expect("a path").to_owned();
    let aux = format!("--aux-path={directory}");
    run("fio", &[&arguments[..], &[&aux]].concat());
    assert!(served.control.in_flight_max.load(Ordering::Relaxed) > 4);
}

#[test]
fn clients_that_break_the_protocol_are_disconnected_and_others_go_on() {
    let served = Served::new(16 * MIB);
    let mut good = served.negotiate();
    for bytes in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 4], b"\0\0\0\x03NOOPTION\0\0\0\x07\0\0\0\0"] {
        let mut socket = served.connect();
        socket.write_all(bytes).expect("bytes");
        assert!(is_closed(&mut socket), "{bytes:?}");
    }
    let mut socket = served.negotiate();
    socket.write_all(&[0; 28]).expect("bytes");
    assert!(is_closed(&mut socket));
    // An option of 4 GiB, and another of them.
    let mut socket = served.connect();
    socket.write_all(b"\0\0\0\x03IHAVEOPT\0\0\0\x06\xff\xff\xff\xff").expect("an option");
    socket.write_all(&[0; 65536]).expect("a part of its data");
    drop(socket);
    // A write that ends in its middle.
    let mut socket = served.negotiate();
    socket.write_all(&request(1, 1, 0, 1 << 20)).expect("a request");
    socket.write_all(&[1; 10_000]).expect("a part of its data");
    drop(socket);
    // One that asks and takes nothing.
    let mut greedy = served.negotiate();
    greedy.set_write_timeout(Some(Duration::from_millis(200))).expect("a timeout");
    let reads = request(0, 1, 0, 1 << 20).repeat(100_000);
    assert!(greedy.write_all(&reads).is_err(), "the server takes all requests");
    for cookie in 0..100 {
        good.write_all(&request(3, cookie, 0, 0)).expect("a request");
        assert_eq!(reply(&mut good), (0, cookie));
    }
}

#[test]
fn more_clients_than_connections_are_refused_until_one_ends() {
    let served = Served::new(16 * MIB);
    let mut sockets: Vec<UnixStream> = (0..CONNECTIONS_MAX).map(|_| served.negotiate()).collect();
    assert!(is_closed(&mut served.connect()));
    sockets.pop();
    let server = served.server.as_ref().expect("a server");
    let started = Instant::now();
    while server.counters().totals().connections >= CONNECTIONS_MAX as u64 {
        assert!(started.elapsed() < Duration::from_secs(20));
        std::thread::sleep(Duration::from_millis(1));
    }
    served.negotiate();
}

#[test]
fn a_client_that_never_negotiates_is_disconnected() {
    let served = Served::new(16 * MIB);
    let started = Instant::now();
    assert!(is_closed(&mut served.connect()));
    assert!((9..19).contains(&started.elapsed().as_secs()), "{:?}", started.elapsed());
}

#[test]
fn replies_come_out_of_order_and_late_ones_before_the_end() {
    let mut served = Served::new(16 * MIB);
    let mut socket = served.negotiate();
    served.control.is_stopped.store(true, Ordering::Relaxed);
    socket.write_all(&request(0, 1, 0, 4096)).expect("a request");
    // A FLUSH waits for nothing.
    socket.write_all(&request(3, 2, 0, 0)).expect("a request");
    assert_eq!(reply(&mut socket), (0, 2));
    let control = served.control.clone();
    let resumes = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(100));
        control.is_stopped.store(false, Ordering::Relaxed);
    });
    served.stop();
    resumes.join().expect("a thread");
    assert_eq!(reply(&mut socket), (0, 1));
    let mut page = [1; 4096];
    socket.read_exact(&mut page).expect("a page");
    assert_eq!(page, [0; 4096]);
    assert!(is_closed(&mut socket));
    assert!(!served.path().exists());
}

#[test]
fn the_end_does_not_wait_for_ever() {
    let mut served = Served::new(16 * MIB);
    let mut socket = served.negotiate();
    served.control.is_stopped.store(true, Ordering::Relaxed);
    socket.write_all(&request(0, 1, 0, 4096)).expect("a request");
    while served.control.in_flight_max.load(Ordering::Relaxed) == 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    let started = Instant::now();
    served.stop();
    assert!((9..19).contains(&started.elapsed().as_secs()), "{:?}", started.elapsed());
}

#[test]
fn only_its_user_connects_and_a_socket_in_use_is_not_replaced() {
    let served = Served::new(16 * MIB);
    let mode = std::fs::metadata(served.path()).expect("a socket").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let start = |path: &Path| Server::start(path, MemoryQueue::new(16, 16, 1).0);
    let error = start(&served.path()).err().expect("the socket is in use").to_string();
    assert!(error.contains("cannot listen at") && error.contains("in use"), "{error}");
    // A file that is no socket stays.
    let file = served.directory.path().join("file");
    std::fs::write(&file, b"x").expect("a file");
    let error = start(&file).err().expect("a file").to_string();
    assert!(error.contains("which is no socket"), "{error}");
    assert_eq!(std::fs::read(&file).expect("a file"), b"x");
    // What a killed server has left.
    let left = served.directory.path().join("left");
    drop(UnixListener::bind(&left).expect("a socket"));
    start(&left).expect("a server").stop();
    assert!(start(Path::new("/no/such/directory/nbd")).is_err());
}
