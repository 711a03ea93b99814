//! Connections that are lost in the middle of a call.

use std::io::Write;
use std::net::Ipv4Addr;
use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use terrace_nic::{PathChoice, PortConfig};

use super::data::{self, Bytes, Failure};
use super::shared::Repeat;
use super::{Client, ClientConfig, RECORD_BYTES_MAX, RemoteFile};
use crate::error::ExportError;
use crate::proto::setup;
use crate::proto::{Answer, Link, LockKind, OpenAccess, Request, SetupAnswer, SetupRequest, Text};
use crate::server::{Server, ServerConfig, local_name};

const PATHS: [PathChoice; 2] = [PathChoice::Udp, PathChoice::Local];

fn port(path: PathChoice) -> PortConfig {
    PortConfig { address: Some(Ipv4Addr::LOCALHOST.into()), path, ..PortConfig::default() }
}

/// A client of a server.
pub(crate) fn connect(server: &Server, path: PathChoice) -> Client {
    Client::connect(&ClientConfig { port: port(path), ..ClientConfig::new(server.address()) }).unwrap()
}

/// A server of a directory, a client, and an empty file that it has open.
pub(crate) fn start(path: PathChoice) -> (tempfile::TempDir, Server, Client, RemoteFile) {
    let directory = tempfile::tempdir().unwrap();
    let port = port(path);
    let config = ServerConfig::new(directory.path().into(), (Ipv4Addr::LOCALHOST, 0).into());
    let server = Server::open(&ServerConfig { port, ..config }).unwrap();
    let client = connect(&server, path);
    let access = OpenAccess::READ | OpenAccess::WRITE;
    let file = client.create(client.root(), "file".as_ref(), 0o644, access, true).unwrap();
    (directory, server, client, file)
}

/// The same with a file of 4 KiB.
fn start_with_page(path: PathChoice) -> (tempfile::TempDir, Server, Client, RemoteFile) {
    let started = start(path);
    started.3.write_at(0, &[1; 4096]).unwrap();
    started
}

#[test]
fn an_access_of_a_session_that_another_thread_has_ended_is_lost() {
    for path in PATHS {
        let (_directory, _server, client, file) = start_with_page(path);
        let deadline = client.shared.deadline();
        let opening = file.file.current(deadline).unwrap();
        let (qp, _) = opening.session.pair(Link::Data).unwrap();
        opening.session.lose("a test ends it");
        // Unless the client's own thread has done so already.
        let _ = qp.destroy();
        let written = data::access(&opening, 0, Bytes::From(b"x"), deadline);
        assert!(matches!(written, Err(Failure::Error(ExportError::Lost))));
        assert!(matches!(data::commit(&opening, deadline), Err(Failure::Error(ExportError::Lost))));
        // The next call connects again.
        file.write_at(0, b"x").unwrap();
        file.commit().unwrap();
    }
}

/// The answers to requests may be lost, with the server, too.
#[test]
fn a_request_that_has_made_a_file_gets_it_again_and_no_other_one_does() {
    let directory = tempfile::tempdir().unwrap();
    let mut config = ServerConfig::new(directory.path().into(), (Ipv4Addr::LOCALHOST, 0).into());
    config.port = port(PathChoice::Udp);
    let server = Server::open(&config).unwrap();
    config.listen = server.address();
    let (one, other) = (connect(&server, PathChoice::Udp), connect(&server, PathChoice::Udp));
    let create = |client: &Client, number| {
        let (parent, name, access) =
            (client.root(), Text::from("new".as_bytes()), OpenAccess::READ | OpenAccess::WRITE);
        let request = Request::Create { parent, name, mode: 0o444, access, exclusive: Some(number) };
        match client.shared.call(request, Repeat::Yes) {
            Ok(Answer::Opened { opened, .. }) => Ok(opened.attributes.id),
            Err(ExportError::Os(errno)) => Err(errno),
            answer => panic!("{answer:?}"),
        }
    };
    let exists = Err(Errno::EXIST.raw_os_error());
    let made = create(&one, 7).unwrap();
    let check = |when: &str| {
        assert_eq!(create(&one, 7), Ok(made), "{when}");
        assert_eq!((create(&one, 8), create(&other, 7)), (exists, exists));
    };
    check("at once");
    drop(server);
    let _server = Server::open(&config).unwrap();
    check("after a restart");
    std::fs::rename(directory.path().join("new"), directory.path().join("old")).unwrap();
    std::fs::write(directory.path().join("new"), "").unwrap();
    assert_eq!(create(&one, 7), exists, "it is another file");
}

