//! Memory that came without a message: heaps of small allocations, system calls that the program makes itself, and copies
//! of pages that a child shared with its parent.

use std::time::{Duration, Instant};

use terrace_hostmem::{HostRange, PAGE_BYTES};
use terrace_vm::handshake::RESERVED_BYTES;
use terrace_vm::pagemap::Pagemap;
use terrace_vm::smaps::{self, PrivateMapping};
use terrace_vm::userfault::modes;

use crate::memory::Memory;
use crate::page_table::Page;
use crate::process::Process;

/// The process is searched when so many more of its pages are unknown than after the last search, or a part of those that
/// are known: a search reads the entries of all of its pages, and none where no page has been.
const GROWTH_PAGES: u64 = 128;
const GROWTH_DIVISOR: u64 = 32;
/// The kernel says that pages are given up before it takes them. The thread that gives them up does so within this time.
const REMOVAL: Duration = Duration::from_secs(1);
/// Ranges of which it is known when they were given up.
const REMOVED_MAX: usize = 256;
/// Shorter mappings stay as they are.
const LEN_MIN: u64 = 256 << 10;

impl Process {
    /// Forgets pages that are given up. They may still be in memory for a moment.
    pub(crate) fn remove(&mut self, memory: &mut Memory, range: HostRange) {
        self.forget(memory, range);
        while self.removed.front().is_some_and(|(_, at)| at.elapsed() >= REMOVAL) {
            self.removed.pop_front();
        }
        if self.removed.len() == REMOVED_MAX {
            // One range that contains two: pages in between are found later than they could be.
            let hull = |at: usize| hull(self.removed[at].0, self.removed[at + 1].0);
            let hulls = (0..REMOVED_MAX - 1).map(|at| (at, hull(at)));
            if let Some((at, hull)) = hulls.min_by_key(|(_, hull)| hull.len) {
                self.removed.remove(at);
                self.removed[at].0 = hull;
            }
        }
        self.removed.push_back((range, Instant::now()));
    }

    /// Whether the kernel may be about to take a page.
    fn is_leaving(&self, page: u64) -> bool {
        let contains = |range: &HostRange| (range.addr..range.addr + range.len).contains(&page);
        self.removed.iter().any(|(range, at)| contains(range) && at.elapsed() < REMOVAL)
    }

    /// Counts private memory that is not registered, and registers it if there is more than after the last search. Returns
    /// whether there was. No request to move pages is under way.
    pub(crate) fn find_unpaged(&mut self, memory: &mut Memory) -> bool {
        let Some(pid) = self.pid else { return false };
        self.unpaged = self.count_unpaged(pid);
        self.searched_unpaged = self.searched_unpaged.min(self.unpaged);
        if self.unpaged - self.searched_unpaged <= GROWTH_PAGES.max(self.frames / GROWTH_DIVISOR) {
            return false;
        }
        let mut is_complete = true;
        // The process may have ended, or keeps its lists to itself.
        if let (Ok(mappings), Ok(pagemap)) = (smaps::private_memory_of(pid, LEN_MIN), Pagemap::open_of(pid)) {
            let registered = self.register(&mappings);
            self.unregister_stacks(pid, &mappings);
            for range in registered {
                is_complete &= self.enter_present(memory, &pagemap, range);
            }
        }
        self.unpaged = self.count_unpaged(pid);
        // Otherwise it is repeated.
        if is_complete {
            self.searched_unpaged = self.unpaged;
        }
        true
    }

    /// The pages of its private memory that the pager does not know, from `statm` (see proc_pid_statm(5)).
    fn count_unpaged(&self, pid: u32) -> u64 {
        let numbers = std::fs::read_to_string(format!("/proc/{pid}/statm")).unwrap_or_default();
        let mut numbers = numbers.split(' ').skip(1).map_while(|number| number.parse::<u64>().ok());
        let (resident, shared) = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
        resident.saturating_sub(shared).saturating_sub(self.frames)
    }

    /// Registers what can be paged, and returns it. At the end of a thread the kernel stores to the thread's control block, which
    /// is on its stack, and waits for no fault: if the page were absent or protected, who joins the thread would wait for ever.
    fn register(&self, mappings: &[PrivateMapping]) -> Vec<HostRange> {
        let paged = mappings.iter().filter(|mapping| mapping.is_registered || !mapping.may_be_stack);
        let parts = paged.flat_map(|mapping| self.parts_of(mapping.range));
        // Fails for memory of another kind, or that another descriptor handles.
        let register = |part: &HostRange| {
            self.userfaultfd.register(*part, modes::MISSING | modes::WRITE_PROTECTED).is_ok()
        };
        parts.filter(|part| part.len > 0).filter(register).collect()
    }

