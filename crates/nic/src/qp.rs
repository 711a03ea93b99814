//! Queue pairs: the transport's queue pair with the objects around it.

use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock, Weak};

use terrace_fabric::Port;
use terrace_memory::{Absence, Waker};
use terrace_shm::{DirectAccess, GracePeriod, PrefetchHint};
use terrace_sync::{BiasedMutex, Guard};
use terrace_transport::{
    Qp, QpAttr, QpAttrMask, QpCap, QpConfig, QpCounters, QpState, QpType, RecvWr, SendOp, SendWr, Time, Wc,
};

use crate::cq::Cq;
use crate::device::Device;
use crate::device::Pd;
use crate::error::{Error, reader_timeout};
use crate::event_account::EventAccount;
use crate::holders::{Holders, Leaving};
use crate::keys::{KeySet, LastKeys};
use crate::limits::Limits;
use crate::local::QpLocal;
use crate::schedule::{NEVER, Schedule};
use crate::source::SourceFilter;
use crate::srq::{Srq, Xrcd};
use crate::tx_token::TxToken;
use crate::use_count::UseCount;
use crate::work_queue::{EntriesState, Resume, WorkQueues, WorkQueuesInit};

/// Parameters of a new queue pair.
#[derive(Clone)]
pub struct QpInit {
    /// RC, UC, UD, or the initiator of XRC.
    pub qp_type: QpType,
    /// Completion queue of send work requests.
    pub send_cq: Arc<Cq>,
    /// Completion queue of receive work requests.
    pub recv_cq: Arc<Cq>,
    /// Source of receive work requests, instead of the queue pair's own queue.
    pub srq: Option<Arc<Srq>>,
    /// Sizes of its queues.
    pub cap: QpCap,
    /// Whether every send work request completes with an entry, asked for or not.
    pub sq_sig_all: bool,
    /// Whether it receives no multicast datagrams that its own device has sent.
    pub blocks_own_multicast: bool,
    /// Whether it raises asynchronous events. False for a queue pair that the program knows nothing of.
    pub raises_events: bool,
    /// The creator's cookie.
    pub cookie: u64,
}

/// Receives a queue pair's completions of send work requests in place of its completion queue.
pub trait CompletionHook: Send + Sync {
    /// A send work request has completed with an entry. Called in the order of completion, with the queue pair's lock
    /// held and perhaps that of the ring to its peer: it may note the entry, and pass entries on by
    /// [`QueuePair::complete`], but call no verbs, nor take a lock under which others call verbs. The device's progress
    /// callbacks are called soon after.
    fn completed(&self, wc: Wc);
}

/// A protocol between the program and the send queue. It takes the work requests that are posted, and posts its own
/// ([`QueuePair::post_below`]), whose completions it receives as a hook. Those for the program it passes on by
/// [`QueuePair::complete`]. No lock of the device is held when these methods are called.
pub trait SendStage: CompletionHook {
    /// Reserves places for work requests. ENOMEM if the send queue holds as many that have not been completed.
    ///
    /// # Errors
    /// `NoMemory`; nothing is reserved then.
    fn reserve(&self, count: usize) -> Result<(), Error>;

    /// Takes valid work requests, for which places are reserved.
    fn post(&self, wrs: Vec<SendWr>);

    /// The queue pair has changed to this state: RESET, also before it is destroyed, or ERR.
    fn state_changed(&self, state: QpState);
}

/// The work requests that a program posts in one call, for the queue pair's stage.
pub(crate) struct Staged<'a> {
    stage: &'a dyn SendStage,
    wrs: Vec<SendWr>,
}

/// A queue pair.
pub struct QueuePair {
    me: Weak<QueuePair>,
    pd: Arc<Pd>,
    pub(crate) init: QpInit,
    /// For a target of XRC.
    xrcd: Option<Arc<Xrcd>>,
    holders: Holders,
    state: BiasedMutex<QpCore>,
    /// Senders whose packets it accepts.
    pub(crate) source: SourceFilter,
    /// The right to send for this queue pair.
    pub(crate) token: TxToken,
    /// The marks of the device's lists.
    pub(crate) schedule: Schedule,
    /// Has the queue pair handled, because absent memory may be present now.
    pub(crate) waker: Waker,
    /// Regions of which the peer gets signature pages in place of absent memory.
    pub(crate) magic: KeySet,
    /// Of tables that the peer may READ without the right to READ other regions.
    pub(crate) table_keys: KeySet,
    pub(crate) keys: LastKeys,
    /// For accesses to a same-host peer.
    pub(crate) prefetch_hint: PrefetchHint,
    pub(crate) async_account: EventAccount,
    work_queues: Option<Box<WorkQueues>>,
    /// The protocol before the send queue, if there is one.
    stage: OnceLock<Arc<dyn SendStage>>,
    pub(crate) users: UseCount,
}

