//! What initiators learn of the requests under way: completions, answers, failures.

use std::ops::Range;

use terrace_transport::{SendOp, Time, Wc, WcStatus};

use super::calls::{Kind, Task};
use super::entry::{Entry, Seq, State};
use super::order::Class;
use super::versions::VersionTable;
use super::{HeldMemory, Initiator, Tables, What, scatter};
use crate::proto::{Body, Message, Opened, Status};
use crate::request::completion_status;
use crate::signature::PAGE_BYTES;

impl Initiator {
    /// Takes the completion of a post. False for a completion that is none of its posts'.
    pub fn handle_completion(&mut self, now: Time, wc: &Wc, memory: &mut impl HeldMemory) -> bool {
        if self.posted.binary_search_by_key(&wc.wr_id, |post| post.token).is_err() {
            return false;
        }
        self.note_progress();
        // The queue pair completes its requests in order: unsignaled ones before this one have not failed.
        let mut index = 0;
        while self.posted[index].token != wc.wr_id {
            if self.posted[index].is_unsignaled {
                let success = Wc { wr_id: self.posted[index].token, status: WcStatus::Success, ..*wc };
                self.end_post(now, index, &success, memory);
            } else {
                index += 1;
            }
        }
        self.end_post(now, index, wc, memory);
        true
    }

    /// Takes the completion of a post, by its index.
    fn end_post(&mut self, now: Time, index: usize, wc: &Wc, memory: &mut impl HeldMemory) {
        let Some(post) = self.posted.remove(index) else { return };
        self.take_cause(wc);
        match post.what {
            What::Versions(read) => self.take_versions(now, &read, wc.status, memory),
            What::Proof(_) => self.proof = Some(wc.status),
            What::Data { seq, range, hold } => self.take_data(seq, &range, hold, wc, memory),
        }
    }

    fn take_data(
        &mut self,
        seq: Seq,
        range: &Range<u64>,
        hold: Option<u64>,
        wc: &Wc,
        memory: &mut impl HeldMemory,
    ) {
        if let Some(id) = hold {
            self.calls.release(id);
        }
        let Some(index) = self.index(seq) else { return };
        let entry = &mut self.entries[index];
        entry.posts -= 1;
        entry.calls -= u32::from(hold.is_some());
        let is_read = entry.class == Class::Read;
        if wc.status != WcStatus::Success {
            // A request that was posted earlier for a later one may have ended the queue pair. A READ can be repeated by
            // calls. A WRITE cannot: its packets may still arrive, and would undo what comes after the repetition. If the
            // program has ended the queue pair, nothing is repeated.
            let is_later = self.first_failed.is_some_and(|failed| seq < failed);
            let is_flushed = wc.status == WcStatus::Flushed && is_later && !self.in_error;
            if is_flushed && is_read && hold.is_none() && entry.region.is_some() {
                return entry.mark_all();
            }
            return self.fail(index, wc.status, wc.vendor_err);
        }
        if *range == (0..entry.length) && entry.region.is_none() {
            entry.wc = Some(*wc);
        }
        if is_read && hold.is_none() && self.inspect(index, range, memory).is_err() {
            self.fail(index, WcStatus::LocalProtection, 0);
        }
    }

    /// Takes a message of the peer. False for one that answers none of its calls.
    ///
    /// `Opened` has the key of a version table that covers exactly the pages of the memory region, and is registered in the
    /// protection domain of the peer's queue pair. That queue pair permits READs and accepts one at least (`REMOTE_READ`,
    /// `max_dest_rd_atomic`), and this one may send one (`max_rd_atomic`). Otherwise the READ of versions ends the
    /// queue pair, or brings the versions of other pages. Where one of these does not hold, the peer answers, or the owner
    /// passes, `Done` with an error status instead: then all WRITEs to the region are two-sided.
    pub fn handle_message(&mut self, now: Time, message: &Message<'_>, memory: &mut impl HeldMemory) -> bool {
        if (message.id >> 32) as u32 != self.config.tag {
            return false;
        }
        let low = message.id as u32;
        let Some(kind) = self.calls.task(low).map(|task| task.kind) else { return false };
        self.note_progress();
        match (&message.body, kind) {
            (Body::Opened(opened), Kind::Open { region_id, .. }) => {
                self.calls.take_answered(low);
                self.take_tables(now, region_id, Some(opened));
            }
            (Body::Done(done), _) if done.count == 1 => {
                self.take_status(now, message.id, done.status, memory);
            }
            (Body::Data(data), Kind::Inline) => self.take_bytes(low, data, memory),
            (Body::Value(value), Kind::Atomic) => self.take_value(low, *value, memory),
            _ => return false,
        }
        true
    }

