//! A local directory as a remote: the mount without an export.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::fs::{AtFlags, CWD, FallocateFlags, FileType, Mode, RenameFlags, Timespec, Timestamps};
use terrace_export::{
    Attributes, Change, DirectoryEntry, DirectoryPage, ExportError, FileId, FileKind, FileSystem, LockKind,
    OpenAccess, RenameMode, SetAttributes, SetTime, Timestamp,
};
use terrace_mount::{Remote, RemoteOpen};

/// A directory, and the paths of the files in it that have been looked up.
pub struct Local {
    root: FileId,
    paths: Mutex<HashMap<FileId, PathBuf>>,
}

/// An open file.
pub struct LocalFile {
    file: File,
    opened: Attributes,
}

impl LocalFile {
    fn new(file: File) -> Result<LocalFile, ExportError> {
        let opened = attributes_of(&file.metadata().map_err(os)?);
        Ok(LocalFile { file, opened })
    }
}

fn os(error: impl Into<io::Error>) -> ExportError {
    ExportError::Os(error.into().raw_os_error().unwrap_or(5))
}

fn attributes_of(metadata: &fs::Metadata) -> Attributes {
    let time = |seconds, nanoseconds: i64| Timestamp { seconds, nanoseconds: nanoseconds as u32 };
    let kind = match FileType::from_raw_mode(metadata.mode()) {
        FileType::Directory => FileKind::Directory,
        FileType::Symlink => FileKind::SymbolicLink,
        FileType::Fifo => FileKind::Fifo,
        FileType::Socket => FileKind::Socket,
        FileType::CharacterDevice => FileKind::CharacterDevice,
        FileType::BlockDevice => FileKind::BlockDevice,
        _ => FileKind::Regular,
    };
    Attributes {
        id: FileId { dev: metadata.dev(), ino: metadata.ino(), generation: 0 },
        kind,
        mode: metadata.mode() & 0o7777,
        links: metadata.nlink(),
        uid: metadata.uid(),
        gid: metadata.gid(),
        rdev: metadata.rdev(),
        len: metadata.len(),
        blocks: metadata.blocks(),
        block_bytes: 4096,
        accessed: time(metadata.atime(), metadata.atime_nsec()),
        modified: time(metadata.mtime(), metadata.mtime_nsec()),
        changed: time(metadata.ctime(), metadata.ctime_nsec()),
        version: (metadata.ctime() * 1_000_000_000 + metadata.ctime_nsec()) as u64,
    }
}

impl Local {
    /// The directory at this path.
    pub fn new(path: PathBuf) -> io::Result<Local> {
        let root = attributes_of(&path.metadata()?).id;
        Ok(Local { root, paths: Mutex::new(HashMap::from([(root, path)])) })
    }

    /// The directory.
    pub fn root(&self) -> FileId {
        self.root
    }

    fn path(&self, id: FileId) -> Result<PathBuf, ExportError> {
        let paths = self.paths.lock().unwrap_or_else(PoisonError::into_inner);
        paths.get(&id).cloned().ok_or(ExportError::Os(116))
    }

    fn child(&self, parent: FileId, name: &OsStr) -> Result<PathBuf, ExportError> {
        Ok(self.path(parent)?.join(name))
    }

    fn learn(&self, path: PathBuf) -> Result<Attributes, ExportError> {
        let attributes = attributes_of(&path.symlink_metadata().map_err(os)?);
        if attributes.id != self.root {
            self.paths.lock().unwrap_or_else(PoisonError::into_inner).insert(attributes.id, path);
        }
        Ok(attributes)
    }
}

fn options(access: OpenAccess) -> OpenOptions {
    let mut options = OpenOptions::new();
    options
        .read(access.contains(OpenAccess::READ))
        .write(access.changes())
        .truncate(access.contains(OpenAccess::TRUNCATE));
    options
}

impl Remote for Local {
    type File = LocalFile;

    fn boot(&self) -> Result<u64, ExportError> {
        Ok(0)
    }

    fn lookup(&self, parent: FileId, name: &OsStr) -> Result<Attributes, ExportError> {
        self.learn(self.child(parent, name)?)
    }

    fn attributes(&self, id: FileId) -> Result<Attributes, ExportError> {
        let metadata = self.path(id)?.symlink_metadata().map_err(|_| ExportError::Os(116))?;
        let attributes = attributes_of(&metadata);
        if attributes.id == id { Ok(attributes) } else { Err(ExportError::Os(116)) }
    }

