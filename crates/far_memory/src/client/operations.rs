//! Operations in flight: their copies, their order on a page, and what becomes of them when a node is lost.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use slab::Slab;
use terrace_nic::{Cq, Error, Sge, Wc, WcStatus};
use terrace_sync::Mutex;

use super::link::Link;
use super::page_buffer::{Completion, PageBuffer};
use super::refill::Refill;
use super::space::{Place, Space};
use super::transport::{Call, Finished};
use crate::messages::Outcome;
use crate::page_store::PageError;
use crate::protocol::Function;

/// Completions that are taken at a time.
const COMPLETIONS_PER_POLL: usize = 64;
/// Of a time without polls, so much counts as time in which nodes did not answer. The client may have been stopped.
const PAUSE_MAX: Duration = Duration::from_millis(100);
/// A node answers if no reply of it is late by more than this part of the time after which a node is silent.
const PROMPT: u32 = 10;

/// What to do with a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Load,
    Store,
    Invalidate,
    /// Makes the copies that are missing.
    Copy,
}

/// Whom the end of an operation is reported to.
pub(super) enum Sink {
    /// [`Client::poll`](super::Client::poll), under this tag.
    Tag(u64),
    Waiter(Arc<Waiter>),
    /// Nobody: the client's own.
    Nobody,
    /// The refill, whose page of its buffer this is. It counts for no limit.
    Copy(usize),
}

/// A thread that waits for one operation.
#[derive(Default)]
pub(super) struct Waiter {
    is_done: AtomicBool,
    result: Mutex<Option<Result<(), PageError>>>,
}

impl Waiter {
    pub fn take(&self) -> Option<Result<(), PageError>> {
        if self.is_done.load(Ordering::Acquire) { self.result.lock().take() } else { None }
    }

    fn put(&self, result: Result<(), PageError>) {
        *self.result.lock() = Some(result);
        self.is_done.store(true, Ordering::Release);
    }
}

/// An operation on a page.
pub(super) struct Operation {
    pub kind: Kind,
    pub page: u64,
    /// The page here, and what keeps it registered.
    pub buffer: Option<(Arc<PageBuffer>, Sge)>,
    pub sink: Sink,
}

struct InFlight {
    operation: Operation,
    /// Copies that have not ended.
    pending: usize,
    succeeded: usize,
    error: Option<PageError>,
}

/// How long a node may take for an operation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Timeouts {
    /// All of its pages have copies on other nodes.
    pub copied: Duration,
    /// It may have the only copy of a page.
    pub last_copy: Duration,
}

/// The state of a client, under its lock.
pub(super) struct Operations {
    pub space: Space,
    pub links: Vec<Link>,
    timeouts: Timeouts,
    depth: usize,
    in_flight: Slab<InFlight>,
    /// Pages with an operation in flight, and the later ones that wait for it.
    pub pages: HashMap<u64, VecDeque<Operation>>,
    /// Operations in flight or waiting.
    count: usize,
    /// Which pages are stored.
    stored: Vec<u64>,
    /// Stored pages that have a place on each node.
    pub wanted_pages: Vec<u64>,
    /// Of a client with two copies of each page.
    pub refill: Option<Refill>,
    completed: Vec<Completion>,
    taken: Vec<Wc>,
    advanced_at: Instant,
}

impl Operations {
    pub fn new(space: Space, links: Vec<Link>, timeouts: Timeouts, depth: usize) -> Operations {
        Operations {
            wanted_pages: vec![0; links.len()],
            refill: None,
            space,
            links,
            timeouts,
            depth,
            in_flight: Slab::new(),
            pages: HashMap::new(),
            count: 0,
            stored: vec![0; space.page_count.div_ceil(64) as usize],
            completed: Vec::new(),
            taken: Vec::new(),
            advanced_at: Instant::now(),
        }
    }

    pub fn is_stored(&self, page: u64) -> bool {
        page < self.space.page_count && self.stored[(page / 64) as usize] & 1 << (page % 64) != 0
    }

    /// The bits of 64 pages from a multiple of 64, this one among them.
    pub fn stored_word(&self, page: u64) -> u64 {
        self.stored[(page / 64) as usize]
    }

