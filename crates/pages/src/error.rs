//! The errors that users see. Each message says how to correct the error.

use std::fmt;
use std::io;
use std::path::PathBuf;

/// Why a pool, a region or a file cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum PagesError {
    /// A file cannot be opened for reading and writing.
    #[error("cannot open {path} for reading and writing: {source}")]
    Open {
        /// The file.
        path: PathBuf,
        /// The error.
        source: io::Error,
    },
    /// The file does not exist, and no size was given.
    #[error("{path} does not exist; give a size to have it created")]
    Missing {
        /// The file.
        path: PathBuf,
    },
    /// The path is neither a file nor a block device.
    #[error("{path} is neither a regular file nor a block device")]
    Kind {
        /// The file.
        path: PathBuf,
    },
    /// Another process has the file, or this one for something else.
    #[error("{path} is in use: {holder}")]
    InUse {
        /// The file.
        path: PathBuf,
        /// The process.
        holder: LockHolder,
    },
    /// The size is invalid or not possible.
    #[error("{path} cannot have {bytes} bytes: {reason}")]
    Size {
        /// The file.
        path: PathBuf,
        /// The size.
        bytes: u64,
        /// The reason.
        reason: String,
    },
    /// The newest bytes of the file are in another pool.
    #[error(
        "the newest bytes of {path} are in memory, in {} them back with `terrace recover {path}`",
        where_to_find(pool)
    )]
    Elsewhere {
        /// The file.
        path: PathBuf,
        /// The pool; `None` if the lock file beside the file does not name it any more.
        pool: Option<PathBuf>,
    },
    /// The pool has pages of a file with the same path on a file system that had another number.
    #[error(
        "pages of {path} are in {} from when its file system had another number: if it is the same file, write them back with \
         `terrace recover {path}`; if it is another file, remove {}",
        pool_of(pool),
        pool_of(pool)
    )]
    Remounted {
        /// The file.
        path: PathBuf,
        /// The pool; `None` if it has no name.
        pool: Option<PathBuf>,
    },
    /// The pool with the newest bytes of the file is gone.
    #[error(
        "acknowledged writes to {path} that were not flushed are lost: {lock_file} {}, as after a restart of the system \
         (or it is in another container: run the command there). All flushed bytes are in the file: to go on with it, \
         remove {lock_file}",
        why_lost(pool)
    )]
    Lost {
        /// The file.
        path: PathBuf,
        /// The pool; `None` if the lock file does not name it any more.
        pool: Option<PathBuf>,
        /// The file that names the pool.
        lock_file: PathBuf,
    },
    /// Pages of a pool cannot be written to their file.
    #[error(
        "cannot write {pages} pages of {path} back: {source}; nothing is lost, they stay in {pool}: correct the cause and \
         run `terrace recover {path}` again"
    )]
    WriteBack {
        /// The file.
        path: PathBuf,
        /// The pool.
        pool: PathBuf,
        /// Pages that are still to be written.
        pages: u64,
        /// The error.
        source: io::Error,
    },
    /// The file that pages of a pool belong to is not where it was.
    #[error(
        "{pages} pages of {path} stay in {pool}: {reason}; run `terrace recover` with the path that the file has now, or \
         remove the pool if the file is gone for good"
    )]
    Moved {
        /// The file's path when its server ran.
        path: PathBuf,
        /// The pool.
        pool: PathBuf,
        /// Pages that are still to be written.
        pages: u64,
        /// The reason.
        reason: String,
    },
    /// Another user could have put anything in the pool.
    #[error(
        "{path} belongs to user {uid}, and its pages are used by that user only: run the command as user {uid}, or remove \
         the file"
    )]
    Owner {
        /// The pool.
        path: PathBuf,
        /// Its owner.
        uid: u32,
    },
    /// The pool was made by a build with another layout.
    #[error(
        "{path} is a pool of pages of layout {found}, and this build knows layout {known}: run `terrace recover` of the \
         build that made it, then remove it"
    )]
    Layout {
        /// The pool.
        path: PathBuf,
        /// Its layout.
        found: u64,
        /// This build's layout.
        known: u64,
    },
    /// The budget is too small.
    #[error("a budget of {budget} bytes is too small: at least {least} are needed")]
    Budget {
        /// The budget.
        budget: u64,
        /// The least budget.
        least: u64,
    },
    /// The budget exceeds the limit of the control group.
    #[error(
        "a budget of {budget} bytes and {overhead} for buffers and what the kernel knows of pages are more than the memory \
         limit of {limit} bytes of the control group (in {file}): raise that limit, or make the budget smaller"
    )]
    CgroupLimit {
        /// The requested budget.
        budget: u64,
        /// Memory for buffers and the kernel's metadata.
        overhead: u64,
        /// The limit.
        limit: u64,
        /// The file that sets the limit.
        file: PathBuf,
    },
    /// The budget exceeds the memory of the machine.
    #[error("a budget of {budget} bytes is more than the {memory} bytes of memory that this machine has")]
    MachineMemory {
        /// The requested budget.
        budget: u64,
        /// The memory of the machine.
        memory: u64,
    },
    /// The pool has no place for another region.
    #[error("a pool has at most {0} regions")]
    Regions(usize),
    /// A mapping cannot be a region.
    #[error("a mapping cannot be a region: {0}")]
    Source(&'static str),
    /// Another system call failed.
    #[error("cannot {what}: {source}")]
    System {
        /// The attempted operation.
        what: &'static str,
        /// The error.
        source: io::Error,
    },
}

/// The process that has a file locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockHolder {
    /// This process, which was given the file twice.
    ThisProcess,
    /// Another one, and its number if the kernel tells.
    Other(Option<u32>),
}

impl fmt::Display for LockHolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LockHolder::ThisProcess => f.write_str("this process has it locked already: name each file once"),
            LockHolder::Other(None) => f.write_str("another server has it locked"),
            LockHolder::Other(Some(pid)) => {
                let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
                write!(f, "another server has it locked (process {pid}, {})", name.trim_end())
            }
        }
    }
}

/// For the middle of [`PagesError::Elsewhere`].
fn where_to_find(pool: &Option<PathBuf>) -> String {
    match pool {
        Some(pool) => {
            format!("{}, which a server has left: start that server again, or write", pool.display())
        }
        None => "a pool that the damaged lock file beside it does not name: write".into(),
    }
}

/// For [`PagesError::Remounted`].
fn pool_of(pool: &Option<PathBuf>) -> String {
    pool.as_ref().map_or_else(|| "a pool without a name".into(), |pool| pool.display().to_string())
}

/// For the middle of [`PagesError::Lost`].
fn why_lost(pool: &Option<PathBuf>) -> String {
    match pool {
        Some(pool) => format!("names the pool {}, which has no pages of it any more", pool.display()),
        None => "is damaged, and no pool has pages of the file".into(),
    }
}

impl PagesError {
    /// For `map_err`.
    pub(crate) fn system<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> PagesError {
        move |source| PagesError::System { what, source: source.into() }
    }
}
