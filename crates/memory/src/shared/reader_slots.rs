//! Who is copying: one word for each connection by which a process reaches into another one's memory.
//!
//! The word is odd while a copy runs. It lies in memory of the process that copies, and the one that is reached into reads it: before it
//! takes a region away it withdraws the region's record, and then waits for each odd word to move on that concerns it ([`GracePeriod`]).
//! Beside the word is a hazard pointer: the pages of the other process that the copy is about. So a copy that takes long, because its
//! process was stopped in the middle of it, holds up nobody but who wants those pages. Beside that is the number of the
//! slot of the key table in which the copying process has its own end of the copy, if it only looks there ([`Slot`](crate::table::Slot)):
//! whoever changes that slot does as the other process does.
//!
//! ```text
//!   who copies                          who takes away
//!   hazard = pages, word = odd          record = withdrawn
//!   -- full fence --                    -- full fence --
//!   the record is as it was?            reads the word: odd, and the hazard is about these pages?
//!     copies                            waits until it has changed, or its owner is gone
//!   word = even
//! ```
//! Either the copy sees that the record is withdrawn, or the other one sees that the word is odd. A process that dies in
//! mid-copy leaves its word odd; whoever watches its socket says that it is gone. One that is stopped in mid-copy leaves it odd for as
//! long: nobody may wait for it with a lock held that others want, and nobody waits longer than [`READER_LIMIT`].

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use terrace_sync::wait_a_little;
use terrace_sync::{Mutex, RwLock};

use super::handshake;
use super::segment::{Others, Segment};
use crate::range::{HostRange, PAGE_BYTES};

/// Words that a process has for one other.
const WORDS: usize = 1 << 14;
/// Each on a cache line of its own. The first line holds how many were ever used.
const STRIDE: usize = 64;
const SEGMENT_BYTES: usize = (WORDS + 1) * STRIDE;
/// Beside a word: none of the slots of this process.
const NO_SLOT: u32 = u32::MAX;
/// Where on its cache line a word's hazard pointer is, and the number of the other process's queue pair.
const HAZARD_AT: usize = 8;
const QPN_AT: usize = 16;
/// How many pages a hazard pointer can name: the lower bits, below the number of the first page.
const HAZARD_COUNT_BITS: u32 = 16;

/// Whom one waits for is named in the log after this time.
const SAY_AFTER: Duration = Duration::from_secs(1);
/// Longest wait for a process that is in the middle of a copy. Copies take microseconds; a process that was stopped may take for ever.
pub const READER_LIMIT: Duration = Duration::from_secs(10);

/// The words of this process towards one other.
#[derive(Debug)]
pub struct ReaderSlots {
    segment: Segment,
    free: Mutex<Vec<u32>>,
}

impl ReaderSlots {
    /// None is in use.
    ///
    /// # Errors
    /// When the system has no descriptors left.
    pub fn new() -> io::Result<Arc<ReaderSlots>> {
        let segment = Segment::create(c"terrace-hands", SEGMENT_BYTES, Others::Read)?;
        let hands = Arc::new(ReaderSlots { segment, free: Mutex::default() });
        OWN.add(Arc::downgrade(&hands))?;
        Ok(hands)
    }

    /// To be sent to the other process.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.segment.file()
    }

    /// A word for a connection to the other process's queue pair `qpn`; `None` when there are no more.
    pub fn take(self: &Arc<Self>, qpn: u32) -> Option<ReaderSlot> {
        let used = &self.segment.words(0, 1)[0];
        let mut free = self.free.lock();
        let index = free.pop().or_else(|| {
            let next = used.load(Ordering::Relaxed);
            // Sequentially consistent, as the words are: whoever is to see the word odd must look that far.
            ((next as usize) < WORDS).then(|| used.store(next + 1, Ordering::SeqCst)).map(|()| next)
        })?;
        // Seen by whoever sees the word raised.
        Line::of(&self.segment, index as usize).qpn.store(qpn, Ordering::Relaxed);
        Some(ReaderSlot { hands: self.clone(), index })
    }
}

impl Drop for ReaderSlots {
    fn drop(&mut self) {
        OWN.change(|own| own.retain(|hands| hands.strong_count() > 0));
    }
}

/// A connection's word, and what is beside it on its cache line.
struct Line<'a> {
    word: &'a AtomicU32,
    place: &'a AtomicU32,
    hazard: &'a AtomicU64,
    qpn: &'a AtomicU32,
}

