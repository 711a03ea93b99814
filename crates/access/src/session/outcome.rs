//! Outcomes of work requests: completions, answers of the server, failures.

use terrace_transport::{SendOp, Time, Wc, WcStatus};

use super::calls::{Request, Task, completion_status};
use super::entry::{Local, Seq, Way};
use super::grants::Verdict;
use super::pieces::LocalMemory;
use super::{Action, OVERTAKING_MAX, Post, Session, read};
use crate::proto::Status;

impl Session {
    /// A work request that the session had posted is over. False if the session did not post it.
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
            self.entries[index].wc = post.part.is_none().then_some(*wc);
            let (status, vendor_err) = self.cause(post.seq, wc);
            self.fail(index, status, vendor_err);
        } else if post.part.is_none() {
            self.entries[index].wc = Some(*wc);
        } else {
            self.inspect(index, &post, memory);
        }
        self.overtake(index);
        self.settle();
        true
    }

    /// The queue pair did not take a work request: it and all later ones are flushed. False if the session did not
    /// post it.
    pub fn handle_refused(&mut self, wr_id: u64) -> bool {
        let Some(position) = self.posted.iter().position(|post| post.token == wr_id) else { return false };
        let Some(post) = self.posted.remove(position) else { return false };
        self.stalled = false;
        if let Some(index) = self.index(post.seq) {
            self.entries[index].posts -= 1;
            self.fail(index, WcStatus::Flushed, 0);
        }
        self.settle();
        true
    }

    /// Why the queue pair did not carry a post out. A post that is flushed because a later request has failed before
    /// (it was posted late) gets the status of that failure, so that the program sees the cause.
    fn cause(&self, seq: Seq, wc: &Wc) -> (WcStatus, u32) {
        let failed_later = self.broken.filter(|&broken| wc.status == WcStatus::Flushed && broken > seq);
        let failure = failed_later.and_then(|broken| self.entries[self.index(broken)?].failure);
        failure.unwrap_or((wc.status, wc.vendor_err))
    }

    /// Inspects the data of a READ, and requests the missing pages when all of its parts have completed.
    fn inspect(&mut self, index: usize, post: &Post, memory: &impl LocalMemory) {
        let entry = &mut self.entries[index];
        if entry.failure.is_some() || entry.way != Way::Checked {
            return;
        }
        let mut suspects = std::mem::take(&mut entry.suspects);
        let entry = &self.entries[index];
        let (Some(region), SendOp::Read { va, .. }) = (&entry.region, entry.wr.op) else { return };
        let part = post.part.clone().unwrap_or(0..entry.length);
        if read::inspect(entry, region, part, memory, &mut self.page_room, &mut suspects).is_err() {
            return self.fail(index, WcStatus::LocalProtection, 0);
        }
        // If the server was not yet asked for signature pages, or has refused, it is data.
        if suspects.is_empty() || (entry.posts == 0 && !self.grants.may_be_on(region)) {
            return;
        }
        if entry.posts > 0 {
            self.entries[index].suspects = suspects;
            return;
        }
        read::note_absent(region, va, &suspects);
        let tasks = read::fetches(post.seq, entry, region, &suspects);
        self.note_overwritten(index, &tasks);
        self.call(index, tasks);
    }

    /// Later READs into the same buffers are in flight already. Their data is fetched again, after this one's.
    fn note_overwritten(&mut self, index: usize, tasks: &[Task]) {
        for later in self.entries.range_mut(index + 1..) {
            if later.way == Way::Checked && later.posts > 0 {
                let locals = tasks.iter().filter_map(|task| task.local);
                let shared: Vec<Local> = locals.filter(|local| later.touches(local)).collect();
                later.overwritten.extend(shared);
            }
        }
    }

    /// The server has answered a call. False if the session did not make it.
    pub fn handle_done(&mut self, now: Time, id: u64, status: Status) -> bool {
        let Some(task) = self.calls.land(id) else { return false };
        self.stalled = false;
        if let Request::Magic(magic) = task.request {
            let verdict = self.grants.answer(now, magic.rkey, magic.region_id, status);
            self.note_verdict(magic.rkey, verdict);
            return true;
        }
        // After RESET no work request waits for an answer.
        let Some(index) = task.seq.and_then(|seq| self.index(seq)) else { return true };
        let has_failed = self.entries[index].failure.is_some();
        if status == Status::Busy && !has_failed {
            self.calls.delay(now, task);
            return true;
        }
        self.entries[index].calls -= 1;
        self.task_count -= 1;
        match (status, &task.request) {
            _ if has_failed => {}
            (Status::Plain, Request::Read(read)) => {
                let part = task.offset..task.offset + u64::from(read.length);
                self.enqueue(self.first + index as u64, Some(part));
            }
            (Status::Plain, _) => self.fail(index, WcStatus::RemoteInvalidRequest, 0),
            _ => {
                if let Some(failure) = completion_status(status) {
                    self.fail(index, failure, status as u32);
                }
            }
        }
        self.overtake(index);
        self.settle();
        true
    }

    /// The server has answered whether it serves calls for a region.
    fn note_verdict(&mut self, rkey: u32, verdict: Verdict) {
        match verdict {
            Verdict::Granted(region) => self.news.push(Action::Granted(region)),
            Verdict::Later => self.take_for_data(rkey),
            Verdict::Refused { is_outdated } => {
                self.take_for_data(rkey);
                if is_outdated {
                    self.news.push(Action::Outdated(rkey));
                }
            }
        }
        self.settle();
    }

    /// Without a grant no READ of a region was answered with the signature page: data equal to it is data, and need
    /// not be fetched.
    fn take_for_data(&mut self, rkey: u32) {
        let (grants, entries, first) = (&self.grants, &self.entries, self.first);
        let is_data = |task: &mut Task| {
            let entry = task.seq.and_then(|seq| entries.get(seq.checked_sub(first)? as usize));
            let region = entry.and_then(|entry| entry.region.as_ref());
            region.is_some_and(|region| {
                region.rkey() == rkey && !grants.may_be_on(region) && !grants.is_granted(region)
            })
        };
        let dropped: Vec<Task> = self.calls.held.extract_if(.., is_data).collect();
        dropped.iter().filter_map(|task| task.seq).for_each(|seq| self.forget_call(seq));
    }

    /// The control queue pair is gone, and with it every answer: the server no longer accesses the program's memory.
    /// The oldest work request that needs a call fails as if the peer had not answered, and all later ones are
    /// flushed.
    pub fn handle_peer_gone(&mut self) {
        self.orphaned = true;
        self.stalled = false;
        let orphans: Vec<Seq> = self.calls.drop_all().iter().filter_map(|task| task.seq).collect();
        orphans.iter().for_each(|&seq| self.forget_call(seq));
        if let Some(index) = orphans.into_iter().min().and_then(|seq| self.index(seq)) {
            self.fail(index, WcStatus::RetryExceeded, 0);
        }
        self.settle();
    }

    /// The queue pair was moved to the error state: every request that is not over is flushed.
    pub fn flush(&mut self) {
        self.in_error = true;
        self.stalled = false;
        match self.entries.iter().position(|entry| !entry.is_done()) {
            Some(index) => self.fail(index, WcStatus::Flushed, 0),
            // Requests that are posted from now on are flushed as well.
            None => _ = self.broken.get_or_insert(self.first + self.entries.len() as u64),
        }
        self.settle();
    }

    /// The queue pair was moved to RESET: every request is dropped without a completion, and later ones are passed on
    /// unchanged until [`Session::start`]. Calls in flight stay so ([`Session::calls_in_flight`]).
    pub fn reset(&mut self) {
        let mut fresh = Session::new(self.config);
        fresh.next_token = self.next_token;
        fresh.first = self.first + self.entries.len() as u64;
        fresh.calls = std::mem::take(&mut self.calls);
        fresh.calls.forget_unsent();
        *self = fresh;
    }

    /// A work request has failed: later ones are flushed, and actions that the owner has not taken yet are dropped.
    pub(super) fn fail(&mut self, index: usize, status: WcStatus, vendor_err: u32) {
        self.entries[index].fail(status, vendor_err);
        self.entries[index].issued = true;
        let seq = self.first + index as u64;
        if self.broken.is_some_and(|broken| broken <= seq) {
            return;
        }
        self.broken = Some(seq);
        for later in self.entries.range_mut(index + 1..) {
            // Also one that has failed by itself, sooner: in order, it would not have been tried.
            later.failure = Some((WcStatus::Flushed, 0));
            later.issued = true;
        }
        self.next_index = self.entries.len();
        for task in self.calls.drop_unsent(|unsent| unsent >= seq) {
            task.seq.into_iter().for_each(|seq| self.forget_call(seq));
        }
        for post in std::mem::take(&mut self.unposted) {
            match self.index(post.seq) {
                Some(index) if post.seq >= seq => {
                    self.entries[index].posts -= 1;
                }
                _ => self.unposted.push_back(post),
            }
        }
    }

    fn forget_call(&mut self, seq: Seq) {
        if let Some(index) = self.index(seq) {
            self.entries[index].calls -= 1;
            self.task_count -= 1;
        }
    }

    /// A request is over: releases the held calls that waited for it.
    fn settle(&mut self) {
        if self.calls.held.is_empty() {
            return;
        }
        for task in std::mem::take(&mut self.calls.held) {
            if self.is_held(&task) {
                self.calls.held.push(task);
            } else {
                self.calls.ready.push_back(task);
            }
        }
    }

    /// Completes a work request that is over before older ones are, unless the session completes in order. A failure
    /// has its place in the order: it is reported when all earlier requests are over.
    fn overtake(&mut self, index: usize) {
        let is_long = self.overtaken_count >= self.config.request_count_max.saturating_mul(OVERTAKING_MAX);
        let entry = &mut self.entries[index];
        if self.config.in_order || is_long || entry.completed || !entry.is_done() || entry.failure.is_some() {
            return;
        }
        // Requests without a completion cannot complete early.
        let Some(wc) = entry.completion(self.config.qpn, self.config.signal_all) else { return };
        entry.completed = true;
        self.overtaken_count += 1;
        self.completions.push_back(wc);
    }

    /// Completes the oldest work requests that are over.
    pub(super) fn retire(&mut self) {
        while let Some(entry) = self.entries.front().filter(|entry| entry.is_done()) {
            if entry.failure.is_some() && !entry.completed && !self.in_error {
                self.in_error = true;
                self.break_due = true;
            }
            self.checked_count -= usize::from(entry.is_counted);
            if entry.completed {
                self.overtaken_count -= 1;
            } else {
                self.completions.extend(entry.completion(self.config.qpn, self.config.signal_all));
            }
            self.entries.pop_front();
            self.first += 1;
            self.next_index -= 1;
        }
    }
}
