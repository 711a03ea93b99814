//! The files behind a program's memory, which same-host peers map to access it: shared memory, anonymous files, files
//! that the program has mapped. Memory of the program's allocator has no file.

use std::io;
use std::os::fd::OwnedFd;

use terrace_hostmem::{HostRange, PAGE_BYTES};
use terrace_nic::Backings;
use terrace_shm::{BackedBy, is_scarcity};
use terrace_vm::maps::{self, Run};

use crate::paged;
use crate::paged::backing::{self, NoBacking, Purpose};

/// Finds the files in the kernel's list of mappings.
pub struct ProgramFiles;

impl Backings for ProgramFiles {
    fn find(&self, range: HostRange, writable: bool) -> io::Result<Option<BackedBy>> {
        let run = match maps::find(range) {
            Ok(Ok(run)) => run,
            Err(error) if is_scarcity(&error) => return Err(error),
            _ => return Ok(None),
        };
        if !paged::may_be_shared(range, run.file) {
            return Ok(None);
        }
        // Closing another descriptor of the file would release the program's POSIX locks on it.
        if (writable && !run.writable) || backing::is_locked_by_us(run.file.inode()) {
            return Ok(None);
        }
        match backing::open(&run, Purpose::Mapping) {
            Ok((file, file_len)) => Ok(backed_by(file.duplicate()?, file_len, &run, range)),
            Err(NoBacking::Unreachable(error)) if is_scarcity(&error) => Err(error),
            Err(reason) => {
                tracing::debug!(%reason, ?range, "peers on this host cannot map the file");
                Ok(None)
            }
        }
    }
}

/// The part of a file with the pages of a range; `None` if the file ends before the range does.
fn backed_by(file: OwnedFd, file_len: u64, run: &Run, range: HostRange) -> Option<BackedBy> {
    let pages = whole_pages(range)?;
    let offset = run.file_offset + (pages.addr - run.range.addr);
    // Peers recover from faults, but slowly.
    let is_there = offset.checked_add(pages.len)? <= file_len.next_multiple_of(PAGE_BYTES);
    is_there.then_some(BackedBy { file, offset, range: pages })
}

/// The pages that contain a range.
fn whole_pages(range: HostRange) -> Option<HostRange> {
    let addr = range.addr - range.addr % PAGE_BYTES;
    let end = range.addr.checked_add(range.len)?.checked_next_multiple_of(PAGE_BYTES)?;
    Some(HostRange { addr, len: end - addr })
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::FileExt;

    use super::*;

    fn map(file: Option<&std::fs::File>, flags: libc::c_int, len: usize) -> u64 {
        let (fd, rights) = (file.map_or(-1, AsRawFd::as_raw_fd), libc::PROT_READ | libc::PROT_WRITE);
        // SAFETY: a new mapping, wherever the kernel has room.
        let addr = unsafe { libc::mmap(std::ptr::null_mut(), len, rights, flags, fd, 0) };
        assert_ne!(addr, libc::MAP_FAILED);
        addr as u64
    }

    fn anonymous_file(pages: usize) -> std::fs::File {
        // SAFETY: a string that ends.
        let fd = unsafe { libc::memfd_create(c"test".as_ptr(), libc::MFD_CLOEXEC) };
        // SAFETY: just created.
        let mut file: std::fs::File = unsafe { std::os::fd::FromRawFd::from_raw_fd(fd) };
        (0..pages).for_each(|page| file.write_all(&[page as u8; 4096]).expect("written"));
        file
    }

    #[test]
    fn shared_memory_is_found_by_any_part_of_it() {
        let file = anonymous_file(8);
        let addr = map(Some(&file), libc::MAP_SHARED, 8 * 4096);
        let backed = ProgramFiles
            .find(HostRange { addr: addr + 5000, len: 9000 }, true)
            .expect("looked for")
            .expect("found");
        assert_eq!((backed.offset, backed.range), (4096, HostRange { addr: addr + 4096, len: 3 * 4096 }));
        let mut byte = [0];
        std::fs::File::from(backed.file).read_exact_at(&mut byte, backed.offset).expect("read");
        assert_eq!(byte, [1]);
    }

    #[test]
    fn private_memory_has_no_file() {
        let file = anonymous_file(1);
        let private = map(Some(&file), libc::MAP_PRIVATE, 4096);
        let nameless = map(None, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, 4096);
        for addr in [private, nameless] {
            assert!(
                ProgramFiles.find(HostRange { addr, len: 4096 }, false).is_ok_and(|found| found.is_none())
            );
        }
    }

    #[test]
    fn a_file_shorter_than_the_range_is_not_used() {
        let file = anonymous_file(2);
        let addr = map(Some(&file), libc::MAP_SHARED, 4 * 4096);
        assert!(
            ProgramFiles.find(HostRange { addr, len: 2 * 4096 }, true).is_ok_and(|found| found.is_some())
        );
        assert!(
            ProgramFiles.find(HostRange { addr, len: 3 * 4096 }, true).is_ok_and(|found| found.is_none())
        );
    }
}
