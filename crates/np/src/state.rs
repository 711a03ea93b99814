//! The initiator and the target of a session, and the actions that they want.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use terrace_access::layout::Layout;
use terrace_access::optimistic::{
    Action, Config, Counters, Initiator, OrderBits, Scratch, Target, TargetAction, TargetConfig,
};
use terrace_access::proto::{
    Body, Datagram, Done, Endpoint, Found, Join, Message, Mode, Open, Opened, RegionDescription, Status,
    Table,
};
use terrace_access::region::{Knowledge, Region};
use terrace_memory::{Pager, Waker};
use terrace_nic::{
    AccessNeed, Buffer, Mr, MrRequest, PagedKey, Path, QpAttr, QpAttrMask, QpState, QueuePair, SendOp,
    SendWr, Time, Wc, WcOpcode, WcStatus,
};

use crate::control::ControlQp;
use crate::link::{Due, Keys, LinkState};
use crate::memory::{Holds, LocalSide, TargetSide, status};
use crate::session::{Joining, Session};
use crate::settings::Settings;

/// The upper half of the ids of an initiator's messages. Those of descriptions have the rkey, and 0.
const TAG: u32 = 1;
/// The most messages of an initiator that the peer has not answered.
const CALL_COUNT_MAX: u32 = 16;
/// The most bytes of one call: they are held by the peer at a time.
const CALL_BYTES_MAX: u32 = 64 << 10;
/// Versions are read into slots of so many bytes, so many at a time.
const SLOT_BYTES: u32 = 512;
const SLOT_COUNT: u32 = 16;
/// `ibv_access_flags`.
const LOCAL_WRITE: u32 = 1;
const REMOTE_READ: u32 = 1 << 2;
const PAGE: u64 = 4096;

/// A version table that the peer may READ. It keeps the pager, whose memory it is.
struct OpenTable {
    region_id: u64,
    mr: Arc<Mr>,
    _pager: Arc<dyn Pager>,
}

impl Drop for OpenTable {
    fn drop(&mut self) {
        if let Err(error) = self.mr.dereg() {
            tracing::error!(%error, "a version table cannot be deregistered");
        }
    }
}

/// The initiator, and the memory that it reads versions into.
struct Outgoing {
    initiator: Initiator,
    /// What has been added to the service's statistics.
    counted: Counters,
    /// Work requests that leave together; kept for its allocation.
    unposted: Vec<SendWr>,
    _scratch: Buffer,
}

/// What a session does.
pub(crate) struct State {
    settings: Settings,
    outgoing: Option<Outgoing>,
    target: Target,
    link: LinkState,
    control: Option<ControlQp>,
    keys: Keys,
    holds: Holds,
    /// By rkey.
    tables: HashMap<u32, OpenTable>,
    /// The program's work requests that have places in the send queue.
    place_count: usize,
}

fn new_target(settings: &Settings) -> Target {
    Target::new(TargetConfig { call_count_max: CALL_COUNT_MAX, hold_ns_max: settings.hold_ns_max })
}

