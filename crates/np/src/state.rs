//! The state of a session, and the order in which `State::run` handles what has arrived:
//!
//! | what | by |
//! |---|---|
//! | datagrams of the peer | `handle_joining` in `setup` |
//! | messages of the peer | `handle_control` in `messages` |
//! | regions that have ended | `Regions::end`; `ask_to_forget` in `messages` |
//! | pages that the target waits for | `Holds::advance` in `memory` |
//! | the program's work requests | `post` in `outgoing` |
//! | completions of the initiator's posts | `Initiator::handle_completion` |
//! | the setup of the control queue pair | `advance_link` in `setup` |
//! | what the initiator asks for | `act` in `outgoing` |
//! | whether a silent peer's device runs | `take_proof` in `setup` |
//! | whether the peer's requests go on | `note_peer_progress` |
//! | what the target asks for | `act_for_peer` |
//! | keys that the peer asks to forget | `confirm_forgotten` in `messages` |
//! | a peer that has not answered for long | `probe` in `setup` |

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use terrace_access::optimistic::{Move, Target, TargetAction, TargetConfig};
use terrace_memory::Waker;
use terrace_nic::{QpAttr, QpAttrMask, QpState, QueuePair, Time};

use crate::control::ControlQp;
use crate::link::{Forgetting, Keys, LinkState};
use crate::memory::{Holds, LocalSide, TargetSide};
use crate::outgoing::{Outgoing, release_places};
use crate::regions::Regions;
use crate::session::Session;
use crate::settings::{CALL_BYTES_MAX, CALL_COUNT_MAX, Settings};

/// What a session does.
pub(crate) struct State {
    pub settings: Settings,
    pub outgoing: Option<Outgoing>,
    pub target: Target,
    pub link: LinkState,
    pub control: Option<ControlQp>,
    pub keys: Keys,
    pub holds: Holds,
    /// The PSN that the queue pair expected when the limit of held ranges began, while there are any. It changes with each request of the peer.
    expected_psn: Option<u32>,
    /// READs of what the peer has lent, by the ids of its requests.
    pub fetching: HashMap<u64, Move>,
    pub regions: Regions,
    /// Keys that the peer asks to forget, and that requests name.
    pub forgetting: Vec<Forgetting>,
    /// When a probe is sent, if the peer has not answered, and sent nothing, by then.
    pub probe_at: Option<Time>,
    /// The program's work requests that have places in the send queue.
    pub place_count: usize,
}

fn new_target(settings: &Settings) -> Target {
    Target::new(TargetConfig {
        call_count_max: CALL_COUNT_MAX,
        move_bytes_max: CALL_BYTES_MAX,
        hold_ns_max: settings.hold_ns_max,
        busy_hold_ns_max: settings.busy_hold_ns_max,
    })
}

impl State {
    pub fn new(settings: &Settings) -> State {
        State {
            settings: *settings,
            outgoing: None,
            target: new_target(settings),
            link: LinkState::Idle,
            control: None,
            keys: Keys::default(),
            holds: Holds::default(),
            expected_psn: None,
            fetching: HashMap::new(),
            regions: Regions::default(),
            forgetting: Vec::new(),
            probe_at: None,
            place_count: 0,
        }
    }

    /// Handles what has arrived.
    pub fn run(&mut self, session: &Session, qp: &Arc<QueuePair>) {
        let Some(device) = session.service.device() else { return };
        let inputs = &session.inputs;
        let now = device.now();
        inputs.is_due.store(false, Ordering::Release);
        for joining in inputs.joining.take() {
            self.handle_joining(session, qp, joining);
        }
        for wc in inputs.control.take() {
            self.handle_control(session, qp, now, &wc);
        }
        for key in inputs.ended_keys.take() {
            self.regions.end(key);
        }
        self.ask_to_forget(session, qp, now);
        for token in inputs.held.take() {
            if let Some(result) = self.holds.advance(qp, token) {
                self.with_target(session, qp, |target, side| target.handle_held(now, token, result, side));
            }
        }
        for wr in inputs.posted.take() {
            self.post(session, qp, now, wr);
        }
        // Taken without an initiator, too: what stays would have this called for ever.
        let (completions, is_failed) =
            (inputs.completions.take(), inputs.is_failed.swap(false, Ordering::AcqRel));
        if let Some(Outgoing { initiator, .. }) = &mut self.outgoing {
            for wc in completions {
                let memory = &mut LocalSide::new(qp, self.control.as_ref(), &self.settings);
                initiator.handle_completion(now, &wc, memory);
            }
            if is_failed {
                initiator.flush();
            }
        }
        self.advance_link(session, qp, now);
        self.act(session, qp, now);
        self.take_proof(session, qp, now);
        self.note_peer_progress(qp, now);
        self.act_for_peer(session, qp, now);
        self.confirm_forgotten();
        self.probe(now);
        if self.control.as_mut().is_some_and(|control| control.post().is_err()) {
            self.fail_link(session, qp, now);
        }
        // The pagers of held memory are the device's callbacks.
        if !self.target.is_empty() {
            device.request_callbacks();
        }
        self.note_deadline(session);
        self.count(session);
        if let Some(Outgoing { initiator, .. }) = &self.outgoing {
            release_places(session, &mut self.place_count, initiator);
        }
    }

