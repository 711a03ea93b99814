//! Conversion of C's work requests to entries.

use terrace_nic::wqe_format::SendEntry;
use terrace_nic::{Error, InlineData, Masked, Payload, SendFlags, SendOp, SendWr, Sge};

use super::super::QpObject;
use super::super::convert::{check_flags, common_operation, elements, inline_data, payload};
use crate::abi::cross_channel::*;
use crate::abi::{IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_SEND_WITH_IMM};
use crate::cq::CqObject;
use crate::errno::Errno;
use crate::object::borrow;

/// Base-2 logarithm of the operand size of masked operations, in bytes.
const LOG_OPERAND: u32 = 3;

/// An entry, its flags and its cookie.
pub type Entry = (SendEntry, SendFlags, u64);

/// Converts a work request for `object`, and has `post` post it. If it is not posted, the base that it counts from stays
/// where it is.
///
/// # Errors
/// EINVAL for what no entry can be, for objects that are null or whose queues are not in memory, and for an ENABLE of more
/// than is posted; those of `post`.
///
/// # Safety
/// `wr` points to a work request whose pointers are valid, as for `ibv_post_send(3)`.
pub unsafe fn convert(
    wr: *const ibv_exp_send_wr,
    object: &QpObject,
    post: impl FnOnce(Entry) -> Result<(), Error>,
) -> Result<(), Error> {
    // SAFETY: the caller's.
    let (wr_id, flags, opcode) = unsafe { ((*wr).wr_id, (*wr).exp_send_flags, (*wr).exp_opcode) };
    let is_last = flags & IBV_EXP_SEND_WAIT_EN_LAST != 0;
    let flags = check_flags((flags & !(IBV_EXP_SEND_WAIT_EN_LAST | IBV_EXP_SEND_EXT_ATOMIC_INLINE)) as u32)?;
    let post = |entry| post((entry, flags, wr_id));
    // SAFETY: the caller's.
    unsafe {
        match opcode {
            IBV_EXP_WR_CQE_WAIT => wait((*wr).task.cqe_wait, is_last, post),
            IBV_EXP_WR_SEND_ENABLE | IBV_EXP_WR_RECV_ENABLE => {
                enable((*wr).task.wqe_enable, opcode == IBV_EXP_WR_SEND_ENABLE, is_last, post)
            }
            _ => {
                let SendWr { op, payload, .. } = request(wr, flags, object)?;
                post(SendEntry::Request { op, payload })
            }
        }
    }
}

/// Converts a work request that is neither WAIT nor ENABLE.
///
/// # Errors
/// EINVAL, as for [`convert`].
///
/// # Safety
/// As for [`convert`].
pub unsafe fn request(
    wr: *const ibv_exp_send_wr,
    flags: SendFlags,
    object: &QpObject,
) -> Result<SendWr, Error> {
    // SAFETY: the caller's.
    let (wr_id, opcode) = unsafe { ((*wr).wr_id, (*wr).exp_opcode) };
    let made = |op, payload| SendWr { wr_id, op, payload, flags, target: None };
    if opcode == IBV_EXP_WR_NOP {
        // Programs leave the list unset.
        return Ok(made(SendOp::Nop, Payload::Inline(InlineData::new())));
    }
    // SAFETY: the caller's.
    let op = unsafe { operation(wr)? };
    // SAFETY: the caller's.
    let list = unsafe { elements((*wr).sg_list, (*wr).num_sge, object.limits.send_sges)? };
    let data = match (flags.contains(SendFlags::INLINE), op) {
        (_, SendOp::MaskedCompareSwap { .. }) => {
            let Payload::Sge(result) = payload(list) else {
                return Err(Error::Invalid("an atomic has one scatter/gather element"));
            };
            // SAFETY: the caller's.
            let operands = unsafe { (*wr).masked_atomics.operands.cmp_swap };
            Payload::Masked(Box::new(Masked {
                result: Sge { ..result },
                compare_mask: operands.compare_mask,
                swap_mask: operands.swap_mask,
            }))
        }
        (false, _) => payload(list),
        (true, _) => {
            let parts = list.iter().map(|sge| (sge.addr, u64::from(sge.length)));
            // SAFETY: the caller's.
            unsafe { inline_data(parts, object.limits.inline_bytes)? }
        }
    };
    Ok(made(op, data))
}

