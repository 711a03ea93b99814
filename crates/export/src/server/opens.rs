//! Open files: the regions that clients' keys name.

use std::hash::{DefaultHasher, Hasher};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use terrace_files::{FileExtent, FileRegion, Files, LayoutError};
use terrace_memory::{Pager, RegionPolicy};
use terrace_nic::{Error, Mr, MrRequest, Paging, Pd};
use terrace_sync::{Condvar, Mutex};

use super::holdings::Holding;
use super::tree;
use super::unmapped::Unmapped;
use crate::ends::Domain;
use crate::proto::{Attributes, FileId, FileKey, OpenAccess};

/// `ibv_access_flags`: local write, remote write, remote read, both placements of FLUSH.
const LOCAL_WRITE: u32 = 1;
const REMOTE_WRITE: u32 = 1 << 1;
const REMOTE_READ: u32 = 1 << 2;
const FLUSH: u32 = 1 << 8 | 1 << 9;

/// What decides whether a client may still access a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rights {
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    /// A hash of the access control list, if there is one.
    acl: Option<u64>,
}

impl Rights {
    /// Those of a file, whose attributes were read before.
    ///
    /// # Errors
    /// The system's, of reading the access control list.
    pub fn of(file: BorrowedFd<'_>, attributes: &Attributes) -> io::Result<Rights> {
        let acl = tree::access_control_list(file)?.map(|acl| {
            let mut hasher = DefaultHasher::new();
            hasher.write(&acl);
            hasher.finish()
        });
        Ok(Rights { mode: attributes.mode, uid: attributes.uid, gid: attributes.gid, acl })
    }
}

/// The requests that change a file by an opening.
#[derive(Default)]
struct Changes {
    /// The opening is revoked: none begins any more.
    are_over: bool,
    running: u32,
}

/// A request that changes a file by an opening, until this is dropped.
pub struct Changing<'a>(&'a Open);

impl Drop for Changing<'_> {
    fn drop(&mut self) {
        let mut changes = self.0.changes.lock();
        changes.running -= 1;
        if changes.running == 0 {
            self.0.has_no_changes.notify_all();
        }
    }
}

/// A file that a client has opened.
pub struct Open {
    pub id: FileId,
    pub access: OpenAccess,
    /// An `O_PATH` descriptor.
    pub node: Arc<OwnedFd>,
    pub region: Arc<FileRegion>,
    mr: Arc<Mr>,
    /// The rights with which it was opened, or that the client itself has set since.
    pub rights: Mutex<Rights>,
    changes: Mutex<Changes>,
    has_no_changes: Condvar,
    /// Whether the client itself has removed the file's last name.
    pub is_unlinked_by_own: AtomicBool,
    /// Whether the kernel reports changes of the file's attributes for it.
    pub is_watched: AtomicBool,
    /// The domain lasts until the key is revoked.
    domain: Arc<Domain>,
    /// `node` counts as held.
    _holding: Holding,
}

impl Open {
    /// Makes a region of a file that the client may access so. `rights` are those before the file was opened, so that a
    /// change meanwhile shows.
    ///
    /// # Errors
    /// Of the file system, and `ENOMEM` if the NIC has no room.
    pub fn new(
        files: &Files,
        domain: &Arc<Domain>,
        holding: Holding,
        node: Arc<OwnedFd>,
        file: &OwnedFd,
        access: OpenAccess,
        rights: Rights,
    ) -> io::Result<Open> {
        let region = region(files, file, access.changes())?;
        if access.contains(OpenAccess::TRUNCATE) {
            if !access.contains(OpenAccess::WRITE) {
                return Err(Errno::INVAL.into());
            }
            region.truncate(0).map_err(layout_error)?;
        }
        let id = tree::attributes(node.as_fd())?.id;
        let mr = register(&domain.pd, &region, access)?;
        let rights = Mutex::new(rights);
        let (is_unlinked_by_own, is_watched) = (AtomicBool::new(false), AtomicBool::new(false));
        Ok(Open {
            id,
            access,
            node,
            region,
            mr,
            rights,
            changes: Mutex::default(),
            has_no_changes: Condvar::default(),
            is_unlinked_by_own,
            is_watched,
            domain: domain.clone(),
            _holding: holding,
        })
    }

