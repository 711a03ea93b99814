//! A region of a server.

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use terrace_node::RegionHandle;

use crate::access::{Access, Kind, Range};
use crate::connection::Connection;
use crate::failure::Failure;
use crate::memory::Piece;
use crate::operation::{Operation, Outcome};

/// A region of a memory node: `len(region)` bytes, which may be more than the node's memory.
///
/// Any object with contiguous bytes is a buffer: bytearray, memoryview, mmap, array, numpy arrays, and `Memory`. Bytes go
/// from the network straight to the buffer, and back. Its object must not change or be read before the access has ended.
/// Accesses to the same bytes of the region take effect in the order in which they begin.
#[pyclass(frozen, module = "terrace")]
pub struct Region {
    connection: Arc<Connection>,
    handle: RegionHandle,
    name: String,
    size: u64,
}

/// A part of the region, and the object that it is read into or written from.
type Item<'py> = (u64, Bound<'py, PyAny>);

impl Region {
    /// An open region.
    pub fn new(connection: Arc<Connection>, handle: RegionHandle, name: String, size: u64) -> Region {
        Region { connection, handle, name, size }
    }

    fn begin(&self, py: Python<'_>, kind: Kind, ranges: Vec<Range>, outcome: Outcome) -> PyResult<Operation> {
        for Range { offset, len, .. } in &ranges {
            if *offset > self.size || *len > self.size - *offset {
                return Err(Failure::out_of_range(*offset, *len, self.size).into_exception(py));
            }
        }
        let access = Access::new(kind, self.handle.clone(), ranges);
        Operation::begin(py, &self.connection, access, outcome)
    }

    /// Begins an access to several parts.
    fn begin_items(&self, py: Python<'_>, kind: Kind, items: Vec<Item<'_>>) -> PyResult<Operation> {
        let mut ranges = Vec::with_capacity(items.len());
        for (offset, object) in items {
            let memory = Piece::of_object(&self.connection, &object, kind == Kind::Read)?;
            let len = memory.as_ref().map_or(0, |piece| piece.len as u64);
            ranges.push(Range { offset, len, memory });
        }
        let count = ranges.iter().map(|range| range.len).sum();
        self.begin(py, kind, ranges, Outcome::Count(count))
    }
}

#[pymethods]
impl Region {
    /// The region's name.
    #[getter]
    fn name(&self) -> &str {
        &self.name
    }

    fn __len__(&self) -> PyResult<usize> {
        Ok(usize::try_from(self.size)?)
    }

    fn __repr__(&self) -> String {
        format!("<terrace.Region {:?} of {} bytes>", self.name, self.size)
    }

    /// Reads `length` bytes.
    fn read(&self, py: Python<'_>, offset: u64, length: usize) -> PyResult<Py<PyAny>> {
        self.begin_read(py, offset, length)?.wait_until(py, None)
    }

    /// Reads as many bytes as the buffer has, into the buffer. Returns their number.
    fn read_into(&self, py: Python<'_>, offset: u64, buffer: Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        self.begin_read_into(py, offset, buffer)?.wait_until(py, None)
    }

    /// Reads several parts, each into its buffer: `[(offset, buffer), ...]`. Returns the number of bytes.
    fn read_many(&self, py: Python<'_>, parts: Vec<Item<'_>>) -> PyResult<Py<PyAny>> {
        self.begin_read_many(py, parts)?.wait_until(py, None)
    }

    /// Writes the bytes of the buffer. Returns their number. Every later read returns them, and they survive the end of the
    /// server's process; `commit` guarantees more.
    fn write(&self, py: Python<'_>, offset: u64, buffer: Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        self.begin_write(py, offset, buffer)?.wait_until(py, None)
    }

    /// Writes several parts, each from its buffer: `[(offset, buffer), ...]`. Returns the number of bytes.
    fn write_many(&self, py: Python<'_>, parts: Vec<Item<'_>>) -> PyResult<Py<PyAny>> {
        self.begin_write_many(py, parts)?.wait_until(py, None)
    }

    /// Makes a range durable, by default the whole region: writes that ended before survive a power failure.
    #[pyo3(signature = (offset=0, length=None))]
    fn commit(&self, py: Python<'_>, offset: u64, length: Option<u64>) -> PyResult<Py<PyAny>> {
        self.begin_commit(py, offset, length)?.wait_until(py, None)
    }

    /// Begins what `read` does.
    fn begin_read(&self, py: Python<'_>, offset: u64, length: usize) -> PyResult<Operation> {
        // Before the memory for the bytes is allocated.
        if offset > self.size || length as u64 > self.size - offset {
            return Err(Failure::out_of_range(offset, length as u64, self.size).into_exception(py));
        }
        let bytes = PyBytes::new_with(py, length, |_| Ok(()))?.unbind();
        let mut ranges = Vec::new();
        if length > 0 {
            // Nobody else has the object yet, so that its bytes may still change.
            let addr = bytes.as_bytes(py).as_ptr() as u64;
            let owner = Box::new(bytes.clone_ref(py));
            let memory = py.detach(|| Piece::over(&self.connection, addr, length, true, owner));
            let memory = Some(memory.map_err(|failure| failure.into_exception(py))?);
            ranges.push(Range { offset, len: length as u64, memory });
        }
        self.begin(py, Kind::Read, ranges, Outcome::Bytes(bytes))
    }

    /// Begins what `read_into` does.
    fn begin_read_into(&self, py: Python<'_>, offset: u64, buffer: Bound<'_, PyAny>) -> PyResult<Operation> {
        self.begin_items(py, Kind::Read, vec![(offset, buffer)])
    }

    /// Begins what `read_many` does.
    fn begin_read_many(&self, py: Python<'_>, parts: Vec<Item<'_>>) -> PyResult<Operation> {
        self.begin_items(py, Kind::Read, parts)
    }

    /// Begins what `write` does.
    fn begin_write(&self, py: Python<'_>, offset: u64, buffer: Bound<'_, PyAny>) -> PyResult<Operation> {
        self.begin_items(py, Kind::Write, vec![(offset, buffer)])
    }

    /// Begins what `write_many` does.
    fn begin_write_many(&self, py: Python<'_>, parts: Vec<Item<'_>>) -> PyResult<Operation> {
        self.begin_items(py, Kind::Write, parts)
    }

    /// Begins what `commit` does.
    #[pyo3(signature = (offset=0, length=None))]
    fn begin_commit(&self, py: Python<'_>, offset: u64, length: Option<u64>) -> PyResult<Operation> {
        let len = match length {
            Some(length) => length,
            None => self.size.saturating_sub(offset),
        };
        let ranges = vec![Range { offset, len, memory: None }];
        self.begin(py, Kind::Commit, ranges, Outcome::Nothing)
    }
}
