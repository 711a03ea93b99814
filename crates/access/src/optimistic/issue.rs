//! The beginning of work requests, in the order that the table permits.

use terrace_transport::{SendFlags, Time, WcStatus};

use super::calls::Task;
use super::checks::Reader;
use super::entry::{Check, Entry, Seq, State};
use super::order::{Class, OrderBits, Rule};
use super::span::Concerns;
use super::versions::VersionTable;
use super::{Held, HeldMemory, Initiator, Tables};

/// Whether a request may begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Wait,
    Begin,
    /// Behind WRITEs to the same bytes that are not checked.
    BeginChained,
}

impl Initiator {
    /// Begins work requests, in order, up to the first that has to wait.
    pub(super) fn issue(&mut self, now: Time, memory: &mut impl HeldMemory) {
        while self.next_index < self.entries.len() {
            let index = self.next_index;
            let verdict = self.verdict(index, now);
            if verdict == Verdict::Wait {
                self.checks.request();
                return;
            }
            if !self.hold(index, memory) && verdict == Verdict::BeginChained {
                // What it was chained to may be over when its memory is there.
                return;
            }
            let entry = &mut self.entries[index];
            if entry.failure.is_some() {
                return;
            }
            self.next_index += 1;
            entry.is_chained = verdict == Verdict::BeginChained;
            entry.state = State::Holding;
            if entry.is_ready {
                self.begin(index, now);
            }
            if self.is_signaled(index) {
                self.checks.request();
            }
        }
    }

    /// Has the local memory of a request held. False while it is not.
    fn hold(&mut self, index: usize, memory: &mut impl HeldMemory) -> bool {
        let (seq, entry) = (self.seq(index), &mut self.entries[index]);
        if !entry.is_held && !entry.sges().is_empty() {
            match memory.hold(seq, entry.sges(), entry.returns_data()) {
                Ok(held) => (entry.is_held, entry.is_ready) = (true, held == Held::Now),
                Err(_) => {
                    self.fail(index, WcStatus::LocalProtection, 0);
                    return true;
                }
            }
        } else if !entry.is_held {
            entry.is_ready = true;
        }
        self.entries[index].is_ready
    }

    /// Takes that the memory of a request is held by now ([`HeldMemory::hold`]), or cannot be.
    pub fn handle_held(&mut self, now: Time, token: Seq, is_held: bool) {
        let Some(index) = self.index(token) else { return };
        self.note_progress();
        let entry = &mut self.entries[index];
        if !is_held {
            return self.fail(index, WcStatus::LocalProtection, 0);
        }
        entry.is_ready = true;
        if entry.state == State::Holding {
            self.begin(index, now);
        }
    }

    /// Whether the next request may begin.
    fn verdict(&self, index: usize, now: Time) -> Verdict {
        let later = &self.entries[index];
        if later.is_unknown {
            return Verdict::Wait;
        }
        let mut verdict = Verdict::Begin;
        let concerns = Concerns::of(self.spans[index], self.config.order);
        let spans = self.spans.range(..index).enumerate();
        for (earlier, _) in spans.filter(|(_, span)| concerns.include(span)) {
            let earlier = &self.entries[earlier];
            // A WRITE behind another one may have to be repeated until that one is completed.
            if earlier.state == State::Done && !earlier.is_chained {
                continue;
            }
            let is_ordered =
                earlier.order.contains(OrderBits::AFTER) || later.order.contains(OrderBits::BEFORE);
            let is_fenced = later.wr.flags.contains(SendFlags::FENCE) && earlier.returns_data();
            if is_ordered || is_fenced {
                return Verdict::Wait;
            }
            match self.config.order.rule(earlier.class, later.class, earlier.conflicts(later)) {
                Rule::Pass => {}
                Rule::Follow if matches!(earlier.state, State::Active | State::Done) => {}
                Rule::Chain if self.can_chain(earlier, later, now) => verdict = Verdict::BeginChained,
                Rule::Follow | Rule::Chain | Rule::Wait => return Verdict::Wait,
            }
        }
        verdict
    }