    /// Takes where the versions of a region are, and continues the WRITEs that wait for it.
    fn take_tables(&mut self, now: Time, region_id: u64, opened: Option<&Opened>) {
        let is_of_region = |entry: &Entry| {
            entry.region.as_ref().is_some_and(|region| region.description().region_id == region_id)
        };
        let page_count = self.entries.iter().find(|entry| is_of_region(entry)).and_then(|entry| {
            let layout = entry.region.as_ref()?.layout();
            Some((layout.lead_bytes() + layout.length()).div_ceil(PAGE_BYTES as u64))
        });
        let table =
            opened.zip(page_count).and_then(|(opened, count)| VersionTable::new(opened.versions, count));
        self.tables.insert(region_id, table.map_or(Tables::None, Tables::Known));
        let waits = |entry: &Entry| entry.state == State::Learning && entry.posts == 0 && is_of_region(entry);
        let waiting: Vec<usize> =
            (0..self.entries.len()).filter(|&index| waits(&self.entries[index])).collect();
        waiting.into_iter().for_each(|index| self.learn(index, now));
    }

    /// Takes the status of a call.
    fn take_status(&mut self, now: Time, id: u64, status: Status, memory: &mut impl HeldMemory) {
        let Some(task) = self.calls.take_answered(id as u32) else { return };
        let index = task.seq.and_then(|seq| self.index(seq));
        if task.kind == Kind::Reverse {
            self.take_moved(id, &task, status, memory);
        }
        let has_failed = index.is_some_and(|index| self.entries[index].failure.is_some());
        match (status, task.kind, index) {
            (Status::Busy, ..) if !has_failed && !self.in_error => return self.calls.delay(now, task),
            (_, Kind::Open { region_id, .. }, _) => return self.take_tables(now, region_id, None),
            (Status::Ok, Kind::Hold, Some(index)) if !has_failed => {
                self.counters.holds += 1;
                self.calls.note_held(id);
                // The call is over when the repetition is.
                return self.queue_data(index, task.range, Some(id));
            }
            (Status::Ok, Kind::Hold, _) => self.calls.release(id),
            _ => {}
        }
        self.end_task(&task);
        let Some(index) = index else { return };
        // READs and atomics in messages have other answers; a WRITE has none.
        let has_data =
            matches!(task.kind, Kind::Inline | Kind::Atomic) && self.entries[index].class != Class::Write;
        // What ended the peer's queue pair was a later request, if that has failed.
        let is_later = self.first_failed.is_some_and(|failed| task.seq.is_some_and(|seq| seq < failed));
        match completion_status(status) {
            _ if status == Status::Disconnected && is_later => self.fail(index, WcStatus::Flushed, 0),
            None if status == Status::Busy && self.in_error => self.fail(index, WcStatus::Flushed, 0),
            Some(completion) => {
                self.fail(index, completion, 0);
                // The NIC may have got a NAK that says why, and flushes the rest at once.
                if status == Status::Disconnected && !self.in_error && !self.posted.is_empty() {
                    self.in_error = true;
                    self.break_due = true;
                    self.awaits_cause = true;
                }
            }
            // `Plain` and `Busy` say that nothing was done.
            None if status != Status::Ok || has_data => self.fail(index, WcStatus::BadResponse, 0),
            None => {}
        }
    }

