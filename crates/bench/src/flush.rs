//! The time of a FLUSH of 8 bytes, while nothing else is dirty and while much else is.

use std::time::{Duration, Instant};

use serde::Serialize;

use crate::application::Application;
use crate::content::{Stamp, fill};
use crate::plan::{Mode, Storage};
use crate::target::{Target, TargetError};
use crate::test_harness::{REHEARSAL_REGION_BYTES, ServerSpec, TestHarness, TestServer};

/// The region, all of which is in memory. Write-back begins when more than half of the frames are dirty, so the dirty
/// pages of the measurement stay dirty.
const REGION_BYTES: u64 = 3 << 30;
/// The part of the region that is made dirty, in so many of its parts: 1 GiB.
const DIRTY_SHARE: u64 = 3;
/// The part in which 8 bytes are written and flushed: pages of the first 1/48, which the dirty part does not have.
const FLUSHED_SHARE: u64 = 48;
/// Bytes of a FLUSH.
const FLUSH_BYTES: usize = 8;
/// FLUSHes for a median.
const FLUSHES: u64 = 300;
/// FLUSHes before, whose extents the file system may have to allocate.
const WARM_UP: u64 = 50;
/// Bytes of a WRITE that makes pages dirty, and the WRITEs in flight.
const WRITE_BYTES: usize = 256 << 10;
const DEPTH: usize = 16;
/// The time limit for an access.
const PATIENCE: Duration = Duration::from_secs(20);

/// The threshold of the ratio.
pub const RATIO_MAX: f64 = 3.0;

/// A line of the table.
#[derive(Clone, Debug, Serialize)]
pub struct FlushRow {
    /// Bytes that were dirty before the first FLUSH, by the server's statistics.
    pub dirty_before: Option<u64>,
    /// The same after the last one.
    pub dirty_after: Option<u64>,
    /// Median time of a FLUSH.
    pub p50_us: f64,
    /// 99th percentile.
    pub p99_us: f64,
}

/// Titles of [`FlushRow::cells`].
pub const HEADER: [&str; 4] = ["dirty before", "dirty after", "FLUSH p50 us", "p99 us"];

impl FlushRow {
    /// The cells of the line.
    pub fn cells(&self) -> Vec<String> {
        let size = |count: Option<u64>| count.map_or("-".to_owned(), |count| format!("{} MiB", count >> 20));
        vec![
            size(self.dirty_before),
            size(self.dirty_after),
            format!("{:.0}", self.p50_us),
            format!("{:.0}", self.p99_us),
        ]
    }
}

/// The result: without and with other dirty pages.
#[derive(Clone, Debug, Serialize)]
pub struct FlushResult {
    /// Nothing else is dirty.
    pub alone: FlushRow,
    /// 1 GiB elsewhere is dirty.
    pub beside: FlushRow,
    /// The ratio of the medians.
    pub ratio: f64,
}

impl FlushResult {
    /// Whether the ratio is within [`RATIO_MAX`].
    pub fn is_met(&self) -> bool {
        self.ratio <= RATIO_MAX
    }

    /// The line below the table.
    pub fn verdict(&self) -> String {
        let label = if self.is_met() { "ok" } else { "MISSED" };
        format!("ratio {:.2}, threshold <= {RATIO_MAX:.2}: {label}\n", self.ratio)
    }
}

/// The title above the table.
pub const TITLE: &str = "FLUSH of 8 bytes in a region of 3 GiB, all of it in memory";

/// Measures. The error is one line of text.
///
/// # Errors
/// When the server does not start, or an access fails.
pub fn run(harness: &mut dyn TestHarness, is_rehearsal: bool) -> Result<FlushResult, String> {
    let region = if is_rehearsal { REHEARSAL_REGION_BYTES } else { REGION_BYTES };
    let spec = ServerSpec {
        mode: Mode::Term,
        region,
        dram: region,
        application: Application::Blocks,
        storage: Storage::Disk,
        threads: 1,
        preload: None,
    };
    let server = harness.start(&spec).map_err(|error| error.to_string())?;
    let mut result = Err(TargetError("the client did not run".into()));
    let connected = server.connect().with_target(0, DEPTH, WRITE_BYTES, &mut |target| {
        result = Flusher { target, region, done: Vec::new() }.measure_both(&*server);
    });
    connected.and(result).map_err(|error| error.to_string())
}

