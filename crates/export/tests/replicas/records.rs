//! Records that are damaged, foreign or missing; members that are lost for good; full disks.

use std::fs;
use std::path::Path;
use std::time::Duration;

use terrace_export::{ReplicaAppended, ReplicaError, ReplicatedFile, Server};
use terrace_nic::PathChoice;

use crate::basics::{Exports, read_all};
use crate::hosts::{NAME, RECORD, config};
use crate::support::serve;

/// Exports with a closed file.
fn with_file(count: usize, bytes: &[u8]) -> Exports {
    let exports = Exports::new(count, PathChoice::Local);
    let mut file = ReplicatedFile::create(&exports.config(), 0o644).unwrap();
    file.append(bytes).unwrap();
    file.close().unwrap();
    exports
}

fn open_error(exports: &Exports) -> ReplicaError {
    match ReplicatedFile::open(&exports.config()) {
        Ok(file) => panic!("it is open: {:?}", file.status()),
        Err(error) => error,
    }
}

#[test]
fn a_damaged_record_is_an_error_that_changes_nothing() {
    let exports = with_file(3, b"bytes");
    let record = exports.directory(1).join(RECORD);
    let good = fs::read(&record).unwrap();
    let wrong = |places: &[usize]| {
        let mut wrong = good.clone();
        places.iter().for_each(|&place| wrong[place] ^= 1);
        wrong
    };
    // One of the two blocks is enough.
    for place in [20, 4096 + 20] {
        fs::write(&record, wrong(&[place])).unwrap();
        ReplicatedFile::open(&exports.config()).unwrap().close().unwrap();
    }
    let good = fs::read(&record).unwrap();
    let wrong = wrong(&[20, 4096 + 20]);
    let damaged = [Vec::new(), good[..good.len() - 1].to_vec(), wrong, b"text".to_vec(), vec![0; 1 << 20]];
    for bytes in damaged {
        fs::write(&record, &bytes).unwrap();
        let error = open_error(&exports);
        assert!(
            matches!(error, ReplicaError::Damaged { address, .. } if address == exports.addresses[1]),
            "{error}"
        );
        let read = ReplicatedFile::open_read(&exports.config(), false).map(|_| ());
        assert!(matches!(read, Err(ReplicaError::Damaged { .. })), "{read:?}");
        assert_eq!(fs::read(&record).unwrap(), bytes);
        assert!((0..3).all(|index| exports.bytes(index) == b"bytes"));
    }
    fs::write(&record, &good).unwrap();
    let mut file = ReplicatedFile::open(&exports.config()).unwrap();
    assert_eq!(read_all(&mut file), b"bytes");
}

#[test]
fn files_that_are_no_copies_are_not_touched() {
    let exports = with_file(3, b"bytes");
    let others = with_file(1, b"foreign");
    let (file, record) = (exports.directory(2).join(NAME), exports.directory(2).join(RECORD));
    let own = fs::read(&record).unwrap();
    // A copy of another replica set.
    fs::copy(others.directory(0).join(RECORD), &record).unwrap();
    assert!(matches!(open_error(&exports), ReplicaError::Foreign(..)));
    // A record that was copied from another export.
    fs::copy(exports.directory(0).join(RECORD), &record).unwrap();
    assert!(matches!(open_error(&exports), ReplicaError::Duplicate(..)));
    let read = ReplicatedFile::open_read(&exports.config(), false).map(|_| ());
    assert!(matches!(read, Err(ReplicaError::Duplicate(..))), "{read:?}");
    // A file without a record, at a member.
    fs::remove_file(&record).unwrap();
    assert!(matches!(open_error(&exports), ReplicaError::MemberMissing { .. }));
    // A record without a file.
    fs::write(&record, &own).unwrap();
    fs::rename(&file, exports.directory(2).join("aside")).unwrap();
    assert!(matches!(open_error(&exports), ReplicaError::FileMissing(_)));
    fs::rename(exports.directory(2).join("aside"), &file).unwrap();
    let mut file = ReplicatedFile::open(&exports.config()).unwrap();
    assert_eq!(read_all(&mut file), b"bytes");
}

