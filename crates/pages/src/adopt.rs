//! Pages that an earlier process has left in the pool are taken over.

use std::os::fd::AsFd;
use std::sync::Arc;

use terrace_shm::PageState;

use crate::engine::Engine;
use crate::frames::Record;
use crate::region::Region;
use crate::shard::Shard;
use crate::stats::add;

/// Maps the pages of a region that are in the pool. If the file has changed meanwhile, the pages whose bytes
/// the file had are discarded.
pub(crate) fn adopt(engine: &Engine, region: &Arc<Region>) {
    let slot = engine.pool.slot(region.slot);
    // If the kernel does not tell, the file is taken for changed.
    let is_changed = slot.is_changed_by_others(region.files.buffered().as_fd()).unwrap_or(true);
    let (mut adopted, mut dirty, mut discarded) = (0, 0, 0);
    for shard in engine.shards() {
        let mut shard = shard.lock();
        for (frame, record) in shard.take_claims(region.slot) {
            if is_changed && !record.dirty || record.page >= region.table.page_count() {
                engine.pool.clear_record(frame);
                let slot = shard.slot_of(frame);
                shard.policy.free(slot);
                discarded += 1;
                continue;
            }
            map(&mut shard, region, frame, record);
            adopted += 1;
            dirty += u64::from(record.dirty);
        }
    }
    add(&region.counters.pages_adopted, adopted);
    // The earlier process may have written pages that it has not synced, and that have left memory.
    region.syncs.note_written();
    region.syncs.note_left();
    let path = &region.files.path;
    if is_changed && adopted + discarded > 0 {
        tracing::warn!(
            ?path,
            kept = dirty,
            discarded,
            "a region's file, its name or its permissions have changed since its last server wrote to it: of the pages in the \
             pool, only those with newer bytes are kept"
        );
    } else if adopted + discarded > 0 {
        tracing::info!(?path, pages = adopted, dirty, "pages of a region are taken over from the pool");
    }
}

fn map(shard: &mut Shard, region: &Region, frame: u32, record: Record) {
    region.change(record.page, PageState::Filling, frame);
    let state = if record.dirty { PageState::Dirty } else { PageState::Clean };
    region.change(record.page, state, frame);
    let slot = shard.slot_of(frame);
    shard.policy.insert_main(slot);
}
