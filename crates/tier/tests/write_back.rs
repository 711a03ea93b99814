//! Pages that cannot be written back stay in memory, and no FLUSH succeeds until they are written.

mod common;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::time::Duration;

use common::{Scratch, Served, log, loop_device, still};
use terrace_memory::{AccessError, UnitPager};

const MIB: u64 = 1 << 20;
/// The default period of the tier's thread, which retries failed write-backs.
const PERIOD: Duration = Duration::from_millis(125);

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
    /// Two units of the region are on the disk. The others are holes, for which the disk has no space. `None` without
    /// the right to mount, or to make loop devices.
    fn new(exclusive: bool) -> Option<FullDisk> {
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
        let served = Served::at(&path, Scratch::new("/tmp", "nothing"), None, exclusive, still(4 * MIB));
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

    /// Writes all of a unit.
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
                "unit {unit} is not as it was written"
            );
        }
    }

    /// Checks over several periods that FLUSH fails and the data stays.
    fn assert_not_durable(&self, unit: usize) {
        for _ in 0..4 {
            for (offset, len) in [(unit as u64 * MIB, MIB), (0, 4096), (0, 8 * MIB)] {
                assert_eq!(self.served.flush(offset, len), Err(AccessError::Flush));
            }
            self.assert_read(unit);
            std::thread::sleep(PERIOD);
        }
    }

    /// Frees disk space, and checks that the data becomes durable.
    fn assert_becomes_durable(&self, unit: usize) {
        self.make_room();
        self.served.flush_when_repaired(unit as u64 * MIB, MIB);
        let image = File::open(self.disk.0.0.join("image")).unwrap();
        let mut stored = vec![0; MIB as usize];
        image.read_exact_at(&mut stored, unit as u64 * MIB).unwrap();
        assert!(stored == content(unit), "FLUSH succeeds, and unit {unit} is not on the disk");
        self.assert_read(unit);
    }
}

fn content(unit: usize) -> Vec<u8> {
    (0..MIB as usize).map(|at| (at / 7 + unit * 31 + 1) as u8).collect()
}

/// Runs a test on a full disk, exclusive and shared.
fn on_full_disks(test: impl Fn(&FullDisk)) {
    for exclusive in [true, false] {
        match FullDisk::new(exclusive) {
            Some(full) => test(&full),
            None => eprintln!("no right to mount or to make loop devices: not tried"),
        }
    }
}

#[test]
fn a_unit_that_cannot_be_written_back_stays_until_it_can() {
    on_full_disks(|full| {
        let served = &full.served;
        assert!(served.tier.promote(&served.region, 3).unwrap());
        full.write(3);
        assert!(served.tier.demote(&served.region, 3).is_err(), "there is no room on the disk");
        assert!(served.region.presence().is_present(3), "a unit that is nowhere else was dropped");
        full.assert_not_durable(3);
        assert!(served.tier.demote(&served.region, 3).is_err());
        full.assert_becomes_durable(3);
        assert!(served.tier.demote(&served.region, 3).unwrap());
        full.assert_read(3);
        assert_eq!(served.tier.stats().locked_bytes, 0);
    });
}

#[test]
fn what_the_kernel_could_not_write_is_written_again() {
    on_full_disks(|full| {
        let served = &full.served;
        for unit in [0, 3] {
            assert!(served.tier.promote(&served.region, unit).unwrap());
            full.write(unit);
        }
        // The kernel does the same after some time, and does not try again.
        let file = File::options().write(true).open(served.file.path()).unwrap();
        assert!(file.sync_data().is_err(), "there is no room on the disk");
        assert!(file.sync_data().is_ok(), "the kernel has forgotten it");
        full.assert_not_durable(3);
        // The kernel does not report which of the two was lost.
        assert!(served.tier.demote(&served.region, 3).is_err());
        full.assert_becomes_durable(3);
        full.assert_read(0);
    });
}

#[test]
fn what_writes_have_left_in_the_page_cache_stays_until_it_can_be_written() {
    let Some(full) = FullDisk::new(false) else {
        return eprintln!("no right to mount or to make loop devices: not tried");
    };
    // The unit is absent: the tier's thread writes it back and drops it.
    full.write(3);
    let failed = (0..100).any(|_| {
        std::thread::sleep(PERIOD);
        full.served.flush(0, 4096).is_err()
    });
    assert!(failed, "there is no room on the disk");
    full.assert_not_durable(3);
    full.assert_becomes_durable(3);
}
