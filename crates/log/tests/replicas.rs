//! Logs on several exports, of which some are killed and stopped while records are appended.

#[path = "../../export/tests/replicas/hosts.rs"]
#[allow(dead_code)] // Other tests use the rest.
mod hosts;
#[path = "../../export/tests/replicas/load.rs"]
#[allow(dead_code)] // Other tests use the rest.
mod load;
#[path = "../../export/tests/export/process.rs"]
mod process;
#[path = "../../export/tests/export/support.rs"]
#[allow(dead_code)] // Other tests use the rest.
mod support;

use std::fs::File;
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hosts::{Host, addresses, config, hosts};
use rustix::process::Signal;
use terrace_export::{ReplicaError, ReplicatedFile, Server};
use terrace_log::{Appended, Entry, LogError, Position, ReplicatedLog, ReplicatedLogReader};
use terrace_nic::PathChoice;

fn data(number: u64) -> Vec<u8> {
    let len = number % 7 * 1000 + number % 5;
    (0..len).map(|at| (number * 31 + at * 7 + at / 251) as u8).collect()
}

/// Appends records, some of them persistent and some of them three at a time, until `is_over` says so of their number.
fn append(log: &ReplicatedLog, appended: &mut Vec<Entry>, is_over: impl Fn(usize) -> bool) {
    while !is_over(appended.len()) {
        let number = appended.len() as u64;
        let count = if number % 5 == 4 { 3 } else { 1 };
        let records: Vec<_> = (number..number + count).map(data).collect();
        let positions = match number % 3 {
            0 if count == 1 => log.append_commit(&records[0]).map(|position| vec![position]),
            1 if count == 1 => log.append(&records[0]).map(|position| vec![position]),
            third => log.append_all(&records, third == 0),
        };
        let positions = positions.unwrap_or_else(|error| panic!("{error}, {:?}", log.status()));
        assert_eq!(positions.len(), records.len());
        appended.extend(positions.into_iter().zip(records).map(|(position, data)| Entry { position, data }));
    }
}

/// The records of a log, from the beginning on, and the bytes that are none.
macro_rules! all {
    ($log:expr) => {{
        let log = $log;
        let mut entries = log.entries(log.start().unwrap());
        let found = entries.by_ref().collect::<Result<Vec<_>, _>>().unwrap();
        (found, entries.torn_bytes())
    }};
}

fn check_files(hosts: &[Host], log: &ReplicatedLog) {
    let status = log.status();
    assert_eq!(status.members.len(), hosts.len(), "{status:?}");
    let bytes = hosts[0].bytes();
    assert_eq!(bytes.len() as u64, log.len_bytes().unwrap());
    assert!(hosts[1..].iter().all(|host| host.bytes() == bytes), "the copies differ");
}

fn no_record_is_lost_with_exports(path: PathChoice) {
    let mut hosts = hosts(path);
    let config = config(&addresses(&hosts), path);
    let log = ReplicatedLog::open_or_create(&config).unwrap();
    let mut appended = Vec::new();
    append(&log, &mut appended, |count| count >= 50);
    std::thread::scope(|scope| {
        let [_, killed, stopped] = &mut hosts;
        let killer = scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(20));
            killed.end(Signal::KILL);
            std::thread::sleep(Duration::from_millis(20));
            stopped.end(Signal::STOP);
        });
        append(&log, &mut appended, |_| killer.is_finished());
    });
    let count = appended.len() + 20;
    append(&log, &mut appended, |now| now >= count);
    let status = log.status();
    assert_eq!(status.members, [hosts[0].address], "{status:?}");
    assert_eq!(status.outside.len(), 2, "{status:?}");
    assert!(all!(&log) == (appended.clone(), 0), "of the export that is left");
    let reader = ReplicatedLogReader::open_read(&config, true).unwrap();
    assert!(all!(&reader) == (appended.clone(), 0), "for a reader");

    // They return, and have what they have missed.
    hosts[1..].iter_mut().for_each(Host::go_on);
    log.resynchronize().unwrap();
    check_files(&hosts, &log);
    append(&log, &mut appended, |now| now >= count + 20);
    reader.refresh().unwrap();
    assert!(all!(&reader) == (appended.clone(), 0), "for a reader");
    let kept = appended.split_off(count);
    log.trim(kept[0].position).unwrap();
    assert!(all!(&log) == (kept.clone(), 0), "after a trim");
    assert!(matches!(log.read(appended[0].position), Err(LogError::Trimmed(_))));
    check_files(&hosts, &log);

    // Each other one is killed: the ones that were away have everything.
    hosts[0].end(Signal::KILL);
    let position = log.append_commit(b"last").unwrap();
    let expected = [kept, vec![Entry { position, data: b"last".to_vec() }]].concat();
    assert!(all!(&log) == (expected.clone(), 0), "of the exports that were away");
    // The process that appends ends, too.
    drop(log);
    hosts[0].go_on();
    let log = ReplicatedLog::open_or_create(&config).unwrap();
    assert!(all!(&log) == (expected, 0), "after all");
    check_files(&hosts, &log);
}

