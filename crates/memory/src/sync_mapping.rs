//! Writing mapped pages to their files, and what is known of files of which a write has failed.
//!
//! The kernel reports a failed write once for each open file, and takes the pages for clean from then on: which ones is not
//! known. So each range of such a file is made dirty and written once before a FLUSH of it succeeds.

use std::ops::Range;
use std::sync::atomic::{AtomicPtr, Ordering};

use terrace_hostmem::{HostRange, pages_of};

use crate::access::AccessError;
use crate::flush::make_dirty;
use crate::pin::PinLock;

/// Most ranges that are remembered of a file; all of them are forgotten when there would be more.
const RANGES_MAX: usize = 1024;

/// The files of which a write has failed; null if there are none. The lock is held from an `msync` until its failure is
/// recorded, because another thread's `msync` would report nothing meanwhile. A list is replaced and never changed: a
/// forked child finds the old one or the new one.
// SAFETY: all zeros are an open lock, and a null pointer. (A lock that is made at the first use could be half made when the
// process forks.)
static FAILURES: PinLock<AtomicPtr<Vec<FailedFile>>> = unsafe { std::mem::zeroed() };

/// A file of which a write has failed.
#[derive(Clone, Debug)]
struct FailedFile {
    /// `None` stands for each file: it was not found out which one it is.
    file: Option<FileId>,
    /// The offsets that were made dirty and written since the last failure, in ascending order, with gaps between them.
    written: Vec<Range<u64>>,
}

/// Device and inode number as `/proc/self/maps` writes them.
type FileId = (Box<[u8]>, u64);

/// A part of a shared mapping of a file.
#[derive(Clone, Debug)]
struct Part {
    range: HostRange,
    file: FileId,
    offset: u64,
}

impl Part {
    fn offsets(&self) -> Range<u64> {
        self.offset..self.offset + self.range.len
    }

    /// The addresses of a part of its offsets.
    fn range_of(&self, offsets: Range<u64>) -> HostRange {
        HostRange { addr: self.range.addr + (offsets.start - self.offset), len: offsets.end - offsets.start }
    }
}

impl FailedFile {
    fn is(&self, part: &Part) -> bool {
        self.file.as_ref().is_none_or(|file| *file == part.file)
    }

    /// What of a range of offsets was not written since the last failure.
    fn unwritten(&self, offsets: Range<u64>) -> Vec<Range<u64>> {
        let (mut rest, mut at) = (Vec::new(), offsets.start);
        for written in self.written.iter().filter(|written| written.end > offsets.start) {
            if written.start >= offsets.end {
                break;
            }
            if written.start > at {
                rest.push(at..written.start);
            }
            at = written.end;
        }
        if at < offsets.end {
            rest.push(at..offsets.end);
        }
        rest
    }

    fn note_written(&mut self, mut offsets: Range<u64>) {
        // Which file it is is not known, so what was written of others says nothing.
        if self.file.is_none() {
            return;
        }
        self.written.retain(|written| {
            let is_apart = written.end < offsets.start || written.start > offsets.end;
            if !is_apart {
                offsets = offsets.start.min(written.start)..offsets.end.max(written.end);
            }
            is_apart
        });
        if self.written.len() >= RANGES_MAX {
            self.written.clear();
        }
        let at = self.written.partition_point(|written| written.start < offsets.start);
        self.written.insert(at, offsets);
    }
}

/// In the child of a `fork`: the threads that held it are the parent's.
pub(crate) fn after_fork_child() {
    FAILURES.forget_pins();
}

/// Writes the pages of a range to their files with `msync`; of anonymous memory it writes nothing. Of a file of which an
/// `msync` of this process has failed, pages in memory are written once more, clean or not. Waits for storage, and for the
/// other threads that do this.
///
/// # Errors
/// `Fault` when part of it is not mapped, `Flush` when it cannot be written.
pub fn sync_mapping(range: HostRange) -> Result<(), AccessError> {
    let (start, len) = pages_of(range).ok_or(AccessError::Flush)?;
    let range = HostRange { addr: start, len };
    let failures = FAILURES.close();
    // SAFETY: null, or a list that only the holder of the lock replaces and frees.
    let failed = unsafe { failures.load(Ordering::Relaxed).as_ref() };
    let Some(failed) = failed else {
        return msync(range).inspect_err(|error| {
            if *error == AccessError::Flush {
                replace(&failures, note_failure(Vec::new(), &parts_of(range)));
            }
        });
    };
    let parts = parts_of(range).map_err(|_| AccessError::Flush)?;
    for (part, file) in parts.iter().flat_map(|part| failed.iter().map(move |file| (part, file))) {
        if file.is(part) {
            for offsets in file.unwritten(part.offsets()) {
                make_dirty(part.range_of(offsets)).map_err(|_| AccessError::Flush)?;
            }
        }
    }
    let result = msync(range);
    let mut failed = failed.clone();
    match result {
        Ok(()) => {
            for file in &mut failed {
                let its = parts.iter().filter(|part| file.is(part)).map(Part::offsets);
                its.collect::<Vec<_>>().into_iter().for_each(|offsets| file.note_written(offsets));
            }
        }
        Err(AccessError::Flush) => failed = note_failure(failed, &Ok(parts)),
        Err(_) => return result,
    }
    replace(&failures, failed);
    result
}

