//! Where the file of a pool is: on hugetlbfs if pages are set aside there, else on tmpfs, else in memory without a name.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Instant;

use rustix::fs::MemfdFlags;

use crate::error::PagesError;
use crate::sys::{PATIENCE, lock_exclusively};

/// The directory that systems mount tmpfs on.
const TMPFS: &str = "/dev/shm";
const PREFIX: &str = "terrace-pages-";
/// The file system of huge pages.
const HUGE: &str = "hugetlbfs";
/// The file of a pool, locked against other processes.
#[derive(Debug)]
pub(super) struct PoolFile {
    pub(super) file: File,
    /// `None` without a name: it does not outlive the process.
    pub(super) path: Option<PathBuf>,
}

/// Opens the pool's file, or makes one where `bytes` fit.
///
/// # Errors
/// `InUse`, `Open`; `System` when there is not even a file without a name.
pub(super) fn open(directory: Option<&Path>, name: &str, bytes: u64) -> Result<PoolFile, PagesError> {
    let name = format!("{PREFIX}{name}");
    let directories = match directory {
        Some(directory) => vec![directory.to_owned()],
        None => candidates(),
    };
    let existing = directories.iter().map(|directory| directory.join(&name)).find(|path| path.exists());
    let chosen = existing.or_else(|| {
        directories.iter().find(|directory| has_room(directory, bytes)).map(|directory| directory.join(&name))
    });
    let Some(path) = chosen else {
        if let Some(directory) = directory {
            // What was asked for by name is not left out.
            let why = directory.metadata().err().unwrap_or(io::ErrorKind::StorageFull.into());
            return Err(PagesError::Open { path: directory.to_owned(), source: why });
        }
        tracing::warn!(
            bytes,
            "no file system in memory has room for the pool of pages: it has no name, and ends with this process"
        );
        return open_unnamed(bytes);
    };
    let file = open_locked(&path, true, Instant::now() + PATIENCE)?;
    check_owner(&file, &path, None)?;
    Ok(PoolFile { file, path: Some(path) })
}

/// Refuses a file of another user: anybody can make files in the usual directories.
///
/// # Errors
/// `Owner` unless root, this user or `also` owns it; `System`.
pub(super) fn check_owner(file: &File, path: &Path, also: Option<u32>) -> Result<(), PagesError> {
    let uid = file.metadata().map_err(PagesError::system("ask for the owner of a pool"))?.uid();
    let is_trusted = uid == 0 || uid == rustix::process::geteuid().as_raw() || Some(uid) == also;
    if is_trusted { Ok(()) } else { Err(PagesError::Owner { path: path.to_owned(), uid }) }
}

/// Opens a pool's file, or makes one, and locks it, by a deadline if another process has the lock.
///
/// # Errors
/// `InUse`, `Open`.
pub(super) fn open_locked(path: &Path, may_create: bool, deadline: Instant) -> Result<File, PagesError> {
    let error = |source| PagesError::Open { path: path.to_owned(), source };
    loop {
        let mut options = OpenOptions::new();
        // Mode 0600: the frames hold what the regions' files hold. No symbolic links: another user may have made one.
        options.read(true).write(true).create(may_create).truncate(false).mode(0o600);
        // No waiting for the other end of a pipe.
        options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
        let file = options.open(path).map_err(error)?;
        lock_exclusively(&file, path, deadline)?;
        // The last owner may have removed the name before it released the lock.
        if has_path(&file, path) {
            return Ok(file);
        }
    }
}

/// Whether a path names a file.
pub(crate) fn has_path(file: &File, path: &Path) -> bool {
    let (Ok(open), Ok(named)) = (file.metadata(), path.metadata()) else { return false };
    (open.dev(), open.ino()) == (named.dev(), named.ino())
}

fn open_unnamed(bytes: u64) -> Result<PoolFile, PagesError> {
    let file = rustix::fs::memfd_create("terrace-pages", MemfdFlags::CLOEXEC)
        .map_err(PagesError::system("make a file in memory"))?;
    rustix::fs::ftruncate(&file, bytes).map_err(PagesError::system("make a file in memory"))?;
    Ok(PoolFile { file: file.into(), path: None })
}

/// The pools in the usual directories.
pub(crate) fn find_pools() -> Vec<PathBuf> {
    candidates().iter().flat_map(|directory| pools_in(directory)).collect()
}

/// The pools in a directory.
pub(crate) fn pools_in(directory: &Path) -> Vec<PathBuf> {
    let entries = directory.read_dir().into_iter().flatten();
    let paths = entries.filter_map(|entry| entry.ok().map(|entry| entry.path()));
    paths.filter(|path| has_pool_name(path)).collect()
}

/// Whether a file has a name that pools have. The content alone does not tell: peers write what they like to a region's
/// file.
pub(super) fn has_pool_name(path: &Path) -> bool {
    path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with(PREFIX))
}

/// Mounts of hugetlbfs, then tmpfs. In a container without a mount there, the directory is on a disk.
fn candidates() -> Vec<PathBuf> {
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let huge = mounts.lines().filter_map(|line| {
        let mut fields = line.split(' ').skip(1);
        let (place, kind) = (fields.next()?, fields.next()?);
        (kind == "hugetlbfs").then(|| PathBuf::from(place))
    });
    huge.chain(is_tmpfs(Path::new(TMPFS)).then(|| PathBuf::from(TMPFS))).collect()
}

fn has_room(directory: &Path, bytes: u64) -> bool {
    let Ok(system) = rustix::fs::statvfs(directory) else { return false };
    // A mount of hugetlbfs without a limit says 0: then all pages count that are set aside.
    let room = match (system.f_blocks, is_huge(directory)) {
        (0, true) => free_huge_bytes(system.f_bsize).unwrap_or(0),
        _ => system.f_bavail * system.f_frsize,
    };
    room >= bytes && is_writable(directory)
}

/// The memory of free huge pages of a size that nobody has reserved.
fn free_huge_bytes(page_bytes: u64) -> Option<u64> {
    let directory = format!("/sys/kernel/mm/hugepages/hugepages-{}kB", page_bytes >> 10);
    let number = |name: &str| -> Option<u64> {
        std::fs::read_to_string(format!("{directory}/{name}")).ok()?.trim().parse().ok()
    };
    Some(number("free_hugepages")?.saturating_sub(number("resv_hugepages")?) * page_bytes)
}

fn is_huge(path: &Path) -> bool {
    File::open(path).is_ok_and(|file| kind_of(&file).is_ok_and(|kind| kind == HUGE))
}

fn is_tmpfs(path: &Path) -> bool {
    File::open(path)
        .and_then(|file| terrace_shm::file_system(file.as_fd()))
        .is_ok_and(|system| system.kind == libc::TMPFS_MAGIC)
}

fn is_writable(directory: &Path) -> bool {
    rustix::fs::access(directory, rustix::fs::Access::WRITE_OK).is_ok()
}

/// What kind of memory a pool's file is in, for the log.
pub(super) fn kind_of(file: &File) -> io::Result<&'static str> {
    let system = terrace_shm::file_system(file.as_fd())?;
    Ok(if system.kind == libc::HUGETLBFS_MAGIC { HUGE } else { "tmpfs" })
}
