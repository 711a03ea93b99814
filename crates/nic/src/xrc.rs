//! Extended reliable connections (IBTA volume 1, annex A14): domains, their shared receive queues, and their targets.
//!
//! An initiator names a shared receive queue with each request, and its target serves any queue of the domain that both
//! belong to. Memory is accessed through the protection domain of the named queue, receive buffers and remote keys
//! alike (as in the patches that gave rxe this service); the target itself has none.

use std::sync::Arc;

use terrace_transport::{QpCap, QpType};

use crate::cq::CqInit;
use crate::device::Device;
use crate::error::Error;
use crate::qp::{QpInit, QueuePair};
use crate::srq::Xrcd;
use crate::use_count::UseCount;

impl Device {
    /// Makes an XRC domain; ENOMEM when the device has as many as it can.
    pub fn open_xrcd(self: &Arc<Self>) -> Result<Arc<Xrcd>, Error> {
        self.check_open()?;
        self.quotas.xrcd.take()?;
        let own = || {
            let pd = self.alloc_pd()?;
            let cq = self.create_cq(CqInit { depth: 1, channel: None, cookie: 0 });
            let cq = cq.inspect_err(|_| _ = pd.dealloc())?;
            Ok((pd, cq))
        };
        let (pd, cq) = own().inspect_err(|_: &Error| self.quotas.xrcd.give_back())?;
        Ok(Arc::new(Xrcd { device: self.clone(), pd, cq, users: UseCount::default() }))
    }
}

impl Xrcd {
    /// Makes a target in RESET; ENOMEM when the device has as many queue pairs as it can. It completes nothing: what it
    /// receives completes to the queues of the shared receive queues.
    pub fn create_target(self: &Arc<Self>, cookie: u64) -> Result<Arc<QueuePair>, Error> {
        self.users.check()?;
        let init = QpInit {
            qp_type: QpType::XrcRecv,
            send_cq: self.cq.clone(),
            recv_cq: self.cq.clone(),
            srq: None,
            cap: QpCap::default(),
            sq_sig_all: false,
            blocks_own_multicast: false,
            raises_events: true,
            cookie,
        };
        QueuePair::new(&self.pd, init, Some(self), None)
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
}