    fn set_attributes(&self, id: FileId, set: &SetAttributes) -> Result<Attributes, ExportError> {
        self.attributes(id)?;
        let path = self.path(id)?;
        if set.uid.is_some() || set.gid.is_some() {
            std::os::unix::fs::lchown(&path, set.uid, set.gid).map_err(os)?;
        }
        if let Some(mode) = set.mode {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).map_err(os)?;
        }
        if let Some(len) = set.len {
            OpenOptions::new().write(true).open(&path).and_then(|file| file.set_len(len)).map_err(os)?;
        }
        if set.accessed.is_some() || set.modified.is_some() {
            let time = |time: Option<SetTime>| match time {
                None => Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_OMIT },
                Some(SetTime::Now) => Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_NOW },
                Some(SetTime::At(at)) => Timespec { tv_sec: at.seconds, tv_nsec: at.nanoseconds.into() },
            };
            let times = Timestamps { last_access: time(set.accessed), last_modification: time(set.modified) };
            rustix::fs::utimensat(CWD, &path, &times, AtFlags::SYMLINK_NOFOLLOW).map_err(os)?;
        }
        self.attributes(id)
    }

    fn check_access(&self, id: FileId, mode: u8) -> Result<(), ExportError> {
        let mode = rustix::fs::Access::from_bits_retain(mode.into());
        rustix::fs::access(self.path(id)?, mode).map_err(os)
    }

    fn open(&self, id: FileId, access: OpenAccess) -> Result<(LocalFile, Option<Vec<u8>>), ExportError> {
        let file = options(access).custom_flags(0o400000).open(self.path(id)?).map_err(os)?;
        Ok((LocalFile::new(file)?, None))
    }

    fn create(
        &self,
        parent: FileId,
        name: &OsStr,
        mode: u32,
        access: OpenAccess,
        exclusive: bool,
    ) -> Result<LocalFile, ExportError> {
        let path = self.child(parent, name)?;
        // A file that is made needs a right to write, and readers do not have one.
        let is_new = !path.exists();
        let mut maker = options(access | OpenAccess::WRITE | OpenAccess::READ);
        match exclusive {
            true => maker.create_new(true),
            false => maker.create(true),
        };
        let file = maker.mode(mode).open(&path).map_err(os)?;
        if is_new {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).map_err(os)?;
        }
        self.learn(path)?;
        LocalFile::new(file)
    }

    fn make_directory(&self, parent: FileId, name: &OsStr, mode: u32) -> Result<Attributes, ExportError> {
        let path = self.child(parent, name)?;
        fs::DirBuilder::new().mode(mode).create(&path).map_err(os)?;
        let special = path.metadata().map_err(os)?.mode() & 0o2000;
        fs::set_permissions(&path, fs::Permissions::from_mode(mode | special)).map_err(os)?;
        self.learn(path)
    }

    fn make_fifo(&self, parent: FileId, name: &OsStr, mode: u32) -> Result<Attributes, ExportError> {
        let path = self.child(parent, name)?;
        rustix::fs::mknodat(CWD, &path, FileType::Fifo, Mode::from_bits_retain(mode), 0).map_err(os)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).map_err(os)?;
        self.learn(path)
    }

    fn symlink(&self, parent: FileId, name: &OsStr, target: &OsStr) -> Result<Attributes, ExportError> {
        let path = self.child(parent, name)?;
        std::os::unix::fs::symlink(target, &path).map_err(os)?;
        self.learn(path)
    }

    fn link(&self, id: FileId, parent: FileId, name: &OsStr) -> Result<Attributes, ExportError> {
        let path = self.child(parent, name)?;
        fs::hard_link(self.path(id)?, &path).map_err(os)?;
        self.learn(path)
    }

    fn known_file(&self, _parent: FileId, _name: &OsStr) -> Option<FileId> {
        // No answer is lost, so no request is repeated.
        None
    }

    fn unlink(&self, parent: FileId, name: &OsStr, _only: Option<FileId>) -> Result<(), ExportError> {
        let path = self.child(parent, name)?;
        let id = attributes_of(&path.symlink_metadata().map_err(os)?).id;
        fs::remove_file(&path).map_err(os)?;
        let mut paths = self.paths.lock().unwrap_or_else(PoisonError::into_inner);
        if paths.get(&id) == Some(&path) {
            paths.remove(&id);
        }
        Ok(())
    }

    fn remove_directory(
        &self,
        parent: FileId,
        name: &OsStr,
        _only: Option<FileId>,
    ) -> Result<(), ExportError> {
        fs::remove_dir(self.child(parent, name)?).map_err(os)
    }

    fn rename(
        &self,
        from: (FileId, &OsStr),
        to: (FileId, &OsStr),
        mode: RenameMode,
        _only: Option<FileId>,
    ) -> Result<(), ExportError> {
        let (from, to) = (self.child(from.0, from.1)?, self.child(to.0, to.1)?);
        let flags = match mode {
            RenameMode::Replace => RenameFlags::empty(),
            RenameMode::NoReplace => RenameFlags::NOREPLACE,
            RenameMode::Exchange => RenameFlags::EXCHANGE,
        };
        rustix::fs::renameat_with(CWD, &from, CWD, &to, flags).map_err(os)?;
        let mut paths = self.paths.lock().unwrap_or_else(PoisonError::into_inner);
        for path in paths.values_mut() {
            if let Ok(rest) = path.strip_prefix(&from) {
                *path = if rest.as_os_str().is_empty() { to.clone() } else { to.join(rest) };
            } else if mode == RenameMode::Exchange
                && let Ok(rest) = path.strip_prefix(&to)
            {
                *path = if rest.as_os_str().is_empty() { from.clone() } else { from.join(rest) };
            }
        }
        Ok(())
    }

    fn read_link(&self, id: FileId) -> Result<PathBuf, ExportError> {
        fs::read_link(self.path(id)?).map_err(os)
    }

    fn read_directory(
        &self,
        id: FileId,
        cookie: u64,
        _attributes: bool,
    ) -> Result<DirectoryPage, ExportError> {
        let path = self.path(id)?;
        let mut names: Vec<_> =
            fs::read_dir(&path).map_err(os)?.filter_map(Result::ok).map(|entry| entry.file_name()).collect();
        names.sort();
        let mut entries = Vec::new();
        for (at, name) in names.iter().enumerate().skip(cookie as usize).take(50) {
            let Ok(attributes) = self.learn(path.join(name)) else { continue };
            let mut entry = DirectoryEntry {
                name: Default::default(),
                cookie: at as u64 + 1,
                ino: attributes.id.ino,
                kind: Some(attributes.kind),
                attributes: Some(attributes),
            };
            entry.name.0 = name.as_bytes().to_vec();
            entries.push(entry);
        }
        let next = entries.last().map(|entry| entry.cookie);
        Ok(DirectoryPage { entries, next })
    }

    fn file_system(&self, id: FileId) -> Result<FileSystem, ExportError> {
        let of = rustix::fs::statvfs(self.path(id)?).map_err(os)?;
        Ok(FileSystem {
            block_bytes: of.f_frsize,
            blocks: of.f_blocks,
            blocks_free: of.f_bfree,
            blocks_available: of.f_bavail,
            files: of.f_files,
            files_free: of.f_ffree,
            name_bytes_max: of.f_namemax,
        })
    }

    fn sync(&self, id: FileId) -> Result<(), ExportError> {
        File::open(self.path(id)?).and_then(|file| file.sync_all()).map_err(os)
    }

    fn watch(&self, _id: FileId) -> Result<(), ExportError> {
        Ok(())
    }

    fn unwatch(&self, _id: FileId) -> Result<(), ExportError> {
        Ok(())
    }

    fn next_change(&self, timeout: Duration) -> Option<Change> {
        std::thread::sleep(timeout);
        None
    }
}

