//! Disks that fail, fill up and shrink under a node, `terrace serve`: each affected access completes with a status of
//! its own, the node reports why, and it continues to serve the rest.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use terrace_nic::WcStatus;
use terrace_node::{Client, Region};

#[path = "crash/disk.rs"]
mod disk;
#[path = "crash/node.rs"]
mod node;

use disk::{Disk, Place, loop_device};
use node::{Node, REGION};

const MIB: usize = 1 << 20;
const REGION_BYTES: usize = 16 * MIB;

/// The status of one access. Each uses its own client, because a failure ends the connection.
fn access(node: &Node, begin: impl Fn(&Region<'_>, &terrace_nic::Buffer)) -> WcStatus {
    let client = node.connect();
    let region = client.open(REGION).expect("the region");
    let buffer = client.buffer(MIB).expect("a buffer");
    buffer.write(0, &[7; MIB]).expect("within");
    begin(&region, &buffer);
    end_of_one(&client)
}

fn end_of_one(client: &Client) -> WcStatus {
    let mut done = Vec::new();
    while done.is_empty() {
        client.poll(&mut done).expect("a healthy connection");
    }
    done[0].status
}

fn read(node: &Node, offset: usize, len: usize) -> WcStatus {
    access(node, |region, buffer| region.read(offset as u64, buffer, 0, len as u32, 1).expect("begun"))
}

fn write(node: &Node, offset: usize, len: usize) -> WcStatus {
    access(node, |region, buffer| region.write(offset as u64, buffer, 0, len as u32, 1).expect("begun"))
}

fn commit(node: &Node, len: usize) -> WcStatus {
    access(node, |region, _| region.commit(0, len as u32, 1).expect("begun"))
}

#[test]
fn a_file_that_shrinks_takes_only_what_it_had() {
    let disk = Disk::new(Place::File, REGION_BYTES as u64);
    let mut node = Node::start(&disk.region());
    assert_eq!(write(&node, 9 * MIB - 77, 9000), WcStatus::Success);
    let file = File::options().write(true).open(disk.region()).expect("it is there");
    file.set_len(9 * MIB as u64).expect("shorter");
    for (offset, len) in [(9 * MIB, 8), (9 * MIB - 8, 16), (12 * MIB + 5, MIB), (REGION_BYTES - 4096, 4096)] {
        assert_eq!(read(&node, offset, len), WcStatus::RemoteAccess, "{len} bytes read at {offset}");
        assert_eq!(write(&node, offset, len), WcStatus::RemoteAccess, "{len} bytes written at {offset}");
    }
    assert_eq!(file.metadata().expect("open").len(), 9 * MIB as u64, "a refused write made the file longer");
    assert_eq!(read(&node, 9 * MIB - 77, 77), WcStatus::Success);
    assert_eq!(write(&node, 0, MIB), WcStatus::Success);
    assert_eq!(commit(&node, MIB), WcStatus::Success);
    file.set_len(REGION_BYTES as u64).expect("longer");
    assert_eq!(write(&node, 12 * MIB + 5, MIB), WcStatus::Success);
    assert!(node.is_alive());
    assert!(node.complaints().contains("has become too short"));
}

/// A loop device whose image ends early: the device fails to read beyond the image's end.
#[test]
fn a_device_that_fails_fails_what_it_was_asked_for() {
    let disk = Disk::new(Place::BlockDevice, REGION_BYTES as u64);
    if disk.device_image().is_none() {
        return eprintln!("not tried");
    }
    let image = File::options().write(true).open(disk.image_path()).expect("an image");
    image.set_len(8 * MIB as u64).expect("shorter");
    let mut node = Node::start(&disk.region());
    for (offset, len) in [(8 * MIB, 4096), (10 * MIB + 77, 9), (8 * MIB - 4096, 8192)] {
        assert_eq!(read(&node, offset, len), WcStatus::RemoteOperation, "{len} bytes read at {offset}");
    }
    // A write of partial pages reads them first.
    assert_eq!(write(&node, 12 * MIB + 100, 50), WcStatus::RemoteOperation);
    assert_eq!(read(&node, 8 * MIB - 9000, 9000), WcStatus::Success);
    assert_eq!(write(&node, 77, 5000), WcStatus::Success);
    image.set_len(REGION_BYTES as u64).expect("longer");
    assert_eq!(read(&node, 10 * MIB + 77, 9), WcStatus::Success);
    assert_eq!(write(&node, 12 * MIB + 100, 50), WcStatus::Success);
    assert!(node.is_alive());
    let said = node.complaints();
    assert!(
        said.contains("an access to a region's file failed") && said.contains("Input/output error"),
        "{said}"
    );
}

/// A file system in an image, mounted; unmounted when dropped.
struct Mounted {
    _dir: tempfile::TempDir,
    point: PathBuf,
}

fn run(program: &str, arguments: &[&Path]) -> bool {
    let output = Command::new(program).args(arguments).output();
    output.is_ok_and(|output| {
        eprint!("{}", String::from_utf8_lossy(&output.stderr));
        output.status.success()
    })
}

impl Mounted {
    /// `None` without the right to mount.
    fn new(bytes: u64) -> Option<Mounted> {
        let dir = tempfile::tempdir().expect("a directory");
        let (image, point) = (dir.path().join("image"), dir.path().join("mounted"));
        File::create(&image).and_then(|file| file.set_len(bytes)).expect("an image");
        std::fs::create_dir(&point).expect("a directory");
        let made = run("mkfs.ext4", &["-q".as_ref(), "-m0".as_ref(), &image])
            && run("mount", &["-o".as_ref(), "loop".as_ref(), &image, &point]);
        made.then_some(Mounted { _dir: dir, point })
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        run("umount", &["--lazy".as_ref(), &self.point]);
    }
}

#[test]
fn a_disk_that_is_full_refuses_what_was_never_written_and_nothing_else() {
    let Some(small) = Mounted::new(8 * MIB as u64) else { return eprintln!("no right to mount: not tried") };
    let mut node = Node::start(&small.point.join("region"));
    assert_eq!(write(&node, 0, 4096), WcStatus::Success);
    let refused =
        (1..16).map(|unit| write(&node, unit * MIB, MIB)).find(|status| *status != WcStatus::Success);
    assert_eq!(refused, Some(WcStatus::RemoteOperation), "more than the disk has");
    // So does the next write to a hole, whatever its length.
    assert_eq!(write(&node, REGION_BYTES - 8192, 8192), WcStatus::RemoteOperation);
    assert_eq!(write(&node, 0, 4096), WcStatus::Success);
    assert_eq!(write(&node, 100, 50), WcStatus::Success);
    assert_eq!(commit(&node, 4096), WcStatus::Success);
    assert_eq!(read(&node, 0, REGION_BYTES / 16), WcStatus::Success);
    assert_eq!(read(&node, REGION_BYTES - 8192, 8192), WcStatus::Success);
    assert!(node.is_alive());
    let said = node.complaints();
    assert!(said.contains("No space left on device"), "{said}");
}

/// Reads a mebibyte and returns its byte value if all bytes are equal.
fn read_value(client: &Client, offset: usize) -> Option<u8> {
    let region = client.open(REGION).expect("the region");
    let buffer = client.buffer(MIB).expect("a buffer");
    region.read(offset as u64, &buffer, 0, MIB as u32, 1).expect("begun");
    assert_eq!(end_of_one(client), WcStatus::Success);
    let mut bytes = vec![0; MIB];
    buffer.read(0, &mut bytes).expect("within");
    bytes.iter().all(|byte| *byte == bytes[0]).then(|| bytes[0])
}

/// Tries up to 60 times until the condition is true.
fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    assert!((0..60).any(|_| is_so()), "{what}: that does not happen");
}

