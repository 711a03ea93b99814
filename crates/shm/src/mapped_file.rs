//! A region that is a file, as a same-host peer accesses it: a mapping, and the file's length, which the owner publishes.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use terrace_hostmem::HostRange;
use terrace_sync::Mutex;

use crate::handshake::fence_after_withdrawal;
use crate::segment::{Others, Segment};
use crate::source::{BackedBy, Direction, Mapped, Missing};

/// Files of a process whose lengths are published at a time.
const FILES: usize = 1 << 17;
/// Files that a process maps for its peers' regions at a time. The kernel limits the number of mappings.
const MAPPED_MAX: usize = 8 << 10;

/// The published lengths of a process's files: numbers of bytes in a segment that peers only read.
#[derive(Debug)]
pub struct FileLengths {
    segment: Segment,
    free: Mutex<Free>,
}

/// The numbers that have no file.
#[derive(Debug, Default)]
struct Free {
    returned: Vec<u32>,
    /// The first number that never had one.
    next: u32,
}

impl FileLengths {
    /// No files yet.
    ///
    /// # Errors
    /// When the system has no descriptors or address space left.
    pub fn new() -> io::Result<Arc<FileLengths>> {
        let segment = Segment::create(c"terrace-lengths", FILES * size_of::<u64>(), Others::Read)?;
        Ok(Arc::new(FileLengths { segment, free: Mutex::default() }))
    }

    /// To be sent to peers.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.segment.file()
    }

    /// Publishes the length of another file, 0 at first. `None` when there are too many.
    pub fn add(self: &Arc<FileLengths>) -> Option<FileLength> {
        let mut free = self.free.lock();
        let number = free.returned.pop().or_else(|| {
            let number = Some(free.next).filter(|&number| (number as usize) < FILES)?;
            free.next += 1;
            Some(number)
        })?;
        Some(FileLength { lengths: self.clone(), number })
    }
}

/// The published length of a file, until it is dropped.
#[derive(Debug)]
pub struct FileLength {
    lengths: Arc<FileLengths>,
    number: u32,
}

impl FileLength {
    /// All lengths of the process.
    pub fn lengths(&self) -> &Arc<FileLengths> {
        &self.lengths
    }

    /// Its number among them.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Sets the length in bytes. Accesses that have seen a longer one end with the next grace period.
    pub fn set(&self, len: u64) {
        self.lengths.segment.quads(self.number as usize * size_of::<u64>(), 1)[0]
            .store(len, Ordering::Release);
        fence_after_withdrawal();
    }
}

impl Drop for FileLength {
    fn drop(&mut self) {
        self.set(0);
        self.lengths.free.lock().returned.push(self.number);
    }
}

/// Mappings of peers' files.
static MAPPED: AtomicUsize = AtomicUsize::new(0);

/// A mapping of a peer's file.
#[derive(Debug)]
pub struct MappedFile {
    mapped: Mapped,
    lengths: Segment,
    /// Where the length is in the segment.
    length_at: usize,
    _counted: Counted,
}

/// One of [`MAPPED`].
#[derive(Debug)]
struct Counted;

impl Counted {
    fn new() -> io::Result<Counted> {
        let counted = Counted;
        if MAPPED.fetch_add(1, Ordering::Relaxed) >= MAPPED_MAX {
            return Err(io::Error::new(io::ErrorKind::QuotaExceeded, "too many files of peers are mapped"));
        }
        Ok(counted)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        MAPPED.fetch_sub(1, Ordering::Relaxed);
    }
}

