//! Outcomes of work requests: completions, answers of the server, failures.

use terrace_transport::{SendOp, Time, Wc, WcStatus};

use super::calls::{Request, Task};
use super::entry::{Route, Seq};
use super::grants::Verdict;
use super::{Action, EARLY_COMPLETIONS_MAX, Post, Session, read};
use crate::proto::Status;
use crate::request::{Local, completion_status};
use crate::sge_list::LocalMemory;

impl Session {
    /// Handles the completion of a post. False if the session did not post the work request.
    pub fn handle_completion(&mut self, wc: &Wc, memory: &impl LocalMemory) -> bool {
        if self.posted.front().is_none_or(|post| post.token != wc.wr_id) {
            return false;
        }
        let Some(post) = self.posted.pop_front() else { return false };
        self.stalled = false;
        let Some(index) = self.index(post.seq) else { return true };
        self.entries[index].posts -= 1;
        if wc.status != WcStatus::Success {
            self.in_error = true;
            self.entries[index].wc = post.range.is_none().then_some(*wc);
            let (status, vendor_err) = self.failure_of(post.seq, wc);
            self.fail(index, status, vendor_err);
        } else if post.range.is_none() {
            self.entries[index].wc = Some(*wc);
        } else {
            self.inspect_read(index, &post, memory);
        }
        self.complete_early(index);
        self.release_deferred_calls();
        true
    }

    /// Flushes a work request that the queue pair refused, and all later ones. False if the session did not post it.
    pub fn handle_refused(&mut self, wr_id: u64) -> bool {
        let Some(position) = self.posted.iter().position(|post| post.token == wr_id) else { return false };
        let Some(post) = self.posted.remove(position) else { return false };
        self.stalled = false;
        if let Some(index) = self.index(post.seq) {
            self.entries[index].posts -= 1;
            self.fail(index, WcStatus::Flushed, 0);
        }
        self.release_deferred_calls();
        true
    }

    /// The failure that a post's completion reports. A post may be flushed because a later request failed before it was
    /// posted. It gets the status of that failure, so that the program sees the cause.
    fn failure_of(&self, seq: Seq, wc: &Wc) -> (WcStatus, u32) {
        let failed_later = self.first_failed.filter(|&failed| wc.status == WcStatus::Flushed && failed > seq);
        let failure = failed_later.and_then(|failed| self.entries[self.index(failed)?].failure);
        failure.unwrap_or((wc.status, wc.vendor_err))
    }

    /// Inspects the data of a READ, and requests the absent pages when all of its posts have completed.
    fn inspect_read(&mut self, index: usize, post: &Post, memory: &impl LocalMemory) {
        let entry = &mut self.entries[index];
        if entry.failure.is_some() || entry.route != Route::Checked {
            return;
        }
        let mut suspects = std::mem::take(&mut entry.suspects);
        let entry = &self.entries[index];
        let (Some(region), SendOp::Read { va, .. }) = (&entry.region, entry.wr.op) else { return };
        let range = post.range.clone().unwrap_or(0..entry.length);
        let mtu_bytes = self.config.mtu_bytes.into();
        if read::inspect(entry, region, range, mtu_bytes, memory, &mut suspects).is_err() {
            return self.fail(index, WcStatus::LocalProtection, 0);
        }
        // Before the request for the signature page, and after a refusal, bytes that match it are data.
        if suspects.is_empty() || (entry.posts == 0 && !self.grants.may_return_signature(region)) {
            return;
        }
        if entry.posts > 0 {
            self.entries[index].suspects = suspects;
            return;
        }
        read::mark_absent(region, va, &suspects);
        let tasks = read::read_calls(post.seq, entry, region, &suspects);
        self.mark_overwritten(index, &tasks);
        self.queue_calls(index, tasks);
    }