    /// Whether it is of this domain's client.
    pub fn is_of(&self, domain: &Arc<Domain>) -> bool {
        Arc::ptr_eq(&self.domain, domain)
    }

    /// Whether same-host clients may map it. Otherwise its key waits for none of them when it is revoked.
    pub fn is_mappable(&self) -> bool {
        is_mappable(self.access)
    }

    /// The key for the client.
    pub fn key(&self, attributes: &Attributes) -> FileKey {
        FileKey { rkey: self.mr.rkey(), len: attributes.len, version: attributes.version }
    }

    /// Begins a request that changes the file by this opening. `None` once it is revoked.
    pub fn begin_change(&self) -> Option<Changing<'_>> {
        let mut changes = self.changes.lock();
        if changes.are_over {
            return None;
        }
        changes.running += 1;
        Some(Changing(self))
    }

    /// Waits until no request changes the file by this opening. Returns whether that is so, at the deadline at the latest.
    fn wait_unchanged_until(&self, deadline: Instant) -> bool {
        let mut changes = self.changes.lock();
        while changes.running > 0 && !self.has_no_changes.wait_until(&mut changes, deadline) {}
        changes.running == 0
    }

    /// Revokes the key: no access by it runs any more when this returns, and no request that changes the file by this opening.
    ///
    /// # Errors
    /// `Busy` when a same-host peer does not end its access within this time, or the disk does not. The caller tries again later.
    pub fn revoke_within(&self, limit: Duration) -> Result<(), Error> {
        let deadline = Instant::now() + limit;
        self.changes.lock().are_over = true;
        match self.mr.dereg_within(limit) {
            Err(error @ Error::Busy(_)) => Err(error),
            // Otherwise it has ended already.
            _ if self.region.wait_idle_until(deadline) && self.wait_unchanged_until(deadline) => Ok(()),
            _ => Err(Error::Busy("an access waits for the disk")),
        }
    }
}

/// The region of a file, which needs a descriptor that is open for reading, too.
pub fn region(files: &Files, file: &OwnedFd, is_writable: bool) -> io::Result<Arc<FileRegion>> {
    let mode = rustix::fs::fcntl_getfl(file)? & rustix::fs::OFlags::ACCMODE;
    let opened = match mode == rustix::fs::OFlags::WRONLY {
        true => files.open(tree::reopen(file.as_fd())?.as_fd(), is_writable, FileExtent::WHOLE),
        false => files.open(file.as_fd(), is_writable, FileExtent::WHOLE),
    };
    Ok(opened?)
}

fn is_append_only(access: OpenAccess) -> bool {
    access.changes() && !access.contains(OpenAccess::WRITE)
}

/// A same-host peer that maps a file for writing could write anywhere.
fn is_mappable(access: OpenAccess) -> bool {
    !is_append_only(access) && !access.contains(OpenAccess::UNMAPPED)
}

fn register(pd: &Arc<Pd>, region: &Arc<FileRegion>, access: OpenAccess) -> io::Result<Arc<Mr>> {
    let mut flags = FLUSH;
    if access.contains(OpenAccess::READ) {
        flags |= REMOTE_READ;
    }
    if access.changes() {
        flags |= LOCAL_WRITE | REMOTE_WRITE;
    }
    let pager: Arc<dyn Pager> = match is_mappable(access) {
        true => region.clone(),
        false => Arc::new(Unmapped { region: region.clone(), is_append_only: is_append_only(access) }),
    };
    let range = pager.translation().range();
    // No peer of an export knows of signature pages.
    let paging = Paging { pager, pattern: Arc::new([0; 4096]), policy: RegionPolicy::Wait };
    let request =
        MrRequest { addr: range.addr, length: range.len, iova: 0, access: flags, paging: Some(paging) };
    pd.reg_mr(request).map_err(|error| {
        tracing::warn!(%error, "a file does not become a region");
        Errno::NOMEM.into()
    })
}

/// As an error of the system.
pub fn layout_error(error: LayoutError) -> io::Error {
    match error {
        LayoutError::NotWritable => Errno::BADF.into(),
        LayoutError::System(error) => error,
    }
}
