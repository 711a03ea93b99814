//! Work requests on their way to the send queue, or to a protocol before it.

use std::sync::Arc;

use terrace_shm::DirectAccess;
use terrace_sync::Guard;
use terrace_transport::{RecvWr, SendOp, SendWr, Wc};

use super::{CompletionHook, QpCore, QueuePair, SendStage};
use crate::error::Error;

/// The work requests that a program posts in one call, for the queue pair's stage.
pub(crate) struct Staged<'a> {
    stage: &'a dyn SendStage,
    wrs: Vec<SendWr>,
}

/// Nagle's rule for work requests: a request that is posted while this many packets are in flight over the network can
/// wait for the answer to one of them. So can one that is posted while those of other queue pairs wait, if the program
/// polls: their peers may be stopped, so it waits for the next poll, and a tick of the engine at most. Requests of a stage that
/// the peer has acknowledged count, too, as long as the stage waits for an answer about them. Not ...
const BUSY_PACKETS: u32 = 8;
/// ... if this many requests wait already. Batches of small messages share one system call that way.
const BATCH_REQUESTS: usize = 16;

/// Send work requests that are being posted, under the queue pair's lock: see [`QueuePair::post`].
pub struct Posting<'a> {
    qp: &'a Arc<QueuePair>,
    core: &'a mut QpCore,
    /// Where the requests go instead of the send queue.
    staged: Option<Staged<'a>>,
}

impl<'a> Posting<'a> {
    pub(crate) fn new(qp: &'a Arc<QueuePair>, core: &'a mut QpCore) -> Posting<'a> {
        Posting { qp, core, staged: None }
    }

    /// Posts a work request. It is carried out here and now if direct access to the peer's memory is possible; otherwise
    /// it is queued, and packets carry it.
    ///
    /// # Errors
    /// ENOMEM when the queue is full, EINVAL for all else; the request is not posted then.
    #[inline(always)]
    pub fn post(&mut self, mut wr: SendWr) -> Result<(), Error> {
        self.post_from(&mut wr)
    }

    #[inline(always)]
    fn post_from(&mut self, wr: &mut SendWr) -> Result<(), Error> {
        if self.staged.is_some() {
            return self.stage(wr);
        }
        self.qp.prefetch(&wr.op);
        if self.qp.prefetch_hint.has_entries() {
            self.core.nic.local.prefetch_framed(&wr.op);
        }
        let device = self.qp.device();
        device.update_route(self.qp, self.core);
        if device.carry_out_direct(self.qp, self.core, wr) {
            return Ok(());
        }
        self.queue(wr)
    }

    /// Work requests that one system call carries out at most: longer lists have no use.
    pub const LIST_MAX: usize = DirectAccess::LIST_MAX;

    /// Whether READs, or WRITEs, by this key that follow each other are faster by [`Posting::post_list`]: the kernel
    /// copies the bytes, and one system call can do so for several of them.
    #[inline]
    pub fn is_list_faster(&self, rkey: u32) -> bool {
        self.core.nic.local.copies_by_kernel(rkey) && self.staged.is_none()
    }

    /// Passes a work request to the queue pair's stage, if the send queue would take it.
    #[cold]
    #[inline(never)]
    fn stage(&mut self, wr: &mut SendWr) -> Result<(), Error> {
        let Some(staged) = &mut self.staged else { return Ok(()) };
        self.core.qp.validate_sends(std::slice::from_ref(wr))?;
        staged.stage.reserve(1)?;
        staged.wrs.push(wr.take());
        Ok(())
    }

    /// Checks whether all of these work requests can be posted. For a stage, their places are reserved then, and they are
    /// posted.
    fn check_or_stage(&mut self, wrs: &mut Vec<SendWr>) -> Result<(), Error> {
        let Some(staged) = &mut self.staged else { return Ok(self.core.qp.check_sends(wrs)?) };
        self.core.qp.validate_sends(wrs)?;
        staged.stage.reserve(wrs.len())?;
        staged.wrs.append(wrs);
        Ok(())
    }

    /// Posts work requests one after the other, as [`Posting::post`] does. The payloads of posted ones may be taken.
    ///
    /// # Errors
    /// The index of the first that is not posted, and why: see [`Posting::post`].
    #[inline(never)]
    pub fn post_list(&mut self, wrs: &mut [SendWr]) -> Result<(), (usize, Error)> {
        let mut index = 0;
        while index < wrs.len() {
            if self.staged.is_some() {
                self.stage(&mut wrs[index]).map_err(|error| (index, error))?;
                index += 1;
                continue;
            }
            if let Some(next) = wrs.get(index + 1) {
                self.qp.prefetch(&next.op);
            }
            let done = self.qp.device().carry_out_list(self.qp, self.core, &wrs[index..]);
            if done == 0 {
                self.post_from(&mut wrs[index]).map_err(|error| (index, error))?;
            }
            index += done.max(1);
        }
        Ok(())
    }

    #[inline(never)]
    fn queue(&mut self, wr: &mut SendWr) -> Result<(), Error> {
        self.qp.device().queue_send(self.qp, self.core, wr)
    }
}

impl QueuePair {
    /// Posts send work requests and sends what can be sent. Requests before a bad one stay posted; the error has its
    /// index and the reason: ENOMEM when the queue is full, EINVAL for all else.
    pub fn post_send(
        self: &Arc<Self>,
        wrs: impl IntoIterator<Item = Result<SendWr, Error>>,
    ) -> Result<(), (usize, Error)> {
        let mut index = 0;
        let posted = self.post(|posting| {
            wrs.into_iter().try_for_each(|wr| {
                posting.post(wr?)?;
                index += 1;
                Ok(())
            })
        });
        posted.map_err(|error| (index, error))
    }

