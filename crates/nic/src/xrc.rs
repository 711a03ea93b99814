//! Extended reliable connections (IBTA volume 1, annex A14): domains, their shared receive queues, and their targets.
//!
//! An initiator names a shared receive queue with each request, and its target serves any queue of the domain that both
//! belong to. Memory is accessed through the protection domain of the named queue, receive buffers and remote keys
//! alike (as in the patches that gave rxe this service); the target itself has none.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use smallvec::{SmallVec, smallvec};
use terrace_sync::{Mutex, RwLock};
use terrace_transport::{QpCap, QpType};
use terrace_wire::XRC_SRQN_MAX;

use crate::cq::{Cq, CqInit};
use crate::device::Device;
use crate::error::Error;
use crate::limits::Life;
use crate::pd::Pd;
use crate::qp::{QpInit, QueuePair};
use crate::srq::Srq;

/// An XRC domain: the shared receive queues that a target serves.
pub struct Xrcd {
    device: Arc<Device>,
    /// Required by a target as by any queue pair, and never used: nothing is registered in this domain, ...
    pd: Arc<Pd>,
    /// ... and nothing completes here.
    cq: Arc<Cq>,
    pub(crate) life: Life,
}

impl Device {
    /// Makes an XRC domain; ENOMEM when the device has as many as it can.
    pub fn open_xrcd(self: &Arc<Self>) -> Result<Arc<Xrcd>, Error> {
        self.check_open()?;
        self.quotas.xrcd.take()?;
        let own = || Ok((self.alloc_pd()?, self.create_cq(CqInit { depth: 1, channel: None, cookie: 0 })?));
        let (pd, cq) = own().inspect_err(|_: &Error| self.quotas.xrcd.give_back())?;
        Ok(Arc::new(Xrcd { device: self.clone(), pd, cq, life: Life::default() }))
    }
}

impl Xrcd {
    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Ends the domain; EBUSY while shared receive queues or targets are in it.
    pub fn close(&self) -> Result<(), Error> {
        self.life.end()?;
        self.cq.destroy()?;
        self.pd.dealloc()?;
        self.device.quotas.xrcd.give_back();
        Ok(())
    }

    /// Makes a target in RESET; ENOMEM when the device has as many queue pairs as it can. It completes nothing: what it
    /// receives completes to the queues of the shared receive queues.
    pub fn create_target(self: &Arc<Self>, cookie: u64) -> Result<Arc<QueuePair>, Error> {
        self.life.check()?;
        let init = QpInit {
            qp_type: QpType::XrcRecv,
            send_cq: self.cq.clone(),
            recv_cq: self.cq.clone(),
            srq: None,
            cap: QpCap::default(),
            sq_sig_all: false,
            cookie,
        };
        QueuePair::new(&self.pd, init, Some(self))
    }

    /// Adds a holder to the target of that number: the target lives until [`QueuePair::destroy`] was called for each
    /// holder. EINVAL where the domain has no target of that number.
    pub fn open_target(self: &Arc<Self>, qpn: u32, cookie: u64) -> Result<Arc<QueuePair>, Error> {
        let found = self.device.query_qp_by_number(qpn);
        let found = found.filter(|qp| qp.xrcd().is_some_and(|xrcd| Arc::ptr_eq(xrcd, self)));
        let qp = found.ok_or(Error::Invalid("no target of that number in the XRC domain"))?;
        qp.holders().add(cookie)?;
        Ok(qp)
    }

    /// A shared receive queue of the domain.
    pub(crate) fn srq(self: &Arc<Self>, number: u32) -> Option<Arc<Srq>> {
        let srq = self.device.xrc.srq(number)?;
        srq.is_in(self).then_some(srq)
    }
}

/// A device's shared receive queues of XRC.
#[derive(Default)]
pub(crate) struct XrcTable {
    srqs: RwLock<HashMap<u32, Weak<Srq>>>,
}

impl XrcTable {
    /// Makes a queue under a number of its own, which fits an XRC header.
    pub fn insert(
        &self,
        mut draw: impl FnMut() -> u32,
        make: impl FnOnce(u32) -> Arc<Srq>,
    ) -> Result<Arc<Srq>, Error> {
        let mut srqs = self.srqs.write();
        if srqs.len() >= XRC_SRQN_MAX as usize / 2 {
            return Err(Error::NoMemory("numbers of shared receive queues"));
        }
        let number = loop {
            // 0 in a completion means no such queue.
            let number = draw() & XRC_SRQN_MAX;
            if number != 0 && !srqs.contains_key(&number) {
                break number;
            }
        };
        let srq = make(number);
        srqs.insert(number, Arc::downgrade(&srq));
        Ok(srq)
    }

    pub fn remove(&self, number: u32) {
        self.srqs.write().remove(&number);
    }

    pub fn srq(&self, number: u32) -> Option<Arc<Srq>> {
        self.srqs.read().get(&number)?.upgrade()
    }

    /// Whether receives of a queue in that domain complete to that completion queue.
    pub fn completes(&self, xrcd: &Arc<Xrcd>, cq: &Arc<Cq>) -> bool {
        let srqs = self.srqs.read();
        srqs.values().filter_map(Weak::upgrade).any(|srq| srq.is_in(xrcd) && srq.completes_to(cq))
    }
}

/// The holders of a queue pair, by their cookies, oldest first. All but targets have one holder.
pub(crate) struct Holders(Mutex<HolderList>);

struct HolderList {
    /// Never empty: events that were delivered before the last holder left go to that holder.
    cookies: SmallVec<[u64; 1]>,
    all_gone: bool,
}

/// The position of a leaving holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leaving {
    /// The oldest of several, which events went to.
    First,
    /// Another of several.
    Another,
    /// The only one.
    Last,
}

impl Holders {
    pub fn new(cookie: u64) -> Holders {
        Holders(Mutex::new(HolderList { cookies: smallvec![cookie], all_gone: false }))
    }

    /// The oldest one's cookie, which asynchronous events go to.
    pub fn first(&self) -> u64 {
        self.0.lock().cookies[0]
    }

    /// EINVAL when the last holder has just left.
    fn add(&self, cookie: u64) -> Result<(), Error> {
        let mut list = self.0.lock();
        if list.all_gone {
            return Err(Error::Invalid("the target was destroyed"));
        }
        list.cookies.push(cookie);
        Ok(())
    }

    /// Removes a holder.
    pub fn leave(&self, cookie: u64) -> Leaving {
        let mut list = self.0.lock();
        match list.cookies.iter().position(|other| *other == cookie) {
            Some(index) if list.cookies.len() > 1 => {
                list.cookies.remove(index);
                if index == 0 { Leaving::First } else { Leaving::Another }
            }
            _ => {
                list.all_gone = true;
                Leaving::Last
            }
        }
    }
}
