//! Byte credits that the clients of one address share.

use std::collections::VecDeque;
use std::sync::Arc;

use terrace_memory::Waker;
use terrace_sync::Mutex;

/// Byte credits. A taker that finds too few queues up, and its waker is called when its turn in the queue comes.
///
/// Each address has its own: credits that its clients do not return are not missing to others.
#[derive(Debug)]
pub(crate) struct Room {
    bytes_max: u64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    used: u64,
    /// The wakers of waiting takers with the bytes that each needs; oldest first.
    line: VecDeque<(Waker, u64)>,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("State").field("used", &self.used).field("waiting", &self.line.len()).finish()
    }
}

/// Credits that were taken; returned when this is dropped.
#[derive(Debug)]
pub(crate) struct Share {
    room: Arc<Room>,
    bytes: u64,
}

impl Room {
    pub fn new(bytes_max: u64) -> Arc<Room> {
        Arc::new(Room { bytes_max, state: Mutex::default() })
    }

    /// Takes so many bytes, or all there are if that is less, unless another taker has waited longer. If too few are
    /// free, the waker is called when they are; it keeps its place in the queue until it has taken them or has left.
    pub fn take(self: &Arc<Room>, bytes: u64, waker: &Waker) -> Option<Share> {
        let bytes = bytes.min(self.bytes_max);
        let mut state = self.state.lock();
        if state.line.is_empty() && bytes <= self.bytes_max - state.used {
            state.used += bytes;
            return Some(Share { room: self.clone(), bytes });
        }
        let place = state.line.iter().position(|(other, _)| Arc::ptr_eq(other, waker));
        let place = place.unwrap_or_else(|| {
            state.line.push_back((waker.clone(), bytes));
            state.line.len() - 1
        });
        state.line[place].1 = bytes;
        let wanted: u64 = state.line.range(..=place).map(|(_, bytes)| bytes).sum();
        if wanted > self.bytes_max - state.used {
            return None;
        }
        state.line.remove(place);
        state.used += bytes;
        Some(Share { room: self.clone(), bytes })
    }

    /// Takes bytes for a taker that cannot wait.
    pub fn take_now(self: &Arc<Room>, bytes: u64) -> Option<Share> {
        let mut state = self.state.lock();
        if !state.line.is_empty() || bytes > self.bytes_max - state.used {
            return None;
        }
        state.used += bytes;
        Some(Share { room: self.clone(), bytes })
    }

    /// Removes a waker from the queue. Takers behind it may be next then.
    pub fn leave(&self, waker: &Waker) {
        let mut state = self.state.lock();
        if state.line.is_empty() {
            return;
        }
        state.line.retain(|(other, _)| !Arc::ptr_eq(other, waker));
        self.call(state);
    }

    fn give_back(&self, bytes: u64) {
        let mut state = self.state.lock();
        state.used -= bytes;
        self.call(state);
    }

    /// Calls the wakers whose credits are free, without the lock.
    fn call(&self, state: terrace_sync::MutexGuard<'_, State>) {
        let (mut free, mut called) = (self.bytes_max - state.used, Vec::new());
        for (waker, bytes) in &state.line {
            let Some(left) = free.checked_sub(*bytes) else { break };
            called.push(waker.clone());
            free = left;
        }
        drop(state);
        called.iter().for_each(|waker| waker());
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.room.give_back(self.bytes);
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
    fn whoever_waits_longest_comes_first() {
        let room = Room::new(100);
        let [(greedy, _), (large, large_called), (small, small_called)] = [(); 3].map(|()| counting());
        let all = room.take(100, &greedy).unwrap();
        assert!(room.take(60, &large).is_none());
        assert!(room.take(10, &small).is_none());
        drop(all);
        assert_eq!((large_called.load(Ordering::Relaxed), small_called.load(Ordering::Relaxed)), (1, 1));
        assert!(room.take(80, &greedy).is_none(), "others have waited longer");
        let his = room.take(10, &small);
        assert!(his.is_some(), "there is enough for both");
        assert!(room.take(60, &large).is_some());
        assert!(room.take_now(1).is_none(), "somebody waits");
        room.leave(&greedy);
        assert!(room.take_now(90).is_some());
        assert!(room.take_now(91).is_none());
    }

    #[test]
    fn who_leaves_makes_way() {
        let room = Room::new(100);
        let [(first, _), (large, _), (small, small_called)] = [(); 3].map(|()| counting());
        let half = room.take(50, &first).unwrap();
        assert!(room.take(1000, &large).is_none(), "all there is, at most");
        assert!(room.take(10, &small).is_none(), "behind the other");
        room.leave(&large);
        assert_eq!(small_called.load(Ordering::Relaxed), 1);
        assert!(room.take(10, &small).is_some());
        drop(half);
        assert!(room.take(1000, &large).is_some());
    }
}
