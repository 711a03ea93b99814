//! Memory that processes of one host share: a file without a name and of fixed size, mapped by its creator and by the
//! processes that received its descriptor.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicU32, AtomicU64};

use terrace_hostmem::{PAGE_BYTES, prefetch, prefetch_to_write};

/// What processes other than the creator may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Others {
    /// The kernel refuses them a writable mapping.
    Read,
    /// They may write as well.
    Write,
}

/// A mapped segment. Other processes may write anything there, so it is only read as atomic numbers or copied out.
#[derive(Debug)]
pub(crate) struct Segment {
    /// Of a segment that this process has made: to be sent to other processes. These need the mapping only.
    file: Option<OwnedFd>,
    place: Place,
    len: usize,
}

/// A structure that consists of atomic numbers.
///
/// # Safety
/// It has a C layout, and nothing but atomic integers. Its alignment is at most a page.
pub(crate) unsafe trait AtomicNumbers {}

impl Segment {
    /// New memory of `len` bytes, all zero. Pages that are never written cost nothing.
    ///
    /// # Errors
    /// When the system has no descriptors or address space left, or is older than Linux 5.1.
    pub(crate) fn create(name: &CStr, len: usize, others: Others) -> io::Result<Segment> {
        // SAFETY: a string that ends, and flags.
        let fd = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
        // SAFETY: a descriptor that was just made, or an error.
        let file = unsafe { OwnedFd::from_raw_fd(checked(fd)?) };
        // SAFETY: a descriptor of ours.
        checked(unsafe { libc::ftruncate(file.as_raw_fd(), len as libc::off_t) })?;
        let place = Segment::map(file.as_fd(), len, true)?;
        let mut seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;
        if others == Others::Read {
            // Our own writable mapping exists already, and stays.
            seals |= libc::F_SEAL_FUTURE_WRITE;
        }
        // SAFETY: a descriptor of ours, and flags.
        checked(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) })?;
        Ok(Segment { file: Some(file), place, len })
    }

    /// Maps a segment of another process. A file that could shrink, or has another length, is refused: an access beyond
    /// its end would be a fault.
    ///
    /// # Errors
    /// `InvalidData` for such a file, otherwise the system's.
    pub(crate) fn open(file: OwnedFd, len: usize, writable: bool) -> io::Result<Segment> {
        // SAFETY: a descriptor of ours.
        let seals = checked(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) })?;
        // SAFETY: integers only.
        let mut status: libc::stat = unsafe { std::mem::zeroed() };
        // SAFETY: a descriptor of ours, and a structure to be written to.
        checked(unsafe { libc::fstat(file.as_raw_fd(), &raw mut status) })?;
        // A file of larger pages may lack some of them although it has this length, and they reach beyond it.
        let is_usual = file_system(file.as_fd())?.page_bytes == PAGE_BYTES;
        if seals & libc::F_SEAL_SHRINK == 0 || status.st_size != len as libc::off_t || !is_usual {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(Segment { file: None, place: Segment::map(file.as_fd(), len, writable)?, len })
    }

    fn map(file: BorrowedFd<'_>, len: usize, writable: bool) -> io::Result<Place> {
        let place = Place::reserve(len)?;
        let first = place.addr;
        place.map(first, len, writable, file, 0)
    }

    /// To be sent to another process.
    ///
    /// # Panics
    /// When another process has made the segment.
    pub(crate) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_ref().expect("a segment of this process").as_fd()
    }

    /// Length in bytes.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// `count` numbers of 8 bytes from a multiple of 8 on. Read-only if the segment was opened so.
    ///
    /// # Panics
    /// When they do not lie within the segment.
    #[inline]
    pub(crate) fn quads(&self, offset: usize, count: usize) -> &[AtomicU64] {
        assert!(offset.is_multiple_of(8) && offset <= self.len && count <= (self.len - offset) / 8);
        // SAFETY: mapped as long as `self` lives, and aligned. Only a ring's records are also written as bytes, by raw
        // pointers; the ring's protocol keeps that apart from reading them as numbers.
        unsafe { std::slice::from_raw_parts((self.place.addr + offset as u64) as *const AtomicU64, count) }
    }

    /// `count` numbers of 4 bytes from a multiple of 4 on. Read-only if the segment was opened so.
    ///
    /// # Panics
    /// When they do not lie within the segment.
    #[inline]
    pub(crate) fn words(&self, offset: usize, count: usize) -> &[AtomicU32] {
        assert!(offset.is_multiple_of(4) && offset <= self.len && count <= (self.len - offset) / 4);
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts((self.place.addr + offset as u64) as *const AtomicU32, count) }
    }

    /// A structure of atomic numbers at a multiple of its alignment. Read-only if the segment was opened so.
    ///
    /// # Panics
    /// When it does not lie within the segment.
    #[inline(always)]
    pub(crate) fn numbers<T: AtomicNumbers>(&self, offset: usize) -> &T {
        let is_within = offset <= self.len && size_of::<T>() <= self.len - offset;
        assert!(offset.is_multiple_of(align_of::<T>()) && is_within);
        // SAFETY: mapped at a page as long as `self` lives, and aligned; any bytes are such a structure.
        unsafe { &*((self.place.addr + offset as u64) as *const T) }
    }

    /// The address of `len` bytes from `offset` on.
    ///
    /// # Panics
    /// When they do not lie within the segment.
    #[inline]
    pub(crate) fn bytes_at(&self, offset: usize, len: usize) -> u64 {
        assert!(offset <= self.len && len <= self.len - offset);
        self.place.addr + offset as u64
    }

    /// Prefetches the cache line at `offset` for a write, if it lies within the segment.
    #[inline]
    pub(crate) fn prefetch_to_write(&self, offset: usize) {
        if offset < self.len {
            prefetch_to_write(self.place.addr + offset as u64);
        }
    }

    /// Prefetches the cache line at `offset` for a read, if it lies within the segment.
    #[inline]
    pub(crate) fn prefetch(&self, offset: usize) {
        if offset < self.len {
            prefetch(self.place.addr + offset as u64);
        }
    }
}

