//! Pages leave memory, in the order in which they came.

use std::time::{Duration, Instant};

use terrace_hostmem::PAGE_BYTES;
use terrace_vm::{BATCH_PAGES, PageBytes, Task};

use crate::memory::Memory;
use crate::page_table::Page;
use crate::process::{Process, Request, Victim};
use crate::slots::Slot;

/// Linux's numbers of errors that `UFFDIO_MOVE` gives.
const ENOENT: i32 = 2;
const EBUSY: i32 = 16;

/// The longest time between two evictions that move nothing.
const BACKOFF_MAX: Duration = Duration::from_millis(64);
/// Buffers are kept for the end of a request for this time. Then a request that the process has not begun is taken back: the process
/// may be stopped, and others wait for its pages.
const PROMISE: Duration = Duration::from_millis(100);
/// Entries of the queue in which pages are looked for that can leave, while the store has no room for others.
const SEARCH_MAX: usize = 16 * BATCH_PAGES;

impl Process {
    /// Whether the process can be asked to have pages leave.
    pub(crate) fn can_evict(&self) -> bool {
        !self.is_search_due && self.next_eviction().is_some_and(|at| at <= Instant::now())
    }

    /// The time from which on the process can be asked to have pages leave. `None` if a message of the process comes before.
    pub(crate) fn next_eviction(&self) -> Option<Instant> {
        let is_ready = self.link.as_ref().is_some_and(|link| link.area.is_ready() && link.area.is_idle());
        let is_idle = is_ready && self.request.is_none() && !self.has_ended && self.frames > 0;
        is_idle.then(|| self.evict_after.unwrap_or_else(Instant::now))
    }

    /// The time until which buffers are kept for the end of a request, if there is one.
    pub(crate) fn promised_until(&self) -> Option<Instant> {
        self.request.as_ref().and(self.promised_at).map(|at| at + PROMISE)
    }

    /// Asks the process to have pages leave.
    pub(crate) fn begin_eviction(&mut self, memory: &mut Memory, count: u64) {
        if self.begin_unsharing() {
            return;
        }
        let victims = self.choose_victims(memory, count);
        let pages: Vec<_> = victims.iter().map(|victim| (victim.page, !victim.is_clean)).collect();
        match pages.is_empty() {
            true => self.back_off(false),
            false => self.publish(Task::Evict, &pages, Request::Evict(victims)),
        }
        // Requests of other processes, and loads, come before the end of this one.
        memory.promised += self.request.as_ref().map_or(0, Request::buffers);
        self.promised_at = Some(Instant::now());
    }

    /// Returns the buffers that were promised to the request.
    pub(crate) fn withdraw_promise(&mut self, memory: &mut Memory) {
        if self.promised_at.take().is_some() {
            memory.promised -= self.request.as_ref().map_or(0, Request::buffers);
        }
    }

    /// Whether pages have left whose bytes wait for buffers.
    pub(crate) fn lacks_buffers(&self) -> bool {
        let is_done = self.link.as_ref().is_some_and(|link| link.area.is_idle());
        is_done && self.request.is_some() && self.promised_at.is_none()
    }

    /// The pages that are to leave, in the order of addresses, each once. While the store has no room for new pages, those leave
    /// that it has already.
    fn choose_victims(&mut self, memory: &mut Memory, count: u64) -> Vec<Victim> {
        let (mut victims, mut buffers) = (Vec::new(), memory.store_buffers_for_victims());
        let mut is_full = memory.has_failed_stores() && buffers == 0;
        for searched in 0..self.unshared.len() + self.queue.len() {
            let has_searched = is_full && searched >= SEARCH_MAX;
            if victims.len() >= BATCH_PAGES.min(count as usize) || buffers == 0 && !is_full || has_searched {
                break;
            }
            // Pages that could not leave because they were shared come first.
            let (page, was_shared) = match self.unshared.pop() {
                Some(page) => (page, true),
                None => match self.queue.pop_front() {
                    Some((page, entry)) if self.is_current(page, entry) => (page, false),
                    Some(_) => continue,
                    None => break,
                },
            };
            match self.pages.get(page) {
                Page::Resident { is_hot: true, .. } => self.requeue(page),
                Page::Resident { slot: Some(slot), is_clean: true, .. } if memory.can_load(slot) => {
                    victims.push(Victim { page, slot, is_clean: true, was_shared });
                }
                Page::Resident { .. } if buffers == 0 => self.requeue(page),
                // Not clean, or its copy is lost with a node.
                Page::Resident { .. } => match self.reserve_slot(memory, page, !is_full) {
                    Some(slot) => {
                        buffers -= 1;
                        victims.push(Victim { page, slot, is_clean: false, was_shared });
                    }
                    None => {
                        self.requeue(page);
                        is_full = true;
                    }
                },
                _ => {}
            }
        }
        // The kernel moves adjacent pages faster.
        victims.sort_unstable_by_key(|victim| victim.page);
        victims.dedup_by_key(|victim| victim.page);
        victims
    }

