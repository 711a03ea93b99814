//! Servers and clients that are killed, stopped and started again.

use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::process::Process;
use crate::support::{READ_WRITE, connect, errno, server_config, wait_until};
use rustix::io::Errno;
use rustix::process::Signal;
use terrace_export::{
    Change, ChangeSet, ExportError, LockKind, OpenAccess, RemoteFile, Server, ServerConfig,
};
use terrace_nic::PathChoice;

/// What a child process of this test does: `serve`, `lock`, `hold`, `copy`, `copy-unmapped` or `read`.
const ROLE: &str = "EXPORT_TEST_ROLE";
const DIRECTORY: &str = "EXPORT_TEST_DIRECTORY";
const ADDRESS: &str = "EXPORT_TEST_ADDRESS";
const TRANSPORT: &str = "EXPORT_TEST_PATH";
const LEASE: Duration = Duration::from_secs(2);
/// Bytes that `copy` writes at a time.
const COPY_BYTES: usize = 4 << 20;
const WOULD_BLOCK: i32 = Errno::WOULDBLOCK.raw_os_error();

fn start(role: &str, directory: &Path, address: SocketAddr, path: PathChoice) -> Process {
    let variables = [
        (ROLE, role.into()),
        (DIRECTORY, directory.as_os_str().to_owned()),
        (ADDRESS, address.to_string().into()),
        (TRANSPORT, path.to_string().into()),
    ];
    Process::start("processes::child", &variables)
}

fn serve(directory: &Path, address: SocketAddr, path: PathChoice) -> (Process, SocketAddr) {
    let mut server = start("serve", directory, address, path);
    let address = server.expect("serving at ").parse().unwrap();
    (server, address)
}

fn any() -> SocketAddr {
    "127.0.0.1:0".parse().unwrap()
}

/// Not a test: what the child processes do.
#[test]
fn child() {
    let variable = |name| std::env::var(name).unwrap();
    let Ok(role) = std::env::var(ROLE) else { return };
    let address: SocketAddr = variable(ADDRESS).parse().unwrap();
    let (directory, path) = (variable(DIRECTORY), variable(TRANSPORT).parse().unwrap());
    if role == "serve" {
        let config =
            ServerConfig { listen: address, lease: LEASE, ..server_config(directory.as_ref(), path) };
        let server = Server::open(&config).unwrap();
        println!("serving at {}", server.address());
        std::thread::park();
    } else {
        let client = connect(address, path);
        let found = client.lookup_path("file".as_ref()).unwrap();
        let access = match role.as_str() {
            "copy-unmapped" => READ_WRITE | OpenAccess::UNMAPPED,
            _ => READ_WRITE,
        };
        let file = client.open(found.id, access).unwrap();
        if role != "read" {
            file.lock(1, LockKind::Exclusive, Duration::ZERO).unwrap();
        }
        match role.as_str() {
            "lock" => {
                println!("locked");
                std::thread::park();
            }
            "copy" | "copy-unmapped" => {
                println!("copying");
                while file.write_at(0, &vec![b'c'; COPY_BYTES]).is_ok() {}
                println!("outcome failed");
                std::thread::park();
            }
            "hold" => {
                println!("locked");
                println!("outcome {}", hold(&file));
                std::thread::park();
            }
            _ => {
                println!("reading");
                read_for_ever(&file);
            }
        }
    }
}

/// Uses a file for seconds. Returns whether its lock was lost.
fn hold(file: &RemoteFile) -> &'static str {
    for _ in 0..1000 {
        match file.write_at(0, b"h") {
            Ok(()) => std::thread::sleep(Duration::from_millis(20)),
            Err(ExportError::LockLost) => return "lost",
            Err(_) => return "failed",
        }
    }
    "kept"
}

fn read_for_ever(file: &RemoteFile) {
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let mut bytes = vec![0; 1 << 20];
                loop {
                    file.read_at(0, &mut bytes).unwrap();
                }
            });
        }
    });
}

