//! Reads, writes and atomics, with all of a region in memory and with a part of it.

mod common;

use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use common::{PAGE, Scratch, Served, numbered};
use terrace_hostmem::AtomicOp;
use terrace_memory::{AccessError, Pager, Translation};
use terrace_pages::{BackingFile, Pages, PagesConfig, PagesError, store};

fn pages_in_file(scratch: &Scratch, page: u64) -> Vec<u8> {
    let mut found = vec![0; PAGE as usize];
    std::fs::File::open(scratch.file()).unwrap().read_exact_at(&mut found, page * PAGE).unwrap();
    found
}

#[test]
fn what_the_file_has_is_read_and_hits_later() {
    let scratch = Scratch::new("reads").with_numbered_pages(200);
    let served = Served::new(&scratch, scratch.config(100), None);
    let mut out = vec![0; PAGE as usize];
    assert!(!served.try_read(0, &mut out));
    for page in (0..200).chain(150..200) {
        assert_eq!(served.read(page * PAGE, 4096).unwrap(), numbered(page));
    }
    assert!(served.try_read(199 * PAGE, &mut out));
    assert_eq!(out, numbered(199));
    assert_eq!(served.region.stats().pages_read, 200);
    assert!(served.woken.load(Ordering::Relaxed) >= 250);
    // Across pages, from the middle of one.
    let across = served.read(10 * PAGE + 100, 60_000).unwrap();
    let whole: Vec<u8> = (10..26).flat_map(numbered).collect();
    assert_eq!(across, whole[100..60_100]);
}

#[test]
fn a_page_that_is_written_whole_is_not_read() {
    let scratch = Scratch::new("whole").with_numbered_pages(64);
    let served = Served::new(&scratch, scratch.config(128), None);
    served.write(3 * PAGE, &[7; 8192]).unwrap();
    assert_eq!((served.region.stats().pages_read, served.region.stats().pages_placed), (0, 2));
    assert_eq!(served.read(3 * PAGE, 8192).unwrap(), [7; 8192]);
    // A write to a part reads the page once.
    served.write(5 * PAGE + 8, &[9; 8]).unwrap();
    assert_eq!(served.region.stats().pages_read, 1);
    assert_eq!(
        served.read(5 * PAGE, 24).unwrap(),
        [[6, 0, 0, 0, 0, 0, 0, 0], [9; 8], [6, 0, 0, 0, 0, 0, 0, 0]].concat()
    );
    assert_eq!(pages_in_file(&scratch, 3), numbered(3), "not yet written back");
    served.flush(3 * PAGE, 1).unwrap();
    assert_eq!((pages_in_file(&scratch, 3), pages_in_file(&scratch, 4)), (vec![7; 4096], numbered(4)));
    drop(served);
    assert_eq!(pages_in_file(&scratch, 4), [7; 4096], "closing writes everything back");
}

#[test]
fn a_flush_writes_the_pages_of_its_range_only() {
    let scratch = Scratch::new("range").with_numbered_pages(1024);
    let served = Served::new(&scratch, scratch.config(1024), None);
    // Fewer than half of the frames: no write-back begins by itself.
    for page in 0..500 {
        served.write(page * PAGE, &[7; 8]).unwrap();
    }
    for (offset, len, written) in
        [(100 * PAGE + 8, 8, 1), (100 * PAGE, 8, 1), (200 * PAGE - 1, 2, 3), (600 * PAGE, 8, 3)]
    {
        served.flush(offset, len).unwrap();
        assert_eq!(served.region.stats().pages_written, written, "{len} bytes at {offset}");
    }
    assert_eq!(served.pages.stats().dirty_bytes, 497 * PAGE);
    assert_eq!(
        (&pages_in_file(&scratch, 100)[..8], pages_in_file(&scratch, 101)),
        (&[7; 8][..], numbered(101))
    );
}

