//! Reading entries.

use super::{Control, EntryError, INLINE, INVALID_LKEY, MODIFIER_8_BYTES, SEGMENT_BYTES, SendEntry, opcode};
use crate::types::{ATOMIC_LEN, InlineData, Masked, Payload, SendOp, Sge, SgeList};

/// Decodes an entry of a send queue from its bytes, of which there are at least as many as its control segment says.
/// More are ignored.
///
/// # Errors
/// If the bytes are no entry.
pub fn decode_send(bytes: &[u8]) -> Result<(Control, SendEntry), EntryError> {
    let mut segments = Segments(bytes);
    let control = Control::parse(segments.next()?);
    let len = usize::from(control.segments).checked_sub(1).ok_or(EntryError::Segments)? * SEGMENT_BYTES;
    let mut segments = Segments(segments.0.get(..len).ok_or(EntryError::Segments)?);
    let entry = match control.opcode {
        opcode::NOP => SendEntry::Request { op: SendOp::Nop, payload: Payload::Inline(InlineData::new()) },
        opcode::SEND => request(SendOp::Send, segments)?,
        opcode::SEND_IMM => request(SendOp::SendImm(control.imm), segments)?,
        opcode::SEND_INVALIDATE => request(SendOp::SendInvalidate(u32::from_be(control.imm)), segments)?,
        opcode::WRITE => {
            let (va, rkey) = segments.remote()?;
            request(SendOp::Write { va, rkey }, segments)?
        }
        opcode::WRITE_IMM => {
            let (va, rkey) = segments.remote()?;
            request(SendOp::WriteImm { va, rkey, imm: control.imm }, segments)?
        }
        opcode::READ => {
            let (va, rkey) = segments.remote()?;
            request(SendOp::Read { va, rkey }, segments)?
        }
        opcode::COMPARE_SWAP => {
            let ((va, rkey), (swap, compare)) = (segments.remote()?, segments.pair()?);
            atomic(SendOp::CompareSwap { va, rkey, compare, swap }, segments)?
        }
        opcode::FETCH_ADD => {
            let ((va, rkey), (add, _)) = (segments.remote()?, segments.pair()?);
            atomic(SendOp::FetchAdd { va, rkey, add }, segments)?
        }
        opcode::MASKED_COMPARE_SWAP if control.modifier == MODIFIER_8_BYTES => {
            let ((va, rkey), (swap, compare)) = (segments.remote()?, segments.pair()?);
            let (swap_mask, compare_mask) = segments.pair()?;
            let masked = Masked { result: result(segments)?, compare_mask, swap_mask };
            let op = SendOp::MaskedCompareSwap { va, rkey, compare, swap };
            SendEntry::Request { op, payload: Payload::Masked(Box::new(masked)) }
        }
        opcode::MASKED_FETCH_ADD if control.modifier == MODIFIER_8_BYTES => {
            let ((va, rkey), (add, boundary)) = (segments.remote()?, segments.pair()?);
            atomic(SendOp::MaskedFetchAdd { va, rkey, add, boundary }, segments)?
        }
        opcode::WAIT => {
            let (index, cqn) = segments.wait()?;
            SendEntry::Wait { cqn, index }
        }
        opcode::SEND_ENABLE => {
            let (index, qpn) = segments.wait()?;
            SendEntry::EnableSend { qpn, index }
        }
        opcode::RECV_ENABLE => {
            let (index, qpn) = segments.wait()?;
            SendEntry::EnableRecv { qpn, index }
        }
        _ => return Err(EntryError::Opcode),
    };
    Ok((control, entry))
}

/// Decodes an entry of a receive queue: the data segments up to the one with [`INVALID_LKEY`], or all.
pub fn decode_receive(bytes: &[u8]) -> SgeList {
    let (segments, _) = bytes.as_chunks::<SEGMENT_BYTES>();
    segments.iter().map(sge).take_while(|sge| sge.lkey != INVALID_LKEY).collect()
}

