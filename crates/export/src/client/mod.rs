//! The client library.
//!
//! ```no_run
//! use terrace_export::{Client, ClientConfig, ExportError, OpenAccess};
//!
//! fn main() -> Result<(), ExportError> {
//!     let client = Client::connect(&ClientConfig::new("192.0.2.7:7447".parse().unwrap()))?;
//!     let file = client.create(client.root(), "log".as_ref(), 0o644, OpenAccess::READ | OpenAccess::WRITE, false)?;
//!     file.write_at(0, b"hello")?;
//!     file.append(b" world")?;
//!     file.commit()?;
//!     let mut text = [0; 11];
//!     assert_eq!(file.read_at(0, &mut text)?, 11);
//!     Ok(())
//! }
//! ```
//!
//! Every call is synchronous, may be made by any thread, and ends in bounded time ([`ClientConfig::timeout`]). When the
//! connection is lost, a call connects again and opens its file again; [`ExportError::Unanswered`] says that a call may not
//! be repeated by itself. [`interruptible`] ends a call that waits. [`Pipeline`] has many accesses in flight.

mod buffers;
mod config;
mod connect;
pub(crate) mod data;
mod file;
mod interrupt;
mod known;
mod pipeline;
mod send_timer;
pub(crate) mod session;
mod shared;
pub(crate) mod slots;
mod stream;
#[cfg(test)]
pub(crate) mod tests;

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::error::ExportError;
use crate::proto::{
    Answer, Attributes, CONTENT_BYTES_MAX, DirectoryPage, FileId, FileSystem, OpenAccess, RenameMode,
    Request, SetAttributes, Text,
};
pub use buffers::RECORD_BYTES_MAX;
use config::text;
pub use config::{Change, ClientConfig};
pub use file::RemoteFile;
pub use interrupt::{call_before_sleep, interruptible};
pub use pipeline::{Completed, Completion, Pipeline};
use shared::{Repeat, Shared};

/// A connection to an export. Clones share it; it ends with the last clone and the last open file.
#[derive(Clone)]
pub struct Client {
    pub(crate) shared: Arc<Shared>,
}

impl Client {
    /// Connects to an export.
    ///
    /// # Errors
    /// `Port` or `Nic` if no port can be opened; `NoExport` if no export answers; `Refused` by its rules.
    pub fn connect(config: &ClientConfig) -> Result<Client, ExportError> {
        Ok(Client { shared: Shared::connect(config)? })
    }

    /// The exported directory.
    pub fn root(&self) -> FileId {
        self.shared.root()
    }

    /// Whether the export's rules permit the client no change.
    pub fn is_read_only(&self) -> bool {
        self.shared.is_read_only()
    }

    /// The number of the present run of the server's host. What was acknowledged in an earlier one and not committed may be lost.
    ///
    /// # Errors
    /// `Lost`.
    pub fn boot(&self) -> Result<u64, ExportError> {
        Ok(self.shared.session(self.shared.deadline())?.settings.boot)
    }

    /// The file of a name in a directory. Symbolic links are not followed.
    ///
    /// # Errors
    /// All calls of a client fail with `Os` if the server refuses them, `Lost` or `Unanswered` without a connection. Names
    /// that are no single component are refused with `EINVAL`.
    pub fn lookup(&self, parent: FileId, name: &OsStr) -> Result<Attributes, ExportError> {
        let attributes = self.attributes_of(Request::Lookup { parent, name: text(name)? }, Repeat::Yes)?;
        self.shared.learn(attributes.id, parent, name);
        Ok(attributes)
    }

    /// The file of a path relative to the exported directory. Symbolic links within the export are followed.
    ///
    /// # Errors
    /// `EXDEV` or `ELOOP` for a path that leaves the export.
    pub fn lookup_path(&self, path: &Path) -> Result<Attributes, ExportError> {
        let attributes = self.attributes_of(
            Request::LookupPath { path: Text::from(path.as_os_str().as_bytes()) },
            Repeat::Yes,
        )?;
        self.shared.learn_path(attributes.id, path);
        Ok(attributes)
    }

