//! The process changes its mappings, and forks.

use terrace_hostmem::HostRange;
use terrace_vm::userfault::Userfaultfd;

use crate::memory::Memory;
use crate::page_table::{Page, Purpose};
use crate::process::{Link, Process};

impl Process {
    /// Memory has moved to other addresses.
    pub(crate) fn remap(&mut self, memory: &mut Memory, from: HostRange, to: u64) {
        self.forget(memory, HostRange { addr: to, len: from.len });
        for (addr, page) in self.pages.take(from) {
            let addr = addr - from.addr + to;
            match page {
                Page::Resident { slot, is_clean, is_hot, .. } => {
                    // `enter` counts the frame again.
                    self.frames -= 1;
                    self.enter(addr, slot, is_clean, is_hot);
                }
                // The load ends at the old address, and finds nothing there.
                Page::Loading { slot, purpose, .. } => {
                    memory.markers -= usize::from(purpose == Purpose::Marker);
                    self.leave(memory);
                    self.wake(addr - to + from.addr);
                    self.pages.set(addr, Page::Absent { slot, evicted_at: memory.evictions });
                }
                Page::Ahead { slot, buffer, .. } => {
                    self.release_ahead(memory, buffer);
                    self.pages.set(addr, Page::Absent { slot, evicted_at: memory.evictions });
                }
                page => self.pages.set(addr, page),
            }
        }
    }

    /// A child with the same memory. What is in memory, the two share.
    pub(crate) fn fork(&self, memory: &mut Memory, id: u64, userfaultfd: Userfaultfd) -> Process {
        let mut child = Process::new(id, userfaultfd, None, self.identity_page);
        child.pages = self.pages.map(|page| {
            let page = match page {
                Page::Resident { slot, is_clean, .. } => Page::Inherited { slot: slot.filter(|_| is_clean) },
                Page::Loading { slot, .. } | Page::Ahead { slot, .. } => {
                    Page::Absent { slot, evicted_at: memory.evictions }
                }
                Page::Untouched | Page::Lost | Page::Inherited { .. } | Page::Absent { .. } => page,
            };
            if let Page::Inherited { slot: Some(slot) } | Page::Absent { slot, .. } = page {
                memory.slots.share(slot);
            }
            page
        });
        child
    }

    /// Forgets pages of the parent that a child does not have: where it has no registered mapping, or one that the fork has wiped. The
    /// child waits meanwhile.
    pub(crate) fn forget_uninherited(&mut self, memory: &mut Memory, pid: u32) -> std::io::Result<()> {
        let mut begin = 0;
        for HostRange { addr, len } in terrace_vm::smaps::inherited_by(pid)? {
            self.forget(memory, HostRange { addr: begin, len: addr - begin });
            begin = addr + len;
        }
        self.forget(memory, HostRange { addr: begin, len: u64::MAX - begin });
        Ok(())
    }

    /// The child's thread has joined: what it shares with its parent can leave, too.
    pub(crate) fn join(&mut self, memory: &mut Memory, link: Link) {
        self.link = Some(link);
        let inherited = self.pages.iter().filter_map(|(addr, page)| match page {
            Page::Inherited { slot } => Some((addr, slot)),
            _ => None,
        });
        for (addr, slot) in inherited.collect::<Vec<_>>() {
            memory.count_frames(1);
            self.enter(addr, slot, slot.is_some(), false);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::OwnedFd;

    use terrace_hostmem::PAGE_BYTES;
    use terrace_vm::FileStore;

    use super::*;

    #[test]
    fn a_child_has_the_pages_of_its_parent() {
        let store = FileStore::new(tempfile::tempfile().unwrap(), 4096, 64).unwrap();
        let mut memory = Memory::new(Box::new(store), 0);
        let mut parent = Process::without_userfaultfd(None);
        let page = |index: u64| 700 * index * PAGE_BYTES;
        let [clean, stored, absent] = [0; 3].map(|_| memory.allocate_slot().unwrap());
        memory.count_frames(3);
        parent.enter(page(0), None, false, false);
        parent.enter(page(1), Some(clean), true, false);
        parent.enter(page(2), Some(stored), false, false);
        parent.pages.set(page(3), Page::Absent { slot: absent, evicted_at: 7 });
        parent.pages.set(page(4), Page::Lost);
        let child = parent.fork(&mut memory, 2, OwnedFd::from(File::open("/dev/null").unwrap()).into());
        let expected = [
            Page::Inherited { slot: None },
            Page::Inherited { slot: Some(clean) },
            Page::Inherited { slot: None },
            Page::Absent { slot: absent, evicted_at: 7 },
            Page::Lost,
        ];
        assert!(child.pages.iter().eq((0..).map(page).zip(expected)));
        assert_eq!((child.pages.absent(), child.frames), (1, 0));
        let is_shared = [clean, stored, absent].map(|slot| !memory.slots.is_exclusive(slot));
        assert_eq!(is_shared, [true, false, true]);
    }
}
