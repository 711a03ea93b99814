//! The program's work requests on their way through the initiator: `post` takes one, `act` executes what the initiator asks
//! for.

use std::sync::Arc;

use terrace_access::optimistic::{Action, Config, Counters, Initiator, OrderBits, Scratch};
use terrace_access::proto::{Body, Message};
use terrace_access::region::Knowledge;
use terrace_nic::{Buffer, QpState, QueuePair, SendFlags, SendOp, SendWr, Time, Wc, WcStatus};

use crate::link::LinkState;
use crate::memory::LocalSide;
use crate::session::Session;
use crate::settings::{CALL_BYTES_MAX, CALL_COUNT_MAX};
use crate::state::{State, break_queue_pair};

/// The upper half of the ids of an initiator's messages. Those of descriptions have the rkey, and 0.
const TAG: u32 = 1;
/// Versions are read into slots of so many bytes, so many at a time.
const SLOT_BYTES: u32 = 512;
const SLOT_COUNT: u32 = 16;
/// WRITEs request no ACKs if they are checked within this time: a tenth of the shortest ACK timeout.
const ACK_DELAY_NS_MAX: u64 = 800_000;
/// `ibv_access_flags`.
const LOCAL_WRITE: u32 = 1;

/// The initiator, and the memory that it reads versions into.
pub(crate) struct Outgoing {
    pub initiator: Initiator,
    /// What has been added to the service's statistics.
    pub counted: Counters,
    /// Work requests that leave together; kept for its allocation.
    unposted: Vec<SendWr>,
    _scratch: Buffer,
}

/// Gives back the places of the requests that the initiator has completed.
pub(crate) fn release_places(session: &Session, place_count: &mut usize, initiator: &Initiator) {
    let left = initiator.len();
    session.release(place_count.saturating_sub(left));
    *place_count = left;
}

/// Takes the ordering bits out of a request: the initiator keeps its order, not the send queue.
fn take_order_bits(wr: &mut SendWr) -> OrderBits {
    let mut bits = OrderBits::empty();
    bits.set(OrderBits::BEFORE, wr.flags.contains(SendFlags::ORDER_BEFORE));
    bits.set(OrderBits::AFTER, wr.flags.contains(SendFlags::ORDER_AFTER));
    wr.flags.remove(SendFlags::ORDER_BEFORE | SendFlags::ORDER_AFTER);
    bits
}

/// The key by which a request accesses the peer's memory, if that may be absent.
fn rkey_of(wr: &SendWr) -> Option<u32> {
    match wr.op {
        SendOp::CompareSwap { rkey, .. }
        | SendOp::FetchAdd { rkey, .. }
        | SendOp::MaskedCompareSwap { rkey, .. }
        | SendOp::MaskedFetchAdd { rkey, .. }
        | SendOp::AtomicWrite { rkey, .. } => Some(rkey),
        // A request for no bytes needs no key.
        SendOp::Read { rkey, .. } | SendOp::Write { rkey, .. } | SendOp::WriteImm { rkey, .. } => {
            Some(rkey).filter(|_| !wr.payload.is_empty())
        }
        _ => None,
    }
}

impl State {
    /// Takes a work request of the program.
    pub fn post(&mut self, session: &Session, qp: &Arc<QueuePair>, now: Time, mut wr: SendWr) {
        let (wr_id, qpn) = (wr.wr_id, qp.qpn());
        self.place_count += 1;
        let is_peer_gone = self.link == LinkState::Failed && rkey_of(&wr).is_some();
        let known = match rkey_of(&wr) {
            None => Knowledge::Plain,
            Some(_) if self.link == LinkState::Plain => Knowledge::Plain,
            Some(_) if self.link == LinkState::Failed => {
                // Nobody can tell whether the memory is absent.
                break_queue_pair(qp);
                Knowledge::Plain
            }
            Some(rkey) => self.look_up(qp, now, rkey),
        };
        let posted = match self.outgoing(qp, now) {
            Some(outgoing) => {
                let order = take_order_bits(&mut wr);
                let is_posted = outgoing.initiator.post(wr, &known, order).is_ok();
                if is_peer_gone {
                    outgoing.initiator.fail_unfinished(WcStatus::RetryExceeded);
                }
                is_posted
            }
            None => false,
        };
        if !posted {
            // Places are reserved, so that only memory can be missing.
            tracing::error!(qpn, "a work request fails for lack of memory");
            let status = WcStatus::General;
            self.place_count -= 1;
            session.release(1);
            qp.complete(Wc { wr_id, status, qpn, ..Wc::default() });
        }
    }