    /// A file's attributes.
    ///
    /// # Errors
    /// `ESTALE` if it does not exist any more.
    pub fn attributes(&self, id: FileId) -> Result<Attributes, ExportError> {
        self.attributes_of(Request::GetAttributes { id }, Repeat::Yes)
    }

    /// Sets attributes.
    ///
    /// # Errors
    /// `EPERM` or `EACCES` without the right.
    pub fn set_attributes(&self, id: FileId, set: &SetAttributes) -> Result<Attributes, ExportError> {
        self.attributes_of(Request::SetAttributes { id, set: *set }, Repeat::Yes)
    }

    /// Whether the client may access a file so: bits of `access(2)` (4 read, 2 write, 1 execute).
    ///
    /// # Errors
    /// `EACCES` if not.
    pub fn check_access(&self, id: FileId, mode: u8) -> Result<(), ExportError> {
        self.done(Request::CheckAccess { id, mode }, Repeat::Yes)
    }

    /// Opens a regular file.
    ///
    /// # Errors
    /// `EACCES` without the right, `EISDIR` or `EOPNOTSUPP` for other files.
    pub fn open(&self, id: FileId, access: OpenAccess) -> Result<RemoteFile, ExportError> {
        Ok(RemoteFile::open(&self.shared, id, access, 0)?.0)
    }

    /// Opens a regular file, and reads all of it by the same request if it is open for reading and has up to 8 KiB. The bytes are
    /// those of [`RemoteFile::opened_attributes`]' version, or newer.
    ///
    /// # Errors
    /// As for [`Client::open`].
    pub fn open_and_read(
        &self,
        id: FileId,
        access: OpenAccess,
    ) -> Result<(RemoteFile, Option<Vec<u8>>), ExportError> {
        RemoteFile::open(&self.shared, id, access, CONTENT_BYTES_MAX as u16)
    }

    /// Makes a regular file with these permission bits, and opens it. Without `exclusive` a file of that name is opened.
    /// The server's umask does not apply.
    ///
    /// # Errors
    /// `EEXIST` for a file of that name if `exclusive`.
    pub fn create(
        &self,
        parent: FileId,
        name: &OsStr,
        mode: u32,
        access: OpenAccess,
        exclusive: bool,
    ) -> Result<RemoteFile, ExportError> {
        RemoteFile::create(&self.shared, parent, name, mode, access, exclusive)
    }

    /// Makes a directory.
    ///
    /// # Errors
    /// As `mkdir(2)`.
    pub fn make_directory(&self, parent: FileId, name: &OsStr, mode: u32) -> Result<Attributes, ExportError> {
        self.made(Request::MakeDirectory { parent, name: text(name)?, mode }, parent, name)
    }

    /// Makes a FIFO.
    ///
    /// # Errors
    /// As `mkfifo(3)`.
    pub fn make_fifo(&self, parent: FileId, name: &OsStr, mode: u32) -> Result<Attributes, ExportError> {
        self.made(Request::MakeFifo { parent, name: text(name)?, mode }, parent, name)
    }

    /// Makes a symbolic link, whose target the server does not interpret.
    ///
    /// # Errors
    /// As `symlink(2)`.
    pub fn symlink(&self, parent: FileId, name: &OsStr, target: &OsStr) -> Result<Attributes, ExportError> {
        let target = Text::from(target.as_bytes());
        self.made(Request::Symlink { parent, name: text(name)?, target }, parent, name)
    }

    /// Makes a further name of a file.
    ///
    /// # Errors
    /// As `link(2)`.
    pub fn link(&self, id: FileId, parent: FileId, name: &OsStr) -> Result<Attributes, ExportError> {
        self.made(Request::Link { id, parent, name: text(name)? }, parent, name)
    }

