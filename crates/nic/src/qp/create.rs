//! New queue pairs: their parameters, and the checks of these.

use std::sync::{Arc, OnceLock, Weak};

use terrace_memory::{PendingChanges, Waker};
use terrace_shm::PrefetchHint;
use terrace_sync::BiasedMutex;
use terrace_transport::{Qp, QpCap, QpConfig, QpType};

use super::{NicState, QpCore, QpInit, QueuePair, RxPath};
use crate::device::Pd;
use crate::error::Error;
use crate::event_account::EventAccount;
use crate::holders::Holders;
use crate::keys::{KeySet, LastKeys};
use crate::limits::Limits;
use crate::local::QpLocal;
use crate::schedule::Schedule;
use crate::source::SourceFilter;
use crate::srq::Xrcd;
use crate::tx_token::TxToken;
use crate::use_count::UseCount;
use crate::window::window_bytes;
use crate::work_queue::{EntriesState, Resume, WorkQueues, WorkQueuesInit};

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
                    budget: None,
                    counted_bytes: 0,
                    granted_bytes: 0,
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
            changes: PendingChanges::default(),
            prefetch_hint: PrefetchHint::default(),
            async_account: EventAccount::default(),
            work_queues: queues.map(|queues| Box::new(WorkQueues::new(queues, resume_of(me.clone())))),
            stage: OnceLock::new(),
            users: UseCount::default(),
        }
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
pub(super) fn others<'a>(
    pd: &'a Pd,
    init: &'a QpInit,
    xrcd: Option<&'a Arc<Xrcd>>,
) -> [Option<&'a UseCount>; 5] {
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
