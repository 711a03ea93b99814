//! Responder resources (IBTA volume 1, 9.7.2): the READs, atomics and the like that a duplicate request repeats.

use terrace_wire::Psn;

use super::read::ReadResponse;
use crate::common::Common;

/// A request that was executed, and how its duplicate is answered.
#[derive(Debug)]
pub(super) struct ResponderResource {
    pub(super) psn: Psn,
    pub(super) packets: u32,
    pub(super) outcome: Outcome,
}

/// What a duplicate is answered with.
#[derive(Clone, Copy, Debug)]
pub(super) enum Outcome {
    /// The READ is executed again.
    Read { va: u64, rkey: u32, length: u64 },
    /// The value before the atomic, or the offset of the APPEND's record.
    Atomic { value: u64, msn: u32 },
    /// The empty response to a FLUSH or an ATOMIC WRITE.
    Done { msn: u32 },
    /// Nothing yet: the atomic or APPEND is deferred.
    Pending,
}

impl ResponderResource {
    /// Whether this READ lies within the one of this resource.
    pub(super) fn covers_read(&self, read: &ReadResponse, common: &Common) -> bool {
        let Outcome::Read { va, rkey, length } = self.outcome else { return false };
        let Ok(skipped) = u32::try_from(read.psn.since(self.psn)) else { return false };
        let offset = u64::from(skipped) * common.mtu();
        skipped.checked_add(read.packets).is_some_and(|end| end <= self.packets)
            && read.rkey == rkey
            && read.va == va.wrapping_add(offset)
            && offset + read.length <= length
    }
}
