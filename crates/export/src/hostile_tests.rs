//! Clients that do not keep to the protocol, and keys that a client was not given.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use terrace_nic::{PathChoice, PortConfig, SendOp, WcStatus};

use crate::client::{Client, ClientConfig, check_page};
use crate::ends::gid_of;
use crate::error::ExportError;
use crate::proto::{
    Answer, Body, Link, Message, OpenAccess, QueuePairs, Request, SetupAnswer, SetupRequest, Text, setup,
};
use crate::rules::Rules;
use crate::server::{Server, ServerConfig};

const PATHS: [PathChoice; 2] = [PathChoice::Udp, PathChoice::Local];

fn port(path: PathChoice) -> PortConfig {
    PortConfig { address: Some(Ipv4Addr::LOCALHOST.into()), path, ..PortConfig::default() }
}

fn serve(directory: &std::path::Path, path: PathChoice) -> Server {
    let listen: SocketAddr = (Ipv4Addr::LOCALHOST, 0).into();
    let config = ServerConfig { port: port(path), ..ServerConfig::new(directory.into(), listen) };
    Server::open(&config).unwrap()
}

fn connect(server: &Server, path: PathChoice) -> Client {
    let timeout = Duration::from_secs(10);
    Client::connect(&ClientConfig { port: port(path), timeout, ..ClientConfig::new(server.address()) })
        .unwrap()
}

/// READs a byte by a key, and returns the status.
fn read_by(client: &Client, rkey: u32, va: u64) -> WcStatus {
    let deadline = Instant::now() + Duration::from_secs(10);
    let session = client.shared.session(deadline).unwrap();
    let (_, generation) = session.pair(Link::Data).unwrap();
    let slot = session.buffers.take(deadline).unwrap();
    let number = session.begin(Link::Data, SendOp::Read { va, rkey }, &[slot.sge(1)]).unwrap();
    let status = session.finish(number, deadline).unwrap();
    if status != WcStatus::Success {
        session.repair(Link::Data, generation, deadline).unwrap();
    }
    status
}

#[test]
fn guessed_and_stolen_keys_are_refused() {
    for path in PATHS {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("file"), "secret").unwrap();
        let server = serve(directory.path(), path);
        let (one, two) = (connect(&server, path), connect(&server, path));
        let id = one.lookup(one.root(), "file".as_ref()).unwrap().id;
        let file = one.open(id, OpenAccess::READ).unwrap();
        let rkey = file.file.current(Instant::now() + Duration::from_secs(10)).unwrap().rkey;
        assert_eq!(read_by(&one, rkey, 0), WcStatus::Success);
        assert_eq!(read_by(&one, rkey, 6), WcStatus::RemoteAccess, "beyond the end");
        assert_eq!(read_by(&two, rkey, 0), WcStatus::RemoteAccess, "the key of another client");
        for _ in 0..20 {
            let guessed: u32 = rand::random();
            assert_eq!(read_by(&two, guessed, 0), WcStatus::RemoteAccess);
        }
        file.close().unwrap();
        assert_eq!(read_by(&one, rkey, 0), WcStatus::RemoteAccess, "a closed file");
    }
}

/// Whether the server ends the client's connection after these bytes.
fn ends_after(server: &Server, messages: &[Vec<u8>]) -> bool {
    let client = connect(server, PathChoice::Udp);
    let deadline = Instant::now() + Duration::from_secs(10);
    let session = client.shared.session(deadline).unwrap();
    session.send_raw(messages.to_vec());
    session.wait_events(Duration::from_secs(2));
    session.is_lost()
}

#[test]
fn names_that_leave_their_directory_are_not_listed() {
    use crate::proto::{DirectoryEntry, DirectoryPage};
    let page = |name: &[u8], next| {
        let entry =
            DirectoryEntry { name: Text::from(name), cookie: 1, ino: 1, kind: None, attributes: None };
        DirectoryPage { entries: vec![entry], next }
    };
    for name in [&b""[..], b".", b"..", b"/etc/passwd", b"../../.ssh/authorized_keys", b"a/b", b"a\0b"] {
        let checked = check_page(&page(name, None), 0);
        assert!(matches!(checked, Err(ExportError::Protocol)), "{name:?}");
    }
    for name in [&b"a"[..], b"...", b".hidden", b"..x", b"a\n", b"\xff"] {
        assert!(check_page(&page(name, Some(1)), 2).is_ok(), "{name:?}");
    }
    assert!(check_page(&DirectoryPage { entries: Vec::new(), next: None }, 0).is_ok());
    let endless = DirectoryPage { entries: Vec::new(), next: Some(1) };
    assert!(matches!(check_page(&endless, 0), Err(ExportError::Protocol)));
    assert!(matches!(check_page(&page(b"a", Some(1)), 1), Err(ExportError::Protocol)), "the same part again");
}

