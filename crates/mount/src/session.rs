//! Mounting and unmounting.

use std::io;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use fuser::{Config, MountOption, Notifier, SessionACL};
use terrace_export::FileId;

use crate::filesystem::Requests;
use crate::mount::{Mount, THREADS};
use crate::remote::Remote;

/// How often the housekeeping thread looks for old dirty bytes.
const HOUSEKEEPING: Duration = Duration::from_millis(200);

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
    session: terrace_fuse::Mounted,
    has_ended: Arc<AtomicBool>,
    housekeeper: Option<JoinHandle<()>>,
}

/// Mounts an export.
///
/// # Errors
/// The kernel's or fusermount3's: no right, no such directory, no FUSE; a mount point that is no directory.
pub fn mount<R: Remote>(remote: R, config: &MountConfig) -> io::Result<Mounted<R>> {
    let mount = Arc::new(Mount::new(Arc::new(remote), config.root, config.ttl, config.serves_others)?);
    let requests = |end| Requests(mount.clone(), end);
    let session = terrace_fuse::Mounted::mount(requests, &config.mount_point, &fuse_config(config))?;
    mount.turns.set_device(session.device());
    let notifier = session.notifier();
    let has_ended = Arc::new(AtomicBool::new(false));
    let housekeeper = {
        let (mount, has_ended) = (mount.clone(), has_ended.clone());
        thread::Builder::new()
            .name("mount-changes".into())
            .spawn(move || keep_house(&mount, &notifier, &has_ended))?
    };
    Ok(Mounted { mount, session, has_ended, housekeeper: Some(housekeeper) })
}

fn fuse_config(config: &MountConfig) -> Config {
    let mut options = terrace_fuse::options(&config.source);
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
    /// A descriptor that hangs up (`POLLHUP`) when it has been unmounted from outside, by `umount` or `fusermount3 -u`.
    pub fn ended(&self) -> BorrowedFd<'_> {
        self.session.ended()
    }

    /// Writes everything that is dirty, and unmounts. Files that are still open fail from then on.
    ///
    /// # Errors
    /// The kernel's; the server's, if bytes are lost that no program was told of.
    pub fn unmount(mut self) -> io::Result<()> {
        self.end()
    }

    fn end(&mut self) -> io::Result<()> {
        let Some(housekeeper) = self.housekeeper.take() else { return Ok(()) };
        // Programs that still have files open are told of errors by closing them.
        let _ = self.mount.write_all();
        let result = self.session.unmount();
        let written = self.mount.write_all();
        self.has_ended.store(true, Ordering::Release);
        // A panic of it has been printed.
        let _ = housekeeper.join();
        result?;
        written.map_err(|errno| {
            let reason = io::Error::from_raw_os_error(errno.code());
            io::Error::new(reason.kind(), format!("bytes that programs have written are lost: {reason}"))
        })
    }
}

impl<R: Remote> Drop for Mounted<R> {
    fn drop(&mut self) {
        // `unmount` returns the error to those who want it.
        let _ = self.end();
    }
}