/// The state under the queue pair's lock.
pub(crate) struct QpCore {
    pub qp: Qp,
    pub nic: NicState,
}

/// What the NIC keeps of a queue pair beside the transport's state.
pub(crate) struct NicState {
    /// Receives the completions of send work requests in place of the completion queue.
    pub hook: Option<Arc<dyn CompletionHook>>,
    /// Whether the current burst has put it on the work list.
    pub is_on_work_list: bool,
    /// Whether it was destroyed.
    pub dead: bool,
    /// How the last packet arrived.
    pub last_path: RxPath,
    /// Bytes of it that the device counts as in flight.
    pub counted_bytes: u64,
    /// Whether it has a grant to send, see [`InFlightBudget`](crate::in_flight::InFlightBudget).
    pub has_grant: bool,
    /// Its route, and what same-host peers see of it.
    pub local: QpLocal,
    /// Work queues in memory: what their executor waits for.
    pub entries: EntriesState,
}

/// How a packet arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RxPath {
    Network,
    /// From a process of this host, see [`local`](crate::local).
    Ring,
}

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

/// Nagle's rule for work requests: a request that is posted while this many packets are in flight over the network can
/// wait for the answer to one of them. So can one that is posted while those of other queue pairs wait, if the program
/// polls: their peers may be stopped, so it waits for the next poll, and a tick of the engine at most. Not ...
const BUSY_PACKETS: u32 = 8;
/// ... if this many requests wait already. Batches of small messages share one system call that way.
const BATCH_REQUESTS: usize = 16;

/// Tries at most to send a deferred ACK before the queue pair ends. Another thread that is sending for the queue pair
/// takes microseconds; a blocked network is not waited for.
const DEFERRED_ACK_TRIES_MAX: u32 = 64;

/// Most bytes of one queue pair in flight at a time, however large the receive buffers are.
const WINDOW_BYTES_MAX: usize = 512 << 10;
/// How many queue pairs may send at full speed before a receive buffer overflows.
const WINDOWS_PER_BUFFER: usize = 8;

/// In-flight budget of a device, in windows of one queue pair: more would only wait in the peer's receive buffer, and
/// for longer than the senders wait.
const WINDOWS_IN_FLIGHT: u64 = 2;

/// In-flight bytes of one queue pair at most on such a port.
fn window_bytes(port: &dyn Port) -> usize {
    (port.receive_buffer_bytes() / WINDOWS_PER_BUFFER).min(WINDOW_BYTES_MAX)
}

/// In-flight bytes of all queue pairs of a device at most on such a port.
pub(crate) fn in_flight_bytes_max(port: &dyn Port) -> u64 {
    window_bytes(port) as u64 * WINDOWS_IN_FLIGHT
}

impl Pd {
    /// Makes a queue pair in RESET; EINVAL for sizes out of range, ENOMEM when the device has as many as it can.
    /// Targets of XRC are made by [`Xrcd::create_target`].
    pub fn create_qp(self: &Arc<Self>, init: QpInit) -> Result<Arc<QueuePair>, Error> {
        self.users.check()?;
        if init.qp_type == QpType::XrcRecv {
            return Err(Error::Invalid("targets are made in an XRC domain"));
        }
        QueuePair::new(self, init, None, None)
    }
}

impl QueuePair {
    /// With `xrcd`, a target of XRC.
    pub(crate) fn new(
        pd: &Arc<Pd>,
        init: QpInit,
        xrcd: Option<&Arc<Xrcd>>,
        queues: Option<WorkQueuesInit>,
    ) -> Result<Arc<QueuePair>, Error> {
        let device = pd.device();
        check_others(pd, &init)?;
        check_cap(&init, device.limits())?;
        device.ensure_engine();
        device.quotas.qp.take()?;
        let others = others(pd, &init, xrcd);
        UseCount::add_to_all(others.iter().flatten().copied())
            .inspect_err(|_| device.quotas.qp.give_back())?;
        let queues = queues.as_ref();
        let make = |qpn| Ok(Arc::new_cyclic(|me| QueuePair::make(pd, init.clone(), xrcd, queues, qpn, me)));
        let made = device.table.insert(make).inspect_err(|_| {
            others.into_iter().flatten().for_each(UseCount::remove);
            device.quotas.qp.give_back();
        })?;
        if queues.is_some() {
            device.numbered_qps.add(made.qpn(), made.me.clone());
        }
        Ok(made)
    }

