//! Arguments of Python's calls.

use std::ffi::OsString;
use std::net::{IpAddr, ToSocketAddrs};
use std::ops::Deref;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;

/// A path as Python's own functions take it: str, bytes, or an object that has a path.
pub struct PathArgument(pub PathBuf);

impl FromPyObject<'_, '_> for PathArgument {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, '_, PyAny>) -> PyResult<PathArgument> {
        if let Ok(path) = object.extract() {
            return Ok(PathArgument(path));
        }
        let bytes = object.py().import("os")?.call_method1("fsencode", (object,))?;
        Ok(PathArgument(OsString::from_vec(bytes.extract()?).into()))
    }
}

impl Deref for PathArgument {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.0
    }
}

/// A time in seconds; `None` for infinity.
pub fn duration(seconds: f64) -> PyResult<Option<Duration>> {
    if seconds == f64::INFINITY {
        return Ok(None);
    }
    let duration = Duration::try_from_secs_f64(seconds);
    duration.map(Some).map_err(|error| PyValueError::new_err(format!("timeout: {error}")))
}

/// The addresses of a host.
pub fn resolve(py: Python<'_>, host: &str) -> PyResult<Vec<IpAddr>> {
    let found = py.detach(|| (host, 0).to_socket_addrs());
    let found = found.map_err(|error| PyOSError::new_err(format!("{host:?}: {error}")))?;
    let addresses: Vec<IpAddr> = found.map(|address| address.ip()).collect();
    match addresses.iter().find(|address| address.is_unspecified()) {
        None if addresses.is_empty() => Err(PyOSError::new_err(format!("{host:?} has no address"))),
        None => Ok(addresses),
        Some(address) => Err(PyValueError::new_err(format!("{address} is no host's address"))),
    }
}
