//! Who is copying: one word for each connection by which a process reaches into another one's memory.
//!
//! The word is odd while a copy runs. It lies in memory of the process that copies, and the one that is reached into reads it: before it
//! takes a region away it withdraws the region's record, and then waits for each odd word to move on. Beside the word is the number of the
//! slot of the key table in which the copying process has its own end of the copy, if it only looks there ([`Slot`](crate::table::Slot)):
//! whoever changes that slot does as the other process does.
//!
//! ```text
//!   who copies                          who takes away
//!   word = odd                          record = withdrawn
//!   -- full fence --                    -- full fence --
//!   reads the record, copies            reads the word: odd? waits until it has changed, or its owner is gone
//!   word = even
//! ```
//! Either the copy sees that the record is withdrawn, or the other one sees that the word is odd. A process that dies in
//! mid-copy leaves its word odd; whoever watches its socket says that it is gone.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::{Mutex, RwLock};
use terrace_sync::wait_a_little;

use super::handshake;
use super::segment::{Others, Segment};

/// Words that a process has for one other.
const WORDS: usize = 1 << 14;
/// Each on a cache line of its own. The first line holds how many were ever used.
const STRIDE: usize = 64;
const SEGMENT_BYTES: usize = (WORDS + 1) * STRIDE;
/// Beside a word: none of the slots of this process.
const NO_SLOT: u32 = u32::MAX;

/// The words of this process towards one other.
#[derive(Debug)]
pub struct Hands {
    segment: Segment,
    free: Mutex<Vec<u32>>,
}

impl Hands {
    /// None is in use.
    ///
    /// # Errors
    /// When the system has no descriptors left.
    pub fn new() -> io::Result<Arc<Hands>> {
        let segment = Segment::create(c"terrace-hands", SEGMENT_BYTES, Others::Read)?;
        let hands = Arc::new(Hands { segment, free: Mutex::default() });
        OWN.add(Arc::downgrade(&hands))?;
        Ok(hands)
    }

    /// To be sent to the other process.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.segment.file()
    }

    /// A word for a connection; `None` when there are no more.
    pub fn take(self: &Arc<Self>) -> Option<Hand> {
        let used = &self.segment.words(0, 1)[0];
        let mut free = self.free.lock();
        let index = free.pop().or_else(|| {
            let next = used.load(Ordering::Relaxed);
            // Sequentially consistent, as the words are: whoever is to see the word odd must look that far.
            ((next as usize) < WORDS).then(|| used.store(next + 1, Ordering::SeqCst)).map(|()| next)
        })?;
        Some(Hand { hands: self.clone(), index })
    }
}

impl Drop for Hands {
    fn drop(&mut self) {
        OWN.change(|own| own.retain(|hands| hands.strong_count() > 0));
    }
}

/// A connection's word, and what is beside it.
#[inline(always)]
fn words(segment: &Segment, index: usize) -> [&AtomicU32; 2] {
    let words = segment.words((index + 1) * STRIDE, 2);
    [&words[0], &words[1]]
}

/// The word of one connection.
#[derive(Debug)]
pub struct Hand {
    hands: Arc<Hands>,
    index: u32,
}

impl Hand {
    /// From now on, until what this returns is dropped, what is read in the other process's records stays as it is.
    #[inline(always)]
    pub(super) fn reach(&mut self) -> Reaching<'_> {
        self.reach_from(NO_SLOT)
    }

    /// The same, and what is read in that slot of this process stays as it is, too.
    #[inline(always)]
    pub(crate) fn reach_from(&mut self, slot: u32) -> Reaching<'_> {
        let [word, place] = words(&self.hands.segment, self.index as usize);
        // Seen by whoever sees the word.
        place.store(slot, Ordering::Relaxed);
        Reaching { word, even: handshake::raise(word), slot }
    }
}

