//! What a mount needs of an export. [`Client`] is one; tests have others.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::time::Duration;

use terrace_export::{
    Attributes, Change, Client, DirectoryPage, ExportError, FileId, FileSystem, LockKind, OpenAccess,
    RemoteFile, RenameMode, SetAttributes,
};

/// Calls of an export. Each ends in bounded time; a lost connection is replaced by the callee. The methods are those of
/// [`Client`].
pub trait Remote: Send + Sync + 'static {
    /// An open file.
    type File: RemoteOpen;

    /// See [`Client::boot`].
    fn boot(&self) -> Result<u64, ExportError>;
    /// See [`Client::lookup`].
    fn lookup(&self, parent: FileId, name: &OsStr) -> Result<Attributes, ExportError>;
    /// See [`Client::attributes`].
    fn attributes(&self, id: FileId) -> Result<Attributes, ExportError>;
    /// See [`Client::set_attributes`].
    fn set_attributes(&self, id: FileId, set: &SetAttributes) -> Result<Attributes, ExportError>;
    /// See [`Client::check_access`].
    fn check_access(&self, id: FileId, mode: u8) -> Result<(), ExportError>;
    /// See [`Client::open_and_read`].
    fn open(&self, id: FileId, access: OpenAccess) -> Result<(Self::File, Option<Vec<u8>>), ExportError>;
    /// See [`Client::create`].
    fn create(
        &self,
        parent: FileId,
        name: &OsStr,
        mode: u32,
        access: OpenAccess,
        exclusive: bool,
    ) -> Result<Self::File, ExportError>;
    /// See [`Client::make_directory`].
    fn make_directory(&self, parent: FileId, name: &OsStr, mode: u32) -> Result<Attributes, ExportError>;
    /// See [`Client::make_fifo`].
    fn make_fifo(&self, parent: FileId, name: &OsStr, mode: u32) -> Result<Attributes, ExportError>;
    /// See [`Client::symlink`].
    fn symlink(&self, parent: FileId, name: &OsStr, target: &OsStr) -> Result<Attributes, ExportError>;
    /// See [`Client::link`].
    fn link(&self, id: FileId, parent: FileId, name: &OsStr) -> Result<Attributes, ExportError>;
    /// See [`Client::known_file`].
    fn known_file(&self, parent: FileId, name: &OsStr) -> Option<FileId>;
    /// See [`Client::unlink`], and with `only` [`Client::repeat_unlink`].
    fn unlink(&self, parent: FileId, name: &OsStr, only: Option<FileId>) -> Result<(), ExportError>;
    /// See [`Client::remove_directory`], and with `only` [`Client::repeat_remove_directory`].
    fn remove_directory(&self, parent: FileId, name: &OsStr, only: Option<FileId>)
    -> Result<(), ExportError>;
    /// See [`Client::rename`], and with `only` [`Client::repeat_rename`].
    fn rename(
        &self,
        from: (FileId, &OsStr),
        to: (FileId, &OsStr),
        mode: RenameMode,
        only: Option<FileId>,
    ) -> Result<(), ExportError>;
    /// See [`Client::read_link`].
    fn read_link(&self, id: FileId) -> Result<PathBuf, ExportError>;
    /// See [`Client::read_directory`].
    fn read_directory(&self, id: FileId, cookie: u64, attributes: bool)
    -> Result<DirectoryPage, ExportError>;
    /// See [`Client::file_system`].
    fn file_system(&self, id: FileId) -> Result<FileSystem, ExportError>;
    /// See [`Client::sync`].
    fn sync(&self, id: FileId) -> Result<(), ExportError>;
    /// See [`Client::watch`].
    fn watch(&self, id: FileId) -> Result<(), ExportError>;
    /// See [`Client::unwatch`].
    fn unwatch(&self, id: FileId) -> Result<(), ExportError>;
    /// See [`Client::next_change`].
    fn next_change(&self, timeout: Duration) -> Option<Change>;
}

/// Calls of an open file. The methods are those of [`RemoteFile`]; dropping it closes it.
pub trait RemoteOpen: Send + Sync + 'static {
    /// See [`RemoteFile::opened_attributes`].
    fn opened_attributes(&self) -> Attributes;
    /// See [`RemoteFile::attributes`].
    fn attributes(&self) -> Result<Attributes, ExportError>;
    /// See [`RemoteFile::read_at`].
    fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<usize, ExportError>;
    /// See [`RemoteFile::write_short`].
    fn write_short(&self, offset: u64, data: &[u8]) -> Result<bool, ExportError>;
    /// See [`RemoteFile::write_extents`].
    fn write_extents(&self, extents: &[(u64, &[u8])]) -> Result<(), ExportError>;
    /// See [`RemoteFile::commit`].
    fn commit(&self) -> Result<(), ExportError>;
    /// See [`RemoteFile::uncommitted_boot`].
    fn uncommitted_boot(&self) -> Option<u64>;
    /// See [`RemoteFile::truncate`].
    fn truncate(&self, len: u64) -> Result<(), ExportError>;
    /// See [`RemoteFile::punch`].
    fn punch(&self, offset: u64, len: u64) -> Result<(), ExportError>;
    /// See [`RemoteFile::lock`].
    fn lock(&self, owner: u64, kind: LockKind, timeout: Duration) -> Result<(), ExportError>;
}