    fn make(
        pd: &Arc<Pd>,
        mut init: QpInit,
        xrcd: Option<&Arc<Xrcd>>,
        queues: Option<&WorkQueuesInit>,
        qpn: u32,
        me: &Weak<QueuePair>,
    ) -> QueuePair {
        let device = pd.device();
        if init.srq.is_some() || !init.qp_type.has_receives() {
            init.cap.max_recv_wr = 0;
            init.cap.max_recv_sge = 0;
        }
        init.cap.max_inline_data = inline_bytes(&init.cap, device.limits());
        let window = window_bytes(&*device.port);
        let config = QpConfig {
            qpn,
            qp_type: init.qp_type,
            cap: init.cap,
            sq_sig_all: init.sq_sig_all,
            has_srq: init.srq.is_some() || queues.is_some_and(|queues| queues.recv.is_some()),
            window_bytes: window as u32,
            rd_atomic_limit: device.limits().max_rd_atomic,
            mtu_limit: device.port.mtu_limit(),
        };
        QueuePair {
            me: me.clone(),
            pd: pd.clone(),
            holders: Holders::new(init.cookie),
            source: SourceFilter::new(init.qp_type == QpType::Ud),
            init,
            xrcd: xrcd.cloned(),
            state: BiasedMutex::new(QpCore {
                qp: Qp::new(config),
                nic: NicState {
                    hook: None,
                    is_on_work_list: false,
                    dead: false,
                    last_path: RxPath::Network,
                    counted_bytes: 0,
                    has_grant: false,
                    local: QpLocal::default(),
                    entries: EntriesState::new(queues.is_some()),
                },
            }),
            token: TxToken::default(),
            schedule: Schedule::new(qpn),
            waker: waker_of(me.clone()),
            magic: KeySet::default(),
            table_keys: KeySet::default(),
            keys: LastKeys::default(),
            prefetch_hint: PrefetchHint::default(),
            async_account: EventAccount::default(),
            work_queues: queues.map(|queues| Box::new(WorkQueues::new(queues, resume_of(me.clone())))),
            stage: OnceLock::new(),
            users: UseCount::default(),
        }
    }

    /// Number: the process's instance index in the upper 8 bits.
    pub fn qpn(&self) -> u32 {
        self.schedule.qpn
    }

    /// The kind of queue pair.
    pub fn qp_type(&self) -> QpType {
        self.init.qp_type
    }

    /// The creator's cookie; of a target of XRC with several holders, that of the oldest.
    pub fn cookie(&self) -> u64 {
        self.holders.first()
    }

    pub(crate) fn holders(&self) -> &Holders {
        &self.holders
    }

    /// For a target of XRC: its domain.
    pub fn xrcd(&self) -> Option<&Arc<Xrcd>> {
        self.xrcd.as_ref()
    }

    /// The sizes that were granted.
    pub fn cap(&self) -> QpCap {
        self.init.cap
    }

    /// The protection domain.
    pub fn pd(&self) -> &Arc<Pd> {
        &self.pd
    }

    /// Completion queue of send work requests.
    pub fn send_cq(&self) -> &Arc<Cq> {
        &self.init.send_cq
    }

    /// Completion queue of receive work requests.
    pub fn recv_cq(&self) -> &Arc<Cq> {
        &self.init.recv_cq
    }

    /// Source of receive work requests, if not its own queue.
    pub fn srq(&self) -> Option<&Arc<Srq>> {
        self.init.srq.as_ref()
    }

    /// Its work queues, if they are in memory.
    #[inline]
    pub(crate) fn work_queues(&self) -> Option<&WorkQueues> {
        self.work_queues.as_deref()
    }

    /// Whether every send work request completes with an entry.
    pub fn sq_sig_all(&self) -> bool {
        self.init.sq_sig_all
    }

