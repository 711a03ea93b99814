//! Threads wait because they touched a page.

use std::io::{self, ErrorKind};

use terrace_hostmem::{HostRange, PAGE_BYTES};
use terrace_vm::{Completion, PageBytes};

use crate::memory::Memory;
use crate::page_table::{Page, Purpose};
use crate::process::{Fault, Process, one};
use crate::slots::Slot;

/// Pages of zeros that come at once, when a process touches new memory in the order of addresses.
const ZEROS_MAX: u64 = 32;
static ZEROS: [u8; (ZEROS_MAX * PAGE_BYTES) as usize] = [0; (ZEROS_MAX * PAGE_BYTES) as usize];

impl Process {
    /// Handles a fault, or has it wait.
    pub(crate) fn handle_fault(&mut self, memory: &mut Memory, fault: Fault) {
        let Fault { page, is_store, is_protected } = fault;
        if page == self.identity_page {
            return self.fill_identity_page();
        }
        match self.pages.get(page) {
            Page::Resident { slot, is_clean, is_hot, stamp } if is_protected => {
                if is_clean {
                    self.trends.note_store((page / PAGE_BYTES) as i64);
                    self.pages.set(page, Page::Resident { slot, is_clean: false, is_hot, stamp });
                }
                self.permit_stores(fault);
            }
            Page::Inherited { slot } if is_protected => {
                slot.into_iter().for_each(|slot| memory.slots.release(slot));
                self.pages.set(page, Page::Inherited { slot: None });
                self.permit_stores(fault);
            }
            // The process has given it up by `MADV_FREE`, and the kernel has not taken it yet.
            Page::Untouched if is_protected => {
                memory.count_frames(1);
                self.enter(page, None, false, false);
                self.permit_stores(fault);
            }
            // The page has left, or is about to come: the thread tries again.
            _ if is_protected => self.wake(page),
            Page::Untouched => self.put_zeros(memory, fault),
            Page::Lost => self.poison(fault),
            // It may just have been moved away: the end of the request says whether.
            Page::Resident { .. } if !self.may_read() => self.waiting.push_back(fault),
            Page::Resident { slot, .. } => self.put_zeros_again(memory, fault, slot),
            Page::Inherited { slot } => self.put_zeros_again(memory, fault, slot),
            Page::Absent { slot, evicted_at } => {
                let is_hot = memory.is_hot(evicted_at);
                if self.begin_load(memory, fault, slot, is_hot) {
                    self.load_ahead(memory, page, is_store);
                }
            }
            Page::Loading { slot, buffer, is_hot, is_store: was_store, purpose: was } => {
                let (is_store, purpose) = (is_store || was_store, Purpose::Fault);
                self.pages.set(page, Page::Loading { slot, buffer, is_store, is_hot, purpose });
                if was == Purpose::Marker {
                    memory.markers -= 1;
                    self.load_ahead(memory, page, is_store);
                }
            }
            Page::Ahead { slot, buffer, is_hot } => {
                memory.markers -= 1;
                let purpose = Purpose::Fault;
                self.pages.set(page, Page::Loading { slot, buffer, is_store, is_hot, purpose });
                self.install(memory, page, buffer.into());
                self.load_ahead(memory, page, is_store);
            }
        }
    }

    /// Takes a frame for a fault; returns false if there is none. Before the process's thread carries out requests, which may
    /// depend on this fault, there always is.
    fn take_frame(&self, memory: &mut Memory) -> bool {
        let is_starting = self.link.as_ref().is_some_and(|link| link.area.is_starting());
        if is_starting {
            memory.count_frames(1);
        }
        is_starting || memory.take_frame()
    }

    fn fill_identity_page(&mut self) {
        let mut bytes: PageBytes = [0; PAGE_BYTES as usize];
        bytes[..8].copy_from_slice(&self.id.to_ne_bytes());
        if let Err(error) = self.userfaultfd.copy(&bytes, self.identity_page, false) {
            self.retry_or_wake(
                Fault { page: self.identity_page, is_store: false, is_protected: false },
                &error,
            );
        }
    }

    fn permit_stores(&mut self, fault: Fault) {
        if let Err(error) = self.userfaultfd.protect(one(fault.page), false) {
            self.retry_or_wake(fault, &error);
        }
    }

    /// After a failure to resolve a fault: a change of mappings ends soon, and the fault is handled after it; or the thread
    /// tries again, and finds the page, no mapping, or another fault.
    fn retry_or_wake(&mut self, fault: Fault, error: &io::Error) {
        match error.kind() {
            ErrorKind::WouldBlock => self.waiting.push_back(fault),
            _ => self.wake(fault.page),
        }
    }