    /// What is before and after the memory of the thread that moves pages.
    fn parts_of(&self, range: HostRange) -> [HostRange; 2] {
        let reserved = HostRange { addr: self.identity_page, len: RESERVED_BYTES };
        let end = range.addr + range.len;
        let before = HostRange { addr: range.addr, len: reserved.addr.clamp(range.addr, end) - range.addr };
        let after = (reserved.addr + reserved.len).clamp(range.addr, end);
        [before, HostRange { addr: after, len: end - after }]
    }

    /// Between the reading of the list and the registration, the process may have put stacks where other memory was. None of
    /// their pages has left: no request to move pages is under way.
    fn unregister_stacks(&self, pid: u32, before: &[PrivateMapping]) {
        let is_new = |range| {
            before.iter().any(|old| !old.is_registered && !old.may_be_stack && old.range.overlaps(range))
        };
        if before.iter().all(|old| old.is_registered || old.may_be_stack) {
            return;
        }
        for mapping in smaps::private_memory_of(pid, PAGE_BYTES).unwrap_or_default() {
            if mapping.is_registered && mapping.may_be_stack && is_new(mapping.range) {
                // An error means that it is not mapped any more.
                let _ = self.userfaultfd.unregister(mapping.range);
            }
        }
    }

    /// Counts the pages of a range that are in memory, and stay there. False if some may be about to leave, and were not counted.
    fn enter_present(&mut self, memory: &mut Memory, pagemap: &Pagemap, range: HostRange) -> bool {
        let mut is_complete = true;
        // An error means that the process has ended.
        for present in pagemap.private_ranges(range).unwrap_or_default() {
            for page in (present.addr..present.addr + present.len).step_by(PAGE_BYTES as usize) {
                match self.pages.get(page) {
                    Page::Untouched if self.is_leaving(page) => is_complete = false,
                    Page::Untouched => {
                        memory.count_frames(1);
                        self.enter(page, None, false, false);
                    }
                    _ => {}
                }
            }
        }
        is_complete
    }
}

/// The range from the beginning of the first one of two to the end of the last one.
fn hull(one: HostRange, other: HostRange) -> HostRange {
    let addr = one.addr.min(other.addr);
    HostRange { addr, len: (one.addr + one.len).max(other.addr + other.len) - addr }
}

#[cfg(test)]
mod tests {
    use terrace_vm::FileStore;

    use super::*;

    fn range_of(bytes: &[u8]) -> HostRange {
        let addr = (bytes.as_ptr().addr() as u64).next_multiple_of(PAGE_BYTES);
        HostRange { addr, len: bytes.len() as u64 - PAGE_BYTES }
    }

    #[test]
    fn pages_that_are_given_up_are_not_found_before_the_kernel_has_taken_them() {
        let store = FileStore::new(tempfile::tempfile().unwrap(), 64, 64).unwrap();
        let mut memory = Memory::new(Box::new(store), 0);
        let mut process = Process::without_userfaultfd(None);
        let pagemap = Pagemap::open_of(std::process::id()).unwrap();
        // The kernel has taken no page of them yet.
        let bytes = vec![1; 17 * PAGE_BYTES as usize];
        let range = range_of(&bytes);
        let given_up = HostRange { addr: range.addr, len: 8 * PAGE_BYTES };
        assert!(process.enter_present(&mut memory, &pagemap, range));
        assert_eq!(process.frames, 16);
        process.remove(&mut memory, given_up);
        assert!(!process.enter_present(&mut memory, &pagemap, range), "it is repeated");
        assert_eq!((process.frames, process.pages.get(range.addr)), (8, Page::Untouched));
        // They are its own: it may have given them up by `MADV_FREE`, and used them again.
        std::thread::sleep(REMOVAL);
        assert!(process.enter_present(&mut memory, &pagemap, range));
        assert_eq!(process.frames, 16);
    }

    #[test]
    fn ranges_that_are_given_up_faster_than_they_are_forgotten_become_fewer_and_larger() {
        let store = FileStore::new(tempfile::tempfile().unwrap(), 64, 64).unwrap();
        let mut memory = Memory::new(Box::new(store), 0);
        let mut process = Process::without_userfaultfd(None);
        let page = |index: u64| 2 * index * PAGE_BYTES;
        let count = 2 * REMOVED_MAX as u64;
        (0..count)
            .for_each(|index| process.remove(&mut memory, HostRange { addr: page(index), len: PAGE_BYTES }));
        assert!(process.removed.len() <= REMOVED_MAX);
        assert!((0..count).all(|index| process.is_leaving(page(index))));
    }
}
