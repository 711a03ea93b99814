//! Writing the pages of one region back.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use terrace_hostmem::PAGE_BYTES;

use crate::error::PagesError;
use crate::frames::{Pool, Record};
use crate::lock_file;
use crate::store::{BackingFile, Files};
use crate::sys;

use super::RecoverProgress;

/// Pages that are made durable together: 64 MiB. What is durable needs no second write if a later page fails.
const BATCH_PAGES: usize = (64 << 20) / PAGE_BYTES as usize;

/// What was written of a region.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Written {
    pub(super) pages: u64,
    /// The file had changed before.
    pub(super) is_changed: bool,
}

/// Writes the dirty pages of all regions back.
///
/// # Errors
/// As for [`write_back_region`].
pub(crate) fn write_back_all(pool: &Pool) -> Result<(), PagesError> {
    for slot in Pool::slots().filter(|slot| pool.slot(*slot).is_in_use()) {
        write_back_region(pool, slot)?;
    }
    Ok(())
}

/// Writes the dirty pages of a region back, and makes them durable. No process serves the region.
///
/// # Errors
/// `Open`, `InUse`, `Moved`; `WriteBack` when a page cannot be written.
pub(crate) fn write_back_region(pool: &Pool, slot: u8) -> Result<(), PagesError> {
    if !is_clean(pool, slot) {
        let backing = open_file(pool, slot)?;
        write_and_log(pool, slot, backing.path(), backing.file().as_fd())?;
    }
    remove_lock_file(pool, &pool.slot(slot).path());
    Ok(())
}

/// As [`write_back_region`], of a region whose file is open: another part of it is served now.
///
/// # Errors
/// `WriteBack` when a page cannot be written.
pub(crate) fn write_back_part(pool: &Pool, slot: u8, files: &Files) -> Result<(), PagesError> {
    write_and_log(pool, slot, &files.path, files.buffered().as_fd())
}

fn write_and_log(pool: &Pool, slot: u8, path: &Path, file: BorrowedFd<'_>) -> Result<(), PagesError> {
    let written = write_pages(pool, slot, path, file, &mut |_| {})?;
    if written.pages > 0 {
        tracing::info!(
            ?path,
            pages = written.pages,
            "pages that a process left in the pool are written back"
        );
    }
    Ok(())
}

/// Whether the file of a region has all bytes of its pages.
pub(super) fn is_clean(pool: &Pool, slot: u8) -> bool {
    dirty_pages(pool, slot).is_empty()
}

/// Frees the frames of a region whose file, at `path` now, has all of its bytes.
pub(super) fn free(pool: &Pool, slot: u8, path: &Path) {
    // First: a lock file that names a pool without the region would say that the pool was lost.
    remove_lock_file(pool, path);
    remove_lock_file(pool, &pool.slot(slot).path());
    for frame in 0..pool.frame_count() {
        if pool.record(frame).is_some_and(|record| record.slot == slot) {
            pool.clear_record(frame);
        }
    }
    pool.slot(slot).vacate();
}

/// The file of a region, if it is still at the path where its server found it.
///
/// # Errors
/// `Moved`, `InUse`, `Open`, `Kind`.
pub(super) fn open_file(pool: &Pool, slot: u8) -> Result<BackingFile, PagesError> {
    let slot_path = pool.slot(slot).path();
    let moved = |reason: String| {
        let pages = dirty_pages(pool, slot).len() as u64;
        PagesError::Moved { path: slot_path.clone(), pool: path_of(pool), pages, reason }
    };
    let backing = match BackingFile::open_to_recover(&slot_path) {
        Err(PagesError::Open { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
            return Err(moved("there is no such file any more".into()));
        }
        other => other?,
    };
    let found = backing.identity().map_err(PagesError::system("identify a file"))?;
    // Whether it is the file of the mount before is for the user to say: `recover` with the path of the file.
    if pool.slot(slot).identity().is_some_and(|own| !own.is_same_file(found)) {
        return Err(moved("another file has that path now".into()));
    }
    Ok(backing)
}

/// The path of a pool, for messages.
fn path_of(pool: &Pool) -> PathBuf {
    pool.path().unwrap_or(Path::new("a pool without a name")).to_owned()
}

/// Removes the lock file of a file if it names the pool.
fn remove_lock_file(pool: &Pool, path: &Path) {
    let named = lock_file::read(path).ok().flatten();
    if named.is_some() && named.as_deref() == pool.path() {
        lock_file::remove(path);
    }
}

/// The pages whose newest bytes the file lacks, in the file's order, and their frames.
pub(crate) fn dirty_pages(pool: &Pool, slot: u8) -> Vec<(u64, u32)> {
    let records = (0..pool.frame_count()).filter_map(|frame| Some((frame, pool.record(frame)?)));
    let dirty = records.filter(|(_, record)| record.slot == slot && record.dirty);
    let by_page: BTreeMap<u64, u32> = dirty.map(|(frame, record)| (record.page, frame)).collect();
    by_page.into_iter().collect()
}

/// Writes the dirty pages of a region to its file, and makes them durable.
///
/// # Errors
/// `WriteBack` when a page cannot be written: it stays, as do later pages.
pub(super) fn write_pages(
    pool: &Pool,
    slot: u8,
    path: &Path,
    file: BorrowedFd<'_>,
    progress: &mut dyn FnMut(RecoverProgress<'_>),
) -> Result<Written, PagesError> {
    let dirty = dirty_pages(pool, slot);
    let offset = pool.slot(slot).identity().map_or(0, |identity| identity.offset);
    // If the kernel does not tell, there is nothing to warn of.
    let is_changed = pool.slot(slot).is_changed_by_others(file).unwrap_or(false);
    let mut pages_written = 0;
    for batch in dirty.chunks(BATCH_PAGES) {
        write_batch(pool, file, offset, batch).map_err(|source| PagesError::WriteBack {
            path: path.to_owned(),
            pool: path_of(pool),
            pages: dirty.len() as u64 - pages_written,
            source: source.into(),
        })?;
        for (page, frame) in batch {
            pool.set_record(*frame, Record { slot, page: *page, dirty: false });
        }
        pool.slot(slot).note_written();
        pages_written += batch.len() as u64;
        progress(RecoverProgress {
            path,
            bytes_written: pages_written * PAGE_BYTES,
            bytes: dirty.len() as u64 * PAGE_BYTES,
        });
    }
    Ok(Written { pages: pages_written, is_changed: is_changed && pages_written > 0 })
}

/// Writes pages through the page cache, with a buffer, because nothing here is in a hurry, and makes them durable.
fn write_batch(pool: &Pool, file: BorrowedFd<'_>, offset: u64, batch: &[(u64, u32)]) -> Result<(), Errno> {
    let mut bytes = vec![0; PAGE_BYTES as usize];
    for (page, frame) in batch {
        sys::copy_out(pool.addr(*frame), &mut bytes).map_err(|_| Errno::FAULT)?;
        let mut done = 0;
        while done < bytes.len() {
            match rustix::io::pwrite(file, &bytes[done..], offset + page * PAGE_BYTES + done as u64) {
                Ok(0) => return Err(Errno::IO),
                Ok(count) => done += count,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error),
            }
        }
    }
    rustix::fs::fdatasync(file)
}
