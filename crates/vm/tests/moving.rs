//! Private memory moves into a swap file and back, while the program uses it.
//!
//! Run as root: other users may not have threads wait (see [`Refusal::Privilege`]).

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use terrace_hostmem::{HostRange, PAGE_BYTES};
use terrace_vm::{
    BACKED_MIN_BYTES, Change, Refusal, SwapError, SwapSpace, Swapped, discard, has_swapped, maps,
};

const MIB: u64 = 1 << 20;

/// Private memory, for as long as this lives.
struct Memory(HostRange);

impl Memory {
    fn new(len: u64) -> Memory {
        let (rights, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping, wherever the kernel has room.
        let addr =
            unsafe { libc::mmap(null_mut(), len as usize, rights, flags | libc::MAP_NORESERVE, -1, 0) };
        assert_ne!(addr, libc::MAP_FAILED);
        Memory(HostRange { addr: addr as u64, len })
    }

    /// The word at the beginning of a page.
    fn word(&self, page: u64) -> &AtomicU64 {
        assert!(page < self.0.len / PAGE_BYTES);
        // SAFETY: aligned memory of this object, which is accessed by atomics alone.
        unsafe { AtomicU64::from_ptr((self.0.addr + page * PAGE_BYTES) as *mut u64) }
    }

    fn pages(&self) -> u64 {
        self.0.len / PAGE_BYTES
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: own memory.
        unsafe { libc::munmap(self.0.addr as *mut _, self.0.len as usize) };
    }
}

/// A directory on a disk.
fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory")
}

fn back(memory: &Memory, directory: &Path) -> Swapped {
    SwapSpace::open(directory).expect("a disk").back(memory.0, |_| false).expect("moved")
}

/// Bytes of memory that the swap file takes on the disk or in the page cache.
fn allocated(swapped: &Swapped) -> u64 {
    let file = File::from(swapped.open_file().expect("opened"));
    file.sync_all().expect("written");
    file.metadata().expect("there").blocks() * 512
}

/// Runs `body` in a forked child, and returns its exit status.
fn in_child(body: impl FnOnce() -> i32) -> i32 {
    // SAFETY: the child calls only what is safe after a fork of a process with threads: no allocation, no lock.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let status = body();
        // SAFETY: takes a number.
        unsafe { libc::_exit(status) };
    }
    let mut status = 0;
    // SAFETY: a child of this process.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    status
}

#[test]
fn the_bytes_stay_on_the_way_there_and_back() {
    let (memory, directory) = (Memory::new(200 * MIB), directory());
    for page in (0..memory.pages()).step_by(3) {
        memory.word(page).store(page + 1, Ordering::Relaxed);
    }
    let expect = |when: &str| {
        for page in 0..memory.pages() {
            let wanted = if page % 3 == 0 { page + 1 } else { 0 };
            assert_eq!(memory.word(page).load(Ordering::Relaxed), wanted, "page {page} {when}");
        }
    };
    let swapped = back(&memory, directory.path());
    assert_eq!(swapped.pages(), memory.0);
    let pages = memory.pages().div_ceil(3);
    assert!(
        (pages * PAGE_BYTES..(pages + 200) * PAGE_BYTES).contains(&allocated(&swapped)),
        "the file is sparse"
    );
    expect("in the file");
    // A hole is filled, and a page that is there changes.
    memory.word(1).store(7, Ordering::Relaxed);
    memory.word(3).store(8, Ordering::Relaxed);
    swapped.end().expect("mapped");
    assert_eq!((memory.word(1).load(Ordering::Relaxed), memory.word(3).load(Ordering::Relaxed)), (7, 8));
    memory.word(1).store(0, Ordering::Relaxed);
    memory.word(3).store(4, Ordering::Relaxed);
    expect("in memory again");
}