fn a_killed_server_is_replaced(path: PathChoice) {
    let directory = tempfile::tempdir().unwrap();
    std::fs::create_dir(directory.path().join("sub")).unwrap();
    std::fs::write(directory.path().join("sub/file"), "0123456789").unwrap();
    let (mut server, address) = serve(directory.path(), any(), path);
    let client = connect(address, path);
    let sub = client.lookup(client.root(), "sub".as_ref()).unwrap();
    let found = client.lookup(sub.id, "file".as_ref()).unwrap();
    let file = client.open(found.id, READ_WRITE).unwrap();
    file.write_at(0, b"a").unwrap();
    file.lock(1, LockKind::Exclusive, Duration::ZERO).unwrap();
    client.watch(sub.id).unwrap();
    for round in 0..3_u8 {
        server.signal(Signal::KILL);
        drop(server);
        (server, _) = serve(directory.path(), address, path);
        // Handles and open files are valid at the next server.
        file.write_at(1, &[b'a' + round]).unwrap();
        let mut text = [0; 10];
        assert_eq!(file.read_at(0, &mut text).unwrap(), 10);
        assert_eq!(text[..2], [b'a', b'a' + round]);
        assert_eq!(client.attributes(found.id).unwrap().len, 10);
        // The lock is held again.
        let other = connect(address, path);
        let same = other.lookup_path("sub/file".as_ref()).unwrap();
        let second = other.open(same.id, READ_WRITE).unwrap();
        assert_eq!(errno(second.lock(1, LockKind::Exclusive, Duration::ZERO)), WOULD_BLOCK);
    }
    // The watch is, too.
    std::fs::write(directory.path().join("sub/new"), "").unwrap();
    wait_until("the new name is announced", || {
        let change = client.next_change(Duration::from_secs(1));
        matches!(change, Some(Change::Changed { id, change }) if id == sub.id && change.contains(ChangeSet::ENTRIES))
    });
    // A file that was replaced meanwhile is another one.
    server.signal(Signal::KILL);
    drop(server);
    std::fs::rename(directory.path().join("sub/new"), directory.path().join("sub/file")).unwrap();
    let _server = serve(directory.path(), address, path);
    assert_eq!(errno(file.write_at(0, b"x")), Errno::STALE.raw_os_error());
    assert_eq!(std::fs::read(directory.path().join("sub/file")).unwrap(), b"");
}

#[test]
fn a_killed_server_is_replaced_by_packets() {
    a_killed_server_is_replaced(PathChoice::Udp);
}

#[test]
fn a_killed_server_is_replaced_within_the_host() {
    a_killed_server_is_replaced(PathChoice::Local);
}

fn locks_end_with_their_client(path: PathChoice) {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("file"), "0123456789").unwrap();
    let (_server, address) = serve(directory.path(), any(), path);
    let client = connect(address, path);
    let found = client.lookup_path("file".as_ref()).unwrap();
    let file = client.open(found.id, READ_WRITE).unwrap();
    for signal in [Signal::KILL, Signal::STOP] {
        let mut holder = start("lock", directory.path(), address, path);
        holder.expect("locked");
        assert_eq!(errno(file.lock(1, LockKind::Shared, Duration::ZERO)), WOULD_BLOCK);
        holder.signal(signal);
        let begun = Instant::now();
        file.lock(1, LockKind::Exclusive, Duration::from_secs(15)).unwrap();
        // A stopped client loses its lock with its lease.
        assert!(begun.elapsed() < LEASE + Duration::from_secs(8), "{:?}", begun.elapsed());
        file.lock(1, LockKind::Unlock, Duration::ZERO).unwrap();
    }
    // Local programs see locks, and the client sees theirs.
    let local = std::fs::File::open(directory.path().join("file")).unwrap();
    local.lock().unwrap();
    assert_eq!(errno(file.lock(1, LockKind::Exclusive, Duration::from_millis(30))), WOULD_BLOCK);
    local.unlock().unwrap();
    file.lock(1, LockKind::Exclusive, Duration::ZERO).unwrap();
    assert!(local.try_lock_shared().is_err());
    assert_eq!(errno(file.lock(2, LockKind::Exclusive, Duration::ZERO)), WOULD_BLOCK);
    file.lock(1, LockKind::Shared, Duration::ZERO).unwrap();
    file.lock(2, LockKind::Shared, Duration::ZERO).unwrap();
}