    /// The initiator, which begins with the first work request.
    fn outgoing(&mut self, qp: &Arc<QueuePair>, now: Time) -> Option<&mut Outgoing> {
        if self.outgoing.is_none() {
            let attr = qp.query();
            let scratch = Buffer::new(qp.pd(), (SLOT_BYTES * SLOT_COUNT) as usize, LOCAL_WRITE).ok()?;
            let depth = (qp.cap().max_send_wr as usize).max(1);
            let mut initiator = Initiator::new(Config {
                qpn: qp.qpn(),
                tag: TAG,
                request_count_max: depth + 1,
                post_count_max: depth,
                call_count_max: CALL_COUNT_MAX,
                mtu_bytes: attr.path_mtu.max(256),
                signal_all: qp.sq_sig_all(),
                order: self.settings.order,
                is_two_sided: self.settings.is_two_sided,
                inline_bytes_max: self.settings.inline_bytes_max,
                call_bytes_max: CALL_BYTES_MAX,
                is_reverse_allowed: self.settings.is_reverse,
                unchecked_count_max: self.settings.unchecked_count_max.min(depth.div_ceil(2)),
                check_delay_ns: self.settings.check_delay_ns,
                omits_ack_requests: attr.timeout != 0 && self.settings.check_delay_ns <= ACK_DELAY_NS_MAX,
                version_age_ns: self.settings.version_age_ns,
                scratch: Scratch {
                    addr: scratch.addr(),
                    lkey: scratch.mr().lkey(),
                    slot_bytes: SLOT_BYTES,
                    slot_count: SLOT_COUNT,
                },
            });
            if matches!(attr.state, QpState::Err | QpState::Sqe) {
                initiator.flush();
            }
            if self.link == LinkState::Failed {
                initiator.handle_peer_gone(now);
            }
            let (counted, unposted) = (Counters::default(), Vec::new());
            self.outgoing = Some(Outgoing { initiator, counted, unposted, _scratch: scratch });
        }
        self.outgoing.as_mut()
    }

    /// The knowledge of a key; asks the peer if there is none.
    fn look_up(&mut self, qp: &Arc<QueuePair>, now: Time, rkey: u32) -> Knowledge {
        let (knowledge, is_new) = self.keys.look_up(rkey);
        if matches!(knowledge, Knowledge::Unknown) && self.link == LinkState::Idle {
            self.link = LinkState::join(now, qp.qpn());
        }
        if let (true, LinkState::Connected, Some(control)) = (is_new, self.link, &mut self.control) {
            control.send(&Message { id: rkey.into(), body: Body::Describe(rkey) }, false);
        }
        knowledge
    }

    /// Executes the initiator's actions.
    pub fn act(&mut self, session: &Session, qp: &Arc<QueuePair>, now: Time) {
        let Some(Outgoing { initiator, unposted, .. }) = &mut self.outgoing else { return };
        // Before what leaves next was added.
        let mut awaited_count = 0;
        loop {
            let memory = &mut LocalSide::new(qp, self.control.as_ref(), &self.settings);
            // What was executed at once is complete already.
            for wc in session.inputs.completions.take() {
                initiator.handle_completion(now, &wc, memory);
            }
            if unposted.is_empty() {
                awaited_count = initiator.awaited_count();
            }
            match initiator.poll_action(now, memory) {
                None if unposted.is_empty() && session.inputs.completions.is_empty() => return,
                None => post_below(qp, now, initiator, memory, (unposted, awaited_count)),
                // A WRITE and the READ of its versions leave in one system call.
                Some(Action::Post(wr)) => unposted.push(wr),
                Some(Action::Complete(wc)) => {
                    // The program that sees it may post the next request at once.
                    release_places(session, &mut self.place_count, initiator);
                    qp.complete(wc);
                }
                Some(Action::Send(message)) => match &mut self.control {
                    Some(control) => control.send_encoded(message.into(), false),
                    None => initiator.handle_peer_gone(now),
                },
                Some(Action::Break) => {
                    post_below(qp, now, initiator, memory, (unposted, awaited_count));
                    break_queue_pair(qp);
                }
            }
        }
    }
}

/// Posts the initiator's work requests to the send queue. Those that it does not take are flushed.
fn post_below(
    qp: &Arc<QueuePair>,
    now: Time,
    initiator: &mut Initiator,
    memory: &mut LocalSide<'_>,
    (wrs, awaited_count): (&mut Vec<SendWr>, usize),
) {
    if wrs.is_empty() {
        return;
    }
    if let Err((index, error)) = qp.post_below(wrs, awaited_count) {
        tracing::debug!(%error, qpn = qp.qpn(), "the queue pair takes no work requests");
        for wr in &wrs[index..] {
            let wc = Wc { wr_id: wr.wr_id, status: WcStatus::Flushed, qpn: qp.qpn(), ..Wc::default() };
            initiator.handle_completion(now, &wc, memory);
        }
    }
    wrs.clear();
}
