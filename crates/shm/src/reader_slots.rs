//! Reader slots: one epoch for each connection by which a process accesses another process's memory.
//!
//! The epoch is odd while a copy runs. It lies in memory of the copying process, and the owner of the copied memory
//! reads it: before the owner takes a region away, it withdraws the region's record, and waits until each odd epoch
//! that concerns the region has changed ([`GracePeriod`]). Beside the epoch is a hazard pointer: the pages of the owner
//! that the copy accesses. So a long copy, by a process that was stopped in the middle of it, blocks only changes
//! of those pages. Beside the hazard pointer is the protection domain of the region: the addresses of regions that are files
//! are offsets in them, and one number names a page of each. Beside both is the number of the key table slot that holds the local end of the copy,
//! if the copying process reads that slot without a lock: a change of that slot waits for the epoch in the same manner
//! ([`wait_for_own_readers`]).
//!
//! ```text
//!   the copying process                 the owner
//!   hazard = pages, epoch = odd         record = withdrawn
//!   -- full fence --                    -- full fence --
//!   the record is unchanged?            reads the epoch: odd, and the hazard names these pages?
//!     copies                            waits until it has changed, or its process is gone
//!   epoch = even
//! ```
//! Either the copying process sees that the record is withdrawn, or the owner sees that the epoch is odd. A process
//! that dies in mid-copy leaves its epoch odd; the watcher of its socket drops its [`PeerReaders`]. A process that is
//! stopped in mid-copy leaves its epoch odd for as long: no thread may wait for it with a contended lock held, or for
//! longer than [`READER_LIMIT`].

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use terrace_hostmem::HostRange;
use terrace_sync::{Mutex, RwLock, back_off};

use crate::reader_line::{EpochGuard, Line, add_line, odd_epochs};
use crate::reader_list::ReaderList;
use crate::segment::{AtomicNumbers, Others, Segment};

/// Reader slots that a process has for one other process.
const SLOTS: usize = 1 << 14;
/// Each slot is on a cache line of its own. The first line holds how many were ever used.
const STRIDE: usize = size_of::<Line>();
const SEGMENT_BYTES: usize = (SLOTS + 1) * STRIDE;

/// After this time the log names the process that is waited for.
const LOG_AFTER: Duration = Duration::from_secs(1);
/// Longest wait for a process in mid-copy. Copies take microseconds, but a stopped process may never continue.
const READER_LIMIT: Duration = Duration::from_secs(10);

/// The reader slots of this process for one other process.
#[derive(Debug)]
pub struct ReaderSlots {
    segment: Segment,
    free: Mutex<Vec<u32>>,
}

impl ReaderSlots {
    /// No slot is in use.
    ///
    /// # Errors
    /// When the system has no descriptors left.
    pub fn new() -> io::Result<Arc<ReaderSlots>> {
        let segment = Segment::create(c"terrace-reader-slots", SEGMENT_BYTES, Others::Read)?;
        let slots = Arc::new(ReaderSlots { segment, free: Mutex::default() });
        OWN.add(Arc::downgrade(&slots))?;
        Ok(slots)
    }

    /// To be sent to the other process.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.segment.file()
    }

    /// A slot for a connection to the other process's queue pair `qpn`; `None` when all are in use.
    pub fn take(self: &Arc<Self>, qpn: u32) -> Option<ReaderSlot> {
        let used = &self.segment.words(0, 1)[0];
        let mut free = self.free.lock();
        let index = free.pop().or_else(|| add_line(used, SLOTS))?;
        line_of(&self.segment, index as usize).set_queue_pair(qpn);
        Some(ReaderSlot { slots: self.clone(), index })
    }
}

impl Drop for ReaderSlots {
    fn drop(&mut self) {
        OWN.change(|own| own.retain(|slots| slots.strong_count() > 0));
    }
}

// SAFETY: atomic integers in C's order.
unsafe impl AtomicNumbers for Line {}

/// The cache line of a slot.
#[inline(always)]
fn line_of(segment: &Segment, index: usize) -> &Line {
    segment.numbers((index + 1) * STRIDE)
}

/// The reader slot of one connection.
#[derive(Debug)]
pub struct ReaderSlot {
    slots: Arc<ReaderSlots>,
    index: u32,
}

