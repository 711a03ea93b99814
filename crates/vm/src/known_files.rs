//! The swap files of this process, for calls from within allocators: what reads the list neither allocates nor takes a
//! lock, and a forked child has the list as it was.

use std::io;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use rustix::io::Errno;

use crate::maps::{LINE_MAX, Mapping};

/// A file; free while the inode's number is 0.
struct Slot {
    inode: AtomicU64,
    device: AtomicU64,
    /// A hash of the path: on btrfs, files of several subvolumes have the same numbers.
    path_hash: AtomicU64,
}

/// Capacity of the list. Each file has a descriptor.
const FILES_MAX: usize = 384;

/// The number of an inode whose slot is being filled. No file has it.
const CLAIMED: u64 = u64::MAX;

/// Longer paths are refused, so that a mapping's whole line is compared.
const PATH_MAX: usize = LINE_MAX / 2;

static FILES: [Slot; FILES_MAX] =
    [const { Slot { inode: AtomicU64::new(0), device: AtomicU64::new(0), path_hash: AtomicU64::new(0) } };
        FILES_MAX];

/// Number of files in the list.
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// A file's place in the list. Dropping it removes the file.
#[derive(Debug)]
pub(crate) struct Known(usize);

impl Known {
    /// Adds the file behind a mapping. While it is in the list, its inode must not become another file's.
    ///
    /// # Errors
    /// `Other` if the list is full; `NAMETOOLONG`.
    pub(crate) fn add(mapping: &Mapping) -> io::Result<Known> {
        if mapping.path().len() > PATH_MAX {
            return Err(Errno::NAMETOOLONG.into());
        }
        let claim = |slot: &Slot| {
            slot.inode.compare_exchange(0, CLAIMED, Ordering::Acquire, Ordering::Relaxed).is_ok()
        };
        let full = || io::Error::other(format!("{FILES_MAX} ranges of memory are in swap files already"));
        let index = FILES.iter().position(claim).ok_or_else(full)?;
        FILES[index].device.store(mapping.file().device(), Ordering::Relaxed);
        FILES[index].path_hash.store(hash(mapping.path()), Ordering::Relaxed);
        FILES[index].inode.store(mapping.file().inode(), Ordering::Release);
        COUNT.fetch_add(1, Ordering::Release);
        Ok(Known(index))
    }
}

impl Drop for Known {
    fn drop(&mut self) {
        COUNT.fetch_sub(1, Ordering::Release);
        FILES[self.0].inode.store(0, Ordering::Release);
    }
}

/// Whether there is any swap file.
#[inline]
pub(crate) fn is_any() -> bool {
    COUNT.load(Ordering::Acquire) != 0
}

/// Whether a mapping is one of a swap file.
pub(crate) fn has(mapping: &Mapping<&[u8]>) -> bool {
    let (inode, device) = (mapping.file().inode(), mapping.file().device());
    inode != 0
        && FILES.iter().any(|slot| {
            slot.inode.load(Ordering::Acquire) == inode
                && slot.device.load(Ordering::Relaxed) == device
                && slot.path_hash.load(Ordering::Relaxed) == hash(mapping.path())
        })
}

/// FNV-1a.
fn hash(path: &[u8]) -> u64 {
    path.iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}
