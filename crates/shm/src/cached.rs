//! A region of which the owner keeps pages in the page cache, as a same-host peer accesses it: what the owner's page table
//! shows mapped is read from the file, and written to it or to a mapping of it.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;

use terrace_hostmem::{HostRange, PAGE_BYTES};

use crate::page_entry::PageEntry;
use crate::page_table::{AccessCounters, PageEntries};
use crate::source::{BackedBy, Direction, Mapped, Missing};

/// A region of another process whose pages are in the page cache.
///
/// A page that a process has mapped does not leave memory, so pages are mapped only while they are written to. A write
/// to the file needs no mapping, but would extend a file that was truncated meanwhile: only swap files are written so. (A
/// copy by the kernel to the owner's memory, `process_vm_writev`, would dirty a page that may be leaving, without a page
/// fault by which the file system learns of it.) If a page leaves during a copy, the kernel reads it again: the bytes are
/// never wrong.
#[derive(Debug)]
pub struct Cached {
    backed: BackedBy,
    /// For writes, unless the file is a swap file.
    mapped: Option<Mapped>,
    entries: PageEntries,
    counters: AccessCounters,
    counter_count: u32,
}

impl Cached {
    /// Takes the file, and the descriptors of the page table and of the counters. The file's range must be the one that
    /// the table covers.
    ///
    /// # Errors
    /// `InvalidData` when the tables do not fit; the system's.
    pub fn new(
        backed: BackedBy,
        is_swap_file: bool,
        entries: OwnedFd,
        counters: OwnedFd,
        counter_count: u32,
    ) -> io::Result<Cached> {
        let page_count = usize::try_from(backed.range.len.div_ceil(PAGE_BYTES));
        let page_count = page_count.map_err(|_| io::ErrorKind::InvalidData)?;
        let entries = PageEntries::open(entries, page_count)?;
        let counters = AccessCounters::open(counters, counter_count as usize)?;
        let mapped = if is_swap_file { None } else { Some(Mapped::new(&backed)?) };
        if let Some(mapped) = &mapped {
            mapped.advise(backed.range, libc::MADV_RANDOM);
        }
        Ok(Cached { backed, mapped, entries, counters, counter_count })
    }

    /// Drops the mapping.
    pub(crate) fn give_up(&self) {
        if let Some(mapped) = &self.mapped {
            mapped.give_up();
        }
    }

    fn entry(&self, page: u64) -> PageEntry {
        let word = self.entries.get(page as usize);
        word.map_or(PageEntry::default(), |word| PageEntry::from_word(word.load(Ordering::Acquire)))
    }

