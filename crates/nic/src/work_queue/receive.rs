//! The state of receive queues in memory. A message takes the next entry if it is enabled: by the doorbell record, which
//! is read when a message needs it, or by a RECV_EN. So a peer with access to the doorbell record recycles entries, and a
//! receive may scatter into it.

use terrace_sync::Mutex;

use super::{WorkQueueInit, WrIds, ahead, between};

/// A receive queue in memory.
pub(crate) struct ReceiveWorkQueue {
    pub(super) init: WorkQueueInit,
    /// Taken last, but for the locks of memory.
    pub(super) state: Mutex<ReceiveState>,
}

pub(super) struct ReceiveState {
    /// One past the last posted entry.
    pub posted: u32,
    /// One past the last entry that may be taken.
    enabled: u32,
    /// The next entry to take.
    pub taken: u32,
    /// The doorbell record's number when it was last read: only a change enables, so that an old one is never ahead.
    doorbell: u32,
    pub wr_ids: WrIds,
}

impl ReceiveState {
    fn new(len: u32) -> ReceiveState {
        ReceiveState { posted: 0, enabled: 0, taken: 0, doorbell: 0, wr_ids: WrIds::new(len) }
    }

    fn enable(&mut self, index: u16) -> bool {
        let enabled = ahead(self.enabled, index);
        self.enabled = enabled.unwrap_or(self.enabled);
        enabled.is_some()
    }
}

impl ReceiveWorkQueue {
    pub fn new(init: WorkQueueInit) -> ReceiveWorkQueue {
        ReceiveWorkQueue { init, state: Mutex::new(ReceiveState::new(init.len)) }
    }

    /// Enables the entries before `index`; false if they were already.
    pub fn enable(&self, index: u16) -> bool {
        self.state.lock().enable(index)
    }

    pub fn reset(&self) {
        *self.state.lock() = ReceiveState::new(self.init.len);
    }

    /// Takes the next enabled entry, and returns its index and its cookie. `doorbell` is the doorbell record's number, if
    /// that could be read.
    pub fn take(&self, doorbell: Option<u32>) -> Option<(u32, u64)> {
        let mut state = self.state.lock();
        if let Some(doorbell) = doorbell
            && std::mem::replace(&mut state.doorbell, doorbell) != doorbell
        {
            state.enable(doorbell as u16);
        }
        let index = state.taken;
        if between(index, state.enabled) == 0 {
            return None;
        }
        state.taken = index.wrapping_add(1);
        Some((index, state.wr_ids.get(index)))
    }
}
