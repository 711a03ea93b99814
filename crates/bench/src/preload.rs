//! Preloading: fills memory with the pages that are resident after a long run.
//!
//! Modes that fill memory by page faults need minutes: a few thousand faults per second, for a quarter of a million
//! pages. So a process in the server's control group reads the hottest pages into the page cache before the measurement.
//! The kernel charges them to the group, as if the server had read them.

use std::fs::File;
use std::io;
use std::num::NonZero;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::{Advice, fadvise};

use crate::application::Application;
use crate::keys::scatter;

const PAGE_BYTES: u64 = 4096;
/// The most bytes per read.
const CHUNK_BYTES: u64 = 1 << 20;

/// Reads the hottest `memory_bytes` of a region's file into the page cache, for an application's accesses of
/// `access_bytes`.
///
/// # Errors
/// Errors of reading the file.
pub fn preload(
    path: &Path,
    application: Application,
    access_bytes: u64,
    memory_bytes: u64,
) -> io::Result<()> {
    let file = File::open(path)?;
    let runs = runs(&hottest(file.metadata()?.len(), application, access_bytes, memory_bytes));
    // Readahead of all runs first, so that the disk gets many concurrent requests.
    for run in &runs {
        fadvise(&file, run.start, NonZero::new(run.end - run.start), Advice::WillNeed)?;
    }
    let mut chunk = vec![0; CHUNK_BYTES as usize];
    for run in runs {
        for at in run.clone().step_by(chunk.len()) {
            let len = (run.end - at).min(CHUNK_BYTES) as usize;
            file.read_exact_at(&mut chunk[..len], at)?;
        }
    }
    Ok(())
}

/// For each page, whether it is among the hottest.
fn hottest(region_bytes: u64, application: Application, access_bytes: u64, memory_bytes: u64) -> Vec<bool> {
    let page_count = region_bytes / PAGE_BYTES;
    let mut wanted = vec![false; page_count as usize];
    let mut left = (memory_bytes / PAGE_BYTES).min(page_count);
    let key_count = application.key_count(region_bytes, access_bytes);
    let scatter = scatter(key_count);
    for rank in 0..key_count {
        let ranges = application.ranges(scatter.apply(rank), access_bytes);
        for page in ranges.flat_map(|range| range.start / PAGE_BYTES..range.end.div_ceil(PAGE_BYTES)) {
            if left == 0 {
                return wanted;
            }
            if let Some(wanted) = wanted.get_mut(page as usize).filter(|wanted| !**wanted) {
                *wanted = true;
                left -= 1;
            }
        }
    }
    wanted
}

/// Runs of adjacent pages, as byte ranges.
fn runs(pages: &[bool]) -> Vec<Range<u64>> {
    let mut runs: Vec<Range<u64>> = Vec::new();
    for (page, _) in pages.iter().enumerate().filter(|(_, wanted)| **wanted) {
        let start = page as u64 * PAGE_BYTES;
        match runs.last_mut().filter(|run| run.end == start) {
            Some(run) => run.end += PAGE_BYTES,
            None => runs.push(start..start + PAGE_BYTES),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hottest_pages_fill_memory() {
        let (blocks, store) = (Application::Blocks, Application::KeyValueStore);
        for (application, access_bytes) in [(blocks, 256), (blocks, 4096), (blocks, 16384), (store, 128)] {
            let wanted = hottest(8 << 20, application, access_bytes, 2 << 20);
            assert_eq!(wanted.iter().filter(|wanted| **wanted).count(), 512, "accesses of {access_bytes}");
            let hottest_key = scatter(application.key_count(8 << 20, access_bytes)).apply(0);
            for range in application.ranges(hottest_key, access_bytes) {
                assert!(wanted[(range.start / PAGE_BYTES) as usize]);
            }
        }
        assert!(hottest(1 << 20, blocks, 64, 1 << 30).iter().all(|wanted| *wanted));
    }

    #[test]
    fn runs_are_as_long_as_possible() {
        let runs = runs(&[true, true, false, true]);
        assert_eq!(runs, [0..2 * PAGE_BYTES, 3 * PAGE_BYTES..4 * PAGE_BYTES]);
    }

    #[test]
    fn a_file_is_read_to_its_end() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(3 << 20).unwrap();
        preload(file.path(), Application::Blocks, 4096, 3 << 20).unwrap();
        assert!(preload(Path::new("/nowhere"), Application::Blocks, 4096, 4096).is_err());
    }
}
