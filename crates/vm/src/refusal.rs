//! Why memory stays private, and why a directory is not one for swap files.

use std::io;
use std::path::PathBuf;

/// Why a range of memory stays as it is.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// The range is shorter than is worth a file.
    #[error("it has less than 1 MiB")]
    Small,
    /// A part of the range is no private memory without a file that can be read and written to.
    #[error("a part of it is not private, writable memory without a file")]
    NotPrivate,
    /// Peers on this host may be writing to it: the kernel copies to the pages that it had when the copy began.
    #[error(
        "a part of it is registered already, and peers may be writing to it: register the whole range first, or deregister \
         the part"
    )]
    Registered,
    /// It is in the mapping of the calling thread's stack.
    #[error("it is in the stack of the thread that registers it")]
    Stack,
    /// Devices or rings of io_uring may be using it.
    #[error(
        "pages of the process are pinned, for example for io_uring or for another device, which would go on using them"
    )]
    Pinned,
    /// Other threads may use the range meanwhile, and the kernel does not let this process have them wait.
    #[error(
        "other threads must wait if they touch it while it is moved, which needs userfaultfd(2) for faults of the kernel: \
         run as root, permit the user to open /dev/userfaultfd, or set the sysctl vm.unprivileged_userfaultfd to 1"
    )]
    Privilege,
    /// The program uses `userfaultfd` for the range itself.
    #[error("the program handles its page faults by userfaultfd(2)")]
    OtherUserfaultfd,
    /// A system call failed.
    #[error("cannot {attempt}: {source}")]
    System {
        /// What was attempted.
        attempt: &'static str,
        /// The system's error.
        source: io::Error,
    },
}

impl Refusal {
    /// For `map_err`.
    pub(crate) fn system<E: Into<io::Error>>(attempt: &'static str) -> impl FnOnce(E) -> Refusal {
        move |source| Refusal::System { attempt, source: source.into() }
    }
}

/// Why a directory cannot have swap files.
#[derive(Debug, thiserror::Error)]
pub enum SwapError {
    /// Files cannot be created in it.
    #[error("{}: cannot create a swap file: {source}", path.display())]
    Create {
        /// The directory.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Its files are in memory.
    #[error("{}: the file system is in memory: choose a directory on a disk", path.display())]
    InMemory {
        /// The directory.
        path: PathBuf,
    },
}
