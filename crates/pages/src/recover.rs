//! Writing pages back that a process has left in a pool, without serving them.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use terrace_hostmem::PAGE_BYTES;

use crate::error::PagesError;
use crate::frames::{self, FileIdentity, Pool, Record};
use crate::lock_file;
use crate::store::{BackingFile, Files};
use crate::sys;

/// What was recovered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recovered {
    /// The pools that had pages of the file.
    pub pools: Vec<PathBuf>,
    /// Pages that were written to the file.
    pub pages_written: u64,
}

/// Writes all pages of a file back that are in a pool, in the usual directories or in `directory`, and removes pools that
/// have no other pages.
///
/// # Errors
/// `InUse` while a server has the pool or the file; `Open`; `System` when a page cannot be written: it stays.
pub fn recover(path: &Path, directory: Option<&Path>) -> Result<Recovered, PagesError> {
    let backing = BackingFile::open(path, None)?;
    let path = backing.path().to_owned();
    let identity = backing.identity().map_err(PagesError::system("identify a file"))?;
    let mut recovered = Recovered::default();
    let mut pools = match directory {
        Some(directory) => frames::pools_in(directory),
        None => frames::find_pools(),
    };
    pools.extend(lock_file::read(&path).filter(|named| named.exists() && !pools.contains(named)));
    drop(backing);
    for pool_path in pools {
        let Some(pool) = open_with(&pool_path, identity)? else { continue };
        let is_its =
            |slot: &u8| pool.slot(*slot).identity().is_some_and(|found| found.is_same_file(identity));
        for slot in Pool::slots().filter(is_its) {
            recovered.pages_written += write_back_region(&pool, slot)?;
            clear(&pool, slot);
        }
        pool.remove_if_clean();
        recovered.pools.push(pool_path);
    }
    lock_file::remove(&path);
    Ok(recovered)
}

/// A pool, if it has pages of the file. A pool that another process has is passed over if it has none.
fn open_with(path: &Path, identity: FileIdentity) -> Result<Option<Pool>, PagesError> {
    let pool = match Pool::open_existing(path) {
        // The file's own lock is free, so its server is not running: the pool is another server's.
        Err(PagesError::InUse { .. }) => return Ok(None),
        // Its owner has removed it meanwhile.
        Err(PagesError::Open { source, .. }) if source.kind() == ErrorKind::NotFound => return Ok(None),
        other => other?,
    };
    let is_its = |pool: &Pool| {
        Pool::slots().any(|slot| pool.slot(slot).identity().is_some_and(|found| found.is_same_file(identity)))
    };
    Ok(pool.filter(is_its))
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

/// Writes the dirty pages of a region back, and makes them durable. Returns their number. No process serves the region.
///
/// # Errors
/// `Open`, `InUse`; `System` when a page cannot be written.
pub(crate) fn write_back_region(pool: &Pool, slot: u8) -> Result<u64, PagesError> {
    let dirty = dirty_pages(pool, slot);
    let path = pool.slot(slot).path();
    if !dirty.is_empty() {
        let backing = BackingFile::open(&path, None)?;
        let found = backing.identity().map_err(PagesError::system("identify a file"))?;
        let identity = pool.slot(slot).identity().unwrap_or(found);
        if !found.is_same_file(identity) {
            let source = std::io::Error::new(ErrorKind::NotFound, "it is another file than before");
            return Err(PagesError::Open { path, source });
        }
        let files = Files::open(backing).map_err(PagesError::system("open a file"))?;
        write_pages(pool, slot, identity, &dirty, &files)?;
    }
    lock_file::remove(&path);
    Ok(dirty.len() as u64)
}

/// As [`write_back_region`], of a region whose file is open: another part of it is served now.
///
/// # Errors
/// `System` when a page cannot be written.
pub(crate) fn write_back_part(pool: &Pool, slot: u8, files: &Files) -> Result<(), PagesError> {
    let dirty = dirty_pages(pool, slot);
    match pool.slot(slot).identity() {
        Some(identity) if !dirty.is_empty() => write_pages(pool, slot, identity, &dirty, files),
        _ => Ok(()),
    }
}

/// The dirty pages of a region, with their frames.
fn dirty_pages(pool: &Pool, slot: u8) -> BTreeMap<u64, u32> {
    let records = (0..pool.frame_count()).filter_map(|frame| Some((frame, pool.record(frame)?)));
    let is_dirty = |(_, record): &(u32, Record)| record.slot == slot && record.dirty;
    records.filter(is_dirty).map(|(frame, record)| (record.page, frame)).collect()
}

fn write_pages(
    pool: &Pool,
    slot: u8,
    identity: FileIdentity,
    dirty: &BTreeMap<u64, u32>,
    files: &Files,
) -> Result<(), PagesError> {
    for (page, frame) in dirty {
        write_page(pool, files, identity.offset + page * PAGE_BYTES, *frame)
            .map_err(PagesError::system("write a page back"))?;
    }
    rustix::fs::fdatasync(files.buffered()).map_err(PagesError::system("make a file durable"))?;
    for (page, frame) in dirty {
        pool.set_record(*frame, Record { slot, page: *page, dirty: false });
    }
    pool.slot(slot).note_written();
    tracing::info!(path = ?files.path, pages = dirty.len(), "pages that a process left in the pool are written back");
    Ok(())
}

/// Through the page cache, with a buffer: nothing here is in a hurry.
fn write_page(pool: &Pool, files: &Files, offset: u64, frame: u32) -> Result<(), Errno> {
    let mut page = vec![0; PAGE_BYTES as usize];
    sys::copy_out(pool.addr(frame), &mut page).map_err(|_| Errno::FAULT)?;
    let mut done = 0;
    while done < page.len() {
        match rustix::io::pwrite(files.buffered().as_fd(), &page[done..], offset + done as u64) {
            Ok(0) => return Err(Errno::IO),
            Ok(count) => done += count,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Frees the frames of a region that no process serves.
fn clear(pool: &Pool, slot: u8) {
    for frame in 0..pool.frame_count() {
        if pool.record(frame).is_some_and(|record| record.slot == slot) {
            pool.clear_record(frame);
        }
    }
    pool.slot(slot).vacate();
}

/// Whether a file may be served with a pool, by its lock file.
///
/// # Errors
/// `Elsewhere` when its newest bytes may be in another pool.
pub(crate) fn check_lock_file(path: &Path, own: Option<&Path>) -> Result<(), PagesError> {
    let Some(named) = lock_file::read(path).filter(|named| Some(&**named) != own) else { return Ok(()) };
    if named.exists() {
        return Err(PagesError::Elsewhere { path: path.to_owned(), pool: named });
    }
    // The system was started again: memory did not survive, and what was flushed is in the file.
    tracing::warn!(?path, pool = ?named, "the pool of a file's last server is gone: what was not flushed is lost");
    Ok(())
}
