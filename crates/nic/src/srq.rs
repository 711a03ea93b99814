//! Shared receive queues, and the XRC domains that some of them are in.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};

use terrace_sync::Mutex;
use terrace_transport::{RecvWr, Wc};

use crate::cq::Cq;
use crate::device::Device;
use crate::device::Pd;
use crate::error::Error;
use crate::event_account::EventAccount;
use crate::use_count::UseCount;

/// Parameters of a new shared receive queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SrqInit {
    /// Work requests that it must hold, at least 1.
    pub max_wr: u32,
    /// Scatter/gather elements of a work request.
    pub max_sge: u32,
    /// Ignored at creation, as `ibv_create_srq` has it; `modify` arms it.
    pub limit: u32,
    /// The creator's cookie.
    pub cookie: u64,
}

/// `ibv_srq_attr`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SrqAttr {
    /// Work requests that the queue holds.
    pub max_wr: u32,
    /// Scatter/gather elements of a work request.
    pub max_sge: u32,
    /// The armed limit; 0 when none is armed.
    pub limit: u32,
}

/// A shared receive queue.
pub struct Srq {
    pd: Arc<Pd>,
    me: Weak<Srq>,
    cookie: u64,
    number: u32,
    queue: Mutex<Queue>,
    extended: Option<Extended>,
    pub(crate) users: UseCount,
    pub(crate) async_account: EventAccount,
}

/// The additional attributes of a shared receive queue of XRC.
struct Extended {
    xrcd: Arc<Xrcd>,
    /// The completion queue of its receives, for all targets.
    cq: Arc<Cq>,
}

/// An XRC domain: the shared receive queues that a target serves.
pub struct Xrcd {
    pub(crate) device: Arc<Device>,
    /// Required by a target as by any queue pair, and never used: nothing is registered in this domain, ...
    pub(crate) pd: Arc<Pd>,
    /// ... and nothing completes here.
    pub(crate) cq: Arc<Cq>,
    pub(crate) users: UseCount,
}

impl Xrcd {
    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Ends the domain; EBUSY while shared receive queues or targets are in it.
    pub fn close(&self) -> Result<(), Error> {
        self.users.end()?;
        self.cq.destroy()?;
        self.pd.dealloc()?;
        self.device.quotas.xrcd.give_back();
        Ok(())
    }

    /// A shared receive queue of the domain.
    pub(crate) fn srq(self: &Arc<Self>, number: u32) -> Option<Arc<Srq>> {
        let srq = self.device.xrc.srq(number)?;
        srq.is_in(self).then_some(srq)
    }

    /// Whether receives of one of its queues complete to that completion queue.
    pub(crate) fn completes_to(self: &Arc<Self>, cq: &Arc<Cq>) -> bool {
        self.device.xrc.any(|srq| srq.is_in(self) && srq.completes_to(cq))
    }
}

struct Queue {
    waiting: VecDeque<RecvWr>,
    attr: SrqAttr,
}

impl Pd {
    /// Makes a shared receive queue; EINVAL for sizes out of range.
    pub fn create_srq(self: &Arc<Self>, init: SrqInit) -> Result<Arc<Srq>, Error> {
        self.users.check()?;
        Srq::new(self, init)
    }

    /// Makes a shared receive queue of XRC, whose receives complete to that queue; EINVAL for sizes out of range.
    pub fn create_xrc_srq(
        self: &Arc<Self>,
        init: SrqInit,
        xrcd: &Arc<Xrcd>,
        cq: &Arc<Cq>,
    ) -> Result<Arc<Srq>, Error> {
        self.users.check()?;
        Srq::extended(self, init, xrcd, cq)
    }
}

impl Srq {
    fn new(pd: &Arc<Pd>, init: SrqInit) -> Result<Arc<Srq>, Error> {
        let device = pd.device();
        Srq::check_sizes(pd, &init)?;
        device.quotas.srq.take()?;
        pd.users.add().inspect_err(|_| device.quotas.srq.give_back())?;
        Ok(Arc::new_cyclic(|me| Srq::make(pd, init, device.next_number(), None, me)))
    }

