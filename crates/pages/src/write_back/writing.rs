//! The write-back of a page, from its beginning to its end.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use terrace_hostmem::PAGE_BYTES;
use terrace_shm::{GracePeriod, PageState};

use crate::engine::Engine;
use crate::frames::Record;
use crate::key::PageKey;
use crate::mapping;
use crate::region::Region;
use crate::shard::Shard;
use crate::stats::add;
use crate::store::{FrameRun, RUN_FRAMES_MAX};

/// For how long writes of a region fail before those of its other pages are left for the next attempt: a device may take half a minute for each
/// error.
const FAILING_MAX: Duration = Duration::from_secs(1);

/// A page whose write-back has begun.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ticket {
    pub(super) key: PageKey,
    pub(super) frame: u32,
    /// The page became `Clean`, and no copy was under way.
    pub(super) is_complete: bool,
    /// The frame is in no queue.
    pub(super) is_from_laundry: bool,
}

impl Engine {
    /// Begins to write a page. `None` if it is clean, or another thread writes it.
    pub(super) fn begin_write(&self, shard: &mut Shard, key: PageKey, frame: u32) -> Option<Ticket> {
        let is_dirty = self.pool.record(frame).is_some_and(|record| record.dirty);
        if !is_dirty || shard.writing.contains(&key) {
            return None;
        }
        let region = shard.regions.get(&key.slot)?.clone();
        let is_complete = self.protect(&region, key.page, frame);
        shard.writing.insert(key);
        Some(Ticket { key, frame, is_complete, is_from_laundry: false })
    }

    /// Has writes to a dirty page noticed from now on. False if a copy may be under way that would not be.
    fn protect(&self, region: &Region, page: u64, frame: u32) -> bool {
        if region.table.entry(page).state() != PageState::Dirty {
            return false;
        }
        region.change(page, PageState::Clean, frame);
        let is_quiet = !mapping::is_pinned(self.pool.pins(frame))
            && GracePeriod::of_pages(region.page_range(page)).is_over();
        if !is_quiet {
            region.change(page, PageState::Dirty, frame);
        }
        is_quiet
    }

    /// Writes pages, in runs, and ends their tickets. Returns whether a write failed.
    pub(super) fn write_tickets(
        &self,
        mut tickets: Vec<Ticket>,
        region_of: impl Fn(u8) -> Option<Arc<Region>>,
    ) -> bool {
        tickets.sort_unstable_by_key(|ticket| ticket.key);
        self.write_in_order(&tickets, region_of)
    }

    /// The same, in the order of the tickets.
    pub(super) fn write_in_order(
        &self,
        tickets: &[Ticket],
        region_of: impl Fn(u8) -> Option<Arc<Region>>,
    ) -> bool {
        let mut has_failed = false;
        for of_region in tickets.chunk_by(|before, next| before.key.slot == next.key.slot) {
            let Some(region) = region_of(of_region[0].key.slot) else { continue };
            let follows = |before: &Ticket, next: &Ticket| before.key.page + 1 == next.key.page;
            let mut failing_for = Duration::ZERO;
            for run in of_region.chunk_by(follows).flat_map(|run| run.chunks(RUN_FRAMES_MAX)) {
                has_failed |= self.write_adjacent(&region, run, &mut failing_for);
            }
        }
        has_failed
    }

    /// Writes adjacent pages, and ends their tickets. Pages that are left when failed writes of the region have taken too long
    /// (`failing_for`) end as unwritten. Returns whether a write failed.
    fn write_adjacent(&self, region: &Region, run: &[Ticket], failing_for: &mut Duration) -> bool {
        let end_unwritten =
            |tickets: &[Ticket]| tickets.iter().for_each(|ticket| self.end_write(region, *ticket, false));
        if *failing_for >= FAILING_MAX {
            end_unwritten(run);
            return true;
        }
        let (mut rest, mut count_max, mut has_failed) = (run, run.len(), false);
        while !rest.is_empty() {
            let began = Instant::now();
            let (done, result) = self.write_run(region, &rest[..count_max.min(rest.len())]);
            add(&region.counters.pages_written, done as u64);
            let (written, unwritten) = rest.split_at(done);
            written.iter().for_each(|ticket| self.end_write(region, *ticket, true));
            rest = unwritten;
            let Err(error) = result else { continue };
            has_failed = true;
            *failing_for += began.elapsed();
            region.note_write_failure(error);
            if count_max > 1 {
                // One of the pages may be the reason: each is written alone.
                count_max = 1;
            } else if let Some((ticket, others)) = rest.split_first() {
                end_unwritten(&[*ticket]);
                rest = others;
                if *failing_for >= FAILING_MAX {
                    end_unwritten(rest);
                    // So that those that are left are tried first.
                    self.lock(ticket.key).try_again_after(ticket.key);
                    break;
                }
            }
        }
        has_failed
    }

    /// Returns how many pages were written, and why not all of them.
    fn write_run(&self, region: &Region, run: &[Ticket]) -> (usize, Result<(), Errno>) {
        let slot = self.pool.slot(region.slot);
        let mut done = 0;
        while done < run.len() {
            let mut rest = &run[done..];
            let offset = region.file_offset(rest[0].key.page);
            let reaches = |count: usize| region.files.reaches(offset + count as u64 * PAGE_BYTES);
            if !reaches(rest.len()) {
                rest = &rest[..(1..rest.len()).take_while(|&count| reaches(count)).count()];
            }
            if rest.is_empty() {
                return (done, Err(Errno::FBIG));
            }
            let frames = FrameRun::new(self.pool.clone(), rest.iter().map(|ticket| ticket.frame));
            let file = region.files.best();
            match self.writes.write(file.as_fd(), offset, &frames) {
                Ok(count) if count as u64 >= PAGE_BYTES => done += count / PAGE_BYTES as usize,
                Ok(_) => return (done, Err(Errno::IO)),
                Err(Errno::INTR) => {}
                Err(error) if region.files.give_up_direct(error) => {}
                Err(error) => return (done, Err(error)),
            }
            slot.note_written();
        }
        (done, Ok(()))
    }

    fn end_write(&self, region: &Region, ticket: Ticket, is_written: bool) {
        let Ticket { key, frame, is_complete, is_from_laundry } = ticket;
        let mut shard = self.lock(key);
        shard.writing.remove(&key);
        if is_written {
            region.syncs.note_written();
        }
        shard.note_written(region, key, frame, is_written);
        let is_clean = region.table.entry(key.page).state() == PageState::Clean;
        if is_written && is_complete && is_clean {
            self.pool.set_record(frame, Record { slot: key.slot, page: key.page, dirty: false });
        } else if is_clean {
            region.change(key.page, PageState::Dirty, frame);
        }
        if is_from_laundry {
            shard.end_laundry(key, frame);
        }
    }
}
