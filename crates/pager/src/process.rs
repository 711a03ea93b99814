//! A process whose pages are handled.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Instant;

use terrace_hostmem::{HostRange, PAGE_BYTES};
use terrace_vm::EvictionArea;
use terrace_vm::userfault::Userfaultfd;

use crate::memory::Memory;
use crate::page_table::{Page, PageTable, Purpose};
use crate::slots::Slot;
use crate::trend::Trends;

/// A thread that waits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fault {
    pub(crate) page: u64,
    pub(crate) is_store: bool,
    pub(crate) is_protected: bool,
}

/// A page that was asked to leave.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Victim {
    pub(crate) page: u64,
    pub(crate) slot: Slot,
    pub(crate) is_clean: bool,
    /// Whether it could not leave before, because other processes shared it.
    pub(crate) was_shared: bool,
}

/// What the thread in the process is doing.
#[derive(Debug)]
pub(crate) enum Request {
    /// It moves pages away. Messages of the kernel are read afterwards: until then, no change of mappings is complete, and
    /// the kernel moves no page while one is not.
    Evict(Vec<Victim>),
    /// It makes pages its process's own.
    Unshare(Vec<u64>),
}

impl Request {
    /// The buffers that its end may need.
    pub(crate) fn buffers(&self) -> usize {
        match self {
            Request::Evict(victims) => victims.iter().filter(|victim| !victim.is_clean).count(),
            Request::Unshare(_) => 0,
        }
    }
}

/// The thread in the process that moves its pages away.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) socket: UnixStream,
    pub(crate) area: EvictionArea,
}

/// A process.
#[derive(Debug)]
pub(crate) struct Process {
    /// The number by which the pager knows it.
    pub(crate) id: u64,
    pub(crate) userfaultfd: Userfaultfd,
    /// Its number, once its thread has joined.
    pub(crate) pid: Option<u32>,
    /// Pages of its private memory that are not paged: at the last check, and after the last search for them.
    pub(crate) unpaged: u64,
    pub(crate) searched_unpaged: u64,
    /// Whether memory that is not paged is to be looked for.
    pub(crate) is_search_due: bool,
    /// A child has none from its fork until it has joined, or if it cannot connect.
    pub(crate) link: Option<Link>,
    pub(crate) identity_page: u64,
    pub(crate) pages: PageTable,
    /// Resident pages, in the order in which they came.
    pub(crate) queue: VecDeque<(u64, u32)>,
    last_stamp: u32,
    /// Frames that it has.
    pub(crate) frames: u64,
    /// Faults that wait for a frame, a buffer, or the end of a change of mappings.
    pub(crate) waiting: VecDeque<Fault>,
    /// Loaded pages that wait for the end of a change of mappings.
    pub(crate) loaded: Vec<(u64, usize)>,
    pub(crate) request: Option<Request>,
    /// When buffers were promised to the request; `None` if none are.
    pub(crate) promised_at: Option<Instant>,
    /// Ranges that were given up a short time ago, and when, at most `REMOVED_MAX`.
    pub(crate) removed: VecDeque<(HostRange, Instant)>,
    /// Whether its last message could not be read.
    pub(crate) has_read_error: bool,
    /// Pages that other processes share.
    pub(crate) shared: Vec<u64>,
    /// Pages that were, and are to leave.
    pub(crate) unshared: Vec<u64>,
    /// No eviction before this time, and how many have failed as a whole.
    pub(crate) evict_after: Option<Instant>,
    pub(crate) futile_evictions: u32,
    /// The end of the last range of zeros, and its pages.
    pub(crate) zeros: (u64, u64),
    /// Which pages it will touch.
    pub(crate) trends: Trends,
    pub(crate) has_ended: bool,
}

impl Process {
    /// A process no request of which succeeds.
    #[cfg(test)]
    pub(crate) fn without_userfaultfd(link: Option<Link>) -> Process {
        let descriptor = std::os::fd::OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        Process::new(1, descriptor.into(), link, 0)
    }

    pub(crate) fn new(id: u64, userfaultfd: Userfaultfd, link: Option<Link>, identity_page: u64) -> Process {
        Process {
            id,
            userfaultfd,
            pid: None,
            unpaged: 0,
            searched_unpaged: 0,
            is_search_due: false,
            link,
            identity_page,
            pages: PageTable::default(),
            queue: VecDeque::new(),
            last_stamp: 0,
            frames: 0,
            waiting: VecDeque::new(),
            loaded: Vec::new(),
            request: None,
            promised_at: None,
            removed: VecDeque::new(),
            has_read_error: false,
            shared: Vec::new(),
            unshared: Vec::new(),
            evict_after: None,
            futile_evictions: 0,
            zeros: (0, 0),
            trends: Trends::default(),
            has_ended: false,
        }
    }