#[test]
fn hostile_messages_end_their_own_connection_only() {
    let directory = tempfile::tempdir().unwrap();
    let server = serve(directory.path(), PathChoice::Udp);
    let bystander = connect(&server, PathChoice::Udp);
    let request = |request| Message { id: 1, body: Body::Request(request) }.encode().unwrap();
    let valid = request(Request::Renew {});
    assert!(!ends_after(&server, std::slice::from_ref(&valid)));
    let mut newer = valid.clone();
    newer[0] += 1;
    let mut unknown = valid.clone();
    unknown[1] = 0x7f;
    let answer = Message { id: 1, body: Body::Answer(Answer::Done {}) }.encode().unwrap();
    let random: Vec<u8> = (0..100).map(|_| rand::random()).collect();
    for hostile in [Vec::new(), vec![0], newer, unknown, answer, random, vec![0xff; 16 << 10]] {
        assert!(ends_after(&server, std::slice::from_ref(&hostile)), "{hostile:x?}");
    }
    // More requests than were agreed to, of a kind that takes time.
    let listing = request(Request::ReadDirectory { id: bystander.root(), cookie: 0, attributes: true });
    assert!(ends_after(&server, &vec![listing; 800]));
    assert!(bystander.attributes(bystander.root()).is_ok());
    // Values that make no sense are refused, and end nothing.
    let root = bystander.root();
    let huge = crate::proto::SetAttributes { len: Some(u64::MAX), ..Default::default() };
    assert!(bystander.set_attributes(root, &huge).is_err());
    assert!(bystander.read_directory(root, u64::MAX, true).is_err());
    assert!(bystander.check_access(root, 0xff).is_err());
    let unknown = crate::proto::FileId { dev: 1, ino: 1, generation: 1 };
    assert_eq!(bystander.attributes(unknown).unwrap_err().errno(), 116);
}

#[test]
fn hostile_setups_end_their_own_socket_only() {
    let directory = tempfile::tempdir().unwrap();
    let rules: Rules = "[[remote]]\nfrom = \"127.0.0.1\"\nuser = \"root\"\n".parse().unwrap();
    let listen: SocketAddr = (Ipv4Addr::LOCALHOST, 0).into();
    let config = ServerConfig {
        port: port(PathChoice::Udp),
        rules,
        ..ServerConfig::new(directory.path().into(), listen)
    };
    let server = Server::open(&config).unwrap();
    for hostile in
        [&b"GET / HTTP/1.1\r\n\r\nxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"[..], &[0xff; 4000], &[0; 300]]
    {
        let mut stream = TcpStream::connect(server.address()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        stream.write_all(hostile).unwrap();
        // The end, or a reset.
        assert!(!matches!(stream.read(&mut [0; 16]), Ok(1..)));
    }
    // A rule for other hosts is not for users of this one.
    let endpoint = terrace_node::Endpoint { qpn: 1, psn: 0, mtu_bytes: 4096 };
    let gid = gid_of(Ipv4Addr::LOCALHOST.into());
    let ends = QueuePairs { gid, control: endpoint, data: endpoint, append: endpoint };
    let mut stream = TcpStream::connect(server.address()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    stream.write_all(&setup::encode(&SetupRequest { ends, client: 0 })).unwrap();
    let answer: SetupAnswer = setup::receive(&mut stream).unwrap();
    assert_eq!(answer.errno, 13);
}

#[test]
fn sockets_without_a_setup_keep_no_other_peer_out() {
    let directory = tempfile::tempdir().unwrap();
    let server = serve(directory.path(), PathChoice::Udp);
    let idle: Vec<_> = (0..200).map(|_| TcpStream::connect(server.address()).unwrap()).collect();
    std::thread::sleep(Duration::from_millis(600));
    // By the Unix socket, and before the server ends the idle ones.
    let timeout = Duration::from_secs(2);
    let config = ClientConfig { port: port(PathChoice::Udp), timeout, ..ClientConfig::new(server.address()) };
    let client = Client::connect(&config).unwrap();
    assert!(client.attributes(client.root()).is_ok());
    drop(idle);
    std::thread::sleep(Duration::from_millis(600));
    let client = connect(&server, PathChoice::Udp);
    assert!(client.attributes(client.root()).is_ok());
}
