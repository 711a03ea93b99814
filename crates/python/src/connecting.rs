//! Connecting to a server. It takes seconds where none answers, and Python's signals are handled meanwhile.

use std::net::IpAddr;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::connection::reseed_after_fork;
use crate::failure::Failure;

/// Signals are handled that often.
pub const SIGNALS_INTERVAL: Duration = Duration::from_millis(50);

/// Connects to the first of a host's addresses that has the server, on a thread of its own. If a signal's handler raises an
/// exception, the thread goes on, and closes what it has connected.
pub fn connect_to_one<T: Send + 'static>(
    py: Python<'_>,
    addresses: Vec<IpAddr>,
    connect: impl Fn(IpAddr) -> Result<T, Failure> + Send + 'static,
) -> PyResult<(T, IpAddr)> {
    reseed_after_fork();
    let (sender, mut receiver) = channel();
    let attempt = move || {
        let mut outcome = Err(Failure::Class("ConnectError", "the host has no address".into()));
        for address in addresses {
            outcome = connect(address).map(|connected| (connected, address));
            if outcome.is_ok() {
                break;
            }
        }
        // Without a receiver, what was connected ends here.
        let _ = sender.send(outcome);
    };
    let spawned = std::thread::Builder::new().name("terrace-connect".into()).spawn(attempt);
    spawned.map_err(|error| PyRuntimeError::new_err(format!("no thread to connect: {error}")))?;
    loop {
        // A receiver cannot be shared: it goes there and back.
        let received;
        (received, receiver) = py.detach(move || (receiver.recv_timeout(SIGNALS_INTERVAL), receiver));
        match received {
            Ok(outcome) => return outcome.map_err(|failure| failure.into_exception(py)),
            Err(RecvTimeoutError::Timeout) => py.check_signals()?,
            Err(RecvTimeoutError::Disconnected) => {
                return Err(PyRuntimeError::new_err("the thread that connects has ended"));
            }
        }
    }
}
