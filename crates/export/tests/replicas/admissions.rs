//! Exports that are admitted, and admissions that are interrupted at each step.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use rustix::process::Signal;
use terrace_export::{ReplicaError, ReplicatedFile};
use terrace_nic::PathChoice;

use crate::basics::{Exports, read_all};
use crate::hosts::{NAME, RECORD, addresses, config, hosts, start_writer};
use crate::support::wait_until;

const DRAFT: &str = ".file.terrace-replica.new";
/// The bytes of each of the two blocks of a record, and where a block has its checksum.
const SLOT: usize = 4096;
const CRC: usize = 1020;

/// The files of a directory.
type Files = BTreeMap<String, Vec<u8>>;

fn files(directory: &Path) -> Files {
    let entries = fs::read_dir(directory).unwrap().map(Result::unwrap);
    let file =
        |entry: fs::DirEntry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap());
    entries.map(file).collect()
}

/// Makes a directory have these files.
fn put(directory: &Path, wanted: &Files) {
    for name in files(directory).keys().filter(|name| !wanted.contains_key(*name)) {
        fs::remove_file(directory.join(name)).unwrap();
    }
    wanted.iter().for_each(|(name, bytes)| fs::write(directory.join(name), bytes).unwrap());
}

/// The record of one copy as another copy's with this record: it knows the same epoch.
fn record_of(known: &[u8], own: &[u8]) -> Vec<u8> {
    let mut slot = known[..SLOT].to_vec();
    slot[16..24].copy_from_slice(&own[16..24]);
    let crc = crc32fast::hash(&slot[..CRC]);
    slot[CRC..][..4].copy_from_slice(&crc.to_le_bytes());
    slot.repeat(2)
}

/// A record that is being replaced by another one.
fn torn(new: &[u8], old: &[u8], at: usize) -> Vec<u8> {
    [&new[..at], &old[at..]].concat()
}

/// What the three exports have before an admission of the third, and after it.
struct Admission {
    exports: Exports,
    before: [Files; 3],
    after: [Files; 3],
}

impl Admission {
    /// The third export was a member, and has failed; or it is a new one.
    fn new(is_new: bool) -> Admission {
        let mut exports = Exports::new(3, PathChoice::Local);
        let mut file = ReplicatedFile::create(&exports.config(), 0o644).unwrap();
        file.append_commit(&[1; 300_000]).unwrap();
        exports.end(2);
        file.write_at(1000, &[2; 2000]).unwrap();
        file.append_commit(&[3; 5000]).unwrap();
        assert_eq!(file.status().members.len(), 2);
        exports.begin(2);
        if is_new {
            put(exports.directory(2), &Files::new());
        }
        let now = |exports: &Exports| [0, 1, 2].map(|index| files(exports.directory(index)));
        let before = now(&exports);
        file.resynchronize().unwrap();
        assert_eq!(file.status().members.len(), 3, "{:?}", file.status());
        let after = now(&exports);
        file.close().unwrap();
        Admission { exports, before, after }
    }

    /// All that the exports may have when the writer ends in the middle, and whether the third may be needed then.
    fn states(&self) -> Vec<([Files; 3], bool)> {
        let ([one, two, three], [one_after, two_after, three_after]) = (&self.before, &self.after);
        let with = |files: &Files, name: &str, bytes: &[u8]| {
            let mut files = files.clone();
            files.insert(name.into(), bytes.into());
            files
        };
        let old = three.get(NAME).cloned().unwrap_or_default();
        let new = &three_after[NAME];
        let prepared = record_of(&one[RECORD], &three_after[RECORD]);
        let empty = with(three, NAME, &old);
        let draft = with(&empty, DRAFT, &prepared[..30]);
        let incomplete = with(&empty, RECORD, &prepared);
        let mut part = [&new[..150_000], &old[150_000.min(old.len())..]].concat();
        part.resize(new.len(), 0);
        let filled = with(&incomplete, NAME, new);
        let half = [one_after, two].map(Clone::clone);
        let all = [one_after, two_after].map(Clone::clone);
        let before = [one, two].map(Clone::clone);
        let state = |members: &[Files; 2], third: &Files, is_needed| {
            ([members[0].clone(), members[1].clone(), third.clone()], is_needed)
        };
        let replaced =
            |name: &Files, after: &Files, at| with(name, RECORD, &torn(&after[RECORD], &name[RECORD], at));
        let preparing = three
            .get(RECORD)
            .into_iter()
            .flat_map(|old| [100, SLOT, SLOT + 100].map(|at| with(three, RECORD, &torn(&prepared, old, at))));
        let mut states: Vec<_> = preparing.map(|third| state(&before, &third, false)).collect();
        states.extend([
            state(&before, three, false),
            state(&before, &empty, false),
            state(&before, &draft, false),
            state(&before, &incomplete, false),
            state(&before, &with(&incomplete, NAME, &part), false),
            state(&before, &filled, false),
            state(&[replaced(one, one_after, 100), two.clone()], &filled, false),
            state(&[replaced(one, one_after, SLOT), two.clone()], &filled, true),
            state(&[replaced(one, one_after, SLOT + 100), two.clone()], &filled, true),
            state(&half, &filled, true),
            state(&all, &filled, true),
            state(&all, &replaced(&filled, three_after, 100), true),
            state(&all, &replaced(&filled, three_after, SLOT + 100), true),
            state(&all, three_after, true),
        ]);
        states
    }

