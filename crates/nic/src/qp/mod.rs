//! Queue pairs: the transport's queue pair with the objects around it.
//!
//! | module | content |
//! |---|---|
//! | `create` | parameters and their checks; a new queue pair |
//! | `posting` | work requests on their way to the send queue, or to a protocol before it |
//! | `destroy` | the end of a queue pair |

mod create;
mod destroy;
pub(crate) mod posting;

use std::sync::{Arc, OnceLock, Weak};

use terrace_memory::{Absence, PendingChanges, Waker};
use terrace_shm::PrefetchHint;
use terrace_sync::{BiasedMutex, Guard};
use terrace_transport::{Qp, QpAttr, QpAttrMask, QpCap, QpCounters, QpState, QpType, SendWr, Wc};

use crate::cq::Cq;
use crate::device::{Device, Pd};
use crate::error::Error;
use crate::event_account::EventAccount;
use crate::holders::Holders;
use crate::in_flight::InFlightBudget;
use crate::keys::{KeySet, LastKeys};
use crate::local::QpLocal;
use crate::schedule::Schedule;
use crate::source::SourceFilter;
use crate::srq::{Srq, Xrcd};
use crate::tx_token::TxToken;
use crate::use_count::UseCount;
use crate::work_queue::{EntriesState, WorkQueues};

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
    /// Pending changes of the peer.
    pub(crate) changes: PendingChanges,
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
    /// The budget of its peer, while it has a path.
    pub budget: Option<Arc<InFlightBudget>>,
    /// Bytes of it that the budget counts as in flight.
    pub counted_bytes: u64,
    /// Bytes of the grant that it has to send, see [`InFlightBudget`]; 0 without one.
    pub granted_bytes: u64,
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

impl QueuePair {
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

    /// Whether its packets go to the network now: its peer is on another host, or has not been found on this one.
    pub fn sends_to_network(&self) -> bool {
        !self.lock().nic.local.has_tx_ring()
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
    /// Behind RESET and ERR, pagers change no memory for the peer any more. Same-host peers may still be in the middle of accesses that
    /// were permitted before: see [`QueuePair::await_readers`].
    pub fn modify(self: &Arc<Self>, attr: &QpAttr, mask: QpAttrMask) -> Result<(), Error> {
        let device = self.device();
        if mask.contains(QpAttrMask::STATE) && matches!(attr.state, QpState::Reset | QpState::Err) {
            self.send_deferred_ack();
        }
        if mask.contains(QpAttrMask::STATE) && attr.state == QpState::Err {
            device.receive_arrived();
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
        device.choose_budget(self, &mut core);
        device.note_modified(self, &mut core);
        device.note_work_queues_modified(self, &mut core);
        let state = core.qp.state();
        device.after_change(self, core);
        if matches!(state, QpState::Reset | QpState::Err) {
            self.changes.cancel();
        }
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

    /// Sets what this queue pair's peer gets where it READs absent memory of the region; until RESET.
    pub fn set_absence(&self, rkey: u32, absence: Absence) {
        self.magic.set(rkey, absence == Absence::Magic);
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
