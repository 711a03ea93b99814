//! Multicast groups of UD queue pairs.

use std::ffi::c_int;

use crate::abi::{ibv_gid, ibv_qp};
use crate::errno::{Result, status};
use crate::object::{self, borrow};
use crate::qp::QpObject;

/// The queue pair and the group's GID.
///
/// # Safety
/// `qp` is null or a queue pair, `gid` null or a GID.
unsafe fn arguments<'a>(qp: *mut ibv_qp, gid: *const ibv_gid) -> Result<(&'a QpObject, [u8; 16])> {
    // SAFETY: the caller's. Every view of the union is 16 plain bytes.
    unsafe { Ok((borrow::<QpObject>(qp.cast())?, object::read(gid)?.raw)) }
}

/// `ibv_attach_mcast(3)`: RoCE has no local identifiers, so `lid` is not used.
///
/// # Safety
/// `qp` is null or a queue pair, `gid` null or a GID.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_attach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, _lid: u16) -> c_int {
    // SAFETY: the caller's.
    let attach = || unsafe { arguments(qp, gid) }.and_then(|(qp, gid)| Ok(qp.qp().attach_multicast(&gid)?));
    status(attach())
}

/// `ibv_detach_mcast(3)`.
///
/// # Safety
/// `qp` is null or a queue pair, `gid` null or a GID.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_detach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, _lid: u16) -> c_int {
    // SAFETY: the caller's.
    let detach = || unsafe { arguments(qp, gid) }.and_then(|(qp, gid)| Ok(qp.qp().detach_multicast(&gid)?));
    status(detach())
}