    /// Copies if all pages are mapped.
    #[inline(never)]
    pub(crate) fn copy(&self, direction: Direction, host: u64, local: HostRange) -> Result<(), Missing> {
        let range = self.backed.range;
        let offset = host.wrapping_sub(range.addr);
        if offset > range.len || local.len > range.len - offset || !self.entries.is_shared() {
            return Err(Missing);
        }
        if local.len == 0 {
            return Ok(());
        }
        let pages = || offset / PAGE_BYTES..(offset + local.len).div_ceil(PAGE_BYTES);
        if !pages().all(|page| self.entry(page).is_readable()) {
            return Err(Missing);
        }
        match (direction, &self.mapped) {
            (Direction::Read, _) | (Direction::Write, None) => {
                self.backed.transfer(direction, self.backed.offset + offset, local)?;
            }
            (Direction::Write, Some(mapped)) => {
                let written = mapped.copy(direction, host, local);
                mapped.advise(HostRange { addr: host, len: local.len }, libc::MADV_DONTNEED);
                written?;
            }
        }
        for slot in pages().map(|page| self.entry(page).frame()) {
            // A page may have left meanwhile, and the other process may have written any number there.
            if slot < self.counter_count {
                self.counters.count(slot as usize);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::{BorrowedFd, FromRawFd};
    use std::os::unix::fs::FileExt;

    use terrace_hostmem::fault;

    use super::*;
    use crate::page_entry::PageState;

    const RANGE: HostRange = HostRange { addr: 0x7000_0000_0000, len: 3 * PAGE_BYTES };

    struct Owner {
        file: File,
        entries: PageEntries,
        counters: AccessCounters,
    }

    fn owner(is_swap_file: bool) -> (Owner, Cached) {
        // SAFETY: a string that ends, and flags.
        let fd = unsafe { libc::memfd_create(c"test".as_ptr(), libc::MFD_CLOEXEC) };
        // SAFETY: just made.
        let file = unsafe { File::from_raw_fd(fd) };
        file.set_len(4 * PAGE_BYTES).expect("memory");
        let (entries, counters) = (PageEntries::new(3).expect("made"), AccessCounters::new(2).expect("made"));
        let sent = |file: BorrowedFd<'_>| file.try_clone_to_owned().expect("a descriptor");
        let copy = file.try_clone().expect("a descriptor").into();
        let backed = BackedBy { file: copy, offset: PAGE_BYTES, range: RANGE };
        let cached = Cached::new(
            backed,
            is_swap_file,
            sent(entries.file().expect("shared")),
            sent(counters.file()),
            2,
        );
        (Owner { file, entries, counters }, cached.expect("opened"))
    }

    fn set(owner: &Owner, page: usize, state: PageState, slot: u32) {
        owner.entries[page].store(PageEntry::new(state, slot, 1).word(), Ordering::Release);
    }

    fn copy(cached: &Cached, direction: Direction, offset: u64, bytes: &mut [u8]) -> Result<(), Missing> {
        let local = HostRange { addr: bytes.as_mut_ptr() as u64, len: bytes.len() as u64 };
        cached.copy(direction, RANGE.addr.wrapping_add(offset), local)
    }

    #[test]
    fn present_pages_are_copied_and_counted() {
        check_copies(false);
    }

    #[test]
    fn present_pages_of_swap_files_are_copied_and_counted() {
        check_copies(true);
    }

    fn check_copies(is_swap_file: bool) {
        let (owner, cached) = owner(is_swap_file);
        owner.file.write_all_at(&[7; 16], 2 * PAGE_BYTES - 8).expect("written");
        let mut bytes = [0; 16];
        set(&owner, 0, PageState::Clean, 1);
        assert_eq!(
            copy(&cached, Direction::Read, PAGE_BYTES - 8, &mut bytes),
            Err(Missing),
            "page 1 is absent"
        );
        set(&owner, 1, PageState::Clean, 5);
        assert_eq!(copy(&cached, Direction::Read, PAGE_BYTES - 8, &mut bytes), Ok(()));
        assert_eq!((bytes, owner.counters.get(1)), ([7; 16], 1), "there is no counter 5");
        assert_eq!(copy(&cached, Direction::Write, 100, &mut [3; 16]), Ok(()));
        owner.file.read_exact_at(&mut bytes, PAGE_BYTES + 100).expect("read");
        assert_eq!(bytes, [3; 16]);
        assert_eq!(copy(&cached, Direction::Read, u64::MAX - 3, &mut bytes), Err(Missing));
        assert_eq!(copy(&cached, Direction::Read, 3 * PAGE_BYTES - 8, &mut bytes), Err(Missing));
        owner.entries.withdraw();
        assert_eq!(copy(&cached, Direction::Read, 0, &mut bytes), Err(Missing));
    }

    #[test]
    fn a_truncated_file_is_not_extended() {
        fault::install().expect("installed");
        let (owner, cached) = owner(false);
        set(&owner, 1, PageState::Clean, 0);
        owner.file.set_len(PAGE_BYTES).expect("truncated");
        for direction in [Direction::Write, Direction::Read] {
            assert_eq!(copy(&cached, direction, PAGE_BYTES, &mut [1; 16]), Err(Missing), "{direction:?}");
        }
        assert_eq!(owner.file.metadata().expect("there").len(), PAGE_BYTES);
    }
}
