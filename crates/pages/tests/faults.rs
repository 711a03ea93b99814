//! Devices that fail: an error is one of its page and its request, and no acknowledged write is lost.

mod common;

use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{PAGE, Scratch, Served, numbered};
use rustix::io::Errno;
use terrace_faults::{FaultPlan, Injected};
use terrace_memory::{AccessError, Pager};
use terrace_pages::store::{Best, Faults, Faulty, FrameRun, Store, StoreFactory, WriteDevice};
use terrace_pages::{BackingFile, PagesConfig};

fn faulty(faults: Faults) -> Arc<Faulty> {
    Arc::new(Faulty::new(Arc::new(Best), faults))
}

#[test]
fn a_page_that_cannot_be_read_fails_its_requests_until_it_is_overwritten() {
    let scratch = Scratch::new("unreadable").with_numbered_pages(64);
    let store = faulty(Faults { seed: 1, read_errors_permille: 1000, ..Faults::default() });
    let served = Served::new(&scratch, PagesConfig { store: store.clone(), ..scratch.config(128) }, None);
    assert_eq!(served.read(0, 4096), Err(AccessError::Device));
    assert_eq!(served.write(8, &[1]), Err(AccessError::Device));
    // Requests that wait for one page, in order: the first two fail, the others need no read.
    let early = served.begin_read(5 * PAGE, 8);
    let partial = served.begin_write(5 * PAGE, &[2; 8]);
    let whole = served.begin_write(5 * PAGE, &[3; 4096]);
    let late = served.begin_read(5 * PAGE, 8);
    let outcomes = [early, partial, whole, late].map(|transfer| served.wait(&transfer));
    assert_eq!(outcomes, [Err(AccessError::Device), Err(AccessError::Device), Ok(()), Ok(())]);
    assert_eq!(served.read(5 * PAGE, 4096).unwrap(), [3; 4096]);
    store.heal(true);
    assert_eq!(served.read(0, 4096).unwrap(), numbered(0));
}

#[test]
fn a_page_that_cannot_be_written_stays_and_its_flush_fails() {
    let scratch = Scratch::new("unwritable").with_numbered_pages(1000);
    let store = faulty(Faults { seed: 1, write_errors_permille: 1000, ..Faults::default() });
    let served = Served::new(&scratch, PagesConfig { store: store.clone(), ..scratch.config(100) }, None);
    for page in 0..20 {
        served.write(page * PAGE, &[9; 4096]).unwrap();
    }
    for _ in 0..2 {
        assert_eq!(served.flush(0, 20 * PAGE), Err(AccessError::Flush));
    }
    assert_eq!(served.flush(60 * PAGE, PAGE), Ok(()), "of another range");
    assert!(served.region.stats().is_failing);
    // Other pages come and go; these cannot leave.
    for page in 20..1000 {
        assert_eq!(served.read(page * PAGE, 4096).unwrap(), numbered(page));
    }
    for page in 0..20 {
        assert_eq!(served.read(page * PAGE, 4096).unwrap(), [9; 4096]);
    }
    store.heal(true);
    assert_eq!(served.flush(0, 20 * PAGE), Ok(()));
    assert!(!served.region.stats().is_failing);
    let file = std::fs::read(scratch.file()).unwrap();
    assert!(file[..20 * 4096].iter().all(|byte| *byte == 9));
}

#[test]
fn a_region_that_cannot_be_written_refuses_writes_to_other_pages_and_can_be_read() {
    let scratch = Scratch::new("refusing").with_numbered_pages(400);
    let store = faulty(Faults { seed: 1, write_errors_permille: 1000, ..Faults::default() });
    let served = Served::new(&scratch, PagesConfig { store: store.clone(), ..scratch.config(64) }, None);
    let frames = served.pages.frame_count();
    served.write(3 * PAGE, &[9; 4096]).unwrap();
    assert_eq!(served.flush(3 * PAGE, PAGE), Err(AccessError::Flush));
    for page in [5, 300] {
        assert_eq!(served.write(page * PAGE, &[8; 4096]), Err(AccessError::NoSpace), "page {page}");
    }
    served.write(3 * PAGE, &[7; 4096]).unwrap();
    for page in 10..10 + 2 * frames {
        assert_eq!(served.read(page * PAGE, 4096).unwrap(), numbered(page));
    }
    assert_eq!(served.write(12 * PAGE, &[8; 8]), Err(AccessError::NoSpace), "a page in memory");
    store.heal(true);
    let started = Instant::now();
    while served.region.stats().is_failing {
        assert!(started.elapsed() < Duration::from_secs(10), "it is tried again");
        std::thread::sleep(Duration::from_millis(10));
    }
    served.write(5 * PAGE, &[8; 4096]).unwrap();
    assert_eq!(served.flush(0, 400 * PAGE), Ok(()));
    let file = std::fs::read(scratch.file()).unwrap();
    assert!(file[3 * 4096..4 * 4096].iter().all(|byte| *byte == 7));
}