impl ReaderSlot {
    /// Makes the epoch odd until the returned value is dropped: what is read meanwhile in the other process's records
    /// of these pages, which are of a region of protection domain `domain`, stays true.
    #[inline(always)]
    pub(crate) fn enter(&mut self, domain: u32, pages: HostRange) -> EpochGuard<'_> {
        self.enter_for(None, domain, pages)
    }

    /// The same, and what is read meanwhile in key table slot `slot` of this process stays true, too, if there is one.
    #[inline(always)]
    pub fn enter_for(&mut self, slot: Option<u32>, domain: u32, pages: HostRange) -> EpochGuard<'_> {
        line_of(&self.slots.segment, self.index as usize).enter(slot, domain, pages)
    }
}

impl Drop for ReaderSlot {
    fn drop(&mut self) {
        self.slots.free.lock().push(self.index);
    }
}

/// The reader slots of another process that may access this one's memory. Grace periods include them until this is
/// dropped.
#[derive(Debug)]
pub struct PeerReaders {
    watched: Arc<Watched>,
}

#[derive(Debug)]
struct Watched {
    segment: Segment,
    pid: i32,
    gone: AtomicBool,
}

/// Other processes, which copy from or to this process's memory.
static PEERS: ReaderList<Arc<Watched>> =
    ReaderList::of(RwLock::new(Vec::new()), AtomicUsize::new(0), AtomicBool::new(false));
/// This process, which copies from or to its own memory at the local end.
static OWN: ReaderList<Weak<ReaderSlots>> =
    ReaderList::of(RwLock::new(Vec::new()), AtomicUsize::new(0), AtomicBool::new(false));

impl PeerReaders {
    /// Takes the descriptor of [`ReaderSlots::file`] from process `pid`. That process may see records only after this.
    ///
    /// # Errors
    /// `InvalidData` when it is something else; otherwise the system's.
    pub fn admit(file: OwnedFd, pid: i32) -> io::Result<PeerReaders> {
        let segment = Segment::open(file, SEGMENT_BYTES, false)?;
        let watched = Arc::new(Watched { segment, pid, gone: AtomicBool::new(false) });
        PEERS.add(watched.clone())?;
        Ok(PeerReaders { watched })
    }
}

impl Drop for PeerReaders {
    fn drop(&mut self) {
        // First: a grace period may be waiting for it with a copy of the list.
        self.watched.gone.store(true, Ordering::SeqCst);
        PEERS.change(|readers| readers.retain(|other| !Arc::ptr_eq(other, &self.watched)));
    }
}

/// A grace period: it is over when all accesses by other processes have ended that may have seen what was withdrawn
/// before it began.
#[derive(Debug, Default)]
#[must_use = "accesses may be under way until it is over"]
pub struct GracePeriod {
    readers: Vec<Reader>,
}

/// A process in the middle of an access.
#[derive(Debug)]
struct Reader {
    watched: Arc<Watched>,
    index: usize,
    /// Its epoch, as it was.
    seen: u32,
}

impl Reader {
    fn is_done(&self) -> bool {
        line_of(&self.watched.segment, self.index).has_left(self.seen)
            || self.watched.gone.load(Ordering::SeqCst)
    }
}

/// A process has not ended its access in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[error("process {pid} of this host, which may be stopped, is in the middle of an access")]
pub struct ReaderTimeout {
    /// The process.
    pub pid: i32,
}

impl GracePeriod {
    /// For accesses to these pages.
    pub fn of_pages(pages: HostRange) -> GracePeriod {
        GracePeriod::begin(|line| line.is_for_pages(pages))
    }

    /// For accesses to these pages of regions of a protection domain.
    pub fn of_region(domain: u32, pages: HostRange) -> GracePeriod {
        GracePeriod::begin(|line| line.is_for_domain(domain) && line.is_for_pages(pages))
    }

    /// For accesses through a queue pair of this process.
    pub fn of_queue_pair(qpn: u32) -> GracePeriod {
        GracePeriod::begin(|line| line.is_for_queue_pair(qpn))
    }

    fn begin(concerns: impl Fn(&Line) -> bool) -> GracePeriod {
        let mut readers = Vec::new();
        for watched in PEERS.all_now() {
            for (index, seen) in odd_epochs_of(&watched.segment, &concerns) {
                readers.push(Reader { watched: watched.clone(), index, seen });
            }
        }
        GracePeriod { readers }
    }

    /// Whether it is over. Does not wait.
    pub fn is_over(&mut self) -> bool {
        self.readers.retain(|reader| !reader.is_done());
        self.readers.is_empty()
    }