impl RemoteOpen for LocalFile {
    fn opened_attributes(&self) -> Attributes {
        self.opened
    }

    fn attributes(&self) -> Result<Attributes, ExportError> {
        Ok(attributes_of(&self.file.metadata().map_err(os)?))
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<usize, ExportError> {
        let mut filled = 0;
        while filled < into.len() {
            match self.file.read_at(&mut into[filled..], offset + filled as u64).map_err(os)? {
                0 => break,
                count => filled += count,
            }
        }
        Ok(filled)
    }

    fn write_short(&self, offset: u64, data: &[u8]) -> Result<bool, ExportError> {
        self.file.write_all_at(data, offset).map_err(os)?;
        // The kernel notes the time of each write.
        Ok(true)
    }

    fn write_extents(&self, extents: &[(u64, &[u8])]) -> Result<(), ExportError> {
        extents.iter().try_for_each(|(offset, data)| self.file.write_all_at(data, *offset).map_err(os))
    }

    fn commit(&self) -> Result<(), ExportError> {
        self.file.sync_data().map_err(os)
    }

    fn uncommitted_boot(&self) -> Option<u64> {
        // A restart of the host ends this process, too.
        None
    }

    fn truncate(&self, len: u64) -> Result<(), ExportError> {
        self.file.set_len(len).map_err(os)
    }

    fn punch(&self, offset: u64, len: u64) -> Result<(), ExportError> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&self.file, flags, offset, len).map_err(os)
    }

    fn lock(&self, _owner: u64, _kind: LockKind, _timeout: Duration) -> Result<(), ExportError> {
        Ok(())
    }
}
