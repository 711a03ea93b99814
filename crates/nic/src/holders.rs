//! The holders of a queue pair: a target of XRC may be opened several times.

use smallvec::{SmallVec, smallvec};
use terrace_sync::Mutex;

use crate::error::Error;

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
    pub fn add(&self, cookie: u64) -> Result<(), Error> {
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
