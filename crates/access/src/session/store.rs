//! WRITEs by RPC: small ones to units that are considered absent, and all WRITEs of the RPC-only baseline.
//!
//! A queue pair acknowledges in order, so a WRITE that waits for the disk delays later ones to resident memory. A WRITE
//! by RPC delays none.

use std::sync::Arc;

use terrace_transport::{LocalError, Payload, SendOp};

use super::calls::{Data, Request, Task};
use super::entry::{Entry, Seq};
use crate::proto::INLINE_BYTES_MAX;
use crate::region::Region;
use crate::request::Local;
use crate::sge_list::{LocalMemory, gather, sub_elements};

/// The most bytes that a WRITE by RPC carries in its message. The data is copied twice more (into the message, and out
/// of it), which up to about this length costs less than the round trip of a READ by the server.
pub(super) const SMALL_BYTES_MAX: u64 = 4096;

/// Whether a WRITE by RPC is cheaper than a one-sided one. It is for short WRITEs to absent units. Long WRITEs saturate
/// the disk anyway, and the server would have to READ their data from the client.
pub(super) fn is_cheaper_by_rpc(entry: &Entry, region: &Region) -> bool {
    let Some(remote) = &entry.remote else { return false };
    let mut units = region.layout().units(remote.va, remote.length);
    entry.length <= SMALL_BYTES_MAX && units.any(|unit| !region.residency().is_present(unit))
}

/// The calls for a WRITE.
///
/// # Errors
/// If the program's memory cannot be read.
pub(super) fn write_calls(
    seq: Seq,
    entry: &Entry,
    memory: &impl LocalMemory,
) -> Result<Vec<Task>, LocalError> {
    let SendOp::Write { va, rkey } = entry.wr.op else { return Ok(Vec::new()) };
    let task = |offset: u64, local, length, source| {
        let request = Request::Write { rkey, va: va + offset, length, source };
        Task { seq: Some(seq), offset, local, request, refusals: 0 }
    };
    if let Some(sges) = entry.wr.payload.sges()
        && entry.length > SMALL_BYTES_MAX
    {
        let by_element = sub_elements(sges, 0, entry.length).map(|(at, sge)| {
            let source = Data::Remote { va: sge.addr, rkey: sge.lkey };
            task(at, Some(Local::from(&sge)), sge.length, source)
        });
        return Ok(by_element.collect());
    }
    let data = bytes_of(entry, memory)?;
    let chunks = data.chunks(INLINE_BYTES_MAX).enumerate().map(|(index, chunk)| {
        let source = Data::Inline(Arc::from(chunk));
        task((index * INLINE_BYTES_MAX) as u64, None, chunk.len() as u32, source)
    });
    Ok(chunks.collect())
}

/// All of a request's data.
fn bytes_of(entry: &Entry, memory: &impl LocalMemory) -> Result<Vec<u8>, LocalError> {
    let mut data = vec![0; entry.length as usize];
    match &entry.wr.payload {
        Payload::Sge(_) | Payload::Sges(_) => gather(memory, entry.sges(), 0, &mut data)?,
        Payload::Inline(bytes) => data.copy_from_slice(bytes),
        Payload::Provided(provided) => {
            if !provided.source.copy(provided.offset, &mut data) {
                return Err(LocalError::Protection);
            }
        }
        // Only a masked compare and swap has one, and that stores nothing.
        Payload::Masked(_) => return Err(LocalError::Protection),
    }
    Ok(data)
}
