//! Regions over shared mappings of files, whose pages are in the page cache.

mod common;

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{PAGE, Scratch, log, numbered};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use terrace_faults::{FaultPlan, Faults};
use terrace_hostmem::{AtomicOp, HostRange};
use terrace_memory::{AccessError, Pager, Transfer, Translation, Waker};
use terrace_pages::RegionStats;
use terrace_pages::cached::{CachedConfig, CachedFiles, CachedRegion, CachedSource};

/// The time after which something that must happen is not expected any more.
const PATIENCE: Duration = Duration::from_secs(60);

/// A program's mapping of a file, and its region.
struct Program {
    map: HostRange,
    file: File,
    files: Arc<CachedFiles>,
    region: Arc<CachedRegion>,
    waker: Waker,
}

impl Drop for Program {
    fn drop(&mut self) {
        self.files.remove(&self.region);
        // SAFETY: our own mapping, which nobody uses any more.
        let _ = unsafe { libc::munmap(self.map.addr as *mut _, self.map.len as usize) };
    }
}

fn map(file: &File, len: u64) -> HostRange {
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping, wherever the kernel has room.
    let addr = unsafe {
        libc::mmap(std::ptr::null_mut(), len as usize, rights, libc::MAP_SHARED, file.as_raw_fd(), 0)
    };
    assert_ne!(addr, libc::MAP_FAILED);
    HostRange { addr: addr as u64, len }
}

fn open(scratch: &Scratch) -> File {
    File::options().read(true).write(true).create(true).truncate(false).open(scratch.file()).unwrap()
}

fn source(scratch: &Scratch, map: HostRange) -> CachedSource {
    CachedSource {
        file: Arc::new(OwnedFd::from(open(scratch))),
        file_offset: 0,
        map,
        is_writable: true,
        is_swap_file: false,
    }
}

impl Program {
    /// Maps the file, has the program do something with its mapping, and registers it.
    fn new(scratch: &Scratch, pages: u64, config: CachedConfig, before: impl FnOnce(HostRange)) -> Program {
        log();
        let file = open(scratch);
        let status = file.metadata().unwrap();
        if status.is_file() && status.len() < pages * PAGE {
            file.set_len(pages * PAGE).unwrap();
        }
        let map = map(&file, pages * PAGE);
        before(map);
        let files = CachedFiles::open(config).unwrap();
        let region = files.add(source(scratch, map)).unwrap();
        Program { map, file, files, region, waker: Arc::new(|| {}) }
    }

    fn range(&self, offset: u64, len: u64) -> HostRange {
        HostRange { addr: self.map.addr + offset, len }
    }

    fn wait(&self, transfer: &Arc<dyn Transfer>) -> Result<(), AccessError> {
        let since = Instant::now();
        loop {
            self.files.advance();
            if let Some(outcome) = transfer.outcome() {
                return outcome;
            }
            assert!(since.elapsed() < PATIENCE, "no outcome: {transfer:?}, {:?}", self.files.stats());
            std::thread::sleep(Duration::from_micros(20));
        }
    }

    fn retried(&self, begin: impl Fn() -> Result<Arc<dyn Transfer>, AccessError>) -> Arc<dyn Transfer> {
        loop {
            match begin() {
                Err(AccessError::NotReady) => _ = self.files.advance(),
                other => return other.unwrap(),
            }
        }
    }

    /// As the NIC does: from memory what is present, else by the pager.
    fn read(&self, offset: u64, len: usize) -> Result<Vec<u8>, AccessError> {
        let mut out = vec![0; len];
        let range = self.range(offset, len as u64);
        let hit = self.region.read_present(range, &mut out);
        self.region.count(range, hit.is_some());
        if let Some(result) = hit {
            return result.map(|()| out);
        }
        let transfer = self.retried(|| Pager::read(&*self.region, range, &self.waker));
        self.wait(&transfer)?;
        transfer.read(0, &mut out).map(|()| out)
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), AccessError> {
        let addr = self.map.addr + offset;
        match Translation::write(&*self.region, addr, data) {
            Some(result) => result,
            None => self.wait(&self.retried(|| Pager::write(&*self.region, addr, data, &self.waker))),
        }
    }

