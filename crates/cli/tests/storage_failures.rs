//! Disks of a node, `terrace serve`, fail, fill up and shrink. Each affected access completes in error, the node logs the
//! cause, and it continues to serve other accesses.

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

use disk::{Disk, Storage, loop_device};
use node::{Frames, Node, REGION};

const MIB: usize = 1 << 20;
const REGION_BYTES: usize = 16 * MIB;

/// The status of one access by a new client, because a failure ends the connection.
fn access(node: &Node, begin: impl Fn(&Region<'_>, &terrace_nic::Buffer)) -> WcStatus {
    let client = node.connect();
    let region = client.open(REGION).expect("the region");
    let buffer = client.buffer(MIB).expect("a buffer");
    buffer.write(0, &[7; MIB]).expect("within");
    begin(&region, &buffer);
    status_of_one(&client)
}

fn status_of_one(client: &Client) -> WcStatus {
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
fn accesses_beyond_the_end_of_a_truncated_file_fail() {
    let disk = Disk::new(Storage::File, REGION_BYTES as u64);
    let frames = Frames::new();
    let mut node = Node::start(&disk.region(), &frames);
    assert_eq!(write(&node, 8 * MIB - 77, 9000), WcStatus::Success);
    let file = File::options().write(true).open(disk.region()).expect("it exists");
    file.set_len(9 * MIB as u64).expect("shorter");
    for (offset, len) in
        [(9 * MIB, 8), (9 * MIB - 8, 16), (9 * MIB, 8192), (12 * MIB + 5, MIB), (REGION_BYTES - 4096, 4096)]
    {
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
    assert!(node.kill_and_read_log().contains("has become too short"));
}

/// A loop device whose image ends early: the device fails to read beyond the image's end.
#[test]
fn accesses_to_failing_blocks_of_a_device_fail() {
    let disk = Disk::new(Storage::BlockDevice, REGION_BYTES as u64);
    if disk.device_image().is_none() {
        return eprintln!("skipped");
    }
    let image = File::options().write(true).open(disk.image_path()).expect("an image");
    image.set_len(8 * MIB as u64).expect("shorter");
    let frames = Frames::new();
    let mut node = Node::start(&disk.region(), &frames);
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
    let log = node.kill_and_read_log();
    assert!(log.contains("a read of a region's file failed") && log.contains("Input/output error"), "{log}");
}

/// A mounted file system in an image, which is unmounted when this is dropped.
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
        let is_mounted = run("mkfs.ext4", &["-q".as_ref(), "-m0".as_ref(), &image])
            && run("mount", &["-o".as_ref(), "loop".as_ref(), &image, &point]);
        is_mounted.then_some(Mounted { _dir: dir, point })
    }

    /// A sparse file for a device with a region.
    fn image(&self) -> PathBuf {
        let image = self.point.join("image");
        File::create(&image).and_then(|image| image.set_len(REGION_BYTES as u64)).expect("an image");
        image
    }

    /// A file that takes all of the space that is left.
    fn fill(&self) -> PathBuf {
        let filler = self.point.join("filler");
        let mut file = File::create(&filler).expect("space for the file");
        assert!(std::io::copy(&mut std::io::repeat(1), &mut file).is_err(), "the disk is full");
        filler
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        run("umount", &["--lazy".as_ref(), &self.point]);
    }
}

#[test]
fn on_a_full_disk_what_was_acknowledged_stays_and_new_writes_fail() {
    let Some(small) = Mounted::new(24 * MIB as u64) else { return eprintln!("skipped: no right to mount") };
    let filler = small.point.join("filler");
    let reserved = File::create(&filler).expect("a file");
    nix::fcntl::posix_fallocate(&reserved, 0, 14 * MIB as i64).expect("space");
    drop(reserved);
    let frames = Frames::new();
    let mut node = Node::start(&small.point.join("region"), &frames);
    assert_eq!(write(&node, 0, 4096), WcStatus::Success);
    assert_eq!(commit(&node, 4096), WcStatus::Success);
    let refused = (1..16).position(|unit| write(&node, unit * MIB, MIB) != WcStatus::Success);
    let accepted = refused.expect("writes exceed the disk");
    assert!((3..13).contains(&accepted), "{accepted} MiB accepted");
    // Later writes that need memory fail, too, at any length.
    assert_eq!(write(&node, REGION_BYTES - 8192, 8192), WcStatus::RemoteOperation);
    assert_eq!(commit(&node, REGION_BYTES), WcStatus::RemoteOperation);
    assert_eq!(commit(&node, 4096), WcStatus::Success, "this range was written");
    std::fs::remove_file(&filler).expect("it exists");
    eventually("the disk has space again", || {
        std::thread::sleep(Duration::from_secs(1));
        commit(&node, REGION_BYTES) == WcStatus::Success
    });
    let reader = node.connect();
    for unit in 1..=accepted {
        assert_eq!(read_value(&reader, unit * MIB), Some(7), "MiB {unit}");
    }
    assert_eq!(write(&node, REGION_BYTES - 8192, 8192), WcStatus::Success);
    assert!(node.is_alive());
    let log = node.kill_and_read_log();
    assert!(log.contains("No space left on device"), "{log}");
}

/// Reads a mebibyte and returns its byte value if all bytes are equal.
fn read_value(client: &Client, offset: usize) -> Option<u8> {
    let region = client.open(REGION).expect("the region");
    let buffer = client.buffer(MIB).expect("a buffer");
    region.read(offset as u64, &buffer, 0, MIB as u32, 1).expect("begun");
    assert_eq!(status_of_one(client), WcStatus::Success);
    let mut bytes = vec![0; MIB];
    buffer.read(0, &mut bytes).expect("within");
    bytes.iter().all(|byte| *byte == bytes[0]).then(|| bytes[0])
}

/// Evaluates the condition up to 60 times, until it is true.
fn eventually(condition: &str, mut is_true: impl FnMut() -> bool) {
    assert!((0..60).any(|_| is_true()), "not true after 60 attempts: {condition}");
}

/// A device whose disk fills up: the node's dirty pages cannot be written back.
#[test]
fn pages_that_cannot_be_written_back_stay_and_are_not_committed() {
    let Some(small) = Mounted::new(8 * MIB as u64) else { return eprintln!("skipped: no right to mount") };
    let image = small.image();
    let Ok((device, _open)) = loop_device(&image) else { return eprintln!("skipped: no loop device") };
    let frames = Frames::new();
    let mut node = Node::start(&device, &frames);
    let filler = small.fill();
    let start = 5 * MIB;
    // One connection for all reads: connections that end count against the quota of the address for a while.
    let reader = node.connect();
    assert_eq!(write(&node, start, MIB), WcStatus::Success, "it is in memory");
    for round in 0..5 {
        assert_eq!(commit(&node, REGION_BYTES), WcStatus::RemoteOperation, "round {round}");
        // Others come into memory.
        for other in [7, 8, 9, 10, 11] {
            (0..4).for_each(|_| assert_eq!(read_value(&reader, other * MIB), Some(0)));
        }
        assert_eq!(read_value(&reader, start), Some(7), "round {round}");
    }
    std::fs::remove_file(&filler).expect("it exists");
    eventually("the disk has space again", || {
        std::thread::sleep(Duration::from_secs(1));
        commit(&node, REGION_BYTES) == WcStatus::Success
    });
    assert!(node.is_alive());
    let log = node.kill_and_read_log();
    assert!(log.contains("no FLUSH of them succeeds until they are written"), "{log}");
    let stored = std::fs::read(&image).expect("the image");
    assert!(stored[start..start + MIB].iter().all(|byte| *byte == 7), "committed, and not on the disk");
}

/// The node is told to end while the disk is full, and its pages are recovered where there is room again.
#[test]
fn an_end_that_leaves_pages_in_memory_is_an_error_that_names_them() {
    let Some(small) = Mounted::new(8 * MIB as u64) else { return eprintln!("skipped: no right to mount") };
    let image = small.image();
    let Ok((device, _open)) = loop_device(&image) else { return eprintln!("skipped: no loop device") };
    let frames = Frames::new();
    let mut node = Node::start(&device, &frames);
    let filler = small.fill();
    assert_eq!(write(&node, 5 * MIB, MIB), WcStatus::Success, "it is in memory");
    assert_eq!(node.end(), Some(1));
    let log = node.kill_and_read_log();
    assert!(log.contains(&format!("not all pages of {} could be made durable", device.display())), "{log}");
    std::fs::remove_file(&filler).expect("it exists");
    node::recover(&device, &frames);
    let stored = std::fs::read(&image).expect("the image");
    assert!(stored[5 * MIB..6 * MIB].iter().all(|byte| *byte == 7), "recovered, and not on the disk");
}