    /// Removes a name of a file that is no directory. Keys of the file that other clients have are revoked with its last
    /// name; those of this client stay valid until it closes them.
    ///
    /// # Errors
    /// As `unlink(2)`.
    pub fn unlink(&self, parent: FileId, name: &OsStr) -> Result<(), ExportError> {
        self.remove(Request::Unlink { parent, name: text(name)?, only: None }, parent, name)
    }

    /// Removes an empty directory.
    ///
    /// # Errors
    /// As `rmdir(2)`.
    pub fn remove_directory(&self, parent: FileId, name: &OsStr) -> Result<(), ExportError> {
        self.remove(Request::RemoveDirectory { parent, name: text(name)?, only: None }, parent, name)
    }

    /// Repeats an `unlink` that was `Unanswered`: removes the name only if it is still that of this file, which
    /// [`Client::known_file`] named before.
    ///
    /// # Errors
    /// As `unlink(2)`: `ENOENT` if the name is gone. `ESTALE` if another file has it.
    pub fn repeat_unlink(&self, parent: FileId, name: &OsStr, file: FileId) -> Result<(), ExportError> {
        self.remove(Request::Unlink { parent, name: text(name)?, only: Some(file) }, parent, name)
    }

    /// Repeats a `remove_directory` that was `Unanswered`, as [`Client::repeat_unlink`] does an unlink.
    ///
    /// # Errors
    /// As `rmdir(2)`; `ESTALE` if another file has the name.
    pub fn repeat_remove_directory(
        &self,
        parent: FileId,
        name: &OsStr,
        directory: FileId,
    ) -> Result<(), ExportError> {
        let only = Some(directory);
        self.remove(Request::RemoveDirectory { parent, name: text(name)?, only }, parent, name)
    }

    /// The file that this client has found last by a name, without asking the server.
    pub fn known_file(&self, parent: FileId, name: &OsStr) -> Option<FileId> {
        self.shared.known_file(parent, name)
    }

    /// Renames a file.
    ///
    /// # Errors
    /// As `renameat2(2)`.
    pub fn rename(
        &self,
        parent: FileId,
        name: &OsStr,
        new_parent: FileId,
        new_name: &OsStr,
        mode: RenameMode,
    ) -> Result<(), ExportError> {
        self.rename_only((parent, name), (new_parent, new_name), mode, None)
    }

    /// Repeats a rename that was `Unanswered`: only if the name is still that of this file, which [`Client::known_file`] named
    /// before.
    ///
    /// # Errors
    /// As `renameat2(2)`: `ENOENT` if the name is gone. `ESTALE` if another file has it.
    pub fn repeat_rename(
        &self,
        from: (FileId, &OsStr),
        to: (FileId, &OsStr),
        mode: RenameMode,
        file: FileId,
    ) -> Result<(), ExportError> {
        self.rename_only(from, to, mode, Some(file))
    }

    fn rename_only(
        &self,
        from: (FileId, &OsStr),
        to: (FileId, &OsStr),
        mode: RenameMode,
        only: Option<FileId>,
    ) -> Result<(), ExportError> {
        let ((parent, new_parent), (name, new_name)) = ((from.0, to.0), (text(from.1)?, text(to.1)?));
        self.done(Request::Rename { parent, name, new_parent, new_name, mode, only }, Repeat::No)?;
        self.shared.learn_rename(from, to, mode == RenameMode::Exchange);
        Ok(())
    }

    /// The target of a symbolic link.
    ///
    /// # Errors
    /// `EINVAL` for other files.
    pub fn read_link(&self, id: FileId) -> Result<PathBuf, ExportError> {
        match self.shared.call(Request::ReadLink { id }, Repeat::Yes)? {
            Answer::Text { text } => Ok(OsString::from_vec(text.0).into()),
            _ => Err(ExportError::Protocol),
        }
    }

