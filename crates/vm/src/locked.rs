//! Memory that never leaves.

use std::hint::black_box;
use std::io;

use rustix::mm::{MlockAllFlags, mlockall};
use terrace_shm::SharedRegistry;

use crate::maps::{self, EVERYTHING, Mapping};

/// Bytes of the heap that are free when it is locked.
const HEAP_RESERVE_BYTES: usize = 8 << 20;

/// Has the C library's allocator keep in one heap what the process frees. To be called before threads start.
pub fn keep_heap() {
    let settings = [(libc::M_ARENA_MAX, 1), (libc::M_MMAP_MAX, 0), (libc::M_TRIM_THRESHOLD, -1)];
    for (setting, value) in settings {
        // SAFETY: a setting of the allocator, which cannot fail for these.
        unsafe { libc::mallopt(setting, value) };
    }
}

/// Locks all memory of the process, and what will be mapped. Pages of what is mapped are there when this returns, except those of shared
/// registries (68 MiB each, of which a process touches the records of its own regions and queue pairs). Others come when they are touched.
/// After [`keep_heap`], later allocations find 8 MiB there: a heap that grows would have to wait for memory.
///
/// # Errors
/// The list of mappings cannot be read, or the system's: without CAP_IPC_LOCK and with a lower limit (`RLIMIT_MEMLOCK`), and the memory
/// is not locked then.
pub fn lock_memory() -> io::Result<()> {
    drop(black_box(Vec::<u8>::with_capacity(HEAP_RESERVE_BYTES)));
    mlockall(MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT)?;
    let registry = format!("/memfd:{} (deleted)", SharedRegistry::NAME.to_string_lossy());
    let is_dense =
        |mapping: &Mapping| mapping.path() != registry.as_bytes() && mapping.rights() != libc::PROT_NONE;
    for mapping in maps::list(EVERYTHING)?.into_iter().filter(is_dense) {
        let range = mapping.range();
        // As `mlockall`, this passes over what has no memory of its own, such as the end of a file's last page, and over what has been
        // unmapped since.
        // SAFETY: changes no byte, and nothing about who may access which.
        unsafe { libc::syscall(libc::SYS_mlock, range.addr, range.len) };
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;
    use std::os::fd::AsFd;

    use rustix::fs::{MemfdFlags, memfd_create};
    use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous};

    use super::*;

    const LEN: usize = 4 << 20;

    /// Bytes that are in memory of the mapping at an address.
    fn resident_bytes(addr: usize) -> usize {
        let list = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let begin = list.find(&format!("{addr:x}-")).expect("a mapping begins there");
        let resident = list[begin..].lines().find_map(|line| line.strip_prefix("Rss:")).unwrap();
        resident.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
    }

    fn map(name: Option<&CStr>) -> usize {
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        let addr = match name {
            // SAFETY: a new mapping, wherever the kernel has room.
            None => unsafe { mmap_anonymous(std::ptr::null_mut(), LEN, rights, MapFlags::PRIVATE) },
            Some(name) => {
                let file = memfd_create(name, MemfdFlags::CLOEXEC).unwrap();
                rustix::fs::ftruncate(&file, LEN as u64).unwrap();
                // SAFETY: a new mapping, wherever the kernel has room.
                unsafe { mmap(std::ptr::null_mut(), LEN, rights, MapFlags::SHARED, file.as_fd(), 0) }
            }
        };
        addr.unwrap() as usize
    }

    #[test]
    fn all_memory_is_there_but_untouched_records() {
        let (private, shared, registry) = (map(None), map(Some(c"shared")), map(Some(SharedRegistry::NAME)));
        if lock_memory().is_err() {
            eprintln!("not tested: this user may not lock so much memory (ulimit -l)");
            return;
        }
        let future = map(Some(c"shared"));
        assert_eq!([private, shared].map(resident_bytes), [LEN; 2]);
        assert_eq!([registry, future].map(resident_bytes), [0; 2]);
        // SAFETY: memory of this test, which nobody else accesses.
        unsafe { std::ptr::write_volatile(registry as *mut u8, 1) };
        assert_eq!(resident_bytes(registry), 4096);
        rustix::mm::munlockall().unwrap();
    }
}
