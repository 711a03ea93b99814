//! A region as the data path of `terrace-memory` uses it: what is present is accessed at once, the rest is deferred.

use std::fs::{File, OpenOptions};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Once};

use terrace_files::{FileExtent, FileRegion, Files};
use terrace_hostmem::{AtomicOp, HostRange, fault};
use terrace_memory::{AccessError, LocalCopies, Pager, Transfer, Translation, Waker};

/// The directories of the tests: one on a disk, one in memory.
pub const DIRECTORIES: [&str; 2] = ["/var/tmp", "/dev/shm"];

/// A file with a name of its own.
pub struct TestFile {
    pub file: File,
    directory: tempfile::TempDir,
}

impl TestFile {
    pub fn new(directory: &str, len: u64) -> TestFile {
        let directory = tempfile::tempdir_in(directory).expect("a directory");
        let file = open(&directory.path().join("file"), true);
        file.set_len(len).expect("space");
        TestFile { file, directory }
    }

    pub fn path(&self) -> PathBuf {
        self.directory.path().join("file")
    }
}

pub fn open(path: &Path, is_writable: bool) -> File {
    let mut options = OpenOptions::new();
    options.read(true).write(is_writable).create(is_writable);
    options.open(path).expect("opened")
}

/// Opens a region of all of a file.
pub fn region(files: &Files, file: &File) -> Arc<FileRegion> {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| fault::install().expect("handlers"));
    files.open(file.as_fd(), true, FileExtent::WHOLE).expect("a region")
}

/// A waker, and what it says.
pub fn waker() -> (Waker, Receiver<()>) {
    let (sender, receiver) = channel();
    let wake = move || {
        // Nobody waits any more.
        let _ = sender.send(());
    };
    (Arc::new(wake), receiver)
}

/// The transfer that `begin` begins, once it has ended.
pub fn finish(
    begin: impl Fn(&Waker) -> Result<Arc<dyn Transfer>, AccessError>,
) -> Result<Arc<dyn Transfer>, AccessError> {
    let (waker, woken) = waker();
    let transfer = loop {
        match begin(&waker) {
            Err(AccessError::NotReady) => woken.recv().expect("a waker that is kept"),
            result => break result?,
        }
    };
    while transfer.outcome().is_none() {
        woken.recv().expect("a waker that is kept");
    }
    transfer.outcome().expect("it has ended").map(|()| transfer)
}

pub fn read(region: &FileRegion, offset: u64, len: usize) -> Result<Vec<u8>, AccessError> {
    let (part, mut out) = (HostRange { addr: offset, len: len as u64 }, vec![0xee; len]);
    if let Some(result) = Translation::read(region, part, &mut out) {
        return result.map(|()| out);
    }
    finish(|waker| Pager::read(region, part, waker))?.read(0, &mut out).map(|()| out)
}

pub fn write(region: &FileRegion, offset: u64, data: &[u8]) -> Result<(), AccessError> {
    Translation::write(region, offset, data)
        .unwrap_or_else(|| finish(|waker| Pager::write(region, offset, data, waker)).map(drop))
}

pub fn atomic(region: &FileRegion, offset: u64, op: AtomicOp) -> Result<u64, AccessError> {
    if let Some(result) = Translation::atomic(region, offset, op) {
        return result;
    }
    let transfer = finish(|waker| Pager::atomic(region, offset, op, waker))?;
    number(&*transfer)
}

pub fn append(region: &FileRegion, data: &[u8], commit: bool) -> Result<u64, AccessError> {
    number(&*finish(|waker| region.append(data, commit, waker))?)
}

fn number(transfer: &dyn Transfer) -> Result<u64, AccessError> {
    let mut bytes = [0; 8];
    transfer.read(0, &mut bytes).map(|()| u64::from_ne_bytes(bytes))
}

/// A local work request.
pub fn read_locally(region: &FileRegion, offset: u64, len: usize) -> Result<Vec<u8>, AccessError> {
    let mut out = vec![0xee; len];
    region.read_now(HostRange { addr: offset, len: len as u64 }, &mut out).map(|()| out)
}
