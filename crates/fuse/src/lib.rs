//! File systems that a process of Terrace serves by FUSE: how they come to their mount point, and how they leave it.
//!
//! The requests are those of the crate `fuser`; what answers them is the caller's.

#![forbid(unsafe_code)]
#![warn(missing_docs)]

use std::io::{self, PipeReader, PipeWriter};
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, mpsc};
use std::thread::Builder;
use std::time::{Duration, Instant};

use fuser::{BackgroundSession, Config, Filesystem, MountOption, Notifier, Session};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

/// How long unmounting waits for programs to close their files.
const CLOSE_TIME_MAX: Duration = Duration::from_secs(2);

/// How long a file system that is at the mount point already has for an answer.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(5);

/// A file system at its mount point. Dropping it unmounts.
pub struct Mounted {
    place: Place,
    /// Dropping it would unmount what is at the mount point by then: fuser 0.18 takes an ended session for a mounted one
    /// (`mnt::is_mounted`).
    session: ManuallyDrop<BackgroundSession>,
    ended: PipeReader,
    has_unmounted: bool,
    /// A descriptor of the connection to the kernel.
    device: Arc<OwnedFd>,
}

/// A part of each file system, which is dropped with it when the session has ended.
pub struct SessionEnd {
    /// The other end of [`Mounted::ended`].
    _pipe: PipeWriter,
}

/// Options of the mount: the name of its source in `/proc/mounts`, and neither setuid programs nor devices.
pub fn options(source: &str) -> Vec<MountOption> {
    vec![
        MountOption::FSName(fs_name(source, rustix::process::geteuid().is_root())),
        // Of its own option, fuser tells the kernel nothing where root mounts: the type would be `fuse`.
        MountOption::CUSTOM("subtype=terrace".into()),
        MountOption::NoSuid,
        MountOption::NoDev,
    ]
}

/// `fusermount3`, by which users other than root mount, splits its options at commas.
fn fs_name(source: &str, is_root: bool) -> String {
    match is_root {
        true => source.to_owned(),
        false => source.replace('\\', "\\\\").replace(',', "\\,"),
    }
}

impl Mounted {
    /// Mounts the file system that `filesystem` returns, and answers its requests on threads of their own. A mount there whose
    /// process was killed is detached before.
    ///
    /// # Errors
    /// `TimedOut` if what is mounted there does not answer; the kernel's or fusermount3's: no right, no such directory, no FUSE; a mount point that is no directory; an error of
    /// the file system's `init`; no descriptors.
    pub fn mount<F: Filesystem>(
        filesystem: impl FnOnce(SessionEnd) -> F,
        mount_point: &Path,
        config: &Config,
    ) -> io::Result<Mounted> {
        detach_dead(mount_point)?;
        let path = mount_point.canonicalize()?;
        // The kernel would mount a directory there, and then fail all accesses to it.
        if !path.metadata()?.is_dir() {
            return Err(io::ErrorKind::NotADirectory.into());
        }
        let (ended, pipe) = io::pipe()?;
        let session = Session::new(filesystem(SessionEnd { _pipe: pipe }), &path, config)?;
        let place = Place { mount_id: mount_id(&path)?, path };
        let device = Arc::new(session.as_fd().try_clone_to_owned()?);
        Ok(Mounted {
            place,
            session: ManuallyDrop::new(session.spawn()?),
            ended,
            has_unmounted: false,
            device,
        })
    }

    /// A descriptor of the connection to the kernel: readable when there is a request.
    pub fn device(&self) -> Arc<OwnedFd> {
        self.device.clone()
    }

    /// Tells the kernel that what it has cached is not true any more.
    pub fn notifier(&self) -> Notifier {
        self.session.notifier()
    }

    /// Whether it has been unmounted from outside, by `umount` or `fusermount3 -u`.
    pub fn is_unmounted(&self) -> bool {
        self.wait_for_end(Duration::ZERO)
    }

    /// A descriptor that hangs up (`POLLHUP`) when [`Mounted::is_unmounted`].
    pub fn ended(&self) -> BorrowedFd<'_> {
        self.ended.as_fd()
    }

    /// Waits for the end of the session, for so long at most. Returns whether it has ended.
    fn wait_for_end(&self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            // Limits are seconds.
            let left = Timespec::try_from(left).unwrap_or_default();
            match poll(&mut [PollFd::new(&self.ended, PollFlags::empty())], Some(&left)) {
                Err(Errno::INTR) => {}
                other => return other.is_ok_and(|count| count > 0),
            }
        }
    }

    /// Unmounts, unless that has been done from outside, and waits for the end of the session, which programs with open files
    /// delay: not longer than two seconds, after which the end of this process closes the session.
    ///
    /// # Errors
    /// That of the command that unmounts.
    pub fn unmount(&mut self) -> io::Result<()> {
        if std::mem::replace(&mut self.has_unmounted, true) {
            return Ok(());
        }
        if !self.is_unmounted() && self.place.is_top() {
            detach(&self.place.path)?;
        }
        self.wait_for_end(CLOSE_TIME_MAX);
        Ok(())
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // `unmount` returns the error to those who want it.
        let _ = self.unmount();
    }
}

/// Detaches a mount whose process was killed, so that the mount point can be used again. The kernel may still have its attributes; the
/// request of this function it passes on.
///
/// # Errors
/// `TimedOut` if a file system is mounted there whose process does not answer, as when it is stopped.
fn detach_dead(mount_point: &Path) -> io::Result<()> {
    let (sender, receiver) = mpsc::channel();
    let path = mount_point.to_owned();
    Builder::new().spawn(move || sender.send(rustix::fs::statvfs(&path).err()))?;
    match receiver.recv_timeout(ANSWER_TIME_MAX) {
        // If that fails, mounting says why.
        Ok(Some(Errno::NOTCONN)) => drop(detach(mount_point)),
        Ok(_) => {}
        Err(_) => {
            let silent = "a file system is mounted there already, and its process does not answer: end it, or unmount it";
            return Err(io::Error::new(io::ErrorKind::TimedOut, silent));
        }
    }
    Ok(())
}

/// Detaches a mount from its mount point, also if files are open: by the command that this user may use.
fn detach(mount_point: &Path) -> io::Result<()> {
    let (program, options) = match rustix::process::geteuid().is_root() {
        true => ("umount", "-l"),
        false => ("fusermount3", "-uz"),
    };
    let status = Command::new(program).arg(options).arg("--").arg(mount_point).status()?;
    if status.success() { Ok(()) } else { Err(io::Error::other(format!("{program} has failed"))) }
}

/// A mount at its mount point.
struct Place {
    path: PathBuf,
    /// The kernel's number of the mount. No other has it as long as this one is in use.
    mount_id: String,
}

impl Place {
    /// Whether accesses to the path reach it: it has neither been detached nor is anything else mounted over it.
    fn is_top(&self) -> bool {
        mount_id(&self.path).is_ok_and(|id| id == self.mount_id)
    }
}

/// The number of the mount at a path. No request reaches the server, which may be this process.
fn mount_id(path: &Path) -> io::Result<String> {
    let fd = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    let facts = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_raw_fd()))?;
    let id = facts.lines().find_map(|line| line.strip_prefix("mnt_id:"));
    id.map(|id| id.trim().to_owned()).ok_or_else(|| io::ErrorKind::Unsupported.into())
}
