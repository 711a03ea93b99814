//! A connection of a client: its queue pairs, what it has looked up, opened and locked.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use terrace_nic::{Path, QueuePair, Wc};
use terrace_node::Control;
use terrace_sync::Mutex;

use super::holdings::Holder;
use super::locks::HeldLock;
use super::nodes::Nodes;
use super::opens::Open;
use super::stats::ExportClientStats;
use crate::ends::{Domain, Ends, destroy};
use crate::proto::{Answer, Body, ChangeSet, Event, FileId, Link, Message, Request};
use crate::rules::Identity;

/// The most requests of a client that wait or run.
pub const REQUESTS_MAX: usize = 32;
/// The most workers that serve one client at a time.
const WORKERS_PER_CLIENT: usize = 2;
/// The most events in flight. Answers and events together fit into the client's receives.
const EVENTS_IN_FLIGHT: usize = 8;
/// The most events that wait. Beyond that changes are reported as lost.
const EVENTS_WAITING: usize = 1024;
/// The `wr_id` of the last event of a batch.
pub const EVENTS_SENT: u64 = u64::MAX - 1;

/// The requests of a client that wait for a worker.
#[derive(Default)]
struct Pending {
    requests: VecDeque<(u64, Request)>,
    running: usize,
    /// How many were answered.
    answered: u64,
    /// Whether the connection is in the workers' queue.
    is_queued: bool,
    is_closed: bool,
}

impl Pending {
    fn wants_worker(&mut self) -> bool {
        let wants = !self.is_queued && !self.requests.is_empty() && self.running < WORKERS_PER_CLIENT;
        self.is_queued |= wants;
        wants
    }
}

/// The events of a client that wait.
#[derive(Default)]
struct Events {
    waiting: VecDeque<Event>,
    are_in_flight: bool,
    is_lost: bool,
}

/// A connection.
pub struct Connection {
    pub identity: Identity,
    /// The client's number ([`SetupRequest::client`](crate::proto::SetupRequest)).
    pub client: u64,
    /// The client's address, for the log.
    pub peer: String,
    /// Whose descriptors its open files and locks take.
    pub holder: Holder,
    pub domain: Arc<Domain>,
    pub gid: [u8; 16],
    pub path: Path,
    pub qpn: u32,
    pub nodes: Nodes,
    pub opens: Mutex<HashMap<u64, Arc<Open>>>,
    pub locks: Mutex<HashMap<(FileId, u64), HeldLock>>,
    pub watches: Mutex<HashSet<FileId>>,
    /// `None` once closed.
    control: Mutex<Option<Control>>,
    pairs: Mutex<HashMap<Link, Arc<QueuePair>>>,
    pending: Mutex<Pending>,
    events: Mutex<Events>,
    started: Instant,
    /// When the last message came, in milliseconds after `started`.
    heard_ms: AtomicU64,
    has_lease_ended: AtomicBool,
    has_ended: AtomicBool,
}

/// What a connection begins with.
pub struct NewConnection {
    pub identity: Identity,
    pub client: u64,
    pub peer: String,
    pub holder: Holder,
    pub domain: Arc<Domain>,
    pub gid: [u8; 16],
    pub path: Path,
    pub nodes: Nodes,
    pub ends: Ends,
}

impl Connection {
    /// A connection whose queue pairs are connected.
    pub fn new(new: NewConnection) -> Arc<Connection> {
        let NewConnection { identity, client, peer, holder, domain, gid, path, nodes, ends } = new;
        let pairs = HashMap::from([(Link::Data, ends.data.qp), (Link::Append, ends.append.qp)]);
        Arc::new(Connection {
            identity,
            client,
            peer,
            holder,
            domain,
            gid,
            path,
            qpn: ends.control.qpn(),
            nodes,
            opens: Mutex::default(),
            locks: Mutex::default(),
            watches: Mutex::default(),
            control: Mutex::new(Some(ends.control)),
            pairs: Mutex::new(pairs),
            pending: Mutex::default(),
            events: Mutex::default(),
            started: Instant::now(),
            heard_ms: AtomicU64::new(0),
            has_lease_ended: AtomicBool::new(false),
            has_ended: AtomicBool::new(false),
        })
    }

    /// Its statistics now.
    pub fn stats(&self) -> ExportClientStats {
        ExportClientStats {
            client: self.peer.clone(),
            uid: self.identity.uid,
            open_files: self.opens.lock().len(),
            locks: self.locks.lock().len(),
            watches: self.watches.lock().len(),
            requests: self.pending.lock().answered,
        }
    }

