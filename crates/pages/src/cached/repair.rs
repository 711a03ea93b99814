//! What could not be written back is written again.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use terrace_faults::StorageOperation;
use terrace_memory::make_dirty;

use super::engine::Engine;
use super::region::Region;

/// The interval between repairs, which would keep a failed disk busy.
const RETRY_AFTER: Duration = Duration::from_millis(250);

impl Engine {
    /// After a failed write-back, writes all cached pages of the region again, because the kernel does not report which
    /// page failed.
    pub(super) fn repair(&self, region: &Region) {
        if !region.losses.are_there() {
            return;
        }
        if region.losses.alone().is_some_and(|tried| tried.elapsed() < RETRY_AFTER) {
            return;
        }
        // The first failure was logged.
        let _ = self.write_again(region);
    }

    /// [`Engine::repair`], at once.
    ///
    /// # Errors
    /// When the pages cannot be written.
    pub(super) fn write_again(&self, region: &Region) -> std::io::Result<()> {
        let mut tried = region.losses.alone();
        *tried = Some(Instant::now());
        let noticed = region.losses.noticed();
        // A read-only region has no data that a client was told is stored.
        if region.is_writable {
            make_dirty(region.map)?;
        }
        self.suffer(StorageOperation::WriteBack)?;
        rustix::fs::fdatasync(region.file.as_fd())?;
        region.losses.end(noticed);
        tracing::info!(
            addr = format_args!("{:#x}", region.map.addr),
            "what could not be written back of a region is written now"
        );
        Ok(())
    }
}