    /// The state now.
    pub fn state(&self) -> QpState {
        self.lock().qp.state()
    }

    /// All attributes now.
    pub fn query(&self) -> QpAttr {
        self.lock().qp.query()
    }

    /// Its counters.
    pub fn counters(&self) -> QpCounters {
        self.counters_with(&self.lock())
    }

    /// The same for a caller that holds its lock.
    pub(crate) fn counters_with(&self, core: &QpCore) -> QpCounters {
        let counters = *core.qp.counters();
        QpCounters { dropped: counters.dropped + self.source.dropped(), ..counters }
    }

    /// Changes attributes and state. EINVAL where the state machine has no such change, attributes are missing or too
    /// many, or values are out of range; nothing has changed then. RESET discards the queue pair's completions.
    /// Same-host peers may still be in the middle of accesses that were permitted before: see
    /// [`QueuePair::await_readers`].
    pub fn modify(self: &Arc<Self>, attr: &QpAttr, mask: QpAttrMask) -> Result<(), Error> {
        let device = self.device();
        if mask.contains(QpAttrMask::STATE) && matches!(attr.state, QpState::Reset | QpState::Err) {
            self.send_deferred_ack();
        }
        let mut core = self.lock_alive()?;
        let (transport, host) = core.parts(self, None);
        transport.modify(attr, mask, &host)?;
        self.update_source(&core);
        if core.qp.state() == QpState::Reset {
            self.purge_completions();
            // The next peer may not know signature pages.
            self.magic.clear();
            self.table_keys.clear();
        }
        if self.qp_type() == QpType::Ud && core.qp.state() == QpState::Rtr {
            device.activate_all_gids();
        } else if mask.contains(QpAttrMask::AV)
            && let Some(path) = attr.path
        {
            device.activate_gid(path.source_gid_index);
        }
        device.note_modified(self, &mut core);
        device.note_work_queues_modified(self, &mut core);
        let state = core.qp.state();
        device.after_change(self, core);
        if self.work_queues.is_some() {
            device.run_work_queues_now();
        }
        if let Some(stage) = self.stage.get()
            && mask.contains(QpAttrMask::STATE)
            && matches!(state, QpState::Reset | QpState::Err)
        {
            stage.state_changed(state);
            if state == QpState::Reset {
                self.forget_stage_work();
            }
        }
        Ok(())
    }

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
        self.send_posted(core);
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

