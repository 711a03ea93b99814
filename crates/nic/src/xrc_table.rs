//! The numbers of the shared receive queues of XRC.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use terrace_sync::RwLock;
use terrace_wire::XRC_SRQN_MAX;

use crate::error::Error;

/// A device's shared receive queues of XRC.
pub(crate) struct XrcTable<S> {
    srqs: RwLock<HashMap<u32, Weak<S>>>,
}

impl<S> Default for XrcTable<S> {
    fn default() -> XrcTable<S> {
        XrcTable { srqs: RwLock::default() }
    }
}

impl<S> XrcTable<S> {
    /// Makes a queue under a number of its own, which fits an XRC header.
    pub fn insert(
        &self,
        mut draw: impl FnMut() -> u32,
        make: impl FnOnce(u32) -> Arc<S>,
    ) -> Result<Arc<S>, Error> {
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

    pub fn srq(&self, number: u32) -> Option<Arc<S>> {
        self.srqs.read().get(&number)?.upgrade()
    }

    /// Whether any of the queues is like that.
    pub fn any(&self, is_like_that: impl FnMut(Arc<S>) -> bool) -> bool {
        self.srqs.read().values().filter_map(Weak::upgrade).any(is_like_that)
    }
}
