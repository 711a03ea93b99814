//! An open file of an exported directory.

use std::ffi::OsStr;
use std::path::PathBuf;

use pyo3::exceptions::PyMemoryError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple};
use terrace_export::{ExportError, RECORD_BYTES_MAX, RemoteFile};

use crate::attributes::dict_of;
use crate::failure::Failure;
use crate::handle::Handle;
use crate::signals::call_interruptibly;
use crate::view::View;

/// The longest part of an access that is one call of the client library, which ends within the client's timeout. Signals are
/// handled between them, too: a call that does not wait handles none.
const STEP_BYTES_MAX: usize = 8 << 20;
/// The most bytes of an object that are copied at a time.
const COPIED_BYTES_MAX: usize = 1 << 20;
/// The most memory that is allocated because the server says that the file is so long. More follows as bytes arrive.
const TRUSTED_BYTES_MAX: u64 = 64 << 20;

/// An open file of an export. Several threads may use it. Reads and writes are one-sided: the server's program takes no part.
#[pyclass(frozen, module = "terrace")]
pub struct ExportFile {
    file: Handle<RemoteFile>,
    path: PathBuf,
}

impl ExportFile {
    /// An open file.
    pub fn new(file: RemoteFile, path: PathBuf) -> ExportFile {
        ExportFile { file: Handle::new(file), path }
    }

    fn call<T: Send>(
        &self,
        py: Python<'_>,
        function: impl Send + FnOnce(&RemoteFile) -> Result<T, ExportError>,
    ) -> PyResult<T> {
        let about = |error| Failure::from(error).about(&self.path);
        call_interruptibly(py, || function(&self.file.get()?).map_err(about))
    }

    /// Fills memory from an offset on, as far as the file has bytes. Returns their number.
    fn fill(&self, py: Python<'_>, offset: u64, memory: &mut [u8]) -> PyResult<usize> {
        let mut count = 0;
        for step in memory.chunks_mut(STEP_BYTES_MAX) {
            let Some(at) = offset.checked_add(count as u64) else { break };
            let (len, read) = (step.len(), self.call(py, |file| file.read_at(at, step))?);
            count += read;
            if read < len {
                break;
            }
            py.check_signals()?;
        }
        Ok(count)
    }

    /// Reads bytes straight into the object that is returned.
    fn read_all<'py>(&self, py: Python<'py>, offset: u64, length: usize) -> PyResult<Bound<'py, PyBytes>> {
        let mut count = 0;
        let bytes = PyBytes::new_with(py, length, |memory| {
            count = self.fill(py, offset, memory)?;
            Ok(())
        })?;
        // Another client may have truncated the file meanwhile.
        if count == length { Ok(bytes) } else { Ok(PyBytes::new(py, &bytes.as_bytes()[..count])) }
    }

    /// Reads many bytes into memory that grows with them.
    fn read_as_it_arrives<'py>(
        &self,
        py: Python<'py>,
        offset: u64,
        length: u64,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let mut bytes = Vec::new();
        loop {
            let (begin, at) = (bytes.len(), offset.saturating_add(bytes.len() as u64));
            let step = (length - begin as u64).min(TRUSTED_BYTES_MAX) as usize;
            bytes.try_reserve(step).map_err(|error| PyMemoryError::new_err(error.to_string()))?;
            bytes.resize(begin + step, 0);
            let count = self.fill(py, at, &mut bytes[begin..])?;
            bytes.truncate(begin + count);
            if count < step || bytes.len() as u64 == length {
                return Ok(PyBytes::new(py, &bytes));
            }
        }
    }
}

#[pymethods]
impl ExportFile {
    /// The path by which it was opened.
    #[getter]
    fn path(&self) -> &OsStr {
        self.path.as_os_str()
    }

    /// Whether `close` was called.
    #[getter]
    fn closed(&self) -> bool {
        self.file.is_closed()
    }

