//! The errors that users see. Each message says how to correct the error.

use std::io;
use std::path::PathBuf;

use terrace_pages::PagesError;

/// Why a baseline, a region or a file cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum BaselineError {
    /// The file cannot be opened for reading and writing.
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
    /// Another process serves the file.
    #[error("{path} is in use: another server has it locked")]
    InUse {
        /// The file.
        path: PathBuf,
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
    /// The budget exceeds the memory that the process may lock.
    #[error(
        "a budget of {budget} bytes is more than this process may lock into memory ({limit} bytes, of which {used} are \
         used): raise the limit (`ulimit -l`, LimitMEMLOCK= of a service, --ulimit memlock= of a container), give it \
         CAP_IPC_LOCK, or make the budget smaller"
    )]
    MemlockLimit {
        /// The requested budget.
        budget: u64,
        /// The limit.
        limit: u64,
        /// Memory that is locked already.
        used: u64,
    },
    /// The budget exceeds what the machine or the control group has.
    #[error(transparent)]
    Memory(#[from] PagesError),
    /// A region to be pinned does not fit into the budget.
    #[error(
        "a region of {region} bytes does not fit: {room} bytes of the budget are free; make the budget larger"
    )]
    NoRoom {
        /// The bytes of the region that are not resident.
        region: u64,
        /// The free part of the budget.
        room: u64,
    },
    /// A source breaks the rules of [`crate::Source`].
    #[error("not a possible region: {0}")]
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

impl BaselineError {
    /// For `map_err`.
    pub(crate) fn system<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> BaselineError {
        move |source| BaselineError::System { what, source: source.into() }
    }
}
