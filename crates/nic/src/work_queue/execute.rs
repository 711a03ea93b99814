//! The executor of work queues in memory. It visits one queue pair after the other, and executes a few enabled entries of
//! each. An entry becomes a work request that takes the way of all others ([`Posting::post`]); WAIT and ENABLE concern the
//! executor alone. The queue pair stays off the list while it can do nothing:
//!
//! ```text
//!   all enabled entries executed     until an ENABLE
//!   at a WAIT                        until the completion queue has got that completion (`Cq::wait_for_count`)
//!   no room in the transport         until requests complete (`Device::note_room`)
//!   not in RTS                       until the queue pair is modified
//!   behind an entry that fails       until the queue pair has failed (`Device::note_room`)
//! ```

use std::sync::Arc;

use smallvec::SmallVec;
use terrace_transport::wqe_format::{BLOCK_BYTES, Control, SEGMENT_BYTES, SendEntry, decode_send};
use terrace_transport::{InlineData, Payload, QpState, SendFlags, SendOp, SendWr, Time, WcStatus};

use super::WorkQueues;
use super::between;
use super::send::{SendState, Waits};
use crate::clock::LazyTimestamp;
use crate::datapath::add_to_work_list;
use crate::device::Device;
use crate::qp::posting::Posting;
use crate::qp::{QpCore, QueuePair};
use crate::tx::WorkList;

/// Entries of a queue pair in one turn, and those up to the next WAIT: what a WAIT has started is not interrupted by other
/// queue pairs' entries, unless it is long.
const ENTRIES_PER_TURN: usize = 16;
/// Entries of a queue pair in one turn at most.
const ENTRIES_PER_TURN_MAX: usize = 2 * ENTRIES_PER_TURN;
/// Bytes of their requests: a turn ends with the entry that reaches this.
const BYTES_PER_TURN: u64 = 1 << 20;
/// Turns in one pass: a chain may be endless, and packets have to be received meanwhile.
const TURNS_PER_PASS: usize = 32;
/// Bytes of their requests: a pass ends with the turn that reaches this.
const BYTES_PER_PASS: u64 = 4 << 20;

impl Device {
    /// Executes entries of work queues in memory, as many as one pass may. Queue pairs that then have packets to send go to
    /// the work list.
    pub(crate) fn run_work_queues(&self, work: &mut WorkList<QueuePair>) {
        let mut bytes = 0;
        for _ in 0..TURNS_PER_PASS {
            if bytes >= BYTES_PER_PASS {
                return;
            }
            let Some(qp) = self.runnable.take() else { return };
            let mut core = qp.lock();
            if core.nic.dead {
                continue;
            }
            if let Some(queues) = qp.work_queues() {
                let state = &mut queues.send.state.lock();
                let mut turn =
                    Turn { device: self, qp: &qp, core: &mut core, queues, state, executed: 0, bytes: 0 };
                if turn.run() {
                    self.runnable.add(&qp);
                }
                bytes += turn.bytes;
            }
            self.publish_state(&qp, &mut core);
            self.arm(&qp, &core);
            if core.qp.wants_transmit() {
                add_to_work_list(&qp, &mut core, work);
            }
        }
    }

    /// The same for a thread of the program that has enabled entries. What is left is for the engine.
    pub(crate) fn run_work_queues_now(&self) {
        if !self.tx.is_blocked() {
            let mut unit = self.tx.take();
            self.run_work_queues(&mut unit.work);
            match unit.is_idle() {
                true => self.tx.give_back(unit),
                false => self.flush(unit, &LazyTimestamp::new(&*self.clock, None)),
            }
        }
        self.after_unlock();
        if !self.runnable.is_empty() {
            self.engine.wake_by(Time(0));
        }
    }

    /// Has a queue pair visited if the executor waits for room in its transport, and there is some now, or if it has
    /// failed. Called after calls into the transport.
    #[cold]
    pub(crate) fn note_room(&self, qp: &QueuePair, core: &mut QpCore) {
        let state = core.qp.state();
        let has_failed = matches!(state, QpState::Err | QpState::Sqe) && core.nic.entries.noted != state;
        if core.qp.queue_lengths().0 < core.nic.entries.wait_below || has_failed {
            core.nic.entries.wait_below = 0;
            core.nic.entries.noted = state;
            self.schedule_work_queue(&qp.strong());
        }
    }
}

/// The outcome of one step.
#[derive(PartialEq, Eq)]
enum Step {
    Executed,
    /// The queue pair has no more to do for now.
    Blocked,
    /// It is at a WAIT, and other queue pairs have their turns first.
    TurnOver,
}