/// Addresses for a mapping of shared memory. They are released with the mapping, when no copy runs any more.
#[derive(Debug)]
pub(crate) struct Place {
    addr: u64,
    len: usize,
}

/// Addresses are reserved in such amounts. A program may unmap some pages that are registered; if the kernel then put a
/// mapping of a page or two there, the program's peers would write to it.
const RESERVED_BYTES: usize = 2 << 20;

impl Place {
    /// Reserves addresses for `len` bytes or more. They are not accessible yet.
    ///
    /// # Errors
    /// When the process has no addresses left.
    pub fn reserve(len: usize) -> io::Result<Place> {
        let len = len.checked_next_multiple_of(RESERVED_BYTES).ok_or(io::ErrorKind::InvalidInput)?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping, wherever the kernel has room.
        let addr = unsafe { libc::mmap(ptr::null_mut(), len, libc::PROT_NONE, flags, -1, 0) };
        if addr == libc::MAP_FAILED {
            Err(io::Error::last_os_error())
        } else {
            Ok(Place { addr: addr as u64, len })
        }
    }

    /// The first address in the place that is congruent to `offset` modulo `align`.
    pub fn alike(&self, offset: u64, align: u64) -> u64 {
        self.addr + (offset % align + align - self.addr % align) % align
    }

    /// Maps a part of a file at `addr`, and leaves the rest of the place empty. The part is whole pages of the file.
    ///
    /// # Errors
    /// When the part does not lie within the place, or the kernel refuses it.
    pub fn map(
        self,
        addr: u64,
        len: usize,
        writable: bool,
        file: BorrowedFd<'_>,
        offset: libc::off_t,
    ) -> io::Result<Place> {
        let before = addr.checked_sub(self.addr).filter(|before| *before <= self.len as u64);
        let Some(rest) = before.and_then(|before| (self.len - before as usize).checked_sub(len)) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let rights = if writable { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_READ };
        let flags = libc::MAP_SHARED | libc::MAP_NORESERVE | libc::MAP_FIXED;
        let to = addr as *mut libc::c_void;
        // SAFETY: in place of addresses that were reserved for it. Of whole pages nothing is rounded up.
        if unsafe { libc::mmap(to, len, rights, flags, file.as_raw_fd(), offset) } != libc::MAP_FAILED {
            return Ok(self);
        }
        let error = io::Error::last_os_error();
        // The kernel may have unmapped these addresses before it refused, and another thread may have mapped them
        // since: only the pages around them are released.
        let behind = rest - rest % PAGE_BYTES as usize;
        drop(Place { addr: self.addr + (self.len - behind) as u64, len: behind });
        drop(Place { addr: self.addr, len: self.len - rest - len });
        std::mem::forget(self);
        Err(error)
    }

