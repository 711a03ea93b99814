//! The rule that an object in use cannot be destroyed.

use crate::error::Error;
use crate::sync::{AtomicU32, Ordering};

/// Whether an object is alive, and how many other objects refer to it. One word: an object that is being destroyed gets
/// no new users, and one that gets a user is not destroyed.
#[derive(Debug, Default)]
pub(crate) struct UseCount(AtomicU32);

/// The object has ended.
const ENDED: u32 = 1 << 31;

impl UseCount {
    /// Counts another object that refers to this one: EINVAL when this one has ended.
    pub fn add(&self) -> Result<(), Error> {
        let more = |state: u32| (state & ENDED == 0).then(|| state + 1);
        self.0.fetch_update(Ordering::AcqRel, Ordering::Relaxed, more).map(|_| ()).map_err(|_| ended())
    }

    /// Counts an object that refers to all of these, or to none.
    pub fn add_to_all<'a>(all: impl Iterator<Item = &'a UseCount> + Clone) -> Result<(), Error> {
        for (index, one) in all.clone().enumerate() {
            one.add().inspect_err(|_| all.clone().take(index).for_each(UseCount::remove))?;
        }
        Ok(())
    }

    /// Counts one less.
    pub fn remove(&self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }

    /// Ends the object: EBUSY while others refer to it, EINVAL when it has ended before.
    pub fn end(&self) -> Result<(), Error> {
        match self.0.compare_exchange(0, ENDED, Ordering::AcqRel, Ordering::Relaxed) {
            Ok(_) => Ok(()),
            Err(ENDED) => Err(ended()),
            Err(_) => Err(Error::Busy("other objects still refer to it")),
        }
    }

    /// EINVAL when the object has ended.
    pub fn check(&self) -> Result<(), Error> {
        if self.0.load(Ordering::Relaxed) == ENDED { Err(ended()) } else { Ok(()) }
    }
}

fn ended() -> Error {
    Error::Invalid("destroyed before")
}
