//! How a session finds the peer's session, and what the peer has described.
//!
//! ```text
//!            a request needs the peer        Joined, or Join of the peer
//!   Idle ------------------------> Joining ------------------------------> Connected
//!     |                               |  refused, or silent                     |
//!     |                               +-----------------> Plain                 | the control queue pair fails
//!     +-- Join of the peer -------------------------> Connected                 v
//!                                     |  busy for too long                    Failed
//!                                     +---------------------------------------> ^
//! ```

use std::collections::{HashMap, HashSet};

use terrace_access::region::Knowledge;
use terrace_nic::Time;

/// The timeout of the first datagram in nanoseconds. It doubles with each retransmission.
const FIRST_TIMEOUT_NS: u64 = 10_000_000;
/// The most transmissions of a datagram before the peer counts as one without sessions: 2.5 s.
const ATTEMPTS: u32 = 8;

/// A key to forget.
pub(crate) struct Forgetting {
    pub rkey: u32,
    /// The region that it had, if its memory could be absent.
    pub region_id: Option<u64>,
}

/// The state of the connection to the peer's session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum LinkState {
    /// Nothing has needed it.
    #[default]
    Idle,
    /// `attempts` datagrams have been sent; the next one is due at `retry_at`. `may_be_plain` as long as nothing says that
    /// the peer has a session, and it could have been asked.
    Joining { tid: u64, attempts: u32, retry_at: Time, may_be_plain: bool },
    /// Messages can be sent.
    Connected,
    /// The peer has no session: its memory counts as present.
    Plain,
    /// The control queue pair has failed, or cannot be set up.
    Failed,
}

/// What is due of a link that is being set up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Due {
    /// Nothing.
    Nothing,
    /// Send a datagram with this transaction id.
    Send(u64),
    /// The peer has not answered.
    Silent,
    /// The peer may have a session, and cannot be connected with.
    Unavailable,
}

impl LinkState {
    /// Begins the setup for a queue pair. [`qpn_of`] finds it by the transaction id.
    pub fn join(now: Time, qpn: u32) -> LinkState {
        let tid = rand::random::<u64>() << QPN_BITS | u64::from(qpn);
        LinkState::Joining { tid, attempts: 0, retry_at: now, may_be_plain: true }
    }

    /// The peer has a session, or this end has nothing to connect with it: silence does not mean any more that the peer has
    /// none.
    pub fn exclude_plain(&mut self) {
        if let LinkState::Joining { may_be_plain, .. } = self {
            *may_be_plain = false;
        }
    }

    /// What is due.
    pub fn poll(&mut self, now: Time) -> Due {
        let LinkState::Joining { tid, attempts, retry_at, may_be_plain } = *self else { return Due::Nothing };
        if now < retry_at {
            return Due::Nothing;
        }
        if attempts == ATTEMPTS {
            return if may_be_plain { Due::Silent } else { Due::Unavailable };
        }
        let retry_at = now.after_ns(FIRST_TIMEOUT_NS << attempts);
        *self = LinkState::Joining { tid, attempts: attempts + 1, retry_at, may_be_plain };
        Due::Send(tid)
    }

    /// When something is due.
    pub fn deadline(&self) -> Option<Time> {
        match self {
            LinkState::Joining { retry_at, .. } => Some(*retry_at),
            _ => None,
        }
    }
}

const QPN_BITS: u32 = 24;

/// The queue pair whose session has chosen a transaction id.
pub(crate) fn qpn_of(tid: u64) -> u32 {
    tid as u32 & ((1 << QPN_BITS) - 1)
}

/// The most keys whose description is known; beyond, all are forgotten.
const KNOWN_MAX: usize = 4096;

/// What the peer has described of its keys.
#[derive(Debug, Default)]
pub(crate) struct Keys {
    known: HashMap<u32, Knowledge>,
    /// Keys that the peer has been asked about, or will be.
    asked: HashSet<u32>,
}

impl Keys {
    /// The knowledge of a key, and whether the peer has to be asked now.
    pub fn look_up(&mut self, rkey: u32) -> (Knowledge, bool) {
        match self.known.get(&rkey) {
            Some(knowledge) => (knowledge.clone(), false),
            None => (Knowledge::Unknown, self.asked.insert(rkey)),
        }
    }

    /// Takes what the peer has described. False if it has not been asked about the key.
    pub fn note(&mut self, rkey: u32, knowledge: &Knowledge, is_kept: bool) -> bool {
        if !self.asked.remove(&rkey) {
            return false;
        }
        if is_kept {
            if self.known.len() >= KNOWN_MAX {
                self.known.clear();
            }
            self.known.insert(rkey, knowledge.clone());
        }
        true
    }

    /// Forgets a key. Returns the id of its region, if that was described as one whose memory can be absent.
    pub fn forget(&mut self, rkey: u32) -> Option<u64> {
        match self.known.remove(&rkey)? {
            Knowledge::Extended(region) => Some(region.description().region_id),
            Knowledge::Plain | Knowledge::Unknown => None,
        }
    }

    /// Whether the peer has not answered a question about a key.
    pub fn is_asking(&self) -> bool {
        !self.asked.is_empty()
    }

    /// The keys that the peer has been asked about, or will be.
    pub fn asked(&self) -> impl Iterator<Item = u32> + '_ {
        self.asked.iter().copied()
    }

    /// Takes out the keys that the peer has been asked about.
    pub fn take_asked(&mut self) -> HashSet<u32> {
        std::mem::take(&mut self.asked)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many datagrams are sent, and what is due then.
    fn ask(mut link: LinkState) -> (u32, Due) {
        let mut sent = 0;
        loop {
            let now = link.deadline().expect("it is joining");
            match link.poll(now) {
                Due::Send(_) => sent += 1,
                Due::Nothing => unreachable!("the deadline has come"),
                end => return (sent, end),
            }
            assert_eq!(link.poll(now), Due::Nothing);
        }
    }

    #[test]
    fn a_silent_peer_is_asked_eight_times() {
        assert_eq!(ask(LinkState::join(Time(0), 5)), (ATTEMPTS, Due::Silent));
    }

    #[test]
    fn a_peer_that_has_a_session_is_not_taken_for_a_silent_one() {
        let mut link = LinkState::join(Time(0), 5);
        link.exclude_plain();
        assert_eq!(ask(link), (ATTEMPTS, Due::Unavailable));
    }

    #[test]
    fn a_key_is_asked_for_once_and_only_answers_to_questions_count() {
        let mut keys = Keys::default();
        assert!(keys.look_up(7).1 && !keys.look_up(7).1);
        assert!(!keys.note(8, &Knowledge::Plain, true));
        assert!(keys.note(7, &Knowledge::Plain, true) && !keys.note(7, &Knowledge::Plain, true));
        assert!(matches!(keys.look_up(7), (Knowledge::Plain, false)));
        assert!(keys.look_up(9).1 && keys.note(9, &Knowledge::Plain, false) && keys.look_up(9).1);
    }
}