#[test]
fn hits_are_written_and_atomics_are_carried_out_without_waiting() {
    let scratch = Scratch::new("hits").with_numbered_pages(64);
    let served = Served::new(&scratch, scratch.config(128), None);
    let add = |add| AtomicOp::FetchAdd { add };
    assert_eq!((served.try_write(0, &[1; 10]), served.try_atomic(0, add(1))), (false, None));
    assert_eq!(served.atomic(PAGE, add(5)), Ok(2));
    assert_eq!(served.try_atomic(PAGE, add(1)), Some(7));
    served.read(2 * PAGE, 8).unwrap();
    // All of it or nothing.
    assert!(!served.try_write(2 * PAGE - 16, &[3; 8192]));
    assert_eq!(served.read(2 * PAGE - 8, 16).unwrap(), [2u64, 3].map(u64::to_ne_bytes).concat());
    assert!(served.try_write(2 * PAGE - 16, &[3; 4096]));
    assert_eq!(served.read(2 * PAGE, 8).unwrap(), [3; 8]);
    served.flush(0, 64 * PAGE).unwrap();
    assert_eq!(pages_in_file(&scratch, 1)[..8], 8u64.to_ne_bytes());
    // After the write-back, writes are noticed again.
    assert!(served.try_write(2 * PAGE, &[4; 8]));
    served.flush(2 * PAGE, 8).unwrap();
    assert_eq!(pages_in_file(&scratch, 2)[..9], [4, 4, 4, 4, 4, 4, 4, 4, 3]);
}

#[test]
fn far_more_is_written_than_memory_holds() {
    const PAGES: u64 = 2000;
    let scratch = Scratch::new("more");
    let served = Served::new(&scratch, scratch.config(100), Some(PAGES * PAGE));
    for round in 0..2 {
        for page in 0..PAGES {
            served.write(page * PAGE + round * 8, &(page + round + 1).to_ne_bytes()).unwrap();
        }
    }
    for page in (0..PAGES).rev() {
        let found = served.read(page * PAGE, 24).unwrap();
        assert_eq!(found, [page + 1, page + 2, 0].map(u64::to_ne_bytes).concat(), "page {page}");
    }
    assert!(served.pages.frame_count() <= 101);
}

#[test]
fn a_sequential_write_does_not_evict_what_is_hot() {
    const HOT: u64 = 40;
    let scratch = Scratch::new("sequential").with_numbered_pages(4000);
    let served = Served::new(&scratch, scratch.config(256), None);
    let touch_all = || {
        for page in 0..HOT {
            served.read(page * PAGE, 8).unwrap();
            served.region.count(served.range(page * PAGE, 8), true);
        }
    };
    (0..4).for_each(|_| touch_all());
    for page in HOT..4000 {
        served.write(page * PAGE, &[7; 4096]).unwrap();
        if page % 100 == 0 {
            touch_all();
        }
    }
    let before = served.region.stats().pages_read;
    touch_all();
    let read = served.region.stats().pages_read - before;
    assert!(read <= HOT / 10, "{read} of {HOT} hot pages had left");
}

#[test]
fn many_accesses_at_a_time_share_few_frames() {
    let scratch = Scratch::new("crowd").with_numbered_pages(1000);
    let served = Served::new(&scratch, scratch.config(64), None);
    let transfers: Vec<_> = (0..1000).map(|page| (page, served.begin_read(page * PAGE, 16))).collect();
    for (page, transfer) in transfers {
        served.wait(&transfer).unwrap();
        let mut out = [0; 16];
        transfer.read(0, &mut out).unwrap();
        assert_eq!(out, numbered(page)[..16]);
    }
}

#[test]
fn threads_and_memory_files_serve_as_well() {
    let scratch = Scratch::new("threads").with_numbered_pages(300);
    let config = PagesConfig { store: Arc::new(store::OnlyThreads), ..scratch.config(64) };
    let served = Served::new(&scratch, config, None);
    for page in 0..300 {
        assert_eq!(served.read(page * PAGE, 4096).unwrap(), numbered(page));
    }
    drop(served);
    // A region's file in memory.
    let path = std::path::Path::new("/dev/shm").join(format!("terrace-test-{}", std::process::id()));
    std::fs::copy(scratch.file(), &path).unwrap();
    let pages = Pages::open(scratch.config(64)).unwrap();
    let region = pages.add(BackingFile::open(&path, None).unwrap()).unwrap();
    let served = Served { region, pages, waker: Arc::new(|| {}), woken: Arc::default() };
    for page in 0..300 {
        served.write(page * PAGE + 8, &[0; 8]).unwrap();
        assert_eq!(served.read(page * PAGE, 8).unwrap(), (page + 1).to_ne_bytes());
    }
    drop(served);
    std::fs::remove_file(path).unwrap();
}

