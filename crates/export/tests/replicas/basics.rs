//! What a replicated file has is what its members have.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Instant;

use terrace_export::{ReplicaConfig, ReplicaError, ReplicatedFile, Server, ServerConfig};
use terrace_nic::PathChoice;

use crate::hosts::{NAME, config, less_than_timeouts};
use crate::support::{serve, server_config};

/// Exports of this process.
pub struct Exports {
    pub directories: Vec<tempfile::TempDir>,
    servers: Vec<Option<Server>>,
    pub addresses: Vec<SocketAddr>,
    path: PathChoice,
}

impl Exports {
    pub fn new(count: usize, path: PathChoice) -> Exports {
        let directories: Vec<_> = (0..count).map(|_| tempfile::tempdir().unwrap()).collect();
        let servers: Vec<_> =
            directories.iter().map(|directory| serve(directory.path(), path, "root = true")).collect();
        let addresses = servers.iter().map(Server::address).collect();
        Exports { directories, servers: servers.into_iter().map(Some).collect(), addresses, path }
    }

    pub fn config(&self) -> ReplicaConfig {
        config(&self.addresses, self.path)
    }

    pub fn part(&self, indexes: &[usize]) -> ReplicaConfig {
        let addresses: Vec<_> = indexes.iter().map(|&index| self.addresses[index]).collect();
        config(&addresses, self.path)
    }

    pub fn end(&mut self, index: usize) {
        self.servers[index] = None;
    }

    /// Starts an export again.
    pub fn begin(&mut self, index: usize) {
        let config = ServerConfig {
            listen: self.addresses[index],
            rules: "root = true".parse().unwrap(),
            ..server_config(self.directory(index), self.path)
        };
        self.servers[index] = Some(Server::open(&config).unwrap());
    }

    pub fn directory(&self, index: usize) -> &Path {
        self.directories[index].path()
    }

    pub fn bytes(&self, index: usize) -> Vec<u8> {
        std::fs::read(self.directory(index).join(NAME)).unwrap()
    }
}

pub fn read_all(file: &mut ReplicatedFile) -> Vec<u8> {
    let mut bytes = vec![0; file.len() as usize];
    assert_eq!(file.read_at(0, &mut bytes).unwrap(), bytes.len());
    bytes
}

fn what_is_written_is_on_all_members(path: PathChoice) {
    let exports = Exports::new(3, path);
    let mut file = ReplicatedFile::create(&exports.config(), 0o640).unwrap();
    assert_eq!(file.status().members.len(), 3, "{:?}", file.status());
    // Beyond the end, within the file, longer than all slots of a connection.
    let mut expected = vec![0; 10];
    file.write_at(10, b"later").unwrap();
    expected.extend(b"later");
    file.write_at(3, b"earlier").unwrap();
    expected[3..10].copy_from_slice(b"earlier");
    let long: Vec<u8> = (0..12 << 20).map(|at: u32| (at * 7 + at / 256) as u8).collect();
    file.write_at(15, &long).unwrap();
    expected.extend(&long);
    for len in [1, 300, 200_000, 1 << 20] {
        assert_eq!(file.append(&long[..len]).unwrap(), expected.len() as u64);
        expected.extend(&long[..len]);
    }
    file.truncate(9 << 20).unwrap();
    expected.truncate(9 << 20);
    file.punch(1 << 20, 1 << 20).unwrap();
    expected[1 << 20..2 << 20].fill(0);
    file.append_commit(b"end").unwrap();
    expected.extend(b"end");
    assert!(read_all(&mut file) == expected);
    assert_eq!(file.read_at(expected.len() as u64 - 2, &mut [0; 9]).unwrap(), 2);
    assert_eq!(file.read_at(1 << 40, &mut [0; 9]).unwrap(), 0);
    for index in 0..3 {
        assert!(exports.bytes(index) == expected, "export {index}");
    }
    // A reader finds it while it is open, and what is added.
    let mut reader = ReplicatedFile::open_read(&exports.config(), false).unwrap();
    file.append(b"!").unwrap();
    let mut tail = [0; 4];
    assert_eq!(reader.read_at(expected.len() as u64 - 3, &mut tail).unwrap(), 4);
    assert_eq!(&tail, b"end!");
    let epoch = file.status().epoch;
    file.close().unwrap();
    reader.refresh().unwrap();
    assert_eq!(reader.epoch(), epoch + 1);
    let mut file = ReplicatedFile::open(&exports.config()).unwrap();
    assert_eq!((file.status().epoch, file.len()), (epoch + 2, expected.len() as u64 + 1));
    file.write_at(0, b"again").unwrap();
}

#[test]
fn what_is_written_is_on_all_members_by_packets() {
    what_is_written_is_on_all_members(PathChoice::Udp);
}

#[test]
fn what_is_written_is_on_all_members_within_the_host() {
    what_is_written_is_on_all_members(PathChoice::Local);
}

