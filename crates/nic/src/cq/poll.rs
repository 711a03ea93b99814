//! Polling: taking entries, and making progress for a program that finds none.

use std::cell::{RefCell, RefMut};
use std::collections::VecDeque;
use std::sync::atomic::Ordering;

use smallvec::SmallVec;
use terrace_transport::{Time, Wc};

use super::Cq;
use crate::entries::Entry;
use crate::error::Error;

impl Cq {
    /// Passes up to `max` entries to `take`, which must not call verbs, nor panic, and returns how many. When the queue
    /// is empty, the device makes progress first. Fails with `Overrun` when the queue has overrun and is empty.
    #[inline]
    pub fn poll(&self, max: usize, take: &mut impl FnMut(&Wc)) -> Result<usize, Error> {
        match self.poll_waiting(max, take) {
            0 => self.poll_empty(max, take),
            count => Ok(count),
        }
    }

    /// The first half of [`Cq::poll`]: takes entries that wait already. In a caller that calls the halves one by one,
    /// each with a `take` of its own, most entries are taken without a call.
    #[inline(always)]
    pub fn poll_waiting(&self, max: usize, take: &mut impl FnMut(&Wc)) -> usize {
        if self.is_empty() {
            return 0;
        }
        self.take_waiting(max, take)
    }

    /// The second half, if the first one took nothing: makes progress if the queue is empty.
    #[inline(never)]
    pub fn poll_empty(&self, max: usize, take: &mut impl FnMut(&Wc)) -> Result<usize, Error> {
        let bypass = CompletionBypass { cq: self, room: max.min(BYPASSED_MAX), wcs: RefCell::default() };
        let has_entries = self.progress_if_empty(Some(&bypass));
        // Not moved: they were written just now.
        let bypassed = bypass.wcs.borrow();
        let count = bypassed.len();
        if count == 0 {
            return if has_entries { self.take(max, take) } else { self.nothing_yet() };
        }
        bypassed.iter().for_each(&mut *take);
        // An error here recurs at the next poll.
        let rest = if has_entries && max > count { self.take(max - count, take).unwrap_or(0) } else { 0 };
        Ok(count + rest)
    }

    /// Makes progress as [`Cq::poll`] of an empty queue does, also if entries wait: for a program that takes them with
    /// [`Cq::take`].
    pub fn advance(&self) {
        let polls = self.device.note_poll();
        self.device.progress_for(self, polls, None);
    }

    /// [`Cq::poll`] with the time of each entry, by the device's clock; of a queue that keeps no times, 0.
    pub fn poll_timed(&self, max: usize, take: &mut impl FnMut(&Wc, Time)) -> Result<usize, Error> {
        if !self.progress_if_empty(None) {
            return self.nothing_yet();
        }
        let count = self.take_entries(max, |entries, times| match times {
            Some(times) => {
                let times = times.drain(..entries.len());
                entries.iter().zip(times).for_each(|(wc, time)| take(wc, time));
            }
            None => entries.iter().for_each(|wc| take(wc, Time::default())),
        });
        self.taken(count)
    }

    /// The same as [`Cq::poll`] without making progress: for a program that makes progress in another way.
    pub fn take(&self, max: usize, take: &mut impl FnMut(&Wc)) -> Result<usize, Error> {
        self.taken(self.take_waiting(max, take))
    }

    #[inline(always)]
    fn take_waiting(&self, max: usize, take: &mut impl FnMut(&Wc)) -> usize {
        self.take_entries(max, |entries, times| {
            if let Some(times) = times {
                forget_times(times, entries.len());
            }
            entries.iter().for_each(|wc| take(wc));
        })
    }

    /// Makes progress if the queue is empty. Returns whether it has entries then.
    #[inline]
    fn progress_if_empty(&self, bypass: Option<&CompletionBypass<'_>>) -> bool {
        if self.is_empty() {
            let polls = self.device.note_poll();
            self.device.progress_for(self, polls, bypass);
        }
        !self.is_empty()
    }

    /// The result of a poll that has taken so many.
    fn taken(&self, count: usize) -> Result<usize, Error> {
        if count == 0 { self.nothing() } else { Ok(count) }
    }

    fn nothing_yet(&self) -> Result<usize, Error> {
        // The program will poll again at once.
        std::hint::spin_loop();
        self.nothing()
    }

    /// The result of a poll of an empty queue.
    fn nothing(&self) -> Result<usize, Error> {
        // Entries may have come meanwhile, before it overran.
        if self.overrun.load(Ordering::Acquire) && self.is_empty() { Err(Error::Overrun) } else { Ok(0) }
    }

    #[inline(always)]
    fn take_entries(&self, max: usize, take: impl FnOnce(&[Entry], Option<&mut VecDeque<Time>>)) -> usize {
        let mut guard = self.queue.lock();
        let queue = &mut *guard;
        let count = queue.entries.len().min(max);
        take(&queue.entries.as_slice()[..count], queue.times.as_mut());
        queue.entries.forget_first(count);
        queue.announced = queue.announced.saturating_sub(count);
        self.publish_len(queue);
        count
    }
}

#[cold]
#[inline(never)]
fn forget_times(times: &mut VecDeque<Time>, count: usize) {
    times.drain(..count);
}

/// A response, and the send completion that it brings.
const BYPASSED_MAX: usize = 2;

/// A poll of an empty queue: the first completions may go to it without going through the queue.
pub(crate) struct CompletionBypass<'a> {
    cq: &'a Cq,
    room: usize,
    wcs: RefCell<SmallVec<[Wc; BYPASSED_MAX]>>,
}

impl CompletionBypass<'_> {
    /// Where the next completion of that queue goes, if it may bypass the queue: the queue is empty, and no event is to
    /// be raised.
    #[inline]
    pub fn room(&self, cq: &Cq) -> Option<RefMut<'_, SmallVec<[Wc; BYPASSED_MAX]>>> {
        let wcs = self.wcs.borrow_mut();
        let may = std::ptr::eq(cq, self.cq)
            && wcs.len() < self.room
            && cq.is_empty()
            && !cq.overrun.load(Ordering::Acquire)
            && !cq.device.engine.has_sleepers()
            && !cq.is_numbered();
        if may {
            cq.note_bypassed();
        }
        may.then_some(wcs)
    }

    /// Whether completions have bypassed the queue.
    pub fn has_bypassed(&self) -> bool {
        !self.wcs.borrow().is_empty()
    }
}
