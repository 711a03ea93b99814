//! XRC domains.
//!
//! The kernel ties a domain to the inode of a file, so that processes share it. A NIC inside one process can share a
//! domain only among its own handles for the same file. Another process, or another context (which is another NIC), has
//! a separate domain for that file, and gets an error if it requests an existing one.

use std::collections::HashMap;
use std::ffi::c_int;
use std::fs::{File, OpenOptions};
use std::mem::MaybeUninit;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::{Arc, Mutex as StdMutex, Weak};

use terrace_nic::Xrcd;
use terrace_sync::Mutex;

use crate::abi::{
    IBV_XRCD_INIT_ATTR_FD, IBV_XRCD_INIT_ATTR_OFLAGS, ibv_context, ibv_xrcd, ibv_xrcd_init_attr,
};
use crate::context::Context;
use crate::errno::{EAGAIN, EINVAL, EOPNOTSUPP, Errno, Result, pointer, status};
use crate::object::{self, CPart, Object, borrow, retire};
use crate::pd::{Use, Users};
use crate::process_lock::{Locked, lock};
use crate::qp::query_only::QueryOnly;
use crate::room;

/// `ibv_xrcd`: a handle of a domain.
#[repr(C)]
pub struct XrcdObject {
    c: CPart<ibv_xrcd>,
    context: Arc<Context>,
    domain: Arc<Domain>,
    /// Objects created with this handle.
    users: Users,
}

// SAFETY: repr(C), the C structure first.
unsafe impl Object for XrcdObject {
    type C = ibv_xrcd;
}

/// A domain, to which several handles may refer.
pub struct Domain {
    xrcd: Arc<Xrcd>,
    file: Option<DomainFile>,
    /// Attributes of the targets that only this crate stores, by number. The handles of one target share them.
    targets: Mutex<HashMap<u32, Weak<Mutex<QueryOnly>>>>,
}

/// A file, by device and number.
type Inode = (libc::dev_t, libc::ino_t);

/// A domain's file.
struct DomainFile {
    inode: Inode,
    /// Keeps the number from another file. With `O_PATH`, because closing any other descriptor of a file ends the locks that the
    /// process has on it (fcntl(2)).
    _descriptor: File,
}

/// Every domain of this process that is tied to a file. Held while one is opened or closed.
static SHARED: StdMutex<Vec<Weak<Domain>>> = StdMutex::new(Vec::new());

fn shared() -> Locked<Vec<Weak<Domain>>> {
    lock(&SHARED)
}

/// Holds the list's lock while the process forks.
pub struct Hold(Locked<Vec<Weak<Domain>>>);

/// See [`Hold`].
pub fn hold_for_fork() -> Hold {
    Hold(shared())
}

/// Forgets the domains in a forked child, because they are the parent's.
pub fn forget_in_child(hold: Hold) {
    let Hold(mut shared) = hold;
    shared.clear();
}

impl XrcdObject {
    /// The NIC's domain.
    pub fn xrcd(&self) -> &Arc<Xrcd> {
        &self.domain.xrcd
    }

    /// The device of the domain.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// A reference for an object that is created with this handle.
    pub fn in_use(&self) -> Use {
        self.users.add()
    }

    /// The attributes of a target that only this crate stores. They exist while a handle of the target exists.
    pub fn query_only(&self, qpn: u32) -> Arc<Mutex<QueryOnly>> {
        let mut targets = self.domain.targets.lock();
        targets.retain(|_, query_only| query_only.strong_count() > 0);
        let found = targets.get(&qpn).and_then(Weak::upgrade);
        found.unwrap_or_else(|| {
            let fresh = Arc::new(Mutex::new(QueryOnly::default()));
            targets.insert(qpn, Arc::downgrade(&fresh));
            fresh
        })
    }
}

impl Domain {
    fn new(context: &Context, file: Option<DomainFile>) -> Result<Arc<Domain>> {
        let xrcd = context.device().open_xrcd()?;
        Ok(Arc::new(Domain { xrcd, file, targets: Mutex::default() }))
    }

