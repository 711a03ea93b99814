//! Byte credits, which the clients of one address share.

use std::collections::VecDeque;
use std::sync::Arc;

use terrace_memory::Waker;
use terrace_sync::Mutex;

/// Byte credits with a FIFO queue of waiters. The waker of a waiter is called when its credits are available.
///
/// Each address has its own credits, so that clients which do not return credits do not affect those of other addresses.
#[derive(Debug)]
pub(crate) struct Credits {
    bytes_max: u64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    used: u64,
    /// The wakers of the waiters, with the bytes that each needs; oldest first.
    waiters: VecDeque<(Waker, u64)>,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("State").field("used", &self.used).field("waiting", &self.waiters.len()).finish()
    }
}

/// Reserved credits, which are returned when this is dropped.
#[derive(Debug)]
pub(crate) struct Reservation {
    credits: Arc<Credits>,
    bytes: u64,
}

impl Credits {
    /// Unreserved credits.
    pub fn new(bytes_max: u64) -> Arc<Credits> {
        Arc::new(Credits { bytes_max, state: Mutex::default() })
    }

    /// Reserves the bytes, at most `bytes_max`. If too few are available after the needs of earlier waiters, queues the
    /// waker, which is called when they are. A waker stays in the queue until the reservation succeeds or is cancelled.
    pub fn reserve(self: &Arc<Credits>, bytes: u64, waker: &Waker) -> Option<Reservation> {
        let bytes = bytes.min(self.bytes_max);
        let mut state = self.state.lock();
        if state.waiters.is_empty() && bytes <= self.bytes_max - state.used {
            state.used += bytes;
            return Some(Reservation { credits: self.clone(), bytes });
        }
        let position = state.waiters.iter().position(|(other, _)| Arc::ptr_eq(other, waker));
        let position = position.unwrap_or_else(|| {
            state.waiters.push_back((waker.clone(), bytes));
            state.waiters.len() - 1
        });
        state.waiters[position].1 = bytes;
        let wanted: u64 = state.waiters.range(..=position).map(|(_, bytes)| bytes).sum();
        if wanted > self.bytes_max - state.used {
            return None;
        }
        state.waiters.remove(position);
        state.used += bytes;
        Some(Reservation { credits: self.clone(), bytes })
    }

    /// Reserves the bytes, if they are available and no waiter is queued.
    pub fn try_reserve(self: &Arc<Credits>, bytes: u64) -> Option<Reservation> {
        let mut state = self.state.lock();
        if !state.waiters.is_empty() || bytes > self.bytes_max - state.used {
            return None;
        }
        state.used += bytes;
        Some(Reservation { credits: self.clone(), bytes })
    }

    /// Removes a waker from the queue, and calls the wakers whose credits are available then.
    pub fn cancel(&self, waker: &Waker) {
        let mut state = self.state.lock();
        if state.waiters.is_empty() {
            return;
        }
        state.waiters.retain(|(other, _)| !Arc::ptr_eq(other, waker));
        self.wake_waiters(state);
    }

    fn release(&self, bytes: u64) {
        let mut state = self.state.lock();
        state.used -= bytes;
        self.wake_waiters(state);
    }

    /// Calls the wakers whose credits are available, without the lock.
    fn wake_waiters(&self, state: terrace_sync::MutexGuard<'_, State>) {
        let (mut free, mut called) = (self.bytes_max - state.used, Vec::new());
        for (waker, bytes) in &state.waiters {
            let Some(left) = free.checked_sub(*bytes) else { break };
            called.push(waker.clone());
            free = left;
        }
        drop(state);
        called.iter().for_each(|waker| waker());
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.credits.release(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    fn counting() -> (Waker, Arc<AtomicUsize>) {
        let called = Arc::new(AtomicUsize::new(0));
        let count = called.clone();
        let waker: Waker = Arc::new(move || _ = count.fetch_add(1, Ordering::Relaxed));
        (waker, called)
    }

    #[test]
    fn waiters_are_served_in_fifo_order() {
        let credits = Credits::new(100);
        let [(greedy, _), (large, large_called), (small, small_called)] = [(); 3].map(|()| counting());
        let all = credits.reserve(100, &greedy).unwrap();
        assert!(credits.reserve(60, &large).is_none());
        assert!(credits.reserve(10, &small).is_none());
        drop(all);
        assert_eq!((large_called.load(Ordering::Relaxed), small_called.load(Ordering::Relaxed)), (1, 1));
        assert!(credits.reserve(80, &greedy).is_none(), "others queued first");
        let reserved = credits.reserve(10, &small);
        assert!(reserved.is_some(), "the credits suffice for both");
        assert!(credits.reserve(60, &large).is_some());
        assert!(credits.try_reserve(1).is_none(), "a waiter is queued");
        credits.cancel(&greedy);
        assert!(credits.try_reserve(90).is_some());
        assert!(credits.try_reserve(91).is_none());
    }

    #[test]
    fn a_cancelled_waiter_does_not_delay_others() {
        let credits = Credits::new(100);
        let [(first, _), (large, _), (small, small_called)] = [(); 3].map(|()| counting());
        let half = credits.reserve(50, &first).unwrap();
        assert!(credits.reserve(1000, &large).is_none(), "the need is capped at all credits");
        assert!(credits.reserve(10, &small).is_none(), "the other waiter is first");
        credits.cancel(&large);
        assert_eq!(small_called.load(Ordering::Relaxed), 1);
        assert!(credits.reserve(10, &small).is_some());
        drop(half);
        assert!(credits.reserve(1000, &large).is_some());
    }
}
