//! Views of Python's buffers.
//!
//! The stable ABI has these functions since Python 3.11, and pyo3 only then. CPython exports them since 3.0 with the same
//! structure, so that one module serves 3.9 and later.

use std::ffi::{c_char, c_int, c_void};

use pyo3::ffi::PyObject;
use pyo3::{Bound, PyAny, PyErr, PyResult, Python};

/// `PyBUF_WRITABLE`. Without further flags, buffers are contiguous bytes.
const WRITABLE: c_int = 1;

/// `Py_buffer`.
#[repr(C)]
struct RawView {
    buf: *mut c_void,
    obj: *mut PyObject,
    len: isize,
    itemsize: isize,
    readonly: c_int,
    ndim: c_int,
    format: *mut c_char,
    shape: *mut isize,
    strides: *mut isize,
    suboffsets: *mut isize,
    internal: *mut c_void,
}

unsafe extern "C" {
    fn PyObject_GetBuffer(object: *mut PyObject, view: *mut RawView, flags: c_int) -> c_int;
    fn PyBuffer_Release(view: *mut RawView);
}

/// A view of an object's bytes. The object neither moves nor frees them while the view exists.
pub struct View {
    /// In a box, because a view may point into itself.
    raw: Box<RawView>,
}

// SAFETY: the fields are only read, except by `PyBuffer_Release`, which any thread that is attached to the interpreter
// may call.
unsafe impl Send for View {}
// SAFETY: as above: shared views are only read.
unsafe impl Sync for View {}

impl View {
    /// A view of an object's bytes.
    ///
    /// # Errors
    /// Python's own if the object has no contiguous buffer, or a read-only one and `is_writable`.
    pub fn new(object: &Bound<'_, PyAny>, is_writable: bool) -> PyResult<View> {
        let mut raw = Box::new(RawView {
            buf: std::ptr::null_mut(),
            obj: std::ptr::null_mut(),
            len: 0,
            itemsize: 0,
            readonly: 0,
            ndim: 0,
            format: std::ptr::null_mut(),
            shape: std::ptr::null_mut(),
            strides: std::ptr::null_mut(),
            suboffsets: std::ptr::null_mut(),
            internal: std::ptr::null_mut(),
        });
        let flags = if is_writable { WRITABLE } else { 0 };
        // SAFETY: the object is alive, the structure is a `Py_buffer`, and this thread is attached to the interpreter.
        match unsafe { PyObject_GetBuffer(object.as_ptr(), &raw mut *raw, flags) } {
            0 => Ok(View { raw }),
            _ => Err(PyErr::fetch(object.py())),
        }
    }

    /// First byte.
    pub fn addr(&self) -> u64 {
        self.raw.buf as u64
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.raw.len.unsigned_abs()
    }

    /// Copies bytes of the object, from an index on.
    ///
    /// # Panics
    /// Beyond the end of the view.
    pub fn copy_to(&self, _py: Python<'_>, from: usize, memory: &mut [u8]) {
        assert!(from <= self.len() && memory.len() <= self.len() - from, "a part of the view");
        if !memory.is_empty() {
            // SAFETY: the object keeps these bytes in place while the view exists. No reference to them is made: other threads
            // may have views of the object, too. They do not change it meanwhile, because this one is attached to the
            // interpreter. The memory is the caller's alone.
            unsafe { self.raw.buf.cast::<u8>().add(from).copy_to(memory.as_mut_ptr(), memory.len()) }
        }
    }

    /// Copies bytes into the object, from an index on.
    ///
    /// # Panics
    /// Beyond the end of the view, or if it is not writable.
    pub fn copy_from(&self, _py: Python<'_>, to: usize, bytes: &[u8]) {
        assert!(self.raw.readonly == 0, "a view for writing");
        assert!(to <= self.len() && bytes.len() <= self.len() - to, "a part of the view");
        if !bytes.is_empty() {
            // SAFETY: as above, and the object permits writes.
            unsafe { self.raw.buf.cast::<u8>().add(to).copy_from(bytes.as_ptr(), bytes.len()) }
        }
    }
}

impl Drop for View {
    fn drop(&mut self) {
        // An interpreter that shuts down takes no views back, and frees its memory with the process.
        let _ = Python::try_attach(|_| {
            // SAFETY: `PyObject_GetBuffer` has filled the structure, and this is its only release.
            unsafe { PyBuffer_Release(&raw mut *self.raw) }
        });
    }
}
