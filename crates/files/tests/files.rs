//! Regions that are files: rights, lengths, limits, full disks.

mod common;

use std::collections::HashSet;
use std::fs::File;
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{DIRECTORIES, TestFile, append, atomic, finish, open, read, read_locally, region, write};
use terrace_files::{FileExtent, Files, FilesConfig, LayoutError, OpenError};
use terrace_hostmem::{AtomicOp, HostRange};
use terrace_memory::{AccessError, Pager, Translation, Waker};

fn files() -> Files {
    Files::new(&FilesConfig::default())
}

#[test]
fn a_region_permits_what_its_descriptor_is_open_for() {
    let (files, file) = (files(), TestFile::new("/var/tmp", 5000));
    let path = file.path();
    let read_only = open(&path, false);
    let refused = files.open(read_only.as_fd(), true, FileExtent::WHOLE).map(drop);
    assert!(matches!(refused, Err(OpenError::NotPermitted(_))), "{refused:?}");
    let append_only = File::options().read(true).append(true).open(&path).expect("opened");
    let refused = files.open(append_only.as_fd(), true, FileExtent::WHOLE).map(drop);
    assert!(matches!(refused, Err(OpenError::NotPermitted(_))), "{refused:?}");
    let write_only = File::options().write(true).open(&path).expect("opened");
    let refused = files.open(write_only.as_fd(), false, FileExtent::WHOLE).map(drop);
    assert!(matches!(refused, Err(OpenError::NotPermitted(_))), "{refused:?}");
    let directory = File::open("/var/tmp").expect("opened");
    let refused = files.open(directory.as_fd(), false, FileExtent::WHOLE).map(drop);
    assert!(matches!(refused, Err(OpenError::NotRegular)), "{refused:?}");

    let reader = files.open(read_only.as_fd(), false, FileExtent::WHOLE).expect("a region");
    assert_eq!(read(&reader, 0, 5000), Ok(vec![0; 5000]));
    assert_eq!(write(&reader, 0, b"x"), Err(AccessError::Permission));
    assert_eq!(append(&reader, b"x", false), Err(AccessError::Permission));
    assert!(matches!(reader.truncate(0), Err(LayoutError::NotWritable)));
    // The other region of the same file may be written.
    let writer = region(&files, &file.file);
    assert_eq!(write(&writer, 4999, b"x"), Ok(()));
    assert_eq!(read(&reader, 4998, 2), Ok(vec![0, b'x']));
}

#[test]
fn the_descriptor_may_be_closed_and_the_name_removed() {
    let files = files();
    for directory in DIRECTORIES {
        let file = TestFile::new(directory, 100_000);
        file.file.write_all_at(b"content", 90_000).expect("written");
        let region = region(&files, &file.file);
        drop(file);
        assert_eq!(read(&region, 90_000, 7), Ok(b"content".to_vec()));
        assert_eq!(write(&region, 90_001, b"O"), Ok(()));
        assert_eq!(read_locally(&region, 90_000, 7), Ok(b"cOntent".to_vec()));
    }
}

