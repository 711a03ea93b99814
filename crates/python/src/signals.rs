//! Calls of an export's client, during which Python's signals are handled.

use pyo3::prelude::*;
use terrace_export::interruptible;

use crate::failure::Failure;

/// Calls `function` without the interpreter. Signals are handled while it waits for the server; if a handler raises an exception,
/// the call ends with it.
pub fn call_interruptibly<T: Send>(
    py: Python<'_>,
    function: impl Send + FnOnce() -> Result<T, Failure>,
) -> PyResult<T> {
    let called = py.detach(|| interruptible(has_raised, function));
    match PyErr::take(py) {
        Some(raised) => Err(raised),
        None => called.map_err(|failure| failure.into_exception(py)),
    }
}

/// Handles the signals that have come. Returns whether a handler has raised an exception, which is this thread's current one then.
fn has_raised() -> bool {
    Python::attach(|py| py.check_signals().map_err(|raised| raised.restore(py)).is_err())
}
