//! Protection domains.

use std::sync::Arc;

use terrace_memory::{AccessError, Accessor, Advice};
use terrace_transport::Sge;

use crate::device::{Device, Pd};
use crate::error::Error;
use crate::use_count::UseCount;

impl Device {
    /// Makes a protection domain.
    pub fn alloc_pd(self: &Arc<Self>) -> Result<Arc<Pd>, Error> {
        self.check_open()?;
        Pd::new(self)
    }
}

impl Pd {
    pub(crate) fn new(device: &Arc<Device>) -> Result<Arc<Pd>, Error> {
        device.quotas.pd.take()?;
        Ok(Arc::new(Pd { device: device.clone(), handle: device.next_number(), users: UseCount::default() }))
    }

    /// Ends the protection domain; EBUSY while anything was created in it and not destroyed.
    pub fn dealloc(&self) -> Result<(), Error> {
        self.users.end()?;
        self.device.quotas.pd.give_back();
        Ok(())
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
