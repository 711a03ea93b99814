//! Attributes of exported files as Python dictionaries, with the keys that `fsspec` uses.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use pyo3::prelude::*;
use pyo3::types::PyDict;
use terrace_export::{Attributes, DirectoryEntry, FileKind, Timestamp};

/// A file's attributes. `name` is its name in a listing, or its path.
pub fn dict_of<'py>(py: Python<'py>, name: &Path, attributes: &Attributes) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("name", name.as_os_str())?;
    dict.set_item("type", type_of(attributes.kind))?;
    dict.set_item("size", attributes.len)?;
    dict.set_item("mode", attributes.mode)?;
    dict.set_item("uid", attributes.uid)?;
    dict.set_item("gid", attributes.gid)?;
    dict.set_item("nlink", attributes.links)?;
    dict.set_item("ino", attributes.id.ino)?;
    dict.set_item("mtime", seconds_of(attributes.modified))?;
    dict.set_item("ctime", seconds_of(attributes.changed))?;
    Ok(dict)
}

/// What a listing has about a file. The file may not exist any more, or may be in a directory that the client may list but not
/// search: then its size is unknown.
pub fn dict_of_entry<'py>(py: Python<'py>, entry: &DirectoryEntry) -> PyResult<Bound<'py, PyDict>> {
    let name = Path::new(OsStr::from_bytes(&entry.name.0));
    if let Some(attributes) = &entry.attributes {
        return dict_of(py, name, attributes);
    }
    let dict = PyDict::new(py);
    dict.set_item("name", name.as_os_str())?;
    dict.set_item("type", entry.kind.map_or("other", type_of))?;
    dict.set_item("size", py.None())?;
    dict.set_item("ino", entry.ino)?;
    Ok(dict)
}

fn type_of(kind: FileKind) -> &'static str {
    match kind {
        FileKind::Regular => "file",
        FileKind::Directory => "directory",
        FileKind::SymbolicLink => "link",
        FileKind::Fifo | FileKind::Socket | FileKind::CharacterDevice | FileKind::BlockDevice => "other",
    }
}

/// As `os.stat` has times.
fn seconds_of(time: Timestamp) -> f64 {
    time.seconds as f64 + f64::from(time.nanoseconds) / 1e9
}
