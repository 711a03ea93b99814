//! The kernel's requests.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use fuser::{
    AccessFlags, BsdFileFlags, Errno, FileHandle, Filesystem, FopenFlags, INodeNo, InitFlags, KernelConfig,
    LockOwner, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyDirectoryPlus,
    ReplyEmpty, ReplyEntry, ReplyLock, ReplyOpen, ReplyStatfs, ReplyWrite, Request, TimeOrNow, WriteFlags,
};
use rustix::fs::{FallocateFlags, OFlags};
use terrace_export::{LockKind, SetAttributes};
use terrace_fuse::SessionEnd;

use crate::attributes::{errno, set_time};
use crate::locks::{LockRequest, set_lock};
use crate::mount::Mount;
use crate::names::{Caller, Entry};
use crate::remote::Remote;

/// Most bytes of a write request.
const WRITE_BYTES_MAX: u32 = 1 << 20;
/// Requests that the kernel has in flight for readahead.
const BACKGROUND_MAX: u16 = 32;

/// Answers the kernel's requests, until the session ends.
pub(crate) struct Requests<R: Remote>(
    pub(crate) Arc<Mount<R>>,
    #[expect(dead_code, reason = "dropping it tells the end of the session")] pub(crate) SessionEnd,
);

fn caller(request: &Request) -> Caller {
    Caller { uid: request.uid(), gid: request.gid() }
}

/// Kinds of locks, as `fcntl(2)` numbers them on every architecture that Linux has FUSE on.
const F_RDLCK: i32 = 0;
const F_WRLCK: i32 = 1;
const F_UNLCK: i32 = 2;

impl<R: Remote> Requests<R> {
    /// Releases what an owner holds of a file that it closes. An error means that the server does not have the lock.
    fn unlock_all(&self, handle: FileHandle, owner: u64) {
        if let Ok(file) = self.0.file(handle.0)
            && file.inode.locks.is_held_by(owner)
        {
            let (handle, range) = (handle.0, 0..u64::MAX);
            let _ = set_lock(&file, &LockRequest { owner, handle, range, kind: LockKind::Unlock, pid: 0 });
        }
    }

    /// Releases the locks that end with an open file: those of `flock`, and of open file descriptions, for which the kernel sends no
    /// request. Programs have closed it by now, so their own locks are released already.
    fn unlock_open_file(&self, handle: FileHandle) {
        if let Ok(file) = self.0.file(handle.0) {
            for owner in file.inode.locks.owners_by(handle.0) {
                self.unlock_all(handle, owner);
            }
        }
    }

    fn reply_entry(&self, reply: ReplyEntry, result: Result<Entry, Errno>) {
        match result {
            Ok(entry) => reply.entry(&self.0.ttl, &entry.attr, entry.generation),
            Err(errno) => reply.error(errno),
        }
    }
}

/// The kernel's lock as a request; `None` for a kind that does not exist. Its last byte is included.
fn lock_request(
    (owner, handle): (LockOwner, FileHandle),
    (start, end): (u64, u64),
    kind: i32,
    pid: u32,
) -> Option<LockRequest> {
    let kind = match kind {
        F_RDLCK => LockKind::Shared,
        F_WRLCK => LockKind::Exclusive,
        F_UNLCK => LockKind::Unlock,
        _ => return None,
    };
    let range = start..end.saturating_add(1);
    Some(LockRequest { owner: owner.0, handle: handle.0, range, kind, pid })
}

fn reply_empty(reply: ReplyEmpty, result: Result<(), Errno>) {
    match result {
        Ok(()) => reply.ok(),
        Err(errno) => reply.error(errno),
    }
}

