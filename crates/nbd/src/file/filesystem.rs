//! The kernel's requests: a directory with one file.

use std::ffi::OsStr;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Receiver, SyncSender};
use std::time::{Duration, SystemTime};

use fuser::{
    Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, InitFlags,
    KernelConfig, LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry,
    ReplyOpen, ReplyStatfs, ReplyWrite, Request, WriteFlags,
};
use rustix::fs::FallocateFlags;
use terrace_far_memory::PAGE_BYTES;
use terrace_fuse::SessionEnd;
use terrace_sync::Mutex;

use super::worker::{self, Reply};
use super::{FILE_NAME, WRITE_BYTES_MAX};
use crate::counters::Counters;

const FILE: INodeNo = INodeNo(2);
/// Nothing changes, so the kernel may believe names and attributes for long.
const TTL: Duration = Duration::from_secs(24 * 60 * 60);
/// READs and WRITEs that the kernel has in flight for a loop device with direct IO.
const BACKGROUND_MAX: u16 = 128;
const BLOCK_BYTES: u64 = 512;

/// Answers the kernel's requests, or hands them to the device's thread.
pub(super) struct SwapFile {
    size_bytes: u64,
    started: SystemTime,
    requests: SyncSender<Option<worker::Request>>,
    /// Free buffers for data of WRITEs.
    buffers: Mutex<Receiver<Vec<u8>>>,
    counters: Arc<Counters>,
    _end: SessionEnd,
}

impl SwapFile {
    pub(super) fn new(
        size_bytes: u64,
        requests: SyncSender<Option<worker::Request>>,
        buffers: Mutex<Receiver<Vec<u8>>>,
        counters: Arc<Counters>,
        end: SessionEnd,
    ) -> SwapFile {
        SwapFile { size_bytes, started: SystemTime::now(), requests, buffers, counters, _end: end }
    }

    fn attributes(&self, ino: INodeNo) -> Option<FileAttr> {
        let (kind, perm, size) = match ino {
            INodeNo::ROOT => (FileType::Directory, 0o700, 0),
            FILE => (FileType::RegularFile, 0o600, self.size_bytes),
            _ => return None,
        };
        Some(FileAttr {
            ino,
            size,
            blocks: size / BLOCK_BYTES,
            atime: self.started,
            mtime: self.started,
            ctime: self.started,
            crtime: self.started,
            kind,
            perm,
            nlink: 1,
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
            rdev: 0,
            blksize: PAGE_BYTES as u32,
            flags: 0,
        })
    }

    /// Gives a request to the device's thread. If that has ended, dropping the request answers with EIO.
    fn hand_over(&self, offset: u64, length: u64, data: Vec<u8>, reply: Reply) {
        let _ = self.requests.send(Some(worker::Request { offset, length, data, reply }));
    }
}

impl Filesystem for SwapFile {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // An older kernel does without.
        let _ = config.add_capabilities(InitFlags::FUSE_ASYNC_DIO);
        // None is beyond its limit.
        let _ = config.set_max_write(WRITE_BYTES_MAX);
        let _ = config.set_max_readahead(WRITE_BYTES_MAX);
        let _ = config.set_max_background(BACKGROUND_MAX);
        Ok(())
    }

    fn lookup(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let is_file = parent == INodeNo::ROOT && name == FILE_NAME;
        match self.attributes(FILE).filter(|_| is_file) {
            Some(attributes) => reply.entry(&TTL, &attributes, Generation(0)),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _request: &Request, ino: INodeNo, _handle: Option<FileHandle>, reply: ReplyAttr) {
        match self.attributes(ino) {
            Some(attributes) => reply.attr(&TTL, &attributes),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn setattr(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _mode: Option<u32>,
        _uid: Option<u32>,
        _gid: Option<u32>,
        _size: Option<u64>,
        _atime: Option<fuser::TimeOrNow>,
        _mtime: Option<fuser::TimeOrNow>,
        _ctime: Option<SystemTime>,
        _handle: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<fuser::BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        // The size is that of the device.
        reply.error(Errno::EPERM);
    }

    fn readdir(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _handle: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let entries = [
            (INodeNo::ROOT, FileType::Directory, "."),
            (INodeNo::ROOT, FileType::Directory, ".."),
            (FILE, FileType::RegularFile, FILE_NAME),
        ];
        for (next, (ino, kind, name)) in (1..).zip(entries).skip(offset.min(3) as usize) {
            if reply.add(ino, next, kind, name) {
                break;
            }
        }
        reply.ok();
    }

    /// The size of a block is the granularity of a loop device's discards.
    fn statfs(&self, _request: &Request, _ino: INodeNo, reply: ReplyStatfs) {
        let (page_bytes, name_bytes_max) = (PAGE_BYTES as u32, 255);
        reply.statfs(
            self.size_bytes / u64::from(page_bytes),
            0,
            0,
            1,
            0,
            page_bytes,
            name_bytes_max,
            page_bytes,
        );
    }

    fn open(&self, _request: &Request, _ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        self.counters.connections.fetch_add(1, Relaxed);
        let flags = FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES;
        reply.opened(FileHandle(0), flags);
    }

    fn release(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _handle: FileHandle,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        self.counters.connections.fetch_sub(1, Relaxed);
        reply.ok();
    }

    fn flush(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _handle: FileHandle,
        _owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        reply.ok();
    }

    /// What was answered before is on the memory nodes.
    fn fsync(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _handle: FileHandle,
        _datasync: bool,
        reply: ReplyEmpty,
    ) {
        reply.ok();
    }

    fn read(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _handle: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        match self.size_bytes.saturating_sub(offset).min(size.into()) {
            0 => reply.data(&[]),
            length => self.hand_over(offset, length, Vec::new(), Reply::Read(reply)),
        }
    }

    fn write(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _handle: FileHandle,
        offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let buffer = self.buffers.lock().recv();
        // The device's thread, which returns buffers, has ended.
        let Ok(mut buffer) = buffer else { return reply.error(Errno::EIO) };
        buffer.clear();
        buffer.extend_from_slice(data);
        self.hand_over(offset, data.len() as u64, buffer, Reply::Write(reply, data.len() as u32));
    }

    /// What a loop device does for discards and for zeros.
    fn fallocate(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _handle: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let zeroes = FallocateFlags::PUNCH_HOLE | FallocateFlags::ZERO_RANGE;
        if !FallocateFlags::from_bits_retain(mode as u32).intersects(zeroes) {
            return reply.error(Errno::EOPNOTSUPP);
        }
        match self.size_bytes.saturating_sub(offset).min(length) {
            0 => reply.ok(),
            length => self.hand_over(offset, length, Vec::new(), Reply::Zero(reply)),
        }
    }
}