    /// Ends the lease if nothing has come from the client for so long. Returns whether it has ended.
    pub fn check_lease(&self, lease: Duration) -> bool {
        let heard = Duration::from_millis(self.heard_ms.load(Ordering::Relaxed));
        let is_silent = self.started.elapsed().saturating_sub(heard) > lease;
        if is_silent {
            self.has_lease_ended.store(true, Ordering::SeqCst);
        }
        is_silent
    }

    /// Whether the client was silent for longer than its lease.
    pub fn has_lease_ended(&self) -> bool {
        self.has_lease_ended.load(Ordering::SeqCst)
    }

    /// The lease begins again, with a message or because the server could not receive any.
    pub fn renew_lease(&self) {
        self.heard_ms.store(self.started.elapsed().as_millis() as u64, Ordering::Relaxed);
    }

    /// Has the lease end so much later: for this time nothing could be received. Renewing it would keep the lease of a client that is gone
    /// where that happens again and again.
    pub fn extend_lease(&self, by: Duration) {
        let now = self.started.elapsed().as_millis() as u64;
        let extended = |heard: u64| Some(now.min(heard.saturating_add(by.as_millis() as u64)).max(heard));
        // Always `Ok`.
        let _ = self.heard_ms.fetch_update(Ordering::Relaxed, Ordering::Relaxed, extended);
    }

    /// Takes a message out of its receive buffer, and queues its request. Returns whether the connection is to be queued for
    /// a worker.
    ///
    /// # Errors
    /// The reason for which the connection ends.
    pub fn receive(&self, wc: &Wc, bytes: &mut Vec<u8>) -> Result<bool, String> {
        self.renew_lease();
        let mut guard = self.control.lock();
        let Some(control) = guard.as_mut() else { return Ok(false) };
        control.take_message(wc, bytes).map_err(|error| error.to_string())?;
        if control.is_backlog_full() {
            return Err("it does not drain its responses".into());
        }
        drop(guard);
        let message = Message::decode(bytes).map_err(|error| error.to_string())?;
        let Body::Request(request) = message.body else { return Err("an answer from a client".into()) };
        if let Request::Renew {} = request {
            // The workers of the client may wait for a disk for longer than a lease.
            self.send_answer(message.id, Answer::Done {});
            return Ok(false);
        }
        let mut pending = self.pending.lock();
        if pending.is_closed {
            return Ok(false);
        }
        if pending.requests.len() + pending.running >= REQUESTS_MAX {
            return Err("more requests than it may have in flight".into());
        }
        pending.requests.push_back((message.id, request));
        Ok(pending.wants_worker())
    }

    /// The next request, for a worker that has taken the connection from the queue; and whether the connection is to be
    /// queued again.
    pub fn take_request(&self) -> (Option<(u64, Request)>, bool) {
        let mut pending = self.pending.lock();
        pending.is_queued = false;
        let request = pending.requests.pop_front();
        pending.running += usize::from(request.is_some());
        (request, pending.wants_worker())
    }

    /// Ends a request: sends the answer. Returns whether the connection is to be queued for a worker.
    pub fn answer(&self, id: u64, answer: Answer) -> bool {
        let wants = {
            let mut pending = self.pending.lock();
            // The client may send its next request as soon as it has the answer.
            pending.running -= 1;
            pending.answered += 1;
            pending.wants_worker()
        };
        self.send_answer(id, answer);
        wants
    }

    fn send_answer(&self, id: u64, answer: Answer) {
        let encoded = Message { id, body: Body::Answer(answer) }.encode();
        let too_long = rustix::io::Errno::OVERFLOW.raw_os_error() as u16;
        let failed = || Message { id, body: Body::Answer(Answer::Failed { errno: too_long }) }.encode();
        if let Some(bytes) = encoded.or_else(failed) {
            self.send([(bytes, None)]);
        }
    }

    /// Sends messages, with the `wr_id` of a completion if there is to be one.
    fn send(&self, messages: impl IntoIterator<Item = (Vec<u8>, Option<u64>)>) {
        let mut guard = self.control.lock();
        let Some(control) = guard.as_mut() else { return };
        messages.into_iter().for_each(|(bytes, wr_id)| control.send_encoded(bytes, wr_id));
        // A queue pair in the error state reports that by its completions.
        let _ = control.post();
    }

    /// Posts what waits for space in the send queue.
    pub fn post(&self) {
        if let Some(control) = self.control.lock().as_mut().filter(|control| control.has_backlog()) {
            let _ = control.post();
        }
    }

