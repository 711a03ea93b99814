//! What can be wrong with what a user asks for. Each message says what to do about it.

use std::io;
use std::path::PathBuf;

/// Why a tier, a region or a file could not be had.
#[derive(Debug, thiserror::Error)]
pub enum TierError {
    /// The file cannot be opened for reading and writing.
    #[error("cannot open {path} for reading and writing: {source}")]
    Open {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file does not exist, and nobody said how large it should be.
    #[error("{path} does not exist; give a size to have it created")]
    Missing {
        /// The file.
        path: PathBuf,
    },
    /// Neither a file nor a block device.
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
    /// The size makes no sense, or cannot be.
    #[error("{path} cannot have {bytes} bytes: {reason}")]
    Size {
        /// The file.
        path: PathBuf,
        /// The size.
        bytes: u64,
        /// Why.
        reason: String,
    },
    /// More than the process may lock.
    #[error(
        "a budget of {budget} bytes is more than this process may lock into memory ({limit} bytes, of which {used} are \
         used): raise the limit (`ulimit -l`, LimitMEMLOCK= of a service, --ulimit memlock= of a container), give it \
         CAP_IPC_LOCK, or make the budget smaller"
    )]
    MemlockLimit {
        /// What was asked for.
        budget: u64,
        /// The limit.
        limit: u64,
        /// What is locked already.
        used: u64,
    },
    /// More than the control group may have.
    #[error(
        "a budget of {budget} bytes and {overhead} for buffers and what the kernel knows of pages are more than the memory \
         limit of {limit} bytes of the control group (in {file}): raise that limit, or make the budget smaller"
    )]
    CgroupLimit {
        /// What was asked for.
        budget: u64,
        /// What else is needed.
        overhead: u64,
        /// The limit.
        limit: u64,
        /// Where it is set.
        file: PathBuf,
    },
    /// More than the machine has.
    #[error("a budget of {budget} bytes is more than the {memory} bytes of memory that this machine has")]
    MachineMemory {
        /// What was asked for.
        budget: u64,
        /// What there is.
        memory: u64,
    },
    /// A region to be locked as a whole that does not fit.
    #[error(
        "a region of {region} bytes does not fit: {room} bytes of the budget are free; make the budget larger"
    )]
    NoRoom {
        /// What the region needs.
        region: u64,
        /// What is left of the budget.
        room: u64,
    },
    /// A source that is not what it has to be.
    #[error("not a possible region: {0}")]
    Source(&'static str),
    /// The kernel refused something else.
    #[error("cannot {what}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// Why it failed.
        source: io::Error,
    },
}

impl TierError {
    /// For `map_err`.
    pub(crate) fn system<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> TierError {
        move |source| TierError::System { what, source: source.into() }
    }
}
