//! FLUSHes of regions without pager: a file system that does not answer delays nobody but the peer that waits for it.

mod common;

use std::ffi::OsStr;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, SystemTime};

use common::*;
use fuser::{
    Config, Errno, FileAttr, FileHandle, FileType, Filesystem, Generation, INodeNo, LockOwner, OpenFlags,
    ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry, ReplyWrite, Request, WriteFlags,
};
use terrace_baseline::BackingFile;
use terrace_nic::*;
use terrace_sync::Mutex;

const LEN: usize = 64 << 10;
const FLUSH_PERSISTENT: u32 = 1 << 9;
const FILE: INodeNo = INodeNo(2);

/// A file system with one file, whose WRITEs are not answered until the test allows it.
struct SlowDisk {
    begun: Sender<()>,
    released: Mutex<Receiver<()>>,
}

fn attributes(ino: INodeNo) -> FileAttr {
    let (kind, perm, size) = match ino {
        FILE => (FileType::RegularFile, 0o600, LEN as u64),
        _ => (FileType::Directory, 0o700, 0),
    };
    let time = SystemTime::UNIX_EPOCH;
    FileAttr {
        ino,
        size,
        blocks: size / 512,
        atime: time,
        mtime: time,
        ctime: time,
        crtime: time,
        kind,
        perm,
        nlink: 1,
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

impl Filesystem for SlowDisk {
    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match name == "file" {
            true => reply.entry(&Duration::from_secs(60), &attributes(FILE), Generation(0)),
            false => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&Duration::from_secs(60), &attributes(ino));
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        reply.data(&vec![0; size as usize]);
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let _ = self.begun.send(());
        // An error once the test has dropped the other end: it has ended.
        let _ = self.released.lock().recv();
        reply.written(data.len() as u32);
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        reply.ok();
    }
}

#[test]
fn a_flush_that_waits_for_its_disk_delays_no_other_queue_pair() {
    let directory = tempfile::tempdir().expect("a directory");
    let (begun, has_begun) = channel();
    let (release, released) = channel();
    let disk = SlowDisk { begun, released: Mutex::new(released) };
    let Ok(session) = fuser::spawn_mount(disk, directory.path(), &Config::default()) else {
        return eprintln!("no right to mount: not tried");
    };
    let file = BackingFile::open(&directory.path().join("file"), None).expect("a file");
    // Dropped first, on every exit path: the disk answers before the file is closed, and that before it is unmounted.
    let release = release;
    for node in [Node::udp as fn() -> Node, Node::local] {
        delay(node, &file, &has_begun, &release);
    }
    drop(release);
    drop(file);
    session.umount_and_join().expect("unmounted");
}

fn delay(node: fn() -> Node, file: &BackingFile, has_begun: &Receiver<()>, release: &Sender<()>) {
    let (a, b) = (node(), node());
    let (qa, qb) = pair_on(&a, &b, QpType::Rc, &Tuning { timeout: 18, ..Tuning::default() });
    let access = REMOTE_ALL | FLUSH_PERSISTENT;
    let attr = QpAttr { state: QpState::Rts, access, ..QpAttr::default() };
    qb.modify(&attr, QpAttrMask::STATE | QpAttrMask::ACCESS_FLAGS).expect("RTS to RTS");
    let (other_a, other_b) = rc_pair(&a, &b);
    let va = file.map().addr;
    let request = MrRequest { addr: va, length: LEN as u64, iova: va, access, paging: None };
    let mr: Arc<Mr> = b.pd.reg_mr(request).expect("a region");
    let flush = SendOp::Flush { va, rkey: mr.rkey(), length: 8, placement: 2, selectivity: 0 };
    let flush = SendWr { payload: Payload::Sges(SgeList::new()), ..a.wr(2, flush, 0, 0) };
    let write = a.wr(1, SendOp::Write { va, rkey: mr.rkey() }, 0, 8);
    qa.post_send([Ok(write), Ok(flush)]).expect("posted");
    assert_eq!(a.completion().wr_id, 1);
    has_begun.recv_timeout(PATIENCE).expect("the disk is asked");
    // The disk writes, and other queue pairs of both devices go on.
    other_b.post_recv([b.recv(7, 0, 64)]).expect("posted");
    other_a.post_send([Ok(a.wr(3, SendOp::Send, 0, 64))]).expect("posted");
    assert_eq!(a.completion().wr_id, 3);
    assert_eq!(b.completion().wr_id, 7);
    release.send(()).expect("the disk is there");
    let wc = a.completion();
    assert_eq!((wc.wr_id, wc.status), (2, WcStatus::Success));
    mr.dereg().expect("no window");
}
