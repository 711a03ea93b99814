//! Which work requests have to wait for which, so that nobody notices that some of them take another way.
//!
//! The queue pair carries out what it is given in order. What goes by RPC overtakes it, or is overtaken. Nothing ever waits
//! for something that was posted later, so nothing waits for ever.

use super::Session;
use super::calls::Task;
use super::entry::{Entry, Kind, Way};
use terrace_transport::SendFlags;

impl Session {
    /// Whether the work request at an index, whose way is known, has to wait for one before it.
    pub(super) fn is_blocked(&self, index: usize) -> bool {
        let request = &self.entries[index];
        let fenced = request.wr.flags.contains(SendFlags::FENCE);
        // Without calls under way and without READs that may need one, the queue pair's own order is enough.
        let only_reads = request.way == Way::Checked || self.checked_count == 0;
        if self.mode.is_none() || (!fenced && self.task_count == 0 && only_reads && request.way != Way::Store)
        {
            return false;
        }
        self.entries.range(..index).filter(|earlier| !earlier.is_done()).any(|earlier| {
            (fenced && matches!(earlier.kind, Kind::Read | Kind::Atomic)) || must_follow(request, earlier)
        })
    }

    /// Whether a call has to wait for a work request before its own: for one that changes what the call is to read, or that
    /// uses the memory that the call is to fill.
    pub(super) fn is_held(&self, task: &Task) -> bool {
        let Some(index) = task.seq.and_then(|seq| self.index(seq)) else { return false };
        let request = &self.entries[index];
        self.entries.range(..index).filter(|earlier| !earlier.is_done()).any(|earlier| {
            let changes =
                earlier.remote.as_ref().is_some_and(|remote| remote.writes) && earlier.meets(request);
            let fills = request.kind == Kind::Read && task.local.is_some_and(|local| earlier.touches(&local));
            changes || fills
        })
    }
}

/// Whether a request cannot begin while an earlier one is under way.
fn must_follow(request: &Entry, earlier: &Entry) -> bool {
    let receives = matches!(request.kind, Kind::Read | Kind::Atomic);
    let writes = request.remote.as_ref().is_some_and(|remote| remote.writes);
    match earlier.way {
        // Whoever hears of this request, or reads what was written, shall find it written. And the server may still be reading
        // the program's memory.
        Way::Store => {
            matches!(request.kind, Kind::Signal | Kind::Atomic)
                || request.meets(earlier)
                || (receives && request.shares_memory(earlier))
        }
        // It shall not read what is written only now.
        Way::Checked | Way::Fetch if writes && request.meets(earlier) => true,
        Way::Checked | Way::Fetch if receives && request.shares_memory(earlier) => match request.way {
            // If it finds out too late, it is itself read again.
            Way::Checked => earlier.calls > 0,
            Way::Queue => true,
            // Its calls wait.
            Way::Fetch | Way::Store => false,
        },
        _ => request.way == Way::Store && request.meets(earlier),
    }
}