#[test]
fn the_length_is_the_files() {
    let files = files();
    for directory in DIRECTORIES {
        let file = TestFile::new(directory, 10_001);
        let region = region(&files, &file.file);
        for _ in 0..4 {
            assert_eq!(read(&region, 10_000, 1), Ok(vec![0]));
            assert_eq!(write(&region, 10_000, b"y"), Ok(()));
            for (offset, len) in
                [(10_001, 1), (10_000, 2), (0, 10_002), (1 << 40, 8), (i64::MAX as u64 - 8, 8)]
            {
                assert_eq!(read(&region, offset, len), Err(AccessError::OutOfRange));
                assert_eq!(write(&region, offset, &vec![1; len]), Err(AccessError::OutOfRange));
            }
            assert_eq!(atomic(&region, 10_000, AtomicOp::FetchAdd { add: 1 }), Err(AccessError::OutOfRange));
            assert_eq!(read(&region, 10_000, 1), Ok(vec![b'y']));
            assert_eq!(write(&region, 10_000, &[0]), Ok(()));
        }
        assert_eq!(file.file.metadata().expect("there").len(), 10_001, "a refused access made it longer");
        // It grows without the region's help, far beyond its first window.
        file.file.set_len(1 << 30).expect("grown");
        file.file.write_all_at(b"end", (1 << 30) - 3).expect("written");
        assert_eq!(read(&region, (1 << 30) - 4, 4), Ok(b"\0end".to_vec()));
        // It shrinks without the region's help. A page of it may still be in the page cache.
        file.file.set_len(20_000).expect("shrunk");
        std::thread::sleep(Duration::from_millis(30));
        assert_eq!(read(&region, 19_999, 2), Err(AccessError::OutOfRange));
        assert_eq!(write(&region, 19_999, b"ab"), Err(AccessError::OutOfRange));
        assert_eq!(read(&region, (1 << 30) - 4, 4), Err(AccessError::OutOfRange));
        region.truncate(5).expect("shrunk");
        assert_eq!(read(&region, 4, 2), Err(AccessError::OutOfRange));
        assert_eq!(read(&region, 4, 1), Ok(vec![0]));
    }
}

#[test]
fn a_file_that_shrinks_under_copies_is_an_error_at_worst() {
    let files = files();
    for directory in DIRECTORIES {
        let file = TestFile::new(directory, 1 << 20);
        let region = region(&files, &file.file);
        let deadline = Instant::now() + Duration::from_millis(500);
        std::thread::scope(|scope| {
            for seed in 0..2_u64 {
                let region = &region;
                scope.spawn(move || {
                    let mut outcomes = [0; 2];
                    for step in 0.. {
                        let offset = (step * 7919 + seed * 4096) % ((1 << 20) - 3000);
                        let result = match step % 3 {
                            0 => read(region, offset, 3000).map(drop),
                            1 => write(region, offset, &[7; 3000]),
                            _ => atomic(region, offset & !7, AtomicOp::FetchAdd { add: 1 }).map(drop),
                        };
                        assert!(matches!(result, Ok(()) | Err(AccessError::OutOfRange)), "{result:?}");
                        outcomes[usize::from(result.is_ok())] += 1;
                        if Instant::now() > deadline {
                            break;
                        }
                    }
                    assert!(outcomes.iter().all(|&count| count > 0), "{outcomes:?}");
                });
            }
            while Instant::now() < deadline {
                for len in [0, 1 << 19, 1000, 1 << 20] {
                    file.file.set_len(len).expect("changed");
                    std::thread::sleep(Duration::from_millis(2));
                }
            }
        });
    }
}

#[test]
fn a_sparse_file_of_64_gib_takes_no_space_until_it_is_written() {
    let (files, file) = (files(), TestFile::new("/var/tmp", 64 << 30));
    let begun = Instant::now();
    let region = region(&files, &file.file);
    println!("opened in {:?}", begun.elapsed());
    for offset in (0..64).map(|gib: u64| (gib << 30) + 4000) {
        assert_eq!(read(&region, offset, 5000), Ok(vec![0; 5000]));
    }
    assert!(file.file.metadata().expect("there").blocks() < 100, "a hole was filled by reading it");
    assert_eq!(write(&region, 50 << 30, b"here"), Ok(()));
    assert_eq!(read(&region, (50 << 30) - 1, 6), Ok(b"\0here\0".to_vec()));
    file.file.sync_all().expect("written");
    assert!((1..1000).contains(&file.file.metadata().expect("there").blocks()));
}

#[test]
fn reading_holes_in_memory_allocates_nothing() {
    let (files, file) = (files(), TestFile::new("/dev/shm", 1 << 30));
    let region = region(&files, &file.file);
    for offset in (0..256).map(|page: u64| page << 22) {
        assert_eq!(read(&region, offset, 100), Ok(vec![0; 100]));
    }
    assert_eq!(file.file.metadata().expect("there").blocks(), 0);
}

