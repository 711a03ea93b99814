//! A client of a memory node.

use std::net::IpAddr;
use std::sync::Arc;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use terrace_nic::PortConfig;
use terrace_node::ClientConfig;

use crate::arguments::resolve;
use crate::connecting::connect_to_one;
use crate::connection::Connection;
use crate::failure::Failure;
use crate::memory::Memory;
use crate::region::Region;

/// The most accesses in flight: the depth of a queue pair.
const DEPTH_MAX: u32 = 1 << 15;

/// Connects to a memory node, a `terrace serve`, by its address or host name. Of a name's addresses, the first one is used at
/// which a node answers.
///
/// `instance` is the node's instance index: 0 for the first process that uses Terrace at its address, else the UDP port that
/// `terrace serve` prints, minus 4791. `local` is this end's address. At most `depth` requests are in flight; further ones wait. `path` is the path to
/// a server on the same host: "auto", "udp" or "local".
#[pyfunction]
#[pyo3(signature = (server, *, instance=0, local=None, depth=256, path="auto"))]
pub fn connect(
    py: Python<'_>,
    server: &str,
    instance: u8,
    local: Option<&str>,
    depth: u32,
    path: &str,
) -> PyResult<Client> {
    if !(1..=DEPTH_MAX).contains(&depth) {
        return Err(PyValueError::new_err(format!("depth {depth}: it is 1 to {DEPTH_MAX}")));
    }
    let path = path.parse().map_err(|error| PyValueError::new_err(format!("path {path:?}: {error}")))?;
    let local = local_addresses(py, local)?;
    let (connection, server) = connect_to_one(py, resolve(py, server)?, move |address| {
        let config = ClientConfig::new(address);
        let port =
            PortConfig { address: local_for(&local, address).or(config.port.address), path, ..config.port };
        Connection::new(&ClientConfig { instance, depth, port, ..config })
    })?;
    Ok(Client { connection, server })
}

/// The addresses of this end; none if it is not chosen.
pub fn local_addresses(py: Python<'_>, local: Option<&str>) -> PyResult<Vec<IpAddr>> {
    local.map_or(Ok(Vec::new()), |local| resolve(py, local))
}

/// This end's address for a server: the first one of its family, or the first one.
pub fn local_for(local: &[IpAddr], server: IpAddr) -> Option<IpAddr> {
    let of_family = local.iter().find(|address| address.is_ipv4() == server.is_ipv4());
    of_family.or(local.first()).copied()
}

/// A connection to a memory node. Several threads may use it. A process that is forked has to connect again.
#[pyclass(frozen, module = "terrace")]
pub struct Client {
    connection: Arc<Connection>,
    server: IpAddr,
}

impl Client {
    fn call<T: Send>(
        &self,
        py: Python<'_>,
        function: impl Send + FnOnce(&Connection) -> Result<T, Failure>,
    ) -> PyResult<T> {
        py.detach(|| function(&self.connection)).map_err(|failure| failure.into_exception(py))
    }
}

#[pymethods]
impl Client {
    /// The server's address.
    #[getter]
    fn server(&self) -> String {
        self.server.to_string()
    }

    /// Whether `close` was called.
    #[getter]
    fn closed(&self) -> bool {
        self.connection.is_closed()
    }

    /// Opens a region of the server by its name.
    fn open(&self, py: Python<'_>, name: &str) -> PyResult<Region> {
        let (handle, size) = self.call(py, |connection| connection.open(name))?;
        Ok(Region::new(self.connection.clone(), handle, name.into(), size))
    }

    /// Registers the bytes of an object for many accesses. Accesses to unregistered objects register them each time.
    fn register(&self, buffer: Bound<'_, PyAny>) -> PyResult<Memory> {
        Memory::register(&self.connection, &buffer)
    }

    /// What the client has requested of its server besides one-sided accesses, by name.
    fn counters<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let counters = self.call(py, Connection::counters)?;
        let dict = PyDict::new(py);
        dict.set_item("requests", counters.requests)?;
        dict.set_item("messages", counters.messages)?;
        dict.set_item("answers", counters.answers)?;
        dict.set_item("pulled_bytes", counters.pulled_bytes)?;
        Ok(dict)
    }

    /// Closes the connection. Accesses that have not ended fail.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.connection.close());
    }

    fn __enter__(slf: Py<Client>) -> Py<Client> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: Bound<'_, pyo3::types::PyTuple>) {
        self.close(py);
    }

    fn __repr__(&self) -> String {
        let state = if self.connection.is_closed() { ", closed" } else { "" };
        format!("<terrace.Client of {}{state}>", self.server)
    }
}
