//! The identities of the regions whose pages the frames hold.

use std::ffi::OsStr;
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use rustix::fs::{AtFlags, StatxFlags};

use super::layout::SLOT_BYTES;
use crate::sys;

/// Numbers of a slot.
pub(super) const QUADS: usize = (SLOT_BYTES / 8) as usize;
const STATE: usize = 0;
const DEVICE: usize = 1;
const PATH_LEN: usize = 6;
const PATH: usize = 7;
/// The time of the last write-back. It has no checksum, because it changes alone.
const WRITTEN_AT: usize = QUADS - 1;
const PATH_BYTES_MAX: usize = (WRITTEN_AT - PATH) * 8;
/// In the lower half of the state; the upper one is the checksum.
const IN_USE: u64 = 1;

/// Changes of a file that are not older than our own last one by more than this count as ours.
const CLOCK_SLACK: Duration = Duration::from_secs(2);

/// Which file a region is, whatever its path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct FileIdentity {
    /// The file system; of a block device, its own number.
    pub(crate) device: u64,
    /// The file's number; 0 of a block device.
    pub(crate) inode: u64,
    /// When the file was made, or which disk the block device is: numbers are used again, and old pages must not come
    /// into a new file. 0 if the system does not tell.
    pub(crate) generation: u64,
    /// Where in the file the region begins.
    pub(crate) offset: u64,
    /// Length of the region in bytes.
    pub(crate) len: u64,
}

impl FileIdentity {
    /// The identity of a part of an open file.
    ///
    /// # Errors
    /// When the kernel does not tell.
    pub(crate) fn of(file: BorrowedFd<'_>, offset: u64, len: u64) -> io::Result<FileIdentity> {
        let status = rustix::fs::fstat(file)?;
        let is_device = rustix::fs::FileType::from_raw_mode(status.st_mode).is_block_device();
        let (device, inode) = if is_device { (status.st_rdev, 0) } else { (status.st_dev, status.st_ino) };
        let generation = if is_device { sys::disk_sequence(file) } else { born_at(file) };
        Ok(FileIdentity { device, inode, generation: generation.unwrap_or(0), offset, len })
    }

    /// Whether it is the same file, or a part of it.
    pub(crate) fn is_same_file(&self, other: FileIdentity) -> bool {
        (self.device, self.inode, self.generation) == (other.device, other.inode, other.generation)
    }

    /// Whether only the number of the file system tells the files apart: a file system without a device (NFS, btrfs,
    /// overlayfs) may have another number each time that it is mounted.
    fn is_same_but_for_mount(&self, other: FileIdentity) -> bool {
        self.is_same_file(FileIdentity { device: self.device, ..other }) && self.inode != 0
    }
}

/// The time at which a file was made, in nanoseconds.
fn born_at(file: BorrowedFd<'_>) -> Option<u64> {
    let status = rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::BTIME).ok()?;
    let born = status.stx_btime;
    let is_told = status.stx_mask & StatxFlags::BTIME.bits() != 0;
    is_told.then(|| born.tv_sec.cast_unsigned().wrapping_mul(1_000_000_000).wrapping_add(born.tv_nsec.into()))
}

/// The slot of a region in the file of a pool.
#[derive(Clone, Copy)]
pub(crate) struct RegionSlot<'a>(pub(super) &'a [AtomicU64]);

