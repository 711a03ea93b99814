//! Queue pairs with work queues in memory: making and modifying them.

use std::sync::Arc;

use terrace_transport::wqe_format::{BLOCK_BYTES, SEGMENT_BYTES, SEGMENTS_MAX};
use terrace_transport::{QpState, QpType, Time};

use super::{EntriesState, WORK_QUEUE_LEN_MAX, WorkQueuesInit};
use crate::device::{Device, Pd};
use crate::error::Error;
use crate::qp::{QpCore, QpInit, QueuePair};

impl Pd {
    /// Makes a queue pair of RC or UC in RESET whose work queues are in memory. They are posted to by
    /// [`QueuePair::post_entries`] and [`QueuePair::post_receive_entries`] only.
    ///
    /// # Errors
    /// As [`Pd::create_qp`]; EINVAL for other queue pairs, for a `max_send_wr` of 0, and for work queues whose sizes are out of
    /// range.
    pub fn create_qp_in_memory(
        self: &Arc<Self>,
        init: QpInit,
        queues: WorkQueuesInit,
    ) -> Result<Arc<QueuePair>, Error> {
        self.users.check()?;
        if !matches!(init.qp_type, QpType::Rc | QpType::Uc) {
            return Err(Error::Invalid("work queues in memory are for connected queue pairs"));
        }
        if queues.recv.is_some() == init.srq.is_some() {
            return Err(Error::Invalid("a queue pair has one receive queue"));
        }
        if init.cap.max_send_wr == 0 {
            return Err(Error::Invalid("the executor needs room for a request in the transport"));
        }
        check_sizes(&queues)?;
        let qp = QueuePair::new(self, init, None, Some(queues))?;
        qp.clear_doorbell_record();
        Ok(qp)
    }
}

fn check_sizes(queues: &WorkQueuesInit) -> Result<(), Error> {
    let is_len = |len: u32| len.is_power_of_two() && len <= WORK_QUEUE_LEN_MAX;
    let is_stride = |stride: u32| {
        stride.is_power_of_two()
            && (SEGMENT_BYTES..=SEGMENTS_MAX * SEGMENT_BYTES).contains(&(stride as usize))
    };
    let is_send = is_len(queues.send.len) && queues.send.stride as usize == BLOCK_BYTES;
    match is_send && queues.recv.is_none_or(|recv| is_len(recv.len) && is_stride(recv.stride)) {
        true => Ok(()),
        false => Err(Error::Invalid("size of a work queue out of range")),
    }
}

impl Device {
    /// Notes that a queue pair with work queues in memory was modified.
    pub(crate) fn note_work_queues_modified(&self, qp: &Arc<QueuePair>, core: &mut QpCore) {
        let Some(queues) = qp.work_queues() else { return };
        match core.qp.state() {
            QpState::Reset => {
                qp.clear_doorbell_record();
                queues.reset();
                core.nic.entries = EntriesState::new(true);
            }
            state => {
                core.nic.entries.noted = state;
                self.runnable.add(qp);
            }
        }
    }

    /// Has the executor visit a queue pair soon. Any thread may call this, whatever locks of queue pairs and completion
    /// queues it holds.
    pub(crate) fn schedule_work_queue(&self, qp: &Arc<QueuePair>) {
        self.runnable.add(qp);
        self.engine.wake_by(Time(0));
        if self.is_closed() {
            self.runnable.clear();
        }
    }
}