#[test]
fn a_record_is_visible_when_it_is_whole() {
    const RECORD: u64 = 1 << 20;
    for directory in DIRECTORIES {
        let (files, file) = (Files::new(&FilesConfig::default()), TestFile::new(directory, 0));
        let region = region(&files, &file.file);
        let record = vec![7; RECORD as usize];
        std::thread::scope(|scope| {
            let appending = scope.spawn(|| (0..40).for_each(|_| _ = append(&region, &record, false)));
            while !appending.is_finished() {
                assert_eq!(region.file_len() % RECORD, 0);
            }
        });
        assert_eq!(region.file_len(), 40 * RECORD);
    }
}

#[test]
fn appended_records_neither_overlap_nor_leave_holes() {
    const RECORDS: u64 = 300;
    let files = files();
    for directory in DIRECTORIES {
        let file = TestFile::new(directory, 0);
        let regions = [region(&files, &file.file), region(&files, &file.file)];
        std::thread::scope(|scope| {
            for writer in 0..4_u64 {
                let region = &regions[writer as usize % 2];
                scope.spawn(move || {
                    for number in 0..RECORDS {
                        let len = 16 + (number * 37 % 700) as usize;
                        let mut record = vec![writer as u8; len];
                        record[..8].copy_from_slice(&(len as u64).to_ne_bytes());
                        record[8..16].copy_from_slice(&(writer << 32 | number).to_ne_bytes());
                        let offset = append(region, &record, number % 50 == 0).expect("appended");
                        assert_eq!(
                            read(region, offset, len),
                            Ok(record),
                            "a record is there once it is appended"
                        );
                    }
                });
            }
        });
        let content = std::fs::read(file.path()).expect("read");
        let (mut rest, mut seen) = (&content[..], HashSet::new());
        while !rest.is_empty() {
            let word = |at: usize| u64::from_ne_bytes(rest[at..at + 8].try_into().expect("8 bytes"));
            let (len, identity) = (word(0) as usize, word(8));
            assert!(rest[16..len].iter().all(|&byte| u64::from(byte) == identity >> 32), "a torn record");
            assert!(seen.insert(identity), "a record twice");
            rest = &rest[len..];
        }
        assert_eq!(seen.len() as u64, 4 * RECORDS);
    }
}

/// A file system of `megabytes` that nothing else is on; `None` without the right to mount.
struct Mount(tempfile::TempDir);

impl Mount {
    fn of_memory(megabytes: u32) -> Option<Mount> {
        let directory = tempfile::tempdir().expect("a directory");
        let size = format!("size={megabytes}m");
        let mounted = std::process::Command::new("mount")
            .args(["-t", "tmpfs", "-o", &size, "tmpfs"])
            .arg(directory.path())
            .status();
        mounted.is_ok_and(|status| status.success()).then_some(Mount(directory))
    }

    fn of_disk(megabytes: u64) -> Option<Mount> {
        let directory = tempfile::tempdir_in("/var/tmp").expect("a directory");
        let image = directory.path().join("image");
        File::create(&image).and_then(|file| file.set_len(megabytes << 20)).expect("an image");
        let run = |program: &str, args: &[&str], last: &std::path::Path| {
            std::process::Command::new(program)
                .args(args)
                .arg(last)
                .output()
                .is_ok_and(|done| done.status.success())
        };
        let target = directory.path().join("mounted");
        std::fs::create_dir(&target).expect("a directory");
        let image_text = image.to_str().expect("text");
        let is_there = run("mkfs.ext4", &["-q", "-F", "-m", "0"], &image)
            && run("mount", &["-o", "loop", image_text], &target);
        is_there.then_some(Mount(directory))
    }

