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
        for (addr, page) in self.pages.iter() {
            let page = match page {
                Page::Untouched => continue,
                Page::Resident { slot, is_clean, .. } => Page::Inherited { slot: slot.filter(|_| is_clean) },
                Page::Lost => Page::Lost,
                Page::Inherited { slot } => Page::Inherited { slot },
                Page::Absent { slot, evicted_at } => Page::Absent { slot, evicted_at },
                Page::Loading { slot, .. } | Page::Ahead { slot, .. } => {
                    Page::Absent { slot, evicted_at: memory.evictions }
                }
            };
            if let Page::Inherited { slot: Some(slot) } | Page::Absent { slot, .. } = page {
                memory.slots.share(slot);
            }
            child.pages.set(addr, page);
        }
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
        let inherited: Vec<_> = self.pages.iter().collect();
        for (addr, page) in inherited {
            if let Page::Inherited { slot } = page {
                memory.count_frames(1);
                self.enter(addr, slot, slot.is_some(), false);
            }
        }
    }
}
