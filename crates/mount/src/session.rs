//! Mounting and unmounting.

use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use fuser::{BackgroundSession, Config, MountOption, Notifier, Session, SessionACL};
use rustix::fs::{Mode, OFlags};
use terrace_export::FileId;

use crate::filesystem::Requests;
use crate::mount::Mount;
use crate::remote::Remote;

/// Threads that answer the kernel's requests. A request that waits for the server takes one.
const THREADS: usize = 8;
/// How often the housekeeping thread looks for old dirty bytes.
const HOUSEKEEPING: Duration = Duration::from_millis(200);

/// How long unmounting waits for programs to close their files.
const CLOSE_TIME_MAX: Duration = Duration::from_secs(2);

/// How an export is mounted.
#[derive(Clone, Debug)]
pub struct MountConfig {
    /// The directory of the export that is mounted.
    pub root: FileId,
    /// Where.
    pub mount_point: PathBuf,
    /// The name of the source in `/proc/mounts`.
    pub source: String,
    /// How long the kernel believes names and attributes.
    pub ttl: Duration,
    /// Whether other users have access (`allow_other`); the kernel checks their permissions, and new files are theirs.
    pub serves_others: bool,
    /// Whether nothing may be changed.
    pub is_read_only: bool,
}

/// A mounted export. Dropping it unmounts.
pub struct Mounted<R: Remote> {
    mount: Arc<Mount<R>>,
    place: Place,
    session: Option<BackgroundSession>,
    has_ended: Arc<AtomicBool>,
    housekeeper: Option<JoinHandle<()>>,
}

/// Mounts an export.
///
/// # Errors
/// The kernel's or fusermount3's: no right, no such directory, no FUSE; a mount point that is no directory.
pub fn mount<R: Remote>(remote: R, config: &MountConfig) -> io::Result<Mounted<R>> {
    detach_dead(&config.mount_point);
    let path = config.mount_point.canonicalize()?;
    // The kernel would mount a directory there, and then fail all accesses to it.
    if !path.metadata()?.is_dir() {
        return Err(io::ErrorKind::NotADirectory.into());
    }
    let mount = Arc::new(Mount::new(Arc::new(remote), config.root, config.ttl, config.serves_others)?);
    let session = Session::new(Requests(mount.clone()), &path, &fuse_config(config))?;
    let notifier = session.notifier();
    let place = Place { mount_id: mount_id(&path)?, path };
    let session = session.spawn()?;
    let has_ended = Arc::new(AtomicBool::new(false));
    let housekeeper = {
        let (mount, has_ended) = (mount.clone(), has_ended.clone());
        thread::Builder::new()
            .name("mount-changes".into())
            .spawn(move || keep_house(&mount, &notifier, &has_ended))?
    };
    Ok(Mounted { mount, place, session: Some(session), has_ended, housekeeper: Some(housekeeper) })
}

fn fuse_config(config: &MountConfig) -> Config {
    let mut options = vec![
        MountOption::FSName(fs_name(&config.source, rustix::process::geteuid().is_root())),
        // Of its own option, fuser tells the kernel nothing where root mounts: the type would be `fuse`.
        MountOption::CUSTOM("subtype=terrace".into()),
        MountOption::NoSuid,
        MountOption::NoDev,
    ];
    if config.is_read_only {
        options.push(MountOption::RO);
    }
    if config.serves_others {
        options.push(MountOption::DefaultPermissions);
    }
    let mut fuse = Config::default();
    fuse.mount_options = options;
    fuse.acl = if config.serves_others { SessionACL::All } else { SessionACL::Owner };
    fuse.n_threads = Some(THREADS);
    fuse.clone_fd = true;
    fuse
}

/// `fusermount3`, by which users other than root mount, splits its options at commas.
fn fs_name(source: &str, is_root: bool) -> String {
    match is_root {
        true => source.to_owned(),
        false => source.replace('\\', "\\\\").replace(',', "\\,"),
    }
}

/// Detaches a mount whose process was killed, so that the mount point can be used again.
fn detach_dead(mount_point: &Path) {
    let Err(error) = mount_point.metadata() else { return };
    if error.raw_os_error() == Some(fuser::Errno::ENOTCONN.code()) {
        // If that fails, mounting says why.
        let _ = detach(mount_point);
    }
}

/// Detaches a mount from its mount point, also if files are open: by the command that this user may use.
fn detach(mount_point: &Path) -> io::Result<()> {
    let (program, options) = match rustix::process::geteuid().is_root() {
        true => ("umount", "--lazy"),
        false => ("fusermount3", "-uz"),
    };
    let status = Command::new(program).arg(options).arg("--").arg(mount_point).status()?;
    if status.success() { Ok(()) } else { Err(io::Error::other(format!("{program} has failed"))) }
}

/// Applies the server's changes, writes old dirty bytes, and watches files.
fn keep_house<R: Remote>(mount: &Mount<R>, notifier: &Notifier, has_ended: &AtomicBool) {
    while !has_ended.load(Ordering::Acquire) {
        if let Some(change) = mount.remote.next_change(HOUSEKEEPING) {
            mount.apply(change, notifier);
        }
        mount.write_old();
        mount.watch_open_files();
    }
}

impl<R: Remote> Mounted<R> {
    /// Whether it has been unmounted from outside, by `umount` or `fusermount3 -u`.
    pub fn is_unmounted(&self) -> bool {
        self.session.as_ref().is_none_or(|session| session.guard.is_finished())
    }

    /// Writes everything that is dirty, and unmounts. Files that are still open fail from then on.
    ///
    /// # Errors
    /// The kernel's; the server's, if bytes are lost that no program was told of.
    pub fn unmount(mut self) -> io::Result<()> {
        self.end()
    }

    fn end(&mut self) -> io::Result<()> {
        let Some(session) = self.session.take() else { return Ok(()) };
        // Programs that still have files open are told of errors by closing them.
        let _ = self.mount.write_all();
        let result = unmount(session, &self.place);
        let written = self.mount.write_all();
        self.has_ended.store(true, Ordering::Release);
        if let Some(housekeeper) = self.housekeeper.take() {
            // A panic of it has been printed.
            let _ = housekeeper.join();
        }
        result?;
        written.map_err(|errno| {
            let reason = io::Error::from_raw_os_error(errno.code());
            io::Error::new(reason.kind(), format!("bytes that programs have written are lost: {reason}"))
        })
    }
}

/// Unmounts, unless that has been done from outside, and waits for the end of the session, which programs with open files
/// delay: not longer than [`CLOSE_TIME_MAX`], after which the end of this process closes the session.
fn unmount(session: BackgroundSession, place: &Place) -> io::Result<()> {
    if !session.guard.is_finished() && place.is_top() {
        detach(&place.path)?;
    }
    let deadline = Instant::now() + CLOSE_TIME_MAX;
    while !session.guard.is_finished() && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(10));
    }
    // Dropping it would unmount what is at the mount point by now: fuser 0.18 takes an ended session for a mounted one
    // (`mnt::is_mounted`).
    std::mem::forget(session);
    Ok(())
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

impl<R: Remote> Drop for Mounted<R> {
    fn drop(&mut self) {
        // `unmount` returns the error to those who want it.
        let _ = self.end();
    }
}