impl Drop for Hand {
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
pub struct Visitor {
    watched: Arc<Watched>,
}

#[derive(Debug)]
struct Watched {
    segment: Segment,
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
static OWN: List<Weak<Hands>> = List::new();

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

impl Visitor {
    /// Takes the descriptor that [`Hands::file`] gave at the other end. Only after this may the other process see records.
    ///
    /// # Errors
    /// `InvalidData` when it is something else; otherwise the system's.
    pub fn admit(file: OwnedFd) -> io::Result<Visitor> {
        let segment = Segment::open(file, SEGMENT_BYTES, false)?;
        let watched = Arc::new(Watched { segment, gone: AtomicBool::new(false) });
        VISITORS.add(watched.clone())?;
        Ok(Visitor { watched })
    }
}

impl Drop for Visitor {
    fn drop(&mut self) {
        // First: somebody may be waiting for it with the list in hand.
        self.watched.gone.store(true, Ordering::SeqCst);
        VISITORS.change(|visitors| visitors.retain(|other| !Arc::ptr_eq(other, &self.watched)));
    }
}

/// Waits until no other process copies that may have seen what was withdrawn before this call.
pub(crate) fn wait_for_visitors() {
    for visitor in VISITORS.all_now() {
        wait_for_words(&visitor.segment, |_| true, || visitor.gone.load(Ordering::SeqCst));
    }
}

/// Waits until this process does not look at what it may have seen before this call in that slot, of whichever device.
pub(crate) fn wait_for_own_hands(slot: u32) {
    for hands in OWN.all_now() {
        if let Some(hands) = hands.upgrade() {
            wait_for_words(&hands.segment, |place| place == slot, || false);
        }
    }
}

/// Waits until every word that is odd now, and beside which is what `concerns`, has moved on, or its owner is gone.
fn wait_for_words(segment: &Segment, concerns: impl Fn(u32) -> bool, is_gone: impl Fn() -> bool) {
    // Another process may write any number there.
    let used = (segment.words(0, 1)[0].load(Ordering::SeqCst) as usize).min(WORDS);
    for index in 0..used {
        let [word, place] = words(segment, index);
        // If the place is a later one already, what the word was raised for is over.
        if let Some(seen) = handshake::raised(word)
            && concerns(place.load(Ordering::Relaxed))
        {
            wait_for_change(word, seen, &is_gone);
        }
    }
}

fn wait_for_change(word: &AtomicU32, seen: u32, is_gone: impl Fn() -> bool) {
    let mut looks = 0;
    while !handshake::has_moved(word, seen) && !is_gone() {
        looks += 1;
        wait_a_little(looks);
    }
}

/// In the child after `fork`: whoever reaches into the parent does not reach into the child, and the child's hands are the parent's.
pub(crate) fn forget_hands() {
    VISITORS.forget();
    OWN.forget();
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;
    use std::time::Duration;

    use super::*;

    fn sent(hands: &Hands) -> OwnedFd {
        hands.file().try_clone_to_owned().expect("a descriptor")
    }

    #[test]
    fn what_is_withdrawn_is_not_in_use_once_the_wait_is_over() {
        let hands = Hands::new().expect("made");
        let _visitor = Visitor::admit(sent(&hands)).expect("mapped");
        // The "record" says which of the two numbers may be touched.
        let (record, cells) = (AtomicU64::new(0), [AtomicU64::new(0), AtomicU64::new(0)]);
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                let mut hand = hands.take().expect("a word");
                let (record, cells, stop) = (&record, &cells, &stop);
                scope.spawn(move || {
                    while !stop.load(Ordering::Relaxed) {
                        let _reaching = hand.reach();
                        let chosen = record.load(Ordering::Relaxed) as usize;
                        cells[chosen].fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
            for round in 0..20_000 {
                record.store((round + 1) % 2, Ordering::Relaxed);
                wait_for_visitors();
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
        let hands = Hands::new().expect("made");
        let visitor = Visitor::admit(sent(&hands)).expect("mapped");
        let mut hand = hands.take().expect("a word");
        // It dies in mid-copy.
        let reaching = hand.reach();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(wait_for_visitors);
            std::thread::sleep(Duration::from_millis(5));
            assert!(!waiting.is_finished());
            drop(visitor);
        });
        // This process does not.
        drop(reaching);
    }

    #[test]
    fn words_are_used_again() {
        let hands = Hands::new().expect("made");
        let (first, second) = (hands.take().expect("a word"), hands.take().expect("a word"));
        assert_eq!((first.index, second.index), (0, 1));
        drop(first);
        assert_eq!(hands.take().expect("a word").index, 0);
        let all: Vec<_> = std::iter::from_fn(|| hands.take()).collect();
        assert_eq!(all.len(), WORDS - 1);
        assert!(hands.take().is_none());
    }
}
