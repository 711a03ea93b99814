//! Cross-channel queue pairs: work queues in memory, WAIT and ENABLE (`infiniband/terrace_exp.h`).
//!
//! | module | verbs |
//! |---|---|
//! | this one | the memory of the queues, and the bases from which WAIT and ENABLE count |
//! | `create` | `ibv_exp_create_qp`, `ibv_exp_create_cq`, `ibv_exp_modify_cq` |
//! | `post` | `ibv_exp_post_send`, `ibv_exp_post_task`; `ibv_post_send` and `ibv_post_recv` of these queue pairs |
//! | `convert` | conversion of C's work requests to entries |
//! | `dv` | `terrace_dv_init_obj` |

mod convert;
mod create;
mod dv;
mod post;

use std::sync::Arc;

use terrace_nic::wqe_format::SEGMENTS_MAX;
use terrace_nic::{Buffer, Pd, QpCap, WORK_QUEUE_LEN_MAX, WorkQueueInit, WorkQueuesInit};
use terrace_sync::Mutex;

use crate::abi::cross_channel::{
    IBV_EXP_QP_CREATE_IGNORE_RQ_OVERFLOW, IBV_EXP_QP_CREATE_IGNORE_SQ_OVERFLOW,
    IBV_EXP_QP_CREATE_MANAGED_RECV, IBV_EXP_QP_CREATE_MANAGED_SEND,
};
use crate::errno::{EINVAL, ENOMEM, Result};

/// Bytes of a segment and of a block.
const SEGMENT_BYTES: u32 = 16;
const BLOCK_BYTES: u32 = 64;
/// Segments before the data: control, remote address, and two of a masked compare and swap.
const HEAD_SEGMENTS: u32 = 4;
/// Inline data at most: the segments of a WRITE behind its remote address, without the length.
const INLINE_BYTES_MAX: u32 = (SEGMENTS_MAX as u32 - 2) * SEGMENT_BYTES - 4;
/// Bytes of the doorbell record with what follows it in its cache line.
const DOORBELL_BYTES: u32 = 64;
/// From this length on a buffer is a mapping of its own, of which only used pages take memory, and begins at a page.
const BUFFER_BYTES_MIN: usize = 256 << 10;
/// `IBV_ACCESS_LOCAL_WRITE`. Peers need a region of the program's.
const LOCAL_WRITE: u32 = 1;

/// What a cross-channel queue pair has beside others.
pub struct CrossChannel {
    /// Registered for the NIC alone. Dropped after the queue pair.
    _memory: Buffer,
    queues: WorkQueuesInit,
    send: Mutex<Positions>,
    recv: Mutex<Positions>,
}

impl CrossChannel {
    /// Allocates the queues for these sizes.
    ///
    /// # Errors
    /// EINVAL for sizes out of range, ENOMEM without memory.
    pub fn new(pd: &Arc<Pd>, cap: &QpCap, has_srq: bool, flags: u32) -> Result<CrossChannel> {
        let limits = pd.device().limits();
        let sges = cap.max_send_sge.max(cap.max_recv_sge);
        if sges > limits.max_sge
            || cap.max_inline_data > limits.max_inline_data.min(INLINE_BYTES_MAX)
            || cap.max_send_wr > limits.max_qp_wr
        {
            return Err(EINVAL);
        }
        let elements = cap.max_send_sge.max(1) * SEGMENT_BYTES;
        let inline = (cap.max_inline_data + 4).next_multiple_of(SEGMENT_BYTES);
        let entry_bytes = HEAD_SEGMENTS * SEGMENT_BYTES + elements.max(inline);
        let blocks = cap.max_send_wr.saturating_mul(entry_bytes.div_ceil(BLOCK_BYTES));
        let send_len =
            blocks.checked_next_power_of_two().filter(|len| *len <= WORK_QUEUE_LEN_MAX).ok_or(EINVAL)?;
        let stride = (cap.max_recv_sge.max(1) * SEGMENT_BYTES).next_power_of_two();
        let recv_len =
            if has_srq { 0 } else { cap.max_recv_wr.clamp(1, WORK_QUEUE_LEN_MAX + 1).next_power_of_two() };
        if recv_len > WORK_QUEUE_LEN_MAX {
            return Err(EINVAL);
        }
        let (send_bytes, recv_bytes) = (send_len * BLOCK_BYTES, recv_len * stride);
        let bytes = (DOORBELL_BYTES + send_bytes + recv_bytes) as usize;
        let memory = Buffer::new(pd, bytes.max(BUFFER_BYTES_MIN), LOCAL_WRITE).map_err(|_| ENOMEM)?;
        let (base, lkey) = (memory.addr(), memory.mr().lkey());
        let send = WorkQueueInit {
            addr: base,
            lkey,
            len: send_len,
            stride: BLOCK_BYTES,
            is_managed: flags & IBV_EXP_QP_CREATE_MANAGED_SEND != 0,
            ignores_overflow: flags & IBV_EXP_QP_CREATE_IGNORE_SQ_OVERFLOW != 0,
        };
        let recv = (!has_srq).then_some(WorkQueueInit {
            addr: base + u64::from(send_bytes),
            lkey,
            len: recv_len,
            stride,
            is_managed: flags & IBV_EXP_QP_CREATE_MANAGED_RECV != 0,
            ignores_overflow: flags & IBV_EXP_QP_CREATE_IGNORE_RQ_OVERFLOW != 0,
        });
        let doorbell_record = base + u64::from(send_bytes) + u64::from(recv_bytes);
        Ok(CrossChannel {
            _memory: memory,
            queues: WorkQueuesInit { send, recv, doorbell_record, doorbell_lkey: lkey },
            send: Mutex::new(Positions::new(send_len)),
            recv: Mutex::new(Positions::new(recv_len)),
        })
    }