#[test]
fn a_plain_file_is_not_filled_and_can_be_founded() {
    let exports = Exports::new(2, PathChoice::Local);
    fs::write(exports.directory(1).join(NAME), "plain").unwrap();
    assert!(matches!(open_error(&exports), ReplicaError::Plain(_)));
    ReplicatedFile::found(&exports.part(&[1])).unwrap();
    let mut file = ReplicatedFile::open(&exports.config()).unwrap();
    assert_eq!((read_all(&mut file), file.status().members.len()), (b"plain".to_vec(), 2));
    assert_eq!(exports.bytes(0), b"plain");
    drop(file);
    // A file at a further export is not that of a member.
    fs::remove_file(exports.directory(0).join(RECORD)).unwrap();
    fs::write(exports.directory(0).join(NAME), "own").unwrap();
    ReplicatedFile::found(&exports.part(&[1])).unwrap();
    let file = ReplicatedFile::open(&exports.config()).unwrap();
    let status = file.status();
    assert_eq!(status.members, [exports.addresses[1]]);
    assert!(status.outside[0].1.contains("no replica"), "{status:?}");
    assert_eq!(exports.bytes(0), b"own");
}

#[test]
fn a_member_that_is_lost_for_good_can_be_given_up() {
    let mut exports = with_file(3, b"bytes");
    exports.end(1);
    let error = open_error(&exports);
    let ReplicaError::MemberMissing { address, .. } = error else { panic!("{error}") };
    assert_eq!(address, exports.addresses[1]);
    assert!(error.to_string().contains("found"), "{error}");
    ReplicatedFile::found(&exports.part(&[2])).unwrap();
    // The third export's copy is of the earlier set.
    assert!(matches!(open_error(&exports), ReplicaError::Foreign(..)));
    for name in [NAME, RECORD] {
        fs::remove_file(exports.directory(0).join(name)).unwrap();
    }
    let mut file = ReplicatedFile::open(&exports.config()).unwrap();
    assert_eq!((read_all(&mut file), file.status().members.len()), (b"bytes".to_vec(), 2));
}

#[test]
fn a_writer_without_members_changes_nothing_more() {
    let mut exports = with_file(2, b"bytes");
    let mut file = ReplicatedFile::open(&exports.config()).unwrap();
    (0..2).for_each(|index| exports.end(index));
    let ended = |result: Result<(), ReplicaError>| matches!(result, Err(ReplicaError::NoMember));
    assert!(ended(file.write_at(0, b"lost")));
    (0..2).for_each(|index| exports.begin(index));
    assert!(ended(file.append(b"x").map(|_| ())) && ended(file.resynchronize()) && ended(file.commit()));
    assert!(
        ended(file.read_at(0, &mut [0; 5]).map(|_| ())) && ended(file.truncate(0)) && ended(file.close())
    );
    let mut file = ReplicatedFile::open(&exports.config()).unwrap();
    assert_eq!((read_all(&mut file), file.status().members.len()), (b"bytes".to_vec(), 2));
}

/// An export of a file system with so many kilobytes; `None` without the right to mount one.
struct Small {
    server: Option<Server>,
    directory: tempfile::TempDir,
}

impl Small {
    fn new(kilobytes: u32) -> Option<Small> {
        let directory = tempfile::tempdir().unwrap();
        let size = format!("size={kilobytes}k");
        let mut mount = std::process::Command::new("mount");
        let mount = mount.args(["-t", "tmpfs", "-o", &size, "tmpfs"]).arg(directory.path());
        if !mount.output().is_ok_and(|done| done.status.success()) {
            println!("nothing can be mounted here: not tested");
            return None;
        }
        let server = Some(serve(directory.path(), PathChoice::Udp, "root = true"));
        Some(Small { server, directory })
    }

