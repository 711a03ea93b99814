//! A file system whose server does not answer, as when it is stopped.

#[expect(dead_code, reason = "other tests use the rest")]
mod common;

use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::AsFd;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use common::{TestFile, open, region};
use fuser::{
    Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, LockOwner, OpenFlags,
    ReplyAttr, ReplyEmpty, ReplyEntry, ReplyOpen, Request,
};
use terrace_files::{FileExtent, Files, FilesConfig};
use terrace_fuse::{Mounted, SessionEnd};

const FILE: INodeNo = INodeNo(2);
const TTL: Duration = Duration::from_secs(3600);
/// A limit that only a hang reaches.
const HANG: Duration = Duration::from_secs(20);

/// A request that the server does not answer while it is silent.
#[derive(Debug, PartialEq, Eq)]
enum Asked {
    Open,
    /// Of a descriptor that is closed.
    Flush,
}

/// A directory with one file.
struct Server {
    /// Locked while the server is silent.
    silence: Arc<Mutex<()>>,
    asked: Sender<Asked>,
    _end: SessionEnd,
}

impl Server {
    fn attributes(ino: INodeNo) -> FileAttr {
        let (kind, size) = if ino == FILE { (FileType::RegularFile, 4096) } else { (FileType::Directory, 0) };
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let (time, blocks) = (SystemTime::UNIX_EPOCH, size / 512);
        FileAttr {
            ino,
            size,
            blocks,
            atime: time,
            mtime: time,
            ctime: time,
            crtime: time,
            kind,
            perm: 0o700,
            nlink: 1,
            uid,
            gid,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        }
    }

    fn wait(&self, asked: Asked) {
        // The test may have ended.
        let _ = self.asked.send(asked);
        let _silence = self.silence.lock();
    }
}

impl Filesystem for Server {
    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match name == "file" {
            true => reply.entry(&TTL, &Self::attributes(FILE), Generation(0)),
            false => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&TTL, &Self::attributes(ino));
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        self.wait(Asked::Open);
        reply.opened(FileHandle(0), FopenFlags::empty());
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        self.wait(Asked::Flush);
        reply.ok();
    }
}

/// Leaves a test out that this system cannot run.
fn leave_out(reason: &str) {
    assert!(std::env::var_os("TERRACE_MUST_RUN").is_none(), "{reason}");
    println!("not tested: {reason}");
}

/// A mounted file of a server.
struct Silent {
    file: File,
    silence: Arc<Mutex<()>>,
    asked: Receiver<Asked>,
    // Unmounted when the file is closed.
    _mounted: Mounted,
    _directory: tempfile::TempDir,
}

impl Silent {
    /// `None` where nothing can be mounted.
    fn mount() -> Option<Silent> {
        let (directory, silence) = (tempfile::tempdir().expect("a directory"), Arc::<Mutex<()>>::default());
        let (sender, asked) = channel();
        let server = |end| Server { silence: silence.clone(), asked: sender, _end: end };
        let mut config = fuser::Config::default();
        config.mount_options = terrace_fuse::options("silent");
        let mounted = Mounted::mount(server, directory.path(), &config)
            .inspect_err(|error| leave_out(&format!("nothing can be mounted here: {error}")))
            .ok()?;
        let file = open(&directory.path().join("file"), true);
        assert_eq!(asked.recv_timeout(HANG), Ok(Asked::Open));
        Some(Silent { file, silence, asked, _mounted: mounted, _directory: directory })
    }
}

#[test]
fn a_file_that_cannot_be_opened_delays_no_registration_of_another_one() {
    let Some(silent) = Silent::mount() else { return };
    let (files, other) = (Files::new(&FilesConfig::default()), TestFile::new("/var/tmp", 4096));
    std::thread::scope(|scope| {
        let silence = silent.silence.lock();
        let waiting = scope.spawn(|| files.open(silent.file.as_fd(), true, FileExtent::WHOLE).map(drop));
        assert_eq!(silent.asked.recv_timeout(HANG), Ok(Asked::Open));
        let (registered, is_registered) = channel();
        let (files, other) = (&files, &other);
        scope.spawn(move || registered.send(region(files, &other.file)));
        is_registered.recv_timeout(HANG).expect("the registration of another file waits");
        assert!(!waiting.is_finished());
        drop(silence);
        waiting.join().expect("no panic").expect("a region");
    });
}

#[test]
fn a_file_that_cannot_be_closed_delays_no_registration_of_another_one() {
    let Some(silent) = Silent::mount() else { return };
    let files = Files::new(&FilesConfig { descriptors_max: 1, ..FilesConfig::default() });
    let others = [(); 4].map(|()| TestFile::new("/var/tmp", 4096));
    let _region = region(&files, &silent.file);
    assert_eq!(silent.asked.recv_timeout(HANG), Ok(Asked::Open));
    std::thread::scope(|scope| {
        let silence = silent.silence.lock();
        let parking =
            scope.spawn(|| [&others[0], &others[1], &others[2]].map(|other| region(&files, &other.file)));
        // One of them gets the file's descriptor.
        while silent.asked.recv_timeout(Duration::from_millis(10)) != Ok(Asked::Flush) {
            if parking.is_finished() {
                leave_out("this system parks no files");
                return;
            }
        }
        let (registered, is_registered) = channel();
        let (files, other) = (&files, &others[3]);
        scope.spawn(move || registered.send(region(files, &other.file)));
        is_registered.recv_timeout(HANG).expect("the registration of another file waits");
        assert!(!parking.is_finished());
        drop(silence);
        parking.join().expect("no panic");
    });
}

#[test]
fn a_file_that_cannot_be_closed_delays_no_access_to_the_file_that_gets_its_descriptor() {
    let Some(silent) = Silent::mount() else { return };
    let files = Files::new(&FilesConfig { descriptors_max: 1, ..FilesConfig::default() });
    let others = [(); 3].map(|()| TestFile::new("/var/tmp", 4096));
    let regions = [&others[0], &others[1], &others[2]].map(|other| region(&files, &other.file));
    let _region = region(&files, &silent.file);
    assert_eq!(silent.asked.recv_timeout(HANG), Ok(Asked::Open));
    std::thread::scope(|scope| {
        let silence = silent.silence.lock();
        // One of the files gets the silent file's descriptor.
        let parking = scope.spawn(|| (0..30).map(|turn| regions[turn % 3].file_len()).max());
        while silent.asked.recv_timeout(Duration::from_millis(10)) != Ok(Asked::Flush) {
            if parking.is_finished() {
                leave_out("this system parks no files");
                return;
            }
        }
        let (accessed, is_accessed) = channel();
        let regions = &regions;
        scope.spawn(move || accessed.send(regions.each_ref().map(|region| region.file_len())));
        let lens = is_accessed.recv_timeout(HANG).expect("an access to another file waits");
        assert_eq!(lens, [4096; 3]);
        assert!(!parking.is_finished());
        drop(silence);
        parking.join().expect("no panic");
    });
}
