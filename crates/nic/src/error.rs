//! Why a verb was refused, and the one place where that becomes an errno.

use rustix::io::Errno;
use terrace_shm::ReaderTimeout;
use terrace_transport::{ModifyError, PostError};

/// Why a verb was refused. [`Error::errno`] is the value that the C ABI returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// An argument is invalid, or does not fit the object's state (EINVAL). The text is for the log.
    #[error("invalid: {0}")]
    Invalid(&'static str),
    /// A queue is full or a limit of the device is reached (ENOMEM).
    #[error("no room: {0}")]
    NoMemory(&'static str),
    /// Another object still refers to this one (EBUSY).
    #[error("busy: {0}")]
    Busy(&'static str),
    /// Terrace does not support this (EOPNOTSUPP).
    #[error("not supported: {0}")]
    NotSupported(&'static str),
    /// The program may not do this (EPERM).
    #[error("not permitted: {0}")]
    Permission(&'static str),
    /// An address range is not accessible (EFAULT).
    #[error("bad address")]
    Fault,
    /// A key or number names nothing (ENOENT).
    #[error("no such object")]
    NotFound,
    /// A non-blocking get found nothing (EAGAIN).
    #[error("nothing there yet")]
    Again,
    /// A signal ended a blocking get (EINTR).
    #[error("interrupted by a signal")]
    Interrupted,
    /// The completion queue has overrun; it delivers nothing any more (EIO).
    #[error("the completion queue has overrun")]
    Overrun,
    /// The device was closed (ENODEV).
    #[error("no device: {0}")]
    NoDevice(&'static str),
    /// The system's error.
    #[error("{}", std::io::Error::from_raw_os_error(*.0))]
    System(i32),
}

impl Error {
    /// The errno for this error at the C ABI, as in the verbs' man pages.
    pub fn errno(self) -> i32 {
        let errno = match self {
            Error::Invalid(_) => Errno::INVAL,
            Error::NoMemory(_) => Errno::NOMEM,
            Error::Busy(_) => Errno::BUSY,
            Error::NotSupported(_) => Errno::OPNOTSUPP,
            Error::Permission(_) => Errno::PERM,
            Error::Fault => Errno::FAULT,
            Error::NotFound => Errno::NOENT,
            Error::Again => Errno::AGAIN,
            Error::Interrupted => Errno::INTR,
            Error::Overrun => Errno::IO,
            Error::NoDevice(_) => Errno::NODEV,
            Error::System(errno) => return errno,
        };
        errno.raw_os_error()
    }
}

impl From<Errno> for Error {
    fn from(errno: Errno) -> Error {
        match errno {
            Errno::AGAIN => Error::Again,
            Errno::INTR => Error::Interrupted,
            other => Error::System(other.raw_os_error()),
        }
    }
}

/// The error for a same-host peer that does not finish an access.
pub(crate) fn reader_timeout(timeout: ReaderTimeout) -> Error {
    tracing::error!("{timeout}: given up; what was to be ended is still there");
    Error::Busy("another process of the host is in the middle of an access")
}

impl From<PostError> for Error {
    fn from(error: PostError) -> Error {
        match error {
            PostError::QueueFull => Error::NoMemory("the work queue is full"),
            PostError::BadState => Error::Invalid("the queue pair's state does not take work requests"),
            PostError::TooManySges => {
                Error::Invalid("more scatter/gather elements than the queue has room for")
            }
            PostError::TooMuchInline => Error::Invalid("more inline data than the queue has room for"),
            PostError::BadOpcode => Error::Invalid("this kind of queue pair does not have the operation"),
            PostError::TooLong => Error::Invalid("the message is too long"),
            PostError::NoTarget => Error::Invalid("the request does not say whom it is for"),
        }
    }
}

impl From<ModifyError> for Error {
    /// The details go to the log; the verbs only know EINVAL.
    fn from(error: ModifyError) -> Error {
        tracing::debug!(%error, "modify_qp refused");
        Error::Invalid("modify_qp refused")
    }
}