impl<R: Remote> Filesystem for Requests<R> {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let wanted = [
            InitFlags::FUSE_ATOMIC_O_TRUNC,
            // Without FUSE_READDIRPLUS_AUTO: the server sends attributes with all names.
            InitFlags::FUSE_DO_READDIRPLUS,
            InitFlags::FUSE_PARALLEL_DIROPS,
            InitFlags::FUSE_CACHE_SYMLINKS,
            InitFlags::FUSE_ASYNC_DIO,
            InitFlags::FUSE_POSIX_LOCKS,
            InitFlags::FUSE_FLOCK_LOCKS,
        ];
        for flag in wanted {
            // An older kernel does without.
            let _ = config.add_capabilities(flag);
        }
        // Both are below their limits.
        let _ = config.set_max_write(WRITE_BYTES_MAX);
        let _ = config.set_max_background(BACKGROUND_MAX);
        Ok(())
    }

    fn lookup(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let _turn = self.0.turns.begin();
        self.reply_entry(reply, self.0.lookup(parent.0, name));
    }

    fn forget(&self, _request: &Request, ino: INodeNo, count: u64) {
        // No turn: one request may be several of these calls.
        self.0.inodes.forget(ino.0, count);
    }

    fn ioctl(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _handle: FileHandle,
        _flags: fuser::IoctlFlags,
        _command: u32,
        _input: &[u8],
        _output_len: u32,
        reply: fuser::ReplyIoctl,
    ) {
        let _turn = self.0.turns.begin();
        // There are none. Python asks of each file that it opens whether it is a terminal.
        reply.error(Errno::ENOSYS);
    }

    fn getattr(&self, _request: &Request, ino: INodeNo, _handle: Option<FileHandle>, reply: ReplyAttr) {
        let _turn = self.0.turns.begin();
        match self.0.attributes(ino.0) {
            Ok(attr) => reply.attr(&self.0.ttl, &attr),
            Err(errno) => reply.error(errno),
        }
    }

    fn setattr(
        &self,
        _request: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        handle: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let _turn = self.0.turns.begin();
        let set = SetAttributes {
            mode: mode.map(|mode| mode & 0o7777),
            uid,
            gid,
            len: size,
            accessed: atime.map(set_time),
            modified: mtime.map(set_time),
        };
        match self.0.set_attributes(ino.0, handle.map(|handle| handle.0), &set) {
            Ok(attr) => reply.attr(&self.0.ttl, &attr),
            Err(errno) => reply.error(errno),
        }
    }

    fn readlink(&self, _request: &Request, ino: INodeNo, reply: ReplyData) {
        let _turn = self.0.turns.begin();
        match self.0.read_link(ino.0) {
            Ok(target) => reply.data(target.as_bytes()),
            Err(errno) => reply.error(errno),
        }
    }

    fn mknod(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _umask: u32,
        _rdev: u32,
        reply: ReplyEntry,
    ) {
        let _turn = self.0.turns.begin();
        self.reply_entry(reply, self.0.make_node(caller(request), parent.0, name, mode));
    }

    fn mkdir(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _umask: u32,
        reply: ReplyEntry,
    ) {
        let _turn = self.0.turns.begin();
        self.reply_entry(reply, self.0.make_directory(caller(request), parent.0, name, mode));
    }

    fn unlink(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let _turn = self.0.turns.begin();
        reply_empty(reply, self.0.unlink(parent.0, name));
    }

    fn rmdir(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let _turn = self.0.turns.begin();
        reply_empty(reply, self.0.remove_directory(parent.0, name));
    }

    fn symlink(&self, request: &Request, parent: INodeNo, name: &OsStr, target: &Path, reply: ReplyEntry) {
        let _turn = self.0.turns.begin();
        self.reply_entry(reply, self.0.symlink(caller(request), parent.0, name, target.as_os_str()));
    }

    fn rename(
        &self,
        _request: &Request,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let _turn = self.0.turns.begin();
        reply_empty(reply, self.0.rename(parent.0, name, new_parent.0, new_name, flags));
    }

    fn link(&self, _request: &Request, ino: INodeNo, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let _turn = self.0.turns.begin();
        self.reply_entry(reply, self.0.link(ino.0, parent.0, name));
    }

    fn open(&self, _request: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let _turn = self.0.turns.begin();
        match self.0.open(ino.0, flags) {
            Ok((handle, flags)) => reply.opened(FileHandle(handle), flags),
            Err(errno) => reply.error(errno),
        }
    }

    fn create(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        let _turn = self.0.turns.begin();
        match self.0.create(caller(request), parent.0, name, mode, OpenFlags(flags)) {
            Ok((entry, handle)) => reply.created(
                &self.0.ttl,
                &entry.attr,
                entry.generation,
                FileHandle(handle),
                FopenFlags::empty(),
            ),
            Err(errno) => reply.error(errno),
        }
    }

    fn read(
        &self,
        _request: &Request,
        _ino: INodeNo,
        handle: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let _turn = self.0.turns.begin();
        match self.0.read(handle.0, offset, size) {
            Ok(bytes) => reply.data(&bytes),
            Err(errno) => reply.error(errno),
        }
    }

    fn write(
        &self,
        _request: &Request,
        _ino: INodeNo,
        handle: FileHandle,
        offset: u64,
        data: &[u8],
        write_flags: WriteFlags,
        flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let _turn = self.0.turns.begin();
        // A page of a mapping: its error belongs to the mapping, which the kernel tells only now.
        let is_page = write_flags.contains(WriteFlags::FUSE_WRITE_CACHE);
        let is_synchronous = OFlags::from_bits_retain(flags.0 as u32)
            .intersects(OFlags::SYNC | OFlags::DSYNC | OFlags::DIRECT);
        match self.0.write(handle.0, offset, data, is_page || is_synchronous) {
            Ok(()) => reply.written(data.len() as u32),
            Err(errno) => reply.error(errno),
        }
        // The program goes on meanwhile.
        self.0.write_excess(handle.0);
    }

    fn flush(
        &self,
        _request: &Request,
        _ino: INodeNo,
        handle: FileHandle,
        owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        let _turn = self.0.turns.begin();
        let result = self.0.flush(handle.0);
        self.unlock_all(handle, owner.0);
        reply_empty(reply, result);
    }

    fn release(
        &self,
        _request: &Request,
        _ino: INodeNo,
        handle: FileHandle,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        let _turn = self.0.turns.begin();
        self.unlock_open_file(handle);
        reply_empty(reply, self.0.release(handle.0));
    }

    fn fsync(
        &self,
        _request: &Request,
        _ino: INodeNo,
        handle: FileHandle,
        only_data: bool,
        reply: ReplyEmpty,
    ) {
        let _turn = self.0.turns.begin();
        reply_empty(reply, self.0.synchronize(handle.0, only_data));
    }

    fn getlk(
        &self,
        _request: &Request,
        _ino: INodeNo,
        handle: FileHandle,
        owner: LockOwner,
        start: u64,
        end: u64,
        kind: i32,
        pid: u32,
        reply: ReplyLock,
    ) {
        let _turn = self.0.turns.begin();
        let Some(request) = lock_request((owner, handle), (start, end), kind, pid) else {
            return reply.error(Errno::EINVAL);
        };
        match self.0.file(handle.0).map(|file| file.inode.locks.conflict(&request)) {
            Ok(None) => reply.locked(start, end, F_UNLCK, 0),
            Ok(Some(held)) => {
                let kind = if held.kind == LockKind::Shared { F_RDLCK } else { F_WRLCK };
                reply.locked(held.range.start, held.range.end - 1, kind, held.pid);
            }
            Err(errno) => reply.error(errno),
        }
    }

    fn setlk(
        &self,
        caller: &Request,
        _ino: INodeNo,
        handle: FileHandle,
        owner: LockOwner,
        start: u64,
        end: u64,
        kind: i32,
        pid: u32,
        waits: bool,
        reply: ReplyEmpty,
    ) {
        let _turn = self.0.turns.begin();
        let Some(request) = lock_request((owner, handle), (start, end), kind, pid) else {
            return reply.error(Errno::EINVAL);
        };
        let file = match self.0.file(handle.0) {
            Ok(file) => file,
            Err(errno) => return reply.error(errno),
        };
        if waits {
            // The process of the request is another number: a signal may be for one of its threads.
            let thread = caller.pid();
            self.0.lock_waiters.lock(file, request, thread, |result| reply_empty(reply, result));
        } else {
            reply_empty(reply, set_lock(&file, &request).map_err(|error| errno(&error)));
        }
    }

    fn fallocate(
        &self,
        _request: &Request,
        _ino: INodeNo,
        handle: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let _turn = self.0.turns.begin();
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let result = match FallocateFlags::from_bits_retain(mode as u32) == punch {
            true => self.0.punch(handle.0, offset, length),
            false => Err(Errno::EOPNOTSUPP),
        };
        reply_empty(reply, result);
    }

    fn opendir(&self, _request: &Request, ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        let _turn = self.0.turns.begin();
        match self.0.open_directory(ino.0) {
            Ok(handle) => reply.opened(FileHandle(handle), FopenFlags::empty()),
            Err(errno) => reply.error(errno),
        }
    }

    fn readdir(
        &self,
        _request: &Request,
        _ino: INodeNo,
        handle: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let _turn = self.0.turns.begin();
        match self.0.read_directory(handle.0, offset, &mut reply) {
            Ok(()) => reply.ok(),
            Err(errno) => reply.error(errno),
        }
    }

    fn readdirplus(
        &self,
        _request: &Request,
        _ino: INodeNo,
        handle: FileHandle,
        offset: u64,
        mut reply: ReplyDirectoryPlus,
    ) {
        let _turn = self.0.turns.begin();
        match self.0.read_directory_plus(handle.0, offset, &mut reply) {
            Ok(()) => reply.ok(),
            Err(errno) => reply.error(errno),
        }
    }

    fn releasedir(
        &self,
        _request: &Request,
        _ino: INodeNo,
        handle: FileHandle,
        _flags: OpenFlags,
        reply: ReplyEmpty,
    ) {
        let _turn = self.0.turns.begin();
        self.0.close_directory(handle.0);
        reply.ok();
    }

    fn fsyncdir(
        &self,
        _request: &Request,
        ino: INodeNo,
        _handle: FileHandle,
        _only_data: bool,
        reply: ReplyEmpty,
    ) {
        let _turn = self.0.turns.begin();
        reply_empty(reply, self.0.synchronize_directory(ino.0));
    }

    fn statfs(&self, _request: &Request, ino: INodeNo, reply: ReplyStatfs) {
        let _turn = self.0.turns.begin();
        let result = self
            .0
            .inode(ino.0)
            .and_then(|inode| self.0.remote.file_system(inode.id).map_err(|error| errno(&error)));
        match result {
            Ok(of) => reply.statfs(
                of.blocks,
                of.blocks_free,
                of.blocks_available,
                of.files,
                of.files_free,
                u32::try_from(of.block_bytes).unwrap_or(4096),
                u32::try_from(of.name_bytes_max).unwrap_or(255),
                u32::try_from(of.block_bytes).unwrap_or(4096),
            ),
            Err(errno) => reply.error(errno),
        }
    }

    fn access(&self, _request: &Request, ino: INodeNo, mask: AccessFlags, reply: ReplyEmpty) {
        let _turn = self.0.turns.begin();
        let result = self.0.inode(ino.0).and_then(|inode| {
            let mode = (mask.bits() & 7) as u8;
            self.0.remote.check_access(inode.id, mode).map_err(|error| errno(&error))
        });
        reply_empty(reply, result);
    }
}
