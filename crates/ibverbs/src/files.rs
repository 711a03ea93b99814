//! Regions that are files (`terrace_files`): the files of this process, and what a fork does to them.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use terrace_files::{FileExtent, FileRegion, Files, FilesConfig, OpenError};
use terrace_hostmem::PAGE_BYTES;
use terrace_memory::RegionPolicy;
use terrace_nic::Paging;
use terrace_sync::Uncancelled;

use crate::abi::{IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_ATOMIC, IBV_ACCESS_REMOTE_WRITE};
use crate::errno::{EACCES, EBADF, EINVAL, EOPNOTSUPP, Errno, Result};
use crate::log::write_line;
use crate::process_lock::{Locked, lock};

/// The access flags that need a descriptor that is open for writing.
pub const WRITES: u32 = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;

/// The setting of the number of windows.
const WINDOWS_VARIABLE: &str = "TERRACE_FILE_WINDOWS";

/// The files of this process, once there is one. Locked across `fork`, and not while a file is opened or closed: its server may not answer.
static FILES: Mutex<Option<Arc<Files>>> = Mutex::new(None);

/// The number of forks that led to this process.
static GENERATION: AtomicU32 = AtomicU32::new(1);

fn files() -> Locked<Option<Arc<Files>>> {
    lock(&FILES)
}

/// A registered region's reference to its file. Dropping it waits for accesses under way.
pub struct FileLease {
    /// Taken only by drop.
    region: Option<Arc<FileRegion>>,
    generation: u32,
}

impl FileLease {
    /// The file; `None` in a child of the process that registered it.
    pub fn region(&self) -> Option<&Arc<FileRegion>> {
        self.region.as_ref().filter(|_| self.generation == GENERATION.load(Ordering::Relaxed))
    }

    /// The paging of the registration.
    pub fn paging(&self) -> Option<Paging> {
        // Held while the process forks, so that the child finds the lock below free.
        let _files = files();
        // Peers get the signature page from a server, and this process has none.
        static PATTERN: Mutex<Option<Arc<[u8; PAGE_BYTES as usize]>>> = Mutex::new(None);
        let mut pattern = PATTERN.lock().unwrap_or_else(PoisonError::into_inner);
        let pattern = pattern.get_or_insert_with(|| Arc::new([0; PAGE_BYTES as usize])).clone();
        let pager = self.region()?.clone();
        Some(Paging { pager, pattern, policy: RegionPolicy::Wait })
    }
}

impl Drop for FileLease {
    fn drop(&mut self) {
        let Some(region) = self.region.take() else { return };
        if self.generation == GENERATION.load(Ordering::Relaxed) {
            region.wait_idle();
        } else {
            // The parent's threads, which do not exist in this process, may have locked it.
            std::mem::forget(region);
        }
    }
}

/// Opens a region of the file behind a descriptor.
///
/// # Errors
/// As for [`register_file`](crate::mr::register_file); EINVAL, after a line for the user, for an invalid setting.
pub fn open(descriptor: BorrowedFd<'_>, is_writable: bool, extent: FileExtent) -> Result<FileLease> {
    // Descriptors are closed under locks of the files.
    let _uncancelled = Uncancelled::new();
    let files = files_of_process()?;
    let generation = GENERATION.load(Ordering::Relaxed);
    let region = files.open(descriptor, is_writable, extent).map_err(|error| {
        tracing::debug!(%error, "a file does not become a region");
        errno_of(&error)
    })?;
    Ok(FileLease { region: Some(region), generation })
}

/// The files of this process, made if there have been none.
fn files_of_process() -> Result<Arc<Files>> {
    let mut files = files();
    if let Some(files) = &*files {
        return Ok(files.clone());
    }
    Ok(files.insert(Arc::new(Files::new(&config()?))).clone())
}

/// The statistics of this process's files for `terrace stat`, if there have been any. `None` also while the process forks.
pub fn report() -> Option<(String, serde_json::Value)> {
    let files = FILES.try_lock().ok()?;
    Some(("files".into(), serde_json::to_value(files.as_ref()?.stats()).ok()?))
}

fn errno_of(error: &OpenError) -> Errno {
    match error {
        OpenError::NotOpen => EBADF,
        OpenError::NotRegular => EOPNOTSUPP,
        OpenError::NotPermitted(_) => EACCES,
        OpenError::NoDescriptor(error) | OpenError::System(error) => {
            Errno(error.raw_os_error().unwrap_or(libc::EIO))
        }
    }
}

fn config() -> Result<FilesConfig> {
    let mut config = FilesConfig::default();
    // Shell scripts set an empty variable for an option that was not given.
    let Some(text) = std::env::var_os(WINDOWS_VARIABLE).filter(|text| !text.is_empty()) else {
        return Ok(config);
    };
    let Some(windows_max) = text.to_str().and_then(|text| text.parse().ok()) else {
        write_line(format_args!("{WINDOWS_VARIABLE}: {}: give a number", text.to_string_lossy()));
        return Err(EINVAL);
    };
    config.windows_max = windows_max;
    Ok(config)
}

/// Holds the lock across a fork.
pub struct ForkHold(Locked<Option<Arc<Files>>>);

/// Takes the lock before `fork`.
pub fn hold_for_fork() -> ForkHold {
    ForkHold(files())
}

impl ForkHold {
    /// Forgets the files in the child, because the parent's threads, which may have locked them, do not exist there.
    pub fn forget_in_child(mut self) {
        GENERATION.fetch_add(1, Ordering::Relaxed);
        std::mem::forget(self.0.take());
    }
}
