//! Several writers: one of them writes.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use terrace_export::{ReplicaConfig, ReplicaError, ReplicatedFile};
use terrace_nic::PathChoice;

use crate::basics::{Exports, read_all};
use crate::hosts::{LEASE, NAME, addresses, config, hosts, start_writer};

#[test]
fn of_two_writers_at_once_one_has_the_file() {
    let exports = Exports::new(3, PathChoice::Local);
    ReplicatedFile::create(&exports.config(), 0o644).unwrap().close().unwrap();
    let mut expected = Vec::new();
    for round in 0..2_u8 {
        let opened: Vec<_> = std::thread::scope(|scope| {
            // They name the exports in different orders.
            let orders = [[0, 1, 2], [2, 1, 0]];
            let open =
                |order: [usize; 3]| ReplicaConfig { timeout: Duration::from_secs(5), ..exports.part(&order) };
            let threads = orders.map(|order| scope.spawn(move || ReplicatedFile::open(&open(order))));
            threads.map(|thread| thread.join().unwrap()).into_iter().collect()
        });
        let mut writers = 0;
        for opened in opened {
            match opened {
                Ok(mut file) => {
                    writers += 1;
                    assert_eq!(file.append_commit(&[round; 3]).unwrap(), expected.len() as u64);
                    expected.extend([round; 3]);
                    file.close().unwrap();
                }
                Err(ReplicaError::InUse(_)) => {}
                Err(error) => panic!("round {round}: {error}"),
            }
        }
        assert_eq!(writers, 1, "round {round}");
    }
    let mut file = ReplicatedFile::open(&exports.config()).unwrap();
    assert_eq!(read_all(&mut file), expected);
}

#[test]
fn of_two_that_create_the_file_at_once_one_has_it() {
    for round in 0..5 {
        let exports = Exports::new(2, PathChoice::Local);
        let created: Vec<_> = std::thread::scope(|scope| {
            let threads = [[0, 1], [1, 0]].map(|order| {
                let config = exports.part(&order);
                scope.spawn(move || ReplicatedFile::create(&config, 0o644).map(|file| file.close().unwrap()))
            });
            threads.map(|thread| thread.join().unwrap()).into_iter().collect()
        });
        for created in &created {
            let is_expected =
                matches!(created, Ok(()) | Err(ReplicaError::Exists(_) | ReplicaError::InUse(_)));
            assert!(is_expected, "round {round}: {created:?}");
        }
        let file = ReplicatedFile::open(&exports.config());
        let members = file.map(|file| file.status().members.len());
        assert!(matches!(members, Ok(2)), "round {round}: {members:?}, {created:?}");
    }
}

#[test]
fn a_lock_at_an_export_that_is_no_member_does_not_keep_the_file_from_being_opened() {
    let mut exports = Exports::new(3, PathChoice::Local);
    let mut file = ReplicatedFile::create(&exports.config(), 0o644).unwrap();
    // It is locked first.
    let first = (0..3).min_by_key(|&index| exports.addresses[index]).unwrap();
    exports.end(first);
    file.append_commit(b"two").unwrap();
    file.close().unwrap();
    exports.begin(first);
    let local = std::fs::File::open(exports.directory(first).join(NAME)).unwrap();
    local.lock().unwrap();
    let with_short_timeout = ReplicaConfig { timeout: Duration::from_secs(2), ..exports.config() };
    let file = ReplicatedFile::open(&with_short_timeout).unwrap();
    let status = file.status();
    assert_eq!(status.members.len(), 2, "{status:?}");
    assert!(status.outside[0].1.contains("another writer"), "{status:?}");
}

/// A writer is stopped for longer than its lease, and another one has the file meanwhile.
fn a_stopped_writer_changes_nothing_later(path: PathChoice) {
    let hosts = hosts(path);
    let config = config(&addresses(&hosts), path);
    for round in 0..2 {
        let role = if round == 0 { "create" } else { "open" };
        let mut stopped = start_writer(role, &hosts, path, round);
        stopped.expect("done 1");
        std::thread::sleep(Duration::from_millis(7 * round));
        stopped.signal(Signal::STOP);
        let with_short_timeout = ReplicaConfig { timeout: LEASE / 4, ..config.clone() };
        assert!(ReplicatedFile::open(&with_short_timeout).is_err());
        let patient = ReplicaConfig { timeout: LEASE + Duration::from_secs(8), ..config.clone() };
        let mut file = ReplicatedFile::open(&patient).unwrap();
        let mut expected = read_all(&mut file);
        file.append_commit(b"the next writer's").unwrap();
        expected.extend(b"the next writer's");
        stopped.signal(Signal::CONT);
        assert_eq!(stopped.expect("outcome "), "ended");
        for attempt in 0..3 {
            assert_eq!(stopped.expect(&format!("attempt {attempt} ")), "refused");
        }
        assert!(read_all(&mut file) == expected);
        file.append_commit(b"!").unwrap();
        expected.extend(b"!");
        assert_eq!(file.status().members.len(), 3, "{:?}", file.status());
        assert!(hosts.iter().all(|host| host.bytes() == expected));
        file.close().unwrap();
    }
}

#[test]
fn a_stopped_writer_changes_nothing_later_by_packets() {
    a_stopped_writer_changes_nothing_later(PathChoice::Udp);
}

#[test]
fn a_stopped_writer_changes_nothing_later_within_the_host() {
    a_stopped_writer_changes_nothing_later(PathChoice::Local);
}

/// The servers are killed and started again while the writer is stopped: it has no key of theirs.
#[test]
fn a_stopped_writer_does_not_come_back_to_exports_that_have_restarted() {
    let path = PathChoice::Local;
    let mut hosts = hosts(path);
    let mut stopped = start_writer("create", &hosts, path, 5);
    stopped.expect("done 1");
    stopped.signal(Signal::STOP);
    for host in &mut hosts {
        host.end(Signal::KILL);
        host.go_on();
    }
    let config = config(&addresses(&hosts), path);
    let begun = Instant::now();
    let mut file = ReplicatedFile::open(&config).unwrap();
    assert!(begun.elapsed() < LEASE, "a lock of a killed server is kept");
    file.truncate(0).unwrap();
    file.append_commit(b"mine").unwrap();
    stopped.signal(Signal::CONT);
    assert_eq!(stopped.expect("outcome "), "ended");
    assert_eq!(stopped.expect("attempt 0 "), "refused");
    assert!(hosts.iter().all(|host| host.bytes() == b"mine"));
    file.append_commit(b"!").unwrap();
    assert_eq!(file.status().members.len(), 3, "{:?}", file.status());
}
