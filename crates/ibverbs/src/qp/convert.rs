//! Conversion of C's work requests to the NIC's: one copy, without an allocation for up to two elements or 64 bytes of
//! inline data.
//!
//! Programs set only the fields that an operation uses, so only those are read.

use smallvec::SmallVec;
use terrace_nic::{
    BindWindow, Error, MwKind, Payload, QpType, RecvWr, SendFlags, SendOp, SendWr, Sge, SgeList, Target,
};

use crate::abi::{
    IBV_SEND_INLINE, IBV_SEND_IP_CSUM, IBV_WR_ATOMIC_CMP_AND_SWP, IBV_WR_ATOMIC_FETCH_AND_ADD,
    IBV_WR_ATOMIC_WRITE, IBV_WR_BIND_MW, IBV_WR_LOCAL_INV, IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE,
    IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_SEND, IBV_WR_SEND_WITH_IMM, IBV_WR_SEND_WITH_INV, ibv_ah, ibv_mw,
    ibv_mw_bind_info, ibv_recv_wr, ibv_send_wr, ibv_send_wr__bindgen_ty_2, ibv_sge, ibv_wr_opcode,
};
use crate::ah::AhObject;
use crate::errno::Errno;
use crate::mw::{self, MwObject};
use crate::object::{borrow, load_single};

/// The limits of a work request.
#[derive(Clone, Copy)]
pub struct PostLimits {
    /// Gather elements of a send.
    pub send_sges: u32,
    /// Scatter elements of a receive.
    pub recv_sges: u32,
    /// Bytes of inline data.
    pub inline_bytes: u32,
    /// Work requests in the send queue.
    pub sends: u32,
}

/// The NIC's error for an errno of this crate's checks.
fn error_from_errno(errno: Errno) -> Error {
    Error::System(errno.0)
}

/// C's list as a slice.
///
/// # Safety
/// `list` has `count` elements if that is within `limit`.
pub unsafe fn elements<'a>(list: *const ibv_sge, count: i32, limit: u32) -> Result<&'a [ibv_sge], Error> {
    let count = u32::try_from(count).ok().filter(|&count| count <= limit);
    let count = count.ok_or(Error::Invalid("more scatter/gather elements than the queue allows"))?;
    if count == 0 {
        return Ok(&[]);
    }
    if list.is_null() {
        return Err(Error::Invalid("no scatter/gather list"));
    }
    // SAFETY: the caller's.
    Ok(unsafe { std::slice::from_raw_parts(list, count as usize) })
}

/// The NIC's element from C's, whose fields the program has just stored.
#[inline]
fn element(sge: &ibv_sge) -> Sge {
    Sge { addr: load_single(&sge.addr), length: load_single(&sge.length), lkey: load_single(&sge.lkey) }
}

/// The NIC's list from C's.
pub fn sge_list(elements: &[ibv_sge]) -> SgeList {
    elements.iter().map(element).collect()
}

/// The payload from C's list.
#[inline(always)]
pub fn payload(elements: &[ibv_sge]) -> Payload {
    match elements {
        [only] => Payload::Sge(element(only)),
        more => Payload::Sges(sge_list(more)),
    }
}

/// Copies inline data; `parts` are addresses and lengths in the program's memory.
///
/// # Safety
/// The parts are readable, as the program guarantees by requesting inline data.
pub unsafe fn inline_data(
    parts: impl Iterator<Item = (u64, u64)> + Clone,
    limit: u32,
) -> Result<Payload, Error> {
    let total = parts.clone().fold(0_u64, |sum, (_, length)| sum.saturating_add(length));
    if total > u64::from(limit) {
        return Err(Error::Invalid("more inline data than the queue pair was created with"));
    }
    let mut bytes = SmallVec::with_capacity(total as usize);
    for (addr, length) in parts.filter(|&(_, length)| length > 0) {
        if addr == 0 {
            return Err(Error::Invalid("inline data at address 0"));
        }
        // SAFETY: the caller's.
        bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(addr as *const u8, length as usize) });
    }
    Ok(Payload::Inline(bytes))
}

/// The destination of a datagram.
///
/// # Safety
/// `ah` is null or an address handle.
pub unsafe fn datagram(ah: *mut ibv_ah, qpn: u32, qkey: u32) -> Result<Target, Error> {
    // SAFETY: the caller's.
    let object = unsafe { borrow::<AhObject>(ah) }.map_err(error_from_errno)?;
    Ok(object.ah().target(qpn, qkey))
}

