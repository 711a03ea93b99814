//! Pages come before a thread touches them.
//!
//! The first page of each batch stays in its buffer when it has been loaded. Its fault waits for no store, and says that the
//! batch is used; the next batch begins then, while the process goes on with the pages of this one.

use terrace_hostmem::PAGE_BYTES;

use crate::memory::Memory;
use crate::page_table::{Page, Purpose};
use crate::process::Process;

impl Process {
    /// Notes a fault of a page that is being loaded, or was ahead of time, and loads what is to follow.
    pub(crate) fn load_ahead(&mut self, memory: &mut Memory, page: u64, is_store: bool) {
        if !memory.prefetches {
            return;
        }
        let forecast = self.trends.record((page / PAGE_BYTES) as i64);
        memory.statistics.prefetches_used += forecast.used;
        memory.statistics.prefetches_wasted += forecast.wasted;
        if let Some(marker) = forecast.dropped {
            self.drop_marker(memory, marker as u64 * PAGE_BYTES);
        }
        let Some((first, stride, count)) = forecast.pages else { return };
        let (mut begun, mut marker, mut last) = (0, None, first - stride);
        for number in (0..count as i64).map_while(|index| first.checked_add(index.checked_mul(stride)?)) {
            let Some(addr) = u64::try_from(number).ok().and_then(|number| number.checked_mul(PAGE_BYTES))
            else {
                break;
            };
            let is_marker = marker.is_none() && begun == 0 && memory.may_mark();
            // A store to the marker is a fault: it says whether stores are to be expected of the next batch.
            let (purpose, is_store) = match is_marker {
                true => (Purpose::Marker, is_store),
                false => (Purpose::Ahead, is_store || forecast.expects_stores),
            };
            match self.begin_load_ahead(memory, addr, is_store, purpose) {
                Some(true) => {
                    begun += 1;
                    marker = if is_marker { Some(number) } else { marker };
                    memory.markers += usize::from(is_marker);
                }
                // It is in memory, or on its way.
                Some(false) => {}
                None => break,
            }
            last = number;
        }
        memory.statistics.prefetches += begun;
        self.trends.begin_batch(&forecast, begun, marker, last);
    }

    /// Begins to load a page if it is absent; returns whether it was. `None` if there is no frame or buffer to spare.
    fn begin_load_ahead(
        &mut self,
        memory: &mut Memory,
        addr: u64,
        is_store: bool,
        purpose: Purpose,
    ) -> Option<bool> {
        let Page::Absent { slot, evicted_at } = self.pages.get(addr) else { return Some(false) };
        if memory.slots.is_storing(slot) || !memory.can_load(slot) {
            return Some(false);
        }
        if !memory.take_frame_ahead() {
            return None;
        }
        let Some(buffer) = memory.begin_load(self.id, addr, slot) else {
            memory.release_frames(1);
            return None;
        };
        let (buffer, is_hot) = (buffer as u16, memory.is_hot(evicted_at));
        self.pages.set(addr, Page::Loading { slot, buffer, is_store, is_hot, purpose });
        self.frames += 1;
        Some(true)
    }

    /// A marker that no thread touches becomes absent again; one that is being loaded becomes a page like others.
    fn drop_marker(&mut self, memory: &mut Memory, addr: u64) {
        match self.pages.get(addr) {
            Page::Ahead { slot, buffer, .. } => {
                self.release_ahead(memory, buffer);
                self.pages.set(addr, Page::Absent { slot, evicted_at: memory.evictions });
            }
            Page::Loading { slot, buffer, is_store, is_hot, purpose: Purpose::Marker } => {
                memory.markers -= 1;
                let purpose = Purpose::Ahead;
                self.pages.set(addr, Page::Loading { slot, buffer, is_store, is_hot, purpose });
            }
            _ => {}
        }
    }

    /// Gives up the frame and the buffer of a page that was loaded ahead of time.
    pub(crate) fn release_ahead(&mut self, memory: &mut Memory, buffer: u16) {
        memory.markers -= 1;
        memory.release_buffer(buffer.into());
        self.leave(memory);
    }
}
