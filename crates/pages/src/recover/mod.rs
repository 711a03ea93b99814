//! Writing pages back that a process has left in a pool, without serving them.
//!
//! | module | content |
//! |---|---|
//! | `region` | the pages of one region |

mod region;

use std::io::ErrorKind;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::error::PagesError;
use crate::frames::{self, Opened, Pool};
use crate::lock_file;
use crate::store::BackingFile;
use crate::sys::PATIENCE;

use region::Written;

pub(crate) use region::{dirty_pages, write_back_all, write_back_part, write_back_region};

/// What was recovered of a file.
#[derive(Debug, Default)]
pub struct Recovered {
    /// The file.
    pub path: PathBuf,
    /// The pools that had pages of the file. A pool is removed when it has no pages of other files.
    pub pools: Vec<PathBuf>,
    /// Pages that were written to the file.
    pub pages_written: u64,
    /// The file, its name or its permissions had changed since its server wrote to it, and pages were written over that.
    pub is_changed: bool,
    /// Why pools could not be examined that the file's lock file does not name.
    pub unexamined: Vec<PagesError>,
}

/// How much of a file's pages has been written.
#[derive(Clone, Copy, Debug)]
pub struct RecoverProgress<'a> {
    /// The file.
    pub path: &'a Path,
    /// Bytes that are in the file and durable.
    pub bytes_written: u64,
    /// Bytes to be written in all.
    pub bytes: u64,
}

/// Whether a path names a pool.
pub fn is_pool(path: &Path) -> bool {
    Pool::is_at(path)
}