/// Gives back the places of the requests that the initiator has completed.
fn release_places(session: &Session, place_count: &mut usize, initiator: &Initiator) {
    let left = initiator.len();
    session.release(place_count.saturating_sub(left));
    *place_count = left;
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
    pub fn new(settings: &Settings) -> State {
        State {
            settings: *settings,
            outgoing: None,
            target: new_target(settings),
            link: LinkState::Idle,
            control: None,
            keys: Keys::default(),
            holds: Holds::default(),
            tables: HashMap::new(),
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
        for token in inputs.held.take() {
            if let Some(result) = self.holds.advance(token) {
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
                initiator.handle_completion(
                    now,
                    &wc,
                    &mut LocalSide { qp, is_registered_late: self.settings.is_two_sided },
                );
            }
            if is_failed {
                initiator.flush();
            }
        }
        self.advance_link(session, qp, now);
        self.act(session, qp, now);
        self.act_for_peer(session, qp, now);
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
        if let Some(control) = &self.control {
            session.service.set_control(control.qpn(), None);
        }
        *self = State::new(&self.settings);
        session.set_deadline(None);
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
        let deadlines = [initiator, self.target.deadline(), self.link.deadline()];
        session.set_deadline(deadlines.into_iter().flatten().min());
    }

    /// Takes a work request of the program.
    fn post(&mut self, session: &Session, qp: &Arc<QueuePair>, now: Time, wr: SendWr) {
        let (wr_id, qpn) = (wr.wr_id, qp.qpn());
        self.place_count += 1;
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
            Some(outgoing) => outgoing.initiator.post(wr, &known, OrderBits::empty()).is_ok(),
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
                is_reverse_allowed: false,
                unchecked_count_max: self.settings.unchecked_count_max.min(depth.div_ceil(2)),
                check_delay_ns: self.settings.check_delay_ns,
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
        if is_new {
            if self.link == LinkState::Idle {
                self.link = LinkState::join(now, qp.qpn());
            }
            if let (LinkState::Connected, Some(control)) = (self.link, &mut self.control) {
                control.send(&Message { id: rkey.into(), body: Body::Describe(rkey) }, false);
            }
        }
        knowledge
    }

    /// Executes the initiator's actions.
    fn act(&mut self, session: &Session, qp: &Arc<QueuePair>, now: Time) {
        let Some(Outgoing { initiator, unposted, .. }) = &mut self.outgoing else { return };
        let memory = &mut LocalSide { qp, is_registered_late: self.settings.is_two_sided };
        loop {
            // What was executed at once is complete already.
            for wc in session.inputs.completions.take() {
                initiator.handle_completion(now, &wc, memory);
            }
            match initiator.poll_action(now, memory) {
                None if unposted.is_empty() && session.inputs.completions.is_empty() => return,
                None => post_below(qp, now, initiator, memory, unposted),
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
                    post_below(qp, now, initiator, memory, unposted);
                    break_queue_pair(qp);
                }
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
                // Initiators of this crate do not ask for transfers.
                TargetAction::Move(transfer) => {
                    let token = transfer.token;
                    self.with_target(session, qp, |target, side| target.handle_moved(token, false, side));
                }
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

    fn with_target<T>(
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

    // The link.

    /// Sends the datagrams that are due.
    fn advance_link(&mut self, session: &Session, qp: &Arc<QueuePair>, now: Time) {
        match self.link.poll(now) {
            Due::Nothing => {}
            Due::Silent => {
                tracing::info!(qpn = qp.qpn(), "the peer has no NP-RDMA: its memory counts as present");
                self.make_plain(session);
            }
            Due::Unavailable => {
                tracing::warn!(
                    qpn = qp.qpn(),
                    "the peer's memory may be absent, and no session can be set up"
                );
                self.fail_link(session, qp, now);
            }
            Due::Send(tid) => {
                let attr = qp.query();
                let Some(end) = self.control_end(session, qp) else { return self.link.exclude_plain() };
                let Some(path) = attr.path else { return };
                let join = Join { from_qpn: qp.qpn(), to_qpn: attr.dest_qpn, end };
                session.service.send(&path, &Datagram::Join { tid, join });
            }
        }
    }

    /// This end of the control queue pair, which is made if there is none.
    fn control_end(&mut self, session: &Session, qp: &Arc<QueuePair>) -> Option<Endpoint> {
        if self.control.is_none() {
            match ControlQp::new(qp.pd(), &session.service.cq) {
                Ok(control) => {
                    session.service.set_control(control.qpn(), Some(session));
                    self.control = Some(control);
                }
                Err(error) => {
                    tracing::warn!(%error, qpn = qp.qpn(), "no control queue pair for a queue pair")
                }
            }
        }
        Some(self.control.as_ref()?.end())
    }

    fn handle_joining(&mut self, session: &Session, qp: &Arc<QueuePair>, joining: Joining) {
        let attr = qp.query();
        let is_connected = matches!(attr.state, QpState::Rtr | QpState::Rts | QpState::Sqd | QpState::Sqe);
        let is_peer = |path: &Path| {
            let ip = |path: &Path| path.remote.ip().to_canonical();
            is_connected && attr.path.is_some_and(|peer| ip(&peer) == ip(path))
        };
        match joining {
            // Without an answer the peer asks again, when this end may be connected.
            Joining::Asked { path, join, .. } if !is_peer(&path) || join.from_qpn != attr.dest_qpn => {}
            Joining::Asked { path, tid, join } => {
                let joined = match self.control_end(session, qp) {
                    Some(end) if self.connect(session, &attr, join.end) => Ok(end),
                    _ => {
                        self.link.exclude_plain();
                        Err(Status::Busy)
                    }
                };
                session.service.send(&path, &Datagram::Joined { tid, joined });
            }
            Joining::Answered { path, tid, joined } => {
                let is_awaited = matches!(self.link, LinkState::Joining { tid: own, .. } if own == tid);
                match joined {
                    _ if !is_awaited || !is_peer(&path) => {}
                    Ok(end) if self.connect(session, &attr, end) => {}
                    Err(Status::Plain) => self.make_plain(session),
                    _ => self.link.exclude_plain(),
                }
            }
        }
    }

    /// Connects the control queue pair with the peer's end, unless it is connected. True if it is connected then.
    fn connect(&mut self, session: &Session, attr: &QpAttr, peer: Endpoint) -> bool {
        let (Some(control), Some(path)) = (&mut self.control, attr.path) else { return false };
        if self.link == LinkState::Failed {
            return false;
        }
        if control.is_connected() {
            return true;
        }
        if let Err(error) = control.connect(path, peer) {
            tracing::debug!(%error, qpn = session.qpn, "a control queue pair cannot be connected");
            return false;
        }
        self.link = LinkState::Connected;
        for rkey in self.keys.asked() {
            control.send(&Message { id: rkey.into(), body: Body::Describe(rkey) }, false);
        }
        true
    }

    /// The peer has no session.
    fn make_plain(&mut self, session: &Session) {
        self.link = LinkState::Plain;
        if let Some(control) = self.control.take() {
            session.service.set_control(control.qpn(), None);
        }
        for rkey in self.keys.take_asked() {
            if let Some(outgoing) = &mut self.outgoing {
                outgoing.initiator.handle_described(rkey, &Knowledge::Plain);
            }
        }
    }

    /// The control queue pair has failed: the peer is gone, or does not keep to the protocol.
    fn fail_link(&mut self, session: &Session, qp: &Arc<QueuePair>, now: Time) {
        if self.link == LinkState::Failed {
            return;
        }
        self.link = LinkState::Failed;
        if let Some(control) = self.control.take() {
            session.service.set_control(control.qpn(), None);
        }
        let is_busy = self.outgoing.as_ref().is_some_and(|outgoing| !outgoing.initiator.is_empty());
        if is_busy || !self.target.is_empty() {
            // Without its control queue pair the queue pair would take signature pages for data. What is held for the peer is
            // released when its accesses have ended.
            break_queue_pair(qp);
        }
        for rkey in self.keys.take_asked() {
            if let Some(outgoing) = &mut self.outgoing {
                outgoing.initiator.handle_described(rkey, &Knowledge::Plain);
            }
        }
        if let Some(outgoing) = &mut self.outgoing {
            outgoing.initiator.handle_peer_gone(now);
        }
        self.with_target(session, qp, |target, side| target.handle_peer_gone(side));
    }

    // Messages.

    /// Takes a completion of the control queue pair.
    fn handle_control(&mut self, session: &Session, qp: &Arc<QueuePair>, now: Time, wc: &Wc) {
        let Some(control) = self.control.as_mut().filter(|control| control.qpn() == wc.qpn) else {
            return;
        };
        if wc.status != WcStatus::Success {
            tracing::debug!(qpn = qp.qpn(), status = ?wc.status, "a control queue pair has failed");
            return self.fail_link(session, qp, now);
        }
        if wc.opcode != WcOpcode::Recv {
            return control.note_sent();
        }
        let taken = control.take_message(wc);
        let is_handled = match taken.as_ref().map(|bytes| Message::decode(bytes)) {
            Ok(Ok(message)) => self.handle_message(session, qp, now, &message),
            _ => false,
        };
        if !is_handled {
            tracing::warn!(qpn = qp.qpn(), "a message that is none of the protocol");
            self.fail_link(session, qp, now);
        }
    }

    /// False for a message that the peer should not have sent.
    fn handle_message(
        &mut self,
        session: &Session,
        qp: &Arc<QueuePair>,
        now: Time,
        message: &Message<'_>,
    ) -> bool {
        match &message.body {
            Body::Describe(rkey) => {
                let body = self.describe(session, qp, *rkey);
                self.reply(message.id, body);
            }
            Body::Open(open) => {
                let body = match self.open(session, qp, open) {
                    Ok(opened) => Body::Opened(opened),
                    Err(status) => Body::Done(Done::one(status)),
                };
                self.reply(message.id, body);
            }
            Body::Found(found) => {
                let knowledge = Knowledge::Extended(Arc::new(Region::new(found.rkey, found.region)));
                return self.note_described(found.rkey, &knowledge, true);
            }
            Body::Done(done) if message.id >> 32 == 0 => {
                // The NIC reports a key that the peer does not have.
                let is_kept = done.status == Status::Plain;
                return self.note_described(message.id as u32, &Knowledge::Plain, is_kept);
            }
            Body::Opened(_) | Body::Done(_) | Body::Data(_) | Body::Value(_) => {
                let Some(outgoing) = &mut self.outgoing else { return false };
                return outgoing.initiator.handle_message(
                    now,
                    message,
                    &mut LocalSide { qp, is_registered_late: self.settings.is_two_sided },
                );
            }
            _ => {
                return self
                    .with_target(session, qp, |target, side| target.handle_message(now, message, side));
            }
        }
        true
    }

    fn reply(&mut self, id: u64, body: Body<'_>) {
        if let Some(control) = &mut self.control {
            control.send(&Message { id, body }, true);
        }
    }

    fn note_described(&mut self, rkey: u32, knowledge: &Knowledge, is_kept: bool) -> bool {
        let is_asked = self.keys.note(rkey, knowledge, is_kept);
        if let (true, Some(outgoing)) = (is_asked, &mut self.outgoing) {
            outgoing.initiator.handle_described(rkey, knowledge);
        }
        is_asked
    }

    /// The answer to the peer's question about a key.
    fn describe(&self, session: &Session, qp: &QueuePair, rkey: u32) -> Body<'static> {
        let done = |status| Body::Done(Done::one(status));
        let key = match qp.paged_key(rkey) {
            Ok(Some(key)) => key,
            Ok(None) => return done(Status::Plain),
            Err(error) => return done(status(error)),
        };
        // The addresses are for those only who may access one of them.
        let permits = |need| qp.check_peer(rkey, key.start, 1, need).is_ok();
        if ![AccessNeed::Read, AccessNeed::Write, AccessNeed::Atomic].into_iter().any(permits) {
            return done(Status::AccessDenied);
        }
        let Some((layout, region_id)) = layout_of(session, rkey, &key) else { return done(Status::Invalid) };
        let signature_key = session.service.signature_key;
        let region = RegionDescription { layout, signature_key, region_id, mode: Mode::OneSided };
        Body::Found(Found { rkey, region })
    }

    /// Has the peer READ the versions of a region.
    fn open(&mut self, session: &Session, qp: &Arc<QueuePair>, open: &Open) -> Result<Opened, Status> {
        let key = qp.paged_key(open.rkey).map_err(status)?.ok_or(Status::Plain)?;
        // WRITEs are checked by versions, and nothing else is.
        qp.check_peer(open.rkey, key.start, 1, AccessNeed::Write).map_err(status)?;
        let (layout, region_id) = layout_of(session, open.rkey, &key).ok_or(Status::Invalid)?;
        if region_id != open.region_id {
            return Err(Status::NoSuchRegion);
        }
        if qp.query().max_dest_rd_atomic == 0 {
            return Err(Status::AccessDenied);
        }
        let all = key.pager.translation().versions();
        let entry_bytes = all.len / key.pager.translation().range().len.div_ceil(PAGE).max(1);
        let length = (layout.lead_bytes() + layout.length()).div_ceil(PAGE) * entry_bytes;
        if length == 0 || length > all.len {
            return Err(Status::Unsupported);
        }
        if self.tables.get(&open.rkey).is_none_or(|table| table.region_id != region_id) {
            if let Some(old) = self.tables.remove(&open.rkey) {
                qp.permit_reads_of(old.mr.rkey(), false);
            }
            let request =
                MrRequest { addr: all.addr, length, iova: all.addr, access: REMOTE_READ, paging: None };
            let mr = qp.pd().reg_mr(request).map_err(|_| Status::Unsupported)?;
            qp.permit_reads_of(mr.rkey(), true);
            self.tables.insert(open.rkey, OpenTable { region_id, mr, _pager: key.pager });
        }
        let mr = &self.tables[&open.rkey].mr;
        let versions = Table { va: mr.addr(), length_bytes: length, rkey: mr.rkey() };
        Ok(Opened { bitmap: Table { va: 0, length_bytes: 0, rkey: 0 }, versions })
    }
}

/// The layout of a paged key for the peer, and the id of its registration.
fn layout_of(session: &Session, rkey: u32, key: &PagedKey) -> Option<(Layout, u64)> {
    let translation = key.pager.translation();
    let lead = key.range.addr.checked_sub(translation.range().addr)?;
    let layout = Layout::new(key.start, key.range.len, lead, translation.unit_bytes() as u32)?;
    let mut hasher = DefaultHasher::new();
    let pager = Arc::as_ptr(&key.pager).cast::<()>() as u64;
    (session.service.salt, rkey, pager, key.start, key.range.addr, key.range.len).hash(&mut hasher);
    Some((layout, hasher.finish()))
}

/// Posts the initiator's work requests to the send queue. Those that it does not take are flushed.
fn post_below(
    qp: &Arc<QueuePair>,
    now: Time,
    initiator: &mut Initiator,
    memory: &mut LocalSide<'_>,
    wrs: &mut Vec<SendWr>,
) {
    if wrs.is_empty() {
        return;
    }
    if let Err((index, error)) = qp.post_below(wrs) {
        tracing::debug!(%error, qpn = qp.qpn(), "the queue pair takes no work requests");
        for wr in &wrs[index..] {
            let wc = Wc { wr_id: wr.wr_id, status: WcStatus::Flushed, qpn: qp.qpn(), ..Wc::default() };
            initiator.handle_completion(now, &wc, memory);
        }
    }
    wrs.clear();
}

/// Moves the program's queue pair to the error state.
fn break_queue_pair(qp: &Arc<QueuePair>) {
    let attr = QpAttr { state: QpState::Err, ..QpAttr::default() };
    if let Err(error) = qp.modify(&attr, QpAttrMask::STATE) {
        tracing::debug!(%error, qpn = qp.qpn(), "a queue pair cannot be moved to the error state");
    }
}