    /// Names of a directory from a cookie on: 0 at first, then [`DirectoryPage::next`]. With `attributes` the entries have
    /// the attributes of their files, as if each had been looked up. A name is a single component of a path, never `.` or
    /// `..`; a page with a next one is not empty.
    ///
    /// # Errors
    /// `ENOTDIR` for other files; `Protocol` if the server sends other names, or a page that does not go on.
    pub fn read_directory(
        &self,
        id: FileId,
        cookie: u64,
        attributes: bool,
    ) -> Result<DirectoryPage, ExportError> {
        match self.shared.call(Request::ReadDirectory { id, cookie, attributes }, Repeat::Yes)? {
            Answer::Directory { page } => {
                check_page(&page, cookie)?;
                for entry in &page.entries {
                    if let Some(attributes) = &entry.attributes {
                        self.shared.learn(attributes.id, id, OsStr::from_bytes(&entry.name.0));
                    }
                }
                Ok(page)
            }
            _ => Err(ExportError::Protocol),
        }
    }

    /// The file system of a file.
    ///
    /// # Errors
    /// As for [`Client::attributes`].
    pub fn file_system(&self, id: FileId) -> Result<FileSystem, ExportError> {
        match self.shared.call(Request::GetFileSystem { id }, Repeat::Yes)? {
            Answer::FileSystem { file_system } => Ok(file_system),
            _ => Err(ExportError::Protocol),
        }
    }

    /// Makes a file and its attributes persistent; of a directory its names.
    ///
    /// # Errors
    /// As `fsync(2)`.
    pub fn sync(&self, id: FileId) -> Result<(), ExportError> {
        self.done(Request::Sync { id }, Repeat::Yes)
    }

    /// Has the server announce changes of a file or directory, until [`Client::unwatch`].
    ///
    /// # Errors
    /// `ENOSPC` if the server has as many watches as it can.
    pub fn watch(&self, id: FileId) -> Result<(), ExportError> {
        self.shared.watch(id, true)
    }

    /// Ends a watch.
    ///
    /// # Errors
    /// As for [`Client::attributes`].
    pub fn unwatch(&self, id: FileId) -> Result<(), ExportError> {
        self.shared.watch(id, false)
    }

    /// The next announced change; `None` if there is none within the time.
    pub fn next_change(&self, timeout: Duration) -> Option<Change> {
        self.shared.next_change(timeout)
    }

    /// A pipeline for up to `depth` accesses in flight, each of up to `access_bytes`.
    ///
    /// # Errors
    /// `Nic` without memory for its buffers.
    pub fn pipeline(&self, depth: usize, access_bytes: usize) -> Result<Pipeline, ExportError> {
        Pipeline::new(&self.shared, depth, access_bytes)
    }

    fn attributes_of(&self, request: Request, repeat: Repeat) -> Result<Attributes, ExportError> {
        match self.shared.call(request, repeat)? {
            Answer::Attributes { attributes } => Ok(attributes),
            _ => Err(ExportError::Protocol),
        }
    }

    fn made(&self, request: Request, parent: FileId, name: &OsStr) -> Result<Attributes, ExportError> {
        let attributes = self.attributes_of(request, Repeat::No)?;
        self.shared.learn(attributes.id, parent, name);
        Ok(attributes)
    }

    /// Sends a request that removes a name.
    fn remove(&self, request: Request, parent: FileId, name: &OsStr) -> Result<(), ExportError> {
        self.done(request, Repeat::No)?;
        self.shared.forget(parent, name);
        Ok(())
    }

    fn done(&self, request: Request, repeat: Repeat) -> Result<(), ExportError> {
        match self.shared.call(request, repeat)? {
            Answer::Done {} => Ok(()),
            _ => Err(ExportError::Protocol),
        }
    }
}

/// Checks what a server has sent of a directory from a cookie on: the names, of which programs that copy a directory make
/// local files, and that the next part is another one. Cookies need not increase: file systems choose them.
pub(crate) fn check_page(page: &DirectoryPage, cookie: u64) -> Result<(), ExportError> {
    let are_components = page.entries.iter().all(|entry| entry.name.is_component());
    let goes_on = page.next.is_none_or(|next| next != cookie && !page.entries.is_empty());
    if are_components && goes_on { Ok(()) } else { Err(ExportError::Protocol) }
}