    fn path(&self) -> std::path::PathBuf {
        let inner = self.0.path().join("mounted");
        if inner.exists() { inner } else { self.0.path().to_owned() }
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg("-l").arg(self.path()).status();
    }
}

#[test]
fn data_are_found_behind_holes() {
    let files = files();
    for directory in DIRECTORIES {
        let file = TestFile::new(directory, 0);
        file.file.set_len(4 << 20).expect("a hole");
        let region = region(&files, &file.file);
        assert_eq!(region.next_data(0).expect("an answer"), 4 << 20..4 << 20, "only a hole");
        write(&region, (1 << 20) + 5, b"data").expect("written");
        let found = region.next_data(0).expect("an answer");
        assert!(found.start <= (1 << 20) + 5 && found.start > 0 && found.end >= (1 << 20) + 9, "{found:?}");
        assert!(found.end < 2 << 20, "{found:?}");
        assert_eq!(region.next_data((1 << 20) + 7).expect("an answer"), (1 << 20) + 7..found.end);
        for offset in [found.end, 3 << 20, 4 << 20, u64::MAX] {
            assert_eq!(region.next_data(offset).expect("an answer"), 4 << 20..4 << 20);
        }
    }
}

#[test]
fn a_full_file_system_is_an_error_that_loses_nothing() {
    for mount in [Mount::of_memory(4), Mount::of_disk(16)] {
        let Some(mount) = mount else {
            println!("nothing can be mounted here: not tested");
            continue;
        };
        let files = files();
        let sparse = open(&mount.path().join("sparse"), true);
        sparse.set_len(64 << 20).expect("a hole");
        let holes = region(&files, &sparse);
        let log = open(&mount.path().join("log"), true);
        let appended = region(&files, &log);
        assert_eq!(append(&appended, &[1; 1000], false), Ok(0));
        // Fill the rest.
        let mut filler = open(&mount.path().join("filler"), true);
        while filler.write_all(&[2; 65_536]).is_ok() && filler.sync_data().is_ok() {}
        while filler.write_all(&[2; 512]).is_ok() && filler.sync_data().is_ok() {}
        let mut written = Vec::new();
        let full = (0..16_u64).find(|&page| match write(&holes, page << 22, &[3; 4096]) {
            Ok(()) => {
                written.push(page);
                false
            }
            Err(error) => {
                assert_eq!(error, AccessError::NoSpace);
                true
            }
        });
        assert!(full.is_some(), "the disk never was full");
        for page in written {
            assert_eq!(read(&holes, page << 22, 4096), Ok(vec![3; 4096]), "an acknowledged write is there");
        }
        // What a record has ahead may hold some more.
        let mut len = 1000;
        let refused = loop {
            match append(&appended, &[4; 300_000], false) {
                Ok(offset) => {
                    assert_eq!(offset, len);
                    len += 300_000;
                }
                Err(error) => break error,
            }
        };
        assert_eq!(refused, AccessError::NoSpace);
        assert_eq!(log.metadata().expect("there").len(), len, "a part of a record is in the file");
        assert_eq!(read(&appended, 0, 1000), Ok(vec![1; 1000]));
        std::fs::remove_file(mount.path().join("filler")).expect("removed");
        drop(filler);
        assert_eq!(append(&appended, &[5; 1000], true), Ok(len));
        assert_eq!(write(&holes, 15 << 22, &[6; 4096]), Ok(()));
    }
}

#[test]
fn a_part_of_a_file_has_the_length_that_was_asked_for() {
    assert_eq!(FileExtent { offset: 4096, len: Some(100) }.range(), Some(HostRange { addr: 4096, len: 100 }));
    assert_eq!(FileExtent { offset: u64::MAX, len: None }.range(), None);
    assert_eq!(FileExtent { offset: 1, len: Some(i64::MAX as u64) }.range(), None);
    let (files, file) = (files(), TestFile::new("/var/tmp", 10_000));
    let part =
        files.open(file.file.as_fd(), true, FileExtent { offset: 0, len: Some(10) }).expect("a region");
    assert_eq!(append(&part, b"x", false), Err(AccessError::Permission), "the end is not in the region");
}

