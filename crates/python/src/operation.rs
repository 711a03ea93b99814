//! An access that has begun.

use std::sync::Arc;
use std::time::Instant;

use pyo3::exceptions::PyTimeoutError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::access::Access;
use crate::arguments::duration;
use crate::connecting::SIGNALS_INTERVAL;
use crate::connection::Connection;

/// What an access returns.
pub enum Outcome {
    /// The bytes that were read.
    Bytes(Py<PyBytes>),
    /// The number of bytes that were read or written.
    Count(u64),
    /// Nothing.
    Nothing,
}

/// An access that has begun: a read, a write or a commit. It goes on without its `Operation`, but makes progress only
/// during calls of its client's methods, unless it has a callback.
#[pyclass(frozen, module = "terrace")]
pub struct Operation {
    connection: Arc<Connection>,
    access: Arc<Access>,
    outcome: Outcome,
}

impl Operation {
    /// Begins an access.
    pub fn begin(
        py: Python<'_>,
        connection: &Arc<Connection>,
        access: Arc<Access>,
        outcome: Outcome,
    ) -> PyResult<Operation> {
        py.detach(|| connection.begin(&access)).map_err(|failure| failure.into_exception(py))?;
        Ok(Operation { connection: connection.clone(), access, outcome })
    }

    /// Waits for the end. Other threads of the interpreter run in the meantime, and signals are handled.
    pub fn wait_until(&self, py: Python<'_>, deadline: Option<Instant>) -> PyResult<Py<PyAny>> {
        self.connection.check_progress(&self.access).map_err(|failure| failure.into_exception(py))?;
        loop {
            let slice = Instant::now() + SIGNALS_INTERVAL;
            let until = deadline.map_or(slice, |deadline| slice.min(deadline));
            if py.detach(|| self.connection.wait(&self.access, until)) {
                return self.result(py);
            }
            py.check_signals()?;
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Err(PyTimeoutError::new_err("the access has not ended yet: it goes on, wait again"));
            }
        }
    }

    fn result(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        self.access.outcome().map_err(|failure| failure.into_exception(py))?;
        Ok(match &self.outcome {
            Outcome::Bytes(bytes) => bytes.clone_ref(py).into_any(),
            Outcome::Count(count) => count.into_pyobject(py)?.into_any().unbind(),
            Outcome::Nothing => py.None(),
        })
    }
}

#[pymethods]
impl Operation {
    /// Waits for the end, and returns what the access returns: bytes, a number of bytes, or None. Raises TimeoutError
    /// after `timeout` seconds; the access goes on then.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Py<PyAny>> {
        let timeout = timeout.map_or(Ok(None), duration)?;
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        self.wait_until(py, deadline)
    }

    /// Whether the access has ended. Makes progress.
    fn done(&self, py: Python<'_>) -> bool {
        py.detach(|| self.access.is_done() || (self.connection.advance() && self.access.is_done()))
    }

    /// Calls `callback()` when the access has ended, from any thread; at once if it has ended already.
    fn add_done_callback(&self, py: Python<'_>, callback: Py<PyAny>) -> PyResult<()> {
        self.connection.add_callback(py, &self.access, callback)
    }

    fn __repr__(&self) -> String {
        let state = if self.access.is_done() { "done" } else { "in flight" };
        format!("<terrace.Operation: {:?}, {state}>", self.access.kind)
    }
}