    fn set_stored(&mut self, page: u64, is_stored: bool) {
        if self.is_stored(page) == is_stored {
            return;
        }
        self.stored[(page / 64) as usize] ^= 1 << (page % 64);
        for place in self.space.places(page) {
            let wanted = &mut self.wanted_pages[place.node];
            *wanted = if is_stored { *wanted + 1 } else { *wanted - 1 };
        }
    }

    /// Pages that are stored.
    pub fn stored_pages(&self) -> u64 {
        self.stored.iter().map(|word| u64::from(word.count_ones())).sum()
    }

    pub fn take_completed(&mut self, into: &mut Vec<Completion>) -> usize {
        let count = self.completed.len();
        into.append(&mut self.completed);
        count
    }

    /// Whether another operation can begin.
    pub fn has_room(&self) -> bool {
        self.count < self.depth
    }

    /// Begins an operation. [`Operations::post`] sends its messages.
    pub fn begin(&mut self, operation: Operation, now: Instant) -> Result<(), PageError> {
        let (page, page_count) = (operation.page, self.space.page_count);
        if page >= page_count {
            return Err(PageError::OutOfRange { page, page_count });
        }
        if !self.has_room() {
            return Err(PageError::Full);
        }
        self.count += 1;
        self.enqueue(operation, now);
        Ok(())
    }

    /// Starts an operation, or has it wait for those of its page.
    pub fn enqueue(&mut self, operation: Operation, now: Instant) {
        match self.pages.get_mut(&operation.page) {
            Some(waiting) => waiting.push_back(operation),
            None => {
                self.pages.insert(operation.page, VecDeque::new());
                self.start(operation, now);
            }
        }
    }

    fn start(&mut self, operation: Operation, now: Instant) {
        let (kind, page) = (operation.kind, operation.page);
        let key = self.in_flight.insert(InFlight { operation, pending: 0, succeeded: 0, error: None });
        match kind {
            Kind::Load if !self.is_stored(page) => self.note_error(key, PageError::NotStored(page)),
            Kind::Load => self.start_load(key, now),
            Kind::Copy => self.start_copy(key, page, now),
            Kind::Store | Kind::Invalidate => {
                let places: Vec<Place> = self.space.places(page).collect();
                let is_left = |place: &&Place| self.links[place.node].lost.is_none();
                if kind == Kind::Store && !places.iter().any(|place| is_left(&place)) {
                    self.note_error(key, PageError::NodeLost(page));
                }
                for place in places {
                    self.start_change(key, kind, place, now);
                }
            }
        }
        self.finish_if_done(key, now);
    }

    /// Loads from the first copy that is left.
    pub fn start_load(&mut self, key: usize, now: Instant) {
        let page = self.in_flight[key].operation.page;
        match self.space.places(page).find(|place| self.has_copy(place)) {
            Some(place) => self.call(key, Function::Load, place, now),
            None => self.note_error(key, PageError::NodeLost(page)),
        }
    }

    /// Stores or invalidates one copy, if its node is left.
    fn start_change(&mut self, key: usize, kind: Kind, place: Place, now: Instant) {
        let has_other_copy = self.can_load(self.in_flight[key].operation.page);
        let link = &mut self.links[place.node];
        if link.lost.is_some() {
            return;
        }
        match (kind, link.is_mapped(place.index)) {
            // The copy that is there is enough. A store into an empty pool would have the node repair it.
            (Kind::Store, false) if has_other_copy && !link.has_room() => {
                self.refill.iter_mut().for_each(|refill| refill.note_missing(now));
            }
            (Kind::Store, true) => self.call(key, Function::MappedStore, place, now),
            (Kind::Store, false) if link.mapped_pages >= link.budget_pages => {
                self.note_error(key, PageError::BudgetExhausted);
            }
            (Kind::Store, false) => {
                link.mapped_pages += 1;
                self.call(key, Function::UnmappedStore, place, now);
            }
            (_, true) => self.call(key, Function::Invalidate, place, now),
            (_, false) => {}
        }
    }

