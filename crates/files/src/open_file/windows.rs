//! The windows of a file come and go.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use terrace_hostmem::{HostRange, PAGE_BYTES};

use super::{Direction, OpenFile};
use crate::budget::{Fate, Owner};
use crate::config::WINDOW_BYTES;
use crate::sys::{Handle, Mapping};
use crate::window::Window;

/// Least bytes of a window, unless its pages are larger: files that are small now may grow.
const WINDOW_BYTES_MIN: u64 = 64 << 10;
/// Accesses without a window after which a file gets one: for one access a system call is cheaper.
const MAPPED_AFTER: u32 = 2;
/// The same when another window has to leave.
const MAPPED_AFTER_WHEN_FULL: u32 = 16;

impl OpenFile {
    /// Bytes of a whole window.
    fn window_bytes(&self) -> u64 {
        WINDOW_BYTES.max(self.page_bytes())
    }

    /// The parts of a range that lie in one window each.
    pub(super) fn pieces(&self, part: HostRange) -> impl Iterator<Item = HostRange> + use<> {
        let window_bytes = self.window_bytes();
        let mut rest = part;
        std::iter::from_fn(move || {
            let len = rest.len.min(window_bytes - rest.addr % window_bytes);
            let piece = HostRange { addr: rest.addr, len };
            rest = HostRange { addr: rest.addr + len, len: rest.len - len };
            (len > 0).then_some(piece)
        })
    }

    /// Makes a window for a range, if there is none and the file is accessed often enough. None while the layout changes.
    pub(super) fn make_window(
        self: &Arc<OpenFile>,
        handle: &Handle,
        part: HostRange,
        direction: Direction,
        now_ms: u64,
    ) {
        {
            let Some(layout) = self.layout.try_read() else { return };
            if layout.window(part).is_some() || !layout.traits.is_tellable {
                return;
            }
        }
        let uses_needed = match direction {
            Direction::Write => 1,
            Direction::Read if self.shared.budget.is_full() => MAPPED_AFTER_WHEN_FULL,
            Direction::Read => MAPPED_AFTER,
        };
        if self.unmapped_count.fetch_add(1, Ordering::Relaxed) + 1 < uses_needed {
            return;
        }
        let Some(mut layout) = self.layout.try_write() else { return };
        self.unmapped_count.store(0, Ordering::Relaxed);
        let len = self.read_len(handle, now_ms);
        let start = part.addr - part.addr % self.window_bytes();
        // A handle for reading may have been replaced meanwhile.
        let is_outdated = handle.traits.is_writable != layout.traits.is_writable;
        if len <= part.addr || is_outdated || layout.window(part).is_some() {
            return;
        }
        // A shorter window of a file that was shorter leaves.
        layout.windows.retain(|window| window.start() != start);
        let owner: Arc<dyn Owner> = self.clone();
        let Some(share) = self.shared.budget.take(&owner, start) else { return };
        match Mapping::new(handle, start, self.window_len(len - start)) {
            Ok(mapping) => {
                let at = layout.windows.partition_point(|window| window.start() < start);
                layout.windows.insert(at, Window::new(start, mapping, share, now_ms));
            }
            Err(error) => tracing::debug!(%error, "a part of a file is not mapped"),
        }
    }

    /// The length of a window for a file that ends `rest` bytes after the window's start.
    fn window_len(&self, rest: u64) -> u64 {
        let whole = self.window_bytes();
        if self.page_bytes() != PAGE_BYTES {
            // A mapping beyond the end of a file of huge pages would make it longer.
            return rest.min(whole).next_multiple_of(self.page_bytes());
        }
        rest.min(whole).next_power_of_two().clamp(WINDOW_BYTES_MIN, whole)
    }
}

impl Owner for OpenFile {
    fn try_drop_window(&self, start: u64) -> Fate {
        let Some(mut layout) = self.layout.try_write() else { return Fate::Stays };
        let Some(at) = layout.windows.iter().position(|window| window.start() == start) else {
            return Fate::Gone;
        };
        if layout.windows[at].is_used.swap(false, Ordering::Relaxed) {
            return Fate::Stays;
        }
        let window = layout.windows.remove(at);
        drop(layout);
        drop(window);
        Fate::Gone
    }
}