    /// Marks the buffers of later READs in flight that these calls overwrite. Their data is fetched again afterwards.
    fn mark_overwritten(&mut self, index: usize, tasks: &[Task]) {
        for later in self.entries.range_mut(index + 1..) {
            if later.route == Route::Checked && later.posts > 0 {
                let locals = tasks.iter().filter_map(|task| task.local);
                let shared: Vec<Local> = locals.filter(|local| later.overlaps_local(local)).collect();
                later.overwritten.extend(shared);
            }
        }
    }

    /// Handles the server's answer to a call. False if the session did not make the call.
    pub fn handle_done(&mut self, now: Time, id: u64, status: Status) -> bool {
        let Some(task) = self.calls.take_answered(id) else { return false };
        self.stalled = false;
        if let Request::Magic(magic) = task.request {
            let verdict = self.grants.handle_answer(now, magic.rkey, magic.region_id, status);
            self.handle_verdict(magic.rkey, verdict);
            return true;
        }
        // After RESET no work request waits for the answer.
        let Some(index) = task.seq.and_then(|seq| self.index(seq)) else { return true };
        let has_failed = self.entries[index].failure.is_some();
        if status == Status::Busy && !has_failed {
            self.calls.delay(now, task);
            return true;
        }
        self.uncount_call(index);
        match (status, &task.request) {
            _ if has_failed => {}
            (Status::Plain, Request::Read(read)) => {
                let range = task.offset..task.offset + u64::from(read.length);
                self.queue_post(self.first + index as u64, Some(range));
            }
            (Status::Plain, _) => self.fail(index, WcStatus::RemoteInvalidRequest, 0),
            _ => match (completion_status(status), &self.entries[index].region) {
                (Some(failure), _) => self.fail(index, failure, status as u32),
                (None, Some(region)) => read::mark_present(region, &task.request),
                (None, None) => {}
            },
        }
        self.complete_early(index);
        self.release_deferred_calls();
        true
    }

    /// Handles the server's answer to the request for a grant.
    fn handle_verdict(&mut self, rkey: u32, verdict: Verdict) {
        match verdict {
            Verdict::Granted(region) => self.region_actions.push(Action::Granted(region)),
            Verdict::Retry => self.drop_fetches_of_data(rkey),
            Verdict::Refused { is_outdated } => {
                self.drop_fetches_of_data(rkey);
                if is_outdated {
                    self.region_actions.push(Action::Outdated(rkey));
                }
            }
        }
        self.release_deferred_calls();
    }

    /// Drops the calls for pages that match the signature page, because the NIC does not answer with it without a
    /// grant: the bytes are data.
    fn drop_fetches_of_data(&mut self, rkey: u32) {
        let (grants, entries, first) = (&self.grants, &self.entries, self.first);
        let is_data = |task: &mut Task| {
            let entry = task.seq.and_then(|seq| entries.get(seq.checked_sub(first)? as usize));
            let region = entry.and_then(|entry| entry.region.as_ref());
            region.is_some_and(|region| {
                region.rkey() == rkey && !grants.may_return_signature(region) && !grants.is_granted(region)
            })
        };
        let dropped: Vec<Task> = self.calls.deferred.extract_if(.., is_data).collect();
        self.uncount_calls(&dropped);
    }

    /// Handles the end of the control queue pair: the server accesses the program's memory no longer. The oldest work
    /// request that needs a call fails as if the peer had not answered, and all later ones are flushed.
    pub fn handle_peer_gone(&mut self) {
        self.is_control_gone = true;
        self.stalled = false;
        let dropped = self.calls.drop_all();
        self.uncount_calls(&dropped);
        if let Some(index) = dropped.iter().filter_map(|task| task.seq).min().and_then(|seq| self.index(seq))
        {
            self.fail(index, WcStatus::RetryExceeded, 0);
        }
        self.release_deferred_calls();
    }