    fn add(&self, offset: u64, number: u64) -> u64 {
        let (addr, op) = (self.map.addr + offset, AtomicOp::FetchAdd { add: number });
        if let Some(before) = Translation::atomic(&*self.region, addr, op) {
            return before.unwrap();
        }
        let transfer = self.retried(|| Pager::atomic(&*self.region, addr, op, &self.waker));
        self.wait(&transfer).unwrap();
        let mut before = [0; 8];
        transfer.read(0, &mut before).unwrap();
        u64::from_ne_bytes(before)
    }

    fn flush(&self, offset: u64, len: u64) -> Result<(), AccessError> {
        self.wait(&self.region.flush(self.range(offset, len), &self.waker)?)
    }

    fn stats(&self) -> RegionStats {
        self.files.stats().regions.remove(0)
    }

    fn is_present(&self, page: u64) -> bool {
        Translation::is_present(&*self.region, self.range(page * PAGE, PAGE))
    }

    /// The number of pages of the file in the page cache.
    fn cached(&self) -> u64 {
        let mut pages = vec![0u8; (self.map.len / PAGE) as usize];
        // SAFETY: one byte for each page.
        let result = unsafe {
            libc::mincore(self.map.addr as *mut _, self.map.len as usize, pages.as_mut_ptr().cast())
        };
        assert_eq!(result, 0);
        pages.into_iter().filter(|page| page & 1 != 0).count() as u64
    }

