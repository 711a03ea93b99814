//! How the bytes of another process's region are accessed.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use terrace_hostmem::{HostRange, PAGE_BYTES, fault};

use crate::cached::Cached;
use crate::framed::Framed;
use crate::mapped_file::MappedFile;
use crate::prefetch_hint::Likely;
use crate::process;
use crate::rights::Rights;
use crate::segment::{Place, file_system};

/// A file whose bytes are those of a range of another process's memory.
#[derive(Debug)]
pub struct BackedBy {
    /// The file, open for reading, and for writing if the other process may write there.
    pub file: OwnedFd,
    /// Where in the file the range begins.
    pub offset: u64,
    /// The range, by the other process's addresses.
    pub range: HostRange,
}

/// How the bytes of a region are accessed.
#[derive(Debug)]
pub enum Source {
    /// The file behind them is mapped here, too.
    Mapped(Mapped),
    /// Their pages are in the page cache at times. They are read and written through the page cache, and not mapped: a
    /// page that a process has mapped could not leave memory.
    Cached(Cached),
    /// The region is a file, which is mapped here, too, and may end before the mapping does.
    File(MappedFile),
    /// Their pages are in memory at times, in frames that are mapped here, too.
    Framed(Framed),
    /// The kernel copies between the processes.
    Process,
    /// The region is this process's: a queue pair is connected to one of its own device.
    Own,
    /// By packets only.
    Packets,
}

/// The direction of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the other process.
    Read,
    /// To the other process.
    Write,
}

impl Direction {
    /// What the region at the other end must permit.
    #[inline]
    pub(crate) fn needs(self) -> Rights {
        match self {
            Direction::Read => Rights::READ,
            Direction::Write => Rights::WRITE,
        }
    }
}

/// Whether an error is of the moment: memory, mappings or descriptors are lacking, and the same may succeed later.
pub fn is_scarcity(error: &io::Error) -> bool {
    let is_limit = matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::EAGAIN));
    is_limit || error.kind() == io::ErrorKind::OutOfMemory
}

/// Some of the memory was not there. Packets find out which error that is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Missing;

/// A mapping of another process's file.
#[derive(Debug)]
pub struct Mapped {
    /// Where the range begins here.
    addr: u64,
    range: HostRange,
    place: Place,
}

/// What one TLB entry covers where memory is in huge pages.
const HUGE_PAGE_BYTES: u64 = 2 << 20;