#[test]
fn deferred_accesses_that_overlap_keep_their_order() {
    let files = Files::new(&FilesConfig { windows_max: 10, ..FilesConfig::default() });
    let file = TestFile::new("/var/tmp", 1 << 20);
    let region = region(&files, &file.file);
    let (waker, _woken) = common::waker();
    for round in 0..50_u64 {
        let transfers: Vec<_> = (0..20_u64)
            .map(|number| Pager::write(&*region, round * 4096, &[number as u8; 4096], &waker).expect("room"))
            .collect();
        let last = Pager::read(&*region, HostRange { addr: round * 4096, len: 4096 }, &waker).expect("room");
        // An access that need not be deferred is not made before those that were.
        let direct = Translation::write(&*region, round * 4096, &[99; 10]);
        let after = match direct {
            Some(result) => result,
            None => finish(|waker| Pager::write(&*region, round * 4096, &[99; 10], waker)).map(drop),
        };
        assert_eq!(after, Ok(()));
        while last.outcome().is_none() || transfers.iter().any(|transfer| transfer.outcome().is_none()) {
            std::thread::yield_now();
        }
        let mut seen = vec![0; 4096];
        last.read(0, &mut seen).expect("read");
        assert_eq!(seen, [19; 4096]);
        assert_eq!(read(&region, round * 4096 + 9, 2), Ok(vec![99, 19]));
    }
    region.wait_idle();
}

#[test]
fn a_cancelled_change_is_not_carried_out() {
    let files = Files::new(&FilesConfig { windows_max: 10, workers_max: 1, ..FilesConfig::default() });
    let file = TestFile::new("/var/tmp", 1 << 20);
    let region = region(&files, &file.file);
    let (go_on, until_then) = std::sync::mpsc::channel();
    let until_then = std::sync::Mutex::new(until_then);
    // The only worker waits at the end of its first access.
    let occupied: Waker = Arc::new(move || until_then.lock().expect("one thread").recv().expect("a message"));
    let first = Pager::write(&*region, 0, &[1; 8], &occupied).expect("room");
    let (waker, _woken) = common::waker();
    let write = Pager::write(&*region, 4096, &[2; 8], &waker).expect("room");
    let add = Pager::atomic(&*region, 8192, AtomicOp::FetchAdd { add: 3 }, &waker).expect("room");
    let kept = Pager::atomic(&*region, 8192, AtomicOp::FetchAdd { add: 4 }, &waker).expect("room");
    write.cancel();
    add.cancel();
    go_on.send(()).expect("a worker");
    region.wait_idle();
    let outcomes = [first, write, add, kept].map(|change| change.outcome());
    let cancelled = Some(Err(AccessError::Fault));
    assert_eq!(outcomes, [Some(Ok(())), cancelled, cancelled, Some(Ok(()))]);
    assert_eq!(read(&region, 4096, 8), Ok(vec![0; 8]));
    assert_eq!(read(&region, 8192, 8), Ok(4_u64.to_ne_bytes().to_vec()));
}

#[test]
fn many_files_have_few_windows() {
    let files = Files::new(&FilesConfig { windows_max: 20, workers_max: 2, ..FilesConfig::default() });
    let directory = tempfile::tempdir_in("/dev/shm").expect("a directory");
    let regions: Vec<_> = (0..200)
        .map(|number: u32| {
            let file = open(&directory.path().join(number.to_string()), true);
            file.set_len(4096).expect("space");
            region(&files, &file)
        })
        .collect();
    for round in 0..3 {
        for (number, region) in regions.iter().enumerate() {
            assert_eq!(write(region, 8 * round, &number.to_ne_bytes()), Ok(()));
            assert_eq!(read(region, 8 * round, 8), Ok(number.to_ne_bytes().to_vec()));
        }
        assert_eq!(files.window_count(), 20);
    }
    drop(regions);
    assert_eq!(files.window_count(), 0);
}