#[test]
fn no_record_is_lost_with_exports_by_packets() {
    no_record_is_lost_with_exports(PathChoice::Udp);
}

#[test]
fn no_record_is_lost_with_exports_within_the_host() {
    no_record_is_lost_with_exports(PathChoice::Local);
}

/// Appends records with up to 16 in flight, some of them persistent, until `is_over` says so of their number; then all of them end.
fn append_in_flight(log: &mut ReplicatedLog, appended: &mut Vec<Entry>, is_over: impl Fn(usize) -> bool) {
    let first = appended.len() as u64;
    let mut appender = log.appender(16, 7000).unwrap();
    let (mut ended, mut next) = (Vec::new(), first);
    while !is_over(next as usize) || appender.in_flight() > 0 {
        while !is_over(next as usize) && appender.in_flight() < 16 {
            appender.append(&data(next), next % 5 == 0, next).unwrap();
            next += 1;
        }
        appender.wait(&mut ended, Duration::from_secs(60));
        for Appended { tag, result } in ended.drain(..) {
            assert_eq!(tag, appended.len() as u64, "they end in their order");
            let position = result.unwrap_or_else(|error| panic!("record {tag}: {error}"));
            appended.push(Entry { position, data: data(tag) });
        }
    }
    assert_eq!(appended.len() as u64, next);
}

fn no_record_in_flight_is_lost_with_exports(path: PathChoice) {
    let mut hosts = hosts(path);
    let config = config(&addresses(&hosts), path);
    let mut log = ReplicatedLog::open_or_create(&config).unwrap();
    let mut appended = Vec::new();
    append_in_flight(&mut log, &mut appended, |count| count >= 100);
    check_files(&hosts, &log);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let [_, killed, stopped] = &mut hosts;
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(20));
            killed.end(Signal::KILL);
            std::thread::sleep(Duration::from_millis(20));
            stopped.end(Signal::STOP);
            is_over.store(true, Ordering::Relaxed);
        });
        append_in_flight(&mut log, &mut appended, |_| is_over.load(Ordering::Relaxed));
    });
    let count = appended.len() + 100;
    append_in_flight(&mut log, &mut appended, |now| now >= count);
    let status = log.status();
    assert_eq!(status.members, [hosts[0].address], "{status:?}");
    assert!(all!(&log) == (appended.clone(), 0), "of the export that is left");
    hosts[1..].iter_mut().for_each(Host::go_on);
    log.resynchronize().unwrap();
    append_in_flight(&mut log, &mut appended, |now| now >= count + 100);
    check_files(&hosts, &log);
    assert!(all!(&log) == (appended.clone(), 0), "after all");
    // Those in flight end with the appender, and the log with the last export.
    let mut appender = log.appender(16, 100).unwrap();
    appender.append(b"in flight", false, 0).unwrap();
    drop(appender);
    assert_eq!(all!(&log).0.pop().unwrap().data, b"in flight");
    let mut appender = log.appender(16, 100).unwrap();
    (0..16).for_each(|tag| appender.append(b"full", false, tag).unwrap());
    let full = appender.append(b"full", false, 16);
    assert!(matches!(full, Err(LogError::Replica(ReplicaError::Full))), "{full:?}");
    hosts.iter_mut().for_each(|host| host.end(Signal::KILL));
    let mut ended = Vec::new();
    while appender.in_flight() > 0 {
        appender.wait(&mut ended, Duration::from_secs(60));
    }
    let appended = appender.append(b"over", false, 17);
    let is_over = |error: &LogError| matches!(error, LogError::Replica(ReplicaError::NoMember));
    // The first ones may have been acknowledged before the exports were killed.
    let failed = ended.iter().filter_map(|ended| ended.result.as_ref().err());
    assert!(ended.len() == 16 && failed.clone().all(is_over), "{ended:?}");
    if failed.count() > 0 {
        assert!(appended.is_err_and(|error| is_over(&error)));
    }
}

