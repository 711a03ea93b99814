//! Which work requests have to wait for which, so that the mix of RPCs and one-sided operations is not observable.
//!
//! The queue pair carries out its work requests in order. An RPC overtakes them, or is overtaken. No request ever
//! waits for one that was posted later, so none waits for ever.

use super::Session;
use super::calls::Task;
use super::entry::{Entry, Kind, Way};
use terrace_transport::SendFlags;

impl Session {
    /// Whether the work request at an index, whose `way` is set, has to wait for one before it.
    pub(super) fn is_blocked(&self, index: usize) -> bool {
        let request = &self.entries[index];
        let fenced = request.wr.flags.contains(SendFlags::FENCE);
        let can_be_repeated = request.way == Way::Checked
            && request.region.as_ref().is_some_and(|region| self.grants.is_granted(region));
        // Without calls in flight and without READs that may need one, the queue pair's own order is enough.
        let no_calls = self.task_count == 0 && (can_be_repeated || self.checked_count == 0);
        if self.mode.is_none() || (!fenced && no_calls && request.way != Way::Store) {
            return false;
        }
        self.entries.range(..index).filter(|earlier| !earlier.is_done()).any(|earlier| {
            (fenced && matches!(earlier.kind, Kind::Read | Kind::Atomic))
                || must_follow(request, earlier, can_be_repeated)
        })
    }

    /// Whether a call has to wait: for the server's grant, or for an earlier work request that changes the data that
    /// the call is to read, or that uses the memory that the call is to fill.
    pub(super) fn is_held(&self, task: &Task) -> bool {
        let Some(index) = task.seq.and_then(|seq| self.index(seq)) else { return false };
        let request = &self.entries[index];
        if request.region.as_ref().is_some_and(|region| !self.grants.is_granted(region)) {
            return true;
        }
        self.entries.range(..index).filter(|earlier| !earlier.is_done()).any(|earlier| {
            let changes =
                earlier.remote.as_ref().is_some_and(|remote| remote.writes) && earlier.meets(request);
            let fills = request.kind == Kind::Read && task.local.is_some_and(|local| earlier.touches(&local));
            changes || fills
        })
    }
}

/// Whether a request cannot begin while an earlier one is in flight. `can_be_repeated` states whether the request's
/// data can be fetched again.
fn must_follow(request: &Entry, earlier: &Entry, can_be_repeated: bool) -> bool {
    let receives = matches!(request.kind, Kind::Read | Kind::Atomic);
    let writes = request.remote.as_ref().is_some_and(|remote| remote.writes);
    match earlier.way {
        // A peer that is notified by this request, or a READ of the written bytes, must find the WRITE done. And the
        // server may still be reading the program's memory.
        Way::Store => {
            matches!(request.kind, Kind::Signal | Kind::Atomic)
                || request.meets(earlier)
                || (receives && request.shares_memory(earlier))
        }
        // It must not read bytes that are written only now.
        Way::Checked | Way::Fetch if writes && request.meets(earlier) => true,
        // If a call for the earlier one becomes necessary later, the request itself is repeated; and calls of its own
        // wait.
        Way::Checked | Way::Fetch if receives && request.shares_memory(earlier) => {
            request.way != Way::Fetch && (earlier.calls > 0 || !can_be_repeated)
        }
        _ => request.way == Way::Store && request.meets(earlier),
    }
}
