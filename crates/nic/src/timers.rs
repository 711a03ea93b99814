//! Timers of queue pairs.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;

use smallvec::SmallVec;
use terrace_transport::Time;

use crate::schedule::{NEVER, Schedule};
use crate::sync::{AtomicU64, Mutex, Ordering};

/// Entries that were replaced are swept out when there are this many, and twice as many as the last sweep has left.
pub(crate) const SWEEP_ENTRIES_MIN: usize = 1024;

/// Lazy timers. A queue pair has at most one live entry; an entry that fires early, because the deadline moved
/// while it waited, is simply entered again. So restarting the ACK timer costs nothing.
pub(crate) struct Timers<Q> {
    pub(crate) heap: Mutex<Heap<Q>>,
    /// The earliest entry, for a check without the lock.
    next_ns: AtomicU64,
}

pub(crate) struct Heap<Q> {
    pub entries: BinaryHeap<Reverse<Entry<Q>>>,
    /// The number of entries at which replaced ones are swept out.
    sweep_at: usize,
}

pub(crate) struct Entry<Q> {
    at: Time,
    qp: Arc<Q>,
}

impl<Q: AsRef<Schedule>> Default for Timers<Q> {
    fn default() -> Timers<Q> {
        let heap = Heap { entries: BinaryHeap::new(), sweep_at: SWEEP_ENTRIES_MIN };
        Timers { heap: Mutex::new(heap), next_ns: AtomicU64::new(NEVER.0) }
    }
}

impl<Q: AsRef<Schedule>> Timers<Q> {
    /// The earliest entry's time.
    pub fn next(&self) -> Option<Time> {
        let next = Time(self.next_ns.load(Ordering::SeqCst));
        (next != NEVER).then_some(next)
    }

    /// Whether an entry is due: cheap.
    pub fn is_due(&self, now: Time) -> bool {
        self.next_ns.load(Ordering::Relaxed) <= now.0
    }

    /// Schedules the queue pair for `deadline` at the latest. Returns whether it became the earliest entry. Called
    /// under the queue pair's lock.
    pub fn arm(&self, qp: &Arc<Q>, deadline: Time) -> bool {
        let timer_at = &(**qp).as_ref().timer_at;
        if timer_at.load(Ordering::Relaxed) <= deadline.0 {
            return false;
        }
        timer_at.store(deadline.0, Ordering::Relaxed);
        let mut heap = self.heap.lock();
        heap.entries.push(Reverse(Entry { at: deadline, qp: qp.clone() }));
        if heap.entries.len() >= heap.sweep_at {
            heap.entries.retain(|entry| entry.0.is_live());
            heap.sweep_at = SWEEP_ENTRIES_MIN.max(2 * heap.entries.len());
        }
        self.publish(&heap);
        heap.entries.peek().is_some_and(|first| first.0.at == deadline)
    }

    /// Takes the entries that are due. An entry that another one has replaced is discarded.
    pub fn take_due(&self, now: Time) -> SmallVec<[Arc<Q>; 8]> {
        let mut heap = self.heap.lock();
        let mut due = SmallVec::new();
        while heap.entries.peek().is_some_and(|first| first.0.at <= now) {
            let Some(Reverse(entry)) = heap.entries.pop() else { break };
            if entry.is_live() {
                entry.schedule().timer_at.store(NEVER.0, Ordering::Relaxed);
                due.push(entry.qp);
            }
        }
        self.publish(&heap);
        due
    }

    /// Discards everything, when the device closes.
    pub fn clear(&self) {
        let mut heap = self.heap.lock();
        heap.entries.clear();
        self.publish(&heap);
    }

    fn publish(&self, heap: &Heap<Q>) {
        let next = heap.entries.peek().map_or(NEVER, |first| first.0.at);
        self.next_ns.store(next.0, Ordering::SeqCst);
    }
}

impl<Q: AsRef<Schedule>> Entry<Q> {
    fn schedule(&self) -> &Schedule {
        (*self.qp).as_ref()
    }

    /// Whether it is its queue pair's live entry.
    fn is_live(&self) -> bool {
        self.schedule().timer_at.load(Ordering::Relaxed) == self.at.0
    }
}

impl<Q: AsRef<Schedule>> PartialEq for Entry<Q> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl<Q: AsRef<Schedule>> Eq for Entry<Q> {}

impl<Q: AsRef<Schedule>> PartialOrd for Entry<Q> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl<Q: AsRef<Schedule>> Ord for Entry<Q> {
    /// By time, then by number, so that a simulation replays.
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.schedule().qpn).cmp(&(other.at, other.schedule().qpn))
    }
}
