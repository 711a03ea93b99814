//! Writing entries.

use super::{
    Control, EntryBytes, EntryError, INLINE, INVALID_LKEY, MODIFIER_8_BYTES, SEGMENT_BYTES, SEGMENTS_MAX,
    SendEntry, opcode,
};
use crate::types::{Masked, Payload, SendFlags, SendOp, Sge};

/// Encodes an entry of a send queue. Its index and its queue pair are 0: [`set_place`] sets them.
///
/// # Errors
/// [`EntryError::NoForm`].
pub fn encode_send(entry: &SendEntry, flags: SendFlags) -> Result<EntryBytes, EntryError> {
    let mut control = Control { flags, ..Control::default() };
    let mut bytes = EntryBytes::from_elem(0, SEGMENT_BYTES);
    match entry {
        SendEntry::Request { op, payload } => push_request(op, payload, &mut control, &mut bytes)?,
        SendEntry::Wait { cqn, index } => {
            control.opcode = opcode::WAIT;
            push_wait(&mut bytes, *index, *cqn);
        }
        SendEntry::EnableSend { qpn, index } => {
            control.opcode = opcode::SEND_ENABLE;
            push_wait(&mut bytes, *index, *qpn);
        }
        SendEntry::EnableRecv { qpn, index } => {
            control.opcode = opcode::RECV_ENABLE;
            push_wait(&mut bytes, *index, *qpn);
        }
    }
    let segments = bytes.len() / SEGMENT_BYTES;
    if segments > SEGMENTS_MAX {
        return Err(EntryError::NoForm);
    }
    control.segments = segments as u8;
    bytes[..SEGMENT_BYTES].copy_from_slice(&control.emit());
    Ok(bytes)
}

/// Sets the index of an entry's first block and the number of its queue pair.
pub fn set_place(entry: &mut [u8], index: u16, qpn: u32) {
    if let Some(segment) = entry.first_chunk_mut() {
        *segment = Control { index, qpn, ..Control::parse(segment) }.emit();
    }
}

/// Encodes an entry of a receive queue of `stride` bytes: a list that leaves room ends with [`INVALID_LKEY`].
///
/// # Errors
/// [`EntryError::NoForm`] if the list is too long for that.
pub fn encode_receive(sges: &[Sge], stride: usize) -> Result<EntryBytes, EntryError> {
    let mut bytes = EntryBytes::new();
    sges.iter().for_each(|sge| push_sge(&mut bytes, sge));
    if bytes.len() < stride {
        push_sge(&mut bytes, &Sge { addr: 0, length: 0, lkey: INVALID_LKEY });
    }
    if bytes.len() > stride {
        return Err(EntryError::NoForm);
    }
    bytes.resize(stride, 0);
    Ok(bytes)
}

fn push_request(
    op: &SendOp,
    payload: &Payload,
    control: &mut Control,
    bytes: &mut EntryBytes,
) -> Result<(), EntryError> {
    control.opcode = match *op {
        SendOp::Nop => opcode::NOP,
        SendOp::Send => opcode::SEND,
        SendOp::SendImm(imm) => {
            control.imm = imm;
            opcode::SEND_IMM
        }
        SendOp::SendInvalidate(rkey) => {
            control.imm = rkey.to_be();
            opcode::SEND_INVALIDATE
        }
        SendOp::Write { va, rkey } => {
            push_remote(bytes, va, rkey);
            opcode::WRITE
        }
        SendOp::WriteImm { va, rkey, imm } => {
            control.imm = imm;
            push_remote(bytes, va, rkey);
            opcode::WRITE_IMM
        }
        SendOp::Read { va, rkey } => {
            push_remote(bytes, va, rkey);
            opcode::READ
        }
        SendOp::CompareSwap { va, rkey, compare, swap } => {
            push_remote(bytes, va, rkey);
            push_pair(bytes, swap, compare);
            opcode::COMPARE_SWAP
        }
        SendOp::FetchAdd { va, rkey, add } => {
            push_remote(bytes, va, rkey);
            push_pair(bytes, add, 0);
            opcode::FETCH_ADD
        }
        SendOp::MaskedCompareSwap { va, rkey, compare, swap } => {
            let Payload::Masked(masked) = payload else { return Err(EntryError::NoForm) };
            let Masked { compare_mask, swap_mask, .. } = **masked;
            control.modifier = MODIFIER_8_BYTES;
            push_remote(bytes, va, rkey);
            push_pair(bytes, swap, compare);
            push_pair(bytes, swap_mask, compare_mask);
            opcode::MASKED_COMPARE_SWAP
        }
        SendOp::MaskedFetchAdd { va, rkey, add, boundary } => {
            control.modifier = MODIFIER_8_BYTES;
            push_remote(bytes, va, rkey);
            push_pair(bytes, add, boundary);
            opcode::MASKED_FETCH_ADD
        }
        SendOp::AtomicWrite { .. }
        | SendOp::Flush { .. }
        | SendOp::Append { .. }
        | SendOp::LocalInvalidate(_)
        | SendOp::BindWindow(_) => return Err(EntryError::NoForm),
    };
    push_payload(bytes, payload)
}

fn push_payload(bytes: &mut EntryBytes, payload: &Payload) -> Result<(), EntryError> {
    match payload {
        Payload::Sge(_) | Payload::Sges(_) | Payload::Masked(_) => {
            payload.sges().unwrap_or_default().iter().for_each(|sge| push_sge(bytes, sge));
        }
        Payload::Inline(data) if data.is_empty() => {}
        Payload::Inline(data) => {
            bytes.extend_from_slice(&(INLINE | data.len() as u32).to_be_bytes());
            bytes.extend_from_slice(data);
            bytes.resize(bytes.len().next_multiple_of(SEGMENT_BYTES), 0);
        }
        Payload::Provided(_) => return Err(EntryError::NoForm),
    }
    Ok(())
}

fn push_remote(bytes: &mut EntryBytes, va: u64, rkey: u32) {
    push_pair(bytes, va, u64::from(rkey) << 32);
}

fn push_wait(bytes: &mut EntryBytes, index: u32, number: u32) {
    push_pair(bytes, 0, u64::from(index) << 32 | u64::from(number));
}

fn push_sge(bytes: &mut EntryBytes, sge: &Sge) {
    push_pair(bytes, u64::from(sge.length) << 32 | u64::from(sge.lkey), sge.addr);
}

fn push_pair(bytes: &mut EntryBytes, first: u64, second: u64) {
    bytes.extend_from_slice(&first.to_be_bytes());
    bytes.extend_from_slice(&second.to_be_bytes());
}