    fn check(&self) {
        let expected = &self.after[0][NAME];
        let Admission { exports, .. } = self;
        for (number, (state, is_third_needed)) in self.states().into_iter().enumerate() {
            let set = || (0..3).for_each(|index| put(exports.directory(index), &state[index]));
            let open = |indexes: &[usize]| ReplicatedFile::open(&exports.part(indexes));
            set();
            for part in [&[2][..], &[1, 2], &[0, 2]] {
                match open(part) {
                    Err(ReplicaError::MemberMissing { .. }) => {}
                    // A new export may have nothing yet.
                    Err(ReplicaError::NotFound(_) | ReplicaError::Plain(_)) if part == [2] => {}
                    other => panic!("state {number}, {part:?}: {:?}", other.map(|file| file.status())),
                }
            }
            let without = open(&[0, 1]);
            assert_eq!(without.is_ok(), !is_third_needed, "state {number}");
            if let Ok(mut file) = without {
                assert!(read_all(&mut file) == *expected, "state {number}");
                file.close().unwrap();
            }
            set();
            let mut file = open(&[0, 1, 2]).unwrap_or_else(|error| panic!("state {number}: {error}"));
            assert_eq!(file.status().members.len(), 3, "state {number}: {:?}", file.status());
            assert!(read_all(&mut file) == *expected, "state {number}");
            file.close().unwrap();
            assert!((0..3).all(|index| exports.bytes(index) == *expected), "state {number}");
        }
    }
}

#[test]
fn an_admission_of_a_member_that_has_returned_may_end_at_each_step() {
    Admission::new(false).check();
}

#[test]
fn an_admission_of_a_new_export_may_end_at_each_step() {
    Admission::new(true).check();
}

#[test]
fn an_incomplete_copy_is_not_founded() {
    let admission = Admission::new(false);
    let states = admission.states();
    let whole = &admission.after[2][NAME];
    let is_part = |(state, _): &&([Files; 3], bool)| {
        state[2].get(NAME).is_some_and(|bytes| bytes.len() == whole.len() && bytes != whole)
    };
    let (state, _) = states.iter().find(is_part).unwrap();
    put(admission.exports.directory(2), &state[2]);
    let founded = ReplicatedFile::found(&admission.exports.part(&[2]));
    assert!(matches!(founded, Err(ReplicaError::Incomplete(_))), "{founded:?}");
}

#[test]
fn holes_stay_holes() {
    let mut exports = Exports::new(2, PathChoice::Local);
    let mut file = ReplicatedFile::create(&exports.config(), 0o644).unwrap();
    file.write_at(0, &[1; 300_000]).unwrap();
    exports.end(1);
    // What the other one still has is cut, punched, and beyond a hole.
    file.punch(100_000, 150_000).unwrap();
    file.truncate(280_000).unwrap();
    file.write_at(1 << 30, b"far").unwrap();
    file.truncate(2 << 30).unwrap();
    exports.begin(1);
    file.resynchronize().unwrap();
    assert_eq!(file.status().members.len(), 2, "{:?}", file.status());
    let metadata = [0, 1].map(|index| fs::metadata(exports.directory(index).join(NAME)).unwrap());
    assert_eq!(metadata.each_ref().map(fs::Metadata::len), [2 << 30; 2]);
    assert!(metadata.iter().all(|metadata| metadata.blocks() < 4096), "{metadata:?}");
    let other = fs::File::open(exports.directory(1).join(NAME)).unwrap();
    let mut expected = vec![1; 100_000];
    expected.resize(250_000, 0);
    expected.resize(280_000, 1);
    expected.resize(300_000, 0);
    let mut bytes = vec![9; 300_000];
    std::os::unix::fs::FileExt::read_exact_at(&other, &mut bytes, 0).unwrap();
    assert!(bytes == expected);
    std::os::unix::fs::FileExt::read_exact_at(&other, &mut bytes[..3], 1 << 30).unwrap();
    assert_eq!(&bytes[..3], b"far");
}

/// The writer is killed at random moments of an admission.
#[test]
fn a_writer_that_is_killed_while_it_admits_leaves_nothing_half_done() {
    let path = PathChoice::Udp;
    let hosts = hosts(path);
    let all = config(&addresses(&hosts), path);
    let two = config(&addresses(&hosts[..2]), path);
    let mut file = ReplicatedFile::create(&two, 0o644).unwrap();
    let bytes: Vec<u8> = (0..16 << 20).map(|at: u32| (at * 31 + at / 257) as u8).collect();
    file.append(&bytes[..1000]).unwrap();
    file.write_at(1000, &bytes[1000..]).unwrap();
    file.close().unwrap();
    let before = [0, 1].map(|index: usize| files(hosts[index].directory.path()));
    let mut partial = 0;
    for round in 0..8 {
        (0..2).for_each(|index| put(hosts[index].directory.path(), &before[index]));
        put(hosts[2].directory.path(), &Files::new());
        let writer = start_writer("admit", &hosts, path, 0);
        wait_until("the copy is begun", || hosts[2].file().exists());
        std::thread::sleep(Duration::from_millis(7 * round));
        writer.signal(Signal::KILL);
        drop(writer);
        partial += u32::from(hosts[2].bytes() != bytes);
        if round % 2 == 0 {
            // The third may be needed by now, if it was admitted.
            match ReplicatedFile::open(&two) {
                Ok(file) => file.close().unwrap(),
                Err(error) => assert!(matches!(error, ReplicaError::MemberMissing { .. }), "{error}"),
            }
        }
        let file = ReplicatedFile::open(&all).unwrap();
        assert_eq!(file.status().members.len(), 3, "round {round}: {:?}", file.status());
        file.close().unwrap();
        assert!(hosts.iter().all(|host| host.bytes() == bytes), "round {round}");
    }
    assert!(partial > 0, "no admission was interrupted");
}