impl Remote for Client {
    type File = RemoteFile;

    fn boot(&self) -> Result<u64, ExportError> {
        Client::boot(self)
    }

    fn lookup(&self, parent: FileId, name: &OsStr) -> Result<Attributes, ExportError> {
        Client::lookup(self, parent, name)
    }

    fn attributes(&self, id: FileId) -> Result<Attributes, ExportError> {
        Client::attributes(self, id)
    }

    fn set_attributes(&self, id: FileId, set: &SetAttributes) -> Result<Attributes, ExportError> {
        Client::set_attributes(self, id, set)
    }

    fn check_access(&self, id: FileId, mode: u8) -> Result<(), ExportError> {
        Client::check_access(self, id, mode)
    }

    fn open(&self, id: FileId, access: OpenAccess) -> Result<(RemoteFile, Option<Vec<u8>>), ExportError> {
        Client::open_and_read(self, id, access)
    }

    fn create(
        &self,
        parent: FileId,
        name: &OsStr,
        mode: u32,
        access: OpenAccess,
        exclusive: bool,
    ) -> Result<RemoteFile, ExportError> {
        Client::create(self, parent, name, mode, access, exclusive)
    }

    fn make_directory(&self, parent: FileId, name: &OsStr, mode: u32) -> Result<Attributes, ExportError> {
        Client::make_directory(self, parent, name, mode)
    }

    fn make_fifo(&self, parent: FileId, name: &OsStr, mode: u32) -> Result<Attributes, ExportError> {
        Client::make_fifo(self, parent, name, mode)
    }

    fn symlink(&self, parent: FileId, name: &OsStr, target: &OsStr) -> Result<Attributes, ExportError> {
        Client::symlink(self, parent, name, target)
    }

    fn link(&self, id: FileId, parent: FileId, name: &OsStr) -> Result<Attributes, ExportError> {
        Client::link(self, id, parent, name)
    }

    fn known_file(&self, parent: FileId, name: &OsStr) -> Option<FileId> {
        Client::known_file(self, parent, name)
    }

    fn unlink(&self, parent: FileId, name: &OsStr, only: Option<FileId>) -> Result<(), ExportError> {
        match only {
            None => Client::unlink(self, parent, name),
            Some(file) => self.repeat_unlink(parent, name, file),
        }
    }

    fn remove_directory(
        &self,
        parent: FileId,
        name: &OsStr,
        only: Option<FileId>,
    ) -> Result<(), ExportError> {
        match only {
            None => Client::remove_directory(self, parent, name),
            Some(directory) => self.repeat_remove_directory(parent, name, directory),
        }
    }

    fn rename(
        &self,
        from: (FileId, &OsStr),
        to: (FileId, &OsStr),
        mode: RenameMode,
        only: Option<FileId>,
    ) -> Result<(), ExportError> {
        match only {
            None => Client::rename(self, from.0, from.1, to.0, to.1, mode),
            Some(file) => self.repeat_rename(from, to, mode, file),
        }
    }

    fn read_link(&self, id: FileId) -> Result<PathBuf, ExportError> {
        Client::read_link(self, id)
    }

    fn read_directory(
        &self,
        id: FileId,
        cookie: u64,
        attributes: bool,
    ) -> Result<DirectoryPage, ExportError> {
        Client::read_directory(self, id, cookie, attributes)
    }

    fn file_system(&self, id: FileId) -> Result<FileSystem, ExportError> {
        Client::file_system(self, id)
    }

    fn sync(&self, id: FileId) -> Result<(), ExportError> {
        Client::sync(self, id)
    }

    fn watch(&self, id: FileId) -> Result<(), ExportError> {
        Client::watch(self, id)
    }

    fn unwatch(&self, id: FileId) -> Result<(), ExportError> {
        Client::unwatch(self, id)
    }

    fn next_change(&self, timeout: Duration) -> Option<Change> {
        Client::next_change(self, timeout)
    }
}

impl RemoteOpen for RemoteFile {
    fn opened_attributes(&self) -> Attributes {
        RemoteFile::opened_attributes(self)
    }

    fn attributes(&self) -> Result<Attributes, ExportError> {
        RemoteFile::attributes(self)
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<usize, ExportError> {
        RemoteFile::read_at(self, offset, into)
    }

    fn write_short(&self, offset: u64, data: &[u8]) -> Result<bool, ExportError> {
        RemoteFile::write_short(self, offset, data)
    }

    fn write_extents(&self, extents: &[(u64, &[u8])]) -> Result<(), ExportError> {
        RemoteFile::write_extents(self, extents)
    }

    fn commit(&self) -> Result<(), ExportError> {
        RemoteFile::commit(self)
    }

    fn uncommitted_boot(&self) -> Option<u64> {
        RemoteFile::uncommitted_boot(self)
    }

    fn truncate(&self, len: u64) -> Result<(), ExportError> {
        RemoteFile::truncate(self, len)
    }

    fn punch(&self, offset: u64, len: u64) -> Result<(), ExportError> {
        RemoteFile::punch(self, offset, len)
    }

    fn lock(&self, owner: u64, kind: LockKind, timeout: Duration) -> Result<(), ExportError> {
        RemoteFile::lock(self, owner, kind, timeout)
    }
}
