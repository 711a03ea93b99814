//! The client's knowledge of peers' rkeys, and the schedule of queries for it.
//!
//! ```text
//!                 look_up                      Plain, or refused
//!   (no entry) ----------> Queried(unknown) ----------------------> Plain ---+
//!                            |   ^  |                                 ^      | after a minute: queried again
//!              timeout:      |   |  | Extended                        |      | in the background
//!              queried again +---+  +------------> Extended <---------+------+
//!              with backoff
//! ```
//!
//! No access waits for a response: an access with an unknown key is executed as on a plain region, which every server
//! supports. The interval between queries doubles as long as a peer does not respond. A response is accepted only if
//! its transaction id, peer and rkey are those of an outstanding query.

use std::collections::HashMap;
use std::collections::hash_map::Entry as MapEntry;
use std::hash::Hash;
use std::sync::Arc;

use terrace_transport::Time;

use crate::proto::{Datagram, Described};
use crate::region::{Knowledge, Region};

/// The timeout of the first query in nanoseconds. It doubles with each retry.
const FIRST_TIMEOUT_NS: u64 = 10_000_000;
/// The longest interval between two queries for one rkey, in nanoseconds.
const TIMEOUT_NS_MAX: u64 = 60_000_000_000;
/// The most keys in the table. When it is full, the keys with the oldest queries are evicted.
const KEY_COUNT_MAX: usize = 65_536;

/// The knowledge of one key.
#[derive(Debug)]
struct Entry {
    knowledge: Knowledge,
    tid: u64,
    queried_at: Time,
    timeout_ns: u64,
}

/// The knowledge of all keys of all peers. `P` identifies a peer.
#[derive(Debug)]
pub struct Peers<P> {
    entries: HashMap<(P, u32), Entry>,
    /// The outstanding queries: transaction id to key.
    outstanding: HashMap<u64, (P, u32)>,
    next_tid: u64,
}

impl<P: Clone + Eq + Hash> Peers<P> {
    /// An empty table. Transaction ids count up from a random one, so that a response to an earlier process at this
    /// address is not accepted.
    pub fn new(first_tid: u64) -> Peers<P> {
        Peers { entries: HashMap::new(), outstanding: HashMap::new(), next_tid: first_tid }
    }

    /// The number of keys in the table.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether the table is empty.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The knowledge of a key, and the datagram to send if a query is due.
    pub fn look_up(&mut self, now: Time, peer: &P, rkey: u32) -> (Knowledge, Option<Datagram>) {
        if self.entries.len() >= KEY_COUNT_MAX {
            self.evict_oldest();
        }
        let entry = match self.entries.entry((peer.clone(), rkey)) {
            MapEntry::Occupied(occupied) => occupied.into_mut(),
            MapEntry::Vacant(vacant) => {
                vacant.insert(Entry { knowledge: Knowledge::Unknown, tid: 0, queried_at: now, timeout_ns: 0 })
            }
        };
        let first = entry.timeout_ns == 0;
        let is_final = matches!(entry.knowledge, Knowledge::Extended(_));
        if is_final || (!first && now < entry.queried_at.after_ns(entry.timeout_ns)) {
            return (entry.knowledge.clone(), None);
        }
        self.outstanding.remove(&entry.tid);
        entry.tid = self.next_tid;
        entry.queried_at = now;
        entry.timeout_ns = if first { FIRST_TIMEOUT_NS } else { (entry.timeout_ns * 2).min(TIMEOUT_NS_MAX) };
        let query = Datagram::Describe { tid: entry.tid, rkey };
        let knowledge = entry.knowledge.clone();
        self.outstanding.insert(self.next_tid, (peer.clone(), rkey));
        self.next_tid = self.next_tid.wrapping_add(1);
        (knowledge, Some(query))
    }

    /// Handles a peer's response. False if there is no such query outstanding: a repeated response changes nothing.
    pub fn handle_description(&mut self, peer: &P, tid: u64, rkey: u32, described: &Described) -> bool {
        if self.outstanding.get(&tid).is_none_or(|(queried, key)| (queried, *key) != (peer, rkey)) {
            return false;
        }
        let Some((peer, rkey)) = self.outstanding.remove(&tid) else { return false };
        let Some(entry) = self.entries.get_mut(&(peer, rkey)) else { return false };
        entry.timeout_ns = TIMEOUT_NS_MAX;
        entry.knowledge = match described {
            // The transport reports an invalid key to the program.
            Described::Refused(_) | Described::Plain => Knowledge::Plain,
            Described::Extended(description) => {
                Knowledge::Extended(Arc::new(Region::new(rkey, *description)))
            }
        };
        true
    }

    /// Removes a key, which names another region by now.
    pub fn remove(&mut self, peer: &P, rkey: u32) {
        if let Some(entry) = self.entries.remove(&(peer.clone(), rkey)) {
            self.outstanding.remove(&entry.tid);
        }
    }

    /// Removes all keys of a peer whose process has ended.
    pub fn remove_peer(&mut self, peer: &P) {
        self.entries.retain(|(owner, _), _| owner != peer);
        self.outstanding.retain(|_, (owner, _)| owner != peer);
    }

    /// Evicts the half of the keys with the oldest queries.
    fn evict_oldest(&mut self) {
        let mut ages: Vec<Time> = self.entries.values().map(|entry| entry.queried_at).collect();
        let middle = ages.len() / 2;
        let (_, median, _) = ages.select_nth_unstable(middle);
        let median = *median;
        self.entries.retain(|_, entry| entry.queried_at > median);
        let entries = &self.entries;
        self.outstanding.retain(|tid, key| entries.get(key).is_some_and(|entry| entry.tid == *tid));
    }
}
