//! A remote of one file, for tests: its server can be silent, and its host can restart.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use fuser::{Errno, OpenFlags};
use rustix::fs::OFlags;
use terrace_export::{
    Attributes, Change, DirectoryPage, ExportError, FileId, FileKind, FileSystem, LockKind, OpenAccess,
    RenameMode, SetAttributes, Timestamp,
};
use terrace_sync::Mutex;

use crate::mount::Mount;
use crate::remote::{Remote, RemoteOpen};

/// The mounted directory.
pub(crate) const ROOT: FileId = FileId { dev: 1, ino: 1, generation: 0 };
/// The file.
pub(crate) const FILE: FileId = FileId { dev: 1, ino: 2, generation: 0 };

/// What the test sees of the server.
#[derive(Default)]
pub(crate) struct Server {
    pub(crate) bytes: Mutex<Vec<u8>>,
    /// No request is answered, so each is `Lost`.
    pub(crate) is_silent: AtomicBool,
    /// Requests that were not answered.
    pub(crate) unanswered: AtomicUsize,
    /// The number of the host's starts.
    pub(crate) boot: AtomicU64,
    /// How often the file's contents have changed.
    pub(crate) version: AtomicU64,
    /// How often the time of the file was set.
    pub(crate) stamps: AtomicUsize,
    /// The error number that the server answers to setting the time, or 0.
    pub(crate) stamp_refusal: AtomicI32,
    /// The error number that the server answers to a watch, or 0.
    pub(crate) watch_refusal: AtomicI32,
    /// How often the file was committed.
    pub(crate) commits: AtomicUsize,
    /// How often it was made persistent by a message.
    pub(crate) syncs: AtomicUsize,
    /// How often it is watched now.
    pub(crate) watches: AtomicUsize,
}

impl Server {
    fn ask(&self) -> Result<(), ExportError> {
        if self.is_silent.load(Ordering::Relaxed) {
            self.unanswered.fetch_add(1, Ordering::Relaxed);
            return Err(ExportError::Lost);
        }
        Ok(())
    }

    fn attributes(&self, id: FileId) -> Attributes {
        let kind = if id == ROOT { FileKind::Directory } else { FileKind::Regular };
        let time = Timestamp::default();
        Attributes {
            id,
            kind,
            mode: 0o644,
            links: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            len: self.bytes.lock().len() as u64,
            blocks: 0,
            block_bytes: 4096,
            accessed: time,
            modified: time,
            changed: time,
            version: 1 + self.version.load(Ordering::Relaxed),
        }
    }
}

/// The remote.
#[derive(Clone, Default)]
pub(crate) struct Fake(pub(crate) Arc<Server>);

/// An open file.
pub(crate) struct FakeFile {
    server: Arc<Server>,
    opened: Attributes,
    /// The host's start in which it has written what is not committed.
    written: Mutex<Option<u64>>,
}

/// A mount, its server, and the number of the file.
pub(crate) fn mount() -> (Mount<Fake>, Arc<Server>, u64) {
    let fake = Fake::default();
    let server = fake.0.clone();
    let mount = Mount::new(Arc::new(fake), ROOT, Duration::ZERO, false).expect("threads");
    let ino = mount.inodes.look_up(FILE).ino;
    (mount, server, ino)
}

/// Opens the file for reading and writing. Returns its handle.
pub(crate) fn open(mount: &Mount<Fake>, ino: u64, flags: OFlags) -> u64 {
    let flags = OpenFlags((OFlags::RDWR | flags).bits() as i32);
    mount.open(ino, flags).map_err(Errno::code).expect("an open file").0
}

/// The refusal with an error number, unless it is 0.
fn refuse(errno: &AtomicI32) -> Result<(), ExportError> {
    match errno.load(Ordering::Relaxed) {
        0 => Ok(()),
        errno => Err(ExportError::Os(errno)),
    }
}

fn unsupported<T>() -> Result<T, ExportError> {
    Err(ExportError::Os(Errno::ENOSYS.code()))
}

impl Remote for Fake {
    type File = FakeFile;

    fn boot(&self) -> Result<u64, ExportError> {
        self.0.ask()?;
        Ok(self.0.boot.load(Ordering::Relaxed))
    }

    fn lookup(&self, _parent: FileId, _name: &OsStr) -> Result<Attributes, ExportError> {
        Remote::attributes(self, FILE)
    }

    fn attributes(&self, id: FileId) -> Result<Attributes, ExportError> {
        self.0.ask()?;
        Ok(self.0.attributes(id))
    }

    fn set_attributes(&self, id: FileId, set: &SetAttributes) -> Result<Attributes, ExportError> {
        self.0.ask()?;
        refuse(&self.0.stamp_refusal)?;
        self.0.stamps.fetch_add(usize::from(set.modified.is_some()), Ordering::Relaxed);
        Ok(self.0.attributes(id))
    }

