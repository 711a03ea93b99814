//! The hits of a region's same-host peers, which they count themselves: the owner takes no part in their accesses.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;

use crate::segment::{Others, Segment};

/// Counters, each in a cache line of its own.
const LINES: usize = 64;
const LINE_BYTES: usize = 64;

/// The numbers of pages that same-host peers have found in memory, in a segment that they may write to: wrong values
/// make for wrong statistics, and nothing else.
///
/// A process adds to the counter that its number selects, without an atomic operation. So threads that count at the same
/// time may lose counts, and so may processes whose numbers are equal modulo 64.
#[derive(Debug)]
pub struct PeerHits {
    segment: Segment,
    line: usize,
}

impl PeerHits {
    /// All are 0.
    ///
    /// # Errors
    /// When the system has no descriptors or address space left.
    pub fn new() -> io::Result<PeerHits> {
        Ok(PeerHits::of(Segment::create(c"terrace-hits", LINES * LINE_BYTES, Others::Write)?))
    }

    /// Maps the counters of another process.
    ///
    /// # Errors
    /// `InvalidData` when they are something else; the system's.
    pub(crate) fn open(file: OwnedFd) -> io::Result<PeerHits> {
        Ok(PeerHits::of(Segment::open(file, LINES * LINE_BYTES, true)?))
    }

    fn of(segment: Segment) -> PeerHits {
        PeerHits { segment, line: std::process::id() as usize % LINES }
    }

    /// To be sent to other processes.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.segment.file()
    }

    /// Adds pages to this process's counter.
    #[inline]
    pub(crate) fn add(&self, page_count: u64) {
        let counter = &self.segment.quads(self.line * LINE_BYTES, 1)[0];
        counter.store(counter.load(Ordering::Relaxed).wrapping_add(page_count), Ordering::Relaxed);
    }

    /// The pages that all peers have counted so far.
    pub fn total(&self) -> u64 {
        let counter = |line: usize| self.segment.quads(line * LINE_BYTES, 1)[0].load(Ordering::Relaxed);
        (0..LINES).map(counter).fold(0, u64::wrapping_add)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_peer_adds_is_in_the_total() {
        let own = PeerHits::new().expect("made");
        let peer = PeerHits::open(own.file().try_clone_to_owned().expect("a descriptor")).expect("mapped");
        peer.add(2);
        peer.add(1);
        assert_eq!(own.total(), 3);
        own.segment.quads(0, LINES * LINE_BYTES / 8)[(peer.line + 1) % LINES * LINE_BYTES / 8]
            .store(u64::MAX, Ordering::Relaxed);
        assert_eq!(own.total(), 2, "a peer that writes nonsense causes no panic");
    }
}
