//! Posting to work queues in memory, and enabling by the program.

use std::sync::Arc;

use terrace_transport::wqe_format::{BLOCK_BYTES, SendEntry, encode_receive, encode_send, set_place};
use terrace_transport::{QpState, RecvWr, SendFlags};

use super::receive::ReceiveState;
use super::send::{SendState, SendWorkQueue};
use super::{WorkQueueInit, between};
use crate::error::Error;
use crate::qp::QueuePair;

/// An entry to post: what it does, its flags, and the program's cookie.
pub type PostedEntry = (SendEntry, SendFlags, u64);

impl QueuePair {
    /// Writes entries to the send queue in memory, behind those posted before. Unless it is managed, they are enabled, and
    /// what can be executed at once is. Returns one past the last posted block. Entries before a bad one stay posted.
    ///
    /// # Errors
    /// The index of the first that is not posted, and why. ENOMEM: entries there have not been executed yet. EINVAL: the
    /// send queue is not in memory, the entry has no form in memory, or the memory is not the program's to write.
    pub fn post_entries(
        self: &Arc<Self>,
        entries: impl IntoIterator<Item = Result<PostedEntry, Error>>,
    ) -> Result<u32, (usize, Error)> {
        let Some(queues) = self.work_queues() else {
            return Err((0, Error::Invalid("the send queue is not in memory")));
        };
        let core = self.lock_alive().map_err(|error| (0, error))?;
        let mut state = queues.send.state.lock();
        let posted = entries.into_iter().enumerate().try_for_each(|(index, entry)| {
            entry
                .and_then(|entry| self.write_entry(&queues.send, &mut state, entry))
                .map_err(|error| (index, error))
        });
        let end = state.posted;
        // Under the lock: after a RESET in between, these entries would be enabled anew.
        let is_enabled = !queues.send.init.is_managed && queues.send.enable(end as u16);
        drop(state);
        drop(core);
        if is_enabled {
            self.device().runnable.add(self);
            self.device().run_work_queues_now();
        }
        posted.map(|()| end)
    }

    fn write_entry(
        &self,
        queue: &SendWorkQueue,
        state: &mut SendState,
        (entry, flags, wr_id): PostedEntry,
    ) -> Result<(), Error> {
        let mut bytes = encode_send(&entry, flags).map_err(|_| Error::Invalid("no form in memory"))?;
        let blocks = bytes.len().div_ceil(BLOCK_BYTES) as u32;
        let init = &queue.init;
        let is_full = between(state.executed, state.posted) + blocks > init.len;
        if blocks > init.len || is_full && !init.ignores_overflow {
            return Err(Error::NoMemory("the send queue is full"));
        }
        set_place(&mut bytes, state.posted as u16, self.qpn());
        let written = self.write_entries(init, state.posted, &bytes);
        written.map_err(|_| Error::Invalid("the send queue's memory is gone"))?;
        state.wr_ids.set(state.posted, wr_id);
        state.posted = state.posted.wrapping_add(blocks);
        Ok(())
    }

    /// Enables the blocks of the send queue before `index`, as an entry of another queue pair does, and executes what can
    /// be executed at once. Only the lower 16 bits count. An index that was enabled before changes nothing.
    ///
    /// # Errors
    /// EINVAL if the send queue is not in memory.
    pub fn enable_send(self: &Arc<Self>, index: u32) -> Result<(), Error> {
        let queues = self.work_queues().ok_or(Error::Invalid("the send queue is not in memory"))?;
        if queues.send.enable(index as u16) {
            self.device().runnable.add(self);
            self.device().run_work_queues_now();
        }
        Ok(())
    }

    /// The indexes of the send queue in memory: one past the last posted, enabled and executed block.
    pub fn send_indexes(&self) -> Option<(u32, u32, u32)> {
        let queue = &self.work_queues()?.send;
        let state = queue.state.lock();
        Some((state.posted, queue.enabled(), state.executed))
    }

    /// Writes entries to the receive queue in memory, behind those posted before. Unless it is managed, the doorbell
    /// record is written, which enables them. Returns one past the last posted entry. Entries before a bad one stay
    /// posted.
    ///
    /// # Errors
    /// The index of the first that is not posted, and why: as for [`QueuePair::post_entries`].
    pub fn post_receive_entries(
        self: &Arc<Self>,
        wrs: impl IntoIterator<Item = Result<RecvWr, Error>>,
    ) -> Result<u32, (usize, Error)> {
        let queue = self.work_queues().and_then(|queues| queues.recv.as_ref());
        let queue = queue.ok_or((0, Error::Invalid("the receive queue is not in memory")))?;
        let core = self.lock_alive().map_err(|error| (0, error))?;
        let mut state = queue.state.lock();
        let begin = state.posted;
        let posted = wrs.into_iter().enumerate().try_for_each(|(index, wr)| {
            wr.and_then(|wr| self.write_receive_entry(&queue.init, &mut state, &wr))
                .map_err(|error| (index, error))
        });
        let end = state.posted;
        let is_enabled = !queue.init.is_managed && end != begin;
        // Under the lock: of two threads that post, that with the lower number could write last.
        let written = if is_enabled { self.write_doorbell_record(end) } else { Ok(()) };
        let has_failed = core.qp.state() == QpState::Err;
        drop(state);
        drop(core);
        written.map_err(|error| (0, error))?;
        if is_enabled && has_failed {
            self.flush_enabled();
        }
        posted.map(|()| end)
    }

    fn write_receive_entry(
        &self,
        init: &WorkQueueInit,
        state: &mut ReceiveState,
        wr: &RecvWr,
    ) -> Result<(), Error> {
        if between(state.taken, state.posted) >= init.len && !init.ignores_overflow {
            return Err(Error::NoMemory("the receive queue is full"));
        }
        let bytes = encode_receive(&wr.sges, init.stride as usize);
        let bytes =
            bytes.map_err(|_| Error::Invalid("more scatter/gather elements than the queue has room for"))?;
        self.write_entries(init, state.posted, &bytes)
            .map_err(|_| Error::Invalid("the receive queue's memory is gone"))?;
        state.wr_ids.set(state.posted, wr.wr_id);
        state.posted = state.posted.wrapping_add(1);
        Ok(())
    }

    /// Enables the entries of the receive queue before `index`, as an entry of another queue pair does. Only the lower
    /// 16 bits count.
    ///
    /// # Errors
    /// EINVAL if the receive queue is not in memory.
    pub fn enable_recv(self: &Arc<Self>, index: u32) -> Result<(), Error> {
        let queue = self.work_queues().and_then(|queues| queues.recv.as_ref());
        let queue = queue.ok_or(Error::Invalid("the receive queue is not in memory"))?;
        if queue.enable(index as u16) && self.state() == QpState::Err {
            self.flush_enabled();
        }
        Ok(())
    }

    /// Has the executor flush what was enabled after the queue pair has failed.
    #[cold]
    fn flush_enabled(self: &Arc<Self>) {
        self.device().runnable.add(self);
        self.device().run_work_queues_now();
    }
}