    /// Asks the process to make pages its own that other processes share. Returns whether there were some.
    fn begin_unsharing(&mut self) -> bool {
        let shared = self.shared.split_off(self.shared.len().saturating_sub(BATCH_PAGES));
        let pages: Vec<_> = shared.iter().map(|&page| (page, false)).collect();
        if !pages.is_empty() {
            self.publish(Task::Unshare, &pages, Request::Unshare(shared));
        }
        !pages.is_empty()
    }

    fn publish(&mut self, task: Task, pages: &[(u64, bool)], request: Request) {
        let Some(link) = &mut self.link else { return };
        link.area.publish(task, pages);
        self.request = Some(request);
        // An error means that the process has ended, which its connection says, too.
        let _ = link.ring();
    }

    /// Handles the end of the request, if it has ended, and there are buffers for its pages. Returns whether it has.
    pub(crate) fn end_request(&mut self, memory: &mut Memory) -> bool {
        let Some(link) = &self.link else { return false };
        if !link.area.is_idle() {
            let is_late = self.promised_at.is_some_and(|at| at.elapsed() >= PROMISE);
            let is_withdrawn = is_late && link.area.withdraw();
            if is_late {
                self.withdraw_promise(memory);
            }
            if is_withdrawn {
                self.keep_victims();
            }
            return is_withdrawn;
        }
        let buffers = self.request.as_ref().map_or(0, Request::buffers);
        // The bytes stay in the area meanwhile.
        if self.promised_at.is_none() && memory.free_store_buffers() < buffers {
            return false;
        }
        self.withdraw_promise(memory);
        let Some(request) = self.request.take() else { return false };
        match request {
            Request::Unshare(pages) => self.unshared.extend(pages),
            Request::Evict(victims) => {
                let before = self.frames;
                for (index, victim) in victims.iter().enumerate() {
                    self.end_victim(memory, index, victim);
                }
                let has_moved = self.frames < before;
                // Those that turned out to be shared leave next.
                if has_moved || self.shared.is_empty() {
                    self.back_off(has_moved);
                }
            }
        }
        true
    }

    /// The request was taken back: its pages stay.
    fn keep_victims(&mut self) {
        match self.request.take() {
            Some(Request::Evict(victims)) => victims.iter().for_each(|victim| self.requeue(victim.page)),
            Some(Request::Unshare(pages)) => self.shared.extend(pages),
            None => {}
        }
    }

    fn end_victim(&mut self, memory: &mut Memory, index: usize, victim: &Victim) {
        let Some(link) = &self.link else { return };
        let Victim { page, slot, is_clean, was_shared } = *victim;
        match link.area.error(index) {
            0 if is_clean => {
                memory.statistics.drops += 1;
                self.set_absent(memory, page, slot);
            }
            0 => {
                let mut bytes: PageBytes = [0; PAGE_BYTES as usize];
                link.area.copy_page(index, &mut bytes);
                self.keep(memory, page, slot, &bytes);
            }
            // The process has given it up.
            ENOENT if matches!(self.pages.get(page), Page::Resident { .. }) => {
                memory.slots.release(slot);
                self.leave(memory);
                self.pages.set(page, Page::Untouched);
            }
            ENOENT => {}
            // It is pinned if it is not shared any more.
            EBUSY if !was_shared => self.shared.push(page),
            _ => self.requeue(page),
        }
    }

    /// A slot for a page whose bytes are not in the store: its own, or a new one if that is shared, being stored or lost, and
    /// there may be one. Returns `None` if the store has no more.
    fn reserve_slot(&mut self, memory: &mut Memory, page: u64, may_allocate: bool) -> Option<Slot> {
        let Page::Resident { slot: old, is_hot, stamp, .. } = self.pages.get(page) else { return None };
        let is_free = |slot| {
            let is_idle = memory.slots.is_exclusive(slot) && !memory.slots.is_storing(slot);
            is_idle && memory.accepts(slot)
        };
        if let Some(old) = old.filter(|&old| is_free(old)) {
            return Some(old);
        }
        let slot = may_allocate.then(|| memory.allocate_slot())??;
        old.into_iter().for_each(|old| memory.slots.release(old));
        self.pages.set(page, Page::Resident { slot: Some(slot), is_clean: false, is_hot, stamp });
        Some(slot)
    }

    /// Stores the bytes of a page that has left.
    fn keep(&mut self, memory: &mut Memory, page: u64, slot: Slot, bytes: &PageBytes) {
        if bytes.iter().all(|&byte| byte == 0) {
            memory.slots.release(slot);
            memory.statistics.drops += 1;
            self.leave(memory);
            return self.pages.set(page, Page::Untouched);
        }
        memory.begin_store(slot, bytes);
        self.set_absent(memory, page, slot);
    }

