//! The client's half of a control queue pair: connection setup, and the requests in flight.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use terrace_access::proto::{Accepted, Body, Connect, Datagram, Endpoint, Found, Message, Opened, Status};
use terrace_nic::{Path, Payload, SendOp, Sge, SgeList, Time};

use crate::control::{Control, RECEIVE_COUNT};
use crate::mailbox::Mailbox;

/// The timeout of the first datagram in nanoseconds. It doubles with each retransmission.
const FIRST_TIMEOUT_NS: u64 = 10_000_000;
/// The most transmissions of a datagram before the peer counts as silent.
const ATTEMPTS: u32 = 8;

/// An answer, queued for its requester.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    Opened(Opened),
    Found(Found),
    Paired(Endpoint),
    Done(Status),
}

/// The state of the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LinkState {
    /// `attempts` datagrams have been sent; the next one is due at `retry_at`.
    Connecting { attempts: u32, retry_at: Time },
    /// Requests can be sent.
    Connected,
    /// The peer does not answer.
    Silent,
    /// The peer refuses the connection.
    Refused(Status),
}

/// A connection to one server.
pub(crate) struct Link {
    pub remote: Path,
    pub state: LinkState,
    tid: u64,
    /// The peer has answered the last datagram that it is busy.
    is_peer_busy: bool,
    /// The most requests of this link in flight, as stated by the server.
    pub requests_max: u16,
    next_id: u64,
    /// The answers to requests in flight, by id; `None` until the answer arrives.
    answers: HashMap<u64, Option<Answer>>,
    /// The mailboxes for the answers to sessions' calls, by the sessions' tags.
    sessions: HashMap<u32, Arc<Mailbox>>,
    /// The completion flags of READs over the control queue pair, by their `wr_id`.
    reads: HashMap<u64, Arc<AtomicBool>>,
    next_read: u64,
}

impl Link {
    /// A connection in setup. The first datagram is due at once.
    pub fn new(remote: Path, now: Time) -> Link {
        Link {
            remote,
            state: LinkState::Connecting { attempts: 0, retry_at: now },
            tid: rand::random(),
            is_peer_busy: false,
            requests_max: 0,
            next_id: 0,
            answers: HashMap::new(),
            sessions: HashMap::new(),
            reads: HashMap::new(),
            next_read: 0,
        }
    }

    /// Whether the setup is in progress.
    pub fn is_connecting(&self) -> bool {
        matches!(self.state, LinkState::Connecting { .. })
    }

    /// The datagram to send, if one is due.
    pub fn poll_datagram(&mut self, now: Time, control: &Control) -> Option<Datagram> {
        let LinkState::Connecting { attempts, retry_at } = self.state else { return None };
        if now < retry_at {
            return None;
        }
        if attempts == ATTEMPTS {
            self.state = match self.is_peer_busy {
                true => LinkState::Refused(Status::Busy),
                false => LinkState::Silent,
            };
            return None;
        }
        // A server that was busy may be gone by now.
        self.is_peer_busy = false;
        self.state = LinkState::Connecting {
            attempts: attempts + 1,
            retry_at: now.after_ns(FIRST_TIMEOUT_NS << attempts),
        };
        let Endpoint { qpn, psn, mtu_bytes } = control.endpoint();
        let connect = Connect { qpn, psn, mtu_bytes, receive_count: RECEIVE_COUNT };
        Some(Datagram::Connect { tid: self.tid, connect })
    }

    /// Handles the peer's response. A repeated response changes nothing.
    pub fn handle_accepted(&mut self, tid: u64, accepted: Result<Accepted, Status>, control: &Control) {
        if tid != self.tid || !matches!(self.state, LinkState::Connecting { .. }) {
            return;
        }
        self.state = match accepted {
            // A retransmission may succeed: the peer may have resources, or regions, then.
            Err(Status::Busy) => {
                self.is_peer_busy = true;
                return;
            }
            Err(status) => LinkState::Refused(status),
            Ok(Accepted { qpn, psn, mtu_bytes, receive_count }) => {
                self.requests_max = receive_count;
                match control.connect(self.remote, Endpoint { qpn, psn, mtu_bytes }) {
                    Ok(()) => LinkState::Connected,
                    Err(error) => {
                        tracing::debug!(%error, server = %self.remote.remote, "a server's response is invalid");
                        LinkState::Refused(Status::Invalid)
                    }
                }
            }
        };
    }

    /// Appends a request of the link itself to the batch, and returns its id. The upper half of the id is 0, which is not
    /// a session's tag.
    pub fn request(&mut self, control: &mut Control, body: Body<'_>) -> u64 {
        let id = self.next_id;
        self.next_id = (self.next_id + 1) & u64::from(u32::MAX);
        self.answers.insert(id, None);
        control.send(&Message { id, body });
        id
    }

    /// Routes the answers to calls with this tag in the upper half of their ids to a session.
    pub fn register(&mut self, tag: u32, mailbox: Arc<Mailbox>) {
        self.sessions.insert(tag, mailbox);
    }

    /// READs the server's memory at one or more addresses. The flag is set when the last READ has completed.
    pub fn read(
        &mut self,
        control: &mut Control,
        rkey: u32,
        reads: impl Iterator<Item = (u64, Sge)>,
        done: &Arc<AtomicBool>,
    ) {
        let mut reads = reads.peekable();
        while let Some((va, into)) = reads.next() {
            let wr_id = reads.peek().is_none().then_some(self.next_read);
            control.push(SendOp::Read { va, rkey }, Payload::Sges(SgeList::from_slice(&[into])), wr_id);
        }
        self.reads.insert(self.next_read, done.clone());
        self.next_read += 1;
    }

    /// Sets the flag of completed READs.
    pub fn complete_read(&mut self, wr_id: u64) {
        if let Some(done) = self.reads.remove(&wr_id) {
            done.store(true, Ordering::Release);
        }
    }

    /// Passes a message's answers to their requesters. False if it is a message that servers do not send.
    pub fn handle_message(&mut self, message: &Message<'_>) -> bool {
        let id = message.id;
        let answer = match &message.body {
            Body::Opened(opened) => Answer::Opened(*opened),
            Body::Found(found) => Answer::Found(*found),
            Body::Paired(endpoint) => Answer::Paired(*endpoint),
            Body::Done(done) => {
                self.handle_done(id..id.saturating_add(done.count.into()), done.status);
                return true;
            }
            _ => return false,
        };
        self.store_answer(id, answer);
        true
    }

    /// Passes the outcome of requests of one requester to it.
    pub fn handle_done(&mut self, ids: Range<u64>, status: Status) {
        match self.sessions.get(&((ids.start >> 32) as u32)) {
            Some(mailbox) => mailbox.put(ids, status),
            None => ids.for_each(|id| self.store_answer(id, Answer::Done(status))),
        }
    }

    fn store_answer(&mut self, id: u64, answer: Answer) {
        match self.answers.get_mut(&id) {
            Some(pending) => *pending = Some(answer),
            None => tracing::debug!(id, "an answer to an unknown request"),
        }
    }

    /// Closes the sessions' mailboxes, because the connection has ended.
    pub fn close(&self) {
        for mailbox in self.sessions.values() {
            mailbox.close();
        }
    }

    /// Takes the answer to a request, if it has arrived.
    pub fn take_answer(&mut self, id: u64) -> Option<Answer> {
        let answer = (*self.answers.get(&id)?)?;
        self.answers.remove(&id);
        Some(answer)
    }
}