    /// Whether a WRITE can begin behind one to the same bytes that is not checked. If that one has met an absent page, then
    /// this one is repeated behind it. So it has to be posted at once: the versions of its pages are known. And nothing of
    /// the earlier one may be repeated already, which would undo this one. With another version than the earlier one
    /// began with, that one is about to be repeated, and this one would be in vain.
    fn can_chain(&self, earlier: &Entry, later: &Entry, now: Time) -> bool {
        let (Some((region, _)), Some((other, _))) = (later.paged(), earlier.paged()) else { return false };
        let region_id = region.description().region_id;
        let first = earlier.pages().start;
        let is_under_way = matches!(earlier.state, State::Active | State::Done)
            && earlier.failure.is_none()
            && !earlier.was_repeated
            && region_id == other.description().region_id;
        is_under_way
            && later.pages().all(|page| {
                let known = self.known.get(region_id, page, now, self.config.version_age_ns);
                let Some((version, _)) = known else { return false };
                let base = page.checked_sub(first).and_then(|page| earlier.bases.get(page as usize));
                !earlier.shares_page(later, page) || base == Some(&Some(version))
            })
    }

    /// Begins a request whose local memory is held.
    fn begin(&mut self, index: usize, now: Time) {
        let (seq, entry) = (self.seq(index), &mut self.entries[index]);
        entry.state = State::Active;
        match (entry.region.is_some(), entry.class) {
            (false, _) | (_, Class::Message) => {
                let whole = 0..entry.length;
                self.queue_data(index, whole, None);
            }
            (true, Class::Read | Class::Write) if self.config.is_two_sided => {
                entry.mark_all();
                self.note_progress();
            }
            (true, Class::Read) => {
                let whole = 0..entry.length;
                self.queue_data(index, whole, None);
            }
            (true, Class::Write) => {
                entry.state = State::Learning;
                self.learn(index, now);
            }
            // An atomic may not be executed twice, and what it returns does not say whether it was executed.
            (true, Class::Atomic) => self.queue_tasks(index, [Task::atomic(seq)]),
            // The receiver must not see the immediate before all of the data is there.
            (true, Class::WriteImm) => {
                let whole = 0..entry.length;
                self.queue_tasks(index, [Task::hold(seq, whole)]);
            }
        }
    }

    /// Whether the program gets a completion of a request that succeeds.
    fn is_signaled(&self, index: usize) -> bool {
        self.config.signal_all || self.entries[index].wr.flags.contains(SendFlags::SIGNALED)
    }

    /// Finds out the versions of a WRITE's pages, and posts the WRITE when they are known.
    pub(super) fn learn(&mut self, index: usize, now: Time) {
        let Some(table) = self.table_of(index) else { return };
        let (seq, entry) = (self.seq(index), &mut self.entries[index]);
        let Some((region, _)) = entry.paged() else { return };
        let (region_id, pages) = (region.description().region_id, entry.pages());
        let mut bases_at = now;
        let mut wanted = Vec::new();
        entry.bases = pages
            .clone()
            .map(|page| match self.known.get(region_id, page, now, self.config.version_age_ns) {
                Some((version, at)) => {
                    bases_at = bases_at.min(at);
                    Some(version)
                }
                None => {
                    wanted.push(page);
                    None
                }
            })
            .collect();
        entry.bases_at = bases_at;
        let Some(table) = table.filter(|_| !wanted.is_empty()) else { return self.post_write(index, now) };
        self.read_versions(&Reader::Learn(seq), region_id, table, &wanted);
    }

    /// Where the versions of a request's region are: `Some(None)` if nowhere; `None` if the peer has been asked.
    fn table_of(&mut self, index: usize) -> Option<Option<VersionTable>> {
        let Some(region) = self.entries[index].region.clone() else { return Some(None) };
        let region_id = region.description().region_id;
        match self.tables.get(&region_id) {
            Some(Tables::Known(table)) => Some(Some(*table)),
            Some(Tables::None) => Some(None),
            Some(Tables::Requested) => None,
            None if self.is_control_gone => Some(None),
            None => {
                self.tables.insert(region_id, Tables::Requested);
                self.calls.request(Task::open(&region));
                None
            }
        }
    }

    /// Posts a WRITE, except for the pages that are absent: those are repeated two-sided, and were never written one-sided.
    pub(super) fn post_write(&mut self, index: usize, now: Time) {
        let entry = &mut self.entries[index];
        entry.state = State::Active;
        let mut runs = Vec::new();
        for page in 0..entry.bases.len() {
            if entry.bases[page].is_none() {
                entry.mark(page);
                self.counters.absent += 1;
                self.may_finish = true;
                continue;
            }
            let range = entry.range_of(page..page + 1);
            match runs.last_mut() {
                Some(std::ops::Range { end, .. }) if *end == range.start => *end = range.end,
                _ => runs.push(range),
            }
        }
        if !runs.is_empty() {
            entry.check = Check::Due;
            self.checks.add_due(now);
            if (index..self.next_index).any(|later| self.is_signaled(later)) {
                self.checks.request();
            }
        }
        runs.into_iter().for_each(|range| self.queue_data(index, range, None));
    }
}