impl RegionSlot<'_> {
    fn load(&self, index: usize) -> u64 {
        self.0[index].load(Ordering::Acquire)
    }

    fn checksum(&self) -> u64 {
        let mut hasher = crc32fast::Hasher::new();
        for index in DEVICE..WRITTEN_AT {
            hasher.update(&self.load(index).to_le_bytes());
        }
        u64::from(hasher.finalize())
    }

    /// Whether it has a region.
    pub(crate) fn is_in_use(&self) -> bool {
        self.load(STATE) == self.checksum() << 32 | IN_USE
    }

    /// Gives it to a region.
    pub(crate) fn occupy(&self, identity: FileIdentity, path: &Path) {
        self.0[STATE].store(0, Ordering::Release);
        let FileIdentity { device, inode, generation, offset, len } = identity;
        let path = path.as_os_str().as_bytes();
        // A path that is too long is left out: the pages can then be written back by a caller that knows the file.
        let path = if path.len() > PATH_BYTES_MAX { &[] } else { path };
        for (index, value) in (DEVICE..).zip([device, inode, generation, offset, len, path.len() as u64]) {
            self.0[index].store(value, Ordering::Relaxed);
        }
        for index in 0..WRITTEN_AT - PATH {
            let mut bytes = [0; 8];
            let part = path.chunks(8).nth(index).unwrap_or_default();
            bytes[..part.len()].copy_from_slice(part);
            self.0[PATH + index].store(u64::from_le_bytes(bytes), Ordering::Relaxed);
        }
        self.note_written();
        self.0[STATE].store(self.checksum() << 32 | IN_USE, Ordering::Release);
    }

    /// Takes it from its region.
    pub(crate) fn vacate(&self) {
        self.0[STATE].store(0, Ordering::Release);
    }

    /// The region that has it.
    pub(crate) fn identity(&self) -> Option<FileIdentity> {
        let [device, inode, generation, offset, len] = [0, 1, 2, 3, 4].map(|index| self.load(DEVICE + index));
        self.is_in_use().then_some(FileIdentity { device, inode, generation, offset, len })
    }

    /// The path of the region's file, as it was when the region was added.
    pub(crate) fn path(&self) -> PathBuf {
        let bytes: Vec<u8> = (PATH..WRITTEN_AT).flat_map(|index| self.load(index).to_le_bytes()).collect();
        let len = (self.load(PATH_LEN) as usize).min(PATH_BYTES_MAX);
        PathBuf::from(OsStr::from_bytes(&bytes[..len]))
    }

    /// Whether the region may be of the file at this path: of the file itself, or of one that had the path and the inode
    /// number on a file system with another number.
    pub(crate) fn may_be_of_file_at(&self, path: &Path, file: FileIdentity) -> bool {
        self.identity().is_some_and(|own| {
            own.is_same_file(file) || own.is_same_but_for_mount(file) && self.path() == path
        })
    }

    /// Whether the region is of the file at this path, or was when its file system was mounted before. False of the latter
    /// if the system does not tell when the file was made: two file systems use the same inode numbers.
    pub(crate) fn is_of_file_at(&self, path: &Path, file: FileIdentity) -> bool {
        self.identity().is_some_and(|own| own.is_same_file(file) || own.generation != 0)
            && self.may_be_of_file_at(path, file)
    }

    /// Notes that a write to the file is being made now.
    pub(crate) fn note_written(&self) {
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        self.0[WRITTEN_AT].store(since.as_nanos() as u64, Ordering::Release);
    }

    /// Whether the file has changed after our own last write to it: another program may have written to it then. Goes by
    /// the time of the last change of attributes, too, which no program sets: copies of a backup set the time of the last
    /// write to one that is past. Does not notice writes to a block device: the times are those of its name in `/dev`.
    ///
    /// # Errors
    /// When the kernel does not tell.
    pub(crate) fn is_changed_by_others(&self, file: BorrowedFd<'_>) -> io::Result<bool> {
        let status = rustix::fs::fstat(file)?;
        let time =
            |seconds: i64, nanoseconds| Duration::new(seconds.max(0).cast_unsigned(), nanoseconds as u32);
        let written = time(status.st_mtime, status.st_mtime_nsec);
        let changed = time(status.st_ctime, status.st_ctime_nsec);
        Ok(written.max(changed) > Duration::from_nanos(self.load(WRITTEN_AT)) + CLOCK_SLACK)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identities_come_back_and_damaged_ones_do_not() {
        let quads: Vec<AtomicU64> = (0..QUADS).map(|_| AtomicU64::new(0)).collect();
        let slot = RegionSlot(&quads);
        assert_eq!(slot.identity(), None);
        let identity = FileIdentity { device: 3, inode: 4, generation: 5, offset: 0, len: 8192 };
        slot.occupy(identity, Path::new("/data/a file"));
        assert_eq!(slot.identity(), Some(identity));
        assert_eq!(slot.path(), Path::new("/data/a file"));
        slot.note_written();
        assert!(slot.is_in_use());
        quads[PATH + 1].fetch_add(1, Ordering::Relaxed);
        assert_eq!(slot.identity(), None);
        slot.occupy(identity, Path::new(OsStr::from_bytes(&[b'x'; 500])));
        assert_eq!((slot.identity(), slot.path()), (Some(identity), PathBuf::new()));
        slot.vacate();
        assert!(!slot.is_in_use());
    }
}