    /// A queue of an XRC domain. EINVAL if domain or completion queue are another device's.
    fn extended(pd: &Arc<Pd>, init: SrqInit, xrcd: &Arc<Xrcd>, cq: &Arc<Cq>) -> Result<Arc<Srq>, Error> {
        let device = pd.device();
        Srq::check_sizes(pd, &init)?;
        xrcd.users.check()?;
        if !Arc::ptr_eq(xrcd.device(), device) || !cq.belongs_to(device) {
            return Err(Error::Invalid("XRC domain or completion queue of another device"));
        }
        device.quotas.srq.take()?;
        let others = [&pd.users, &xrcd.users, &cq.users];
        UseCount::add_to_all(others.into_iter()).inspect_err(|_| device.quotas.srq.give_back())?;
        let extended = Extended { xrcd: xrcd.clone(), cq: cq.clone() };
        let made = device.xrc.insert(
            || device.next_number(),
            |number| Arc::new_cyclic(|me| Srq::make(pd, init, number, Some(extended), me)),
        );
        made.inspect_err(|_| {
            others.into_iter().for_each(UseCount::remove);
            device.quotas.srq.give_back();
        })
    }

    fn make(pd: &Arc<Pd>, init: SrqInit, number: u32, extended: Option<Extended>, me: &Weak<Srq>) -> Srq {
        let attr = SrqAttr { max_wr: init.max_wr, max_sge: init.max_sge, limit: 0 };
        Srq {
            pd: pd.clone(),
            me: me.clone(),
            cookie: init.cookie,
            number,
            queue: Mutex::new(Queue { waiting: VecDeque::new(), attr }),
            extended,
            users: UseCount::default(),
            async_account: EventAccount::default(),
        }
    }

    fn check_sizes(pd: &Pd, init: &SrqInit) -> Result<(), Error> {
        let device = pd.device();
        if !(1..=device.limits().max_srq_wr).contains(&init.max_wr) {
            return Err(Error::Invalid("shared receive queue depth out of range"));
        }
        if init.max_sge > device.limits().max_srq_sge {
            return Err(Error::Invalid("too many scatter/gather elements for a shared receive queue"));
        }
        Ok(())
    }

    /// The creator's cookie.
    pub fn cookie(&self) -> u64 {
        self.cookie
    }

    /// The queue's number; `ibv_get_srq_num`.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Whether it belongs to XRC: targets serve it, and no queue pair has it.
    pub fn is_extended(&self) -> bool {
        self.extended.is_some()
    }

    /// Whether it belongs to that XRC domain.
    pub(crate) fn is_in(&self, xrcd: &Arc<Xrcd>) -> bool {
        self.extended.as_ref().is_some_and(|extended| Arc::ptr_eq(&extended.xrcd, xrcd))
    }

    /// Whether it belongs to XRC, and its receives complete to that queue.
    pub(crate) fn completes_to(&self, cq: &Arc<Cq>) -> bool {
        self.extended.as_ref().is_some_and(|extended| Arc::ptr_eq(&extended.cq, cq))
    }

    /// Completes one of its receives that a target has taken, and returns whether that raised an event.
    pub(crate) fn complete(&self, wc: Wc) -> bool {
        self.extended.as_ref().is_some_and(|extended| extended.cq.push(wc))
    }

    /// The protection domain.
    pub fn pd(&self) -> &Arc<Pd> {
        &self.pd
    }

    /// The queue's sizes, and the limit while it is armed.
    pub fn query(&self) -> SrqAttr {
        self.queue.lock().attr
    }