    /// Waits until it is over. The caller must hold no contended lock.
    ///
    /// # Errors
    /// When it is not over in time.
    pub fn wait(&mut self, limit: Duration) -> Result<(), ReaderTimeout> {
        let (mut looks, mut deadline) = (0, None);
        while !self.is_over() {
            looks += 1;
            back_off(looks);
            let now = Instant::now();
            if now >= *deadline.get_or_insert(now + limit) {
                return self
                    .readers
                    .first()
                    .map_or(Ok(()), |reader| Err(ReaderTimeout { pid: reader.watched.pid }));
            }
        }
        Ok(())
    }

    /// Waits for `READER_LIMIT`, 10 s, at most. After a second the log names the process that it waits for.
    ///
    /// # Errors
    /// As for [`GracePeriod::wait`].
    pub fn wait_long(&mut self) -> Result<(), ReaderTimeout> {
        let Err(ReaderTimeout { pid }) = self.wait(LOG_AFTER) else { return Ok(()) };
        tracing::warn!(
            "process {pid} of this host is in the middle of an access to this one's memory, and does not go on (is it stopped?): \
             waiting for it, {} s at most",
            READER_LIMIT.as_secs()
        );
        self.wait(READER_LIMIT - LOG_AFTER)
    }
}

/// Waits until no copy of this process uses what it may have read before this call in that key table slot, of any
/// device.
pub fn wait_for_own_readers(slot: u32) {
    for slots in OWN.all_now() {
        let Some(slots) = slots.upgrade() else { continue };
        for (index, seen) in odd_epochs_of(&slots.segment, |line| line.is_for_slot(slot)) {
            let mut looks = 0;
            while !line_of(&slots.segment, index).has_left(seen) {
                looks += 1;
                back_off(looks);
            }
        }
    }
}

/// The index and the value of every epoch of a process that is odd now and whose line `concerns` selects.
fn odd_epochs_of(segment: &Segment, concerns: impl Fn(&Line) -> bool) -> impl Iterator<Item = (usize, u32)> {
    odd_epochs(&segment.words(0, 1)[0], SLOTS, |index| line_of(segment, index), concerns)
}