#[test]
fn what_is_outside_or_crooked_is_refused() {
    let scratch = Scratch::new("outside").with_numbered_pages(70);
    let served = Served::new(&scratch, scratch.config(64), None);
    let (region, waker) = (&served.region, &served.waker);
    let refused = |range| Pager::read(&**region, range, waker).err();
    assert_eq!(refused(served.range(0, 70 * PAGE + 1)), Some(AccessError::OutOfRange));
    assert_eq!(refused(served.range(0, 65_537)), Some(AccessError::OutOfRange));
    assert_eq!(
        Pager::atomic(&**region, served.addr() + 4, AtomicOp::FetchAdd { add: 1 }, waker).err(),
        Some(AccessError::Misaligned)
    );
    served.wait(&Pager::read(&**region, served.range(5, 0), waker).unwrap()).unwrap();
    served.pages.remove(region);
    assert!(served.wait(&Pager::read(&**region, served.range(0, 8), waker).unwrap()).is_err());
}

#[test]
fn a_removed_region_has_no_pages_and_the_next_one_gets_its_frames() {
    let (scratch, other) = (Scratch::new("removed").with_numbered_pages(64), Scratch::new("added"));
    let served = Served::new(&scratch, scratch.config(64), None);
    for page in 0..60 {
        served.write(page * PAGE, &[9; 8]).unwrap();
    }
    served.pages.remove(&served.region);
    assert_eq!(pages_in_file(&scratch, 59)[..8], [9; 8]);
    let region = served.pages.add(BackingFile::open(&other.file(), Some(64 * PAGE)).unwrap()).unwrap();
    let next = Served { region, pages: served.pages.clone(), waker: Arc::new(|| {}), woken: Arc::default() };
    for page in 0..64 {
        next.write(page * PAGE, &[7; 4096]).unwrap();
    }
    assert!((0..64).all(|page| !served.try_read(page * PAGE, &mut [0; 8])));
    assert!(!served.try_write(0, &[1; 8]));
    assert_eq!(served.flush(0, 8), Err(AccessError::Fault));
    assert_eq!(next.region.stats().pages_placed, 64);
    assert!((0..64).all(|page| next.read(page * PAGE, 4096).unwrap() == [7; 4096]));
}

#[test]
fn one_server_has_a_file_and_a_pool() {
    let scratch = Scratch::new("locks").with_numbered_pages(70);
    let served = Served::new(&scratch, scratch.config(64), None);
    assert!(matches!(BackingFile::open(&scratch.file(), None), Err(PagesError::InUse { .. })));
    assert!(matches!(Pages::open(scratch.config(64)), Err(PagesError::InUse { .. })));
    let named = std::fs::read_to_string(scratch.0.join(".region.terrace-pages")).unwrap();
    assert!(named.contains("/terrace-pages-"), "{named}");
    drop(served);
    assert!(!scratch.0.join(".region.terrace-pages").exists());
    assert!(matches!(Pages::open(PagesConfig::new("small", 5000)), Err(PagesError::Budget { .. })));
}

#[test]
fn a_sparse_region_costs_what_is_touched() {
    let scratch = Scratch::new("sparse");
    let before = resident_kib();
    let served = Served::new(&scratch, scratch.config(256), Some(256 << 30));
    for step in 0..64u64 {
        let offset = step * (4 << 30) + step * PAGE;
        served.write(offset, &(step + 1).to_ne_bytes()).unwrap();
        assert_eq!(served.read(offset, 8).unwrap(), (step + 1).to_ne_bytes());
    }
    served.flush(0, 256 << 30).unwrap();
    assert!(resident_kib() - before < 16 << 10, "{} KiB", resident_kib() - before);
}

fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
fn pages_are_written_back_before_all_frames_are_dirty_although_no_write_misses() {
    let scratch = Scratch::new("hits-only").with_numbered_pages(200);
    let served = Served::new(&scratch, scratch.config(256), None);
    for page in 0..200 {
        served.read(page * PAGE, 8).unwrap();
    }
    let started = Instant::now();
    for page in 0..200 {
        // A write-back that begins between the two looks at the page refuses a write.
        while !served.try_write(page * PAGE, &[9; 8]) {
            assert!(started.elapsed() < Duration::from_secs(20), "page {page} is in memory");
        }
    }
    while served.pages.stats().dirty_bytes > 128 * PAGE {
        assert!(started.elapsed() < Duration::from_secs(20), "{:?}", served.pages.stats());
        std::thread::sleep(Duration::from_millis(10));
    }
}
