//! A limit on the memory that accesses under way take, so that no peer determines it.

use std::sync::Arc;

use terrace_memory::Waker;
use terrace_sync::Mutex;

/// The limit, and what is taken of it.
#[derive(Debug)]
pub(crate) struct Quota {
    bytes_max: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    taken_bytes: usize,
    /// Requesters that got nothing.
    waiting: Vec<Waker>,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("State").field("taken_bytes", &self.taken_bytes).finish()
    }
}

impl Quota {
    pub(crate) fn new(bytes_max: usize) -> Arc<Quota> {
        Arc::new(Quota { bytes_max, state: Mutex::default() })
    }

    /// The limit.
    pub(crate) fn bytes_max(&self) -> usize {
        self.bytes_max
    }

    /// Takes `bytes`. `None` when there are not as many; the waker is then called when some are given back.
    pub(crate) fn take(self: &Arc<Quota>, bytes: usize, waker: &Waker) -> Option<Charge> {
        let mut state = self.state.lock();
        if state.taken_bytes + bytes > self.bytes_max {
            if !state.waiting.iter().any(|known| Arc::ptr_eq(known, waker)) {
                state.waiting.push(waker.clone());
            }
            return None;
        }
        state.taken_bytes += bytes;
        Some(Charge { quota: self.clone(), bytes })
    }
}

/// Memory that was taken, until this is dropped.
#[derive(Debug)]
pub(crate) struct Charge {
    quota: Arc<Quota>,
    bytes: usize,
}

impl Drop for Charge {
    fn drop(&mut self) {
        let waiting = {
            let mut state = self.quota.state.lock();
            state.taken_bytes -= self.bytes;
            std::mem::take(&mut state.waiting)
        };
        for waker in waiting {
            waker();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn a_requester_that_got_nothing_is_called_once_when_there_is_some() {
        let quota = Quota::new(10);
        let calls = Arc::new(AtomicUsize::new(0));
        let counted = calls.clone();
        let waker: Waker = Arc::new(move || _ = counted.fetch_add(1, Ordering::Relaxed));
        let charge = quota.take(8, &waker).expect("there is room");
        assert!(quota.take(3, &waker).is_none() && quota.take(4, &waker).is_none());
        let rest = quota.take(2, &waker).expect("there is room");
        assert_eq!(calls.load(Ordering::Relaxed), 0);
        drop(charge);
        assert_eq!(calls.load(Ordering::Relaxed), 1, "one call for each requester");
        drop(rest);
        assert_eq!(calls.load(Ordering::Relaxed), 1, "it does not wait any more");
        assert!(quota.take(10, &waker).is_some());
    }
}