    fn until(&self, what: &str, condition: impl Fn() -> bool) {
        let since = Instant::now();
        while !condition() {
            let stats = self.files.stats();
            assert!(since.elapsed() < PATIENCE, "{what}: {} pages are cached, {stats:?}", self.cached());
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// The two traits have methods of one name.
trait ReadPresent {
    fn read_present(&self, range: HostRange, out: &mut [u8]) -> Option<Result<(), AccessError>>;
}

impl ReadPresent for CachedRegion {
    fn read_present(&self, range: HostRange, out: &mut [u8]) -> Option<Result<(), AccessError>> {
        Translation::read(self, range, out)
    }
}

fn config(pages: u64) -> CachedConfig {
    CachedConfig::new(pages * PAGE)
}

/// Stores to each page, so that the kernel allocates large folios where it does.
fn fill(map: HostRange) {
    for page in 0..map.len / PAGE {
        let start = (map.addr + page * PAGE) as *mut u64;
        // SAFETY: within the mapping, which only this thread uses.
        (0..512).for_each(|index| unsafe { start.add(index).write_volatile(page + 1) });
    }
}

/// No process may have mapped the file.
fn drop_from_page_cache(scratch: &Scratch) {
    open(scratch).sync_all().unwrap();
    rustix::fs::fadvise(open(scratch), 0, None, rustix::fs::Advice::DontNeed).unwrap();
}

fn mapping_count() -> usize {
    std::fs::read_to_string("/proc/self/maps").unwrap().lines().count()
}

#[test]
fn a_program_that_goes_through_its_memory_in_order_finds_pages_read_ahead() {
    let scratch = Scratch::new("cached-ahead").with_numbered_pages(4096);
    drop_from_page_cache(&scratch);
    let program = Program::new(&scratch, 4096, CachedConfig::new(16 << 20), |_| {});
    let touch = |page: u64| {
        // SAFETY: a page of the mapping.
        unsafe { std::ptr::read_volatile((program.map.addr + page * PAGE) as *const u8) }
    };
    (0..64).for_each(|page| _ = touch(page * 32));
    std::thread::sleep(Duration::from_millis(300));
    assert!(program.stats().resident_bytes <= 64 * PAGE, "nothing follows pages that are not adjacent");
    let since = Instant::now();
    let mut page = 2049;
    while program.stats().resident_bytes < (64 + page - 2049 + 32) * PAGE {
        assert!(since.elapsed() < PATIENCE && page < 4096, "page {page}: {:?}", program.stats());
        touch(page);
        page += 1;
        std::thread::sleep(Duration::from_micros(100));
    }
    // It does not go on by itself.
    std::thread::sleep(Duration::from_millis(300));
    let resident_pages = program.stats().resident_bytes / PAGE;
    assert!(resident_pages < 64 + page - 2049 + 300, "{resident_pages} after {page}");
}

#[test]
fn a_miss_brings_the_page_that_serves_the_next_hits() {
    let scratch = Scratch::new("cached-miss").with_numbered_pages(512);
    drop_from_page_cache(&scratch);
    let program = Program::new(&scratch, 512, config(256), |_| ());
    for page in [3, 400, 77] {
        assert_eq!(program.read(page * PAGE, 4096), Ok(numbered(page)));
        assert!(program.is_present(page));
    }
    assert_eq!(program.stats().pages_read, 3);
    let before = program.stats();
    assert_eq!(program.read(400 * PAGE + 100, 8), Ok(numbered(400)[100..108].to_vec()));
    let stats = program.stats();
    assert_eq!((stats.hits, stats.pages_read), (before.hits + 1, before.pages_read), "a hit reads nothing");
    // Across pages, and from the middle of one.
    let read = program.read(10 * PAGE - 8, 3 * 4096).unwrap();
    assert_eq!((&read[..8], &read[8..16]), (&numbered(9)[..8], &numbered(10)[..8]));
}

#[test]
fn a_page_that_nothing_was_stored_to_needs_no_read() {
    let scratch = Scratch::new("cached-hole");
    let program = Program::new(&scratch, 256, config(128), |_| ());
    assert_eq!(program.read(5 * PAGE, 8), Ok(vec![0; 8]));
    program.write(70 * PAGE + 16, &[3; 8]).unwrap();
    assert!(program.is_present(5) && program.is_present(70));
    let stats = program.stats();
    assert_eq!((stats.pages_read, stats.pages_placed), (0, 2));
    // What is no hole any more is read.
    program.files.evict_group(&program.region, 70);
    assert_eq!(program.read(70 * PAGE + 8, 16).unwrap(), [[0; 8], [3; 8]].concat());
    assert_eq!(program.stats().pages_read, 1);
}

#[test]
fn many_pages_stay_within_the_budget_and_cut_no_mapping() {
    let scratch = Scratch::new("cached-budget").with_numbered_pages(4096);
    let program = Program::new(&scratch, 4096, config(512), |_| ());
    let mappings = mapping_count();
    for page in (0..4096).map(|index| index * 2741 % 4096) {
        assert_eq!(program.read(page * PAGE + 8, 8), Ok(numbered(page)[..8].to_vec()));
    }
    program.until("the budget", || program.cached() <= 512);
    assert!(program.cached() > 400, "most of the budget is used: {} pages", program.cached());
    assert!(mapping_count() <= mappings + 8, "{} mappings, {mappings} before", mapping_count());
}

#[test]
fn a_mapping_filled_before_it_is_registered_shrinks_to_the_budget() {
    let scratch = Scratch::new("cached-filled");
    let program = Program::new(&scratch, 8192, config(1024), fill);
    program.until("the budget", || program.cached() <= 1024);
    assert_eq!(program.read(8000 * PAGE, 8), Ok(8001u64.to_ne_bytes().to_vec()));
    let mut byte = [0; 8];
    program.file.read_exact_at(&mut byte, 17 * PAGE).unwrap();
    assert_eq!(byte, 18u64.to_ne_bytes(), "what left was written back");
}

#[test]
fn large_folios_of_which_some_pages_are_hot_leave_in_part() {
    let scratch = Scratch::new("cached-folios");
    let program = Program::new(&scratch, 4096, config(1024), fill);
    for _ in 0..8 {
        for page in (0..4096).step_by(8) {
            assert_eq!(program.read(page * PAGE, 8), Ok((page + 1).to_ne_bytes().to_vec()));
        }
    }
    program.until("the budget", || program.cached() <= 1024);
    let hot = (0..4096).step_by(8).filter(|page| program.is_present(*page)).count();
    assert!(hot > 400, "{hot} of 512 hot pages are present");
}

#[test]
fn what_the_program_touches_by_itself_counts() {
    let scratch = Scratch::new("cached-touched").with_numbered_pages(4096);
    let program = Program::new(&scratch, 4096, config(512), |_| ());
    fill(program.map);
    program.until("the budget", || program.cached() <= 512);
    assert_eq!(program.read(9 * PAGE, 4096), Ok(numbered(9)));
    let stats = program.stats();
    assert!(stats.pages_adopted > 512, "{stats:?}");
}

/// As an allocator does without notice, when memory that was registered is freed.
#[test]
fn memory_that_is_mapped_in_the_place_of_a_swap_file_is_not_counted() {
    let scratch = Scratch::new("cached-replaced");
    let file = open(&scratch);
    file.set_len(512 * PAGE).unwrap();
    let map = map(&file, 512 * PAGE);
    let files = CachedFiles::open(config(1024)).unwrap();
    let region = files.add(CachedSource { is_swap_file: true, ..source(&scratch, map) }).unwrap();
    let program = Program { map, file, files, region, waker: Arc::new(|| {}) };
    fill(map);
    program.until("the pages are found", || program.stats().resident_bytes == map.len);
    let (rights, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: the test's mapping, to which nobody has a reference.
    let addr =
        unsafe { libc::mmap(map.addr as *mut _, map.len as usize, rights, flags | libc::MAP_FIXED, -1, 0) };
    assert_eq!(addr as u64, map.addr);
    fill(map);
    program.file.sync_all().unwrap();
    rustix::fs::fadvise(&program.file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    program.until("the file's pages have left", || program.stats().resident_bytes == 0);
}

#[test]
fn stores_of_the_program_and_writes_to_the_file_are_read() {
    let scratch = Scratch::new("cached-coherent");
    let program = Program::new(&scratch, 256, config(128), |_| ());
    program.write(5 * PAGE + 3, b"written").unwrap();
    // SAFETY: within the mapping, which only this thread uses.
    let seen = unsafe { std::slice::from_raw_parts((program.map.addr + 5 * PAGE + 3) as *const u8, 7) };
    assert_eq!(seen, b"written");
    program.file.write_all_at(b"by file", 6 * PAGE).unwrap();
    assert_eq!(program.read(6 * PAGE, 7), Ok(b"by file".to_vec()));
    program.files.evict_group(&program.region, 6);
    assert!(!program.is_present(5));
    program.file.write_all_at(b"WRITTEN", 5 * PAGE + 3).unwrap();
    assert_eq!(program.read(5 * PAGE + 3, 7), Ok(b"WRITTEN".to_vec()));
    assert_eq!((program.add(64, 5), program.add(64, 2), program.add(64, 0)), (0, 5, 7));
    program.flush(0, 256 * PAGE).unwrap();
}

#[test]
fn a_failed_write_does_not_extend_a_truncated_file() {
    let scratch = Scratch::new("cached-truncated").with_numbered_pages(256);
    let program = Program::new(&scratch, 256, config(128), |_| ());
    assert!(program.read(200 * PAGE, 8).is_ok(), "it is present, then cut off");
    program.file.set_len(100 * PAGE + 5).unwrap();
    for page in [200, 150] {
        assert_eq!(program.write(page * PAGE, &[1; 4096]), Err(AccessError::Fault), "page {page}");
        assert_eq!(program.read(page * PAGE, 8), Err(AccessError::Fault), "page {page}");
    }
    assert_eq!(program.file.metadata().unwrap().len(), 100 * PAGE + 5);
    assert_eq!(program.read(99 * PAGE, 8), Ok(numbered(99)[..8].to_vec()));
    program.file.set_len(256 * PAGE).unwrap();
    program.write(200 * PAGE, &[7; 4096]).unwrap();
    assert_eq!(program.read(200 * PAGE, 4096), Ok(vec![7; 4096]));
}

#[test]
fn pages_that_cannot_be_written_back_stay_and_no_flush_succeeds() {
    let scratch = Scratch::new("cached-lost");
    let plan = "[[fault]]\nkind = \"failing-storage\"\noperation = \"write-back\"\nfor_operations = 3";
    let faults = Arc::new(Faults::new(FaultPlan::parse(plan).unwrap(), "test"));
    let program = Program::new(&scratch, 256, CachedConfig { faults: Some(faults), ..config(128) }, |_| ());
    program.write(16 * PAGE, &[9; 4096]).unwrap();
    program.files.evict_group(&program.region, 16);
    assert!(program.is_present(16), "it could not be written");
    assert_eq!(program.flush(0, PAGE), Err(AccessError::Flush));
    program.until("the repair", || program.flush(0, PAGE).is_ok());
    program.files.evict_group(&program.region, 16);
    assert!(!program.is_present(16));
    assert_eq!(program.read(16 * PAGE, 4096), Ok(vec![9; 4096]));
}

#[test]
fn accesses_do_not_wait_for_ever_while_nothing_can_be_written_back() {
    let scratch = Scratch::new("cached-starved");
    let plan = "[[fault]]\nkind = \"failing-storage\"\noperation = \"write-back\"";
    let faults = Arc::new(Faults::new(FaultPlan::parse(plan).unwrap(), "test"));
    let program = Program::new(&scratch, 256, CachedConfig { faults: Some(faults), ..config(64) }, |_| ());
    let results: Vec<_> = (0..80).map(|page| program.write(page * PAGE, &[9; 4096])).collect();
    assert!(
        results.starts_with(&[Ok(()); 50]) && results.ends_with(&[Err(AccessError::Device)]),
        "{results:?}"
    );
    assert_eq!(program.read(7 * PAGE, 4096), Ok(vec![9; 4096]), "what is in memory is served");
}

#[test]
fn a_full_disk_refuses_writes_only() {
    let disk = Scratch::new("cached-full");
    let mount = Command::new("mount").args(["-t", "tmpfs", "-o", "size=256k", "tmpfs"]).arg(&disk.0).output();
    if !mount.is_ok_and(|output| output.status.success()) {
        eprintln!("no right to mount a file system: not tried");
        return;
    }
    {
        let program = Program::new(&disk, 256, config(128), |_| ());
        let results: Vec<_> = (0..256).map(|page| program.write(page * PAGE, &[5; 4096])).collect();
        assert!(results.contains(&Ok(())) && results.contains(&Err(AccessError::NoSpace)), "{results:?}");
        assert_eq!(program.read(0, 8), Ok(vec![5; 8]));
    }
    Command::new("umount").arg("--lazy").arg(&disk.0).status().unwrap();
}

#[test]
fn reads_that_fail_once_do_not_keep_others_waiting() {
    let scratch = Scratch::new("cached-errors").with_numbered_pages(256);
    let plan = "[[fault]]\nkind = \"failing-storage\"\noperation = \"read\"\nfor_operations = 2";
    let faults = Arc::new(Faults::new(FaultPlan::parse(plan).unwrap(), "test"));
    let program = Program::new(&scratch, 256, CachedConfig { faults: Some(faults), ..config(128) }, |_| ());
    program.files.evict_group(&program.region, 0);
    let results = [0, 0, 0].map(|page| program.read(page * PAGE, 8).map(|_| ()));
    assert_eq!(results, [Err(AccessError::Device), Err(AccessError::Device), Ok(())]);
}

#[test]
fn accesses_of_several_threads_with_eviction_in_between_are_exact() {
    const PAGES: u64 = 1024;
    let scratch = Scratch::new("cached-stress");
    let program = Program::new(&scratch, PAGES, config(256), |_| ());
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut random = StdRng::seed_from_u64(1);
            while !is_over.load(Ordering::Relaxed) {
                program.files.evict_group(&program.region, random.random_range(0..PAGES));
            }
        });
        let threads: Vec<_> = (0..3)
            .map(|thread| {
                let program = &program;
                // Each thread has its own third of each page.
                scope.spawn(move || {
                    let mut random = StdRng::seed_from_u64(7 + thread);
                    let mut wanted = vec![0u64; PAGES as usize];
                    for round in 1..6000u64 {
                        let page = random.random_range(0..PAGES);
                        let offset = page * PAGE + thread * 1024;
                        match random.random_range(0..3) {
                            0 => {
                                program.write(offset, &round.to_ne_bytes().repeat(100)).unwrap();
                                wanted[page as usize] = round;
                            }
                            1 => {
                                let before = program.add(offset, 0);
                                assert_eq!(before, wanted[page as usize], "page {page}");
                            }
                            _ => {
                                let read = program.read(offset, 800).unwrap();
                                assert_eq!(
                                    read,
                                    wanted[page as usize].to_ne_bytes().repeat(100),
                                    "page {page}"
                                );
                            }
                        }
                    }
                })
            })
            .collect();
        let results: Vec<_> = threads.into_iter().map(|thread| thread.join()).collect();
        is_over.store(true, Ordering::Relaxed);
        results.into_iter().for_each(|result| result.unwrap());
    });
}

#[test]
fn a_region_ends_while_accesses_are_under_way() {
    let scratch = Scratch::new("cached-end").with_numbered_pages(2048);
    let program = Program::new(&scratch, 2048, config(64), |_| ());
    let transfers: Vec<_> = (0..512)
        .map(|page| {
            program
                .retried(|| Pager::read(&*program.region, program.range(page * 4 * PAGE, 8), &program.waker))
        })
        .collect();
    program.files.remove(&program.region);
    for transfer in transfers {
        assert!(matches!(transfer.outcome(), Some(Ok(()) | Err(AccessError::Fault))), "{transfer:?}");
    }
    assert_eq!(program.read(0, 8), Err(AccessError::Fault));
    program.region.make_ordinary();
    assert_eq!(program.read(2000 * PAGE, 4096), Ok(numbered(2000)));
}

/// The flush waits for that of another region. Meanwhile its own region is removed, and a third one gets the slot.
#[test]
fn a_flush_of_a_removed_region_fails_and_flushes_no_other_one() {
    let scratch = Scratch::new("cached-slots");
    let plan = "[[fault]]\nkind = \"slow-storage\"\ndelay_us_min = 300000\ndelay_us_max = 300001\noperation = \"sync\"";
    let faults = Arc::new(Faults::new(FaultPlan::parse(plan).unwrap(), "test"));
    let program = Program::new(&scratch, 256, CachedConfig { faults: Some(faults), ..config(128) }, |_| ());
    let add = |pages| program.files.add(source(&scratch, map(&program.file, pages * PAGE))).unwrap();
    let flush = |region: &CachedRegion| {
        let first = HostRange { addr: region.range().addr, len: PAGE };
        region.flush(first, &program.waker).unwrap()
    };
    let removed = add(256);
    let before = flush(&program.region);
    program.until("the first flush begins", || program.stats().flushes == 1);
    let waiting = flush(&removed);
    program.files.remove(&removed);
    let next = add(1);
    assert_eq!([&before, &waiting].map(|flush| program.wait(flush)), [Ok(()), Err(AccessError::Fault)]);
    assert_eq!(program.files.stats().regions.iter().map(|region| region.flushes).sum::<u64>(), 1);
    program.files.remove(&next);
}

/// The region is a loop device over a file of a small file system in memory, which is full.
#[test]
fn a_failed_write_back_fails_the_flush_although_the_program_was_told_of_it() {
    let disk = Scratch::new("cached-reported");
    let run = |program: &str, arguments: &[&str], path: &Path| {
        let output = Command::new(program).args(arguments).arg(path).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    if run("mount", &["-t", "tmpfs", "-o", "size=1m", "tmpfs"], &disk.0).is_none() {
        return eprintln!("no right to mount a file system: not tried");
    }
    let (image, filler) = (disk.0.join("image"), disk.0.join("filler"));
    File::create(&image).unwrap().set_len(64 * PAGE).unwrap();
    if let Some(device) = run("losetup", &["--find", "--show"], &image) {
        std::os::unix::fs::symlink(&device, disk.file()).unwrap();
        let program = Program::new(&disk, 64, config(128), |_| ());
        // The kernel detaches the device when its last descriptor closes.
        run("losetup", &["--detach"], device.as_ref()).unwrap();
        let full = File::create(&filler).unwrap();
        assert!((0..).any(|page| full.write_all_at(&[1; 4096], page * PAGE).is_err()));
        program.write(16 * PAGE, &[9; 4096]).unwrap();
        assert!(program.file.sync_all().is_err());
        for page in [0, 16] {
            assert_eq!(program.flush(page * PAGE, PAGE), Err(AccessError::Flush), "page {page}");
        }
        std::fs::remove_file(&filler).unwrap();
        drop(full);
        program.until("the repair", || program.flush(16 * PAGE, PAGE).is_ok());
        let mut stored = [0; 4096];
        File::open(&image).unwrap().read_exact_at(&mut stored, 16 * PAGE).unwrap();
        assert_eq!(stored, [9; 4096]);
    } else {
        eprintln!("no right to make loop devices: not tried");
    }
    run("umount", &["--lazy"], &disk.0).unwrap();
}