/// # Safety
/// The fields that the opcode uses are set.
unsafe fn operation(wr: *const ibv_exp_send_wr) -> Result<SendOp, Error> {
    // SAFETY: the caller's.
    if let Some(op) = unsafe { common_operation((*wr).exp_opcode, &(*wr).wr) } {
        return Ok(op);
    }
    // SAFETY: the caller's; each arm reads the fields of its opcode.
    unsafe {
        let masked = || ((*wr).masked_atomics.remote_addr, (*wr).masked_atomics.rkey);
        let ex = (*wr).ex;
        Ok(match (*wr).exp_opcode {
            IBV_WR_SEND_WITH_IMM => SendOp::SendImm(ex),
            IBV_EXP_WR_SEND_WITH_INV => SendOp::SendInvalidate(ex),
            IBV_WR_RDMA_WRITE_WITH_IMM => {
                SendOp::WriteImm { va: (*wr).wr.rdma.remote_addr, rkey: (*wr).wr.rdma.rkey, imm: ex }
            }
            IBV_EXP_WR_EXT_MASKED_ATOMIC_CMP_AND_SWP if (*wr).masked_atomics.log_arg_sz == LOG_OPERAND => {
                let ((va, rkey), operands) = (masked(), (*wr).masked_atomics.operands.cmp_swap);
                let (compare, swap) = (operands.compare_val, operands.swap_val);
                SendOp::MaskedCompareSwap { va, rkey, compare, swap }
            }
            IBV_EXP_WR_EXT_MASKED_ATOMIC_FETCH_AND_ADD if (*wr).masked_atomics.log_arg_sz == LOG_OPERAND => {
                let ((va, rkey), operands) = (masked(), (*wr).masked_atomics.operands.fetch_add);
                let (add, boundary) = (operands.add_val, operands.field_boundary);
                SendOp::MaskedFetchAdd { va, rkey, add, boundary }
            }
            _ => return Err(Error::Invalid("unknown opcode or operand size")),
        })
    }
}

/// # Safety
/// The completion queue is null or one.
unsafe fn wait(
    argument: ExpWait,
    is_last: bool,
    post: impl FnOnce(SendEntry) -> Result<(), Error>,
) -> Result<(), Error> {
    // SAFETY: the caller's.
    let cq = unsafe { borrow::<CqObject>(argument.cq.cast()) }.map_err(no_object)?;
    let count = u32::try_from(argument.cq_count).map_err(|_| Error::Invalid("a negative count"))?;
    let base = cq.wait_base();
    let (index, taken) = base.lock().take(count, is_last);
    post(SendEntry::Wait { cqn: cq.cq().number(), index }).inspect_err(|_| base.lock().give_back(&taken))
}

/// # Safety
/// The queue pair is null or one.
unsafe fn enable(
    argument: ExpEnable,
    is_send: bool,
    is_last: bool,
    post: impl FnOnce(SendEntry) -> Result<(), Error>,
) -> Result<(), Error> {
    // SAFETY: the caller's.
    let target = unsafe { borrow::<QpObject>(argument.qp.cast()) }.map_err(no_object)?;
    let queues = target.cross_channel.as_ref().ok_or(Error::Invalid("no cross-channel queue pair"))?;
    let is_managed = match is_send {
        true => queues.queues.send.is_managed,
        false => queues.queues.recv.is_some_and(|recv| recv.is_managed),
    };
    let count = u32::try_from(argument.wqe_count).map_err(|_| Error::Invalid("a negative count"))?;
    if !is_managed {
        return Err(Error::Invalid("no managed queue"));
    }
    let positions = if is_send { &queues.send } else { &queues.recv };
    let enabled = positions.lock().enable(count, is_last);
    let (index, taken) = enabled.map_err(|_| Error::Invalid("not so many work requests are posted"))?;
    let qpn = target.qp.qpn();
    let entry = match is_send {
        true => SendEntry::EnableSend { qpn, index },
        false => SendEntry::EnableRecv { qpn, index },
    };
    post(entry).inspect_err(|_| positions.lock().base.give_back(&taken))
}

fn no_object(errno: Errno) -> Error {
    Error::System(errno.0)
}
