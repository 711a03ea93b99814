//! The region's file. It is written before the measurements, and dropped from the page cache before each server's start.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Advice, fadvise, major, makedev, minor, statvfs};

use crate::application::Application;
use crate::bytes;
use crate::cgroup::Throttle;
use crate::leftovers;
use crate::plan::Storage;

/// The directory of the tmpfs.
pub const TMPFS: &str = "/dev/shm";
/// The limits of a throttled device: about a tenth of the IOPS of the developers' disk.
const THROTTLED_IOPS: u64 = 10_000;
const THROTTLED_BYTES_PER_S: u64 = 100 << 20;
/// The space to leave free on a device.
const SPARE_BYTES: u64 = 256 << 20;
const CHUNK_BYTES: usize = 4 << 20;

/// An error of creating the region's file.
#[derive(Debug, thiserror::Error)]
pub enum StorageError {
    /// The device has too little free space.
    #[error("{dir} has {} MiB left, a region of {} needs {} MiB (`--data DIR` uses another directory)",
        free >> 20, bytes::format(*needed), (needed + SPARE_BYTES) >> 20)]
    Full {
        /// The directory of the file.
        dir: PathBuf,
        /// Free bytes.
        free: u64,
        /// Size of the region.
        needed: u64,
    },
    /// A system call failed.
    #[error("cannot prepare {path}: {error}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The error.
        error: io::Error,
    },
    /// The file is not on a block device, whose I/O could be throttled.
    #[error(
        "{path} is not on a block device, so that its IO cannot be throttled (`--data DIR` uses another directory)"
    )]
    NoDevice {
        /// The file.
        path: PathBuf,
    },
}

/// A region's file, which is removed when this is dropped.
#[derive(Debug)]
pub struct RegionFile {
    path: PathBuf,
    len: u64,
}

impl RegionFile {
    /// Creates a file of `len` bytes with the content before the application's first access. `data` is the directory for files on disk; `progress` is
    /// called with the number of written bytes.
    pub fn create(
        storage: Storage,
        data: &Path,
        len: u64,
        application: Application,
        progress: &mut dyn FnMut(u64),
    ) -> Result<RegionFile, StorageError> {
        let dir = if storage == Storage::Tmpfs { Path::new(TMPFS) } else { data };
        let path = dir.join(leftovers::name(&format!("{}-{application}", bytes::format(len))));
        let at = |error| StorageError::Io { path: path.clone(), error };
        for left in leftovers::of_dead_processes(dir) {
            // If a file cannot be removed, the check below accounts for its space.
            let _ = fs::remove_file(left);
        }
        let space = statvfs(dir).map_err(|error| at(error.into()))?;
        let free = space.f_bavail * space.f_frsize;
        if free < len + SPARE_BYTES {
            return Err(StorageError::Full { dir: dir.to_owned(), free, needed: len });
        }
        let file = RegionFile { path: path.clone(), len };
        file.write(application, progress).map_err(at)?;
        file.drop_from_page_cache()?;
        Ok(file)
    }

    fn write(&self, application: Application, progress: &mut dyn FnMut(u64)) -> io::Result<()> {
        let mut file = File::create(&self.path)?;
        let mut chunk = vec![0; CHUNK_BYTES];
        let mut offset = 0;
        while offset < self.len {
            let len = (self.len - offset).min(CHUNK_BYTES as u64);
            application.fill(&mut chunk[..len as usize], offset, self.len);
            file.write_all(&chunk[..len as usize])?;
            offset += len;
            progress(offset);
        }
        file.sync_all()
    }

    /// The path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Drops the file from the page cache. The kernel charges cached pages to the group that read them first, so that the
    /// next server would not be charged for pages that stay cached.
    pub fn drop_from_page_cache(&self) -> Result<(), StorageError> {
        let at = |error| StorageError::Io { path: self.path.clone(), error };
        let file = File::open(&self.path).map_err(at)?;
        file.sync_all().map_err(at)?;
        fadvise(&file, 0, None, Advice::DontNeed).map_err(|error| at(error.into()))
    }