struct Flusher<'a> {
    target: &'a mut dyn Target,
    region: u64,
    done: Vec<crate::target::Completion>,
}

impl Flusher<'_> {
    fn measure_both(&mut self, server: &dyn TestServer) -> Result<FlushResult, TargetError> {
        self.write_and_flush(WARM_UP)?;
        let alone = self.measure(server)?;
        self.make_dirty()?;
        let beside = self.measure(server)?;
        let ratio = beside.p50_us / alone.p50_us;
        Ok(FlushResult { alone, beside, ratio })
    }

    fn measure(&mut self, server: &dyn TestServer) -> Result<FlushRow, TargetError> {
        let dirty = || server.counts().and_then(|counts| counts.dirty_bytes);
        let dirty_before = dirty();
        let mut times = self.write_and_flush(FLUSHES)?;
        times.sort_unstable();
        let percentile = |share: usize| times[times.len() * share / 100].as_secs_f64() * 1e6;
        Ok(FlushRow { dirty_before, dirty_after: dirty(), p50_us: percentile(50), p99_us: percentile(99) })
    }

    /// Writes 8 bytes and flushes them, in page after page. Returns the times of the FLUSHes.
    fn write_and_flush(&mut self, count: u64) -> Result<Vec<Duration>, TargetError> {
        let mut bytes = [0; FLUSH_BYTES];
        let pages = self.region / FLUSHED_SHARE / 4096;
        let mut times = Vec::new();
        for index in 0..count {
            // Pages of different groups of 16, in no order that a device would like.
            let offset = index * 1009 % pages * 4096;
            bytes.copy_from_slice(&index.to_ne_bytes());
            self.target.store(0, &bytes)?;
            self.target.write(offset, 0, FLUSH_BYTES, 0)?;
            self.wait(1)?;
            let begun = Instant::now();
            self.target.commit(offset, FLUSH_BYTES, 0)?;
            self.wait(1)?;
            times.push(begun.elapsed());
        }
        Ok(times)
    }

    /// Writes the last third of the region.
    fn make_dirty(&mut self) -> Result<(), TargetError> {
        let first = self.region - self.region / DIRTY_SHARE;
        let mut bytes = vec![0; WRITE_BYTES];
        fill(&mut bytes, 0, Stamp::INITIAL);
        for slot in 0..DEPTH {
            self.target.store(slot, &bytes)?;
        }
        let offsets: Vec<u64> = (first..self.region).step_by(WRITE_BYTES).collect();
        for offsets in offsets.chunks(DEPTH) {
            for (slot, offset) in offsets.iter().enumerate() {
                let len = WRITE_BYTES.min((self.region - offset) as usize);
                self.target.write(*offset, slot, len, slot as u64)?;
            }
            self.wait(offsets.len())?;
        }
        Ok(())
    }

    fn wait(&mut self, count: usize) -> Result<(), TargetError> {
        let begun = Instant::now();
        while self.done.len() < count {
            self.target.poll(&mut self.done)?;
            if begun.elapsed() > PATIENCE {
                return Err(TargetError(format!(
                    "an access has no completion after {} s",
                    PATIENCE.as_secs()
                )));
            }
        }
        self.done.drain(..).try_for_each(|completion| completion.outcome)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_harness::Rehearsal;

    #[test]
    fn both_lines_are_measured_and_judged() {
        let result = run(&mut Rehearsal::default(), true).unwrap();
        assert!(result.alone.p50_us > 0.0 && result.ratio > 0.0, "{result:?}");
        assert_eq!(result.beside.cells().len(), HEADER.len());
        let missed = FlushResult { ratio: 3.1, ..result };
        assert!(!missed.is_met() && missed.verdict().ends_with("MISSED\n"));
    }
}
