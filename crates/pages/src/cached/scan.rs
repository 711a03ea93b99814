//! Pages that came or left without us: the program and other processes load and store, and the kernel reclaims memory
//! that it needs.
//!
//! The kernel reads no page ahead of the program's ([`kernel::expect_random`]), because the folios of its readahead do not
//! leave. So the scan does: behind a run of pages that came since the last scan, it has those read that follow.

use std::ops::Range;
use std::os::fd::AsFd;

use terrace_hostmem::PAGE_BYTES;

use super::engine::Engine;
use super::kernel::{self, WINDOW_PAGES};
use super::region::Region;
use crate::replacement::SMALL_SHARE;

/// Pages of which one question tells that none is cached.
const SECTION_PAGES: u64 = 256 * WINDOW_PAGES;

/// A run of fewer new pages is no sign of a program that goes through its memory in order.
const RUN_MIN_PAGES: u64 = 32;
/// For each page of the run, so many are read ahead.
const AHEAD_FACTOR: u64 = 4;
/// The most pages that are read ahead of one run: with a scan each 10 ms, more than the disk brings.
const AHEAD_MAX_PAGES: u64 = 4096;

/// What the thread keeps between scans.
#[derive(Debug, Default)]
pub(super) struct Scans {
    /// `cachestat` is missing.
    is_count_missing: bool,
}

impl Engine {
    /// Compares what is in the page cache with the page table, and makes the table true. Returns for how many pages it
    /// was not. The caller keeps the region.
    pub(super) fn scan(&self, region: &Region, scans: &mut Scans) -> u64 {
        let mut found_count = 0;
        if !region.is_scannable {
            return found_count;
        }
        let page_count = region.table.page_count();
        let mut run = 0..0;
        for section in (0..page_count).step_by(SECTION_PAGES as usize) {
            let section_end = (section + SECTION_PAGES).min(page_count);
            let is_empty = region.count_in(section..section_end) == 0;
            if is_empty && cached_count(region, section, section_end, scans) == Some(0) {
                continue;
            }
            for first in (section..section_end).step_by(WINDOW_PAGES as usize) {
                let end = (first + WINDOW_PAGES).min(page_count);
                if region.is_closing() {
                    return found_count;
                }
                if is_true(region, first, end, scans) {
                    self.read_ahead(region, std::mem::take(&mut run));
                } else {
                    found_count += self.scan_window(region, first..end, &mut run);
                }
            }
        }
        self.read_ahead(region, run);
        found_count
    }

    /// `run` is the run of new pages at the end of the window before.
    fn scan_window(&self, region: &Region, window: Range<u64>, run: &mut Range<u64>) -> u64 {
        let mut found_count = 0;
        let len = region.range_of(window.start, window.end - window.start).len;
        let offset = region.offset_of(window.start);
        let Some(cached) = kernel::cached(region.file.as_fd(), offset, len) else { return found_count };
        if !cached.contains(&true) && region.count_in(window.clone()) == 0 {
            return found_count;
        }
        let is_present = |page| region.table.entry(page).is_readable();
        // Before the pages get slots, which takes time: the program goes on.
        for (page, is_cached) in window.clone().zip(&cached) {
            match (is_cached, is_present(page)) {
                (true, false) if page == run.end => run.end += 1,
                (true, false) => *run = page..page + 1,
                (false, _) if page == run.end => self.read_ahead(region, std::mem::take(run)),
                _ => {}
            }
        }
        for (page, is_cached) in window.zip(cached) {
            match (is_cached, is_present(page)) {
                (true, false) => {
                    // Pages beyond the budget leave for it, by the policy.
                    while !self.adopt(region, page) {
                        if region.is_closing() || region.losses.are_there() || !self.reclaim() {
                            return found_count;
                        }
                    }
                    found_count += 1;
                }
                (false, true) => {
                    self.lock(region.key(page)).forget(region, page);
                    found_count += 1;
                }
                _ => {}
            }
        }
        found_count
    }
}

impl Engine {
    /// Has the pages read that follow those of a run which the program has touched. No more than fit beside the hot pages:
    /// half of the policy's small queue. The run may have pages that were read ahead and not touched: they alone are no
    /// reason to read on.
    fn read_ahead(&self, region: &Region, run: Range<u64>) {
        if run.end - run.start < RUN_MIN_PAGES {
            return;
        }
        let touched = kernel::mapped_until(region.range_of(run.start, run.end - run.start)) / PAGE_BYTES;
        let room = self.counters.len() as u64 / (2 * SMALL_SHARE as u64);
        let count = (touched * AHEAD_FACTOR).min(AHEAD_MAX_PAGES).min(room);
        let end = (run.start + touched + count).min(region.table.page_count());
        if touched >= RUN_MIN_PAGES && run.end < end {
            let range = region.range_of(run.end, end - run.end);
            kernel::read_ahead(region.file.as_fd(), region.offset_of(run.end), range.len);
        }
    }
}

/// Whether as many pages are cached as are present.
fn is_true(region: &Region, first: u64, end: u64, scans: &mut Scans) -> bool {
    cached_count(region, first, end, scans) == Some(region.count_in(first..end))
}

fn cached_count(region: &Region, first: u64, end: u64, scans: &mut Scans) -> Option<u64> {
    if scans.is_count_missing {
        return None;
    }
    let len = (end - first) * PAGE_BYTES;
    let count = kernel::cached_count(region.file.as_fd(), region.offset_of(first), len);
    scans.is_count_missing = count.is_none();
    count
}