#[test]
fn stores_and_system_calls_of_other_threads_are_not_lost() {
    let directory = directory();
    let (memory, is_over) = (Memory::new(130 * MIB), AtomicBool::new(false));
    let (memory, is_over) = (&memory, &is_over);
    let counts = std::thread::scope(|scope| {
        let storing: Vec<_> = (0..2)
            .map(|seed| {
                scope.spawn(move || {
                    let mut counts = vec![0u64; memory.pages() as usize];
                    let mut page = seed;
                    while !is_over.load(Ordering::Relaxed) {
                        page = (page * 31 + 17) % memory.pages();
                        memory.word(page).fetch_add(1, Ordering::Relaxed);
                        counts[page as usize] += 1;
                    }
                    counts
                })
            })
            .collect();
        let calling = scope.spawn(move || {
            let mut zeros = File::open("/dev/zero").expect("opened");
            let mut page = 1;
            while !is_over.load(Ordering::Relaxed) {
                page = (page * 29 + 5) % memory.pages();
                // SAFETY: bytes of the page behind its word, which only this thread accesses.
                let bytes = unsafe {
                    std::slice::from_raw_parts_mut((memory.0.addr + page * PAGE_BYTES + 64) as *mut u8, 8)
                };
                zeros.read_exact(bytes).expect("the kernel waits, too");
            }
        });
        let space = SwapSpace::open(directory.path()).expect("a disk");
        std::thread::sleep(std::time::Duration::from_millis(20));
        let swapped = space.back(memory.0, |_| false).expect("moved");
        std::thread::sleep(std::time::Duration::from_millis(20));
        swapped.end().expect("mapped");
        std::thread::sleep(std::time::Duration::from_millis(20));
        is_over.store(true, Ordering::Relaxed);
        calling.join().expect("no error");
        storing.into_iter().map(|thread| thread.join().expect("no error")).collect::<Vec<_>>()
    });
    for page in 0..memory.pages() {
        let stored: u64 = counts.iter().map(|counts| counts[page as usize]).sum();
        assert_eq!(memory.word(page).load(Ordering::Relaxed), stored, "page {page}");
    }
}

#[test]
fn children_do_not_share_the_memory() {
    let (memory, directory) = (Memory::new(2 * MIB), directory());
    memory.word(5).store(1, Ordering::Relaxed);
    let swapped = back(&memory, directory.path());
    let status = in_child(|| memory.word(5).load(Ordering::Relaxed) as i32);
    assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGSEGV, "{status:#x}");
    swapped.end().expect("mapped");
    let status = in_child(|| {
        memory.word(5).store(9, Ordering::Relaxed);
        memory.word(5).load(Ordering::Relaxed) as i32
    });
    assert_eq!((libc::WEXITSTATUS(status), memory.word(5).load(Ordering::Relaxed)), (9, 1));
}

/// Another thread maps other memory in the place of page after page, as a program does that has deregistered them.
#[test]
fn what_is_mapped_while_memory_becomes_private_again_stays() {
    let directory = directory();
    for round in 0..20 {
        let memory = Memory::new(4 * MIB);
        let pages = memory.pages();
        (0..pages).for_each(|page| memory.word(page).store(page + 1, Ordering::Relaxed));
        let swapped = back(&memory, directory.path());
        let mapped = AtomicU64::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for page in 0..pages / 2 {
                    let _change = Change::begin();
                    map_anew(HostRange { addr: memory.0.addr + page * PAGE_BYTES, len: PAGE_BYTES });
                    memory.word(page).store(u64::MAX, Ordering::Relaxed);
                    mapped.store(page, Ordering::Relaxed);
                }
            });
            while mapped.load(Ordering::Relaxed) < round * 20 {}
            swapped.end().expect("mapped");
        });
        for page in 0..pages {
            let wanted = if page < pages / 2 { u64::MAX } else { page + 1 };
            assert_eq!(memory.word(page).load(Ordering::Relaxed), wanted, "page {page}, round {round}");
        }
        assert!(!has_swapped(memory.0), "all of it is private, round {round}");
    }
}