    /// The file's attributes now; see `Export.stat`.
    fn stat<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let attributes = self.call(py, RemoteFile::attributes)?;
        dict_of(py, &self.path, &attributes)
    }

    /// Reads `length` bytes from an offset on; fewer if the file ends before.
    fn read_at<'py>(&self, py: Python<'py>, offset: u64, length: u64) -> PyResult<Bound<'py, PyBytes>> {
        // No more memory than the file has bytes, which `read_into` would find out, too.
        let rest = |file: &RemoteFile| file.len().saturating_sub(offset);
        let rest = self.call(py, |file| match rest(file) {
            known if known >= length => Ok(known),
            _ => file.attributes().map(|_| rest(file)),
        })?;
        match length.min(rest) {
            length @ ..=TRUSTED_BYTES_MAX => self.read_all(py, offset, usize::try_from(length)?),
            length => self.read_as_it_arrives(py, offset, length),
        }
    }

    /// Reads as many bytes as the buffer has, into the buffer; fewer if the file ends before. Returns their number.
    fn read_into_at(&self, py: Python<'_>, offset: u64, buffer: Bound<'_, PyAny>) -> PyResult<usize> {
        let view = View::new(&buffer, true)?;
        // Not straight into the object: other threads may use its bytes while this one waits without the interpreter.
        let (mut memory, mut count) = (vec![0; view.len().min(COPIED_BYTES_MAX)], 0);
        while count < view.len() {
            let Some(at) = offset.checked_add(count as u64) else { break };
            let len = memory.len().min(view.len() - count);
            let read = self.fill(py, at, &mut memory[..len])?;
            view.copy_from(py, count, &memory[..read]);
            count += read;
            if read < len {
                break;
            }
        }
        Ok(count)
    }

    /// Writes the bytes of the buffer from an offset on. A file that ends before becomes longer. Returns their number.
    fn write_at(&self, py: Python<'_>, offset: u64, buffer: Bound<'_, PyAny>) -> PyResult<usize> {
        let mut at = offset;
        for_parts(&buffer, STEP_BYTES_MAX, |part| {
            self.call(py, |file| file.write_at(at, part))?;
            at = at.saturating_add(part.len() as u64);
            Ok(())
        })
    }

    /// Appends the bytes of the buffer, in records of 1 MiB: each is in the file as a whole and once. Returns the end of the
    /// last one.
    fn append(&self, py: Python<'_>, buffer: Bound<'_, PyAny>) -> PyResult<u64> {
        let mut end = self.call(py, |file| Ok(file.len()))?;
        for_parts(&buffer, RECORD_BYTES_MAX, |record| {
            end = self.call(py, |file| file.append(record))? + record.len() as u64;
            Ok(())
        })?;
        Ok(end)
    }

    /// Makes the file so many bytes long.
    fn truncate(&self, py: Python<'_>, length: u64) -> PyResult<()> {
        self.call(py, |file| file.truncate(length))
    }

    /// Makes all writes and appends of the file durable: they survive a power failure.
    fn commit(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, RemoteFile::commit)
    }

    /// Closes the file.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        match self.file.take() {
            Some(file) => call_interruptibly(py, || {
                file.close().map_err(|error| Failure::from(error).about(&self.path))
            }),
            None => Ok(()),
        }
    }

    fn __enter__(slf: Py<ExportFile>) -> Py<ExportFile> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: Bound<'_, PyTuple>) -> PyResult<()> {
        self.close(py)
    }

    fn __repr__(&self) -> String {
        let state = if self.file.is_closed() { ", closed" } else { "" };
        format!("<terrace.ExportFile {:?}{state}>", self.path)
    }
}

/// Calls `function` with an object's bytes, in parts of up to so many. Returns their number. Those of `bytes` never change;
/// others are copied, because other threads may change them while `function` waits without the interpreter.
fn for_parts(
    object: &Bound<'_, PyAny>,
    part_bytes_max: usize,
    mut function: impl FnMut(&[u8]) -> PyResult<()>,
) -> PyResult<usize> {
    let py = object.py();
    if let Ok(bytes) = object.cast::<PyBytes>() {
        for part in bytes.as_bytes().chunks(part_bytes_max) {
            function(part)?;
            py.check_signals()?;
        }
        return Ok(bytes.as_bytes().len());
    }
    let view = View::new(object, false)?;
    let step = part_bytes_max.min(COPIED_BYTES_MAX);
    let mut memory = vec![0; view.len().min(step)];
    for at in (0..view.len()).step_by(step) {
        let part = memory.len().min(view.len() - at);
        view.copy_to(py, at, &mut memory[..part]);
        function(&memory[..part])?;
        py.check_signals()?;
    }
    Ok(view.len())
}
