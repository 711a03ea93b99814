//! The storage of a region, and reads of it that bypass the node.
#![allow(dead_code, reason = "each test uses some of it")]

use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::fcntl::{OFlag, PosixFadviseAdvice, posix_fadvise};
use tempfile::TempDir;

const PAGE_BYTES: usize = 4096;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Storage {
    /// A sparse file, like most regions.
    File,
    /// A loop device: its image contains exactly the data written back from its page cache. Requires the right to create
    /// one.
    BlockDevice,
}

/// The region's file or device. Removed on drop.
pub struct Disk {
    dir: TempDir,
    /// A loop device, and the open file that keeps it attached.
    device: Option<(PathBuf, File)>,
    len: u64,
}

impl Disk {
    /// Creates the storage; a file if no loop device can be created.
    pub fn new(storage: Storage, len: u64) -> Disk {
        let dir = tempfile::tempdir().expect("a directory");
        let mut disk = Disk { dir, device: None, len };
        if storage == Storage::BlockDevice {
            File::create(disk.image_path()).and_then(|image| image.set_len(len)).expect("an image");
            match loop_device(&disk.image_path()) {
                Ok(device) => disk.device = Some(device),
                Err(error) => {
                    eprintln!("no loop device, so the content of the device is not checked: {error}")
                }
            }
        }
        disk
    }

    /// The image behind a loop device.
    pub fn image_path(&self) -> PathBuf {
        self.dir.path().join("image")
    }

    /// The path that the node serves.
    pub fn region(&self) -> PathBuf {
        match &self.device {
            Some((path, _)) => path.clone(),
            None => self.dir.path().join("region"),
        }
    }

    /// The device's content without its page cache. `None` for a file: a direct read would make the kernel write the
    /// cached data back.
    pub fn device_image(&self) -> Option<Vec<u8>> {
        self.device.as_ref().map(|_| std::fs::read(self.image_path()).expect("the image"))
    }

    /// The file's content, read with direct IO after its page cache was dropped.
    pub fn direct_image(&self) -> Vec<u8> {
        let mut options = File::options();
        let file =
            options.read(true).custom_flags(OFlag::O_DIRECT.bits()).open(self.region()).expect("it exists");
        // One page extra, to align the buffer.
        let len = self.len as usize;
        let mut memory = vec![0; len + PAGE_BYTES];
        let skip = memory.as_ptr().align_offset(PAGE_BYTES);
        self.drop_caches(&file);
        file.read_exact_at(&mut memory[skip..skip + len], 0).expect("the disk works");
        memory.copy_within(skip..skip + len, 0);
        memory.truncate(len);
        memory
    }

    /// Drops clean pages of the file, or those of all files with `TERRACE_CRASH_DROP_CACHES=1` (for a dedicated
    /// machine).
    fn drop_caches(&self, file: &File) {
        file.sync_all().expect("the disk works");
        let dropped = std::env::var("TERRACE_CRASH_DROP_CACHES").is_ok_and(|value| value == "1")
            && std::fs::write("/proc/sys/vm/drop_caches", "1").is_ok();
        if !dropped {
            let advice = PosixFadviseAdvice::POSIX_FADV_DONTNEED;
            posix_fadvise(file, 0, 0, advice).expect("advice for a file");
        }
    }
}

/// A loop device over an image. It is detached when its last open file is closed, the returned one included.
pub fn loop_device(image: &Path) -> Result<(PathBuf, File), String> {
    let losetup = |arguments: &[&str], path: &Path| {
        let output =
            Command::new("losetup").args(arguments).arg(path).output().map_err(|error| error.to_string())?;
        match output.status.success() {
            true => Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned()),
            false => Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
        }
    };
    let path = PathBuf::from(losetup(&["--find", "--show"], image)?);
    let file = File::open(&path).map_err(|error| error.to_string())?;
    losetup(&["--detach"], &path)?;
    Ok((path, file))
}