#[test]
fn no_record_in_flight_is_lost_with_exports_by_packets() {
    no_record_in_flight_is_lost_with_exports(PathChoice::Udp);
}

#[test]
fn no_record_in_flight_is_lost_with_exports_within_the_host() {
    no_record_in_flight_is_lost_with_exports(PathChoice::Local);
}

/// Exports of this process.
fn serve(count: usize) -> (Vec<tempfile::TempDir>, Vec<Server>) {
    let directories: Vec<_> = (0..count).map(|_| tempfile::tempdir().unwrap()).collect();
    let serve =
        |directory: &tempfile::TempDir| support::serve(directory.path(), PathChoice::Local, "root = true");
    let servers = directories.iter().map(serve).collect();
    (directories, servers)
}

#[test]
fn a_torn_record_is_passed_over() {
    let (directories, servers) = serve(2);
    let addresses: Vec<_> = servers.iter().map(Server::address).collect();
    let config = config(&addresses, PathChoice::Local);
    let log = ReplicatedLog::open_or_create(&config).unwrap();
    let first = log.append_commit(b"first").unwrap();
    let len = log.len_bytes().unwrap();
    // Ends without closing it, in the middle of a record.
    drop(log);
    let whole = std::fs::read(directories[0].path().join(hosts::NAME)).unwrap();
    for directory in &directories {
        let mut file = File::options().append(true).open(directory.path().join(hosts::NAME)).unwrap();
        file.write_all(&whole[first.0 as usize..whole.len() - 1]).unwrap();
    }
    let log = ReplicatedLog::open_or_create(&config).unwrap();
    let torn = log.len_bytes().unwrap() - len;
    assert!(torn > 0);
    assert_eq!(all!(&log).0.len(), 1);
    let last = log.append(b"last").unwrap();
    let (entries, passed) = all!(&log);
    let positions: Vec<Position> = entries.iter().map(|entry| entry.position).collect();
    assert_eq!((positions, passed), (vec![first, last], torn));
    assert!(matches!(ReplicatedLog::open_or_create(&config), Err(LogError::Replica(_))), "it is in use");
    log.close().unwrap();
    assert_eq!(ReplicatedLog::open_or_create(&config).unwrap().read(last).unwrap(), b"last");
}

#[test]
fn a_log_whose_head_was_not_written_is_created_again_and_another_file_is_not() {
    let (directories, servers) = serve(2);
    let addresses: Vec<_> = servers.iter().map(Server::address).collect();
    let config = config(&addresses, PathChoice::Local);
    let log = ReplicatedLog::open_or_create(&config).unwrap();
    let head = std::fs::read(directories[0].path().join(hosts::NAME)).unwrap();
    log.close().unwrap();
    let put = |bytes: &[u8]| {
        let mut file = ReplicatedFile::open(&config).unwrap();
        file.truncate(0).unwrap();
        file.write_at(0, bytes).unwrap();
        file.close().unwrap();
    };
    for unfinished in [&[][..], &head[..5], &head[..20], &head[..100], &[0; 4096]] {
        put(unfinished);
        assert!(matches!(ReplicatedLogReader::open_read(&config, false), Err(LogError::NotALog)));
        let log = ReplicatedLog::open_or_create(&config).unwrap();
        let position = log.append_commit(b"first").unwrap();
        assert_eq!(all!(&log).0, [Entry { position, data: b"first".to_vec() }]);
        log.close().unwrap();
    }
    let zeros_and_text = [&[0; 100][..], b"text"].concat();
    let identity_and_text = [&head[..20], b"text"].concat();
    for other in [&b"some text"[..], &[7; 5000], &zeros_and_text, &identity_and_text] {
        put(other);
        assert!(matches!(ReplicatedLog::open_or_create(&config), Err(LogError::NotALog)));
        assert_eq!(std::fs::read(directories[1].path().join(hosts::NAME)).unwrap(), other);
    }
}