/// Descriptors of files in a directory.
fn descriptor_count(directory: &std::path::Path) -> usize {
    let entries = std::fs::read_dir("/proc/self/fd").expect("there").flatten();
    entries
        .filter(|entry| std::fs::read_link(entry.path()).is_ok_and(|file| file.starts_with(directory)))
        .count()
}

#[test]
fn many_files_need_few_descriptors() {
    let files = Files::new(&FilesConfig { windows_max: 10, descriptors_max: 5, workers_max: 2 });
    let directory = tempfile::tempdir_in("/var/tmp").expect("a directory");
    let regions: Vec<_> = (0..300)
        .map(|number: u32| {
            let file = open(&directory.path().join(number.to_string()), true);
            file.set_len(4096).expect("space");
            region(&files, &file)
        })
        .collect();
    let open_count = descriptor_count(directory.path());
    if open_count == 300 {
        println!("this system parks no files: not tested");
        return;
    }
    assert!(open_count < 20, "{open_count} descriptors");
    std::thread::scope(|scope| {
        for thread in 0..3 {
            let regions = &regions;
            scope.spawn(move || {
                for round in 0..4_u64 {
                    for (number, region) in regions.iter().enumerate().skip(thread).step_by(3) {
                        let word = (number as u64) << 32 | round;
                        assert_eq!(write(region, 8 * round, &word.to_ne_bytes()), Ok(()));
                        assert_eq!(read(region, 8 * round, 8), Ok(word.to_ne_bytes().to_vec()));
                        assert_eq!(append(region, &[7; 10], round == 3), Ok(4096 + 10 * round));
                    }
                }
            });
        }
    });
    let open_count = descriptor_count(directory.path());
    assert!(open_count < 20, "{open_count} descriptors");
    for (number, region) in regions.iter().enumerate() {
        region.truncate(30).expect("truncated");
        assert_eq!(read(region, 24, 6), Ok(((number as u64) << 32 | 3).to_ne_bytes()[..6].to_vec()));
        assert_eq!(read(region, 24, 8), Err(AccessError::OutOfRange));
        assert_eq!(std::fs::metadata(directory.path().join(number.to_string())).expect("there").len(), 30);
    }
    drop(regions);
    assert_eq!(descriptor_count(directory.path()), 0);
}

#[test]
fn regions_of_one_file_share_it() {
    let (files, file) = (files(), TestFile::new("/dev/shm", 4096));
    let regions: Vec<Arc<_>> = (0..1000).map(|_| region(&files, &file.file)).collect();
    let descriptors = std::fs::read_dir("/proc/self/fd").expect("there").count();
    assert!(descriptors < 500, "{descriptors} descriptors");
    regions.iter().for_each(|region| assert_eq!(write(region, 1, b"z"), Ok(())));
    assert_eq!(files.window_count(), 1);
}

#[test]
fn an_older_length_does_not_replace_a_newer_one() {
    const LENS: [u64; 2] = [5000, 4200];
    let files = files();
    let test = TestFile::new(DIRECTORIES[1], LENS[0]);
    let region = region(&files, &test.file);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Beyond every end: the length is read each time.
            while !is_over.load(Ordering::Relaxed) {
                // While the layout changes, the answer is that of a deferred access.
                let _ = region.check(HostRange { addr: LENS[0], len: 1 });
            }
        });
        let found = (0..200_000).find(|_| {
            region.truncate(LENS[0]).expect("longer");
            region.truncate(LENS[1]).expect("shorter");
            region.check(HostRange { addr: LENS[1], len: 1 }).is_ok()
        });
        is_over.store(true, Ordering::Relaxed);
        assert_eq!(found, None, "an access beyond the end passes after the file was made shorter");
        assert!(region.check(HostRange { addr: LENS[0], len: 1 }).is_err());
    });
}
