//! The knowledge of peers' rkeys, and when to ask.
//!
//! ```text
//!                 look_up                    Plain, or refused
//!   (no entry) ----------> Asked(unknown) ----------------------> Plain ---+
//!                            |   ^  |                               ^      | long silence: asked again
//!              timeout:      |   |  | Extended                      |      | in the background
//!              asked again   +---+  +------------> Extended <-------+------+
//!              with backoff
//! ```
//!
//! Nothing ever waits for an answer: an access with an unknown key is made as to a plain region, which every server
//! serves. A peer that stays silent is asked less and less often. A datagram is accepted only as the answer to a
//! question that was asked.

use std::collections::HashMap;
use std::collections::hash_map::Entry as MapEntry;
use std::hash::Hash;
use std::sync::Arc;

use terrace_transport::Time;

use crate::proto::{Datagram, Described};
use crate::region::{Knowledge, Region};

/// How long the first answer may take, in nanoseconds; twice as long for each further one.
const FIRST_TIMEOUT_NS: u64 = 10_000_000;
/// Longest time between two questions about one rkey, in nanoseconds.
const TIMEOUT_NS_MAX: u64 = 60_000_000_000;
/// Most keys that are kept. Beyond, the keys that were asked about longest ago are dropped.
const KEY_COUNT_MAX: usize = 65_536;

/// The knowledge of one key.
#[derive(Debug)]
struct Entry {
    knowledge: Knowledge,
    tid: u64,
    asked_at: Time,
    timeout_ns: u64,
}

/// The knowledge of all keys of all peers. `P` identifies a peer.
#[derive(Debug)]
pub struct Peers<P> {
    entries: HashMap<(P, u32), Entry>,
    /// The keys of unanswered questions.
    asked: HashMap<u64, (P, u32)>,
    next_tid: u64,
}

impl<P: Clone + Eq + Hash> Peers<P> {
    /// Nothing is known. Transaction ids count up from one that the caller draws at random, so that an answer to an
    /// earlier process at this address is not taken for one of ours.
    pub fn new(first_tid: u64) -> Peers<P> {
        Peers { entries: HashMap::new(), asked: HashMap::new(), next_tid: first_tid }
    }

    /// How many keys are kept.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether no key is kept.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The knowledge of a key, and the datagram to send if a question is due.
    pub fn look_up(&mut self, now: Time, peer: &P, rkey: u32) -> (Knowledge, Option<Datagram>) {
        if self.entries.len() >= KEY_COUNT_MAX {
            self.forget_oldest();
        }
        let entry = match self.entries.entry((peer.clone(), rkey)) {
            MapEntry::Occupied(occupied) => occupied.into_mut(),
            MapEntry::Vacant(vacant) => {
                vacant.insert(Entry { knowledge: Knowledge::Unknown, tid: 0, asked_at: now, timeout_ns: 0 })
            }
        };
        let first = entry.timeout_ns == 0;
        let settled = matches!(entry.knowledge, Knowledge::Extended(_));
        if settled || (!first && now < entry.asked_at.after_ns(entry.timeout_ns)) {
            return (entry.knowledge.clone(), None);
        }
        self.asked.remove(&entry.tid);
        entry.tid = self.next_tid;
        entry.asked_at = now;
        entry.timeout_ns = if first { FIRST_TIMEOUT_NS } else { (entry.timeout_ns * 2).min(TIMEOUT_NS_MAX) };
        let ask = Datagram::Describe { tid: entry.tid, rkey };
        let knowledge = entry.knowledge.clone();
        self.asked.insert(self.next_tid, (peer.clone(), rkey));
        self.next_tid = self.next_tid.wrapping_add(1);
        (knowledge, Some(ask))
    }

    /// Handles a peer's answer; true if it was asked. Its statement about a key can be renewed only by asking again.
    pub fn handle_description(&mut self, peer: &P, tid: u64, rkey: u32, described: &Described) -> bool {
        if self.asked.get(&tid).is_none_or(|(asked, key)| (asked, *key) != (peer, rkey)) {
            return false;
        }
        let Some((peer, rkey)) = self.asked.remove(&tid) else { return false };
        let Some(entry) = self.entries.get_mut(&(peer, rkey)) else { return false };
        entry.timeout_ns = TIMEOUT_NS_MAX;
        entry.knowledge = match described {
            // The transport reports to the program what is wrong with its key.
            Described::Refused(_) | Described::Plain => Knowledge::Plain,
            Described::Extended(description) => {
                Knowledge::Extended(Arc::new(Region::new(rkey, *description)))
            }
        };
        true
    }

    /// Forgets a key: its region has turned out to be another one.
    pub fn forget(&mut self, peer: &P, rkey: u32) {
        if let Some(entry) = self.entries.remove(&(peer.clone(), rkey)) {
            self.asked.remove(&entry.tid);
        }
    }

    /// Forgets all keys of a peer: its process has ended.
    pub fn forget_peer(&mut self, peer: &P) {
        self.entries.retain(|(owner, _), _| owner != peer);
        self.asked.retain(|_, (owner, _)| owner != peer);
    }

    /// Drops half of the keys, those that were asked about longest ago.
    fn forget_oldest(&mut self) {
        let mut ages: Vec<Time> = self.entries.values().map(|entry| entry.asked_at).collect();
        let middle = ages.len() / 2;
        let (_, median, _) = ages.select_nth_unstable(middle);
        let median = *median;
        self.entries.retain(|_, entry| entry.asked_at > median);
        let entries = &self.entries;
        self.asked.retain(|tid, key| entries.get(key).is_some_and(|entry| entry.tid == *tid));
    }
}
