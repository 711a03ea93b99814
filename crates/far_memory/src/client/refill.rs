//! Copies of pages for a node that was lost and has joined again, without any. They are made in the background, a few at a
//! time, and their rate is bounded. A copy and operations on its page take effect in the order in which they were begun.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::link::Link;
use super::operations::{Kind, Operation, Operations, Sink};
use super::page_buffer::PageBuffer;
use super::space::Place;
use crate::protocol::Function;

/// Copies in flight at most.
pub(super) const COPIES: usize = 16;
/// How often copies are begun: with [`COPIES`], 62 MiB a second at most.
pub(super) const COPY_INTERVAL: Duration = Duration::from_millis(1);
/// The time until pages that could not be copied are tried again.
const RETRY: Duration = Duration::from_secs(1);
/// Words of the map of stored pages that a turn examines, 1024 pages: the client's lock is held meanwhile.
const WORDS_PER_TURN: usize = 16;

/// What is copied.
pub(super) struct Refill {
    buffer: Arc<PageBuffer>,
    /// Pages of the buffer that are free.
    free: Vec<usize>,
    /// Pages that had operations in flight when a node joined: what these find decides whether copies are missing.
    first: Vec<u64>,
    /// The page from which on stored pages are looked at. `None` when all have their copies.
    next: Option<u64>,
    /// Whether a page has been left out, because a node had no room or was lost.
    has_skipped: bool,
    /// Words that this turn may still examine.
    words_left: usize,
    /// When the pages that were left out are tried again.
    retry_at: Option<Instant>,
    /// Pages copied since the last node has joined.
    copied_pages: u64,
}

/// Whether a page is to be copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Copying {
    /// It has its copies, or none is left.
    NotNeeded,
    Possible,
    /// A node of the page has no free page.
    Refused,
}

/// Whether the nodes that lack pages have free ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Room {
    None,
    /// A pool was empty. One copy at a time probes it: each store into an empty pool has the node repair its free-page queue.
    Unknown,
    Some,
}

impl Refill {
    /// With a buffer of [`COPIES`] pages.
    pub fn new(buffer: Arc<PageBuffer>) -> Refill {
        Refill {
            buffer,
            free: (0..COPIES).collect(),
            first: Vec::new(),
            next: None,
            has_skipped: false,
            words_left: 0,
            retry_at: None,
            copied_pages: 0,
        }
    }

    /// Looks at all pages, from now on.
    fn begin(&mut self, first: Vec<u64>) {
        (self.first, self.next, self.retry_at) = (first, Some(0), None);
        (self.has_skipped, self.copied_pages) = (false, 0);
    }

    /// Whether there is something to do now.
    fn is_due(&mut self, now: Instant) -> bool {
        match self.retry_at {
            Some(at) if now < at => return false,
            Some(_) => (self.next, self.has_skipped, self.retry_at) = (Some(0), false, None),
            None => {}
        }
        self.next.is_some()
    }

    /// Whether all pages have their copies, as far as is known.
    pub fn is_complete(&self) -> bool {
        self.next.is_none() && self.free.len() == COPIES
    }

    /// Whether there is something to do soon, or a copy is in flight.
    fn is_running(&self) -> bool {
        self.free.len() < COPIES || self.next.is_some() && self.retry_at.is_none()
    }

    /// Notes that a page lacks a copy that a node refuses.
    pub fn note_missing(&mut self, now: Instant) {
        self.has_skipped = true;
        if self.next.is_none() {
            (self.next, self.retry_at) = (Some(0), Some(now + RETRY));
        }
    }
}

impl Operations {
    /// Uses a node again, in whose place this link is. It has no page yet.
    pub fn rejoin(&mut self, node: usize, mut link: Link) {
        link.replace(&mut self.links[node]);
        let missing_pages = self.wanted_pages[node];
        tracing::warn!(node = %link.address, missing_pages, "a memory node is used again, and pages are copied to it");
        self.links[node] = link;
        let first = self.pages.keys().copied().collect();
        if let Some(refill) = &mut self.refill {
            refill.begin(first);
        }
    }

    /// Begins copies, as far as the rate allows if it is called once in [`COPY_INTERVAL`]. Returns whether it is to be called
    /// again then.
    pub fn advance_refill(&mut self, now: Instant) -> bool {
        if self.refill.as_mut().is_some_and(|refill| refill.is_due(now)) {
            match self.room(now) {
                Room::None => self.pause_refill(now),
                Room::Unknown => self.begin_copies(1, now),
                Room::Some => self.begin_copies(COPIES, now),
            }
        }
        self.refill.as_ref().is_some_and(Refill::is_running)
    }

    /// What is known of the nodes that lack pages.
    fn room(&self, now: Instant) -> Room {
        let links = self.links.iter().zip(&self.wanted_pages);
        let mut lacking =
            links.filter(|(link, wanted)| link.lost.is_none() && **wanted > link.mapped_pages).peekable();
        // The counts include stores in flight: a pass says whether a page lacks a copy.
        if lacking.peek().is_none() {
            return Room::Some;
        }
        lacking.filter(|(link, _)| link.may_be_probed(now)).fold(Room::None, |room, (link, _)| {
            match (room, link.pool.was_empty()) {
                (Room::Unknown, _) | (_, true) => Room::Unknown,
                (_, false) => Room::Some,
            }
        })
    }

