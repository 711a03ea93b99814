//! The state of send queues in memory.

use std::sync::Arc;

use terrace_sync::Mutex;
use terrace_transport::SendFlags;

use super::{CompletionCount, WorkQueueInit, WrIds, ahead};
use crate::sync::{AtomicU32, Ordering};

/// A send queue in memory.
pub(crate) struct SendWorkQueue {
    pub(super) init: WorkQueueInit,
    /// One past the last enabled block. Outside the lock: an entry may enable the queue that another thread executes.
    enabled: AtomicU32,
    /// Taken under the queue pair's lock.
    pub(super) state: Mutex<SendState>,
}

/// The state of a send queue that its queue pair's lock protects, too.
pub(super) struct SendState {
    /// One past the last posted block.
    pub posted: u32,
    /// The next block to execute.
    pub executed: u32,
    /// The WAIT that it is at.
    pub waits: Option<Waits>,
    pub wr_ids: WrIds,
}

/// A WAIT that the executor has read, and whose completion has not come yet.
pub(super) struct Waits {
    pub count: Arc<dyn CompletionCount>,
    pub index: u32,
    /// Blocks of its entry.
    pub blocks: u32,
    pub flags: SendFlags,
}

impl SendWorkQueue {
    pub fn new(init: WorkQueueInit) -> SendWorkQueue {
        SendWorkQueue { init, enabled: AtomicU32::new(0), state: Mutex::new(SendState::new(init.len)) }
    }

    /// One past the last enabled block.
    pub fn enabled(&self) -> u32 {
        self.enabled.load(Ordering::SeqCst)
    }

    /// Enables the blocks before `index`; false if they were already.
    pub fn enable(&self, index: u16) -> bool {
        let ahead = |enabled| ahead(enabled, index);
        self.enabled.fetch_update(Ordering::SeqCst, Ordering::SeqCst, ahead).is_ok()
    }

    pub fn reset(&self) {
        let mut state = self.state.lock();
        *state = SendState::new(self.init.len);
        self.enabled.store(0, Ordering::SeqCst);
    }
}

impl SendState {
    fn new(len: u32) -> SendState {
        SendState { posted: 0, executed: 0, waits: None, wr_ids: WrIds::new(len) }
    }
}