    /// Changes the size, arms the limit, or both. EINVAL when a value is out of range, the limit is above the
    /// size, or more work requests wait than would fit.
    pub fn modify(&self, max_wr: Option<u32>, limit: Option<u32>) -> Result<(), Error> {
        self.users.check()?;
        let mut queue = self.queue.lock();
        let mut attr = queue.attr;
        if let Some(max_wr) = max_wr {
            if !(1..=self.pd.device().limits().max_srq_wr).contains(&max_wr) {
                return Err(Error::Invalid("shared receive queue depth out of range"));
            }
            if queue.waiting.len() > max_wr as usize {
                return Err(Error::Invalid("more work requests wait than would fit"));
            }
            attr.max_wr = max_wr;
        }
        if let Some(limit) = limit {
            if limit > attr.max_wr {
                return Err(Error::Invalid("the limit is above the size of the queue"));
            }
            attr.limit = limit;
        }
        queue.attr = attr;
        // A limit above the number of waiting requests is reached at once (IBTA volume 1, 10.2.9.1).
        let reached = limit.is_some() && self.take_limit_event(&mut queue);
        drop(queue);
        self.raise_limit_reached(reached);
        Ok(())
    }

    /// Posts work requests. Requests before a bad one stay posted; the error has its index and the reason: ENOMEM when
    /// the queue is full, EINVAL when it has too many elements.
    pub fn post(&self, wrs: impl IntoIterator<Item = Result<RecvWr, Error>>) -> Result<(), (usize, Error)> {
        self.users.check().map_err(|error| (0, error))?;
        let mut queue = self.queue.lock();
        for (index, wr) in wrs.into_iter().enumerate() {
            wr.and_then(|wr| queue.push(wr)).map_err(|error| (index, error))?;
        }
        Ok(())
    }

    /// Destroys the queue: EBUSY while queue pairs use it. Targets of XRC do not hold it, and refuse requests for it
    /// from now on. The completions of its receives are discarded. Waits until delivered events are acknowledged.
    pub fn destroy(&self) -> Result<(), Error> {
        self.users.end()?;
        self.queue.lock().waiting.clear();
        let device = self.pd.device();
        if let Some(Extended { xrcd, cq }) = &self.extended {
            device.xrc.remove(self.number);
            cq.purge_receives_of(self.number);
            xrcd.users.remove();
            cq.users.remove();
        }
        device.events.withdraw(&self.async_account);
        device.quotas.srq.give_back();
        self.pd.users.remove();
        Ok(())
    }

    /// The oldest work request, for a queue pair that needs one.
    pub(crate) fn take(&self) -> Option<RecvWr> {
        let mut queue = self.queue.lock();
        let wr = queue.waiting.pop_front();
        let reached = self.take_limit_event(&mut queue);
        drop(queue);
        self.raise_limit_reached(reached);
        wr
    }

    /// Takes a work request back that no message has used: it is the oldest again. The program counts it as posted, so
    /// there is room.
    pub(crate) fn put_back(&self, wr: RecvWr) {
        self.queue.lock().waiting.push_front(wr);
    }

    /// Whether the limit is armed and reached; disarms it.
    fn take_limit_event(&self, queue: &mut Queue) -> bool {
        let reached = queue.waiting.len() < queue.attr.limit as usize;
        if reached {
            queue.attr.limit = 0;
        }
        reached
    }

    fn raise_limit_reached(&self, reached: bool) {
        if reached && let Some(me) = self.me.upgrade() {
            self.pd.device().raise_limit_reached(me);
        }
    }
}

impl Queue {
    fn push(&mut self, wr: RecvWr) -> Result<(), Error> {
        if wr.sges.len() > self.attr.max_sge as usize {
            return Err(Error::Invalid(
                "more scatter/gather elements than the shared receive queue has room for",
            ));
        }
        if self.waiting.len() >= self.attr.max_wr as usize {
            return Err(Error::NoMemory("the shared receive queue is full"));
        }
        self.waiting.push_back(wr);
        Ok(())
    }
}