    /// Where the queues are.
    pub fn queues(&self) -> WorkQueuesInit {
        self.queues
    }

    /// Forgets what was posted: the queue pair was reset.
    pub fn reset(&self) {
        for positions in [&self.send, &self.recv] {
            let mut positions = positions.lock();
            *positions = Positions::new(positions.ends.len() as u32);
        }
    }
}

/// Where the posted work requests of a queue end. ENABLE counts work requests from a base on, the NIC counts blocks.
struct Positions {
    /// One past the last block of the newest work requests, by their number modulo the length.
    ends: Box<[u32]>,
    /// Work requests that were posted, modulo 2^32.
    posted: u32,
    base: Base,
}

impl Positions {
    fn new(len: u32) -> Positions {
        Positions { ends: vec![0; len as usize].into_boxed_slice(), posted: 0, base: Base::default() }
    }

    /// Notes a posted work request.
    fn push(&mut self, end: u32) {
        let place = self.posted as usize & (self.ends.len() - 1);
        self.ends[place] = end;
        self.posted = self.posted.wrapping_add(1);
    }

    /// The index that enables `count` work requests from the base on; with 0, all that are posted.
    ///
    /// # Errors
    /// EINVAL if so many are not posted.
    fn enable(&mut self, count: u32, is_last: bool) -> Result<(u32, Taken)> {
        let ready = self.posted.wrapping_sub(self.base.index);
        let count = if count == 0 { ready } else { count };
        if count > ready || ready as i32 <= 0 {
            return Err(EINVAL);
        }
        let (end, taken) = self.base.take(count, is_last);
        Ok((self.ends[end.wrapping_sub(1) as usize & (self.ends.len() - 1)], taken))
    }
}

/// What WAIT and ENABLE count from. A request with `WAIT_EN_LAST` advances it by the greatest count since it did last.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Base {
    index: u32,
    count: u32,
}

/// A base before and after a work request has taken its count from it.
pub struct Taken {
    before: Base,
    after: Base,
}

impl Base {
    /// The index that `count` means.
    pub fn take(&mut self, count: u32, is_last: bool) -> (u32, Taken) {
        let before = *self;
        let index = self.index.wrapping_add(count);
        self.count = self.count.max(count);
        if is_last {
            self.index = self.index.wrapping_add(self.count);
            self.count = 0;
        }
        (index, Taken { before, after: *self })
    }

    /// Goes back, because the work request was not posted; unless others have taken theirs since.
    pub fn give_back(&mut self, taken: &Taken) {
        if *self == taken.after {
            *self = taken.before;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_from_a_base_that_the_last_one_advances() {
        let mut base = Base::default();
        let mut take = |count, is_last| base.take(count, is_last).0;
        assert_eq!([take(1, false), take(3, false), take(2, true)], [1, 3, 2]);
        assert_eq!([take(1, false), take(1, true), take(1, true)], [4, 4, 5]);
    }

    #[test]
    fn a_base_goes_back_unless_it_has_moved_on() {
        let mut base = Base::default();
        let (_, first) = base.take(3, true);
        base.give_back(&first);
        let (index, second) = base.take(1, true);
        assert_eq!(index, 1);
        base.take(1, true);
        base.give_back(&second);
        assert_eq!(base.take(1, true).0, 3);
    }

    #[test]
    fn an_enable_counts_work_requests_and_the_nic_blocks() {
        let mut positions = Positions::new(8);
        let enable = |positions: &mut Positions, count, is_last| {
            positions.enable(count, is_last).map(|(index, _)| index)
        };
        assert_eq!(enable(&mut positions, 0, false), Err(EINVAL), "nothing is posted");
        [1, 3, 4].into_iter().for_each(|end| positions.push(end));
        assert_eq!(enable(&mut positions, 2, false), Ok(3));
        assert_eq!(enable(&mut positions, 4, false), Err(EINVAL), "more than are posted");
        assert_eq!(enable(&mut positions, 0, true), Ok(4));
        positions.push(6);
        assert_eq!(enable(&mut positions, 1, true), Ok(6));
    }
}