#[test]
fn locks_end_with_their_client_by_packets() {
    locks_end_with_their_client(PathChoice::Udp);
}

#[test]
fn locks_end_with_their_client_within_the_host() {
    locks_end_with_their_client(PathChoice::Local);
}

#[test]
fn the_lock_of_a_client_that_was_stopped_for_longer_than_its_lease_is_lost() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("file"), "0123456789").unwrap();
    let path = PathChoice::Udp;
    let (_server, address) = serve(directory.path(), any(), path);
    let client = connect(address, path);
    let found = client.lookup_path("file".as_ref()).unwrap();
    let file = client.open(found.id, READ_WRITE).unwrap();
    let mut holder = start("hold", directory.path(), address, path);
    holder.expect("locked");
    holder.signal(Signal::STOP);
    file.lock(1, LockKind::Exclusive, Duration::from_secs(15)).unwrap();
    file.write_at(0, b"changed").unwrap();
    file.lock(1, LockKind::Unlock, Duration::ZERO).unwrap();
    holder.signal(Signal::CONT);
    assert_eq!(holder.expect("outcome "), "lost");
}

/// Another client is stopped meanwhile, most likely in the middle of a copy from a mapping of the file.
#[test]
fn what_a_client_does_under_a_lock_does_not_take_effect_under_anothers() {
    let directory = tempfile::tempdir().unwrap();
    let name = directory.path().join("file");
    std::fs::write(&name, vec![0; COPY_BYTES]).unwrap();
    let path = PathChoice::Local;
    let (_server, address) = serve(directory.path(), any(), path);
    let client = connect(address, path);
    let found = client.lookup_path("file".as_ref()).unwrap();
    let file = client.open(found.id, READ_WRITE).unwrap();
    let mut reader = start("read", directory.path(), address, path);
    reader.expect("reading");
    for signal in [Signal::STOP, Signal::KILL] {
        let mut copier = start("copy-unmapped", directory.path(), address, path);
        copier.expect("copying");
        std::thread::sleep(Duration::from_millis(100));
        reader.signal(Signal::STOP);
        copier.signal(signal);
        // Less than the time after which the locks of mapped files are given away.
        file.lock(1, LockKind::Exclusive, LEASE + Duration::from_secs(3)).unwrap();
        file.write_at(0, &vec![b'l'; COPY_BYTES]).unwrap();
        if signal == Signal::STOP {
            copier.signal(Signal::CONT);
            assert_eq!(copier.expect("outcome "), "failed");
        }
        assert!(std::fs::read(&name).unwrap() == vec![b'l'; COPY_BYTES]);
        file.lock(1, LockKind::Unlock, Duration::ZERO).unwrap();
    }
}

#[test]
fn a_client_that_is_stopped_in_a_copy_does_not_keep_its_lock() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("file"), vec![0; COPY_BYTES]).unwrap();
    let path = PathChoice::Local;
    let (_server, address) = serve(directory.path(), any(), path);
    let client = connect(address, path);
    let found = client.lookup_path("file".as_ref()).unwrap();
    let file = client.open(found.id, READ_WRITE).unwrap();
    let mut copier = start("copy", directory.path(), address, path);
    copier.expect("copying");
    std::thread::sleep(Duration::from_millis(100));
    copier.signal(Signal::STOP);
    file.lock(1, LockKind::Exclusive, LEASE + Duration::from_secs(8)).unwrap();
}

