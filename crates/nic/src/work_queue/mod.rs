//! Work queues in memory: queue pairs whose entries lie in registered memory, where other work requests may rewrite them
//! until they are executed.
//!
//! | module | holds |
//! |---|---|
//! | this one | their parameters and indexes |
//! | `create` | making such queue pairs, and modifying them |
//! | `entries` | reading and writing entries and doorbell records |
//! | `post` | posting and enabling by the program |
//! | `execute` | the executor: decodes enabled entries and passes them to the transport |
//! | `send`, `receive` | the state of send queues, of receive queues |
//! | `runnable` | the queue pairs that the executor has to visit, in turn |
//! | `numbers` | the queue pairs and completion queues that entries may name |
//!
//! A send queue has three indexes, which count blocks of 64 bytes from its creation or RESET on, and wrap:
//!
//! ```text
//!   executed            enabled              posted
//!   |---- to execute ----|---- may change ----|
//! ```
//!
//! The executor reads an entry when it executes it, not before. An entry may be enabled again without being posted again:
//! `enabled` may run ahead of `posted`, and the same blocks are then executed once more.

mod create;
mod entries;
mod execute;
pub(crate) mod numbers;
mod post;
pub(crate) mod receive;
pub(crate) mod runnable;
pub(crate) mod send;

use std::sync::Arc;

use terrace_transport::QpState;

/// Entries of a receive queue, or blocks of a send queue, at most: 16-bit indexes have to tell ahead from behind.
pub const WORK_QUEUE_LEN_MAX: u32 = 1 << 14;

/// Where a work queue's entries are, and what enables them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkQueueInit {
    /// Address of the first entry.
    pub addr: u64,
    /// Key of the region that the entries are in, which the NIC reads by it, and writes when an entry is posted.
    pub lkey: u32,
    /// Blocks of a send queue, entries of a receive queue: a power of two, at most [`WORK_QUEUE_LEN_MAX`].
    pub len: u32,
    /// Bytes from one to the next: 64 in a send queue, in a receive queue a power of two from 16 to 512.
    pub stride: u32,
    /// Whether entries are only executed once they are enabled, by an entry or by the program. Otherwise posting enables.
    pub is_managed: bool,
    /// Whether entries may be posted over others that have not been executed.
    pub ignores_overflow: bool,
}

/// The work queues of a queue pair that are in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkQueuesInit {
    /// The send queue.
    pub send: WorkQueueInit,
    /// The receive queue; none with a shared receive queue.
    pub recv: Option<WorkQueueInit>,
    /// Address of the doorbell record: a big-endian number of 4 bytes, one past the last entry that may be taken from the
    /// receive queue. Its lower 16 bits count. Creation and RESET set it to 0.
    pub doorbell_record: u64,
    /// Key of its region.
    pub doorbell_lkey: u32,
}

/// A queue pair's work queues in memory.
pub(crate) struct WorkQueues {
    pub send: send::SendWorkQueue,
    pub recv: Option<receive::ReceiveWorkQueue>,
    doorbell_record: u64,
    doorbell_lkey: u32,
    /// Has the executor visit the queue pair.
    resume: Resume,
}

impl WorkQueues {
    /// Empty queues, whose queue pair `resume` has visited.
    pub fn new(init: &WorkQueuesInit, resume: Resume) -> WorkQueues {
        WorkQueues {
            send: send::SendWorkQueue::new(init.send),
            recv: init.recv.map(receive::ReceiveWorkQueue::new),
            doorbell_record: init.doorbell_record,
            doorbell_lkey: init.doorbell_lkey,
            resume,
        }
    }

    fn reset(&self) {
        self.send.reset();
        self.recv.iter().for_each(receive::ReceiveWorkQueue::reset);
    }
}

/// Has somebody go on who has waited for a completion. It is called with the completion queue's lock held, and perhaps
/// that of a queue pair.
pub(crate) type Resume = Arc<dyn Fn() + Send + Sync>;

/// A count of completions.
pub(crate) trait CompletionCount: Send + Sync {
    /// Whether it has reached `index`.
    fn has_reached(&self, index: u32) -> bool;
}

/// What the executor of a queue pair waits for, under the queue pair's lock.
#[derive(Debug, Default)]
pub(crate) struct EntriesState {
    /// Whether the work queues are in memory.
    pub exist: bool,
    /// The executor goes on when fewer requests are in the transport's queue; 0 if it does not wait for that.
    wait_below: usize,
    /// The state when the executor was last told of a failure, or the queue pair was last modified.
    noted: QpState,
}

impl EntriesState {
    pub fn new(exist: bool) -> EntriesState {
        EntriesState { exist, ..EntriesState::default() }
    }
}

impl WorkQueueInit {
    /// Address of the entry or block that `index` counts.
    fn place(&self, index: u32) -> u64 {
        self.addr.wrapping_add(u64::from(index & (self.len - 1)) * u64::from(self.stride))
    }

    /// How many bytes from `index` on are in one piece, out of `len`.
    fn piece(&self, index: u32, len: usize) -> usize {
        let before_end = (self.len - (index & (self.len - 1))) as usize * self.stride as usize;
        before_end.min(len)
    }
}

/// The program's cookies of a queue's entries.
struct WrIds(Box<[u64]>);

impl WrIds {
    fn new(len: u32) -> WrIds {
        WrIds(vec![0; len as usize].into_boxed_slice())
    }

    fn get(&self, index: u32) -> u64 {
        self.0[index as usize & (self.0.len() - 1)]
    }

    fn set(&mut self, index: u32, wr_id: u64) {
        let place = index as usize & (self.0.len() - 1);
        self.0[place] = wr_id;
    }
}

/// The index that the lower 16 bits `target` mean to a queue that is at `current`: the next with these bits, if that is
/// less than half of 2^16 ahead. `None` if it is behind: such an index is stale.
fn ahead(current: u32, target: u16) -> Option<u32> {
    let distance = target.wrapping_sub(current as u16) as i16;
    (distance > 0).then(|| current.wrapping_add(distance as u32))
}

/// Entries from index `from` up to `to`; 0 if `to` is behind.
fn between(from: u32, to: u32) -> u32 {
    (to.wrapping_sub(from) as i32).max(0) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn indexes_behind_are_stale_and_16_bits_wrap() {
        assert_eq!(ahead(5, 9), Some(9));
        assert_eq!(ahead(5, 5), None);
        assert_eq!(ahead(5, 4), None);
        assert_eq!(ahead(0x1_fffe, 3), Some(0x2_0003));
        assert_eq!(ahead(u32::MAX, 2), Some(2));
        assert_eq!(ahead(0, 0x7fff), Some(0x7fff));
        assert_eq!(ahead(0, 0x8000), None);
        assert_eq!(between(u32::MAX, 2), 3);
        assert_eq!(between(2, u32::MAX), 0);
    }
}
