//! Logs over an export in this process, by both transports.

#[path = "../../export/tests/export/support.rs"]
#[allow(dead_code)] // Other tests use the rest.
mod support;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use proptest::prelude::*;
use support::{connect, serve};
use terrace_export::{Client, ExportError, RECORD_BYTES_MAX, Server};
use terrace_log::{DATA_BYTES_MAX, Entry, LogError, Position, RemoteLog};
use terrace_nic::PathChoice;

struct Export {
    directory: tempfile::TempDir,
    server: Server,
    path: PathChoice,
}

impl Export {
    fn new(path: PathChoice) -> Export {
        let directory = tempfile::tempdir().unwrap();
        let server = serve(directory.path(), path, "root = true");
        Export { directory, server, path }
    }

    fn client(&self) -> Client {
        connect(self.server.address(), self.path)
    }

    fn file(&self) -> std::path::PathBuf {
        self.directory.path().join("log")
    }
}

fn open(client: &Client) -> RemoteLog {
    RemoteLog::open_or_create(client, client.root(), "log".as_ref()).unwrap()
}

fn all(log: &RemoteLog) -> (Vec<Entry>, u64) {
    let mut entries = log.entries(log.start().unwrap());
    let found = entries.by_ref().collect::<Result<_, _>>().unwrap();
    (found, entries.torn_bytes())
}

fn data(number: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|at| (number * 31 + at * 7 + at / 251) as u8).collect()
}

fn records_are_read_as_they_were_appended(path: PathChoice) {
    let export = Export::new(path);
    let client = export.client();
    let log = open(&client);
    let lens = [0, 1, 15, 4096, 100_000, DATA_BYTES_MAX];
    let appended: Vec<Entry> = lens
        .iter()
        .zip(0..)
        .map(|(len, number)| {
            let data = data(number, *len);
            let position = if number % 2 == 0 { log.append(&data) } else { log.append_commit(&data) };
            Entry { position: position.unwrap(), data }
        })
        .collect();
    log.commit().unwrap();
    assert_eq!(all(&log), (appended.clone(), 0));
    let reader = RemoteLog::open(&export.client(), client.root(), "log".as_ref()).unwrap();
    for entry in &appended {
        assert_eq!(reader.read(entry.position).unwrap(), entry.data);
    }
    assert!(matches!(log.read(Position(appended[1].position.0 + 1)), Err(LogError::NoRecord(_))));
    assert!(matches!(log.append(&data(0, DATA_BYTES_MAX + 1)), Err(LogError::TooLong)));
}

fn records_are_appended_together(path: PathChoice) {
    let export = Export::new(path);
    let log = open(&export.client());
    let none: [&[u8]; 0] = [];
    assert_eq!(log.append_all(&none, true).unwrap(), []);
    let records: Vec<_> =
        [0, 100, 7, 1_000_000].into_iter().zip(0..).map(|(len, number)| data(number, len)).collect();
    let positions = log.append_all(&records, true).unwrap();
    let entries: Vec<_> = positions
        .iter()
        .zip(&records)
        .map(|(position, data)| Entry { position: *position, data: data.clone() })
        .collect();
    assert_eq!(all(&log), (entries.clone(), 0));
    assert!(entries.iter().all(|entry| log.read(entry.position).unwrap() == entry.data));
    // Two records of this length have one head too many.
    let half = data(0, DATA_BYTES_MAX / 2);
    assert!(matches!(log.append_all(&[&half, &half], false), Err(LogError::TooLong)));
    assert_eq!(log.append_all(&[&half, &half[16..].to_vec()], false).unwrap().len(), 2);
}

#[test]
fn records_are_appended_together_by_packets() {
    records_are_appended_together(PathChoice::Udp);
}

#[test]
fn records_are_appended_together_within_the_host() {
    records_are_appended_together(PathChoice::Local);
}

#[test]
fn records_are_read_as_they_were_appended_by_packets() {
    records_are_read_as_they_were_appended(PathChoice::Udp);
}

#[test]
fn records_are_read_as_they_were_appended_within_the_host() {
    records_are_read_as_they_were_appended(PathChoice::Local);
}