    /// Whether messages of the kernel may be read now.
    pub(crate) fn may_read(&self) -> bool {
        !self.has_ended && !matches!(self.request, Some(Request::Evict(_)))
    }

    /// Whether the thread that moves its pages has not begun.
    pub(crate) fn lacks_thread(&self) -> bool {
        self.request.is_none() && self.link.as_ref().is_some_and(|link| !link.area.is_ready())
    }

    /// A page has come into memory; its frame is counted.
    pub(crate) fn enter(&mut self, page: u64, slot: Option<Slot>, is_clean: bool, is_hot: bool) {
        self.last_stamp = self.last_stamp.wrapping_add(1);
        let stamp = self.last_stamp;
        self.pages.set(page, Page::Resident { slot, is_clean, is_hot, stamp });
        self.queue.push_back((page, stamp));
        self.frames += 1;
        self.compact_queue();
    }

    /// Whether an entry of the queue is the one that counts for its page.
    pub(crate) fn is_current(&self, page: u64, entry: u32) -> bool {
        matches!(self.pages.get(page), Page::Resident { stamp, .. } if stamp == entry)
    }

    /// Puts a page that stays in memory at the end of the queue.
    pub(crate) fn requeue(&mut self, page: u64) {
        if let Page::Resident { slot, is_clean, .. } = self.pages.get(page) {
            self.last_stamp = self.last_stamp.wrapping_add(1);
            let stamp = self.last_stamp;
            self.pages.set(page, Page::Resident { slot, is_clean, is_hot: false, stamp });
            self.queue.push_back((page, stamp));
        }
    }

    /// Removes the entries of pages that are not resident any more, before there are too many.
    fn compact_queue(&mut self) {
        if self.queue.len() as u64 <= 2 * self.frames + 1024 {
            return;
        }
        let pages = &self.pages;
        self.queue.retain(
            |&(page, entry)| matches!(pages.get(page), Page::Resident { stamp, .. } if stamp == entry),
        );
    }

    /// A page has left memory; its new state follows.
    pub(crate) fn leave(&mut self, memory: &mut Memory) {
        self.frames -= 1;
        memory.release_frames(1);
    }

    /// Forgets the pages of a range, and wakes the threads that wait for them.
    pub(crate) fn forget(&mut self, memory: &mut Memory, range: HostRange) {
        for (addr, page) in self.pages.take(range) {
            self.drop_page(memory, addr, page);
        }
    }

    fn drop_page(&mut self, memory: &mut Memory, addr: u64, page: Page) {
        match page {
            Page::Untouched | Page::Lost => {}
            Page::Resident { slot, .. } => {
                self.leave(memory);
                slot.into_iter().for_each(|slot| memory.slots.release(slot));
            }
            Page::Inherited { slot } => slot.into_iter().for_each(|slot| memory.slots.release(slot)),
            Page::Absent { slot, .. } => memory.slots.release(slot),
            Page::Ahead { slot, buffer, .. } => {
                self.release_ahead(memory, buffer);
                memory.slots.release(slot);
            }
            Page::Loading { slot, purpose, .. } => {
                memory.markers -= usize::from(purpose == Purpose::Marker);
                self.leave(memory);
                memory.slots.release(slot);
                self.wake(addr);
            }
        }
    }

    /// Wakes the threads that wait for a page.
    pub(crate) fn wake(&self, page: u64) {
        // An error means that the process has ended.
        let _ = self.userfaultfd.wake(one(page));
    }

    /// Forgets everything: the process has ended.
    pub(crate) fn end(&mut self, memory: &mut Memory) {
        self.has_ended = true;
        self.forget(memory, HostRange { addr: 0, len: u64::MAX });
        for (_, buffer) in std::mem::take(&mut self.loaded) {
            memory.release_buffer(buffer);
        }
        self.waiting.clear();
        self.withdraw_promise(memory);
        self.request = None;
        debug_assert_eq!(self.frames, 0, "frames are those of pages");
    }
}

/// The range of one page.
pub(crate) fn one(page: u64) -> HostRange {
    HostRange { addr: page, len: PAGE_BYTES }
}

impl Link {
    /// Wakes the thread in the process.
    pub(crate) fn ring(&mut self) -> io::Result<()> {
        match self.socket.write(b"r") {
            // It has not read the bytes before this one either.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            result => result.map(drop),
        }
    }

    /// Reads what woke the pager. Returns false at the end of the connection.
    pub(crate) fn drain(&mut self) -> bool {
        loop {
            match self.socket.read(&mut [0; 64]) {
                Ok(0) => return false,
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return error.kind() == io::ErrorKind::WouldBlock,
            }
        }
    }
}