    /// Calls `make` to post send work requests one by one, and sends what can be sent. Requests before an error stay
    /// posted.
    ///
    /// # Errors
    /// Those of `make`; EINVAL for a queue pair that was destroyed.
    #[inline(always)]
    pub fn post(
        self: &Arc<Self>,
        make: impl FnOnce(&mut Posting<'_>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        match self.stage.get() {
            None => self.post_to_queue(make),
            Some(stage) => self.post_to_stage(&**stage, make),
        }
    }

    #[inline(always)]
    fn post_to_queue(
        self: &Arc<Self>,
        make: impl FnOnce(&mut Posting<'_>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut core = self.lock_alive()?;
        let made = make(&mut Posting::new(self, &mut core));
        self.send_posted(core, 0);
        made
    }

    fn post_to_stage(
        self: &Arc<Self>,
        stage: &dyn SendStage,
        make: impl FnOnce(&mut Posting<'_>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut core = self.lock_alive()?;
        let staged = Some(Staged { stage, wrs: Vec::new() });
        let mut posting = Posting { qp: self, core: &mut core, staged };
        let made = make(&mut posting);
        let wrs = posting.staged.map_or_else(Vec::new, |staged| staged.wrs);
        drop(core);
        if !wrs.is_empty() {
            stage.post(wrs);
        }
        made
    }

    /// Posts work requests of the queue pair's stage to the send queue, one after the other. They can leave in one system
    /// call, and with later ones if the stage waits for the ends of many that it has posted before, `awaited_count`: at least one of
    /// those is signaled.
    ///
    /// # Errors
    /// Those of [`Posting::post_list`].
    pub fn post_below(
        self: &Arc<Self>,
        wrs: &mut [SendWr],
        awaited_count: usize,
    ) -> Result<(), (usize, Error)> {
        let mut core = self.lock_alive().map_err(|error| (0, error))?;
        let posted = Posting::new(self, &mut core).post_list(wrs);
        self.send_posted(core, awaited_count);
        posted
    }

    /// Puts a protocol before the send queue, for good; before the first work request. False if there is one already.
    pub fn set_stage(&self, stage: Arc<dyn SendStage>) -> bool {
        let hook: Arc<dyn CompletionHook> = stage.clone();
        let is_first = self.stage.set(stage).is_ok();
        if is_first {
            self.set_completion_hook(Some(hook));
        }
        is_first
    }

    /// Has the processor prefetch what a work request is going to access, if the peer is on this host. Callers that have
    /// other things to do before they post can do so ahead.
    #[inline(always)]
    pub fn prefetch(&self, op: &SendOp) {
        match *op {
            SendOp::Read { va, rkey } => self.prefetch_hint.prefetch(rkey, va, false),
            SendOp::Write { va, rkey }
            | SendOp::CompareSwap { va, rkey, .. }
            | SendOp::FetchAdd { va, rkey, .. } => self.prefetch_hint.prefetch(rkey, va, true),
            _ => {}
        }
    }

    /// Posts send work requests as a whole, and empties the list. When one of them is bad, or not all of them fit, none is
    /// posted, and the list stays as it is.
    pub fn post_send_batch(self: &Arc<Self>, wrs: &mut Vec<SendWr>) -> Result<(), Error> {
        self.post(|posting| {
            posting.check_or_stage(wrs)?;
            let posted = posting.post_list(wrs);
            wrs.clear();
            posted.map_err(|(_, error)| error)
        })
    }

    /// Sends what was posted, at once or with what is posted next, if anything waits.
    #[inline]
    fn send_posted(self: &Arc<Self>, core: Guard<'_, QpCore>, awaited_count: usize) {
        if core.qp.wants_transmit() {
            self.send_pending(core, awaited_count);
        } else {
            self.device().unlock_idle(core);
        }
    }

    #[inline(never)]
    fn send_pending(self: &Arc<Self>, core: Guard<'_, QpCore>, awaited_count: usize) {
        let device = self.device();
        device.ensure_engine();
        let can_wait = !core.nic.local.has_tx_ring()
            && (core.qp.unacknowledged_packets() >= BUSY_PACKETS
                || awaited_count >= BUSY_PACKETS as usize
                || !device.pending.is_empty() && device.engine.is_in_standby())
            && core.qp.queued_requests() < BATCH_REQUESTS;
        if can_wait {
            device.pending.add(self);
        } else {
            device.transmit(self, core);
        }
    }

    /// Posts receive work requests. Requests before a bad one stay posted; the error has its index and the reason:
    /// ENOMEM when the queue is full, EINVAL for all else.
    pub fn post_recv(
        self: &Arc<Self>,
        wrs: impl IntoIterator<Item = Result<RecvWr, Error>>,
    ) -> Result<(), (usize, Error)> {
        let mut core = self.lock_alive().map_err(|error| (0, error))?;
        let mut result = Ok(());
        for (index, wr) in wrs.into_iter().enumerate() {
            let (transport, host) = core.parts(self, None);
            let posted = wr.and_then(|wr| Ok(transport.post_recv(wr, &host)?));
            if let Err(error) = posted {
                result = Err((index, error));
                break;
            }
        }
        drop(core);
        self.device().fail_overrun_qps();
        result
    }

    /// Sets what receives the completions of send work requests from now on; `None` for the completion queue. Entries
    /// in the queue stay there.
    pub fn set_completion_hook(&self, hook: Option<Arc<dyn CompletionHook>>) {
        let before = std::mem::replace(&mut self.lock().nic.hook, hook);
        drop(before);
    }

    /// Adds an entry to the completion queue of send work requests, on behalf of a [`CompletionHook`]. The entry should
    /// carry this queue pair's number: RESET discards such entries.
    pub fn complete(&self, wc: Wc) {
        self.init.send_cq.push(wc);
    }
}
