//! Errors as exceptions. The classes are Python's own (`python/terrace/errors.py`), because they have two bases.

use pyo3::types::{PyAnyMethods, PyType};
use pyo3::{Py, PyErr, PyResult, Python};
use terrace_nic::WcStatus;
use terrace_node::ClientError;

/// An error, as a class of `terrace.errors` and a text.
#[derive(Clone, Debug)]
pub struct Failure {
    class: &'static str,
    text: String,
}

impl Failure {
    /// The client is closed.
    pub fn closed() -> Failure {
        Failure { class: "ConnectionLostError", text: "the client is closed: connect again".into() }
    }

    /// The client belongs to the process that forked this one.
    pub fn forked() -> Failure {
        let text = "the client belongs to the parent process: connect again in this process";
        Failure { class: "ConnectionLostError", text: text.into() }
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
        Some(Failure { class, text: format!("{text} ({status:?})") })
    }

    /// The exception.
    pub fn into_exception(self, py: Python<'_>) -> PyErr {
        let class = || -> PyResult<Py<PyType>> {
            Ok(py.import("terrace.errors")?.getattr(self.class)?.cast_into::<PyType>()?.unbind())
        };
        match class() {
            Ok(class) => PyErr::from_type(class.into_bound(py), self.text),
            Err(error) => error,
        }
    }
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
        Failure { class, text: error.to_string() }
    }
}