    /// Leaves no room for a block.
    fn fill(&self) {
        let filled = fs::write(self.directory.path().join("rest"), vec![0; 8 << 20]);
        assert_eq!(filled.unwrap_err().kind(), std::io::ErrorKind::StorageFull);
    }

    fn address(&self) -> std::net::SocketAddr {
        self.server.as_ref().unwrap().address()
    }

    fn bytes(&self) -> Vec<u8> {
        fs::read(Path::new(self.directory.path()).join(NAME)).unwrap()
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        self.server = None;
        let _ = std::process::Command::new("umount").arg("-l").arg(self.directory.path()).status();
    }
}

#[test]
fn a_full_member_is_dropped_and_full_members_refuse() {
    let (Some(small), Some(large)) = (Small::new(2048), Small::new(4096)) else { return };
    let config = config(&[small.address(), large.address()], PathChoice::Udp);
    let mut file = ReplicatedFile::create(&config, 0o644).unwrap();
    let record = vec![7; 100_000];
    let mut expected: Vec<u8> = Vec::new();
    let mut append = |file: &mut ReplicatedFile| {
        let appended = file.append_commit(&record);
        if appended.is_ok() {
            expected.extend(&record);
        }
        (appended, expected.clone())
    };
    while file.status().members.len() == 2 {
        append(&mut file).0.unwrap();
    }
    let status = file.status();
    assert_eq!(status.members, [large.address()], "{status:?}");
    assert_eq!(status.outside[0].0, small.address());
    // The last one refuses, and keeps what it has.
    let (error, expected) = loop {
        if let (Err(error), expected) = append(&mut file) {
            break (error, expected);
        }
    };
    assert!(matches!(error, ReplicaError::Refused(_)), "{error}");
    assert!(read_all(&mut file) == expected);
    assert_eq!(file.len(), expected.len() as u64);
    // The small one is not admitted again: there is no room for what it lacks.
    file.resynchronize().unwrap();
    assert_eq!(file.status().members, [large.address()]);
    file.truncate(500_000).unwrap();
    file.resynchronize().unwrap();
    assert_eq!(file.status().members.len(), 2, "{:?}", file.status());
    assert!(small.bytes() == expected[..500_000] && large.bytes() == expected[..500_000]);
}

#[test]
fn members_that_are_full_at_once_stay_members() {
    let (Some(one), Some(other)) = (Small::new(1024), Small::new(1024)) else { return };
    let config = config(&[one.address(), other.address()], PathChoice::Udp);
    let mut file = ReplicatedFile::create(&config, 0o644).unwrap();
    let error = loop {
        if let Err(error) = file.append_commit(&[1; 100_000]) {
            break error;
        }
    };
    assert!(matches!(error, ReplicaError::Refused(_)), "{error}");
    assert_eq!(file.status().members.len(), 2, "{:?}", file.status());
    file.truncate(100_000).unwrap();
    file.append_commit(&[2; 100_000]).unwrap();
    let expected = read_all(&mut file);
    assert!(one.bytes() == expected && other.bytes() == expected);
    // A write into a hole.
    file.truncate(8 << 20).unwrap();
    let refused = file.write_at(1 << 20, &vec![3; 4 << 20]);
    assert!(matches!(refused, Err(ReplicaError::Refused(_))), "{refused:?}");
    assert_eq!(file.status().members.len(), 2, "{:?}", file.status());
    // Its members may differ in that range, and are made equal.
    file.truncate(300_000).unwrap();
    file.close().unwrap();
    let mut file = ReplicatedFile::open(&config).unwrap();
    let bytes = read_all(&mut file);
    assert!(bytes[..200_000] == expected[..200_000]);
    assert!(one.bytes() == bytes && other.bytes() == bytes);
}