fn request(op: SendOp, segments: Segments<'_>) -> Result<SendEntry, EntryError> {
    Ok(SendEntry::Request { op, payload: segments.payload()? })
}

fn atomic(op: SendOp, segments: Segments<'_>) -> Result<SendEntry, EntryError> {
    Ok(SendEntry::Request { op, payload: Payload::Sge(result(segments)?) })
}

/// The only data segment of an atomic. Its result has 8 bytes, whatever the segment's length.
fn result(mut segments: Segments<'_>) -> Result<Sge, EntryError> {
    let result = sge(segments.next()?);
    let fits = segments.0.is_empty() && result.length & INLINE == 0 && result.length >= ATOMIC_LEN;
    fits.then_some(Sge { length: ATOMIC_LEN, ..result }).ok_or(EntryError::Segments)
}

/// The segments that are still to be read.
struct Segments<'a>(&'a [u8]);

impl<'a> Segments<'a> {
    fn next(&mut self) -> Result<&'a [u8; SEGMENT_BYTES], EntryError> {
        let (first, rest) = self.0.split_first_chunk().ok_or(EntryError::Segments)?;
        self.0 = rest;
        Ok(first)
    }

    /// A remote address segment: address and key.
    fn remote(&mut self) -> Result<(u64, u32), EntryError> {
        let segment = self.next()?;
        Ok((double_word(segment, 0), word(segment, 2)))
    }

    /// Two numbers of 8 bytes.
    fn pair(&mut self) -> Result<(u64, u64), EntryError> {
        let segment = self.next()?;
        Ok((double_word(segment, 0), double_word(segment, 8)))
    }

    /// A wait or enable segment: index and object number.
    fn wait(&mut self) -> Result<(u32, u32), EntryError> {
        let segment = self.next()?;
        Ok((word(segment, 2), word(segment, 3)))
    }

    /// The data segments that are left: all SGEs, or all inline.
    fn payload(self) -> Result<Payload, EntryError> {
        let Some(first) = self.0.first_chunk() else { return Ok(Payload::Sges(SgeList::new())) };
        if sge(first).length & INLINE != 0 {
            let data = self.inline()?;
            return Ok(if data.is_empty() { Payload::Sges(SgeList::new()) } else { Payload::Inline(data) });
        }
        let (segments, _) = self.0.as_chunks::<SEGMENT_BYTES>();
        let sges: SgeList = segments.iter().map(sge).collect();
        match sges[..] {
            _ if sges.iter().any(|sge| sge.length & INLINE != 0) => Err(EntryError::Segments),
            [only] => Ok(Payload::Sge(only)),
            _ => Ok(Payload::Sges(sges)),
        }
    }

    /// Inline data: a length of 4 bytes and the bytes, padded to whole segments; then the next.
    fn inline(self) -> Result<InlineData, EntryError> {
        let mut data = InlineData::new();
        let mut rest = self.0;
        while let Some((head, bytes)) = rest.split_first_chunk() {
            let head = u32::from_be_bytes(*head);
            let len = (head & !INLINE) as usize;
            let bytes = bytes.get(..len).filter(|_| head & INLINE != 0).ok_or(EntryError::Segments)?;
            data.extend_from_slice(bytes);
            rest = rest.get((size_of_val(&head) + len).next_multiple_of(SEGMENT_BYTES)..).unwrap_or_default();
        }
        Ok(data)
    }
}

fn sge(segment: &[u8; SEGMENT_BYTES]) -> Sge {
    Sge { addr: double_word(segment, 8), length: word(segment, 0), lkey: word(segment, 1) }
}

/// The number in 4 bytes from word `index` on.
fn word(segment: &[u8; SEGMENT_BYTES], index: usize) -> u32 {
    let (words, _) = segment.as_chunks();
    u32::from_be_bytes(words[index])
}

/// The number in 8 bytes from byte `at` on, which is 0 or 8.
fn double_word(segment: &[u8; SEGMENT_BYTES], at: usize) -> u64 {
    let (numbers, _) = segment.as_chunks();
    u64::from_be_bytes(numbers[at / 8])
}