/// A device whose disk fills up: the node's dirty units cannot be written back.
#[test]
fn what_cannot_be_written_back_is_kept_and_not_committed() {
    let Some(small) = Mounted::new(8 * MIB as u64) else { return eprintln!("no right to mount: not tried") };
    let image = small.point.join("image");
    File::create(&image).and_then(|image| image.set_len(REGION_BYTES as u64)).expect("an image");
    let Ok((device, _open)) = loop_device(&image) else { return eprintln!("no loop device: not tried") };
    let mut node = Node::start(&device);
    let filler = small.point.join("filler");
    let mut file = File::create(&filler).expect("there is room");
    assert!(std::io::copy(&mut std::io::repeat(1), &mut file).is_err(), "it is full now");
    drop(file);
    let unit = 5 * MIB;
    // A connection without failures: the node counts those with failures for a while.
    let reader = node.connect();
    eventually("a hole that is much read is in memory, and can be written there", || {
        (0..50).for_each(|_| assert_eq!(read_value(&reader, unit), Some(0)));
        write(&node, unit, MIB) == WcStatus::Success
    });
    // Other units become hotter, and the kernel itself writes back.
    let written = File::options().write(true).open(&device).and_then(|device| device.sync_data());
    assert!(written.is_err(), "there is no room for it");
    for round in 0..5 {
        assert_eq!(commit(&node, REGION_BYTES), WcStatus::RemoteOperation, "round {round}");
        for other in [7, 8, 9, 10, 11] {
            (0..20).for_each(|_| assert_eq!(read_value(&reader, other * MIB), Some(0)));
        }
        assert_eq!(read_value(&reader, unit), Some(7), "round {round}");
    }
    std::fs::remove_file(&filler).expect("it is there");
    eventually("there is room again", || {
        std::thread::sleep(Duration::from_secs(1));
        commit(&node, REGION_BYTES) == WcStatus::Success
    });
    assert!(node.is_alive());
    let said = node.complaints();
    assert!(said.contains("no FLUSH succeeds until it is written"), "{said}");
    let stored = std::fs::read(&image).expect("the image");
    assert!(stored[unit..unit + MIB].iter().all(|byte| *byte == 7), "committed, and not on the disk");
}
