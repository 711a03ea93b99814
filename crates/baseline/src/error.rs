//! The errors that users see. Each message says how to correct the error.

use std::io;

use terrace_pages::PagesError;

/// Why a baseline, a region or a file cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum BaselineError {
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
    /// The file cannot be a region's, or the budget exceeds what the machine or the control group has.
    #[error(transparent)]
    Pages(#[from] PagesError),
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