#[test]
fn several_clients_append_to_one_log() {
    let export = Export::new(PathChoice::Local);
    let threads: Vec<_> = (0..4u64)
        .map(|writer| {
            let client = export.client();
            std::thread::spawn(move || {
                let log = open(&client);
                let mut appender = log.appender(&client, 8, 1000).unwrap();
                let (mut ended, mut next) = (Vec::new(), 0);
                while ended.len() < 500 {
                    while next < 500 {
                        let number = writer << 32 | next;
                        let mut record = number.to_le_bytes().to_vec();
                        record.extend(data(number, (number % 900) as usize));
                        match appender.append(&record, next % 50 == 0, number) {
                            Ok(()) => next += 1,
                            Err(LogError::Export(ExportError::Full)) => break,
                            Err(error) => panic!("{error}"),
                        }
                    }
                    appender.wait(&mut ended, Duration::from_secs(10));
                }
                assert_eq!(appender.in_flight(), 0);
                ended.into_iter().map(|end| (end.tag, end.result.unwrap())).collect::<BTreeMap<_, _>>()
            })
        })
        .collect();
    let appended: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
    let log = open(&export.client());
    let mut found = BTreeMap::new();
    let mut last = [None; 4];
    let (entries, torn) = all(&log);
    for entry in entries {
        let number = u64::from_le_bytes(entry.data[..8].try_into().unwrap());
        assert_eq!(entry.data[8..], data(number, (number % 900) as usize));
        assert!(last[(number >> 32) as usize].replace(number) < Some(number), "out of order");
        found.insert(number, entry.position);
    }
    assert_eq!(torn, 0);
    assert_eq!(found, appended.into_iter().flatten().collect());
}

#[test]
fn trimmed_records_are_gone_and_later_ones_stay() {
    let export = Export::new(PathChoice::Local);
    let client = export.client();
    let log = open(&client);
    let positions: Vec<Position> =
        (0..100).map(|number| log.append(&data(number, 10_000)).unwrap()).collect();
    let blocks = || rustix::fs::stat(export.file()).unwrap().st_blocks;
    let before = blocks();
    let mut behind = log.entries(positions[10]);
    for kept in [40, 30, 90] {
        log.trim(positions[kept]).unwrap();
    }
    assert!(blocks() < before / 4, "{} of {before} blocks are left", blocks());
    assert_eq!(log.start().unwrap(), positions[90]);
    assert_eq!(all(&log).0.len(), 10);
    assert!(matches!(log.read(positions[3]), Err(LogError::Trimmed(start)) if start == positions[90]));
    assert!(matches!(behind.next(), Some(Err(LogError::Trimmed(start))) if start == positions[90]));
    assert!(matches!(log.trim(Position(u64::MAX)), Err(LogError::NoRecord(_))));
    let end = Position(log.len_bytes().unwrap());
    log.trim(end).unwrap();
    assert_eq!(all(&log), (Vec::new(), 0));
    let position = log.append(b"first").unwrap();
    assert_eq!(all(&log).0, [Entry { position, data: b"first".to_vec() }]);
    // A start that was written in part does not count.
    let file = File::options().write(true).open(export.file()).unwrap();
    file.write_all_at(&[0xff; 20], 64).unwrap();
    assert!([end, positions[90]].contains(&log.start().unwrap()));
}

#[test]
fn readers_wait_for_records_and_go_on() {
    let export = Export::new(PathChoice::Local);
    let (client, other) = (export.client(), export.client());
    let log = open(&client);
    let mut entries = log.entries(log.start().unwrap());
    assert_eq!(entries.wait_next(Duration::from_millis(30)).unwrap(), None);
    let writer = std::thread::spawn(move || {
        let log = open(&other);
        for number in 0..20 {
            std::thread::sleep(Duration::from_millis(5));
            log.append(&data(number, 300)).unwrap();
        }
    });
    for number in 0..20 {
        let entry = entries.wait_next(Duration::from_secs(10)).unwrap().expect("it is appended");
        assert_eq!(entry.data, data(number, 300));
    }
    writer.join().unwrap();
}

#[test]
fn what_is_no_log_is_refused() {
    let export = Export::new(PathChoice::Local);
    let client = export.client();
    for bytes in [Vec::new(), vec![0; 20], vec![1; 10_000]] {
        std::fs::write(export.file(), bytes).unwrap();
        assert!(matches!(
            RemoteLog::open_or_create(&client, client.root(), "log".as_ref()),
            Err(LogError::NotALog)
        ));
    }
    std::fs::remove_file(export.file()).unwrap();
    open(&client);
    let again = RemoteLog::create(&client, client.root(), "log".as_ref());
    assert!(matches!(again, Err(LogError::Export(ExportError::Os(17)))));
    let names: Vec<_> = std::fs::read_dir(export.directory.path()).unwrap().collect();
    assert_eq!(names.len(), 1, "no draft stays behind");
}