/// The operation that binds a window of type 2.
///
/// # Safety
/// `mw` is null or a window, `info.mr` null or a region.
pub unsafe fn bind(mw: *mut ibv_mw, rkey: u32, info: &ibv_mw_bind_info) -> Result<SendOp, Error> {
    // SAFETY: the caller's.
    let window = unsafe { borrow::<MwObject>(mw) }.map_err(error_from_errno)?;
    if !matches!(window.mw().kind(), MwKind::Type2) {
        return Err(Error::Invalid("a window of type 1 is bound by ibv_bind_mw"));
    }
    // SAFETY: the caller's.
    let region_lkey = unsafe { mw::bound_region(info) }.map_err(error_from_errno)?;
    Ok(SendOp::BindWindow(BindWindow {
        window_rkey: window.mw().rkey(),
        new_rkey: window.key_with_tag_of(rkey),
        region_lkey,
        addr: info.addr,
        length: info.length,
        access: info.mw_access_flags,
    }))
}

/// The operation of an opcode, if it is a common one. `remote` is the union with the peer's addresses.
///
/// # Safety
/// The fields that the opcode uses are set.
#[inline(always)]
pub unsafe fn common_operation(opcode: ibv_wr_opcode, remote: &ibv_send_wr__bindgen_ty_2) -> Option<SendOp> {
    // SAFETY: the caller's; each arm reads the fields of its opcode.
    unsafe {
        let rdma = || (remote.rdma.remote_addr, remote.rdma.rkey);
        let atomic = || (remote.atomic.remote_addr, remote.atomic.rkey);
        Some(match opcode {
            IBV_WR_SEND => SendOp::Send,
            IBV_WR_RDMA_WRITE => {
                let (va, rkey) = rdma();
                SendOp::Write { va, rkey }
            }
            IBV_WR_RDMA_READ => {
                let (va, rkey) = rdma();
                SendOp::Read { va, rkey }
            }
            IBV_WR_ATOMIC_CMP_AND_SWP => {
                let (va, rkey) = atomic();
                let (compare, swap) = (remote.atomic.compare_add, remote.atomic.swap);
                SendOp::CompareSwap { va, rkey, compare, swap }
            }
            IBV_WR_ATOMIC_FETCH_AND_ADD => {
                let (va, rkey) = atomic();
                SendOp::FetchAdd { va, rkey, add: remote.atomic.compare_add }
            }
            _ => return None,
        })
    }
}

/// # Safety
/// The fields that the opcode uses are set.
unsafe fn operation(wr: *const ibv_send_wr) -> Result<SendOp, Error> {
    // SAFETY: the caller's.
    if let Some(op) = unsafe { common_operation((*wr).opcode, &(*wr).wr) } {
        return Ok(op);
    }
    // SAFETY: the caller's; each arm reads the fields of its opcode.
    unsafe {
        let imm = || (*wr).__bindgen_anon_1.imm_data;
        let invalidate = || (*wr).__bindgen_anon_1.invalidate_rkey;
        let rdma = || ((*wr).wr.rdma.remote_addr, (*wr).wr.rdma.rkey);
        Ok(match (*wr).opcode {
            IBV_WR_SEND_WITH_IMM => SendOp::SendImm(imm()),
            IBV_WR_SEND_WITH_INV => SendOp::SendInvalidate(invalidate()),
            IBV_WR_RDMA_WRITE_WITH_IMM => {
                let (va, rkey) = rdma();
                SendOp::WriteImm { va, rkey, imm: imm() }
            }
            IBV_WR_ATOMIC_WRITE => {
                let (va, rkey) = rdma();
                SendOp::AtomicWrite { va, rkey }
            }
            IBV_WR_LOCAL_INV => SendOp::LocalInvalidate(invalidate()),
            IBV_WR_BIND_MW => {
                let request = &(*wr).__bindgen_anon_2.bind_mw;
                bind(request.mw, request.rkey, &request.bind_info)?
            }
            _ => return Err(Error::Invalid("unknown opcode")),
        })
    }
}