    /// Has the refill begin anew later.
    fn pause_refill(&mut self, now: Instant) {
        if let Some(refill) = &mut self.refill {
            (refill.next, refill.retry_at) = (Some(0), Some(now + RETRY));
        }
    }

    /// Begins copies, until so many are in flight, and ends the pass after the last.
    fn begin_copies(&mut self, count: usize, now: Instant) {
        if let Some(refill) = &mut self.refill {
            refill.words_left = WORDS_PER_TURN;
        }
        // Some end at once and give their page of the buffer back.
        for _ in 0..count {
            if self.refill.as_ref().is_none_or(|refill| COPIES - refill.free.len() >= count) {
                break;
            }
            let Some(operation) = self.next_copy(now) else { break };
            self.enqueue(operation, now);
        }
        self.end_pass(now);
    }

    /// The copy of the next page that lacks one, if a page of the buffer is free.
    fn next_copy(&mut self, now: Instant) -> Option<Operation> {
        let mut refill = self.refill.take()?;
        let page = if refill.free.is_empty() { None } else { self.next_page(&mut refill, now) };
        let operation = page.and_then(|page| {
            let index = refill.free.pop()?;
            let buffer = refill.buffer.sge(index).map(|sge| (refill.buffer.clone(), sge));
            Some(Operation { kind: Kind::Copy, page, buffer, sink: Sink::Copy(index) })
        });
        self.refill = Some(refill);
        operation
    }

    /// Ends the refill, or has it begin anew later, when all pages have been looked at and no copy is in flight.
    fn end_pass(&mut self, now: Instant) {
        let Some(refill) = &mut self.refill else { return };
        let is_idle = refill.free.len() == COPIES && refill.first.is_empty();
        if !is_idle || refill.next != Some(self.space.page_count) {
            return;
        }
        if refill.has_skipped {
            return self.pause_refill(now);
        }
        refill.next = None;
        if self.links.iter().all(|link| link.lost.is_none()) {
            let copied_pages = refill.copied_pages;
            tracing::warn!(copied_pages, "all pages that are left have two copies again");
        }
    }

    /// The next page that lacks a copy, of those that a turn looks at.
    fn next_page(&self, refill: &mut Refill, now: Instant) -> Option<u64> {
        while let Some(page) = refill.first.pop() {
            if self.missing_places(page).next().is_some() {
                return Some(page);
            }
        }
        let page_count = self.space.page_count;
        let mut page = refill.next.filter(|page| *page < page_count)?;
        while refill.words_left > 0 {
            let end = (page / 64 + 1) * 64;
            while let Some(stored) = self.stored_in_word(page) {
                page = stored + 1;
                match self.copying(stored, now) {
                    Copying::Possible => {
                        refill.next = Some(page);
                        return Some(stored);
                    }
                    Copying::Refused => refill.has_skipped = true,
                    Copying::NotNeeded => {}
                }
                if page == end {
                    break;
                }
            }
            page = end.min(page_count);
            refill.words_left -= 1;
            if page == page_count {
                break;
            }
        }
        refill.next = Some(page);
        None
    }

    /// The first stored page from this one on, among those of the same word.
    fn stored_in_word(&self, page: u64) -> Option<u64> {
        let rest = self.stored_word(page) >> (page % 64);
        (rest != 0).then(|| page + u64::from(rest.trailing_zeros()))
    }

    /// Whether a page is to be copied.
    fn copying(&self, page: u64, now: Instant) -> Copying {
        let mut missing = self.missing_places(page).peekable();
        match () {
            () if missing.peek().is_none() || !self.can_load(page) => Copying::NotNeeded,
            () if missing.all(|place| self.links[place.node].may_be_probed(now)) => Copying::Possible,
            () => Copying::Refused,
        }
    }

    /// The places of a page whose nodes are left and have no copy.
    fn missing_places(&self, page: u64) -> impl Iterator<Item = Place> {
        let is_missing = |place: &Place| {
            let link = &self.links[place.node];
            link.lost.is_none() && !link.is_mapped(place.index)
        };
        self.space.places(page).filter(is_missing)
    }

    /// Loads the copy of a page that is left, if another one is missing and its node may have a free page.
    pub(super) fn start_copy(&mut self, key: usize, page: u64, now: Instant) {
        if self.copying(page, now) == Copying::Possible {
            self.start_load(key, now);
        }
    }

    /// Stores the copy that was loaded.
    pub(super) fn store_copy(&mut self, key: usize, page: u64, now: Instant) {
        let places: Vec<Place> = self.missing_places(page).collect();
        for place in places {
            self.links[place.node].mapped_pages += 1;
            self.call(key, Function::UnmappedStore, place, now);
        }
    }

    /// Notes the end of a copy, whose page of the buffer this is.
    pub(super) fn end_copy(&mut self, page: u64, index: usize, now: Instant) {
        let lacks_copy = self.copying(page, now) != Copying::NotNeeded;
        if let Some(refill) = &mut self.refill {
            refill.free.push(index);
            refill.has_skipped |= lacks_copy;
        }
    }

    /// Counts a page that was copied to a node.
    pub(super) fn count_copy(&mut self, node: usize) {
        self.links[node].counts.copied_pages += 1;
        if let Some(refill) = &mut self.refill {
            refill.copied_pages += 1;
        }
    }
}