    /// Flushes every unfinished request after the queue pair was moved to the error state.
    pub fn flush(&mut self) {
        self.in_error = true;
        self.stalled = false;
        match self.entries.iter().position(|entry| !entry.is_done()) {
            Some(index) => self.fail(index, WcStatus::Flushed, 0),
            // Requests that are posted from now on are flushed, too.
            None => _ = self.first_failed.get_or_insert(self.first + self.entries.len() as u64),
        }
        self.release_deferred_calls();
    }

    /// Drops every request without a completion, after the queue pair was moved to RESET. Later requests are posted
    /// unchanged until [`Session::start`]. Calls in flight remain in flight ([`Session::calls_in_flight`]).
    pub fn reset(&mut self) {
        let mut fresh = Session::new(self.config);
        fresh.next_token = self.next_token;
        fresh.first = self.first + self.entries.len() as u64;
        fresh.calls = std::mem::take(&mut self.calls);
        fresh.calls.clear_unsent();
        *self = fresh;
    }

    /// Fails a work request. Later ones are flushed, and their unsent calls and posts are dropped.
    pub(super) fn fail(&mut self, index: usize, status: WcStatus, vendor_err: u32) {
        self.entries[index].fail(status, vendor_err);
        self.entries[index].issued = true;
        let seq = self.first + index as u64;
        if self.first_failed.is_some_and(|failed| failed <= seq) {
            return;
        }
        self.first_failed = Some(seq);
        for later in self.entries.range_mut(index + 1..) {
            // A later request may have failed by itself. In order it would not have been executed.
            later.failure = Some((WcStatus::Flushed, 0));
            later.issued = true;
        }
        self.next_index = self.entries.len();
        let dropped = self.calls.drop_unsent(|unsent| unsent >= seq);
        self.uncount_calls(&dropped);
        for post in std::mem::take(&mut self.unposted) {
            match self.index(post.seq) {
                Some(index) if post.seq >= seq => {
                    self.entries[index].posts -= 1;
                }
                _ => self.unposted.push_back(post),
            }
        }
    }

    /// Takes dropped calls off their entries.
    fn uncount_calls(&mut self, tasks: &[Task]) {
        for seq in tasks.iter().filter_map(|task| task.seq) {
            self.index(seq).into_iter().for_each(|index| self.uncount_call(index));
        }
    }

    /// Makes the deferred calls ready that no longer have to wait.
    fn release_deferred_calls(&mut self) {
        if self.calls.deferred.is_empty() {
            return;
        }
        for task in std::mem::take(&mut self.calls.deferred) {
            if self.is_deferred(&task) {
                self.calls.deferred.push(task);
            } else {
                self.calls.ready.push_back(task);
            }
        }
    }

    /// Completes a finished work request before older ones, unless the session completes in order. A failure is
    /// reported in order: when all earlier requests are finished.
    fn complete_early(&mut self, index: usize) {
        let is_limit_reached =
            self.early_count >= self.config.request_count_max.saturating_mul(EARLY_COMPLETIONS_MAX);
        let entry = &mut self.entries[index];
        if self.config.in_order
            || is_limit_reached
            || entry.completed
            || !entry.is_done()
            || entry.failure.is_some()
        {
            return;
        }
        // Requests without a completion cannot complete early.
        let Some(wc) = entry.completion(self.config.qpn, self.config.signal_all) else { return };
        entry.completed = true;
        self.early_count += 1;
        self.completions.push_back(wc);
    }

    /// Completes the oldest work requests that are finished.
    pub(super) fn retire(&mut self) {
        while let Some(entry) = self.entries.front().filter(|entry| entry.is_done()) {
            if entry.failure.is_some() && !entry.completed && !self.in_error {
                self.in_error = true;
                self.break_due = true;
            }
            self.checked_count -= usize::from(entry.is_counted);
            if entry.completed {
                self.early_count -= 1;
            } else {
                self.completions.extend(entry.completion(self.config.qpn, self.config.signal_all));
            }
            self.entries.pop_front();
            self.first += 1;
            self.next_index -= 1;
        }
    }
}