/// Operation and payload of any request.
///
/// # Safety
/// As for [`send`].
#[inline(never)]
unsafe fn operation_and_payload(
    wr: *const ibv_send_wr,
    flags: SendFlags,
    limits: PostLimits,
) -> Result<(SendOp, Payload), Error> {
    // SAFETY: the caller's.
    let op = unsafe { operation(wr)? };
    if matches!(op, SendOp::LocalInvalidate(_) | SendOp::BindWindow(_)) {
        // These operations have no payload, and programs leave the list unset.
        return Ok((op, Payload::Sges(SgeList::new())));
    }
    // SAFETY: the caller's.
    let elements = unsafe { elements((*wr).sg_list, (*wr).num_sge, limits.send_sges)? };
    if !flags.contains(SendFlags::INLINE) {
        return Ok((op, payload(elements)));
    }
    let parts = elements.iter().map(|sge| (sge.addr, u64::from(sge.length)));
    // SAFETY: the caller's.
    Ok((op, unsafe { inline_data(parts, limits.inline_bytes)? }))
}

/// The destination of a request of a queue pair of another type than RC.
///
/// # Safety
/// As for [`send`].
#[inline(never)]
unsafe fn target(wr: *const ibv_send_wr, qp_type: QpType) -> Result<Option<Target>, Error> {
    Ok(match qp_type {
        QpType::Ud => {
            // SAFETY: the caller's: a send of a UD queue pair has a destination.
            let (ah, qpn, qkey) =
                unsafe { ((*wr).wr.ud.ah, (*wr).wr.ud.remote_qpn, (*wr).wr.ud.remote_qkey) };
            // SAFETY: the caller's.
            Some(unsafe { datagram(ah, qpn, qkey)? })
        }
        // SAFETY: the caller's: a request of XRC has a shared receive queue number.
        QpType::XrcSend => Some(Target::SharedQueue(unsafe { (*wr).qp_type.xrc.remote_srqn })),
        QpType::Rc | QpType::Uc | QpType::XrcRecv => None,
    })
}

/// Passes one send work request to `post`. It is constructed in place and not moved.
///
/// # Safety
/// `wr` points to a work request of a program that keeps to `ibv_post_send(3)`.
#[inline(always)]
pub unsafe fn send(
    wr: *const ibv_send_wr,
    qp_type: QpType,
    limits: PostLimits,
    post: impl FnOnce(SendWr) -> Result<(), Error>,
) -> Result<(), Error> {
    // SAFETY: the caller's.
    let (wr_id, flags, list, count) =
        unsafe { ((*wr).wr_id, (*wr).send_flags, (*wr).sg_list, (*wr).num_sge) };
    let flags = check_flags(flags)?;
    let is_one = count == 1 && !list.is_null() && !flags.contains(SendFlags::INLINE);
    // SAFETY: the caller's.
    let (op, payload) = match unsafe { common_operation((*wr).opcode, &(*wr).wr) } {
        // SAFETY: the caller's: a list of one has one element.
        Some(op) if is_one => (op, Payload::Sge(element(unsafe { &*list }))),
        // SAFETY: the caller's.
        _ => unsafe { operation_and_payload(wr, flags, limits)? },
    };
    // SAFETY: the caller's.
    let target = if qp_type == QpType::Rc { None } else { unsafe { target(wr, qp_type)? } };
    post(SendWr { wr_id, op, payload, flags, target })
}

/// The flags for the NIC: those of `ibv_send_flags`, and of `terrace_send_flags`, but none of its own. Checksum offload is an error.
pub fn check_flags(flags: u32) -> Result<SendFlags, Error> {
    if flags & IBV_SEND_IP_CSUM != 0 {
        return Err(Error::Invalid("checksum offload is for raw packets"));
    }
    debug_assert_eq!(SendFlags::INLINE.bits(), IBV_SEND_INLINE);
    Ok(SendFlags::from_bits_truncate(flags) - SendFlags::OF_PROTOCOLS)
}

/// One receive work request.
///
/// # Safety
/// `wr` points to a work request of a program that keeps to `ibv_post_recv(3)`.
pub unsafe fn recv(wr: *const ibv_recv_wr, limit: u32) -> Result<RecvWr, Error> {
    // SAFETY: the caller's.
    let (wr_id, list, count) = unsafe { ((*wr).wr_id, (*wr).sg_list, (*wr).num_sge) };
    // SAFETY: the caller's.
    let elements = unsafe { elements(list, count, limit)? };
    Ok(RecvWr { wr_id, sges: sge_list(elements) })
}