    /// Posts a work request of the queue pair's stage to the send queue.
    ///
    /// # Errors
    /// Those of [`Posting::post`].
    pub fn post_below(self: &Arc<Self>, wr: SendWr) -> Result<(), Error> {
        self.post_to_queue(|posting| posting.post(wr))
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
    fn send_posted(self: &Arc<Self>, core: Guard<'_, QpCore>) {
        if core.qp.wants_transmit() {
            self.send_pending(core);
        } else {
            self.device().unlock_idle(core);
        }
    }

    #[inline(never)]
    fn send_pending(self: &Arc<Self>, core: Guard<'_, QpCore>) {
        let device = self.device();
        device.ensure_engine();
        let can_wait = !core.nic.local.has_tx_ring()
            && (core.qp.unacknowledged_packets() >= BUSY_PACKETS
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

    /// Sets what this queue pair's peer gets where it READs absent memory of the region; until RESET.
    pub fn set_absence(&self, rkey: u32, absence: Absence) {
        self.magic.set(rkey, absence == Absence::Magic);
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

    /// Gives up the hold with this cookie on a target of XRC; with the last hold it is destroyed, as any other queue
    /// pair is. Waits until the asynchronous events that were delivered to this holder are acknowledged.
    pub fn release(self: &Arc<Self>, cookie: u64) -> Result<(), Error> {
        match self.holders.leave(cookie) {
            Leaving::Last => self.destroy(),
            Leaving::Another => Ok(()),
            Leaving::First => {
                // The delivered events name this holder.
                self.async_account.wait_acknowledged();
                Ok(())
            }
        }
    }

    /// Withdraws the queue pair from same-host peers until it is modified. Packets still arrive. False if it was not
    /// published.
    pub fn withdraw(&self) -> bool {
        let mut core = self.lock();
        let was_published = core.nic.local.withdraw();
        if was_published {
            self.device().memory.set_queue_pair(self.qpn(), None);
        }
        was_published
    }

    /// Waits until same-host peers have finished all accesses through this queue pair that they began before it was
    /// last modified or withdrawn. EBUSY when a peer does not within ten seconds: it may be stopped.
    pub fn await_readers(&self) -> Result<(), Error> {
        GracePeriod::of_queue_pair(self.qpn()).wait_long().map_err(reader_timeout)
    }

    /// Destroys the queue pair: nothing is sent or received for it any more, its completions are discarded, its type 2
    /// windows are unbound. Waits until delivered asynchronous events are acknowledged, but not for same-host peers:
    /// see [`QueuePair::await_readers`].
    pub fn destroy(self: &Arc<Self>) -> Result<(), Error> {
        self.users.end()?;
        let device = self.device();
        self.send_deferred_ack();
        device.table.remove(self.qpn());
        self.stop();
        if let Some(stage) = self.stage.get() {
            stage.state_changed(QpState::Reset);
            self.forget_stage_work();
        }
        if self.schedule.is_on_ack_list.swap(false, Ordering::Relaxed) {
            match device.rx.try_lock() {
                Some(mut rx) => rx.acks.forget_destroyed(),
                // The next pass does.
                None => {
                    device.has_deferred_acks.store(true, Ordering::SeqCst);
                    device.engine.wake();
                }
            }
        }
        if device.in_flight.can_grant() {
            device.engine.wake_by(Time(0));
        }
        device.numbered_qps.remove(self.qpn());
        device.memory.invalidate_windows_of(self.qpn());
        device.events.withdraw(&self.async_account);
        self.remove_from_users_of_others();
        device.quotas.qp.give_back();
        Ok(())
    }

    /// Sends a deferred ACK: the program has had the message, and after this the peer's retransmissions get no answer.
    pub(crate) fn send_deferred_ack(self: &Arc<Self>) {
        for _ in 0..DEFERRED_ACK_TRIES_MAX {
            let core = self.lock();
            if core.nic.dead || !core.qp.holds_ack() {
                return;
            }
            self.device().after_change(self, core);
            // Another thread may be sending for this queue pair. It sends the ACK before it is done.
            std::thread::yield_now();
        }
    }

    /// Stops all activity, without an event.
    pub(crate) fn stop(&self) {
        let mut core = self.lock();
        core.nic.dead = true;
        let reset = QpAttr { state: QpState::Reset, ..QpAttr::default() };
        let (transport, host) = core.parts(self, None);
        // RESET can be reached from every state.
        let _ = transport.modify(&reset, QpAttrMask::STATE, &host);
        self.update_source(&core);
        self.device().update_in_flight(&mut core);
        self.device().note_modified(self, &mut core);
        // Its entry in the timers is no longer live, and goes with the next sweep.
        self.schedule.timer_at.store(NEVER.0, Ordering::Relaxed);
        self.purge_completions();
    }

    pub(crate) fn strong(&self) -> Arc<QueuePair> {
        self.me.upgrade().expect("a method is running, so somebody holds the queue pair")
    }

    /// Its peer may have changed.
    fn update_source(&self, core: &QpCore) {
        if self.qp_type() != QpType::Ud {
            self.source.set(core.qp.attr().path.map(|path| path.remote));
        }
    }

    fn purge_completions(&self) {
        self.init.send_cq.purge(self.qpn());
        if !Arc::ptr_eq(&self.init.send_cq, &self.init.recv_cq) {
            self.init.recv_cq.purge(self.qpn());
        }
    }

    /// The stage has been reset. Until then another thread may have permitted READs of a table, or completed a request.
    fn forget_stage_work(&self) {
        self.table_keys.clear();
        self.purge_completions();
    }

    fn remove_from_users_of_others(&self) {
        let others = others(&self.pd, &self.init, self.xrcd.as_ref());
        others.into_iter().flatten().for_each(UseCount::remove);
    }

    pub(crate) fn device(&self) -> &Arc<Device> {
        self.pd.device()
    }

    #[inline(always)]
    pub(crate) fn lock(&self) -> Guard<'_, QpCore> {
        self.state.lock()
    }

    #[inline(always)]
    pub(crate) fn lock_alive(&self) -> Result<Guard<'_, QpCore>, Error> {
        let core = self.lock();
        if core.nic.dead { Err(Error::Invalid("the queue pair was destroyed")) } else { Ok(core) }
    }

    /// Whether completions go to that queue; for a target of XRC, whether they could.
    pub(crate) fn completes_to(&self, cq: &Arc<Cq>) -> bool {
        Arc::ptr_eq(&self.init.send_cq, cq)
            || Arc::ptr_eq(&self.init.recv_cq, cq)
            || self.xrcd.as_ref().is_some_and(|xrcd| xrcd.completes_to(cq))
    }
}

impl AsRef<Schedule> for QueuePair {
    #[inline(always)]
    fn as_ref(&self) -> &Schedule {
        &self.schedule
    }
}

/// The callback for pagers when a queue pair's absent memory may be present. It takes no lock that is held while pagers
/// are called.
fn waker_of(qp: Weak<QueuePair>) -> Waker {
    Arc::new(move || {
        if let Some(qp) = qp.upgrade() {
            qp.schedule.wake();
            qp.device().schedule_pass(&qp);
        }
    })
}

/// The callback that has the executor visit a queue pair with work queues in memory.
fn resume_of(qp: Weak<QueuePair>) -> Resume {
    Arc::new(move || {
        if let Some(qp) = qp.upgrade() {
            qp.device().schedule_work_queue(&qp);
        }
    })
}

/// The users of the objects that a queue pair refers to.
fn others<'a>(pd: &'a Pd, init: &'a QpInit, xrcd: Option<&'a Arc<Xrcd>>) -> [Option<&'a UseCount>; 5] {
    let (srq, xrcd) = (init.srq.as_ref().map(|srq| &srq.users), xrcd.map(|xrcd| &xrcd.users));
    [Some(&pd.users), Some(&init.send_cq.users), Some(&init.recv_cq.users), srq, xrcd]
}

/// Checks the objects that it refers to: they belong to the same device, and unreliable connections take no receives
/// from a shared queue (`ibv_create_qp(3)`).
fn check_others(pd: &Pd, init: &QpInit) -> Result<(), Error> {
    let device = pd.device();
    let srq_device = init.srq.as_ref().map(|srq| srq.pd().device());
    first_broken([
        (init.send_cq.belongs_to(device), "send_cq of another device"),
        (init.recv_cq.belongs_to(device), "recv_cq of another device"),
        (srq_device.is_none_or(|other| Arc::ptr_eq(other, device)), "shared receive queue of another device"),
        (init.srq.is_none() || init.qp_type != QpType::Uc, "a shared receive queue for UC"),
        (
            init.srq.as_ref().is_none_or(|srq| !srq.is_extended()),
            "a shared receive queue of XRC for one queue pair",
        ),
        (init.srq.is_none() || init.qp_type.has_receives(), "a shared receive queue for an end of XRC"),
    ])
}

/// Bytes of an element in a work request of other devices.
const SGE_BYTES: u32 = 16;

/// Granted inline data: the space of a work request's elements, if that is more than was requested. rxe grants the
/// same, mlx5 the rest of its blocks of 64 bytes, and `rdma_xclient`, which requests none, relies on it.
fn inline_bytes(cap: &QpCap, limits: &Limits) -> u32 {
    cap.max_inline_data.max((cap.max_send_sge * SGE_BYTES).min(limits.max_inline_data))
}

/// Checks its sizes against the device's limits. With a shared receive queue those of the own one do not count.
fn check_cap(init: &QpInit, limits: &Limits) -> Result<(), Error> {
    let cap = &init.cap;
    let shared = init.srq.is_some() || !init.qp_type.has_receives();
    first_broken([
        (cap.max_send_wr <= limits.max_qp_wr, "max_send_wr above the device's limit"),
        (shared || cap.max_recv_wr <= limits.max_qp_wr, "max_recv_wr above the device's limit"),
        (cap.max_send_sge <= limits.max_sge, "max_send_sge above the device's limit"),
        (shared || cap.max_recv_sge <= limits.max_sge, "max_recv_sge above the device's limit"),
        (cap.max_inline_data <= limits.max_inline_data, "max_inline_data above the device's limit"),
    ])
}

/// EINVAL for the first broken rule.
fn first_broken<const N: usize>(rules: [(bool, &'static str); N]) -> Result<(), Error> {
    match rules.into_iter().find(|(kept, _)| !kept) {
        Some((_, broken)) => Err(Error::Invalid(broken)),
        None => Ok(()),
    }
}