impl Line<'_> {
    #[inline(always)]
    fn of(segment: &Segment, index: usize) -> Line<'_> {
        let at = (index + 1) * STRIDE;
        let words = segment.words(at, 2);
        let (hazard, qpn) = (&segment.quads(at + HAZARD_AT, 1)[0], &segment.words(at + QPN_AT, 1)[0]);
        Line { word: &words[0], place: &words[1], hazard, qpn }
    }
}

/// The pages of a range, as a hazard pointer has them.
#[inline(always)]
fn hazard_of(range: HostRange) -> u64 {
    let first = range.addr / PAGE_BYTES;
    let count = (range.addr % PAGE_BYTES).saturating_add(range.len).div_ceil(PAGE_BYTES);
    first << HAZARD_COUNT_BITS | count & ((1 << HAZARD_COUNT_BITS) - 1)
}

/// Whether a hazard pointer, which another process may have written as it likes, names a page of a range.
fn is_hazard_for(hazard: u64, range: HostRange) -> bool {
    let (first, count) = (hazard >> HAZARD_COUNT_BITS, hazard & ((1 << HAZARD_COUNT_BITS) - 1));
    // A page of it at least, whatever was written.
    let end = (first + count.max(1)).saturating_mul(PAGE_BYTES);
    first.saturating_mul(PAGE_BYTES) < range.addr.saturating_add(range.len) && range.addr < end
}

/// The word of one connection.
#[derive(Debug)]
pub struct ReaderSlot {
    hands: Arc<ReaderSlots>,
    index: u32,
}

impl ReaderSlot {
    /// From now on, until what this returns is dropped, what is read in the other process's records of these pages stays as it is.
    #[inline(always)]
    pub(super) fn reach(&mut self, pages: HostRange) -> Reaching<'_> {
        self.reach_from(NO_SLOT, pages)
    }

    /// The same, and what is read in that slot of this process stays as it is, too.
    #[inline(always)]
    pub(crate) fn reach_from(&mut self, slot: u32, pages: HostRange) -> Reaching<'_> {
        let Line { word, place, hazard, .. } = Line::of(&self.hands.segment, self.index as usize);
        // Seen by whoever sees the word.
        place.store(slot, Ordering::Relaxed);
        hazard.store(hazard_of(pages), Ordering::Relaxed);
        Reaching { word, even: handshake::raise(word), slot }
    }
}

impl Drop for ReaderSlot {
    fn drop(&mut self) {
        self.hands.free.lock().push(self.index);
    }
}

/// A copy may run.
pub(crate) struct Reaching<'a> {
    word: &'a AtomicU32,
    even: u32,
    slot: u32,
}

impl Reaching<'_> {
    /// The slot of this process that stays as it is.
    #[inline(always)]
    pub(crate) fn slot(&self) -> Option<u32> {
        (self.slot != NO_SLOT).then_some(self.slot)
    }
}

impl Drop for Reaching<'_> {
    #[inline]
    fn drop(&mut self) {
        handshake::lower(self.word, self.even);
    }
}

/// The words of another process that may reach into this one. They count until this is dropped.
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

/// Who may be copying. Of the process, not of a device: what pages a region knows nothing of devices.
struct List<T> {
    all: RwLock<Vec<T>>,
    /// How many they are, for a look without the lock.
    count: AtomicUsize,
    /// In a child: nobody will ever unlock it.
    is_lost: AtomicBool,
}

/// Others, out of this process's memory or into it.
static VISITORS: List<Arc<Watched>> = List::new();
/// This process, out of its own memory or into it.
static OWN: List<Weak<ReaderSlots>> = List::new();

impl<T: Clone> List<T> {
    const fn new() -> List<T> {
        List { all: RwLock::new(Vec::new()), count: AtomicUsize::new(0), is_lost: AtomicBool::new(false) }
    }

    fn add(&self, one: T) -> io::Result<()> {
        if self.is_lost.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        self.change(|all| all.push(one));
        Ok(())
    }

    fn change(&self, change: impl FnOnce(&mut Vec<T>)) {
        if self.is_lost.load(Ordering::Relaxed) {
            return;
        }
        let mut all = self.all.write();
        change(&mut all);
        self.count.store(all.len(), Ordering::SeqCst);
    }

    /// All who may have seen what was withdrawn before this call.
    #[inline]
    fn all_now(&self) -> Vec<T> {
        handshake::withdrawn();
        match self.count.load(Ordering::SeqCst) {
            0 => Vec::new(),
            // Taken out of the lock: one that goes away while it is waited for needs that to say so.
            _ => self.all.read().clone(),
        }
    }