impl MappedFile {
    /// Maps a file, whose offsets are the range's addresses. Its length is number `number` among `lengths`.
    ///
    /// # Errors
    /// `InvalidData` when the lengths are something else; `QuotaExceeded` when too many files are mapped; the system's.
    pub fn new(backed: &BackedBy, lengths: OwnedFd, number: u32) -> io::Result<MappedFile> {
        let counted = Counted::new()?;
        let length_at = number as usize * size_of::<u64>();
        if number as usize >= FILES {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let lengths = Segment::open(lengths, FILES * size_of::<u64>(), false)?;
        Ok(MappedFile { mapped: Mapped::new(backed)?, lengths, length_at, _counted: counted })
    }

    /// Checks that the file reaches as far as `end`. The caller's epoch is odd, so the file becomes no shorter by its
    /// owner's calls until it is even.
    #[inline(always)]
    fn check(&self, host: u64, len: u64) -> Result<(), Missing> {
        let file_len = self.lengths.quads(self.length_at, 1)[0].load(Ordering::Acquire);
        if host.saturating_add(len) > file_len { Err(Missing) } else { Ok(()) }
    }

    /// Drops the mapping. Later accesses find that the memory is not there.
    pub(crate) fn give_up(&self) {
        self.mapped.give_up();
    }

    /// Where this process has `len` bytes of the file.
    #[inline]
    pub(crate) fn place(&self, host: u64, len: u64) -> Result<u64, Missing> {
        self.check(host, len)?;
        self.mapped.place(host, len)
    }

    #[inline(always)]
    pub(crate) fn copy(&self, direction: Direction, host: u64, local: HostRange) -> Result<(), Missing> {
        self.check(host, local.len)?;
        self.mapped.copy(direction, host, local)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    /// One that lacks descriptors is asked again, every time; a limit stays.
    #[test]
    fn the_limit_of_mapped_files_is_no_scarcity() {
        let backed =
            |file| BackedBy { file: OwnedFd::from(file), offset: 0, range: HostRange { addr: 0, len: 4096 } };
        let lengths = FileLengths::new().expect("made");
        let sent = lengths.file().try_clone_to_owned().expect("a descriptor");
        MAPPED.fetch_add(MAPPED_MAX, Ordering::Relaxed);
        let error = MappedFile::new(&backed(tempfile::tempfile().expect("a file")), sent, 0);
        MAPPED.fetch_sub(MAPPED_MAX, Ordering::Relaxed);
        assert!(!crate::is_scarcity(&error.expect_err("too many")));
    }

    #[test]
    fn a_peer_accesses_as_much_as_the_owner_says() {
        terrace_hostmem::fault::install().expect("handlers");
        let file = tempfile::tempfile().expect("a file");
        file.set_len(10_000).expect("space");
        let lengths = FileLengths::new().expect("made");
        let (other, length) = (lengths.add().expect("a number"), lengths.add().expect("a number"));
        other.set(1 << 30);
        length.set(10_000);
        let range = HostRange { addr: 0, len: 1 << 30 };
        let backed = BackedBy { file: file.try_clone().expect("a descriptor").into(), offset: 0, range };
        let sent = lengths.file().try_clone_to_owned().expect("a descriptor");
        let mapped = MappedFile::new(&backed, sent, length.number()).expect("mapped");
        let mut data = *b"some bytes";
        let local = HostRange { addr: data.as_mut_ptr() as u64, len: 10 };
        assert_eq!(mapped.copy(Direction::Write, 9990, local), Ok(()));
        assert_eq!(mapped.copy(Direction::Write, 9991, local), Err(Missing));
        assert!(mapped.place(9992, 8).is_ok());
        assert_eq!(mapped.place(9993, 8), Err(Missing));
        let mut written = [0; 10];
        file.read_exact_at(&mut written, 9990).expect("read");
        assert_eq!(&written, b"some bytes");
        file.set_len(20_000).expect("space");
        assert_eq!(mapped.copy(Direction::Read, 15_000, local), Err(Missing));
        length.set(20_000);
        assert_eq!(mapped.copy(Direction::Read, 15_000, local), Ok(()));
        assert_eq!(data, [0; 10]);
        // What the owner says may be wrong. Nothing is worse than a fault, from which a copy recovers.
        length.set(u64::MAX);
        assert_eq!(mapped.copy(Direction::Read, u64::MAX - 3, local), Err(Missing));
        drop(length);
        assert_eq!(mapped.copy(Direction::Read, 0, local), Err(Missing));
        assert_eq!(lengths.add().expect("a number").number(), 1, "numbers are used again");
    }
}
