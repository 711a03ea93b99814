//! The state of an extended poll, which completion queues have and the functions in `cq_ex` use.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{SystemTime, UNIX_EPOCH};

use lock_api::RawMutex as _;
use terrace_nic::{Cq, Time, Wc};
use terrace_sync::{Mutex, RawMutex};

use crate::errno::{Errno, Result};

/// Entries taken from the NIC at a time.
const BATCH: usize = 16;

/// An entry, and the time of its completion.
pub type Entry = (Wc, Time);

/// The state of an extended poll, from `start_poll` to `end_poll`.
pub struct ExtendedPoll {
    /// Held from a successful `start_poll` to `end_poll`.
    session: RawMutex,
    /// The entry that the read functions return; accessed only while the session is held.
    current: UnsafeCell<Entry>,
    ahead: Mutex<Ahead>,
    /// See [`ExtendedPoll::wall_clock_lead_ns`].
    lead_ns: AtomicU64,
}

// SAFETY: `current` is touched only by the thread that holds the session.
unsafe impl Sync for ExtendedPoll {}

/// Entries taken from the NIC and not yet read.
#[derive(Default)]
struct Ahead {
    entries: [Entry; BATCH],
    next: usize,
    end: usize,
}

impl ExtendedPoll {
    /// No session, and no entries.
    pub fn new() -> ExtendedPoll {
        ExtendedPoll {
            session: RawMutex::INIT,
            current: UnsafeCell::default(),
            ahead: Mutex::new(Ahead::default()),
            lead_ns: AtomicU64::new(0),
        }
    }

    /// Begins a session; waits for the end of another thread's.
    pub fn begin(&self) {
        self.session.lock();
    }

    /// Ends the session, if there is one.
    ///
    /// # Safety
    /// The calling thread has begun it.
    pub unsafe fn end(&self) {
        if self.session.is_locked() {
            // SAFETY: the caller's.
            unsafe { self.session.unlock() };
        }
    }

    /// Steps to the next entry: ENOENT when there is none.
    ///
    /// # Safety
    /// The calling thread holds the session.
    pub unsafe fn advance(&self, cq: &Cq) -> Result<Entry> {
        let mut ahead = self.ahead.lock();
        if ahead.next == ahead.end {
            let mut entries = [Entry::default(); BATCH];
            let mut count = 0;
            let polled = cq.poll_timed(BATCH, &mut |wc, time| {
                entries[count] = (*wc, time);
                count += 1;
            });
            *ahead = Ahead { entries, next: 0, end: count };
            polled?;
            if count == 0 {
                return Err(Errno(libc::ENOENT));
            }
        }
        let entry = ahead.entries[ahead.next];
        ahead.next += 1;
        // SAFETY: the caller's.
        unsafe { self.current.get().write(entry) };
        Ok(entry)
    }

    /// The current entry.
    ///
    /// # Safety
    /// The calling thread holds the session.
    pub unsafe fn current(&self) -> Entry {
        // SAFETY: the caller's.
        unsafe { *self.current.get() }
    }

    /// How far the wall clock is ahead of the device's. It never falls, so that times never go backwards, not even
    /// after the wall clock has been set back.
    pub fn wall_clock_lead_ns(&self, now: impl FnOnce() -> Time) -> u64 {
        let wall_ns = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos() as u64;
        // Read second: a delay between the two makes the lead smaller, never larger than it is.
        let lead_ns = wall_ns.saturating_sub(now().0);
        self.lead_ns.fetch_max(lead_ns, Relaxed).max(lead_ns)
    }

    /// Takes entries that an extended poll left over, for a plain poll. Returns how many.
    pub fn take_prefetched(&self, wanted: usize, mut take: impl FnMut(usize, &Wc)) -> usize {
        let mut ahead = self.ahead.lock();
        let count = wanted.min(ahead.end - ahead.next);
        let first = ahead.next;
        ahead.entries[first..first + count].iter().enumerate().for_each(|(at, (wc, _))| take(at, wc));
        ahead.next += count;
        count
    }

    /// Drops the entries of a queue pair that was reset or destroyed.
    pub fn purge(&self, qpn: u32) {
        let mut ahead = self.ahead.lock();
        let (next, mut kept) = (ahead.next, ahead.next);
        for index in next..ahead.end {
            if ahead.entries[index].0.qpn != qpn {
                ahead.entries[kept] = ahead.entries[index];
                kept += 1;
            }
        }
        ahead.end = kept;
    }
}
