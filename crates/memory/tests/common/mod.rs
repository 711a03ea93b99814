//! Memory of all kinds, which the tests unmap or protect under a registration.
#![allow(dead_code, reason = "no test uses all of it")]

pub mod finally;
pub mod pager;
pub mod slow_page;
pub mod units;

use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd};
use std::sync::atomic::{AtomicU64, Ordering};

use terrace_memory::{Access, Accessor, Limits, Region, RegionSpec, Registry};

pub const PAGE: usize = 4096;
pub const PD: u32 = 3;
pub const QPN: u32 = 0x11;

/// Every access right.
pub const ALL: Access = Access::LOCAL_WRITE
    .union(Access::REMOTE_WRITE)
    .union(Access::REMOTE_READ)
    .union(Access::REMOTE_ATOMIC)
    .union(Access::MW_BIND)
    .union(Access::FLUSH_GLOBAL)
    .union(Access::FLUSH_PERSISTENT);

pub fn registry() -> Registry {
    Registry::new(Limits::default()).expect("signal handlers")
}

pub fn peer() -> Accessor {
    Accessor::remote(PD, QPN)
}

pub fn local() -> Accessor {
    Accessor::local(PD, QPN)
}

/// Unmapped on drop.
pub struct Mapping {
    pub addr: u64,
    pub len: usize,
}

impl Mapping {
    /// Maps at an address of its own, far below the addresses that the kernel chooses: a hole that a test makes there
    /// stays a hole, whatever other threads map meanwhile. The sanitizers leave this range of addresses free.
    fn new(len: usize, protection: i32, flags: i32, fd: i32) -> std::io::Result<Mapping> {
        static NEXT: AtomicU64 = AtomicU64::new(0x5710_0000_0000);
        const GRAIN: u64 = 64 << 20;
        let place = NEXT.fetch_add((len as u64).next_multiple_of(GRAIN) + GRAIN, Ordering::Relaxed);
        let flags = flags | libc::MAP_FIXED_NOREPLACE;
        // SAFETY: a new mapping at addresses that are free; the kernel checks the rest.
        let addr = unsafe { libc::mmap(place as *mut _, len, protection, flags, fd, 0) };
        if addr == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error());
        }
        Ok(Mapping { addr: addr as u64, len })
    }

    /// Zeroed private memory.
    pub fn anonymous(len: usize) -> Mapping {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        Mapping::new(len, libc::PROT_READ | libc::PROT_WRITE, flags, -1).expect("mmap")
    }

    /// Memory that a forked child shares.
    pub fn shared_anonymous(len: usize) -> Mapping {
        let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
        Mapping::new(len, libc::PROT_READ | libc::PROT_WRITE, flags, -1).expect("mmap")
    }

    /// Explicit huge pages; an error where the machine has none free.
    pub fn huge(len: usize) -> std::io::Result<Mapping> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_HUGETLB;
        Mapping::new(len, libc::PROT_READ | libc::PROT_WRITE, flags, -1)
    }

    pub fn file(file: &File, len: usize, flags: i32) -> Mapping {
        Mapping::new(len, libc::PROT_READ | libc::PROT_WRITE, flags, file.as_raw_fd()).expect("mmap")
    }

    pub fn protect(&self, offset: usize, len: usize, protection: i32) {
        // SAFETY: changes only this mapping, of which Rust knows nothing.
        let result = unsafe { libc::mprotect((self.addr + offset as u64) as *mut _, len, protection) };
        assert_eq!(result, 0);
    }

    pub fn unmap(&self, offset: usize, len: usize) {
        // SAFETY: removes only this mapping, of which Rust knows nothing.
        assert_eq!(unsafe { libc::munmap((self.addr + offset as u64) as *mut _, len) }, 0);
    }

    /// The bytes, which must be mapped.
    #[expect(clippy::mut_from_ref, reason = "the memory is the kernel's, this is only its address")]
    pub fn bytes(&self) -> &mut [u8] {
        // SAFETY: the tests make sure that it is mapped, and access it from one thread at a time.
        unsafe { std::slice::from_raw_parts_mut(self.addr as *mut u8, self.len) }
    }

    pub fn register(&self, registry: &Registry, access: Access) -> Region {
        registry.register(&RegionSpec::new(PD, self.addr, self.len as u64, access)).expect("registration")
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: no references into it remain; parts that are unmapped already do not matter.
        unsafe { libc::munmap(self.addr as *mut _, self.len) };
    }
}

/// An unnamed file in memory.
pub fn memfd(len: usize, flags: u32) -> std::io::Result<File> {
    // SAFETY: the name is a C string; the descriptor is new and ours.
    let file = unsafe {
        let fd = libc::memfd_create(c"terrace-test".as_ptr(), flags);
        if fd < 0 {
            return Err(std::io::Error::last_os_error());
        }
        File::from_raw_fd(fd)
    };
    file.set_len(len as u64)?;
    Ok(file)
}

/// An unnamed file on disk.
pub fn disk_file(len: usize) -> File {
    let path = std::env::temp_dir().join(format!(
        "terrace-test-{}-{:?}",
        std::process::id(),
        std::thread::current().id()
    ));
    let file = File::options().read(true).write(true).create(true).truncate(true).open(&path).expect("file");
    std::fs::remove_file(&path).expect("unlink");
    file.set_len(len as u64).expect("size");
    file
}

/// Runs a test's body in a child process and returns how the child ended: runs this very test again with an
/// environment variable set. Returns `None` in the child, which then runs the body.
pub fn in_child(test: &str) -> Option<std::process::Output> {
    const MARK: &str = "TERRACE_TEST_CHILD";
    if std::env::var_os(MARK).is_some_and(|value| value == test) {
        allow_cores(false);
        return None;
    }
    let output = std::process::Command::new(std::env::current_exe().expect("own path"))
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env(MARK, test)
        .current_dir(std::env::temp_dir())
        .output()
        .expect("child");
    Some(output)
}

/// Lets this process write a core file when a signal kills it, as far as its hard limit permits, or forbids it.
pub fn allow_cores(allow: bool) {
    // SAFETY: fills a local structure, and changes a limit of this process.
    unsafe {
        let mut limit: libc::rlimit = std::mem::zeroed();
        libc::getrlimit(libc::RLIMIT_CORE, &mut limit);
        limit.rlim_cur = if allow { limit.rlim_max } else { 0 };
        libc::setrlimit(libc::RLIMIT_CORE, &limit);
    }
}