    fn set_absent(&mut self, memory: &mut Memory, page: u64, slot: Slot) {
        memory.evictions = memory.evictions.wrapping_add(1);
        self.leave(memory);
        self.pages.set(page, Page::Absent { slot, evicted_at: memory.evictions });
    }

    /// Waits longer before each eviction after one that moved nothing.
    fn back_off(&mut self, has_moved: bool) {
        self.futile_evictions = if has_moved { 0 } else { self.futile_evictions + 1 };
        let delay = Duration::from_micros(50 << self.futile_evictions.min(16)).min(BACKOFF_MAX);
        self.evict_after = (!has_moved).then(|| Instant::now() + delay);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use terrace_vm::{EvictionArea, FileStore};

    use super::*;
    use crate::memory::tests::HalfLost;
    use crate::process::Link;

    /// A process that has been asked for so many pages, the area by which its thread answers, and the other end of its socket.
    fn evicting(memory: &mut Memory, pages: u64) -> (Process, EvictionArea, UnixStream) {
        let (socket, peer) = UnixStream::pair().unwrap();
        let (area, file) = EvictionArea::create().unwrap();
        let thread = EvictionArea::open(file).unwrap();
        let mut process = Process::without_userfaultfd(Some(Link { socket, area }));
        memory.count_frames(pages);
        (0..pages).for_each(|index| process.enter(index * PAGE_BYTES, None, false, false));
        process.begin_eviction(memory, pages);
        (process, thread, peer)
    }

    #[test]
    fn a_process_that_does_not_answer_keeps_no_buffers_from_others() {
        let store = FileStore::new(tempfile::tempfile().unwrap(), 256, 64).unwrap();
        let mut memory = Memory::new(Box::new(store), 0);
        let (mut process, thread, _peer) = evicting(&mut memory, 32);
        thread.take().unwrap();
        assert!(!process.end_request(&mut memory));
        assert_eq!(memory.free_store_buffers(), 64 - 16 - 32);
        std::thread::sleep(PROMISE);
        assert!(!process.end_request(&mut memory));
        assert_eq!(memory.free_store_buffers(), 64 - 16);
        // Other processes use the buffers when it answers.
        for _ in 0..48 {
            let slot = memory.allocate_slot().unwrap();
            memory.begin_store(slot, &[1; PAGE_BYTES as usize]);
        }
        thread.respond();
        assert!(!process.end_request(&mut memory) && process.lacks_buffers() && !process.may_read());
        while memory.transfers().0 {
            memory.poll(Duration::from_millis(1));
        }
        assert!(process.end_request(&mut memory) && !process.lacks_buffers() && process.may_read());
        assert_eq!((memory.promised, process.frames), (0, 0));
    }

    #[test]
    fn a_request_that_a_stopped_process_has_not_begun_is_taken_back() {
        let store = FileStore::new(tempfile::tempfile().unwrap(), 256, 64).unwrap();
        let mut memory = Memory::new(Box::new(store), 0);
        let (mut process, thread, _peer) = evicting(&mut memory, 16);
        thread.set_ready();
        assert!(!process.may_read());
        std::thread::sleep(PROMISE);
        assert!(process.end_request(&mut memory) && process.may_read());
        assert_eq!((memory.promised, process.frames), (0, 16));
        // It is asked again when it has seen that.
        assert!(!process.can_evict());
        assert_eq!(thread.take(), Some((None, 0)));
        assert!(!process.can_evict());
        thread.respond();
        assert!(process.can_evict() && thread.take().is_none());
        assert_eq!(chosen(&mut process, &mut memory).len(), 16);
    }

    /// It may be stopped for long, and its pages' node be lost meanwhile.
    #[test]
    fn clean_pages_that_were_to_leave_are_stored_if_their_node_is_lost_before() {
        let store = FileStore::new(tempfile::tempfile().unwrap(), 64, 64).unwrap();
        let is_lost = Arc::new(AtomicBool::new(false));
        let mut memory = Memory::new(Box::new(HalfLost(store, is_lost.clone())), 0);
        let (mut process, ..) = evicting(&mut memory, 0);
        for index in 0..2 {
            let slot = memory.slots.allocate(|_| true);
            memory.count_frames(1);
            process.enter(index * PAGE_BYTES, slot, true, false);
        }
        process.begin_eviction(&mut memory, 2);
        let Some(Request::Evict(victims)) = &process.request else { panic!("it is asked") };
        assert!(victims.iter().all(|victim| victim.is_clean));
        is_lost.store(true, Ordering::Relaxed);
        std::thread::sleep(PROMISE);
        assert!(process.end_request(&mut memory));
        assert_eq!(chosen(&mut process, &mut memory), [(0, false), (1, true)]);
    }

    #[test]
    fn an_eviction_that_ends_late_waits_for_no_store_that_fails() {
        let store = FileStore::new(tempfile::tempfile().unwrap(), 256, 64).unwrap();
        let mut memory = Memory::new(Box::new(HalfLost::new(store)), 0);
        let (mut process, thread, _peer) = evicting(&mut memory, 16);
        thread.take().unwrap();
        std::thread::sleep(PROMISE);
        assert!(!process.end_request(&mut memory));
        // Meanwhile other processes' pages go to a node that has ended, and the others' pages are in use.
        while memory.allocate_slot().is_some() {}
        for _ in 0..48 {
            let slot = memory.slots.allocate(|_| true).unwrap();
            memory.begin_store(slot, &[1; PAGE_BYTES as usize]);
        }
        thread.respond();
        memory.poll(Duration::ZERO);
        assert!(process.end_request(&mut memory), "its faults are not read before that");
        // The pages that wait in memory leave no room for others.
        assert_eq!((memory.free_store_buffers(), memory.store_buffers_for_victims()), (48, 0));
    }

    fn chosen(process: &mut Process, memory: &mut Memory) -> Vec<(u64, bool)> {
        let victims = process.choose_victims(memory, 64);
        victims.iter().map(|victim| (victim.page / PAGE_BYTES, victim.is_clean)).collect()
    }

    #[test]
    fn pages_that_a_full_store_has_leave_although_others_cannot() {
        let store = FileStore::new(tempfile::tempfile().unwrap(), 256, 64).unwrap();
        let mut memory = Memory::new(Box::new(store), 0);
        let mut process = Process::without_userfaultfd(None);
        (0..300).for_each(|index| process.enter(index * PAGE_BYTES, None, false, false));
        for index in 300..302 {
            let slot = memory.allocate_slot();
            process.enter(index * PAGE_BYTES, slot, index == 300, false);
        }
        while memory.allocate_slot().is_some() {}
        assert_eq!(chosen(&mut process, &mut memory), [(300, true), (301, false)]);
    }

    #[test]
    fn pages_leave_that_need_no_buffer_while_stores_that_fail_have_all() {
        let store = FileStore::new(tempfile::tempfile().unwrap(), 256, 64).unwrap();
        let mut memory = Memory::new(Box::new(HalfLost::new(store)), 0);
        let mut process = Process::without_userfaultfd(None);
        (0..100).for_each(|index| process.enter(index * PAGE_BYTES, None, false, false));
        process.enter(100 * PAGE_BYTES, memory.allocate_slot(), true, false);
        for _ in 0..48 {
            let slot = memory.slots.allocate(|page| page % 2 == 0).unwrap();
            memory.begin_store(slot, &[1; PAGE_BYTES as usize]);
        }
        memory.poll(Duration::ZERO);
        assert_eq!(memory.store_buffers_for_victims(), 0);
        assert_eq!(chosen(&mut process, &mut memory), [(100, true)]);
    }

    #[test]
    fn a_page_is_one_victim_however_often_it_was_queued() {
        let store = FileStore::new(tempfile::tempfile().unwrap(), 64, 64).unwrap();
        let mut memory = Memory::new(Box::new(store), 0);
        let mut process = Process::without_userfaultfd(None);
        process.enter(PAGE_BYTES, None, false, false);
        (0..1 << 16).for_each(|_| process.requeue(PAGE_BYTES));
        let pages: Vec<_> =
            process.choose_victims(&mut memory, 64).iter().map(|victim| victim.page).collect();
        assert_eq!(pages, [PAGE_BYTES]);
        // An entry that counts twice, as after a wrap of the stamps.
        process.requeue(PAGE_BYTES);
        process.queue.extend(process.queue.back().copied());
        assert_eq!(process.choose_victims(&mut memory, 64).len(), 1);
    }

    #[test]
    fn a_clean_page_whose_copy_is_lost_is_stored_elsewhere() {
        let store = FileStore::new(tempfile::tempfile().unwrap(), 64, 64).unwrap();
        let mut memory = Memory::new(Box::new(HalfLost::new(store)), 0);
        let mut process = Process::without_userfaultfd(None);
        for index in 0..2 {
            let slot = memory.slots.allocate(|_| true);
            process.enter(index * PAGE_BYTES, slot, true, false);
        }
        let victims = process.choose_victims(&mut memory, 64);
        let chosen: Vec<_> =
            victims.iter().map(|victim| (memory.slots.page(victim.slot), victim.is_clean)).collect();
        assert_eq!(chosen, [(3, false), (1, true)]);
    }
}
