//! Entries and doorbell records in memory: the NIC reads and writes them by the program's keys.

use smallvec::SmallVec;
use terrace_memory::{AccessError, Accessor};
use terrace_transport::wqe_format::decode_receive;
use terrace_transport::{RecvWr, Sge, SgeList};

use super::WorkQueueInit;
use crate::error::Error;
use crate::qp::QueuePair;

/// What takes the place of an entry that cannot be read: no key is 0, so a message with data fails.
const UNREADABLE: Sge = Sge { addr: 0, length: u32::MAX, lkey: 0 };

impl QueuePair {
    fn accessor(&self) -> Accessor {
        Accessor::local(self.pd().handle(), self.qpn())
    }

    /// Reads entries from `index` on, over the end of the queue's memory.
    pub(super) fn read_entries(
        &self,
        queue: &WorkQueueInit,
        index: u32,
        out: &mut [u8],
    ) -> Result<(), AccessError> {
        let (memory, who, memo) = (&self.device().memory, self.accessor(), &self.keys.entries);
        let (first, second) = out.split_at_mut(queue.piece(index, out.len()));
        memory.read_again(who, queue.lkey, memo, queue.place(index), first)?;
        memory.read_again(who, queue.lkey, memo, queue.addr, second)
    }

    /// Writes entries from `index` on, over the end of the queue's memory.
    pub(super) fn write_entries(
        &self,
        queue: &WorkQueueInit,
        index: u32,
        bytes: &[u8],
    ) -> Result<(), AccessError> {
        let (memory, who) = (&self.device().memory, self.accessor());
        let (first, second) = bytes.split_at(queue.piece(index, bytes.len()));
        memory.write(who, queue.lkey, queue.place(index), first)?;
        memory.write(who, queue.lkey, queue.addr, second)
    }

    /// Writes the doorbell record: receives before `index` may be taken.
    pub(super) fn write_doorbell_record(&self, index: u32) -> Result<(), Error> {
        let queues = self.work_queues().ok_or(Error::Invalid("no doorbell record"))?;
        let bytes = (index & u32::from(u16::MAX)).to_be_bytes();
        let (addr, lkey) = (queues.doorbell_record, queues.doorbell_lkey);
        let written = self.device().memory.write(self.accessor(), lkey, addr, &bytes);
        written.map_err(|_| Error::Invalid("the doorbell record's memory is gone"))
    }

    /// Sets the doorbell record to 0, as mlx5's library does at creation and in RESET: an old number would enable entries of
    /// before.
    pub(super) fn clear_doorbell_record(&self) {
        if self.work_queues().is_some_and(|queues| queues.recv.is_some())
            && let Err(error) = self.write_doorbell_record(0)
        {
            tracing::debug!(qpn = self.qpn(), %error, "the doorbell record was not cleared");
        }
    }

    /// Takes the next receive from the receive queue in memory, if it is enabled.
    pub(crate) fn take_receive_entry(&self) -> Option<RecvWr> {
        let queues = self.work_queues()?;
        let queue = queues.recv.as_ref()?;
        let mut doorbell = [0; 4];
        let (lkey, at) = (queues.doorbell_lkey, queues.doorbell_record);
        let is_read = self.device().memory.read(self.accessor(), lkey, at, &mut doorbell).is_ok();
        let (index, wr_id) = queue.take(is_read.then(|| u32::from_be_bytes(doorbell)))?;
        let mut bytes: SmallVec<[u8; 64]> = SmallVec::from_elem(0, queue.init.stride as usize);
        let sges = match self.read_entries(&queue.init, index, &mut bytes) {
            Ok(()) => decode_receive(&bytes),
            Err(_) => SgeList::from_slice(&[UNREADABLE]),
        };
        Some(RecvWr { wr_id, sges })
    }
}
