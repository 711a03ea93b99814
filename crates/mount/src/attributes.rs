//! The server's attributes and errors as the kernel has them.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fuser::{Errno, FileAttr, FileType, INodeNo, TimeOrNow};
use terrace_export::{Attributes, ExportError, FileKind, SetTime, Timestamp};

/// The attributes of a file with this number.
pub(crate) fn file_attr(ino: u64, attributes: &Attributes) -> FileAttr {
    FileAttr {
        ino: INodeNo(ino),
        size: attributes.len,
        blocks: attributes.blocks,
        atime: system_time(attributes.accessed),
        mtime: system_time(attributes.modified),
        ctime: system_time(attributes.changed),
        crtime: UNIX_EPOCH,
        kind: file_type(attributes.kind),
        perm: (attributes.mode & 0o7777) as u16,
        nlink: u32::try_from(attributes.links).unwrap_or(u32::MAX),
        uid: attributes.uid,
        gid: attributes.gid,
        rdev: u32::try_from(attributes.rdev).unwrap_or(0),
        blksize: attributes.block_bytes,
        flags: 0,
    }
}

/// What a file is.
pub(crate) fn file_type(kind: FileKind) -> FileType {
    match kind {
        FileKind::Regular => FileType::RegularFile,
        FileKind::Directory => FileType::Directory,
        FileKind::SymbolicLink => FileType::Symlink,
        FileKind::Fifo => FileType::NamedPipe,
        FileKind::Socket => FileType::Socket,
        FileKind::CharacterDevice => FileType::CharDevice,
        FileKind::BlockDevice => FileType::BlockDevice,
    }
}

/// The time; the epoch for one that this system cannot represent.
fn system_time(time: Timestamp) -> SystemTime {
    let seconds = Duration::from_secs(time.seconds.unsigned_abs());
    let whole = match time.seconds {
        0.. => UNIX_EPOCH.checked_add(seconds),
        _ => UNIX_EPOCH.checked_sub(seconds),
    };
    let nanoseconds = Duration::from_nanos(time.nanoseconds.min(999_999_999).into());
    whole.and_then(|whole| whole.checked_add(nanoseconds)).unwrap_or(UNIX_EPOCH)
}

/// What a time is set to.
pub(crate) fn set_time(time: TimeOrNow) -> SetTime {
    match time {
        TimeOrNow::Now => SetTime::Now,
        TimeOrNow::SpecificTime(time) => SetTime::At(timestamp(time)),
    }
}

fn timestamp(time: SystemTime) -> Timestamp {
    match time.duration_since(UNIX_EPOCH) {
        Ok(since) => Timestamp { seconds: since.as_secs() as i64, nanoseconds: since.subsec_nanos() },
        Err(error) => {
            let before = error.duration();
            // The first time has 2^63 seconds.
            let (seconds, nanoseconds) = ((before.as_secs() as i64).wrapping_neg(), before.subsec_nanos());
            match nanoseconds {
                0 => Timestamp { seconds, nanoseconds: 0 },
                _ => Timestamp { seconds: seconds - 1, nanoseconds: 1_000_000_000 - nanoseconds },
            }
        }
    }
}

/// The error number for the program. A server that has been silent for too long is an IO error, and so is a request of which
/// nobody knows whether it was done.
pub(crate) fn errno(error: &ExportError) -> Errno {
    match error {
        ExportError::NoExport { .. } | ExportError::Lost | ExportError::Unanswered => Errno::EIO,
        error => Errno::from_i32(error.errno()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_before_the_epoch_survive_both_ways() {
        for (seconds, nanoseconds) in [(0, 0), (-1, 500_000_000), (-3, 0), (1_700_000_000, 999_999_999)] {
            let time = Timestamp { seconds, nanoseconds };
            assert_eq!(timestamp(system_time(time)), time);
        }
    }

    #[test]
    fn the_first_and_the_last_time_survive() {
        for (seconds, nanoseconds) in [(i64::MIN, u32::MAX), (i64::MIN, 0), (i64::MAX, u32::MAX)] {
            let time = Timestamp { seconds, nanoseconds };
            let expected = Timestamp { seconds, nanoseconds: nanoseconds.min(999_999_999) };
            assert_eq!(timestamp(system_time(time)), expected);
        }
    }
}