impl Mapped {
    /// Maps a file that another process has named. An access to memory that is not there (any more) is a fault that is
    /// recovered from.
    ///
    /// Of hugetlbfs only whole pages can be mapped. Other files are mapped at addresses congruent to their offsets, so
    /// that the kernel can map a huge page of the file as one, if all of it is in the range.
    ///
    /// # Errors
    /// When it cannot be mapped.
    pub fn new(backed: &BackedBy) -> io::Result<Mapped> {
        // SAFETY: a descriptor of ours.
        let flags = unsafe { libc::fcntl(backed.file.as_raw_fd(), libc::F_GETFL) };
        let is_writable = flags >= 0 && flags & libc::O_ACCMODE == libc::O_RDWR;
        let page = file_system(backed.file.as_fd())?.page_bytes;
        let (len, before) = (backed.range.len, backed.offset % page);
        let align = if len >= HUGE_PAGE_BYTES { page.max(HUGE_PAGE_BYTES) } else { page };
        let bytes = len.checked_add(before).and_then(|bytes| bytes.checked_next_multiple_of(page));
        let with_spare = bytes.and_then(|bytes| bytes.checked_add(align - PAGE_BYTES));
        let fitting = |bytes: Option<u64>| {
            bytes.and_then(|bytes| isize::try_from(bytes).ok()).map(isize::cast_unsigned)
        };
        let first = backed.offset - before;
        let (Some(bytes), Some(with_spare), Ok(offset)) =
            (fitting(bytes), fitting(with_spare), libc::off_t::try_from(first))
        else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        // A mapping beyond the end of a hugetlbfs file makes it longer.
        if page != PAGE_BYTES
            && file_len(backed.file.as_fd())?.checked_sub(first).is_none_or(|rest| rest < bytes as u64)
        {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let place = Place::reserve(with_spare)?;
        let addr = place.alike(first, align);
        let place = place.map(addr, bytes, is_writable, backed.file.as_fd(), offset)?;
        Ok(Mapped { addr: addr + before, range: backed.range, place })
    }

    /// Drops the mapping. Later accesses find that the memory is not there.
    pub(crate) fn give_up(&self) {
        self.place.empty();
    }

    /// Where this process has `len` bytes of the other one.
    #[inline]
    pub(crate) fn place(&self, host: u64, len: u64) -> Result<u64, Missing> {
        let offset = host.wrapping_sub(self.range.addr);
        if offset > self.range.len || len > self.range.len - offset {
            return Err(Missing);
        }
        Ok(self.addr + offset)
    }

    /// Gives the kernel advice on the pages of a range of the other process's addresses. The advice must not change what
    /// the memory holds.
    pub(crate) fn advise(&self, range: HostRange, advice: libc::c_int) {
        let Ok(here) = self.place(range.addr, range.len) else { return };
        let before = here % PAGE_BYTES;
        // SAFETY: pages of our own mapping of a shared file, whose bytes the kernel keeps. A mapping that was given up
        // has none.
        let _ = unsafe { libc::madvise((here - before) as *mut _, (before + range.len) as usize, advice) };
    }

    #[inline(always)]
    pub(crate) fn copy(&self, direction: Direction, host: u64, local: HostRange) -> Result<(), Missing> {
        copy_here(direction, self.place(host, local.len)?, local)
    }
}

/// Copies between a local range and a place that this process has of the region.
#[inline(always)]
fn copy_here(direction: Direction, theirs: u64, local: HostRange) -> Result<(), Missing> {
    let (to, from) = match direction {
        Direction::Read => (local.addr, theirs),
        Direction::Write => (theirs, local.addr),
    };
    // SAFETY: the program registered the local range, and has named it in a work request, or it is borrowed for this call; the
    // other side is our mapping, or memory that this process has registered, too.
    unsafe { fault::copy_across(to, from, local.len as usize, theirs) }.map_err(|fault::Fault| Missing)
}

impl Source {
    /// Drops the mapping, which should not be accessed any more. Later accesses find that the memory is not there.
    pub(crate) fn give_up(&self) {
        match self {
            Source::Mapped(mapped) => mapped.give_up(),
            Source::Framed(framed) => framed.give_up(),
            Source::Cached(cached) => cached.give_up(),
            Source::File(file) => file.give_up(),
            Source::Process | Source::Own | Source::Packets => {}
        }
    }

    /// Where an access to `va`, which is `host` in the other process, is likely to go first.
    pub(crate) fn likely(&self, va: u64, host: u64) -> Likely {
        match self {
            Source::Mapped(mapped) => {
                mapped.place(host, 0).map_or(Likely::Unknown, |at| Likely::Bytes { va, at })
            }
            Source::File(file) => file.place(host, 0).map_or(Likely::Unknown, |at| Likely::Bytes { va, at }),
            Source::Framed(framed) => {
                framed.place_of_entry(host).map_or(Likely::Unknown, |at| Likely::Entry { va, at })
            }
            Source::Own => Likely::Bytes { va, at: host },
            Source::Cached(_) | Source::Process | Source::Packets => Likely::Unknown,
        }
    }