/// # Errors
/// As [`sync_mapping`].
fn msync(range: HostRange) -> Result<(), AccessError> {
    // SAFETY: msync changes no memory; the kernel checks the range.
    if unsafe { libc::msync(range.addr as *mut _, range.len as usize, libc::MS_SYNC) } == 0 {
        return Ok(());
    }
    match std::io::Error::last_os_error().raw_os_error() {
        Some(libc::ENOMEM) => Err(AccessError::Fault),
        _ => Err(AccessError::Flush),
    }
}

/// Replaces the list, whose lock is held.
fn replace(failures: &AtomicPtr<Vec<FailedFile>>, failed: Vec<FailedFile>) {
    let before = failures.swap(Box::into_raw(Box::new(failed)), Ordering::Relaxed);
    if !before.is_null() {
        // SAFETY: the list was made by this function, and only the holder of the lock has a reference to it: it uses
        // it no more.
        drop(unsafe { Box::from_raw(before) });
    }
}

/// The list with the files of a range, or all files if it is not known which they are, and nothing of them written.
fn note_failure(mut failed: Vec<FailedFile>, parts: &std::io::Result<Vec<Part>>) -> Vec<FailedFile> {
    let files: Vec<Option<FileId>> = match parts {
        Ok(parts) if !parts.is_empty() => parts.iter().map(|part| Some(part.file.clone())).collect(),
        _ => vec![None],
    };
    for file in files {
        failed.retain(|other| other.file != file);
        failed.push(FailedFile { file, written: Vec::new() });
    }
    failed
}

/// The parts of shared mappings of files in a range, see proc_pid_maps(5).
fn parts_of(range: HostRange) -> std::io::Result<Vec<Part>> {
    let maps = std::fs::read("/proc/self/maps")?;
    Ok(maps.split(|byte| *byte == b'\n').filter_map(|line| part_of(line, range)).collect())
}

/// The part of a range in the mapping that a line describes, if that is shared and of a file.
fn part_of(line: &[u8], range: HostRange) -> Option<Part> {
    let mut fields = line.split(|byte| *byte == b' ').filter(|field| !field.is_empty());
    let mut next = || fields.next().and_then(|field| std::str::from_utf8(field).ok());
    let (start, end) = next()?.split_once('-')?;
    let (is_shared, offset, device, inode) = (next()?.ends_with('s'), next()?, next()?, next()?);
    let hexadecimal = |digits| u64::from_str_radix(digits, 16).ok();
    let (start, end, offset) = (hexadecimal(start)?, hexadecimal(end)?, hexadecimal(offset)?);
    let inode = inode.parse().ok().filter(|inode| *inode != 0)?;
    let (first, last) = (start.max(range.addr), end.min(range.addr + range.len));
    (is_shared && first < last).then(|| Part {
        range: HostRange { addr: first, len: last - first },
        file: (device.as_bytes().into(), inode),
        offset: offset + (first - start),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_remembered_in_ranges_with_gaps() {
        let mut file = FailedFile { file: Some(((*b"08:01").into(), 7)), written: Vec::new() };
        for offsets in [10..20, 40..50, 20..30, 60..70, 45..65] {
            file.note_written(offsets);
        }
        assert_eq!(file.written, [10..30, 40..70]);
        assert_eq!(file.unwritten(0..100), [0..10, 30..40, 70..100]);
        assert_eq!(file.unwritten(12..30), []);
        assert_eq!(file.unwritten(25..80), [30..40, 70..80]);
        assert_eq!(file.unwritten(5..45), [5..10, 30..40]);
        for n in 0..2 * RANGES_MAX as u64 {
            file.note_written(1000 + 2 * n..1001 + 2 * n);
        }
        assert!(file.written.len() <= RANGES_MAX);
    }

    #[test]
    fn only_shared_mappings_of_files_can_fail() {
        let range = HostRange { addr: 0x7000, len: 0x4000 };
        let shared =
            part_of(b"6000-9000 rw-s 00010000 103:02 77                /a b", range).expect("a part");
        assert_eq!(shared.range, HostRange { addr: 0x7000, len: 0x2000 });
        assert_eq!((shared.offsets(), shared.file), (0x1_1000..0x1_3000, ((*b"103:02").into(), 77)));
        for other in
            ["6000-9000 rw-p 0 103:02 77 /a", "6000-9000 rw-s 0 00:00 0", "0-7000 rw-s 0 103:02 77 /a", ""]
        {
            assert!(part_of(other.as_bytes(), range).is_none(), "{other}");
        }
    }
}