    /// The limits of the file's disk for [`Storage::Throttled`].
    pub fn throttle(&self) -> Result<Throttle, StorageError> {
        let metadata =
            fs::metadata(&self.path).map_err(|error| StorageError::Io { path: self.path.clone(), error })?;
        let device = (major(metadata.dev()), minor(metadata.dev()));
        let device = whole_disk(Path::new("/sys/dev/block"), device)
            .ok_or_else(|| StorageError::NoDevice { path: self.path.clone() })?;
        Ok(Throttle { device, iops: THROTTLED_IOPS, bytes_per_s: THROTTLED_BYTES_PER_S })
    }
}

impl Drop for RegionFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// The disk of a partition, or the disk itself, because limits apply to disks.
fn whole_disk(devices: &Path, (major, minor): (u32, u32)) -> Option<(u32, u32)> {
    let device = fs::canonicalize(devices.join(format!("{major}:{minor}"))).ok()?;
    let disk = if device.join("partition").exists() { device.parent()? } else { &device };
    let numbers = fs::read_to_string(disk.join("dev")).ok()?;
    let (major, minor) = numbers.trim().split_once(':')?;
    let (major, minor) = (major.parse().ok()?, minor.parse().ok()?);
    // Device number 0 is invalid and must not be written to the files of the limits.
    (makedev(major, minor) != 0).then_some((major, minor))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::content::{Stamp, stamp_of};

    #[test]
    fn the_file_has_the_initial_content_and_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let mut done = 0;
        let file =
            RegionFile::create(Storage::Disk, dir.path(), 5 << 20, Application::Blocks, &mut |bytes| {
                done = bytes
            })
            .unwrap();
        let content = fs::read(file.path()).unwrap();
        assert_eq!((done, content.len()), (5 << 20, 5 << 20));
        let last = content.len() - 64;
        assert_eq!(stamp_of(&content[last..], last as u64), Some(Stamp::INITIAL));
        let path = file.path().to_owned();
        drop(file);
        assert!(!path.exists());
    }

    #[test]
    fn files_of_interrupted_runs_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let mut gone = std::process::Command::new("true").spawn().unwrap();
        let old = dir.path().join(format!("terrace-bench-{}-2G", gone.id()));
        gone.wait().unwrap();
        let (living, foreign) =
            (dir.path().join("terrace-bench-1-2G"), dir.path().join("terrace-bench-notes"));
        for path in [&old, &living, &foreign] {
            fs::write(path, "x").unwrap();
        }
        RegionFile::create(Storage::Disk, dir.path(), 1 << 20, Application::Blocks, &mut |_| {}).unwrap();
        assert!(!old.exists() && living.exists() && foreign.exists());
    }

    #[test]
    fn the_error_for_a_full_device_names_the_option() {
        let dir = tempfile::tempdir().unwrap();
        let message =
            RegionFile::create(Storage::Disk, dir.path(), 1 << 50, Application::Blocks, &mut |_| {})
                .unwrap_err()
                .to_string();
        assert!(message.contains("MiB left") && message.contains("--data"), "{message}");
    }

    #[test]
    fn limits_are_for_the_disk_of_a_partition() {
        let sys = tempfile::tempdir().unwrap();
        let partition = sys.path().join("devices/vda/vda1");
        fs::create_dir_all(&partition).unwrap();
        fs::write(partition.join("partition"), "1").unwrap();
        fs::write(partition.join("dev"), "254:1\n").unwrap();
        fs::write(partition.join("../dev"), "254:0\n").unwrap();
        std::os::unix::fs::symlink(&partition, sys.path().join("254:1")).unwrap();
        std::os::unix::fs::symlink(partition.parent().unwrap(), sys.path().join("254:0")).unwrap();
        assert_eq!(whole_disk(sys.path(), (254, 1)), Some((254, 0)));
        assert_eq!(whole_disk(sys.path(), (254, 0)), Some((254, 0)));
        assert_eq!(whole_disk(sys.path(), (0, 42)), None);
    }
}