/// An entry as it was read.
struct Fetched {
    blocks: u32,
    /// Why it cannot be executed, or what it does.
    entry: Result<(SendFlags, SendEntry), WcStatus>,
}

/// A queue pair's turn.
struct Turn<'a> {
    device: &'a Device,
    qp: &'a Arc<QueuePair>,
    core: &'a mut QpCore,
    queues: &'a WorkQueues,
    state: &'a mut SendState,
    /// Entries so far.
    executed: usize,
    /// Bytes of the requests so far.
    bytes: u64,
}

impl Turn<'_> {
    /// Executes entries. Returns whether the queue pair could go on.
    fn run(&mut self) -> bool {
        while self.executed < ENTRIES_PER_TURN_MAX && self.bytes < BYTES_PER_TURN {
            match self.step() {
                Step::Executed => self.executed += 1,
                Step::Blocked => return false,
                Step::TurnOver => return true,
            }
        }
        true
    }

    fn step(&mut self) -> Step {
        match self.core.qp.state() {
            QpState::Rts => {}
            QpState::Err | QpState::Sqe => return self.flush(),
            _ => return Step::Blocked,
        }
        if self.core.qp.is_failing() {
            return Step::Blocked;
        }
        if self.state.waits.as_ref().is_some_and(|waits| !waits.count.has_reached(waits.index)) {
            return Step::Blocked;
        }
        let room = self.core.qp.config().cap.max_send_wr as usize;
        if self.core.qp.queue_lengths().0 >= room {
            return self.wait_below(room);
        }
        if let Some(Waits { blocks, flags, .. }) = self.state.waits.take() {
            return self.finish(blocks, flags);
        }
        let Some(Fetched { blocks, entry }) = self.fetch() else { return Step::Blocked };
        match entry {
            Err(status) => self.fail(blocks, status),
            Ok((flags, SendEntry::Request { op: SendOp::Nop, .. })) => self.finish(blocks, flags),
            Ok((flags, SendEntry::Request { op, payload })) => {
                self.bytes += payload.len();
                // Executed as it is posted, it would keep this thread from receiving meanwhile.
                let is_long = payload.len() > BYTES_PER_TURN;
                let flags = if is_long { flags | SendFlags::BY_PACKETS } else { flags };
                let wr = SendWr { wr_id: self.wr_id(), op, payload, flags, target: None };
                match Posting::new(self.qp, self.core).post(wr) {
                    Ok(()) => self.pass(blocks),
                    Err(_) => self.fail(blocks, WcStatus::LocalQpOperation),
                }
            }
            Ok((flags, _)) if flags.contains(SendFlags::FENCE) && self.core.qp.queue_lengths().0 > 0 => {
                self.wait_below(1)
            }
            Ok((_, SendEntry::Wait { .. })) if self.executed >= ENTRIES_PER_TURN => Step::TurnOver,
            Ok((flags, SendEntry::Wait { cqn, index })) => self.wait(cqn, index, blocks, flags),
            Ok((flags, SendEntry::EnableSend { qpn, index })) => match self.enable_send(qpn, index) {
                Some(()) => self.finish(blocks, flags),
                None => self.fail(blocks, WcStatus::LocalQpOperation),
            },
            Ok((flags, SendEntry::EnableRecv { qpn, index })) => match self.enable_recv(qpn, index) {
                Some(()) => self.finish(blocks, flags),
                None => self.fail(blocks, WcStatus::LocalQpOperation),
            },
        }
    }

    fn wait_below(&mut self, len: usize) -> Step {
        self.core.nic.entries.wait_below = len;
        Step::Blocked
    }

    /// The program's cookie of the entry to execute next.
    fn wr_id(&self) -> u64 {
        self.state.wr_ids.get(self.state.executed)
    }

    /// Steps over an entry.
    fn pass(&mut self, blocks: u32) -> Step {
        self.state.executed = self.state.executed.wrapping_add(blocks);
        Step::Executed
    }

    /// Steps over an entry that the executor itself has executed. It completes in its turn: behind a request that fails, it
    /// is flushed.
    fn finish(&mut self, blocks: u32, flags: SendFlags) -> Step {
        let is_signaled = flags.contains(SendFlags::SIGNALED) || self.qp.sq_sig_all();
        if is_signaled || self.core.qp.queue_lengths().0 > 0 {
            let mut wr = nop(self.wr_id(), flags);
            let (transport, host) = self.core.parts(self.qp, None);
            transport.post_nop(&mut wr, &host);
        }
        self.pass(blocks)
    }

    /// Stops the queue pair at an entry, once all requests before it are complete.
    fn fail(&mut self, blocks: u32, status: WcStatus) -> Step {
        tracing::debug!(qpn = self.qp.qpn(), index = self.state.executed, ?status, "bad work queue entry");
        let mut wr = nop(self.wr_id(), SendFlags::SIGNALED);
        let (transport, host) = self.core.parts(self.qp, None);
        transport.post_failed(&mut wr, status, &host);
        self.pass(blocks)
    }

    /// Waits at a WAIT, which is read only once: its queue pair steps over it when the completion has come.
    fn wait(&mut self, cqn: u32, index: u32, blocks: u32, flags: SendFlags) -> Step {
        let Some(cq) = self.device.numbered_cqs.get(cqn) else {
            return self.fail(blocks, WcStatus::LocalQpOperation);
        };
        let has_come = cq.wait_for_count(index, &self.queues.resume);
        self.state.waits = Some(Waits { count: cq, index, blocks, flags });
        if has_come { Step::Executed } else { Step::Blocked }
    }

    fn enable_send(&self, qpn: u32, index: u32) -> Option<()> {
        let target = self.target(qpn)?;
        let queue = &target.work_queues()?.send;
        if !queue.init.is_managed {
            return None;
        }
        if queue.enable(index as u16) {
            self.device.runnable.add(&target);
        }
        Some(())
    }

    fn enable_recv(&self, qpn: u32, index: u32) -> Option<()> {
        let target = self.target(qpn)?;
        let queue = target.work_queues()?.recv.as_ref()?;
        if !queue.init.is_managed {
            return None;
        }
        if queue.enable(index as u16) {
            // It may have failed, and its lock must not be taken here.
            self.device.runnable.add(&target);
        }
        Some(())
    }

    /// The queue pair that an ENABLE names, if that is one of the same protection domain: an entry that a peer has written
    /// has no power over others.
    fn target(&self, qpn: u32) -> Option<Arc<QueuePair>> {
        if qpn == self.qp.qpn() {
            return Some(self.qp.clone());
        }
        self.device.numbered_qps.get(qpn).filter(|other| other.pd().handle() == self.qp.pd().handle())
    }

    /// Completes the next enabled entry of a failed queue pair as flushed, of either queue.
    fn flush(&mut self) -> Step {
        self.state.waits = None;
        if let Some(Fetched { blocks, .. }) = self.fetch() {
            let mut wr = nop(self.wr_id(), SendFlags::SIGNALED);
            let (transport, host) = self.core.parts(self.qp, None);
            transport.post_nop(&mut wr, &host);
            return self.pass(blocks);
        }
        if self.core.qp.state() != QpState::Err {
            return Step::Blocked;
        }
        let Some(receive) = self.qp.take_receive_entry() else { return Step::Blocked };
        let (transport, host) = self.core.parts(self.qp, None);
        transport.flush_receive(receive.wr_id, &host);
        Step::Executed
    }

    /// Reads the next enabled entry; `None` if there is none.
    fn fetch(&self) -> Option<Fetched> {
        let (queue, index) = (&self.queues.send, self.state.executed);
        if between(index, queue.enabled()) == 0 {
            return None;
        }
        let unreadable = |blocks| Some(Fetched { blocks, entry: Err(WcStatus::LocalProtection) });
        let mut first = [0; BLOCK_BYTES];
        if self.qp.read_entries(&queue.init, index, &mut first).is_err() {
            return unreadable(1);
        }
        let control = first.first_chunk::<SEGMENT_BYTES>().map(Control::parse).unwrap_or_default();
        let blocks = control.blocks().min(queue.init.len);
        let decoded = match blocks {
            1 => decode_send(&first),
            _ => {
                // The first block is not read again: it may have changed, and then not fit the others.
                let mut bytes: SmallVec<[u8; 4 * BLOCK_BYTES]> = SmallVec::from_slice(&first);
                bytes.resize(blocks as usize * BLOCK_BYTES, 0);
                if self
                    .qp
                    .read_entries(&queue.init, index.wrapping_add(1), &mut bytes[BLOCK_BYTES..])
                    .is_err()
                {
                    return unreadable(blocks);
                }
                decode_send(&bytes)
            }
        };
        let entry = decoded.map(|(control, entry)| (control.flags, entry));
        Some(Fetched { blocks, entry: entry.map_err(|_| WcStatus::LocalQpOperation) })
    }
}

fn nop(wr_id: u64, flags: SendFlags) -> SendWr {
    let payload = Payload::Inline(InlineData::new());
    SendWr { wr_id, op: SendOp::Nop, payload, flags, target: None }
}
