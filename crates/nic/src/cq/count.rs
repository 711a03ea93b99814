//! Counting completions: what WAITs of work queues in memory rely on.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::{CountWaiter, Cq, Queue};
use crate::work_queue::{CompletionCount, Resume};

impl Cq {
    /// The queue's number, by which a WAIT names it. From now on its completions resume WAITs.
    pub fn number(&self) -> u32 {
        let mut is_new = false;
        let number = *self.number.get_or_init(|| {
            is_new = true;
            let draw = || self.device.next_number() & NUMBER_MAX;
            self.device.numbered_cqs.insert(draw, self.me.clone())
        });
        if is_new {
            // A pass that began before may still let completions bypass the queue.
            drop(self.device.rx.lock());
        }
        number
    }

    /// Has an entry that does not fit displace the oldest from now on, instead of stopping the queue pairs. The count of
    /// completions goes on.
    pub fn ignore_overrun(&self) {
        self.queue.lock().ignores_overrun = true;
    }

    /// Completions since the queue was created, taken or not, modulo 2^32.
    pub fn count(&self) -> u32 {
        self.count_with(&self.queue.lock())
    }

    fn count_with(&self, queue: &Queue) -> u32 {
        queue.produced.wrapping_add(self.bypassed.load(Ordering::Relaxed))
    }

    /// Whether the queue has got completion `index`. If it has not, `resume` is called when it has.
    pub(crate) fn wait_for_count(&self, index: u32, resume: &Resume) -> bool {
        let mut queue = self.queue.lock();
        let has_come = has_reached(self.count_with(&queue), index);
        if !has_come {
            // One that was reset at an earlier WAIT waits no longer for that.
            queue.waiters.retain(|waiter| !Arc::ptr_eq(&waiter.resume, resume));
            queue.waiters.push(CountWaiter { index, resume: resume.clone() });
        }
        has_come
    }

    #[cold]
    pub(super) fn resume_waiters(&self, queue: &mut Queue) {
        let count = self.count_with(queue);
        queue.waiters.retain(|waiter| {
            let has_come = has_reached(count, waiter.index);
            if has_come {
                (waiter.resume)();
            }
            !has_come
        });
    }

    /// Notes that a completion bypasses the queue. The caller has the device's receive lock.
    #[inline]
    pub(super) fn note_bypassed(&self) {
        let bypassed = self.bypassed.load(Ordering::Relaxed);
        self.bypassed.store(bypassed.wrapping_add(1), Ordering::Relaxed);
    }

    /// Whether WAITs may wait for it: then no completion bypasses it.
    #[inline]
    pub(super) fn is_numbered(&self) -> bool {
        self.number.get().is_some()
    }
}

impl CompletionCount for Cq {
    fn has_reached(&self, index: u32) -> bool {
        has_reached(self.count(), index)
    }
}

/// Largest number of a completion queue: mlx5's have 24 bits.
const NUMBER_MAX: u32 = 0xff_ffff;

/// Whether a count that wraps is at `index` or less than half of its range past it.
fn has_reached(count: u32, index: u32) -> bool {
    count.wrapping_sub(index) as i32 >= 0
}
