//! Errors as exceptions. The classes are Python's own (`python/terrace/errors.py`), because they have two bases.

use std::fmt::Display;
use std::path::{Path, PathBuf};

use pyo3::exceptions::PyOSError;
use pyo3::types::{PyAnyMethods, PyType};
use pyo3::{Py, PyErr, PyResult, Python};
use terrace_export::ExportError;
use terrace_nic::WcStatus;
use terrace_node::ClientError;

/// An error, as its exception will be.
#[derive(Clone, Debug)]
pub enum Failure {
    /// A class of `terrace.errors` and a text.
    Class(&'static str, String),
    /// An `OSError` with a Linux error number, for which Python has a subclass and a text; and the path that it is about.
    Errno(i32, Option<PathBuf>),
}

impl Failure {
    /// The client is closed.
    pub fn closed() -> Failure {
        Failure::Class("ConnectionLostError", "the client is closed: connect again".into())
    }

    /// The client belongs to the process that forked this one.
    pub fn forked() -> Failure {
        let text = "the client belongs to the parent process: connect again in this process";
        Failure::Class("ConnectionLostError", text.into())
    }

    /// An access beyond the end of a region.
    pub fn out_of_range(offset: u64, len: u64, size: u64) -> Failure {
        ClientError::OutOfRange { offset, len, within: "the region", size }.into()
    }

    /// The failure of an access; `None` if it succeeded.
    pub fn of_status(status: WcStatus) -> Option<Failure> {
        let (class, text) = match status {
            WcStatus::Success => return None,
            WcStatus::Flushed => ("ConnectionLostError", "the connection has ended: connect again"),
            WcStatus::RetryExceeded | WcStatus::RnrRetryExceeded => (
                "ConnectionLostError",
                "the server does not answer any more: is `terrace serve` running there? Then connect again",
            ),
            WcStatus::RemoteAccess | WcStatus::RemoteOperation | WcStatus::RemoteInvalidRequest => (
                "AccessError",
                "the server cannot carry the access out: its log says why (`terrace serve --log info`). Then connect again",
            ),
            _ => ("AccessError", "the access has failed: is its memory still mapped? Then connect again"),
        };
        Some(Failure::Class(class, format!("{text} ({status:?})")))
    }

    /// The failure, about a path if its exception can name one.
    pub fn about(self, path: &Path) -> Failure {
        match self {
            Failure::Errno(errno, _) => Failure::Errno(errno, Some(path.into())),
            failure => failure,
        }
    }

    /// The exception.
    pub fn into_exception(self, py: Python<'_>) -> PyErr {
        let exception = match self {
            Failure::Class(class, text) => {
                class_of(py, class).map(|class| PyErr::from_type(class.into_bound(py), text))
            }
            Failure::Errno(errno, path) => text_of(py, errno).map(|text| match path {
                Some(path) => PyOSError::new_err((errno, text, path.into_os_string())),
                None => PyOSError::new_err((errno, text)),
            }),
        };
        exception.unwrap_or_else(|error| error)
    }
}

fn class_of(py: Python<'_>, name: &str) -> PyResult<Py<PyType>> {
    Ok(py.import("terrace.errors")?.getattr(name)?.cast_into::<PyType>()?.unbind())
}

fn text_of(py: Python<'_>, errno: i32) -> PyResult<String> {
    py.import("os")?.call_method1("strerror", (errno,))?.extract()
}

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Failure {
        let class = match error {
            ClientError::Port(_) | ClientError::Family(_) | ClientError::Silent(_) => "ConnectError",
            ClientError::Refused(_) => "RefusedError",
            ClientError::NoRegion(_) => "RegionNotFoundError",
            ClientError::OutOfRange { .. } => "OutOfRangeError",
            ClientError::Lost | ClientError::Protocol | ClientError::Full => "ConnectionLostError",
            ClientError::Nic(_) => "AccessError",
        };
        Failure::Class(class, text_for_python(&error))
    }
}

/// An error's text. Where it names the options of the command, it names the argument.
fn text_for_python(error: &impl Display) -> String {
    error.to_string().replace("--addr or TERRACE_ADDR", "`local`")
}

impl From<ExportError> for Failure {
    fn from(error: ExportError) -> Failure {
        let class = match error {
            ExportError::Port(_) | ExportError::NoExport { .. } => "ConnectError",
            ExportError::Refused(_) => "RefusedError",
            ExportError::Lost | ExportError::Unanswered | ExportError::Protocol => "ConnectionLostError",
            // The exception of a signal's handler takes its place.
            ExportError::Interrupted => return Failure::Errno(error.errno(), None),
            ExportError::Nic(_) | ExportError::Access(_, WcStatus::RemoteAccess) => "AccessError",
            // These say what a local file system would say.
            ExportError::Os(_)
            | ExportError::Rebooted
            | ExportError::Revoked
            | ExportError::LockLost
            | ExportError::NotOpenFor
            | ExportError::Access(..)
            | ExportError::Full
            | ExportError::Invalid(_) => return Failure::Errno(error.errno(), None),
        };
        Failure::Class(class, text_for_python(&error))
    }
}
