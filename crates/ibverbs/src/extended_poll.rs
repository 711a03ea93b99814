//! The state of a completion queue's extended poll, for the functions in `cq_ex`.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{SystemTime, UNIX_EPOCH};

use lock_api::RawMutex as _;
use terrace_nic::{Cq, Time, Wc};
use terrace_sync::{Mutex, RawMutex};

use crate::errno::{Errno, Result};

/// Entries that one poll of the NIC takes at most.
const BATCH: usize = 16;

/// An entry, and the time of its completion.
pub type Entry = (Wc, Time);

/// The state of an extended poll, from `start_poll` to `end_poll`.
pub struct ExtendedPoll {
    /// Locked from a successful `start_poll` to `end_poll`.
    session: RawMutex,
    /// The entry that the read functions return; accessed only while the session is held.
    current: UnsafeCell<Entry>,
    prefetched: Mutex<Prefetched>,
    /// Entries that one poll of the NIC takes.
    batch: usize,
    /// See [`ExtendedPoll::wall_clock_lead_ns`].
    lead_ns: AtomicU64,
}

// SAFETY: only the thread that holds the session accesses `current`.
unsafe impl Sync for ExtendedPoll {}

/// Entries taken from the NIC and not yet read.
#[derive(Default)]
struct Prefetched {
    entries: [Entry; BATCH],
    next: usize,
    end: usize,
}

impl ExtendedPoll {
    /// A state without a session and entries. Of a queue that raises events, entries stay in the NIC until they are read:
    /// arming the queue looks for such there.
    pub fn new(raises_events: bool) -> ExtendedPoll {
        ExtendedPoll {
            batch: if raises_events { 1 } else { BATCH },
            session: RawMutex::INIT,
            current: UnsafeCell::default(),
            prefetched: Mutex::new(Prefetched::default()),
            lead_ns: AtomicU64::new(0),
        }
    }

    /// Begins a session after the end of another thread's session.
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

    /// Advances to the next entry: ENOENT if there is none.
    ///
    /// # Safety
    /// The calling thread holds the session.
    pub unsafe fn advance(&self, cq: &Cq) -> Result<Entry> {
        let mut prefetched = self.prefetched.lock();
        if prefetched.next == prefetched.end {
            let mut entries = [Entry::default(); BATCH];
            let mut count = 0;
            let polled = cq.poll_timed(self.batch, &mut |wc, time| {
                entries[count] = (*wc, time);
                count += 1;
            });
            *prefetched = Prefetched { entries, next: 0, end: count };
            polled?;
            if count == 0 {
                return Err(Errno(libc::ENOENT));
            }
        }
        let entry = prefetched.entries[prefetched.next];
        prefetched.next += 1;
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

    /// The lead of the wall clock over the device's clock. It never decreases, so that times are monotonic even after
    /// the wall clock has been set back.
    pub fn wall_clock_lead_ns(&self, now: impl FnOnce() -> Time) -> u64 {
        let wall_ns = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos() as u64;
        // The device's clock is read second: a delay between the two reads makes the lead smaller, never larger.
        let lead_ns = wall_ns.saturating_sub(now().0);
        self.lead_ns.fetch_max(lead_ns, Relaxed).max(lead_ns)
    }

    /// Takes entries that an extended poll has prefetched, for a plain poll. Returns their number.
    pub fn take_prefetched(&self, wanted: usize, mut take: impl FnMut(usize, &Wc)) -> usize {
        let mut prefetched = self.prefetched.lock();
        let count = wanted.min(prefetched.end - prefetched.next);
        let first = prefetched.next;
        prefetched.entries[first..first + count].iter().enumerate().for_each(|(at, (wc, _))| take(at, wc));
        prefetched.next += count;
        count
    }

    /// Drops the entries of a queue pair that was reset or destroyed, or of a destroyed shared receive queue.
    pub fn purge(&self, is_gone: impl Fn(&Wc) -> bool) {
        let mut prefetched = self.prefetched.lock();
        let (next, mut kept) = (prefetched.next, prefetched.next);
        for index in next..prefetched.end {
            if !is_gone(&prefetched.entries[index].0) {
                prefetched.entries[kept] = prefetched.entries[index];
                kept += 1;
            }
        }
        prefetched.end = kept;
    }
}
