//! Memory that came without a message: heaps of small allocations, system calls that the program makes itself, and copies
//! of pages that a child shared with its parent.

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
/// Shorter mappings stay as they are.
const LEN_MIN: u64 = 256 << 10;

impl Process {
    /// Counts private memory that is not registered, and registers it if there is more than after the last search. Returns
    /// whether there was. No request to move pages is under way.
    pub(crate) fn find_unpaged(&mut self, memory: &mut Memory) -> bool {
        let Some(pid) = self.pid else { return false };
        self.unpaged = self.count_unpaged(pid);
        self.searched_unpaged = self.searched_unpaged.min(self.unpaged);
        if self.unpaged - self.searched_unpaged <= GROWTH_PAGES.max(self.frames / GROWTH_DIVISOR) {
            return false;
        }
        // The process may have ended, or keeps its lists to itself.
        if let (Ok(mappings), Ok(pagemap)) = (smaps::private_memory_of(pid, LEN_MIN), Pagemap::open_of(pid)) {
            let registered = self.register(&mappings);
            self.unregister_stacks(pid, &mappings);
            for range in registered {
                self.enter_present(memory, &pagemap, range);
            }
        }
        self.unpaged = self.count_unpaged(pid);
        self.searched_unpaged = self.unpaged;
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

    /// Counts the pages of a range that are in memory.
    fn enter_present(&mut self, memory: &mut Memory, pagemap: &Pagemap, range: HostRange) {
        // An error means that the process has ended.
        for present in pagemap.private_ranges(range).unwrap_or_default() {
            for page in (present.addr..present.addr + present.len).step_by(PAGE_BYTES as usize) {
                if self.pages.get(page) == Page::Untouched {
                    memory.count_frames(1);
                    self.enter(page, None, false, false);
                }
            }
        }
    }
}
