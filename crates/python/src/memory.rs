//! Registered memory of Python objects.

use std::any::Any;
use std::sync::Arc;

use pyo3::exceptions::{PyBufferError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PySlice;
use terrace_nic::Buffer;

use crate::connection::Connection;
use crate::failure::Failure;
use crate::view::View;

/// A registration.
struct Registered {
    /// `Some`, except while this is dropped.
    buffer: Option<Buffer>,
    connection: Arc<Connection>,
    is_writable: bool,
}

impl Drop for Registered {
    fn drop(&mut self) {
        if !self.connection.is_of_this_process() {
            // A child process has a copy of the memory, but no device that could end the registration.
            std::mem::forget(self.buffer.take());
        }
    }
}

/// A part of registered memory.
#[derive(Clone)]
pub struct Piece {
    registered: Arc<Registered>,
    /// First byte within the registration.
    pub at: usize,
    /// Length in bytes.
    pub len: usize,
}

impl Piece {
    /// Registers `len` bytes at `addr`, which `owner` keeps in place.
    pub fn over(
        connection: &Arc<Connection>,
        addr: u64,
        len: usize,
        is_writable: bool,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Result<Piece, Failure> {
        let buffer = Some(connection.client()?.buffer_over(addr, len, is_writable, owner)?);
        let registered = Registered { buffer, connection: connection.clone(), is_writable };
        Ok(Piece { registered: Arc::new(registered), at: 0, len })
    }

    /// The bytes of a `Memory`, or of another object with a buffer, which is registered until the piece is dropped. `None`
    /// for no bytes.
    pub fn of_object(
        connection: &Arc<Connection>,
        object: &Bound<'_, PyAny>,
        is_writable: bool,
    ) -> PyResult<Option<Piece>> {
        if let Ok(memory) = object.cast::<Memory>() {
            return memory.get().piece_for(connection, is_writable);
        }
        let view = View::new(object, is_writable)?;
        let (addr, len) = (view.addr(), view.len());
        if len == 0 {
            return Ok(None);
        }
        let py = object.py();
        let registered = py.detach(|| Piece::over(connection, addr, len, is_writable, Box::new(view)));
        registered.map(Some).map_err(|failure| failure.into_exception(py))
    }

    /// The registered memory.
    pub fn buffer(&self) -> &Buffer {
        self.registered.buffer.as_ref().expect("a registration that is not dropped")
    }
}

/// Registered memory of an object, for accesses without a registration each. It may be sliced: `memory[0:4096]`.
///
/// The object's bytes stay in place while its `Memory` exists.
#[pyclass(frozen, module = "terrace")]
pub struct Memory {
    /// `None` for no bytes.
    piece: Option<Piece>,
}

impl Memory {
    /// Registers an object, for writing if it can be written to.
    pub fn register(connection: &Arc<Connection>, object: &Bound<'_, PyAny>) -> PyResult<Memory> {
        let piece = match Piece::of_object(connection, object, true) {
            Err(error) if error.is_instance_of::<PyBufferError>(object.py()) => {
                Piece::of_object(connection, object, false)
            }
            registered => registered,
        };
        Ok(Memory { piece: piece? })
    }

    fn piece_for(&self, connection: &Arc<Connection>, is_writable: bool) -> PyResult<Option<Piece>> {
        let Some(piece) = &self.piece else { return Ok(None) };
        if !Arc::ptr_eq(&piece.registered.connection, connection) {
            return Err(PyValueError::new_err(
                "the memory is registered with another client: register it with this one, too",
            ));
        }
        if is_writable && !piece.registered.is_writable {
            return Err(PyBufferError::new_err(
                "the memory is read-only: register an object that can be written to",
            ));
        }
        Ok(Some(piece.clone()))
    }
}

#[pymethods]
impl Memory {
    fn __len__(&self) -> usize {
        self.piece.as_ref().map_or(0, |piece| piece.len)
    }

    /// A part of the memory.
    fn __getitem__(&self, part: &Bound<'_, PySlice>) -> PyResult<Memory> {
        let indices = part.indices(self.__len__().cast_signed())?;
        if indices.step != 1 {
            return Err(PyValueError::new_err("a part of registered memory is contiguous: use step 1"));
        }
        let part = self.piece.as_ref().filter(|_| indices.slicelength > 0);
        let piece = part.map(|piece| Piece {
            registered: piece.registered.clone(),
            at: piece.at + indices.start.unsigned_abs(),
            len: indices.slicelength,
        });
        Ok(Memory { piece })
    }

    /// Whether reads may put their bytes here.
    #[getter]
    fn writable(&self) -> bool {
        self.piece.as_ref().is_none_or(|piece| piece.registered.is_writable)
    }

    fn __repr__(&self) -> String {
        format!("<terrace.Memory of {} bytes>", self.__len__())
    }
}