    pub fn call(&mut self, key: usize, function: Function, place: Place, now: Instant) {
        let in_flight = &mut self.in_flight[key];
        in_flight.pending += 1;
        let page = in_flight.operation.buffer.as_ref().map(|(_, sge)| *sge);
        let call = Call { operation: key, index: place.index, page };
        if let Err(error) = self.links[place.node].transport.begin(function, call, now) {
            // The client's own memory is gone: only while it closes.
            tracing::debug!(%error, "a message cannot be made");
            self.in_flight[key].pending -= 1;
            self.note_error(key, PageError::NodeLost(self.in_flight[key].operation.page));
        }
    }

    fn note_error(&mut self, key: usize, error: PageError) {
        self.in_flight[key].error.get_or_insert(error);
    }

    /// Reports an operation none of whose copies is pending, and starts the next one of its page.
    fn finish_if_done(&mut self, key: usize, now: Instant) {
        if self.in_flight[key].pending > 0 {
            return;
        }
        let InFlight { operation, succeeded, error, .. } = self.in_flight.remove(key);
        let page = operation.page;
        let result = match error {
            // A copy that is left is enough.
            Some(PageError::NodeLost(_)) if succeeded > 0 => Ok(()),
            // So it is where a node that has joined again has no room for the other.
            Some(PageError::PoolEmpty | PageError::BudgetExhausted)
                if succeeded > 0 && self.is_stored(page) =>
            {
                self.refill.iter_mut().for_each(|refill| refill.note_missing(now));
                Ok(())
            }
            Some(error) => Err(error),
            None => Ok(()),
        };
        match (operation.kind, result) {
            (Kind::Store, Ok(())) => self.set_stored(page, true),
            (Kind::Invalidate, _) => self.set_stored(page, false),
            _ => {}
        }
        self.count -= usize::from(!matches!(operation.sink, Sink::Copy(_)));
        match operation.sink {
            Sink::Tag(tag) => self.completed.push(Completion { tag, page, result }),
            Sink::Waiter(waiter) => waiter.put(result),
            Sink::Nobody => {}
            Sink::Copy(index) => self.end_copy(page, index, now),
        }
        if operation.kind == Kind::Store && result.is_err() && self.has_stray_copy(page) {
            self.count += 1;
            let stray = Operation { kind: Kind::Invalidate, page, buffer: None, sink: Sink::Nobody };
            return self.start(stray, now);
        }
        match self.pages.get_mut(&page).and_then(VecDeque::pop_front) {
            Some(next) => self.start(next, now),
            None => drop(self.pages.remove(&page)),
        }
    }

    /// Sends all messages of rounds that have begun.
    pub fn post(&mut self, now: Instant) {
        for node in 0..self.links.len() {
            if self.links[node].lost.is_some() {
                continue;
            }
            if let Err(error) = self.links[node].transport.post() {
                self.lose(node, &error.to_string(), now);
            }
        }
    }

    /// Takes replies, and gives nodes up that do not answer.
    pub fn advance(&mut self, cq: &Cq, now: Instant) -> Result<(), Error> {
        self.excuse_pause(now);
        let mut taken = std::mem::take(&mut self.taken);
        let polled = loop {
            let polled = cq.poll(COMPLETIONS_PER_POLL, &mut |wc| taken.push(*wc));
            taken.drain(..).for_each(|wc| self.handle(&wc, now));
            // A node is judged when all of its replies are taken. There is a bounded number of them.
            if !matches!(polled, Ok(COMPLETIONS_PER_POLL)) {
                break polled;
            }
        };
        self.taken = taken;
        for node in 0..self.links.len() {
            // Some end without a completion.
            self.end_calls(node, now);
            if let Some(reason) = self.failure(node, now) {
                self.lose(node, &reason, now);
            }
        }
        self.post(now);
        polled.map(drop)
    }

    /// Why a node has to be given up, if so: a reply is late, and the node has ended or takes too long. A loss of pages needs
    /// more than a slow node.
    pub fn failure(&mut self, node: usize, now: Instant) -> Option<String> {
        let late = self.links[node].lateness(now)?;
        let is_silent = late > self.timeouts.copied;
        if is_silent && (late > self.timeouts.last_copy || self.has_other_copies(node, now)) {
            return Some(format!("it has not answered for {} ms", late.as_millis()));
        }
        self.links[node].set_silent(is_silent, self.timeouts.last_copy);
        self.links[node].late_end(late, now)
    }