#[test]
fn a_client_that_is_stopped_in_an_access_delays_no_other_client() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("file"), vec![1; 1 << 20]).unwrap();
    let (_server, address) = serve(directory.path(), any(), PathChoice::Local);
    let mut reader = start("read", directory.path(), address, PathChoice::Local);
    reader.expect("reading");
    std::thread::sleep(Duration::from_millis(100));
    reader.signal(Signal::STOP);
    // Its lease ends, and the server tries to revoke its key from then on.
    let end = Instant::now() + LEASE + Duration::from_secs(3);
    let mut closes = Vec::new();
    while Instant::now() < end {
        let begun = Instant::now();
        let client = connect(address, PathChoice::Local);
        let found = client.lookup_path("file".as_ref()).unwrap();
        let file = client.open(found.id, READ_WRITE).unwrap();
        let opened = Instant::now();
        file.close().unwrap();
        closes.push(opened.elapsed());
        assert!(begun.elapsed() < Duration::from_secs(4), "{:?}", begun.elapsed());
        std::thread::sleep(Duration::from_millis(100));
    }
    // Half of the time for which a close waits for an access by its key.
    closes.sort();
    assert!(closes[closes.len() / 2] < Duration::from_millis(250), "{closes:?}");
}

fn a_stopped_server_delays_no_call_for_ever(path: PathChoice) {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("file"), "0123456789").unwrap();
    let (server, address) = serve(directory.path(), any(), path);
    let config = terrace_export::ClientConfig {
        port: crate::support::port(path),
        timeout: Duration::from_secs(3),
        ..terrace_export::ClientConfig::new(address)
    };
    let client = terrace_export::Client::connect(&config).unwrap();
    let found = client.lookup_path("file".as_ref()).unwrap();
    let file = client.open(found.id, READ_WRITE).unwrap();
    server.signal(Signal::STOP);
    let begun = Instant::now();
    let asked = client.attributes(found.id);
    assert!(matches!(asked, Err(ExportError::Lost)), "{asked:?}");
    assert!(matches!(file.append(b"x"), Err(ExportError::Lost | ExportError::Unanswered)));
    assert!(begun.elapsed() < Duration::from_secs(15), "{:?}", begun.elapsed());
    server.signal(Signal::CONT);
    wait_until("the client is connected again", || client.attributes(found.id).is_ok());
    assert_eq!(file.read_at(0, &mut [0; 10]).unwrap(), 10);
}

#[test]
fn a_stopped_server_delays_no_call_for_ever_by_packets() {
    a_stopped_server_delays_no_call_for_ever(PathChoice::Udp);
}

#[test]
fn a_stopped_server_delays_no_call_for_ever_within_the_host() {
    a_stopped_server_delays_no_call_for_ever(PathChoice::Local);
}

#[test]
fn a_lock_that_another_client_has_taken_is_lost() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("file"), "0123456789").unwrap();
    let (server, address) = serve(directory.path(), any(), PathChoice::Udp);
    let client = connect(address, PathChoice::Udp);
    let found = client.lookup_path("file".as_ref()).unwrap();
    let file = client.open(found.id, READ_WRITE).unwrap();
    file.lock(1, LockKind::Exclusive, Duration::ZERO).unwrap();
    server.signal(Signal::KILL);
    drop(server);
    let local = std::fs::File::open(directory.path().join("file")).unwrap();
    local.lock().unwrap();
    let _server = serve(directory.path(), address, PathChoice::Udp);
    assert!(matches!(file.write_at(0, b"x"), Err(ExportError::LockLost)));
    // Another owner's lock is refused meanwhile, and the server does not keep it.
    local.unlock().unwrap();
    assert!(matches!(file.lock(2, LockKind::Shared, Duration::ZERO), Err(ExportError::LockLost)));
    local.try_lock().unwrap();
    assert!(matches!(file.lock(1, LockKind::Unlock, Duration::ZERO), Err(ExportError::LockLost)));
    file.write_at(0, b"x").unwrap();
    let reader = client.open(found.id, OpenAccess::READ).unwrap();
    assert_eq!(reader.read_at(0, &mut [0; 1]).unwrap(), 1);
}