    fn check_access(&self, _id: FileId, _mode: u8) -> Result<(), ExportError> {
        self.0.ask()
    }

    fn open(&self, _id: FileId, _access: OpenAccess) -> Result<(FakeFile, Option<Vec<u8>>), ExportError> {
        self.0.ask()?;
        let opened = self.0.attributes(FILE);
        Ok((FakeFile { server: self.0.clone(), opened, written: Mutex::default() }, None))
    }

    fn create(
        &self,
        _parent: FileId,
        _name: &OsStr,
        _mode: u32,
        _access: OpenAccess,
        _exclusive: bool,
    ) -> Result<FakeFile, ExportError> {
        unsupported()
    }

    fn make_directory(&self, _: FileId, _: &OsStr, _: u32) -> Result<Attributes, ExportError> {
        unsupported()
    }

    fn make_fifo(&self, _: FileId, _: &OsStr, _: u32) -> Result<Attributes, ExportError> {
        unsupported()
    }

    fn symlink(&self, _: FileId, _: &OsStr, _: &OsStr) -> Result<Attributes, ExportError> {
        unsupported()
    }

    fn link(&self, _: FileId, _: FileId, _: &OsStr) -> Result<Attributes, ExportError> {
        unsupported()
    }

    fn known_file(&self, _: FileId, _: &OsStr) -> Option<FileId> {
        None
    }

    fn unlink(&self, _: FileId, _: &OsStr, _: Option<FileId>) -> Result<(), ExportError> {
        unsupported()
    }

    fn remove_directory(&self, _: FileId, _: &OsStr, _: Option<FileId>) -> Result<(), ExportError> {
        unsupported()
    }

    fn rename(
        &self,
        _: (FileId, &OsStr),
        _: (FileId, &OsStr),
        _: RenameMode,
        _: Option<FileId>,
    ) -> Result<(), ExportError> {
        unsupported()
    }

    fn read_link(&self, _: FileId) -> Result<PathBuf, ExportError> {
        unsupported()
    }

    fn read_directory(&self, _: FileId, _: u64, _: bool) -> Result<DirectoryPage, ExportError> {
        unsupported()
    }

    fn file_system(&self, _: FileId) -> Result<FileSystem, ExportError> {
        unsupported()
    }

    fn sync(&self, _id: FileId) -> Result<(), ExportError> {
        self.0.ask()?;
        self.0.syncs.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn watch(&self, _id: FileId) -> Result<(), ExportError> {
        self.0.ask()?;
        refuse(&self.0.watch_refusal)?;
        self.0.watches.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn unwatch(&self, _id: FileId) -> Result<(), ExportError> {
        self.0.ask()?;
        self.0.watches.fetch_sub(1, Ordering::Relaxed);
        Ok(())
    }

    fn next_change(&self, _timeout: Duration) -> Option<Change> {
        None
    }
}

impl RemoteOpen for FakeFile {
    fn opened_attributes(&self) -> Attributes {
        self.opened
    }

    fn attributes(&self) -> Result<Attributes, ExportError> {
        self.server.ask()?;
        Ok(self.server.attributes(FILE))
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<usize, ExportError> {
        self.server.ask()?;
        let bytes = self.server.bytes.lock();
        let rest = bytes.get(offset as usize..).unwrap_or_default();
        let count = rest.len().min(into.len());
        into[..count].copy_from_slice(&rest[..count]);
        Ok(count)
    }

    fn write_short(&self, offset: u64, data: &[u8]) -> Result<bool, ExportError> {
        self.write_extents(&[(offset, data)])?;
        Ok(false)
    }

    fn write_extents(&self, extents: &[(u64, &[u8])]) -> Result<(), ExportError> {
        self.server.ask()?;
        let mut bytes = self.server.bytes.lock();
        for &(offset, data) in extents {
            let end = offset as usize + data.len();
            let len = bytes.len().max(end);
            bytes.resize(len, 0);
            bytes[offset as usize..end].copy_from_slice(data);
        }
        self.written.lock().get_or_insert(self.server.boot.load(Ordering::Relaxed));
        Ok(())
    }

    fn commit(&self) -> Result<(), ExportError> {
        self.server.ask()?;
        self.server.commits.fetch_add(1, Ordering::Relaxed);
        match self.written.lock().take() {
            Some(boot) if boot != self.server.boot.load(Ordering::Relaxed) => Err(ExportError::Rebooted),
            _ => Ok(()),
        }
    }

    fn uncommitted_boot(&self) -> Option<u64> {
        *self.written.lock()
    }

    fn truncate(&self, len: u64) -> Result<(), ExportError> {
        self.server.ask()?;
        self.server.bytes.lock().resize(len as usize, 0);
        Ok(())
    }

    fn punch(&self, _offset: u64, _len: u64) -> Result<(), ExportError> {
        unsupported()
    }

    fn lock(&self, _owner: u64, _kind: LockKind, _timeout: Duration) -> Result<(), ExportError> {
        self.server.ask()
    }
}