    /// Takes back what was lent for a transfer, with the bytes that a successful READ has brought.
    fn take_moved(&mut self, id: u64, task: &Task, status: Status, memory: &mut impl HeldMemory) {
        let index = task.seq.and_then(|seq| self.index(seq));
        let entry = index.map(|index| &self.entries[index]);
        let is_brought =
            |entry: &&Entry| entry.class == Class::Read && entry.failure.is_none() && status == Status::Ok;
        let into = entry.filter(is_brought).and_then(|entry| entry.element(&task.range));
        let is_taken = memory.take_back(id, into.as_ref()).is_ok();
        if let Some(index) = index.filter(|_| !is_taken) {
            self.fail(index, WcStatus::LocalProtection, 0);
        }
    }

    /// Takes the bytes of a READ.
    fn take_bytes(&mut self, low: u32, data: &[u8], memory: &mut impl HeldMemory) {
        let Some(task) = self.calls.take_answered(low) else { return };
        self.end_task(&task);
        let Some(index) = task.seq.and_then(|seq| self.index(seq)) else { return };
        let entry = &self.entries[index];
        if entry.class != Class::Read || data.len() as u64 != task.range.end - task.range.start {
            return self.fail(index, WcStatus::BadResponse, 0);
        }
        if scatter(memory, entry.sges(), task.range.start, data).is_err() {
            self.fail(index, WcStatus::LocalProtection, 0);
        }
    }

    /// Takes the result of an atomic operation.
    fn take_value(&mut self, low: u32, value: u64, memory: &mut impl HeldMemory) {
        let Some(task) = self.calls.take_answered(low) else { return };
        self.end_task(&task);
        let Some(index) = task.seq.and_then(|seq| self.index(seq)) else { return };
        let entry = &self.entries[index];
        if matches!(entry.wr.op, SendOp::AtomicWrite { .. }) {
            return;
        }
        if scatter(memory, entry.sges(), 0, &value.to_ne_bytes()).is_err() {
            self.fail(index, WcStatus::LocalProtection, 0);
        }
    }

    /// The control queue pair is gone for good: what waits for the peer fails, and the local memory of requests is
    /// released. So the peer accesses none of it any more: the queue pair of its reverse transfers
    /// ([`is_reverse_allowed`](super::Config::is_reverse_allowed)) is in the error state at this end. The owner takes back
    /// all that is lent.
    pub fn handle_peer_gone(&mut self, now: Time) {
        self.is_control_gone = true;
        self.note_progress();
        for task in self.calls.drop_all() {
            self.end_task(&task);
            if let Kind::Open { region_id, .. } = task.kind {
                self.take_tables(now, region_id, None);
            }
            if let Some(index) = task.seq.and_then(|seq| self.index(seq)) {
                self.fail(index, WcStatus::RetryExceeded, 0);
            }
        }
    }

    /// The peer is gone, or refuses: the oldest request that is not finished fails with this status, and all later ones are
    /// flushed. The owner moves the queue pair to the error state.
    pub fn fail_unfinished(&mut self, status: WcStatus) {
        if let Some(index) = self.entries.iter().position(|entry| entry.state != State::Done) {
            self.fail(index, status, 0);
        }
    }

    /// The program has moved the queue pair to the error state: what has not begun is flushed, and so are what the queue pair
    /// flushes and what waits for a call, whether or not the peer ever answers that. No call is begun any more.
    pub fn flush(&mut self) {
        self.in_error = true;
        self.note_progress();
        // Unsignaled WRITEs end with their check.
        self.checks.request();
        let detached = self.calls.detach_in_flight();
        detached.iter().for_each(|task| self.end_task(task));
        let unanswered = detached.iter().filter_map(|task| task.seq);
        let waiting = unanswered.chain(self.calls.first_unsent()).min().and_then(|seq| self.index(seq));
        let first = waiting.unwrap_or(self.next_index);
        if first < self.entries.len() {
            self.fail(first, WcStatus::Flushed, 0);
        } else {
            self.first_failed.get_or_insert(self.seq(self.next_index));
        }
    }