    /// Whether all pages of a node have copies on others, which answer: a network that fails silences all of them.
    fn has_other_copies(&self, node: usize, now: Instant) -> bool {
        let is_prompt = |late: Duration| late < self.timeouts.copied / PROMPT;
        let answers = |link: &Link| link.lost.is_none() && link.lateness(now).is_none_or(is_prompt);
        let mut others = self.links.iter().enumerate().filter(|(other, _)| *other != node);
        others.all(|(_, link)| answers(link)) && self.refill.as_ref().is_some_and(Refill::is_complete)
    }

    /// A client that was stopped itself must not take its nodes for silent.
    fn excuse_pause(&mut self, now: Instant) {
        let pause = now.saturating_duration_since(self.advanced_at).saturating_sub(PAUSE_MAX);
        self.advanced_at = now;
        if !pause.is_zero() {
            self.links.iter_mut().for_each(|link| link.transport.delay(pause, now));
        }
    }

    fn handle(&mut self, wc: &Wc, now: Instant) {
        let has_qp = |link: &Link| link.lost.is_none() && link.transport.has_qp(wc.qpn);
        let Some(node) = self.links.iter().position(has_qp) else { return };
        if wc.status != WcStatus::Success {
            return self.lose(node, &format!("the connection has failed: {:?}", wc.status), now);
        }
        if let Err(reason) = self.links[node].transport.handle(wc, now) {
            return self.lose(node, reason, now);
        }
        self.end_calls(node, now);
    }

    /// Ends the calls of a node that have finished.
    fn end_calls(&mut self, node: usize, now: Instant) {
        while let Some(finished) = self.links[node].transport.take_finished() {
            self.end_call(node, finished, now);
        }
    }

    fn end_call(&mut self, node: usize, finished: Finished, now: Instant) {
        let Finished { function, call: Call { operation: key, index, .. }, outcome } = finished;
        let link = &mut self.links[node];
        match function {
            Function::UnmappedStore if outcome != Outcome::Done => {
                link.mapped_pages -= 1;
                link.pool.note_empty(now);
            }
            Function::UnmappedStore => {
                link.set_mapped(index, true);
                link.pool.note_page();
            }
            Function::Invalidate => {
                link.set_mapped(index, false);
                link.mapped_pages -= 1;
                link.pool.note_page();
            }
            Function::Load | Function::MappedStore => {}
        }
        let in_flight = &mut self.in_flight[key];
        in_flight.pending -= 1;
        let (kind, page) = (in_flight.operation.kind, in_flight.operation.page);
        match outcome {
            Outcome::Done => in_flight.succeeded += 1,
            Outcome::PoolEmpty => self.note_error(key, PageError::PoolEmpty),
            Outcome::BudgetExhausted => self.note_error(key, PageError::BudgetExhausted),
        }
        match (kind, function) {
            (Kind::Copy, Function::Load) if outcome == Outcome::Done => self.store_copy(key, page, now),
            (Kind::Copy, Function::Load) => {}
            (Kind::Copy, _) if outcome == Outcome::Done => self.count_copy(node),
            _ => {}
        }
        self.finish_if_done(key, now);
    }

    /// Gives nodes up whose processes have ended, although no reply is late.
    pub fn find_ended_nodes(&mut self, now: Instant) {
        for node in 0..self.links.len() {
            if self.links[node].lost.is_none()
                && let Some(reason) = self.links[node].ended()
            {
                self.lose(node, &reason, now);
            }
        }
        self.post(now);
    }

    /// Gives a node up. Operations that it alone could have served fail, others go on with the copies that are left.
    fn lose(&mut self, node: usize, reason: &str, now: Instant) {
        let link = &mut self.links[node];
        if link.lost.is_some() {
            return;
        }
        tracing::warn!(node = %link.address, reason, "a memory node is lost");
        let calls = link.give_up(reason);
        for Call { operation: key, .. } in calls {
            let in_flight = &mut self.in_flight[key];
            in_flight.pending -= 1;
            let page = in_flight.operation.page;
            match in_flight.operation.kind {
                Kind::Load => self.start_load(key, now),
                // An invalidation has nothing left to do there.
                Kind::Invalidate => {}
                Kind::Store | Kind::Copy => self.note_error(key, PageError::NodeLost(page)),
            }
            self.finish_if_done(key, now);
        }
    }
}