#[test]
fn appends_behind_one_that_is_refused_are_not_in_the_file() {
    let (Some(one), Some(other)) = (Small::new(1024), Small::new(1024)) else { return };
    let config = config(&[one.address(), other.address()], PathChoice::Udp);
    let mut file = ReplicatedFile::create(&config, 0o644).unwrap();
    let mut appender = file.appender(8, 100_000).unwrap();
    let (mut ended, mut next) = (Vec::<ReplicaAppended>::new(), 0);
    while ended.iter().all(|ended| ended.result.is_ok()) {
        while appender.append(&[next as u8; 100_000], next % 3 == 0, next).is_ok() {
            next += 1;
        }
        appender.wait(&mut ended, Duration::from_secs(60));
    }
    assert_eq!((appender.in_flight(), ended.len()), (0, next as usize));
    let count = ended.iter().take_while(|ended| ended.result.is_ok()).count();
    let is_refused = |ended: &ReplicaAppended| matches!(ended.result, Err(ReplicaError::Refused(_)));
    assert!(ended[count..].iter().all(is_refused), "{ended:?}");
    // The appender goes on behind what was acknowledged.
    appender.append(b"short", true, next).unwrap();
    drop(appender);
    let mut expected: Vec<u8> = (0..count).flat_map(|number| [number as u8; 100_000]).collect();
    expected.extend(b"short");
    assert_eq!(file.status().members.len(), 2, "{:?}", file.status());
    assert!(read_all(&mut file) == expected);
    assert!(one.bytes() == expected && other.bytes() == expected);
}

#[test]
fn a_file_on_full_disks_is_opened_and_its_members_are_dropped() {
    let [Some(one), Some(two), Some(mut three)] = [(); 3].map(|()| Small::new(1024)) else { return };
    let addresses = [one.address(), two.address(), three.address()];
    let mut file = ReplicatedFile::create(&config(&addresses, PathChoice::Udp), 0o644).unwrap();
    file.append_commit(&[1; 50_000]).unwrap();
    [&one, &two, &three].into_iter().for_each(Small::fill);
    three.server = None;
    file.write_at(0, b"written").unwrap();
    assert_eq!(file.status().members.len(), 2, "{:?}", file.status());
    // Not closed.
    drop(file);
    let mut file = ReplicatedFile::open(&config(&addresses[..2], PathChoice::Udp)).unwrap();
    assert_eq!(file.status().members.len(), 2, "{:?}", file.status());
    assert!(read_all(&mut file).starts_with(b"written"));
    file.truncate(7).unwrap();
    file.append_commit(&[2; 40_000]).unwrap();
    let expected = read_all(&mut file);
    file.close().unwrap();
    assert!(one.bytes() == expected && two.bytes() == expected);
}

/// A directory that was restored from that of another export, with the record.
#[test]
fn a_copied_record_is_not_admitted() {
    let mut exports = with_file(3, b"bytes");
    let mut file = ReplicatedFile::open(&exports.config()).unwrap();
    exports.end(2);
    file.append_commit(b", more").unwrap();
    assert_eq!(file.status().members.len(), 2);
    for name in [NAME, RECORD] {
        std::fs::copy(exports.directory(0).join(name), exports.directory(2).join(name)).unwrap();
    }
    exports.begin(2);
    file.resynchronize().unwrap();
    let status = file.status();
    assert_eq!(status.outside.len(), 1, "{status:?}");
    assert!(status.outside[0].1.contains("one was copied"), "{status:?}");
    file.append_commit(b", and more").unwrap();
    file.close().unwrap();
    assert!(matches!(open_error(&exports), ReplicaError::Duplicate(..)));
    // As the error says.
    for name in [NAME, RECORD] {
        std::fs::remove_file(exports.directory(2).join(name)).unwrap();
    }
    let mut file = ReplicatedFile::open(&exports.config()).unwrap();
    assert_eq!(file.status().members.len(), 3);
    assert_eq!(read_all(&mut file), b"bytes, more, and more");
}