    /// Why a request fails. It may be flushed because a later one failed that was posted before it. It gets the cause of
    /// that failure, so that the program sees the cause.
    fn cause_of(&self, seq: Seq, status: WcStatus, vendor_err: u32) -> (WcStatus, u32) {
        let failed_later = self.first_failed.filter(|&failed| status == WcStatus::Flushed && seq < failed);
        let cause = failed_later.and_then(|failed| self.entries[self.index(failed)?].failure);
        cause.unwrap_or((status, vendor_err))
    }

    /// Takes why the peer has disconnected, if a completion tells it: the earliest request that has failed gets it.
    fn take_cause(&mut self, wc: &Wc) {
        if !self.awaits_cause || matches!(wc.status, WcStatus::Success | WcStatus::Flushed) {
            return;
        }
        self.awaits_cause = false;
        if let Some(index) = self.first_failed.and_then(|seq| self.index(seq)) {
            self.entries[index].failure = Some((wc.status, wc.vendor_err));
        }
    }

    /// Records a failure. Later requests are flushed; what they have not posted is not posted any more.
    pub(super) fn fail(&mut self, index: usize, status: WcStatus, vendor_err: u32) {
        self.note_progress();
        // Unsignaled WRITEs end with their check.
        self.checks.request();
        let seq = self.seq(index);
        let cause = self.cause_of(seq, status, vendor_err);
        let entry = &mut self.entries[index];
        let failure = *entry.failure.get_or_insert(cause);
        entry.flush();
        entry.failure = Some(failure);
        if self.first_failed.is_some_and(|failed| failed <= seq) {
            return;
        }
        self.first_failed = Some(seq);
        self.entries.range_mut(index + 1..).for_each(Entry::flush);
        self.next_index = self.entries.len();
        for task in self.calls.drop_unsent(seq) {
            self.end_task(&task);
        }
        for post in std::mem::take(&mut self.unposted) {
            match post.what {
                What::Data { seq: of, hold, .. } if of >= seq => {
                    let index = self.index(of).expect("an entry stays until its posts have completed");
                    self.entries[index].posts -= 1;
                    self.entries[index].calls -= u32::from(hold.is_some());
                    hold.into_iter().for_each(|id| self.calls.release(id));
                }
                _ => self.unposted.push_back(post),
            }
        }
    }

    /// Finishes requests of which nothing is under way, or has their marked pages repeated: in the order of posting where
    /// they write the same bytes.
    pub(super) fn finish_entries(&mut self) {
        let mut index = 0;
        // A repetition that the peer cannot be asked for is a failure, which flushes the requests that have not begun.
        while index < self.next_index {
            let entry = &self.entries[index];
            let is_after = |earlier: &Entry| earlier.state != State::Done && earlier.conflicts(entry);
            let is_marked = entry.is_idle() && entry.failure.is_none() && !entry.redo.is_empty();
            if is_marked && !self.entries.range(..index).any(is_after) {
                self.repeat_marked(index);
            }
            let entry = &mut self.entries[index];
            if entry.is_idle() && (entry.failure.is_some() || entry.redo.is_empty()) {
                // Later requests may begin.
                self.may_begin |= entry.state != State::Done;
                entry.state = State::Done;
            }
            index += 1;
        }
    }

    /// Completes the oldest work requests that are finished.
    pub(super) fn retire(&mut self, memory: &mut impl HeldMemory) {
        while let Some(entry) = self.entries.front().filter(|entry| entry.state == State::Done) {
            if entry.failure.is_some() && self.awaits_cause && !self.posted.is_empty() {
                return;
            }
            if entry.failure.is_some() && !self.in_error {
                self.in_error = true;
                self.break_due = true;
            }
            if entry.is_held {
                memory.release(self.first);
            }
            let is_transfer = entry.region.is_some() && matches!(entry.class, Class::Read | Class::Write);
            self.counters.optimistic +=
                u64::from(is_transfer && !entry.was_repeated && entry.failure.is_none());
            self.completions.extend(entry.completion(self.config.qpn, self.config.signal_all));
            self.entries.pop_front();
            self.spans.pop_front();
            self.first += 1;
            self.next_index -= 1;
        }
    }
}