/// Leaves the first part of a record behind, as a server does that is killed in the middle of one.
fn tear(path: &Path, record: &[u8]) {
    let mut file = File::options().write(true).open(path).unwrap();
    file.seek(SeekFrom::End(0)).unwrap();
    file.write_all(record).unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn records_behind_torn_ones_are_found(
        steps in prop::collection::vec((0usize..3000, prop::option::of(0usize..100)), 1..20),
    ) {
        let export = Export::new(PathChoice::Local);
        let client = export.client();
        let log = open(&client);
        let (mut kept, mut torn, mut pending) = (Vec::new(), 0, 0);
        for (number, (len, part)) in steps.into_iter().enumerate() {
            let data = data(number as u64, len);
            let position = log.append(&data).unwrap();
            torn += std::mem::take(&mut pending);
            kept.push(Entry { position, data });
            if let Some(part) = part {
                // A copy of the record's own bytes, so that the torn one has the log's id and a good head.
                let mut record = vec![0; len + 16];
                File::open(export.file()).unwrap().read_exact_at(&mut record, position.0).unwrap();
                record.truncate(record.len() * part / 100);
                tear(&export.file(), &record);
                pending += record.len() as u64;
            }
        }
        let expected = (kept.clone(), torn);
        prop_assert_eq!(all(&log), expected);
        // A reader that has come to the torn end goes on behind it.
        let mut entries = log.entries(kept[0].position);
        let count = entries.by_ref().count();
        prop_assert_eq!(count, kept.len());
        let position = log.append(b"behind").unwrap();
        let next = entries.next().unwrap().unwrap();
        prop_assert_eq!(next, Entry { position, data: b"behind".to_vec() });
        prop_assert_eq!(entries.torn_bytes(), torn + pending);
    }
}

#[test]
fn more_damage_than_a_record_is_passed_over() {
    let export = Export::new(PathChoice::Local);
    let client = export.client();
    let log = open(&client);
    let first = log.append(b"first").unwrap();
    tear(&export.file(), &vec![0xee; 3 * RECORD_BYTES_MAX + 5]);
    let last = log.append(b"last").unwrap();
    let (entries, torn) = all(&log);
    assert_eq!(entries.iter().map(|entry| entry.position).collect::<Vec<_>>(), [first, last]);
    assert_eq!(torn, 3 * RECORD_BYTES_MAX as u64 + 5);
}

/// Ends the log's file earlier, as a crash of its host does, or a replicated log's next writer.
fn cut(export: &Export, len: u64) {
    File::options().write(true).open(export.file()).unwrap().set_len(len).unwrap();
}

#[test]
fn a_reader_is_told_when_the_record_that_it_has_read_last_is_replaced() {
    let export = Export::new(PathChoice::Local);
    let log = open(&export.client());
    let first = log.append(b"A").unwrap();
    // Cut before the record, and in its middle.
    for kept in [0, 1000] {
        let position = log.append(&data(1, 3000)).unwrap();
        let mut entries = log.entries(first);
        assert_eq!(entries.by_ref().last().unwrap().unwrap().position, position);
        cut(&export, position.0 + kept);
        let second = Entry { position: log.append(&data(2, 3000)).unwrap(), data: data(2, 3000) };
        let third = Entry { position: log.append(b"Z").unwrap(), data: b"Z".to_vec() };
        for _ in 0..2 {
            let next = entries.next();
            assert!(matches!(next, Some(Err(LogError::Changed(at))) if at == position), "{next:?}");
        }
        let again: Vec<_> = log.entries(position).collect::<Result<_, _>>().unwrap();
        assert_eq!(again, [second, third]);
    }
    // A record that was trimmed is no such record.
    let mut entries = log.entries(first);
    entries.by_ref().last().unwrap().unwrap();
    log.trim(entries.position()).unwrap();
    log.append(b"behind").unwrap();
    assert_eq!(entries.next().unwrap().unwrap().data, b"behind");
}

#[test]
fn a_reader_that_waits_behind_a_torn_record_gets_the_one_that_replaces_it() {
    let export = Export::new(PathChoice::Local);
    let log = open(&export.client());
    let position = log.append(&data(1, 3000)).unwrap();
    let mut record = vec![0; 2000];
    File::open(export.file()).unwrap().read_exact_at(&mut record, position.0).unwrap();
    let mut entries = log.entries(position);
    entries.next().unwrap().unwrap();
    let end = entries.position();
    tear(&export.file(), &record);
    assert!(entries.next().is_none());
    cut(&export, end.0);
    let entry = Entry { position: log.append(&data(2, 3000)).unwrap(), data: data(2, 3000) };
    assert_eq!(entries.next().unwrap().unwrap(), entry);
    assert_eq!(entries.torn_bytes(), 0);
}