#[test]
fn a_file_that_is_not_mapped_is_accessed_through_the_server_only() {
    let (_directory, _server, client, mapped) = start_with_page(PathChoice::Local);
    let access = OpenAccess::READ | OpenAccess::WRITE | OpenAccess::UNMAPPED;
    let unmapped = client.open(mapped.id(), access).unwrap();
    for (file, is_mapped) in [(mapped, true), (unmapped, false)] {
        file.write_at(0, b"x").unwrap();
        let opening = file.file.current(client.shared.deadline()).unwrap();
        let (qp, _) = opening.session.pair(Link::Data).unwrap();
        // Packets carry accesses until the client has been told how the region is reached.
        let limit =
            Instant::now() + if is_mapped { Duration::from_secs(20) } else { Duration::from_millis(50) };
        while qp.write_now(opening.rkey, 0, b"y") == Ok(false) && Instant::now() < limit {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(qp.write_now(opening.rkey, 0, b"y"), Ok(is_mapped));
        assert_eq!(qp.read_now(opening.rkey, 0, &mut [0]), Ok(is_mapped));
        file.append(b"z").unwrap();
        file.read_at(0, &mut [0; 8]).unwrap();
        file.commit().unwrap();
    }
}

#[test]
fn memory_that_the_nic_may_still_access_is_not_used_again() {
    let (_directory, server, client, file) = start_with_page(PathChoice::Udp);
    let opening = file.file.current(client.shared.deadline()).unwrap();
    let buffers = &opening.session.buffers;
    let free = buffers.free_slots();
    // From now on nobody answers, and the NIC repeats what it has sent.
    server.device().close();
    let soon = || Instant::now() + Duration::from_millis(100);
    let written = data::access(&opening, 0, Bytes::From(&[2; 100]), soon());
    assert!(matches!(written, Err(Failure::Error(ExportError::Lost))));
    assert_eq!(buffers.free_slots(), free - 1);
    let record = vec![3; 300 << 10];
    let appended = data::append(&opening, &record, false, soon());
    // Lost if the client has noticed meanwhile that nobody answers.
    assert!(matches!(appended, Err(Failure::Error(ExportError::Unanswered | ExportError::Lost))));
    let appended = data::append(&opening, &record, false, soon());
    assert!(matches!(appended, Err(Failure::Error(ExportError::Lost))));
}

#[test]
fn a_call_that_waits_for_memory_connects_again_when_the_connection_is_lost() {
    let (_directory, _server, client, file) = start_with_page(PathChoice::Udp);
    let session = client.shared.session(client.shared.deadline()).unwrap();
    let mut slots: Vec<_> = std::iter::from_fn(|| session.buffers.try_take()).collect();
    let long = session.buffers.take_record(RECORD_BYTES_MAX, Instant::now()).unwrap();
    std::thread::scope(|scope| {
        let written = scope.spawn(|| file.write_at(0, b"x"));
        let appended = scope.spawn(|| file.append(&vec![1; RECORD_BYTES_MAX]));
        std::thread::sleep(Duration::from_millis(100));
        // What is in flight does not come back.
        slots.iter_mut().for_each(|slot| slot.set_in_flight(true));
        session.lose("a test ends it");
        written.join().unwrap().unwrap();
        appended.join().unwrap().unwrap();
    });
    drop((slots, long));
}

/// A server of `/proc`, a client, and a regular file there that cannot be made persistent.
fn start_with_failing_file() -> (Server, Client, RemoteFile) {
    let config = ServerConfig::new("/proc".into(), (Ipv4Addr::LOCALHOST, 0).into());
    let server = Server::open(&ServerConfig { port: port(PathChoice::Udp), ..config }).unwrap();
    let client = connect(&server, PathChoice::Udp);
    let id = client.lookup_path("version".as_ref()).unwrap().id;
    let file = client.open(id, OpenAccess::READ).unwrap();
    (server, client, file)
}

#[test]
fn a_failed_write_back_fails_every_later_sync_and_commit() {
    let is_error = |result: Result<(), ExportError>, expected: Errno| matches!(result, Err(ExportError::Os(errno)) if errno == expected.raw_os_error());
    let (server, client, file) = start_with_failing_file();
    let id = file.id();
    file.close().unwrap();
    assert!(is_error(client.sync(id), Errno::INVAL));
    // The server has not forgotten it, though nobody has the file open.
    assert!(is_error(client.sync(id), Errno::IO));
    drop(server);
    let (_server, client, file) = start_with_failing_file();
    let error = file.commit().unwrap_err();
    assert_eq!(error.errno(), Errno::IO.raw_os_error(), "{error}");
    assert!(is_error(client.sync(id), Errno::IO));
}

#[test]
fn a_lock_outlives_a_connection_that_the_client_has_ended() {
    let (_directory, _server, client, file) = start_with_page(PathChoice::Local);
    file.lock(1, LockKind::Exclusive, Duration::ZERO).unwrap();
    for _ in 0..20 {
        client.shared.session(client.shared.deadline()).unwrap().lose("a test ends it");
        file.write_at(0, b"x").unwrap();
    }
    file.lock(1, LockKind::Unlock, Duration::ZERO).unwrap();
}

#[test]
fn the_protection_domain_of_a_session_ends_with_it() {
    let (_directory, _server, client, file) = start_with_page(PathChoice::Local);
    let session = client.shared.session(client.shared.deadline()).unwrap();
    let (domain, pd) = (std::sync::Arc::downgrade(session.domain()), session.domain().pd.clone());
    session.lose("a test ends it");
    drop(session);
    let deadline = Instant::now() + Duration::from_secs(20);
    // The open file has an opening on it.
    drop(file);
    client.attributes(client.root()).unwrap();
    while domain.strong_count() > 0 {
        assert!(Instant::now() < deadline);
        std::thread::sleep(Duration::from_millis(5));
    }
    // The last reference is gone a moment before its value.
    std::thread::sleep(Duration::from_millis(100));
    assert!(matches!(pd.dealloc(), Err(terrace_nic::Error::Invalid(_))), "it was deallocated before");
}

#[test]
fn a_lock_is_lost_if_nobody_knows_whether_it_was_converted() {
    let (_directory, server, one, file) = start_with_page(PathChoice::Udp);
    let config = ClientConfig { timeout: Duration::from_secs(1), ..one.shared.config.clone() };
    file.close().unwrap();
    let client = Client::connect(&config).unwrap();
    let id = client.lookup(client.root(), "file".as_ref()).unwrap().id;
    let file = client.open(id, OpenAccess::READ | OpenAccess::WRITE).unwrap();
    file.lock(1, LockKind::Exclusive, Duration::ZERO).unwrap();
    // From now on nobody answers.
    server.device().close();
    assert!(matches!(file.lock(1, LockKind::Shared, Duration::ZERO), Err(ExportError::LockLost)));
    assert!(client.shared.has_lost_lock(id));
}

#[test]
fn a_server_that_has_no_room_for_the_client_in_that_moment_is_tried_again() {
    let (directory, server, client, file) = start_with_page(PathChoice::Udp);
    let listen = server.address();
    drop(server);
    let crowded = UnixListener::bind_addr(&local_name(listen).unwrap()).unwrap();
    std::thread::scope(|scope| {
        let written = scope.spawn(|| file.write_at(0, b"x"));
        // One attempt may be that of the thread that keeps the lease.
        for _ in 0..3 {
            let (mut stream, _) = crowded.accept().unwrap();
            let request: SetupRequest = setup::receive(&mut stream).unwrap();
            let refusal = SetupAnswer {
                errno: Errno::USERS.raw_os_error() as u16,
                ends: request.ends,
                requests_max: 0,
                lease_ms: 0,
                root: client.root(),
                is_read_only: false,
                boot: 0,
                instance: 0,
            };
            stream.write_all(&setup::encode(&refusal)).unwrap();
        }
        drop(crowded);
        let config = ServerConfig::new(directory.path().into(), listen);
        let _server = Server::open(&ServerConfig { port: port(PathChoice::Udp), ..config }).unwrap();
        assert!(written.join().unwrap().is_ok());
    });
}
