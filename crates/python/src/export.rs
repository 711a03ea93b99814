//! A client of an exported directory.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use pyo3::exceptions::{PyOverflowError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use terrace_export::{
    Attributes, Client, ClientConfig, ExportError, FileId, OpenAccess, RemoteFile, RenameMode, SetAttributes,
    SetTime,
};
use terrace_nic::PortConfig;

use crate::arguments::{PathArgument, duration, resolve};
use crate::attributes::{dict_of, dict_of_entry};
use crate::client::{local_addresses, local_for};
use crate::connecting::connect_to_one;
use crate::export_file::ExportFile;
use crate::failure::Failure;
use crate::handle::Handle;
use crate::signals::call_interruptibly;

/// The most names of a directory that a listing takes from a server: their dictionaries have about 2 GB.
const NAMES_MAX: usize = 1 << 21;

/// The longest timeout. A longer one is taken for this.
const TIMEOUT_MAX: Duration = Duration::from_secs(24 * 3600);

/// Connects to an exported directory, a `terrace export`, by its address or host name. Of a name's addresses, the first one is
/// used at which an export answers.
///
/// `local` is this end's address. `path` is the path to a server on the same host: "auto", "udp" or "local". Each call ends
/// within `timeout` seconds; connecting again to a server that was restarted is part of a call. Signals are handled while a call
/// waits. An exception of a handler, such as Ctrl-C's, ends the call: the server may have done what was asked or not.
#[pyfunction]
#[pyo3(signature = (server, *, port=7447, local=None, path="auto", timeout=30.0))]
pub fn connect_export(
    py: Python<'_>,
    server: &str,
    port: u16,
    local: Option<&str>,
    path: &str,
    timeout: f64,
) -> PyResult<Export> {
    let path = path.parse().map_err(|error| PyValueError::new_err(format!("path {path:?}: {error}")))?;
    let timeout = duration(timeout)?.unwrap_or(TIMEOUT_MAX).min(TIMEOUT_MAX);
    let local = local_addresses(py, local)?;
    let (client, address) = connect_to_one(py, resolve(py, server)?, move |address| {
        let config = ClientConfig::new(SocketAddr::new(address, port));
        let own = local_for(&local, address).or(config.port.address);
        let port = PortConfig { address: own, path, ..config.port };
        Ok(Client::connect(&ClientConfig { port, timeout, ..config })?)
    })?;
    Ok(Export { client: Handle::new(client), server: SocketAddr::new(address, port) })
}

/// A connection to an exported directory. Paths begin at that directory, with or without a slash; nothing outside it can be
/// reached. Several threads may use it. A process that is forked has to connect again.
#[pyclass(frozen, module = "terrace")]
pub struct Export {
    client: Handle<Client>,
    server: SocketAddr,
}

impl Export {
    fn call<T: Send>(
        &self,
        py: Python<'_>,
        path: &Path,
        function: impl Send + FnOnce(&Client) -> Result<T, ExportError>,
    ) -> PyResult<T> {
        call_interruptibly(py, || {
            function(&self.client.get()?).map_err(|error| Failure::from(error).about(path))
        })
    }
}

#[pymethods]
impl Export {
    /// The server's address and port.
    #[getter]
    fn server(&self) -> String {
        self.server.to_string()
    }

    /// Whether `close` was called.
    #[getter]
    fn closed(&self) -> bool {
        self.client.is_closed()
    }

    /// Whether the server's rules permit this client no change.
    #[getter]
    fn read_only(&self, py: Python<'_>) -> PyResult<bool> {
        self.call(py, Path::new("/"), |client| Ok(client.is_read_only()))
    }

    /// Opens a file. `mode` is one of `open`'s for binary files: "r", "r+", "w", "w+", "x", "x+", "a", "a+". A new file gets
    /// the bits of `permissions`; no umask applies.
    #[pyo3(signature = (path, mode="r", *, permissions=0o644))]
    fn open(&self, py: Python<'_>, path: PathArgument, mode: &str, permissions: u32) -> PyResult<ExportFile> {
        let opening = Opening::of_mode(mode)?;
        let file = self.call(py, &path, |client| opening.open(client, &path, permissions))?;
        Ok(ExportFile::new(file, path.0))
    }