    fn is_for(&self, inode: Inode) -> bool {
        self.file.as_ref().is_some_and(|file| file.inode == inode)
    }

    fn is_of(&self, context: &Context) -> bool {
        Arc::ptr_eq(self.xrcd.device(), context.device())
    }
}

/// The file behind a descriptor.
fn inode(fd: c_int) -> Result<Inode> {
    let mut stat = MaybeUninit::<libc::stat>::uninit();
    // SAFETY: a structure to be written to; any number is permitted for a descriptor.
    if unsafe { libc::fstat(fd, stat.as_mut_ptr()) } != 0 {
        return Err(Errno::last());
    }
    // SAFETY: the call succeeded.
    let stat = unsafe { stat.assume_init() };
    Ok((stat.st_dev, stat.st_ino))
}

/// The domain that is tied to a file, or a new one; with the errnos of the kernel's `ib_uverbs_open_xrcd`.
fn of_file(context: &Context, fd: c_int, oflags: c_int) -> Result<Arc<Domain>> {
    let inode = inode(fd)?;
    let mut shared = shared();
    shared.retain(|domain| domain.strong_count() > 0);
    let same: Vec<_> =
        shared.iter().filter_map(Weak::upgrade).filter(|domain| domain.is_for(inode)).collect();
    if !same.is_empty() && oflags & libc::O_EXCL != 0 {
        return Err(EINVAL);
    }
    if let Some(domain) = same.iter().find(|domain| domain.is_of(context)) {
        return Ok(domain.clone());
    }
    if oflags & libc::O_CREAT == 0 {
        tracing::warn!(
            "ibv_open_xrcd: this context has no XRC domain for that file; domains are not shared with other \
             processes, nor between contexts"
        );
        return Err(EAGAIN);
    }
    let descriptor = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_PATH)
        .open(format!("/proc/self/fd/{fd}"))
        .map_err(|error| Errno(error.raw_os_error().unwrap_or(libc::EIO)))?;
    let domain = Domain::new(context, Some(DomainFile { inode, _descriptor: descriptor }))?;
    shared.push(Arc::downgrade(&domain));
    Ok(domain)
}

/// `ibv_open_xrcd(3)`.
///
/// # Safety
/// `context` is null or open, `attr` null or attributes.
pub unsafe extern "C" fn open_xrcd(
    context: *mut ibv_context,
    attr: *mut ibv_xrcd_init_attr,
) -> *mut ibv_xrcd {
    let open = || {
        // SAFETY: the caller's.
        let (context, attr) = unsafe { (Context::share(context)?, object::read(attr)?) };
        let needed = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS;
        if attr.comp_mask & !needed != 0 {
            return Err(EOPNOTSUPP);
        }
        if attr.comp_mask != needed {
            return Err(EINVAL);
        }
        room::for_object()?;
        let domain = match attr.fd {
            -1 => Domain::new(&context, None)?,
            fd => of_file(&context, fd, attr.oflags)?,
        };
        let c = CPart::new(ibv_xrcd { context: context.as_c() });
        Ok(XrcdObject { c, context, domain, users: Users::default() }.publish())
    };
    pointer(open())
}

/// `ibv_close_xrcd(3)`: EBUSY while an object created with this handle exists.
///
/// # Safety
/// `xrcd` is null or an XRC domain.
pub unsafe extern "C" fn close_xrcd(xrcd: *mut ibv_xrcd) -> c_int {
    let close = || {
        // SAFETY: the caller's.
        let object = unsafe { borrow::<XrcdObject>(xrcd)? };
        object.users.none()?;
        // No other thread gets another handle of the domain meanwhile.
        let shared = shared();
        if Arc::strong_count(&object.domain) == 1 {
            object.domain.xrcd.close()?;
        }
        // SAFETY: nothing refers to it any more.
        unsafe { retire::<XrcdObject>(xrcd) };
        drop(shared);
        Ok(())
    };
    status(close())
}
