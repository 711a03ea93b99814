//! The hazards between work requests: a request waits for earlier ones so that the mix of RPCs and one-sided operations
//! is not observable.
//!
//! The queue pair executes its work requests in order. An RPC may be executed before or after them. A request only waits
//! for requests that were posted earlier, so there is no deadlock.

use super::Session;
use super::calls::Task;
use super::entry::{Entry, Kind, Route, Seq};
use crate::request::Local;
use terrace_transport::SendFlags;

/// A work request with calls in flight, as far as later READs have to be compared with it.
#[derive(Debug)]
pub(super) struct WithCalls {
    seq: Seq,
    /// What encloses its buffers, if later READs can only conflict with those.
    bounds: Option<Local>,
}

impl WithCalls {
    /// Whether a READ whose buffers these bounds enclose may have to follow it.
    fn may_concern(&self, bounds: &Local) -> bool {
        self.bounds.is_none_or(|own| own.overlaps(bounds))
    }
}

impl Session {
    /// Whether the work request at an index, whose `route` is set, has to wait for an earlier one.
    pub(super) fn is_blocked(&self, index: usize) -> bool {
        let request = &self.entries[index];
        let fenced = request.wr.flags.contains(SendFlags::FENCE);
        let can_be_repeated = request.route == Route::Checked
            && request.region.as_ref().is_some_and(|region| self.grants.is_granted(region));
        // Without calls in flight and without READs that may need one, the queue pair's own order is enough.
        let no_calls = self.task_count == 0 && (can_be_repeated || self.checked_count == 0);
        if self.mode.is_none() || (!fenced && no_calls && request.route != Route::Store) {
            return false;
        }
        // A READ that can be repeated follows requests with calls only, and these are few.
        if can_be_repeated && !fenced {
            let bounds = request.local_bounds();
            let near = self.with_calls.iter().filter(|earlier| earlier.may_concern(&bounds));
            return near
                .filter_map(|earlier| self.entries.get(self.index(earlier.seq)?))
                .any(|earlier| must_follow(request, earlier, true));
        }
        self.entries.range(..index).filter(|earlier| !earlier.is_done()).any(|earlier| {
            (fenced && matches!(earlier.kind, Kind::Read | Kind::Atomic))
                || must_follow(request, earlier, can_be_repeated)
        })
    }

    /// Counts a call that an entry waits for.
    pub(super) fn count_call(&mut self, index: usize) {
        let entry = &mut self.entries[index];
        entry.calls += 1;
        if entry.calls == 1 {
            let bounds = (entry.route != Route::Store).then(|| entry.local_bounds());
            self.with_calls.push(WithCalls { seq: self.first + index as u64, bounds });
        }
        self.task_count += 1;
    }

    /// Takes back [`Session::count_call`].
    pub(super) fn uncount_call(&mut self, index: usize) {
        let (seq, entry) = (self.first + index as u64, &mut self.entries[index]);
        entry.calls -= 1;
        if entry.calls == 0 {
            self.with_calls.retain(|other| other.seq != seq);
        }
        self.task_count -= 1;
    }

    /// Whether a call has to wait: for the server's grant, or for an earlier work request that writes the data that the
    /// call reads, or that uses the memory that the call fills.
    pub(super) fn is_deferred(&self, task: &Task) -> bool {
        let Some(index) = task.seq.and_then(|seq| self.index(seq)) else { return false };
        let request = &self.entries[index];
        if request.region.as_ref().is_some_and(|region| !self.grants.is_granted(region)) {
            return true;
        }
        self.entries.range(..index).filter(|earlier| !earlier.is_done()).any(|earlier| {
            let changes = earlier.remote.as_ref().is_some_and(|remote| remote.writes)
                && earlier.overlaps_remote(request);
            let fills =
                request.kind == Kind::Read && task.local.is_some_and(|local| earlier.overlaps_local(&local));
            changes || fills
        })
    }
}

/// Whether a request cannot begin while an earlier one is in flight. `can_be_repeated` states whether the request's
/// data can be fetched again.
fn must_follow(request: &Entry, earlier: &Entry, can_be_repeated: bool) -> bool {
    let receives = matches!(request.kind, Kind::Read | Kind::Atomic);
    let writes = request.remote.as_ref().is_some_and(|remote| remote.writes);
    match earlier.route {
        // A peer that this request notifies, and a READ of the written bytes, must observe the WRITE. The server may
        // still be reading the program's memory, too.
        Route::Store => {
            matches!(request.kind, Kind::Signal | Kind::Atomic)
                || request.overlaps_remote(earlier)
                || (receives && request.shares_local_memory(earlier))
        }
        // The earlier READ must not return bytes that this request writes.
        Route::Checked | Route::Fetch if writes && request.overlaps_remote(earlier) => true,
        // If the earlier READ needs a call later, this request is repeated; its own calls wait.
        Route::Checked | Route::Fetch if receives && request.shares_local_memory(earlier) => {
            request.route != Route::Fetch && (earlier.calls > 0 || !can_be_repeated)
        }
        _ => request.route == Route::Store && request.overlaps_remote(earlier),
    }
}