#[test]
fn one_export_is_a_replica_set_too() {
    let exports = Exports::new(1, PathChoice::Local);
    let mut file = ReplicatedFile::create(&exports.config(), 0o600).unwrap();
    file.append_commit(b"alone").unwrap();
    // Not closed.
    drop(file);
    let mut file = ReplicatedFile::open(&exports.config()).unwrap();
    assert_eq!(read_all(&mut file), b"alone");
}

#[test]
fn a_reader_is_refused_while_a_member_may_know_more() {
    let mut exports = Exports::new(3, PathChoice::Local);
    let mut file = ReplicatedFile::create(&exports.config(), 0o644).unwrap();
    file.append_commit(b"all").unwrap();
    let mut reader = ReplicatedFile::open_read(&exports.config(), false).unwrap();
    exports.end(1);
    // The writer has not noticed, and the member could be the only one left.
    let refused = ReplicatedFile::open_read(&exports.config(), false).map(|_| ());
    let Err(ReplicaError::MemberMissing { address, .. }) = refused else { panic!("{refused:?}") };
    assert_eq!(address, exports.addresses[1]);
    let mut stale = ReplicatedFile::open_read(&exports.config(), true).unwrap();
    assert_eq!(stale.read_at(0, &mut [0; 9]).unwrap(), 3);
    file.append_commit(b"two").unwrap();
    assert_eq!(file.status().members.len(), 2);
    let mut fresh = ReplicatedFile::open_read(&exports.config(), false).unwrap();
    assert_eq!(fresh.epoch(), file.status().epoch);
    // One that was opened before goes on with the members that are left.
    let mut bytes = [0; 9];
    for reader in [&mut reader, &mut stale, &mut fresh] {
        let begun = Instant::now();
        assert_eq!(reader.read_at(0, &mut bytes).unwrap(), 6);
        assert_eq!(&bytes[..6], b"alltwo");
        assert!(begun.elapsed() < less_than_timeouts(1));
    }
}

#[test]
fn a_reader_finds_a_shorter_file() {
    let exports = Exports::new(2, PathChoice::Udp);
    let mut file = ReplicatedFile::create(&exports.config(), 0o644).unwrap();
    file.append_commit(&[1; 300_000]).unwrap();
    let mut reader = ReplicatedFile::open_read(&exports.config(), false).unwrap();
    let mut bytes = vec![0; 300_000];
    assert_eq!(reader.read_at(0, &mut bytes).unwrap(), 300_000);
    file.truncate(1000).unwrap();
    assert_eq!(reader.read_at(0, &mut bytes).unwrap(), 1000);
    assert_eq!(reader.read_at(200_000, &mut bytes[..10]).unwrap(), 0);
}

#[test]
fn a_reader_is_opened_while_records_are_replaced() {
    let exports = Exports::new(2, PathChoice::Local);
    let config = exports.config();
    ReplicatedFile::create(&config, 0o644).unwrap().close().unwrap();
    let has_ended = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !has_ended.load(Ordering::Relaxed) {
                ReplicatedFile::open(&config).unwrap().close().unwrap();
            }
        });
        let opened: Vec<_> = (0..60).map(|_| ReplicatedFile::open_read(&config, false).map(|_| ())).collect();
        has_ended.store(true, Ordering::Relaxed);
        assert!(opened.iter().all(Result::is_ok), "{opened:?}");
    });
}

#[test]
fn what_cannot_be_is_refused() {
    let exports = Exports::new(2, PathChoice::Local);
    let invalid = |config: &ReplicaConfig| {
        matches!(ReplicatedFile::open(config).map(|_| ()), Err(ReplicaError::Invalid(_)))
    };
    let all = exports.config();
    let with = |path: &str| ReplicaConfig { path: path.into(), ..all.clone() };
    assert!(invalid(&ReplicaConfig { exports: Vec::new(), ..all.clone() }));
    assert!(invalid(&exports.part(&[0, 1, 0])));
    assert!(invalid(&with("")) && invalid(&with("..")) && invalid(&with(&"n".repeat(235))));
    let found = ReplicatedFile::found(&all).map(|_| ());
    assert!(matches!(found, Err(ReplicaError::Invalid(_))));
    assert!(matches!(ReplicatedFile::open(&all).map(|_| ()), Err(ReplicaError::NotFound(_))));
    let longest = with(&"n".repeat(234));
    let mut file = ReplicatedFile::create(&longest, 0o644).unwrap();
    assert!(matches!(file.append(&vec![0; (1 << 20) + 1]), Err(ReplicaError::Invalid(_))));
    assert!(matches!(file.write_at(u64::MAX, b"xx"), Err(ReplicaError::Invalid(_))));
    file.append_commit(b"x").unwrap();
    file.close().unwrap();
    let again = ReplicatedFile::create(&longest, 0o644).map(|_| ());
    assert!(matches!(again, Err(ReplicaError::Exists(_))), "{again:?}");
    // In a directory.
    for index in 0..2 {
        std::fs::create_dir(exports.directory(index).join("sub")).unwrap();
    }
    let mut file = ReplicatedFile::create(&with("sub/file"), 0o644).unwrap();
    file.append_commit(b"deeper").unwrap();
    assert_eq!(std::fs::read(exports.directory(1).join("sub/file")).unwrap(), b"deeper");
}