    /// New memory: the page, and those behind it if the process goes on in that direction.
    fn put_zeros(&mut self, memory: &mut Memory, fault: Fault) {
        if !self.take_frame(memory) {
            return self.waiting.push_back(fault);
        }
        let page = fault.page;
        let pages = self.count_new_pages(memory, page);
        for _ in 1..pages {
            memory.take_frame();
        }
        let put = self.zero_fill(fault, pages).or_else(|error| match error.kind() {
            // The mapping ends before the last page.
            ErrorKind::NotFound | ErrorKind::InvalidInput if pages > 1 => self.zero_fill(fault, 1),
            _ => Err(error),
        });
        let count = *put.as_ref().unwrap_or(&0);
        memory.release_frames(pages - count);
        memory.statistics.zeros += count;
        for index in 0..count {
            self.enter(page + index * PAGE_BYTES, None, false, false);
        }
        self.zeros = (page + count * PAGE_BYTES, count);
        if let Err(error) = put {
            if error.kind() == ErrorKind::AlreadyExists {
                // It was there before the range was registered.
                memory.count_frames(1);
                self.enter(page, None, false, false);
            }
            self.retry_or_wake(fault, &error);
        }
    }

    /// Maps the page of zeros, or copies of it for a store. Returns the number of pages.
    fn zero_fill(&self, fault: Fault, pages: u64) -> io::Result<u64> {
        let range = HostRange { addr: fault.page, len: pages * PAGE_BYTES };
        let len = match fault.is_store {
            true => self.userfaultfd.copy(&ZEROS[..range.len as usize], range.addr, false),
            false => self.userfaultfd.zero(range),
        };
        Ok(len? / PAGE_BYTES)
    }

    /// How many pages of new memory come at once: twice as many as last time, while the process goes on.
    fn count_new_pages(&self, memory: &Memory, page: u64) -> u64 {
        let (end, last) = self.zeros;
        if page != end || memory.pages_to_evict() > 0 {
            return 1;
        }
        let wanted = (2 * last).min(ZEROS_MAX).min(memory.free_frames() + 1);
        (1..wanted)
            .find(|index| self.pages.get(page + index * PAGE_BYTES) != Page::Untouched)
            .unwrap_or(wanted)
            .max(1)
    }

    /// A page that is in memory is absent: another thread was faster to report the same fault, or the process has given it
    /// up since.
    fn put_zeros_again(&mut self, memory: &mut Memory, fault: Fault, slot: Option<Slot>) {
        match self.zero_fill(fault, 1) {
            Ok(_) => {
                slot.into_iter().for_each(|slot| memory.slots.release(slot));
                match self.pages.get(fault.page) {
                    Page::Resident { is_hot, stamp, .. } => {
                        let page = Page::Resident { slot: None, is_clean: false, is_hot, stamp };
                        self.pages.set(fault.page, page);
                    }
                    _ => {
                        memory.count_frames(1);
                        self.enter(fault.page, None, false, false);
                    }
                }
            }
            Err(error) => self.retry_or_wake(fault, &error),
        }
    }

    /// Begins to load a page for a thread that waits, or has the thread wait for that. Returns whether it has begun.
    fn begin_load(&mut self, memory: &mut Memory, fault: Fault, slot: Slot, is_hot: bool) -> bool {
        let Fault { page, is_store, .. } = fault;
        if !self.take_frame(memory) {
            self.waiting.push_back(fault);
            return false;
        }
        if let Some(bytes) = memory.unstored_bytes(slot) {
            let copied = self.userfaultfd.copy(bytes, page, !is_store);
            match &copied {
                Ok(_) => self.enter(page, Some(slot), !is_store, is_hot),
                Err(error) => {
                    memory.release_frames(1);
                    self.retry_or_wake(fault, error);
                }
            }
            return copied.is_ok();
        }
        match memory.begin_load(self.id, page, slot) {
            Some(buffer) => {
                let (buffer, purpose) = (buffer as u16, Purpose::Fault);
                self.pages.set(page, Page::Loading { slot, buffer, is_store, is_hot, purpose });
                self.frames += 1;
                true
            }
            None => {
                memory.release_frames(1);
                self.waiting.push_back(fault);
                false
            }
        }
    }

    /// A page has been loaded, or cannot be.
    pub(crate) fn end_load(&mut self, memory: &mut Memory, addr: u64, completion: Completion) {
        let buffer = completion.buffer;
        let Page::Loading { slot, buffer: expected, is_hot, purpose, .. } = self.pages.get(addr) else {
            return memory.release_buffer(buffer);
        };
        if usize::from(expected) != buffer {
            return memory.release_buffer(buffer);
        }
        if completion.result.is_ok() && purpose == Purpose::Marker {
            return self.pages.set(addr, Page::Ahead { slot, buffer: expected, is_hot });
        }
        if completion.result.is_ok() {
            return self.install(memory, addr, buffer);
        }
        memory.release_buffer(buffer);
        self.leave(memory);
        if purpose != Purpose::Fault {
            // The first thread that touches it finds out whether it is lost.
            memory.markers -= usize::from(purpose == Purpose::Marker);
            return self.pages.set(addr, Page::Absent { slot, evicted_at: memory.evictions });
        }
        memory.slots.release(slot);
        self.pages.set(addr, Page::Lost);
        memory.statistics.losses += 1;
        self.poison(Fault { page: addr, is_store: false, is_protected: false });
    }