/// Writes all pages of a file back that are in a pool, in the usual directories or in `directory`, and removes pools that
/// have no other pages.
///
/// # Errors
/// `InUse` while a server has the pool or the file; `Lost` when the pool is gone that the file's lock file names;
/// `WriteBack` when a page cannot be written: it stays. `Open`, `Kind`, `Layout`, `Owner`; `System`.
pub fn recover(
    path: &Path,
    directory: Option<&Path>,
    progress: &mut dyn FnMut(RecoverProgress<'_>),
) -> Result<Recovered, PagesError> {
    let backing = BackingFile::open_to_recover(path)?;
    let identity = backing.identity().map_err(PagesError::system("identify a file"))?;
    let uid = owner_of(&backing)?;
    let (named, is_damaged) = match lock_file::read(backing.path()) {
        Ok(named) => (named, false),
        Err(_) => (None, true),
    };
    let mut recovered = Recovered { path: backing.path().to_owned(), ..Recovered::default() };
    let mut pools = directory.map_or_else(frames::find_pools, frames::pools_in);
    pools.extend(named.clone().filter(|named| !pools.contains(named)));
    // A file with a pool's name is none of its own pools, and is locked here.
    pools.retain(|pool| !frames::has_path(backing.file(), pool));
    // One wait for all of them: any user can make many, and lock them.
    let deadline = Instant::now() + PATIENCE;
    for pool_path in pools {
        let pool = match open_pool(&pool_path, Some(uid), deadline) {
            Ok(Some(pool)) => pool,
            Ok(None) => continue,
            Err(error) if named.as_ref() == Some(&pool_path) => return Err(error),
            Err(error) => {
                recovered.unexamined.push(error);
                continue;
            }
        };
        let is_its = |slot: &u8| pool.slot(*slot).is_of_file_at(backing.path(), identity);
        let slots: Vec<u8> = Pool::slots().filter(is_its).collect();
        if slots.is_empty() {
            continue;
        }
        for slot in slots {
            let written = region::write_pages(&pool, slot, backing.path(), backing.file().as_fd(), progress)?;
            region::free(&pool, slot, backing.path());
            recovered.pages_written += written.pages;
            recovered.is_changed |= written.is_changed;
        }
        remove_if_unused(&pool);
        recovered.pools.push(pool_path);
    }
    if recovered.pools.is_empty() && (named.is_some() || is_damaged) {
        let path = recovered.path;
        return Err(PagesError::Lost { lock_file: lock_file::path_for(&path), path, pool: named });
    }
    // It would keep servers from the file. The pool was found: no more than one has pages that the file lacks.
    if is_damaged && (recovered.pages_written > 0 || recovered.unexamined.is_empty()) {
        lock_file::remove(&recovered.path);
    }
    Ok(recovered)
}

/// Writes the pages of all regions of a pool back, and removes the pool when all are written.
///
/// # Errors
/// As for [`recover`], of the pool or of each region; `Moved`.
pub fn recover_pool(
    path: &Path,
    progress: &mut dyn FnMut(RecoverProgress<'_>),
) -> Result<Vec<Result<Recovered, PagesError>>, PagesError> {
    let deadline = Instant::now() + PATIENCE;
    let Some(pool) = open_pool(path, None, deadline)? else { return Ok(Vec::new()) };
    let slots = Pool::slots().filter(|slot| pool.slot(*slot).is_in_use());
    let outcomes = slots.map(|slot| recover_slot(&pool, slot, progress)).collect();
    remove_if_unused(&pool);
    Ok(outcomes)
}

/// Writes the pages of a region back to the file that is at its path.
fn recover_slot(
    pool: &Pool,
    slot: u8,
    progress: &mut dyn FnMut(RecoverProgress<'_>),
) -> Result<Recovered, PagesError> {
    let path = pool.slot(slot).path();
    let written = if region::is_clean(pool, slot) {
        // The file may be gone.
        Written::default()
    } else {
        let backing = region::open_file(pool, slot)?;
        pool.check_owner(owner_of(&backing)?)?;
        region::write_pages(pool, slot, backing.path(), backing.file().as_fd(), progress)?
    };
    region::free(pool, slot, &path);
    Ok(Recovered {
        path,
        pools: pool.path().map(Path::to_owned).into_iter().collect(),
        pages_written: written.pages,
        is_changed: written.is_changed,
        unexamined: Vec::new(),
    })
}

/// A pool that no server has, and whose pages may be written to files of `uid`. `None` if there is no pool at the path.
fn open_pool(path: &Path, uid: Option<u32>, deadline: Instant) -> Result<Option<Pool>, PagesError> {
    let pool = match Pool::open_existing(path, deadline) {
        Ok(Some(Opened::Mapped(pool))) => {
            tracing::warn!(
                ?path,
                "a process of this host, which may be stopped, still has the pages of this pool mapped: what it writes to \
                 them from now on is lost"
            );
            pool
        }
        Ok(Some(Opened::Ready(pool) | Opened::Other(pool))) => pool,
        Ok(None) => return Ok(None),
        Err(PagesError::Open { source, .. }) if source.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    if let Some(uid) = uid {
        pool.check_owner(uid)?;
    }
    Ok(Some(pool))
}

/// Removes a pool without regions.
fn remove_if_unused(pool: &Pool) {
    if !Pool::slots().any(|slot| pool.slot(slot).is_in_use()) {
        pool.remove_if_clean();
    }
}

/// The owner of a region's file.
fn owner_of(backing: &BackingFile) -> Result<u32, PagesError> {
    Ok(backing.file().metadata().map_err(PagesError::system("ask for the owner of a file"))?.uid())
}

#[cfg(test)]
mod tests {
    use terrace_hostmem::PAGE_BYTES;

    use super::*;
    use crate::frames::{FileIdentity, Record};
    use crate::{Pages, PagesConfig};

    const FRAMES: u32 = 1024;

    #[test]
    fn pages_of_a_file_whose_file_system_was_mounted_again_are_not_lost() {
        let name = format!("test-{}-mounted", std::process::id());
        let path = std::env::temp_dir().join(&name);
        std::fs::write(&path, [1; 4 * PAGE_BYTES as usize]).expect("written");
        let directory = Path::new("/dev/shm");
        let open = || BackingFile::open(&path, None).expect("a file");
        // A server that was killed has left a dirty page of zeros, of the same file under another number.
        let Ok(Opened::Ready(pool)) = Pool::open(Some(directory), &name, FRAMES) else { panic!("a pool") };
        let identity = open().identity().expect("told");
        pool.slot(0).occupy(FileIdentity { device: identity.device + 1, ..identity }, open().path());
        assert!(pool.allocate(0));
        pool.set_record(0, Record { slot: 0, page: 0, dirty: true });
        lock_file::write(open().path(), pool.path().expect("a path")).expect("written");
        let pool_path = pool.path().expect("a path").to_owned();
        // If the system does not tell when files were made, it may be a file of another file system.
        let untold = FileIdentity { generation: 0, ..identity };
        pool.slot(1).occupy(FileIdentity { device: untold.device + 1, ..untold }, open().path());
        assert!(pool.slot(1).may_be_of_file_at(open().path(), untold));
        assert!(!pool.slot(1).is_of_file_at(open().path(), untold));
        pool.slot(1).vacate();
        drop(pool);
        let config = PagesConfig {
            directory: Some(directory.to_owned()),
            ..PagesConfig::new(&name, u64::from(FRAMES) * PAGE_BYTES)
        };
        let pages = Pages::open(config).expect("the pool");
        let refused = pages.add(open());
        assert!(matches!(refused, Err(PagesError::Remounted { .. })), "{refused:?}");
        drop(pages);
        // Nobody has said that it is the same file.
        let outcomes = recover_pool(&pool_path, &mut |_| {}).expect("the pool is there");
        assert!(matches!(&outcomes[..], [Err(PagesError::Moved { .. })]), "{outcomes:?}");
        let recovered = recover(&path, Some(directory), &mut |_| {}).expect("the pool is there");
        assert_eq!(recovered.pages_written, 1);
        let content = std::fs::read(&path).expect("read");
        assert!(
            content[..4096].iter().all(|byte| *byte == 0) && content[4096..].iter().all(|byte| *byte == 1)
        );
        std::fs::remove_file(&path).expect("removed");
    }
}
