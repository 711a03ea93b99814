//! FLUSH: making a range durable.

use std::os::fd::AsFd;

use terrace_faults::StorageOperation;
use terrace_hostmem::HostRange;
use terrace_memory::{AccessError, sync_mapping};

use super::engine::Engine;
use super::kernel;
use super::region::Region;
use crate::access::Kind;
use crate::stats::add;

/// The main loop of the thread.
pub(super) fn run(engine: &Engine) {
    while let Some(access) = engine.flushes.next() {
        let Kind::Flush { first, end } = access.kind else { unreachable!("only flushes are queued") };
        // By its counters, because another region may have its slot by now.
        let region = engine.regions().into_iter().find(|region| access.is_to(&region.counters));
        let used = region.as_ref().and_then(|region| Some((region.begin_use()?, region)));
        let result = match used {
            Some((_used, region)) => engine.flush(region, region.range_of(first, end - first)),
            None => Err(AccessError::Fault),
        };
        access.end(result)();
    }
}

/// Records a failed write-back, also one whose report the program has taken: `msync` asks the description of the file that
/// the program has mapped. That of the region has a report of its own.
fn check_write_backs(region: &Region, range: HostRange) {
    if region.is_memory || !region.is_writable {
        return;
    }
    let _alone = region.losses.alone();
    let offset = region.file_offset + (range.addr - region.map.addr);
    if let Err(error) = kernel::end_write_back(region.file.as_fd(), offset, range.len) {
        region.note_loss(&error);
    }
}

impl Engine {
    /// Writes a range with `msync`, which writes no other pages of the file.
    fn flush(&self, region: &Region, range: HostRange) -> Result<(), AccessError> {
        add(&region.counters.flushes, 1);
        let synced = self.suffer(StorageOperation::Sync).map_err(|_| AccessError::Flush);
        let synced = synced.and_then(|()| sync_mapping(range));
        if synced == Err(AccessError::Flush) {
            region.note_loss(&"msync failed");
        }
        check_write_backs(region, range);
        synced.and(if region.losses.are_there() { Err(AccessError::Flush) } else { Ok(()) })
    }
}