/// In the child after `fork`: other processes access the parent's memory, not the child's, and the reader slots are the
/// parent's.
///
/// # Safety
/// No thread of this process is in the middle of an access. [`wait_for_own_readers`] no longer waits for one, and users
/// of this crate free what such an access reads after that wait.
pub unsafe fn forget_readers() {
    PEERS.forget();
    OWN.forget();
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;
    use terrace_hostmem::PAGE_BYTES;

    use crate::reader_line::{HAZARD_COUNT_BITS, HAZARD_COUNT_MAX, is_hazard_for};

    /// Two pages.
    const PAGES: HostRange = HostRange { addr: (5 << 12) + 1, len: 4096 };
    const DOMAIN: u32 = 3;
    const PATIENCE: Duration = Duration::from_secs(10);

    fn sent(slots: &ReaderSlots) -> OwnedFd {
        slots.file().try_clone_to_owned().expect("a descriptor")
    }

    #[test]
    fn what_is_withdrawn_is_not_in_use_once_the_wait_is_over() {
        let slots = ReaderSlots::new().expect("made");
        let _readers = PeerReaders::admit(sent(&slots), 1).expect("mapped");
        // The "record" says which of the two numbers may be touched.
        let (record, cells) = (AtomicU64::new(0), [AtomicU64::new(0), AtomicU64::new(0)]);
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                let mut slot = slots.take(7).expect("a slot");
                let (record, cells, stop) = (&record, &cells, &stop);
                scope.spawn(move || {
                    while !stop.load(Ordering::Relaxed) {
                        let _guard = slot.enter(DOMAIN, PAGES);
                        let chosen = record.load(Ordering::Relaxed) as usize;
                        cells[chosen].fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
            for round in 0..20_000 {
                record.store((round + 1) % 2, Ordering::Relaxed);
                let mut grace = match round % 2 {
                    0 => GracePeriod::of_pages(HostRange { addr: PAGES.addr + 4096, len: 1 }),
                    _ => GracePeriod::of_queue_pair(7),
                };
                grace.wait(PATIENCE).expect("nobody is stopped");
                let quiet = &cells[(round % 2) as usize];
                let before = quiet.load(Ordering::Relaxed);
                (0..50).for_each(|_| std::hint::spin_loop());
                assert_eq!(quiet.load(Ordering::Relaxed), before, "round {round}");
            }
            stop.store(true, Ordering::Relaxed);
        });
    }

    #[test]
    fn a_reader_that_is_gone_is_not_waited_for() {
        let slots = ReaderSlots::new().expect("made");
        let readers = PeerReaders::admit(sent(&slots), 1).expect("mapped");
        let mut slot = slots.take(7).expect("a slot");
        // As if its process had died in mid-copy.
        let guard = slot.enter(DOMAIN, PAGES);
        let mut grace = GracePeriod::of_pages(PAGES);
        assert_eq!(grace.wait(Duration::from_millis(5)), Err(ReaderTimeout { pid: 1 }));
        drop(readers);
        assert_eq!(grace.wait(PATIENCE), Ok(()));
        // This process lives on.
        drop(guard);
    }

    #[test]
    fn who_stops_in_mid_copy_is_waited_for_by_those_alone_who_want_the_same_pages() {
        // Other tests of this process copy elsewhere.
        const PAGES: HostRange = HostRange { addr: (500 << 12) + 1, len: 4096 };
        let slots = ReaderSlots::new().expect("made");
        let _readers = PeerReaders::admit(sent(&slots), 1).expect("mapped");
        let mut slot = slots.take(7).expect("a slot");
        let guard = slot.enter(DOMAIN, PAGES);
        let pages = |addr, len| GracePeriod::of_pages(HostRange { addr, len }).is_over();
        assert!(pages(PAGES.addr - 4097, 4096) && pages(PAGES.addr + (2 << 12), 4096) && pages(0, 0));
        assert!(!pages(0, PAGES.addr) && !pages(PAGES.addr + PAGES.len, 1) && !pages(0, u64::MAX));
        assert!(GracePeriod::of_queue_pair(8).is_over() && !GracePeriod::of_queue_pair(7).is_over());
        let region = |domain, addr| GracePeriod::of_region(domain, HostRange { addr, len: 1 }).is_over();
        assert!(!region(DOMAIN, PAGES.addr), "the region itself");
        assert!(
            region(DOMAIN + 1, PAGES.addr) && region(DOMAIN, PAGES.addr - 4097),
            "another domain, another page"
        );
        let mut grace = GracePeriod::of_pages(PAGES);
        assert!(!grace.is_over());
        drop(guard);
        // A later access has seen the withdrawal.
        let _again = slot.enter(DOMAIN, PAGES);
        assert!(grace.is_over());
    }

    #[test]
    fn pages_that_are_too_many_to_be_counted_are_waited_for() {
        // Far above the pages of other tests.
        const PAGES: HostRange = HostRange { addr: 1 << 45, len: HAZARD_COUNT_MAX * PAGE_BYTES };
        let slots = ReaderSlots::new().expect("made");
        let _readers = PeerReaders::admit(sent(&slots), 1).expect("mapped");
        let mut slot = slots.take(7).expect("a slot");
        let is_waited_for = |addr| !GracePeriod::of_pages(HostRange { addr, len: 1 }).is_over();
        for len in [PAGES.len - PAGE_BYTES, PAGES.len, PAGES.len + 1, 1 << 44] {
            let _guard = slot.enter(DOMAIN, HostRange { addr: PAGES.addr, len });
            assert!(is_waited_for(PAGES.addr) && is_waited_for(PAGES.addr + len - 1), "{len}");
            assert!(!is_waited_for(PAGES.addr - 1), "{len}");
        }
    }

    #[test]
    fn hazards_that_make_no_sense_do_no_harm() {
        for hazard in [0, 1, u64::MAX, u64::MAX << HAZARD_COUNT_BITS, (1 << HAZARD_COUNT_BITS) - 1] {
            for (addr, len) in [(0, 0), (0, u64::MAX), (u64::MAX, u64::MAX), (1 << 47, 1 << 47)] {
                let _ = is_hazard_for(hazard, HostRange { addr, len });
            }
        }
    }

    #[test]
    fn slots_are_used_again() {
        let slots = ReaderSlots::new().expect("made");
        let (first, second) = (slots.take(7).expect("a slot"), slots.take(7).expect("a slot"));
        assert_eq!((first.index, second.index), (0, 1));
        drop(first);
        assert_eq!(slots.take(7).expect("a slot").index, 0);
        let all: Vec<_> = std::iter::from_fn(|| slots.take(7)).collect();
        assert_eq!(all.len(), SLOTS - 1);
        assert!(slots.take(7).is_none());
    }
}
