//! Protection domains, and what is created in them.

use std::sync::Arc;

use terrace_memory::{AccessError, Accessor, Advice};
use terrace_transport::{QpType, Sge};

use crate::address::{AddressVector, Ah};
use crate::cq::Cq;
use crate::device::Device;
use crate::error::Error;
use crate::limits::Life;
use crate::mr::{Mr, MrRequest, Mw, MwKind};
use crate::qp::{QpInit, QueuePair};
use crate::srq::{Srq, SrqInit};
use crate::xrc::Xrcd;

/// A protection domain.
pub struct Pd {
    device: Arc<Device>,
    handle: u32,
    pub(crate) life: Life,
}

impl Pd {
    pub(crate) fn new(device: &Arc<Device>) -> Result<Arc<Pd>, Error> {
        device.quotas.pd.take()?;
        Ok(Arc::new(Pd { device: device.clone(), handle: device.next_number(), life: Life::default() }))
    }

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// A number that no other protection domain of the device has.
    pub fn handle(&self) -> u32 {
        self.handle
    }

    /// Ends the protection domain; EBUSY while anything was created in it and not destroyed.
    pub fn dealloc(&self) -> Result<(), Error> {
        self.life.end()?;
        self.device.quotas.pd.give_back();
        Ok(())
    }

    /// Registers memory. See [`MrRequest`] for the errors.
    pub fn reg_mr(self: &Arc<Self>, request: MrRequest) -> Result<Arc<Mr>, Error> {
        self.life.check()?;
        Mr::register(self, request)
    }

    /// `ibv_advise_mr`. `advice` has the values of `ibv_advise_mr_advice`: 0 to 2; of the flags only 1 (wait until
    /// it is done) has a meaning.
    ///
    /// # Errors
    /// EOPNOTSUPP for another advice; EINVAL for unknown flags or an empty list; ENOENT for an unknown key; EPERM where
    /// the key does not permit it; EFAULT for a range outside of its region, or memory that is not there.
    pub fn advise_mr(&self, advice: u32, flags: u32, sges: &[Sge]) -> Result<(), Error> {
        let advice = match advice {
            0 => Advice::Prefetch,
            1 => Advice::PrefetchWrite,
            2 => Advice::PrefetchNoFault,
            _ => return Err(Error::NotSupported("advice")),
        };
        if flags & !1 != 0 || sges.is_empty() {
            return Err(Error::Invalid("advise_mr flags or list"));
        }
        for sge in sges {
            let advised =
                self.device.memory.advise(self.handle, sge.lkey, sge.addr, u64::from(sge.length), advice);
            advised.map_err(advise_error)?;
        }
        Ok(())
    }

    /// Copies bytes out, from `offset` on in a piece of memory that local work requests may name.
    ///
    /// # Errors
    /// EINVAL for an unknown key, a range that is not within its region, or memory that is gone.
    pub fn copy_out(&self, sge: &Sge, offset: u64, out: &mut [u8]) -> Result<(), Error> {
        let who = Accessor::local(self.handle, 0);
        let copied = self.device.memory.read(who, sge.lkey, sge.addr.wrapping_add(offset), out);
        copied.map_err(|_| Error::Invalid("no memory that local work requests may name"))
    }

    /// Makes a memory window; ENOMEM when the device has as many as it can.
    pub fn alloc_mw(self: &Arc<Self>, kind: MwKind) -> Result<Arc<Mw>, Error> {
        self.life.check()?;
        Mw::new(self, kind)
    }

    /// Makes a shared receive queue; EINVAL for sizes out of range.
    pub fn create_srq(self: &Arc<Self>, init: SrqInit) -> Result<Arc<Srq>, Error> {
        self.life.check()?;
        Srq::new(self, init)
    }

    /// Makes a shared receive queue of XRC, whose receives complete to that queue; EINVAL for sizes out of range.
    pub fn create_xrc_srq(
        self: &Arc<Self>,
        init: SrqInit,
        xrcd: &Arc<Xrcd>,
        cq: &Arc<Cq>,
    ) -> Result<Arc<Srq>, Error> {
        self.life.check()?;
        Srq::extended(self, init, xrcd, cq)
    }

    /// Makes a queue pair in RESET; EINVAL for sizes out of range, ENOMEM when the device has as many as it can.
    /// Targets of XRC are made by [`Xrcd::create_target`].
    pub fn create_qp(self: &Arc<Self>, init: QpInit) -> Result<Arc<QueuePair>, Error> {
        self.life.check()?;
        if init.qp_type == QpType::XrcRecv {
            return Err(Error::Invalid("targets are made in an XRC domain"));
        }
        QueuePair::new(self, init, None)
    }

    /// Makes an address handle; the errors are those of [`Device::resolve`].
    pub fn create_ah(self: &Arc<Self>, av: &AddressVector) -> Result<Arc<Ah>, Error> {
        self.life.check()?;
        Ah::new(self, av)
    }
}

/// As in the man page of `ibv_advise_mr`.
fn advise_error(error: AccessError) -> Error {
    match error {
        AccessError::UnknownKey => Error::NotFound,
        AccessError::WrongPd | AccessError::WrongQp | AccessError::Permission => {
            Error::Permission("the region does not permit the advice")
        }
        AccessError::OutOfRange | AccessError::Fault | AccessError::Device | AccessError::NoSpace => {
            Error::Fault
        }
        AccessError::Misaligned | AccessError::Flush => Error::Invalid("not an answer to advice"),
        AccessError::NotReady | AccessError::Retry => Error::Again,
    }
}