    /// Has who touches a lost page get SIGBUS.
    fn poison(&mut self, fault: Fault) {
        if let Err(error) = self.userfaultfd.poison(one(fault.page)) {
            self.retry_or_wake(fault, &error);
        }
    }

    /// Puts a loaded page in its place.
    pub(crate) fn install(&mut self, memory: &mut Memory, addr: u64, buffer: usize) {
        let Page::Loading { slot, is_store, is_hot, buffer: expected, .. } = self.pages.get(addr) else {
            return memory.release_buffer(buffer);
        };
        if usize::from(expected) != buffer {
            return memory.release_buffer(buffer);
        }
        let copied = self.userfaultfd.copy(memory.store.buffer(buffer), addr, !is_store);
        if let Err(error) = &copied
            && matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::OutOfMemory)
        {
            return self.loaded.push((addr, buffer));
        }
        memory.release_buffer(buffer);
        // `enter` counts the frame again.
        self.frames -= 1;
        match copied {
            Ok(_) => self.enter(addr, Some(slot), !is_store, is_hot),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                self.enter(addr, Some(slot), false, is_hot);
                self.wake(addr);
            }
            Err(_) => {
                // No memory is mapped there any more, and the kernel's message of that follows. If the memory was moved, the
                // page goes with it, and is loaded again.
                memory.release_frames(1);
                self.pages.set(addr, Page::Absent { slot, evicted_at: memory.evictions });
                self.wake(addr);
            }
        }
    }

    /// Handles the faults and loaded pages that had to wait.
    pub(crate) fn resume(&mut self, memory: &mut Memory) {
        for (addr, buffer) in std::mem::take(&mut self.loaded) {
            self.install(memory, addr, buffer);
        }
        for fault in std::mem::take(&mut self.waiting) {
            self.handle_fault(memory, fault);
        }
    }
}

#[cfg(test)]
mod tests {
    use terrace_vm::handshake::FEATURES;
    use terrace_vm::userfault::Userfaultfd;
    use terrace_vm::{FileStore, TransferError};

    use super::*;

    #[test]
    fn a_lost_page_never_becomes_zeros() {
        let store = FileStore::new(tempfile::tempfile().unwrap(), 64, 64).unwrap();
        let mut memory = Memory::new(Box::new(store), 0);
        let mut process = Process::without_userfaultfd(None);
        let (page, slot) = (PAGE_BYTES, memory.allocate_slot().unwrap());
        process.pages.set(page, Page::Absent { slot, evicted_at: 0 });
        let fault = Fault { page, is_store: true, is_protected: false };
        process.handle_fault(&mut memory, fault);
        let Page::Loading { buffer, .. } = process.pages.get(page) else { panic!("it is being loaded") };
        let completion = Completion { buffer: buffer.into(), result: Err(TransferError::Lost) };
        process.end_load(&mut memory, page, completion);
        process.handle_fault(&mut memory, fault);
        assert_eq!(process.pages.get(page), Page::Lost);
        process.forget(&mut memory, one(page));
        assert_eq!(process.pages.get(page), Page::Untouched);
    }
    #[test]
    fn a_load_ahead_that_ends_while_its_memory_moves_keeps_the_bytes() {
        let store = FileStore::new(tempfile::tempfile().unwrap(), 64, 64).unwrap();
        let mut memory = Memory::new(Box::new(store), 0);
        let mut process = Process::new(1, Userfaultfd::open(FEATURES).unwrap(), None, 0);
        // Nothing is mapped at the old address any more, and the message of that has not been read.
        let (from, to) = (1 << 40, 1 << 41);
        let slot = memory.allocate_slot().unwrap();
        let fault = Fault { page: from, is_store: false, is_protected: false };
        assert!(process.begin_load(&mut memory, fault, slot, false));
        let Page::Loading { buffer, is_store, is_hot, .. } = process.pages.get(from) else { panic!() };
        process.pages.set(from, Page::Loading { slot, buffer, is_store, is_hot, purpose: Purpose::Ahead });
        process.end_load(&mut memory, from, Completion { buffer: buffer.into(), result: Ok(()) });
        process.remap(&mut memory, one(from), to);
        assert!(
            matches!(process.pages.get(to), Page::Absent { slot: kept, .. } if kept == slot),
            "{:?}",
            process.pages.get(to)
        );
        assert!(memory.slots.is_exclusive(slot) && memory.slots.take_invalid().is_empty());
        assert_eq!((process.frames, memory.frames().1), (0, 0));
    }
}
