//! How a session finds the peer's session, and what the peer has described.
//!
//! ```text
//!            a request needs the peer        Joined, or Join of the peer
//!   Idle ------------------------> Joining ------------------------------> Connected
//!     |                               |  refused, or silent although            |
//!     |                               |  its device acknowledges packets        |
//!     |                               +-----------------> Plain                 | the control queue pair fails
//!     | <-------- no request waits ---+                                         |
//!     +-- Join of the peer -------------------------> Connected                 v
//!                                     |  busy for too long                    Failed
//!                                     +---------------------------------------> ^
//! ```

use std::collections::{HashMap, HashSet};

use terrace_access::region::Knowledge;
use terrace_nic::Time;

/// The timeout of the first datagram in nanoseconds. It doubles with each retransmission.
const FIRST_TIMEOUT_NS: u64 = 10_000_000;
/// The transmissions of a datagram, in 2.5 s, before the peer has to prove that it runs.
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
    /// `attempts` datagrams have been sent; the next one is due at `retry_at`.
    Joining { tid: u64, attempts: u32, retry_at: Time, silence: Silence },
    /// Messages can be sent.
    Connected,
    /// The peer has no session: its memory counts as present.
    Plain,
    /// The control queue pair has failed, or cannot be set up.
    Failed,
}

/// What it means that the peer does not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Silence {
    /// That it has no session, or is stopped.
    Unclear,
    /// The same. A request is under way that its device acknowledges if it runs.
    Tested,
    /// That it has no session: its device runs.
    Plain,
    /// Nothing: it has a session, or this end has nothing to connect with it.
    Busy,
}

/// What is due of a link that is being set up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Due {
    /// Nothing.
    Nothing,
    /// Send a datagram with this transaction id.
    Send(u64),
    /// Find out whether the peer's device runs ([`LinkState::note_running`]).
    Test,
    /// The peer has no session.
    Silent,
    /// The peer may have a session, and cannot be connected with.
    Unavailable,
}

impl LinkState {
    /// Begins the setup for a queue pair. [`qpn_of`] finds it by the transaction id.
    pub fn join(now: Time, qpn: u32) -> LinkState {
        let tid = rand::random::<u64>() << QPN_BITS | u64::from(qpn);
        LinkState::Joining { tid, attempts: 0, retry_at: now, silence: Silence::Unclear }
    }

    /// The peer has a session, or this end has nothing to connect with it: silence does not mean any more that the peer has
    /// none.
    pub fn exclude_plain(&mut self) {
        self.resume(Silence::Busy);
    }

    /// The peer's device runs. If it has a session, it has got the datagrams; one more gives it the time to answer.
    pub fn note_running(&mut self) {
        if self.is_tested() {
            self.resume(Silence::Plain);
        }
    }

    /// Whether the peer has to prove that its device runs.
    pub fn is_tested(&self) -> bool {
        matches!(self, LinkState::Joining { silence: Silence::Tested, .. })
    }

    fn resume(&mut self, meaning: Silence) {
        let is_tested = self.is_tested();
        if let LinkState::Joining { silence, attempts, .. } = self {
            *silence = meaning;
            *attempts -= u32::from(is_tested);
        }
    }

    /// What is due.
    pub fn poll(&mut self, now: Time) -> Due {
        let LinkState::Joining { tid, attempts, retry_at, silence } = self else { return Due::Nothing };
        if now < *retry_at {
            return Due::Nothing;
        }
        if *attempts == ATTEMPTS {
            return match silence {
                Silence::Busy => Due::Unavailable,
                Silence::Plain => Due::Silent,
                Silence::Tested => Due::Nothing,
                Silence::Unclear => {
                    *silence = Silence::Tested;
                    Due::Test
                }
            };
        }
        *retry_at = now.after_ns(FIRST_TIMEOUT_NS << *attempts);
        *attempts += 1;
        Due::Send(*tid)
    }

    /// When something is due.
    pub fn deadline(&self) -> Option<Time> {
        match self {
            LinkState::Joining { retry_at, silence, .. } if *silence != Silence::Tested => Some(*retry_at),
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
    fn ask(link: &mut LinkState) -> (u32, Due) {
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
    fn a_silent_peer_has_no_session_only_if_its_device_runs() {
        let mut link = LinkState::join(Time(0), 5);
        assert_eq!(ask(&mut link), (ATTEMPTS, Due::Test));
        assert_eq!(
            (link.deadline(), link.poll(Time(u64::MAX))),
            (None, Due::Nothing),
            "it may be stopped for long"
        );
        link.note_running();
        assert_eq!(ask(&mut link), (1, Due::Silent));
    }

    #[test]
    fn a_peer_that_has_a_session_is_not_taken_for_a_silent_one() {
        let mut link = LinkState::join(Time(0), 5);
        link.exclude_plain();
        assert_eq!(ask(&mut link), (ATTEMPTS, Due::Unavailable));
    }

    #[test]
    fn a_peer_that_was_stopped_and_is_busy_is_asked_again() {
        let mut link = LinkState::join(Time(0), 5);
        assert_eq!(ask(&mut link), (ATTEMPTS, Due::Test));
        link.exclude_plain();
        link.note_running();
        assert_eq!(ask(&mut link), (1, Due::Unavailable));
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