    /// In the child after `fork`. Another thread may have had the lock in the parent; then nobody is in the list any more.
    fn forget(&self) {
        match self.all.try_write() {
            Some(mut all) => all.clear(),
            None => self.is_lost.store(true, Ordering::Relaxed),
        }
        self.count.store(0, Ordering::SeqCst);
    }
}

impl PeerReaders {
    /// Takes the descriptor that [`ReaderSlots::file`] gave at the other end, which is process `pid`. Only after this may the other process
    /// see records.
    ///
    /// # Errors
    /// `InvalidData` when it is something else; otherwise the system's.
    pub fn admit(file: OwnedFd, pid: i32) -> io::Result<PeerReaders> {
        let segment = Segment::open(file, SEGMENT_BYTES, false)?;
        let watched = Arc::new(Watched { segment, pid, gone: AtomicBool::new(false) });
        VISITORS.add(watched.clone())?;
        Ok(PeerReaders { watched })
    }
}

impl Drop for PeerReaders {
    fn drop(&mut self) {
        // First: somebody may be waiting for it with the list in hand.
        self.watched.gone.store(true, Ordering::SeqCst);
        VISITORS.change(|visitors| visitors.retain(|other| !Arc::ptr_eq(other, &self.watched)));
    }
}

/// The end of all accesses by other processes that may have seen what was withdrawn before it began: what is called so where readers
/// take no locks.
#[derive(Debug, Default)]
#[must_use = "accesses may be under way until it is over"]
pub struct GracePeriod {
    readers: Vec<Reader>,
}

/// A process that is in the middle of an access.
#[derive(Debug)]
struct Reader {
    watched: Arc<Watched>,
    index: usize,
    /// Its word, as it was.
    seen: u32,
}

impl Reader {
    fn is_done(&self) -> bool {
        let word = Line::of(&self.watched.segment, self.index).word;
        handshake::has_moved(word, self.seen) || self.watched.gone.load(Ordering::SeqCst)
    }
}

/// Somebody has not come to the end of an access in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[error("process {pid} of this host, which may be stopped, is in the middle of an access")]
pub struct StillReached {
    /// Whoever it is.
    pub pid: i32,
}

impl GracePeriod {
    /// Of accesses to these pages.
    pub fn of_pages(pages: HostRange) -> GracePeriod {
        GracePeriod::begin(|line| is_hazard_for(line.hazard.load(Ordering::Relaxed), pages))
    }

    /// Of accesses by way of a queue pair of this process.
    pub fn of_queue_pair(qpn: u32) -> GracePeriod {
        GracePeriod::begin(|line| line.qpn.load(Ordering::Relaxed) == qpn)
    }