    /// A file's attributes, as a dictionary: name, type ("file", "directory", "link", "other"), size, mode, uid, gid, nlink,
    /// ino, mtime, ctime.
    #[pyo3(signature = (path, *, follow_symlinks=true))]
    fn stat<'py>(
        &self,
        py: Python<'py>,
        path: PathArgument,
        follow_symlinks: bool,
    ) -> PyResult<Bound<'py, PyDict>> {
        let found = self.call(py, &path, |client| match follow_symlinks {
            true => lookup(client, &path),
            false => lookup_link(client, &path),
        })?;
        dict_of(py, &path, &found)
    }

    /// The names in a directory with their attributes, as `stat` has them. Symbolic links are not followed. A file whose
    /// attributes this client may not see has name, type and ino, and None as its size.
    fn list<'py>(&self, py: Python<'py>, path: PathArgument) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let id = self.call(py, &path, |client| Ok(lookup(client, &path)?.id))?;
        let (mut names, mut cookie) = (Vec::new(), Some(0));
        while let Some(from) = cookie {
            let page = self.call(py, &path, |client| client.read_directory(id, from, true))?;
            py.check_signals()?;
            // A wrong server's listing may not end.
            if names.len() + page.entries.len() > NAMES_MAX {
                return Err(PyOverflowError::new_err(format!(
                    "the directory has more than {NAMES_MAX} names"
                )));
            }
            for entry in page.entries {
                names.push(dict_of_entry(py, &entry)?);
            }
            cookie = page.next;
        }
        Ok(names)
    }

    /// Makes a directory with these permission bits; no umask applies.
    #[pyo3(signature = (path, permissions=0o755))]
    fn mkdir(&self, py: Python<'_>, path: PathArgument, permissions: u32) -> PyResult<()> {
        self.call(py, &path, |client| {
            let (parent, name) = parent_of(client, &path)?;
            client.make_directory(parent, &name, permissions).map(|_| ())
        })
    }

    /// Removes an empty directory.
    fn rmdir(&self, py: Python<'_>, path: PathArgument) -> PyResult<()> {
        self.call(py, &path, |client| {
            let (parent, name) = parent_of(client, &path)?;
            client.remove_directory(parent, &name)
        })
    }

    /// Removes a name of a file. A symbolic link is not followed.
    fn unlink(&self, py: Python<'_>, path: PathArgument) -> PyResult<()> {
        self.call(py, &path, |client| {
            let (parent, name) = parent_of(client, &path)?;
            client.unlink(parent, &name)
        })
    }

    /// Renames a file or directory. A file of the new name is replaced, unless `exclusive`.
    #[pyo3(signature = (path, new_path, *, exclusive=false))]
    fn rename(
        &self,
        py: Python<'_>,
        path: PathArgument,
        new_path: PathArgument,
        exclusive: bool,
    ) -> PyResult<()> {
        let mode = if exclusive { RenameMode::NoReplace } else { RenameMode::Replace };
        self.call(py, &path, |client| {
            let (parent, name) = parent_of(client, &path)?;
            let (new_parent, new_name) = parent_of(client, &new_path)?;
            client.rename(parent, &name, new_parent, &new_name, mode)
        })
    }

    /// Makes a file so many bytes long.
    fn truncate(&self, py: Python<'_>, path: PathArgument, length: u64) -> PyResult<()> {
        let set = SetAttributes { len: Some(length), ..SetAttributes::default() };
        self.set_attributes(py, &path, &set)
    }

    /// Sets the times of a file to the server's time now.
    fn touch(&self, py: Python<'_>, path: PathArgument) -> PyResult<()> {
        let now = Some(SetTime::Now);
        self.set_attributes(
            py,
            &path,
            &SetAttributes { accessed: now, modified: now, ..SetAttributes::default() },
        )
    }

    /// Sets the permission bits of a file.
    fn chmod(&self, py: Python<'_>, path: PathArgument, permissions: u32) -> PyResult<()> {
        self.set_attributes(py, &path, &SetAttributes { mode: Some(permissions), ..SetAttributes::default() })
    }

    /// Makes a symbolic link, which the server resolves within the exported directory.
    fn symlink(&self, py: Python<'_>, target: PathArgument, path: PathArgument) -> PyResult<()> {
        self.call(py, &path, |client| {
            let (parent, name) = parent_of(client, &path)?;
            client.symlink(parent, &name, target.as_os_str()).map(|_| ())
        })
    }

    /// Ends the connection when its open files are closed, too.
    fn close(&self, py: Python<'_>) {
        let client = self.client.take();
        py.detach(|| drop(client));
    }

    fn __enter__(slf: Py<Export>) -> Py<Export> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: Bound<'_, PyTuple>) {
        self.close(py);
    }

    fn __repr__(&self) -> String {
        let state = if self.client.is_closed() { ", closed" } else { "" };
        format!("<terrace.Export of {}{state}>", self.server)
    }
}