    /// Drops the mapping and keeps the addresses: an access to them faults from now on.
    pub fn empty(&self) {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
        // SAFETY: our own addresses, borrowed only for accesses that recover from faults. If it fails, which takes a
        // kernel without memory, the mapping stays.
        unsafe { libc::mmap(self.addr as *mut libc::c_void, self.len, libc::PROT_NONE, flags, -1, 0) };
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // SAFETY: our own addresses; every user of them borrows from the owner of this. Of no bytes it is refused,
        // which does no harm.
        unsafe { libc::munmap(self.addr as *mut libc::c_void, self.len) };
    }
}

fn checked(result: i32) -> io::Result<i32> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// The file system that a file is on.
#[derive(Clone, Copy, Debug)]
pub struct FileSystem {
    /// Its number in `linux/magic.h`.
    pub kind: i64,
    /// The size of the pages that its files are mapped in: that of huge ones for hugetlbfs.
    pub page_bytes: u64,
}

impl FileSystem {
    /// Whether its files are memory, in pages of the base size.
    pub fn is_in_memory(&self) -> bool {
        /// `RAMFS_MAGIC`.
        const RAMFS: i64 = 0x8584_58f6;
        matches!(self.kind, libc::TMPFS_MAGIC | RAMFS)
    }
}

/// Returns the file system that a file is on.
///
/// # Errors
/// The system's.
pub fn file_system(file: BorrowedFd<'_>) -> io::Result<FileSystem> {
    // SAFETY: integers only.
    let mut system: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: an open descriptor and a structure to be written to.
    if unsafe { libc::fstatfs(file.as_raw_fd(), &raw mut system) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let is_huge = system.f_type == libc::HUGETLBFS_MAGIC;
    let page_bytes = if is_huge { (system.f_bsize as u64).max(PAGE_BYTES) } else { PAGE_BYTES };
    Ok(FileSystem { kind: system.f_type, page_bytes })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;

    fn sent(segment: &Segment) -> OwnedFd {
        segment.file().try_clone_to_owned().expect("a descriptor")
    }

    #[test]
    fn both_sides_see_one_memory_and_only_the_maker_writes() {
        let ours = Segment::create(c"test", 8192, Others::Read).expect("made");
        let theirs = Segment::open(sent(&ours), 8192, false).expect("mapped");
        ours.quads(4096, 2)[1].store(7, Ordering::Relaxed);
        assert_eq!(theirs.quads(4104, 1)[0].load(Ordering::Relaxed), 7);
        assert_eq!(theirs.words(4104, 1)[0].load(Ordering::Relaxed), 7);
        let refused = Segment::open(sent(&ours), 8192, true).expect_err("sealed");
        assert_eq!(refused.raw_os_error(), Some(libc::EPERM));
        let ours = Segment::create(c"test", 4096, Others::Write).expect("made");
        let theirs = Segment::open(sent(&ours), 4096, true).expect("mapped");
        theirs.words(0, 1)[0].store(3, Ordering::Relaxed);
        assert_eq!(ours.words(0, 1)[0].load(Ordering::Relaxed), 3);
    }

    #[test]
    fn files_that_could_shrink_or_have_another_length_are_refused() {
        let ours = Segment::create(c"test", 4096, Others::Write).expect("made");
        assert_eq!(Segment::open(sent(&ours), 8192, false).unwrap_err().kind(), io::ErrorKind::InvalidData);
        // SAFETY: a string that ends, and no flags that matter.
        let fd = unsafe { libc::memfd_create(c"test".as_ptr(), libc::MFD_ALLOW_SEALING) };
        // SAFETY: just made.
        let file = unsafe { OwnedFd::from_raw_fd(fd) };
        // SAFETY: our descriptor.
        assert_eq!(unsafe { libc::ftruncate(fd, 4096) }, 0);
        assert_eq!(Segment::open(file, 4096, false).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}
