//! After a failed write-back no FLUSH succeeds.

mod common;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::process::Command;

use common::{Scratch, Served, log, loop_device};
use terrace_baseline::{BaselineConfig, IoMethod};
use terrace_memory::AccessError;

const MIB: u64 = 1 << 20;

/// A block device whose writes fail while its disk is full: a loop device over an image with holes on a small file
/// system.
struct FullDisk {
    served: Served,
    _device: File,
    disk: Disk,
}

/// The file system; unmounted at the end.
struct Disk(Scratch);

impl Drop for Disk {
    fn drop(&mut self) {
        Command::new("umount").arg("--lazy").arg(&self.0.0).status().unwrap();
        std::fs::remove_dir(&self.0.0).unwrap();
    }
}

impl FullDisk {
    /// Two MiB of the region are on the disk. The others are holes, for which the disk has no space. `None` without
    /// the right to mount, or to make loop devices.
    fn new(io: IoMethod) -> Option<FullDisk> {
        log();
        let disk = Scratch::new("/tmp", "disk");
        std::fs::create_dir(&disk.0).unwrap();
        let mount =
            Command::new("mount").args(["-t", "tmpfs", "-o", "size=3m", "tmpfs"]).arg(&disk.0).output();
        if !mount.is_ok_and(|output| output.status.success()) {
            std::fs::remove_dir(&disk.0).unwrap();
            return None;
        }
        let disk = Disk(disk);
        let image = disk.0.0.join("image");
        let (path, device) = loop_device(&image, 8 * MIB)?;
        let image = File::options().write(true).open(image).unwrap();
        image.write_all_at(&vec![0; 2 * MIB as usize], 0).unwrap();
        let config = BaselineConfig::new(io, 8 * MIB);
        let served = Served::at(&path, Scratch::new("/tmp", "nothing"), None, true, config);
        let full = FullDisk { served, _device: device, disk };
        full.fill();
        Some(full)
    }

    fn fill(&self) {
        let filler = File::create(self.disk.0.0.join("filler")).unwrap();
        let written = (0..).find(|page| filler.write_all_at(&[1; 4096], page * 4096).is_err());
        assert!(written.is_some());
    }

    fn make_room(&self) {
        std::fs::remove_file(self.disk.0.0.join("filler")).unwrap();
    }

    /// Writes all of one MiB.
    fn write(&self, unit: usize) {
        let start = unit as u64 * MIB;
        for (index, piece) in content(unit).chunks(64 << 10).enumerate() {
            self.served.write(start + index as u64 * (64 << 10), piece).unwrap();
        }
    }

    fn assert_read(&self, unit: usize) {
        for (index, piece) in content(unit).chunks(64 << 10).enumerate() {
            let offset = (unit as u64 * MIB) + index as u64 * (64 << 10);
            assert!(
                self.served.read(offset, 64 << 10).unwrap() == piece,
                "MiB {unit} is not as it was written"
            );
        }
    }
}

fn content(unit: usize) -> Vec<u8> {
    (0..MIB as usize).map(|at| (at / 7 + unit * 31 + 1) as u8).collect()
}

#[test]
fn no_flush_succeeds_after_one_that_has_failed() {
    for io in [IoMethod::Buffered, IoMethod::Mapping, IoMethod::Pinned] {
        let Some(full) = FullDisk::new(io) else {
            return eprintln!("no right to mount or to make loop devices: not tried");
        };
        full.write(3);
        for (offset, len) in [(3 * MIB, MIB), (0, 4096), (0, 8 * MIB)] {
            assert_eq!(full.served.flush(offset, len), Err(AccessError::Flush), "{io:?}");
        }
        full.make_room();
        full.write(3);
        // The kernel does not report which pages were lost. It may have dropped others, too.
        assert_eq!(full.served.flush(3 * MIB, MIB), Err(AccessError::Flush), "{io:?}");
        full.assert_read(3);
    }
}