impl Export {
    fn set_attributes(&self, py: Python<'_>, path: &Path, set: &SetAttributes) -> PyResult<()> {
        self.call(py, path, |client| client.set_attributes(lookup(client, path)?.id, set).map(|_| ()))
    }
}

/// How a file is opened.
struct Opening {
    access: OpenAccess,
    /// A file that does not exist is made.
    makes: bool,
    /// A file that exists is an error.
    is_exclusive: bool,
}

impl Opening {
    fn of_mode(mode: &str) -> PyResult<Opening> {
        let binary = mode.replacen('b', "", 1);
        let (kind, reads_and_writes) = match binary.strip_suffix('+') {
            Some(kind) => (kind, true),
            None => (binary.as_str(), false),
        };
        let (access, makes, is_exclusive) = match kind {
            "r" if reads_and_writes => (OpenAccess::WRITE, false, false),
            "r" => (OpenAccess::READ, false, false),
            "w" => (OpenAccess::WRITE | OpenAccess::TRUNCATE, true, false),
            "x" => (OpenAccess::WRITE, true, true),
            "a" => (OpenAccess::APPEND, true, false),
            _ => return Err(PyValueError::new_err(format!("invalid mode: {mode:?}"))),
        };
        let access = if reads_and_writes { access | OpenAccess::READ } else { access };
        Ok(Opening { access, makes, is_exclusive })
    }

    fn open(&self, client: &Client, path: &Path, permissions: u32) -> Result<RemoteFile, ExportError> {
        if !self.is_exclusive {
            match lookup(client, path) {
                Ok(found) => return client.open(found.id, self.access),
                Err(error) if self.makes && error.errno() == NO_ENTRY => {}
                Err(error) => return Err(error),
            }
        }
        let (parent, name) = parent_of(client, path)?;
        client.create(parent, &name, permissions, self.access, self.is_exclusive)
    }
}

const NO_ENTRY: i32 = libc::ENOENT;

/// A path relative to the exported directory. `..` stays: the server resolves it, and refuses what leaves the directory.
fn relative(path: &Path) -> PathBuf {
    path.components()
        .filter(|component| !matches!(component, Component::RootDir | Component::CurDir))
        .collect()
}

/// The attributes of a path's file. Symbolic links are followed.
fn lookup(client: &Client, path: &Path) -> Result<Attributes, ExportError> {
    let path = relative(path);
    if path.as_os_str().is_empty() { client.attributes(client.root()) } else { client.lookup_path(&path) }
}

/// The attributes of a path's file, or of a symbolic link at the end of the path.
fn lookup_link(client: &Client, path: &Path) -> Result<Attributes, ExportError> {
    if matches!(relative(path).components().next_back(), Some(Component::Normal(_))) {
        let (parent, name) = parent_of(client, path)?;
        return client.lookup(parent, &name);
    }
    lookup(client, path)
}

/// The directory of a path's last name, and the name.
///
/// # Errors
/// `EBUSY` for the exported directory itself, and for paths that end in `..`.
fn parent_of(client: &Client, path: &Path) -> Result<(FileId, OsString), ExportError> {
    let path = relative(path);
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(ExportError::Os(libc::EBUSY));
    };
    Ok((lookup(client, parent)?.id, name.to_owned()))
}