    /// The queue pair has been reset, or is destroyed: nothing of the session accesses memory any more.
    pub fn reset(&mut self, session: &Session) {
        self.count(session);
        session.release(self.place_count);
        self.regions.keys().for_each(|key| session.service.unwatch_key(key, session));
        self.retire_control(session);
        *self = State::new(&self.settings);
        session.set_deadline(None);
    }

    /// Ends the control queue pair, if there is one.
    pub fn retire_control(&mut self, session: &Session) {
        if let Some(control) = self.control.take() {
            session.service.set_control(control.qpn(), None);
            control.retire();
        }
    }

    fn count(&mut self, session: &Session) {
        if let Some(outgoing) = &mut self.outgoing {
            let counters = outgoing.initiator.counters();
            session.service.totals.add(&outgoing.counted, &counters);
            outgoing.counted = counters;
        }
    }

    fn note_deadline(&self, session: &Session) {
        let initiator = self.outgoing.as_ref().and_then(|outgoing| outgoing.initiator.deadline());
        let forgets = self.regions.forgets.deadline();
        let deadlines = [initiator, self.target.deadline(), self.link.deadline(), self.probe_at, forgets];
        session.set_deadline(deadlines.into_iter().flatten().min());
    }

    /// Notes whether the peer's requests go on, if it has memory held for some of them. Only when the first range is held, and when a limit has
    /// passed: this takes the queue pair's lock.
    fn note_peer_progress(&mut self, qp: &Arc<QueuePair>, now: Time) {
        if !self.target.is_holding() {
            self.expected_psn = None;
        } else if self.expected_psn.is_none()
            || self.target.deadline().is_some_and(|deadline| deadline <= now)
        {
            let expected_psn = qp.query().rq_psn;
            let before = self.expected_psn.replace(expected_psn);
            if before.is_some_and(|before| before != expected_psn) {
                self.target.note_progress(now);
            }
        }
    }

    /// Executes the target's actions.
    fn act_for_peer(&mut self, session: &Session, qp: &Arc<QueuePair>, now: Time) {
        while let Some(action) = self.target.poll_action(now) {
            match action {
                TargetAction::Send(message) => {
                    session.service.totals.served.fetch_add(1, Ordering::Relaxed);
                    if let Some(control) = &mut self.control {
                        control.send_encoded(message.into(), true);
                    }
                }
                TargetAction::Move(transfer) => self.transfer(session, qp, transfer),
                TargetAction::Break => {
                    tracing::warn!(
                        qpn = qp.qpn(),
                        "the peer does not keep to the protocol, or holds memory for too long"
                    );
                    break_queue_pair(qp);
                    self.fail_link(session, qp, now);
                }
            }
        }
    }

    pub fn with_target<T>(
        &mut self,
        session: &Session,
        qp: &Arc<QueuePair>,
        act: impl FnOnce(&mut Target, &mut TargetSide<'_>) -> T,
    ) -> T {
        let waker = |token| -> Waker { session.waker(token) };
        let is_registered_late = self.settings.is_two_sided;
        act(
            &mut self.target,
            &mut TargetSide { qp, holds: &mut self.holds, is_registered_late, waker: &waker },
        )
    }
}

thread_local! {
    /// Whether this thread, which handles a session, moves the session's queue pair to the error state.
    static IS_BREAKING: Cell<bool> = const { Cell::new(false) };
}

/// Whether the caller is in [`break_queue_pair`].
pub(crate) fn is_breaking() -> bool {
    IS_BREAKING.get()
}

/// Moves the program's queue pair to the error state. The caller handles its session.
pub(crate) fn break_queue_pair(qp: &Arc<QueuePair>) {
    let attr = QpAttr { state: QpState::Err, ..QpAttr::default() };
    IS_BREAKING.set(true);
    let broken = qp.modify(&attr, QpAttrMask::STATE);
    IS_BREAKING.set(false);
    if let Err(error) = broken {
        tracing::debug!(%error, qpn = qp.qpn(), "a queue pair cannot be moved to the error state");
    }
}