#[test]
fn pages_that_can_never_be_written_keep_no_others_from_being_tried_again() {
    let scratch = Scratch::new("never-written").with_numbered_pages(600);
    let store = faulty(Faults { seed: 1, write_errors_permille: 1000, ..Faults::default() });
    let shorter = Served::new(&scratch, PagesConfig { store: store.clone(), ..scratch.config(2048) }, None);
    let file = BackingFile::open(&scratch.0.join("other"), Some(8 * PAGE)).unwrap();
    let other = Served::of(shorter.pages.clone(), file);
    for page in 0..600 {
        shorter.write(page * PAGE, &[9; 4096]).unwrap();
    }
    for page in 0..8 {
        other.write(page * PAGE, &[9; 4096]).unwrap();
    }
    std::fs::File::options().write(true).open(scratch.file()).unwrap().set_len(0).unwrap();
    assert_eq!(shorter.flush(0, 600 * PAGE), Err(AccessError::Flush));
    assert_eq!(other.flush(0, 8 * PAGE), Err(AccessError::Flush));
    store.heal(true);
    let started = Instant::now();
    while other.region.stats().is_failing {
        assert!(started.elapsed() < Duration::from_secs(20), "the other region's pages are tried again");
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(shorter.region.stats().is_failing);
}

/// A region all of whose frames are dirty, and whose file cannot be written any more.
fn full_of_unwritable_pages(scratch: &Scratch) -> Served {
    let store = faulty(Faults { seed: 1, write_errors_permille: 1000, ..Faults::default() });
    let served = Served::new(scratch, PagesConfig { store: store.clone(), ..scratch.config(64) }, None);
    let frames = served.pages.frame_count();
    loop {
        store.heal(true);
        for page in 0..frames {
            served.write(page * PAGE, &[9; 4096]).unwrap();
        }
        store.heal(false);
        // A write that had begun before may have succeeded.
        std::thread::sleep(Duration::from_millis(20));
        if served.pages.stats().dirty_bytes == frames * PAGE {
            return served;
        }
        while served.region.stats().is_failing {
            store.heal(true);
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

#[test]
fn accesses_fail_when_no_page_can_leave_because_none_can_be_written() {
    let scratch = Scratch::new("starving").with_numbered_pages(400);
    let served = full_of_unwritable_pages(&scratch);
    let started = Instant::now();
    assert_eq!(served.read(300 * PAGE, 8), Err(AccessError::NoSpace));
    assert!(started.elapsed() > Duration::from_millis(900), "a failure that passes is waited for");
    assert_eq!(served.read(0, 8).unwrap(), [9; 8], "in memory");
}

/// A small file system in memory. It is unmounted at the end.
struct SmallMemory(PathBuf);

impl SmallMemory {
    /// `None` without the right to mount.
    fn mount(at: PathBuf, size: &str) -> Option<SmallMemory> {
        std::fs::create_dir(&at).unwrap();
        let mount =
            Command::new("mount").args(["-t", "tmpfs", "-o", size, "tmpfs"]).arg(&at).output().unwrap();
        mount.status.success().then_some(SmallMemory(at))
    }
}

impl Drop for SmallMemory {
    fn drop(&mut self) {
        Command::new("umount").arg("--lazy").arg(&self.0).status().unwrap();
    }
}

#[test]
fn accesses_fail_while_the_system_has_no_memory_for_the_frames_and_succeed_when_it_has() {
    let scratch = Scratch::new("memory").with_numbered_pages(64);
    let Some(memory) = SmallMemory::mount(scratch.0.join("memory"), "size=8m") else {
        return eprintln!("no right to mount a file system: not tested");
    };
    let config = PagesConfig { directory: Some(memory.0.clone()), ..scratch.config(512) };
    let served = Served::new(&scratch, config, None);
    let others = memory.0.join("others");
    let filled = std::fs::write(&others, vec![1; 8 << 20]);
    assert_eq!(filled.unwrap_err().kind(), std::io::ErrorKind::StorageFull);
    let read = served.begin_read(0, 8);
    let started = Instant::now();
    while read.outcome().is_none() {
        served.pages.advance();
        assert!(started.elapsed() < Duration::from_secs(20), "the access ends");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(read.outcome(), Some(Err(AccessError::Device)));
    assert!(started.elapsed() > Duration::from_millis(900), "a lack that passes is waited for");
    std::fs::remove_file(&others).unwrap();
    assert_eq!(served.read(0, 4096).unwrap(), numbered(0));
}

#[test]
fn a_region_ends_although_accesses_wait_and_nothing_can_be_written() {
    let scratch = Scratch::new("stuck").with_numbered_pages(400);
    let served = full_of_unwritable_pages(&scratch);
    let frames = served.pages.frame_count();
    let waiting = served.begin_read(300 * PAGE, 4096);
    drop(served);
    assert_eq!(waiting.outcome(), Some(Err(AccessError::Fault)));
    // What could not be written is in the pool.
    let served = Served::new(&scratch, scratch.config(64), None);
    assert_eq!(served.region.stats().pages_adopted, frames);
    assert_eq!(served.read((frames - 1) * PAGE, 4096).unwrap(), [9; 4096]);
}

#[test]
fn after_a_failed_sync_all_pages_are_written_again() {
    let scratch = Scratch::new("unsynced").with_numbered_pages(64);
    let store = faulty(Faults { seed: 1, sync_errors_permille: 1000, ..Faults::default() });
    let served = Served::new(&scratch, PagesConfig { store: store.clone(), ..scratch.config(128) }, None);
    for page in [3, 4] {
        served.write(page * PAGE, &[9; 4096]).unwrap();
    }
    assert_eq!(served.flush(3 * PAGE, 2 * PAGE), Err(AccessError::Flush));
    assert!(served.region.stats().is_failing);
    let written = served.region.stats().pages_written;
    store.heal(true);
    // Each by the flush that it belongs to.
    for page in [3, 4, 3] {
        assert_eq!(served.flush(page * PAGE, PAGE), Ok(()));
    }
    assert_eq!(served.region.stats().pages_written, written + 2);
    assert!(!served.region.stats().is_failing);
}

#[test]
fn no_flush_succeeds_after_a_failed_sync_of_pages_that_have_left_memory() {
    let scratch = Scratch::new("unsynced-left").with_numbered_pages(400);
    let store = faulty(Faults { seed: 1, sync_errors_permille: 1000, ..Faults::default() });
    let served = Served::new(&scratch, PagesConfig { store: store.clone(), ..scratch.config(64) }, None);
    let has_left = || !served.try_read(3 * PAGE, &mut [0; 8]);
    let leave = || {
        let started = Instant::now();
        while !has_left() {
            served.pages.evict(64);
            assert!(started.elapsed() < Duration::from_secs(10), "it leaves");
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    // Durable pages may leave.
    store.heal(true);
    served.write(3 * PAGE, &[8; 4096]).unwrap();
    served.flush(3 * PAGE, PAGE).unwrap();
    leave();
    store.heal(false);
    assert_eq!(served.flush(0, PAGE), Err(AccessError::Flush));
    store.heal(true);
    assert_eq!(served.flush(3 * PAGE, PAGE), Ok(()));
    // Page 3 is in the file, and not on the device.
    served.write(3 * PAGE, &[9; 4096]).unwrap();
    leave();
    store.heal(false);
    assert_eq!(served.flush(0, PAGE), Err(AccessError::Flush));
    store.heal(true);
    for page in [3, 0] {
        assert_eq!(served.flush(page * PAGE, PAGE), Err(AccessError::Flush), "page {page}");
    }
    assert!(served.region.stats().is_failing);
    assert_eq!(served.read(3 * PAGE, 4096).unwrap(), [9; 4096], "accesses go on");
    served.write(3 * PAGE, &[7; 8]).unwrap();
}

#[test]
fn no_flush_succeeds_after_a_failed_sync_of_pages_that_an_earlier_process_has_written() {
    let scratch = Scratch::new("unsynced-before").with_numbered_pages(64);
    let served = Served::new(&scratch, scratch.config(64), None);
    served.write(3 * PAGE, &[9; 4096]).unwrap();
    drop(served);
    let store = faulty(Faults { seed: 1, sync_errors_permille: 1000, ..Faults::default() });
    let served = Served::new(&scratch, PagesConfig { store: store.clone(), ..scratch.config(64) }, None);
    assert_eq!(served.region.stats().pages_adopted, 1);
    assert_eq!(served.flush(0, PAGE), Err(AccessError::Flush));
    store.heal(true);
    assert_eq!(
        served.flush(3 * PAGE, PAGE),
        Err(AccessError::Flush),
        "it may have been written before, and not synced"
    );
}

/// The kernel reports a failure once, to one of them, and it may concern the pages of both.
#[test]
fn a_sync_that_fails_fails_the_flushes_that_run_beside_it() {
    let scratch = Scratch::new("unsynced-both").with_numbered_pages(64);
    let plan = "[[fault]]\nkind = \"slow-storage\"\ndelay_us_min = 1000000\ndelay_us_max = 1000001\noperation = \"sync\"\n\
        [[fault]]\nkind = \"failing-storage\"\noperation = \"sync\"\nfor_operations = 1\n";
    let plan = Arc::new(terrace_faults::Faults::new(FaultPlan::parse(plan).unwrap(), "test"));
    let served = Served::new(&scratch, PagesConfig { faults: Some(plan), ..scratch.config(128) }, None);
    for page in [3, 4] {
        served.write(page * PAGE, &[9; 4096]).unwrap();
    }
    let begin = |page| served.region.flush(served.range(page * PAGE, PAGE), &served.waker).unwrap();
    let first = begin(3);
    let started = Instant::now();
    while served.region.stats().flushes == 0 {
        assert!(started.elapsed() < Duration::from_secs(10), "it begins");
        std::thread::sleep(Duration::from_millis(1));
    }
    let second = begin(4);
    assert_eq!([first, second].map(|flush| served.wait(&flush)), [Err(AccessError::Flush); 2]);
    assert_eq!([3, 4].map(|page| served.flush(page * PAGE, PAGE)), [Ok(()); 2]);
}

#[test]
fn a_fault_plan_delays_reads_and_fails_write_backs_and_syncs() {
    let scratch = Scratch::new("planned").with_numbered_pages(100);
    let plan = "[[fault]]\nkind = \"slow-storage\"\ndelay_us_min = 20000\ndelay_us_max = 20001\noperation = \"read\"\n\
        [[fault]]\nkind = \"failing-storage\"\noperation = \"write-back\"\nfor_operations = 1\n\
        [[fault]]\nkind = \"failing-storage\"\noperation = \"sync\"\nfor_operations = 1\n";
    let plan = Arc::new(terrace_faults::Faults::new(FaultPlan::parse(plan).unwrap(), "test"));
    let config = PagesConfig { faults: Some(plan.clone()), ..scratch.config(128) };
    let served = Served::new(&scratch, config, None);
    let started = Instant::now();
    assert_eq!(served.read(0, 4096).unwrap(), numbered(0));
    assert!(started.elapsed() >= Duration::from_millis(20));
    served.write(3 * PAGE, &[9; 4096]).unwrap();
    let flush = || served.flush(3 * PAGE, 8);
    assert_eq!([flush(), flush(), flush()], [Err(AccessError::Flush), Err(AccessError::Flush), Ok(())]);
    assert_eq!(plan.counts().get(Injected::StorageFailed), 2);
}

#[test]
fn pages_beyond_the_end_of_a_truncated_file_fail_and_the_others_do_not() {
    let scratch = Scratch::new("truncated").with_numbered_pages(600);
    let served = Served::new(&scratch, scratch.config(64), None);
    served.write(590 * PAGE, &[1; 4096]).unwrap();
    let file = std::fs::File::options().write(true).open(scratch.file()).unwrap();
    file.set_len(300 * PAGE + 10).unwrap();
    for page in [300, 301, 500] {
        assert_eq!(served.read(page * PAGE, 8), Err(AccessError::Fault), "page {page}");
    }
    assert_eq!(served.read(298 * PAGE, 8192).unwrap()[..8], 299u64.to_ne_bytes());
    assert_eq!(served.read(590 * PAGE, 8).unwrap(), [1; 8], "in memory");
    assert_eq!(served.flush(590 * PAGE, 8), Err(AccessError::Flush), "a write would make the file longer");
    assert_eq!(file.metadata().unwrap().len(), 300 * PAGE + 10);
    file.set_len(600 * PAGE).unwrap();
    assert_eq!(served.flush(590 * PAGE, 8), Ok(()));
    assert_eq!(served.read(500 * PAGE, 8).unwrap(), [0; 8]);
}

#[test]
fn pages_before_the_end_of_a_truncated_file_are_written_although_those_behind_them_cannot_be() {
    let scratch = Scratch::new("truncated-run").with_numbered_pages(64);
    let served = Served::new(&scratch, scratch.config(128), None);
    for page in 10..20 {
        served.write(page * PAGE, &[9; 4096]).unwrap();
    }
    let file = std::fs::File::options().write(true).open(scratch.file()).unwrap();
    file.set_len(15 * PAGE).unwrap();
    assert_eq!(served.flush(10 * PAGE, 10 * PAGE), Err(AccessError::Flush));
    let content = std::fs::read(scratch.file()).unwrap();
    assert_eq!(content.len() as u64, 15 * PAGE);
    assert!(content[10 * 4096..].iter().all(|byte| *byte == 9), "the run was not begun");
    assert_eq!(served.pages.stats().dirty_bytes, 5 * PAGE);
}

/// Reports half of the bytes of the first write, and fails all others.
#[derive(Debug)]
struct Half {
    inner: Arc<dyn WriteDevice>,
    has_written: AtomicBool,
}

impl WriteDevice for Half {
    fn write(&self, file: BorrowedFd<'_>, offset: u64, run: &FrameRun) -> Result<usize, Errno> {
        match self.has_written.swap(true, Ordering::Relaxed) {
            false => Ok(self.inner.write(file, offset, run)? / 2),
            true => Err(Errno::NOSPC),
        }
    }

    fn sync(&self, file: BorrowedFd<'_>) -> Result<(), Errno> {
        self.inner.sync(file)
    }
}

#[derive(Debug)]
struct Halves;

impl StoreFactory for Halves {
    fn open(&self, depth: u32, pool: BorrowedFd<'_>) -> std::io::Result<Store> {
        let Store { reads, writes } = Best.open(depth, pool)?;
        Ok(Store { reads, writes: Arc::new(Half { inner: writes, has_written: AtomicBool::new(false) }) })
    }
}

#[test]
fn what_was_written_of_a_run_that_fails_is_clean() {
    let scratch = Scratch::new("half").with_numbered_pages(64);
    let served = Served::new(&scratch, PagesConfig { store: Arc::new(Halves), ..scratch.config(128) }, None);
    for page in 10..20 {
        served.write(page * PAGE, &[9; 4096]).unwrap();
    }
    assert_eq!(served.flush(10 * PAGE, 10 * PAGE), Err(AccessError::Flush));
    assert_eq!(served.pages.stats().dirty_bytes, 5 * PAGE);
    assert_eq!(served.flush(10 * PAGE, 5 * PAGE), Ok(()));
    assert_eq!(served.flush(15 * PAGE, PAGE), Err(AccessError::Flush));
}

/// A device with pages that cannot be written.
#[derive(Debug)]
struct Bad {
    inner: Arc<dyn WriteDevice>,
    pages: Range<u64>,
    /// The time that an error takes.
    delay: Duration,
}

impl WriteDevice for Bad {
    fn write(&self, file: BorrowedFd<'_>, offset: u64, run: &FrameRun) -> Result<usize, Errno> {
        let (first, end) = (offset / PAGE, (offset + run.len_bytes() as u64).div_ceil(PAGE));
        if end <= self.pages.start || first >= self.pages.end {
            return self.inner.write(file, offset, run);
        }
        std::thread::sleep(self.delay);
        Err(Errno::IO)
    }

    fn sync(&self, file: BorrowedFd<'_>) -> Result<(), Errno> {
        self.inner.sync(file)
    }
}

#[derive(Debug)]
struct WithBadPages(Range<u64>, Duration);

impl StoreFactory for WithBadPages {
    fn open(&self, depth: u32, pool: BorrowedFd<'_>) -> std::io::Result<Store> {
        let Store { reads, writes } = Best.open(depth, pool)?;
        Ok(Store { reads, writes: Arc::new(Bad { inner: writes, pages: self.0.clone(), delay: self.1 }) })
    }
}

#[test]
fn pages_on_both_sides_of_one_that_cannot_be_written_are_written() {
    let scratch = Scratch::new("bad-page").with_numbered_pages(64);
    let config = PagesConfig { store: Arc::new(WithBadPages(13..14, Duration::ZERO)), ..scratch.config(128) };
    let served = Served::new(&scratch, config, None);
    for page in 10..20 {
        served.write(page * PAGE, &[9; 4096]).unwrap();
    }
    assert_eq!(served.flush(10 * PAGE, 10 * PAGE), Err(AccessError::Flush));
    assert_eq!(served.pages.stats().dirty_bytes, PAGE);
    let content = std::fs::read(scratch.file()).unwrap();
    for page in 10..20 {
        let bytes = &content[page as usize * 4096..][..4096];
        assert_eq!(bytes == [9; 4096], page != 13, "page {page}");
    }
    assert_eq!(served.flush(14 * PAGE, 6 * PAGE), Ok(()));
}

#[test]
fn a_device_whose_errors_take_long_is_not_waited_for_with_each_page() {
    let scratch = Scratch::new("slow-errors").with_numbered_pages(200);
    let delay = Duration::from_millis(200);
    let served = |bad: Range<u64>| {
        let config = PagesConfig { store: Arc::new(WithBadPages(bad, delay)), ..scratch.config(256) };
        let served = Served::new(&scratch, config, None);
        for page in 0..64 {
            served.write(page * PAGE, &[9; 4096]).unwrap();
        }
        let began = Instant::now();
        assert_eq!(served.flush(0, 64 * PAGE), Err(AccessError::Flush));
        assert!(began.elapsed() < 30 * delay, "a flush took {:?}", began.elapsed());
        served
    };
    drop(served(0..64));
    // Pages that can be written are, though those before them cannot.
    let some = served(0..8);
    let began = Instant::now();
    while some.pages.stats().dirty_bytes > 8 * PAGE {
        assert!(began.elapsed() < Duration::from_secs(20), "{:?}", some.pages.stats());
        std::thread::sleep(delay);
    }
}

#[test]
fn files_that_cannot_be_regions_are_refused_with_a_reason() {
    let scratch = Scratch::new("refused");
    let path = scratch.file();
    std::fs::remove_file(&path).ok();
    let open = |size| BackingFile::open(&path, size);
    let refusal = |path: &str, size| BackingFile::open(path.as_ref(), size).unwrap_err().to_string();
    assert!(open(None).unwrap_err().to_string().contains("does not exist"));
    assert!(open(Some(1000)).unwrap_err().to_string().contains("multiple of 4096"));
    assert!(open(Some(0)).unwrap_err().to_string().contains("at least one page"));
    assert!(open(Some(1 << 62)).unwrap_err().to_string().contains("cannot have"));
    assert!(refusal("/tmp", Some(4096)).contains("cannot open"));
    assert!(refusal("/dev/null", Some(4096)).contains("neither"));
    assert!(refusal("/proc/version", None).contains("version"));
    assert!(refusal("/no/such/dir/x", Some(4096)).contains("cannot open"));
    let first = open(Some(1 << 20)).unwrap();
    let mode = std::fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o077, 0, "a new file is its owner's alone: {mode:o}");
    assert!(open(Some(1 << 20)).unwrap_err().to_string().contains("this process has it locked"));
    drop(first);
    assert_eq!(open(None).unwrap().len_bytes(), 1 << 20);
    assert_eq!(open(Some(2 << 20)).unwrap().len_bytes(), 2 << 20, "grows");
    assert_eq!(open(Some(1 << 20)).unwrap().len_bytes(), 1 << 20, "its beginning");
}