    fn begin(concerns: impl Fn(&Line<'_>) -> bool) -> GracePeriod {
        let mut readers = Vec::new();
        for watched in VISITORS.all_now() {
            for (index, seen) in raised_words(&watched.segment, &concerns) {
                readers.push(Reader { watched: watched.clone(), index, seen });
            }
        }
        GracePeriod { readers }
    }

    /// Whether it is over. Never waits.
    pub fn is_over(&mut self) -> bool {
        self.readers.retain(|reader| !reader.is_done());
        self.readers.is_empty()
    }

    /// Waits until it is over. Not for those who hold a lock that others want.
    ///
    /// # Errors
    /// When it is not over in time.
    pub fn wait(&mut self, limit: Duration) -> Result<(), StillReached> {
        let (mut looks, mut deadline) = (0, None);
        while !self.is_over() {
            looks += 1;
            wait_a_little(looks);
            let now = Instant::now();
            if now >= *deadline.get_or_insert(now + limit) {
                return self
                    .readers
                    .first()
                    .map_or(Ok(()), |reader| Err(StillReached { pid: reader.watched.pid }));
            }
        }
        Ok(())
    }

    /// The same for [`READER_LIMIT`], and says in the log whom it waits for if that takes long.
    ///
    /// # Errors
    /// The same.
    pub fn wait_long(&mut self) -> Result<(), StillReached> {
        let Err(StillReached { pid }) = self.wait(SAY_AFTER) else { return Ok(()) };
        tracing::warn!(
            "process {pid} of this host is in the middle of an access to this one's memory, and does not go on (is it stopped?): \
             waiting for it, {} s at most",
            READER_LIMIT.as_secs()
        );
        self.wait(READER_LIMIT - SAY_AFTER)
    }
}

/// Waits until this process does not look at what it may have seen before this call in that slot, of whichever device.
pub(crate) fn wait_for_own_readers(slot: u32) {
    for hands in OWN.all_now() {
        let Some(hands) = hands.upgrade() else { continue };
        // If the place is a later one already, what the word was raised for is over.
        for (index, seen) in raised_words(&hands.segment, |line| line.place.load(Ordering::Relaxed) == slot) {
            let mut looks = 0;
            while !handshake::has_moved(Line::of(&hands.segment, index).word, seen) {
                looks += 1;
                wait_a_little(looks);
            }
        }
    }
}

/// Every word that is odd now, and what is beside which is what `concerns`: its index, and what it was.
fn raised_words(
    segment: &Segment,
    concerns: impl Fn(&Line<'_>) -> bool,
) -> impl Iterator<Item = (usize, u32)> {
    // Another process may write any number there.
    let used = (segment.words(0, 1)[0].load(Ordering::SeqCst) as usize).min(WORDS);
    (0..used).filter_map(move |index| {
        let line = Line::of(segment, index);
        // What is beside it is read afterwards: if that is of a later access already, the one that the word was raised for is over.
        let seen = handshake::raised(line.word)?;
        concerns(&line).then_some((index, seen))
    })
}

/// In the child after `fork`: whoever reaches into the parent does not reach into the child, and the child's hands are the parent's.
pub(crate) fn forget_readers() {
    VISITORS.forget();
    OWN.forget();
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two pages.
    const PAGES: HostRange = HostRange { addr: (5 << 12) + 1, len: 4096 };
    const PATIENCE: Duration = Duration::from_secs(10);

    fn sent(hands: &ReaderSlots) -> OwnedFd {
        hands.file().try_clone_to_owned().expect("a descriptor")
    }

    #[test]
    fn what_is_withdrawn_is_not_in_use_once_the_wait_is_over() {
        let hands = ReaderSlots::new().expect("made");
        let _visitor = PeerReaders::admit(sent(&hands), 1).expect("mapped");
        // The "record" says which of the two numbers may be touched.
        let (record, cells) = (AtomicU64::new(0), [AtomicU64::new(0), AtomicU64::new(0)]);
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                let mut hand = hands.take(7).expect("a word");
                let (record, cells, stop) = (&record, &cells, &stop);
                scope.spawn(move || {
                    while !stop.load(Ordering::Relaxed) {
                        let _reaching = hand.reach(PAGES);
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
    fn a_visitor_that_is_gone_is_not_waited_for() {
        let hands = ReaderSlots::new().expect("made");
        let visitor = PeerReaders::admit(sent(&hands), 1).expect("mapped");
        let mut hand = hands.take(7).expect("a word");
        // It dies in mid-copy.
        let reaching = hand.reach(PAGES);
        let mut grace = GracePeriod::of_pages(PAGES);
        assert_eq!(grace.wait(Duration::from_millis(5)), Err(StillReached { pid: 1 }));
        drop(visitor);
        assert_eq!(grace.wait(PATIENCE), Ok(()));
        // This process does not.
        drop(reaching);
    }

    #[test]
    fn who_stops_in_mid_copy_is_waited_for_by_those_alone_who_want_the_same_pages() {
        // Other tests of this process copy elsewhere.
        const PAGES: HostRange = HostRange { addr: (500 << 12) + 1, len: 4096 };
        let hands = ReaderSlots::new().expect("made");
        let _visitor = PeerReaders::admit(sent(&hands), 1).expect("mapped");
        let mut hand = hands.take(7).expect("a word");
        let reaching = hand.reach(PAGES);
        let pages = |addr, len| GracePeriod::of_pages(HostRange { addr, len }).is_over();
        assert!(pages(PAGES.addr - 4097, 4096) && pages(PAGES.addr + (2 << 12), 4096) && pages(0, 0));
        assert!(!pages(0, PAGES.addr) && !pages(PAGES.addr + PAGES.len, 1) && !pages(0, u64::MAX));
        assert!(GracePeriod::of_queue_pair(8).is_over() && !GracePeriod::of_queue_pair(7).is_over());
        let mut grace = GracePeriod::of_pages(PAGES);
        assert!(!grace.is_over());
        drop(reaching);
        // What begins later has seen what was withdrawn.
        let _again = hand.reach(PAGES);
        assert!(grace.is_over());
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
    fn words_are_used_again() {
        let hands = ReaderSlots::new().expect("made");
        let (first, second) = (hands.take(7).expect("a word"), hands.take(7).expect("a word"));
        assert_eq!((first.index, second.index), (0, 1));
        drop(first);
        assert_eq!(hands.take(7).expect("a word").index, 0);
        let all: Vec<_> = std::iter::from_fn(|| hands.take(7)).collect();
        assert_eq!(all.len(), WORDS - 1);
        assert!(hands.take(7).is_none());
    }
}