    /// Sends an event, now or when earlier ones have arrived. Changes of one file that wait become one.
    pub fn send_event(&self, event: Event) {
        let mut events = self.events.lock();
        if let Event::Changed { id, change } = &event {
            for waiting in &mut events.waiting {
                if let Event::Changed { id: known, change: changes } = waiting
                    && known == id
                {
                    *changes |= *change;
                    return;
                }
            }
            if events.waiting.len() >= EVENTS_WAITING {
                events.is_lost = true;
                return;
            }
        }
        // Revocations are limited by the number of open files.
        events.waiting.push_back(event);
        self.send_waiting(&mut events);
    }

    /// The events in flight have arrived.
    pub fn handle_events_sent(&self) {
        let mut events = self.events.lock();
        events.are_in_flight = false;
        self.send_waiting(&mut events);
    }

    fn send_waiting(&self, events: &mut Events) {
        if events.are_in_flight {
            return;
        }
        if events.is_lost && events.waiting.len() < EVENTS_WAITING {
            events.is_lost = false;
            let id = FileId::default();
            events.waiting.push_back(Event::Changed { id, change: ChangeSet::LOST });
        }
        let count = events.waiting.len().min(EVENTS_IN_FLIGHT);
        if count == 0 {
            return;
        }
        events.are_in_flight = true;
        // Events are short enough for a message.
        let encoded = events.waiting.drain(..count).enumerate().filter_map(|(index, event)| {
            let wr_id = (index + 1 == count).then_some(EVENTS_SENT);
            Some((Message { id: 0, body: Body::Event(event) }.encode()?, wr_id))
        });
        self.send(encoded);
    }

    /// Replaces a queue pair for one-sided accesses.
    pub fn replace_pair(&self, link: Link, qp: Arc<QueuePair>) {
        let mut pairs = self.pairs.lock();
        if self.has_ended() {
            destroy(&qp);
        } else if let Some(old) = pairs.insert(link, qp) {
            destroy(&old);
        }
    }

    /// Whether the connection has ended, or is about to.
    pub fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::SeqCst)
    }

    /// Whether workers carry requests of it out.
    pub fn has_running(&self) -> bool {
        self.pending.lock().running > 0
    }

    /// Marks it as ended: no request of the client begins any more. True for the first caller, who releases what it has.
    pub fn begin_end(&self) -> bool {
        let is_first = !self.has_ended.swap(true, Ordering::SeqCst);
        let mut pending = self.pending.lock();
        pending.is_closed = true;
        pending.requests.clear();
        is_first
    }

    /// Destroys the queue pairs: no access of the client begins any more except those of a client of this host, which end with their
    /// keys. The connection has ended.
    pub fn close(&self) {
        if let Some(control) = self.control.lock().take() {
            control.close();
        }
        self.pairs.lock().drain().for_each(|(_, qp)| destroy(&qp));
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use terrace_nic::{PathChoice, PortConfig};

    use crate::client::{Client, ClientConfig};
    use crate::proto::OpenAccess;
    use crate::server::{Server, ServerConfig};

    use super::*;

    const LEASE: Duration = Duration::from_secs(1);

    /// A server, a client, and a file.
    fn start() -> (tempfile::TempDir, Server, Client, FileId) {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("file"), "bytes").unwrap();
        let address = Some(Ipv4Addr::LOCALHOST.into());
        let port = PortConfig { address, path: PathChoice::Udp, ..PortConfig::default() };
        let config = ServerConfig::new(directory.path().into(), (Ipv4Addr::LOCALHOST, 0).into());
        let server = Server::open(&ServerConfig { port: port.clone(), lease: LEASE, ..config }).unwrap();
        let config = ClientConfig { port, ..ClientConfig::new(server.address()) };
        let client = Client::connect(&config).unwrap();
        let file = client.lookup_path("file".as_ref()).unwrap().id;
        (directory, server, client, file)
    }

    #[test]
    fn a_client_whose_requests_all_wait_for_a_disk_keeps_its_lease() {
        let (_directory, server, client, file) = start();
        // As long as it is locked, opening a file takes its time.
        let disk = server.state.checking.lock();
        std::thread::scope(|scope| {
            let open = || client.open(file, OpenAccess::READ);
            let opens: Vec<_> = (0..WORKERS_PER_CLIENT).map(|_| scope.spawn(open)).collect();
            std::thread::sleep(3 * LEASE);
            drop(disk);
            for open in opens {
                assert!(open.join().unwrap().is_ok());
            }
        });
        let session = client.shared.session(client.shared.deadline()).unwrap();
        assert_eq!(session.serial, 1, "the client has connected again");
    }

    #[test]
    fn no_lease_ends_while_the_server_receives_nothing() {
        let (_directory, server, client, _file) = start();
        let connection = server.state.connections().pop().unwrap();
        // No thread looks for packets from now on.
        server.device().close();
        std::thread::sleep(3 * LEASE);
        assert!(!connection.has_lease_ended());
        drop(client);
    }
}