/// Maps memory without a file in the place of what is mapped at a range.
fn map_anew(range: HostRange) {
    let (rights, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: memory of this process, whose bytes nobody needs.
    let result = unsafe {
        libc::mmap(range.addr as *mut _, range.len as usize, rights, flags | libc::MAP_FIXED, -1, 0)
    };
    assert_ne!(result, libc::MAP_FAILED);
}

#[test]
fn what_is_given_up_after_it_was_private_again_is_zeros_and_children_keep_theirs() {
    let (memory, directory) = (Memory::new(2 * MIB), directory());
    (0..memory.pages()).for_each(|page| memory.word(page).store(7, Ordering::Relaxed));
    back(&memory, directory.path()).end().expect("mapped");
    memory.word(3).store(8, Ordering::Relaxed);
    let pages =
        |first, count| HostRange { addr: memory.0.addr + first * PAGE_BYTES, len: count * PAGE_BYTES };
    let words = || [0, 1, 2, 3, 4, 5].map(|page| memory.word(page).load(Ordering::Relaxed));
    let status = in_child(|| {
        // SAFETY: memory of this test.
        unsafe { discard(pages(4, 1), libc::MADV_DONTNEED) }.expect("given up");
        (words() == [7, 7, 7, 8, 0, 7]).into()
    });
    assert_eq!(libc::WEXITSTATUS(status), 1, "the child has its own");
    let (mut child_is_there, mut i_am_there) = std::io::pipe().expect("a pipe");
    let (mut is_given_up, mut give_up) = std::io::pipe().expect("a pipe");
    let status = std::thread::scope(|scope| {
        let child = scope.spawn(|| {
            in_child(|| {
                i_am_there.write_all(b"x").expect("told");
                is_given_up.read_exact(&mut [0]).expect("told");
                (words() == [7, 7, 7, 8, 7, 7]).into()
            })
        });
        child_is_there.read_exact(&mut [0]).expect("told");
        for (range, advice) in [(pages(1, 1), libc::MADV_FREE), (pages(3, 2), libc::MADV_DONTNEED)] {
            // SAFETY: memory of this test.
            unsafe { discard(range, advice) }.expect("given up");
        }
        assert_eq!(words(), [7, 0, 7, 0, 0, 7]);
        give_up.write_all(b"x").expect("told");
        child.join().expect("no error")
    });
    assert_eq!(libc::WEXITSTATUS(status), 1, "a child keeps what its parent gives up");
    memory.word(4).store(5, Ordering::Relaxed);
    assert_eq!(words(), [7, 0, 7, 0, 5, 7]);
}

#[test]
fn the_file_has_what_is_stored() {
    let (memory, directory) = (Memory::new(2 * MIB), directory());
    let swapped = back(&memory, directory.path());
    memory.word(5).store(77, Ordering::Relaxed);
    let file = File::from(swapped.open_file().expect("opened"));
    let mut word = [0; 8];
    file.read_exact_at(&mut word, 5 * PAGE_BYTES).expect("read");
    assert_eq!(u64::from_ne_bytes(word), 77);
    assert!(swapped.is_among(&maps::files().expect("listed")));
    drop(memory);
    assert!(!swapped.is_among(&maps::files().expect("listed")), "the memory is unmapped");
    swapped.end().expect("nothing to do");
}

/// The memory, which the program has made twice as long, and perhaps moved.
fn lengthened(memory: Memory) -> Memory {
    let old = std::mem::ManuallyDrop::new(memory);
    let (addr, len) = (old.0.addr as *mut _, old.0.len as usize);
    // SAFETY: memory of this test, to which no reference exists.
    let moved = unsafe { libc::mremap(addr, len, 2 * len, libc::MREMAP_MAYMOVE) };
    assert_ne!(moved, libc::MAP_FAILED);
    Memory(HostRange { addr: moved as u64, len: 2 * len as u64 })
}

#[test]
fn memory_that_the_program_moves_and_lengthens_stays_its_own() {
    let (memory, directory) = (Memory::new(2 * MIB), directory());
    (0..memory.pages()).for_each(|page| memory.word(page).store(page + 1, Ordering::Relaxed));
    let swapped = back(&memory, directory.path());
    let memory = lengthened(memory);
    let expect = || {
        for page in 0..memory.pages() {
            let wanted = if page < 512 { page + 1 } else { 0 };
            assert_eq!(memory.word(page).load(Ordering::Relaxed), wanted, "page {page}");
        }
    };
    expect();
    swapped.end().expect("mapped");
    expect();
    assert_eq!(in_child(|| (memory.word(1).load(Ordering::Relaxed) != 2).into()), 0, "a child has it");
}

#[test]
fn what_is_given_up_is_zeros_wherever_the_program_has_moved_it() {
    let (memory, directory) = (Memory::new(2 * MIB), directory());
    (0..memory.pages()).for_each(|page| memory.word(page).store(7, Ordering::Relaxed));
    let swapped = back(&memory, directory.path());
    let memory = lengthened(memory);
    assert!(has_swapped(memory.0));
    let pages =
        |first, count| HostRange { addr: memory.0.addr + first * PAGE_BYTES, len: count * PAGE_BYTES };
    for (range, advice) in [(pages(1, 1), libc::MADV_FREE), (pages(3, 2), libc::MADV_DONTNEED)] {
        // SAFETY: memory of this test.
        unsafe { discard(range, advice) }.expect("given up");
    }
    let words = |first, count| (first..first + count).map(|page| memory.word(page).load(Ordering::Relaxed));
    assert!(words(0, 7).eq([7, 0, 7, 0, 0, 7, 7]));
    let unaligned = HostRange { addr: memory.0.addr + 1, len: 1 };
    // SAFETY: memory of this test.
    let refused = unsafe { discard(unaligned, libc::MADV_DONTNEED) }.expect_err("not whole pages");
    assert_eq!(refused.raw_os_error(), Some(libc::EINVAL));
    swapped.end().expect("mapped");
}

#[test]
fn a_file_in_the_place_of_a_swap_file_keeps_its_bytes() {
    let (memory, directory) = (Memory::new(3 * MIB), directory());
    (0..memory.pages()).for_each(|page| memory.word(page).store(7, Ordering::Relaxed));
    let swapped = back(&memory, directory.path());
    let other = tempfile::tempfile_in(directory.path()).expect("a file");
    other.write_all_at(&[9; MIB as usize], 0).expect("written");
    let (rights, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_FIXED);
    let inner = HostRange { addr: memory.0.addr + MIB, len: MIB };
    // SAFETY: a part of this test's memory. The C library of tests is not interposed.
    let mapped =
        unsafe { libc::mmap(inner.addr as *mut _, MIB as usize, rights, flags, other.as_raw_fd(), 0) };
    assert_eq!(mapped as u64, inner.addr);
    assert!(!has_swapped(inner) && has_swapped(memory.0));
    // SAFETY: memory of this test.
    unsafe { discard(memory.0, libc::MADV_DONTNEED) }.expect("given up");
    let mut bytes = vec![0; MIB as usize];
    other.read_exact_at(&mut bytes, 0).expect("read");
    assert!(bytes.iter().all(|byte| *byte == 9), "the file has lost bytes");
    assert_eq!([0, 255, 512, 767].map(|page| memory.word(page).load(Ordering::Relaxed)), [0; 4]);
    // SAFETY: memory of this test.
    unsafe { libc::munmap((memory.0.addr + 4 * PAGE_BYTES) as *mut _, PAGE_BYTES as usize) };
    // SAFETY: memory of this test.
    let refused = unsafe { discard(memory.0, libc::MADV_DONTNEED) }.expect_err("there is a gap");
    assert_eq!(refused.raw_os_error(), Some(libc::ENOMEM));
    swapped.end().expect("mapped");
}

#[test]
fn what_cannot_move_stays() {
    let (memory, directory) = (Memory::new(130 * MIB), directory());
    let space = SwapSpace::open(directory.path()).expect("a disk");
    let small = HostRange { addr: memory.0.addr + PAGE_BYTES + 16, len: BACKED_MIN_BYTES - 1 };
    assert!(matches!(space.back(small, |_| false), Err(Refusal::Small)));
    let swapped = space.back(HostRange { len: BACKED_MIN_BYTES, ..small }, |_| false).expect("moved");
    let pages = HostRange { addr: memory.0.addr + PAGE_BYTES, len: BACKED_MIN_BYTES + PAGE_BYTES };
    assert_eq!(swapped.pages(), pages, "with the page that the range ends in");
    assert!(matches!(space.back(memory.0, |_| false), Err(Refusal::NotPrivate)), "a part is a file's");
    swapped.end().expect("mapped");
    let beyond = HostRange { len: memory.0.len + 64 * MIB, ..memory.0 };
    assert!(
        matches!(space.back(beyond, |_| false), Err(Refusal::NotPrivate)),
        "the end is not mapped, or another test's"
    );
    assert!(matches!(
        space.back(HostRange { addr: u64::MAX - MIB, len: u64::MAX }, |_| false),
        Err(Refusal::Small)
    ));
    let mut asked = None;
    let registered = space.back(HostRange { len: BACKED_MIN_BYTES, ..small }, |pages| {
        asked = Some(pages);
        true
    });
    assert!(
        matches!(registered, Err(Refusal::NotPrivate)) && asked.is_none(),
        "it was in a swap file before"
    );
    let other = Memory::new(2 * MIB);
    let part = HostRange { addr: other.0.addr + 16, len: BACKED_MIN_BYTES };
    let registered = space.back(part, |pages| {
        asked = Some(pages);
        true
    });
    assert!(matches!(registered, Err(Refusal::Registered)));
    assert_eq!(
        asked,
        Some(HostRange { addr: other.0.addr, len: BACKED_MIN_BYTES + PAGE_BYTES }),
        "whole pages"
    );
    let local = 0u8;
    let stack = HostRange { addr: std::ptr::from_ref(&local).addr() as u64 - 2 * MIB, len: 2 * MIB };
    assert!(space.back(stack, |_| false).is_err());
}

#[test]
fn a_failure_in_the_middle_leaves_private_memory() {
    let (memory, directory) = (Memory::new(130 * MIB), directory());
    (0..memory.pages()).for_each(|page| memory.word(page).store(page + 1, Ordering::Relaxed));
    // SAFETY: takes a number.
    let other = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC) } as i32;
    assert!(other >= 0, "root may");
    let mut api: [u64; 3] = [0xaa, 0, 0];
    // SAFETY: the structures of UFFDIO_API and UFFDIO_REGISTER.
    unsafe {
        assert_eq!(libc::ioctl(other, 0xc018_aa3f, api.as_mut_ptr()), 0);
        let mut register: [u64; 4] = [memory.0.addr + 129 * MIB, MIB, 1, 0];
        assert_eq!(libc::ioctl(other, 0xc020_aa00, register.as_mut_ptr()), 0);
    }
    let refused = SwapSpace::open(directory.path()).expect("a disk").back(memory.0, |_| false);
    assert!(matches!(refused, Err(Refusal::OtherUserfaultfd)), "{refused:?}");
    // SAFETY: opened above.
    unsafe { libc::close(other) };
    for page in 0..memory.pages() {
        assert_eq!(memory.word(page).load(Ordering::Relaxed), page + 1, "page {page}");
    }
    let status = in_child(|| {
        memory.word(0).store(9, Ordering::Relaxed);
        0
    });
    assert_eq!((status, memory.word(0).load(Ordering::Relaxed)), (0, 1), "children have copies of their own");
}

#[test]
fn a_directory_in_memory_is_refused() {
    assert!(matches!(SwapSpace::open(Path::new("/dev/shm")), Err(SwapError::InMemory { .. })));
    let missing = SwapSpace::open(Path::new("/nowhere/at/all")).expect_err("refused");
    assert!(missing.to_string().contains("/nowhere/at/all"), "{missing}");
}
