//! Pages that came or left without us: the program and other processes load and store, and the kernel reclaims memory
//! that it needs.

use std::os::fd::AsFd;

use terrace_hostmem::PAGE_BYTES;

use super::engine::Engine;
use super::kernel::{self, WINDOW_PAGES};
use super::region::Region;

/// Pages of which one question tells that none is cached.
const SECTION_PAGES: u64 = 256 * WINDOW_PAGES;

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
                if !is_true(region, first, end, scans) {
                    found_count += self.scan_window(region, first, end);
                }
            }
        }
        found_count
    }

    fn scan_window(&self, region: &Region, first: u64, end: u64) -> u64 {
        let mut found_count = 0;
        let Some(cached) = kernel::cached(region.range_of(first, end - first)) else { return found_count };
        if !cached.contains(&true) && region.count_in(first..end) == 0 {
            return found_count;
        }
        for (page, is_cached) in (first..end).zip(cached) {
            match (is_cached, region.table.entry(page).is_readable()) {
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