    /// Where this process has 8 bytes of the other one, for an atomic operation.
    pub(crate) fn place_of_atomic(&self, host: u64) -> Result<u64, Missing> {
        match self {
            Source::Mapped(mapped) => mapped.place(host, 8),
            Source::File(file) => file.place(host, 8),
            Source::Framed(framed) => framed.place_of_atomic(host),
            Source::Own => Ok(host),
            Source::Cached(_) | Source::Process | Source::Packets => Err(Missing),
        }
    }
}

fn file_len(file: BorrowedFd<'_>) -> io::Result<u64> {
    // SAFETY: integers only.
    let mut status: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: an open descriptor and a structure to be written to.
    if unsafe { libc::fstat(file.as_raw_fd(), &raw mut status) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(status.st_size.max(0) as u64)
}

impl BackedBy {
    /// Copies from or to the file, through the page cache.
    pub(crate) fn transfer(
        &self,
        direction: Direction,
        offset: u64,
        local: HostRange,
    ) -> Result<(), Missing> {
        let file = self.file.as_raw_fd();
        let (parts, count) = process::local_parts(direction, local);
        let count = count as libc::c_int;
        // SAFETY: the local range is registered, or borrowed for this call; the kernel says EFAULT if it is not there.
        let moved = unsafe {
            match direction {
                Direction::Read => libc::preadv(file, parts.as_ptr(), count, offset as libc::off_t),
                Direction::Write => libc::pwritev(file, parts.as_ptr(), count, offset as libc::off_t),
            }
        };
        if moved == local.len as isize { Ok(()) } else { Err(Missing) }
    }
}

impl Source {
    /// This process itself; the kernel, if it permits that; otherwise packets.
    pub fn process(pid: i32) -> Source {
        if pid == std::process::id().cast_signed() {
            Source::Own
        } else if process::is_permitted(pid) {
            Source::Process
        } else {
            Source::Packets
        }
    }

    /// Copies between this process and the other one, ascending, the last byte of a WRITE last.
    #[inline(always)]
    pub(crate) fn copy(
        &self,
        direction: Direction,
        pid: i32,
        host: u64,
        local: HostRange,
    ) -> Result<(), Missing> {
        match self {
            Source::Mapped(mapped) => mapped.copy(direction, host, local),
            Source::Cached(cached) => cached.copy(direction, host, local),
            Source::File(file) => file.copy(direction, host, local),
            Source::Framed(framed) => framed.copy(direction, host, local),
            Source::Process => process::copy(direction, pid, host, local),
            Source::Own => copy_here(direction, host, local),
            Source::Packets => Err(Missing),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::FromRawFd;
    use std::os::unix::fs::FileExt;

    use super::*;

    fn memory_file(flags: libc::c_uint, len: u64) -> io::Result<File> {
        // SAFETY: a string that ends, and flags.
        let fd = unsafe { libc::memfd_create(c"test".as_ptr(), libc::MFD_CLOEXEC | flags) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: just made.
        let file = unsafe { File::from_raw_fd(fd) };
        file.set_len(len)?;
        Ok(file)
    }

    fn map(file: &File, offset: u64, len: u64) -> io::Result<Mapped> {
        let (file, range) = (file.try_clone()?.into(), HostRange { addr: 0x7000_0000_0000, len });
        Mapped::new(&BackedBy { file, offset, range })
    }

    #[test]
    fn large_ranges_lie_as_they_do_in_the_file() {
        let file = memory_file(0, 3 * HUGE_PAGE_BYTES).expect("made");
        for offset in [0, PAGE_BYTES, HUGE_PAGE_BYTES - PAGE_BYTES, HUGE_PAGE_BYTES] {
            file.write_all_at(b"first", offset).expect("written");
            let len = 2 * HUGE_PAGE_BYTES - PAGE_BYTES;
            file.write_all_at(b"l", offset + len - 1).expect("written");
            let mapped = map(&file, offset, len).expect("mapped");
            let place = |at| mapped.place(mapped.range.addr + at, 1).expect("within");
            assert_eq!(place(0) % HUGE_PAGE_BYTES, offset % HUGE_PAGE_BYTES);
            // SAFETY: the mapping, as long as it lives.
            let bytes = unsafe { [*(place(0) as *const u8), *(place(len - 1) as *const u8)] };
            assert_eq!(bytes, *b"fl");
            assert_eq!(mapped.place(mapped.range.addr + len, 1), Err(Missing));
        }
    }

    #[test]
    fn a_part_of_a_huge_page_is_mapped_with_the_rest_of_it() {
        // Nothing is touched, so the system needs no free huge page.
        let Ok(file) = memory_file(libc::MFD_HUGETLB | libc::MFD_HUGE_2MB, 2 * HUGE_PAGE_BYTES) else {
            return eprintln!("no huge pages on this system: not tested");
        };
        let page = file_system(file.as_fd()).expect("told").page_bytes;
        assert_eq!(page, HUGE_PAGE_BYTES);
        for (offset, len) in
            [(0, 2 * page), (0, PAGE_BYTES), (3 * PAGE_BYTES, page), (page - PAGE_BYTES, page + PAGE_BYTES)]
        {
            let mapped = map(&file, offset, len).expect("mapped");
            let place = mapped.place(mapped.range.addr, len).expect("within");
            assert_eq!(place % page, offset % page);
        }
    }

    #[test]
    fn what_no_address_space_has_room_for_is_refused() {
        let file = memory_file(0, PAGE_BYTES).expect("made");
        for (offset, len) in [
            (0, u64::MAX),
            (0, i64::MAX as u64),
            (u64::MAX, PAGE_BYTES),
            (i64::MAX as u64, 1 << 40),
            (1, u64::MAX - 1),
            (0, (1 << 63) - (1 << 20)),
        ] {
            assert!(map(&file, offset, len).is_err(), "{offset} {len}");
        }
    }
}
