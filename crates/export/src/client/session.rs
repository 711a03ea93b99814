//! One connection to a server: requests and their answers, one-sided accesses and their completions.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use terrace_nic::{
    Cq, Device, Error, Path, Payload, QueuePair, SendFlags, SendOp, SendWr, Sge, SgeList, WcOpcode, WcStatus,
};
use terrace_node::{Control, is_untracked};
use terrace_sync::{Condvar, Mutex, SpinBudget};

use super::buffers::Buffers;
use super::interrupt::{self, uninterruptible};
use super::stream::Stream;
use crate::ends::{Domain, OpenPair, destroy};
use crate::error::ExportError;
use crate::proto::{Answer, Body, ChangeSet, Event, FileId, Link, Message, Request, SetupAnswer};

/// The most one-sided accesses in flight on each queue pair.
pub const DEPTH: u32 = 512;
/// A sleeping thread looks again after so long, so that a lost wake-up costs little.
const SLEEP_TIME: Duration = Duration::from_millis(20);
/// How much later than its queue pairs a server that ends closes its socket, at most.
const CLOSE_TIME: Duration = Duration::from_millis(50);
/// The most completions that are handled at once.
const COMPLETIONS_PER_PASS: usize = 64;
/// So many deferred requests leave at once.
const DEFERRED_MAX: usize = 8;
/// The most changes that wait for the program.
const EVENTS_MAX: usize = 4096;

/// The state of a one-sided access.
#[derive(Clone, Copy, Debug)]
struct Transfer {
    link: Link,
    generation: u64,
    status: Option<WcStatus>,
}

/// A queue pair for one-sided accesses.
struct Pair {
    qp: Arc<QueuePair>,
    /// Incremented with each replacement.
    generation: u64,
}

/// The queue pairs of a session. Each access looks for one, so they are fields.
#[derive(Default)]
struct Pairs {
    data: Option<Pair>,
    append: Option<Pair>,
}

impl Pairs {
    fn of(&mut self, link: Link) -> &mut Option<Pair> {
        match link {
            Link::Data => &mut self.data,
            Link::Append => &mut self.append,
        }
    }

    fn all(self) -> impl Iterator<Item = Pair> {
        self.data.into_iter().chain(self.append)
    }
}

/// What waits for the server.
#[derive(Default)]
struct Waiting {
    next_id: u64,
    /// Answers to requests in flight. The answer of a request without a reader is dropped.
    answers: HashMap<u64, AnswerState>,
    /// Requests whose answers nobody waits for.
    deferred: VecDeque<Request>,
    next_transfer: u64,
    transfers: HashMap<u64, Transfer>,
    events: Vec<Event>,
}

impl Waiting {
    /// The status of an access that has ended.
    fn status(&self, number: u64) -> Option<WcStatus> {
        self.transfers.get(&number).map_or(Some(WcStatus::Flushed), |transfer| transfer.status)
    }

    /// Takes the status of an access that has ended.
    fn take_status(&mut self, number: u64) -> Option<WcStatus> {
        let status = self.status(number)?;
        self.transfers.remove(&number);
        Some(status)
    }

    /// Adds an event. If there are too many for a program that does not take them, the program learns that some are lost.
    fn push_event(&mut self, event: Event) {
        if self.events.len() >= EVENTS_MAX {
            self.events.clear();
            self.events.push(Event::Changed { id: FileId::default(), change: ChangeSet::LOST });
        }
        self.events.push(event);
    }

    /// Whether there are requests whose answers nobody waits for, sent or not.
    fn has_deferred(&self) -> bool {
        let mut states = self.answers.values();
        !self.deferred.is_empty() || states.any(|state| matches!(state, AnswerState::Unread))
    }

    /// The id of a new request; `None` if `max` are in flight.
    fn begin_request(&mut self, state: AnswerState, max: usize) -> Option<u64> {
        if self.answers.len() >= max {
            return None;
        }
        self.next_id += 1;
        self.answers.insert(self.next_id, state);
        Some(self.next_id)
    }
}

enum AnswerState {
    Awaited,
    Unread,
    Here(Answer),
}

/// How many requests are deferred.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deferred {
    /// They may wait for the next call.
    Few,
    Many,
}

/// A request whose answer is to be waited for.
pub struct SentRequest {
    id: u64,
    since: Instant,
}

/// What a session begins with.
pub struct NewSession {
    pub device: Arc<Device>,
    pub domain: Arc<Domain>,
    pub control_cq: Arc<Cq>,
    pub data_cq: Arc<Cq>,
    pub control: Control,
    pub data: OpenPair,
    pub append: OpenPair,
    pub path: Path,
    pub stream: Stream,
    pub settings: SetupAnswer,
    pub buffers: Buffers,
    pub serial: u64,
}

/// An opening of a file on a session.
#[derive(Clone)]
pub struct Opening {
    pub session: Arc<Session>,
    /// Its number.
    pub open: u64,
    pub rkey: u32,
}

/// A connection.
pub struct Session {
    device: Arc<Device>,
    control_cq: Arc<Cq>,
    data_cq: Arc<Cq>,
    control: Mutex<Option<Control>>,
    pairs: Mutex<Pairs>,
    /// Held while a queue pair is replaced.
    repairing: Mutex<()>,
    path: Path,
    pub stream: Stream,
    pub settings: SetupAnswer,
    pub buffers: Buffers,
    /// Distinguishes the sessions of a client.
    pub serial: u64,
    waiting: Mutex<Waiting>,
    /// Something has come for a waiting thread.
    arrived: Condvar,
    /// How long threads poll for answers before they sleep, and for ends of one-sided accesses.
    call_polls: SpinBudget,
    access_polls: SpinBudget,
    /// An event has come.
    announced: Condvar,
    is_lost: AtomicBool,
    /// When the last request was sent that was answered: the lease began again then, or later.
    answered_since: Mutex<Instant>,
    /// See [`Session::has_kept_lease`]; set with `is_lost`.
    has_kept_lease: OnceLock<bool>,
    /// Dropped after the buffers.
    domain: Arc<Domain>,
}

impl Session {
    /// A connected session.
    pub fn new(new: NewSession) -> Arc<Session> {
        let pair = |pair: OpenPair| Pair { qp: pair.qp, generation: 0 };
        let pairs = Pairs { data: Some(pair(new.data)), append: Some(pair(new.append)) };
        Arc::new(Session {
            device: new.device,
            control_cq: new.control_cq,
            data_cq: new.data_cq,
            control: Mutex::new(Some(new.control)),
            pairs: Mutex::new(pairs),
            repairing: Mutex::default(),
            path: new.path,
            stream: new.stream,
            settings: new.settings,
            buffers: new.buffers,
            serial: new.serial,
            waiting: Mutex::default(),
            arrived: Condvar::default(),
            call_polls: SpinBudget::for_calls(),
            access_polls: SpinBudget::default(),
            announced: Condvar::default(),
            is_lost: AtomicBool::new(false),
            answered_since: Mutex::new(Instant::now()),
            has_kept_lease: OnceLock::new(),
            domain: new.domain,
        })
    }

    /// Whether the connection has ended.
    pub fn is_lost(&self) -> bool {
        self.is_lost.load(Ordering::Acquire)
    }

    /// The connection has ended: nobody waits any more.
    pub fn lose(&self, why: &str) {
        self.has_kept_lease.get_or_init(|| {
            self.stream.is_readable_within(CLOSE_TIME) && self.answered_since.lock().elapsed() <= self.lease()
        });
        if !self.is_lost.swap(true, Ordering::AcqRel) {
            tracing::debug!(why, "the connection to an export has ended");
            self.stream.shut_down();
            // With the lock, so that no thread goes to sleep meanwhile.
            let _waiting = self.waiting.lock();
            self.arrived.notify_all();
            self.announced.notify_all();
            self.buffers.lose();
        }
    }

    /// Whether the connection has ended because the server closed its socket, before the lease can have ended.
    pub fn has_kept_lease(&self) -> bool {
        self.has_kept_lease.get().copied().unwrap_or(false)
    }

    /// The time after which a server ends the connection of a silent client.
    pub fn lease(&self) -> Duration {
        Duration::from_millis(self.settings.lease_ms.into())
    }

    /// The protection domain, for buffers.
    pub fn domain(&self) -> &Arc<Domain> {
        &self.domain
    }

    /// Waits until `ready` returns a result.
    ///
    /// # Errors
    /// `Lost` after the deadline, or when the connection has ended; `Interrupted`.
    fn wait<T>(
        &self,
        polls: &SpinBudget,
        deadline: Instant,
        mut ready: impl FnMut(&mut Waiting) -> Option<T>,
    ) -> Result<T, ExportError> {
        let mut poll_ready = |waiting: &mut Waiting| match ready(waiting) {
            Some(result) => Some(Ok(result)),
            None => (self.is_lost() || Instant::now() >= deadline).then_some(Err(ExportError::Lost)),
        };
        self.device.progress();
        let mut found = poll_ready(&mut self.waiting.lock());
        if found.is_none() {
            self.device.poll_until(polls, || {
                found = poll_ready(&mut self.waiting.lock());
                found.is_some()
            });
        }
        if let Some(result) = found {
            return result;
        }
        let _left_to_engine = self.device.leave_to_engine();
        loop {
            if let Some(result) = found {
                return result;
            }
            interrupt::check()?;
            interrupt::before_sleep();
            let mut waiting = self.waiting.lock();
            found = poll_ready(&mut waiting);
            if found.is_none() {
                self.arrived.wait_until(&mut waiting, deadline.min(Instant::now() + SLEEP_TIME));
                drop(waiting);
                self.device.progress();
            }
        }
    }

    /// Sends a request, as soon as there are fewer in flight than the server permits. A renewal of the lease does not count.
    ///
    /// # Errors
    /// `Lost` after the deadline, or when the connection has ended; `Interrupted`; `Invalid`. Nothing was sent then.
    pub fn send(&self, request: Request, deadline: Instant) -> Result<SentRequest, ExportError> {
        let since = Instant::now();
        let max = if request == (Request::Renew {}) { usize::MAX } else { self.requests_max() };
        let id = self
            .wait(&self.call_polls, deadline, |waiting| waiting.begin_request(AnswerState::Awaited, max))?;
        let encoded = Message { id, body: Body::Request(request) }.encode();
        let Some(bytes) = encoded else {
            self.waiting.lock().answers.remove(&id);
            return Err(ExportError::Invalid("a path or name is too long for a message"));
        };
        self.post_message(bytes);
        Ok(SentRequest { id, since })
    }

    fn requests_max(&self) -> usize {
        self.settings.requests_max.into()
    }

    /// Posts a message. Without a connection nobody waits for its answer.
    fn post_message(&self, bytes: Vec<u8>) {
        let mut guard = self.control.lock();
        let Some(control) = guard.as_mut() else { return };
        control.send_encoded(bytes, None);
        if let Err(error) = control.post() {
            drop(guard);
            self.lose(&error.to_string());
        }
    }

    /// Sends bytes that need not be messages.
    #[cfg(test)]
    pub fn send_raw(&self, messages: Vec<Vec<u8>>) {
        let mut control = self.control.lock();
        if let Some(control) = control.as_mut() {
            messages.into_iter().for_each(|bytes| control.send_encoded(bytes, None));
            let _ = control.post();
        }
    }

    /// Sends a request, and waits for the answer.
    ///
    /// # Errors
    /// `Lost` if no answer came in time. The connection has ended then.
    pub fn call(&self, request: Request, deadline: Instant) -> Result<Answer, ExportError> {
        let sent = self.send(request, deadline)?;
        self.wait_answer(sent, deadline)
    }

    /// Waits for the answer of a request.
    ///
    /// # Errors
    /// As for [`Session::call`].
    pub fn wait_answer(&self, sent: SentRequest, deadline: Instant) -> Result<Answer, ExportError> {
        let SentRequest { id, since } = sent;
        let answer = self.wait(&self.call_polls, deadline, |waiting| match waiting.answers.remove(&id) {
            Some(AnswerState::Here(answer)) => Some(answer),
            Some(state) => {
                waiting.answers.insert(id, state);
                None
            }
            None => None,
        });
        if answer.is_ok() {
            let mut answered_since = self.answered_since.lock();
            *answered_since = since.max(*answered_since);
        }
        self.send_deferred();
        // An answer that is late would be taken for another's.
        answer.inspect_err(|_| self.lose("an answer did not come in time"))
    }

    /// Adds a request whose answer nobody waits for to those that [`Session::send_deferred`] sends. Without a connection the server
    /// releases what the request would have released.
    pub fn defer(&self, request: Request) -> Deferred {
        let mut waiting = self.waiting.lock();
        waiting.deferred.push_back(request);
        if waiting.deferred.len() < DEFERRED_MAX { Deferred::Few } else { Deferred::Many }
    }

    /// Whether the server has not answered all deferred requests.
    pub fn has_deferred(&self) -> bool {
        self.waiting.lock().has_deferred()
    }

    /// Sends the deferred requests, and waits until the server has carried them out.
    ///
    /// # Errors
    /// `Lost` after the deadline, or when the connection has ended; `Interrupted`.
    pub fn end_deferred(&self, deadline: Instant) -> Result<(), ExportError> {
        self.send_deferred();
        self.wait(&self.call_polls, deadline, |waiting| (!waiting.has_deferred()).then_some(()))
    }

    /// Sends the deferred requests, as many as the server permits now. The others leave with answers to these.
    pub fn send_deferred(&self) {
        loop {
            let mut waiting = self.waiting.lock();
            if self.is_lost() || waiting.deferred.is_empty() {
                return;
            }
            let Some(id) = waiting.begin_request(AnswerState::Unread, self.requests_max()) else { return };
            let request = waiting.deferred.pop_front();
            drop(waiting);
            let Some(request) = request else { return };
            match (Message { id, body: Body::Request(request) }).encode() {
                Some(bytes) => self.post_message(bytes),
                None => drop(self.waiting.lock().answers.remove(&id)),
            }
        }
    }

    /// The queue pair for accesses, and its generation.
    pub fn pair(&self, link: Link) -> Result<(Arc<QueuePair>, u64), ExportError> {
        let mut pairs = self.pairs.lock();
        let pair = pairs.of(link).as_ref().ok_or(ExportError::Lost)?;
        Ok((pair.qp.clone(), pair.generation))
    }

    /// Begins a one-sided access. Returns its number.
    ///
    /// # Errors
    /// `Full` if the queue pair has as many in flight as it can; `Lost`; `Nic`.
    pub fn begin(&self, link: Link, op: SendOp, sges: &[Sge]) -> Result<u64, ExportError> {
        loop {
            let (qp, generation) = self.pair(link)?;
            let number = {
                let mut waiting = self.waiting.lock();
                let number = waiting.next_transfer;
                waiting.next_transfer += 1;
                waiting.transfers.insert(number, Transfer { link, generation, status: None });
                number
            };
            let payload = Payload::Sges(SgeList::from_slice(sges));
            let wr = SendWr { wr_id: number, op, payload, flags: SendFlags::SIGNALED, target: None };
            let Err((_, error)) = qp.post_send([Ok(wr)]) else { return Ok(number) };
            self.waiting.lock().transfers.remove(&number);
            match error {
                Error::NoMemory(_) => return Err(ExportError::Full),
                // Another thread has destroyed the queue pair meanwhile: it has replaced it, or has ended the session.
                _ if self.pair(link)?.1 != generation => {}
                error => return Err(self.explain(error)),
            }
        }
    }

    /// Why the NIC has refused a call: the session has ended, or for the NIC's reason.
    fn explain(&self, error: Error) -> ExportError {
        if self.is_lost() { ExportError::Lost } else { ExportError::Nic(error) }
    }

    /// Takes the status of an access, if it has ended.
    pub fn take_status(&self, number: u64) -> Option<WcStatus> {
        self.waiting.lock().take_status(number)
    }

    /// Waits until an access has ended.
    ///
    /// # Errors
    /// `Lost` after the deadline, or when the connection has ended. The buffers may still be accessed then, until the
    /// session ends.
    pub fn finish(&self, number: u64, deadline: Instant) -> Result<WcStatus, ExportError> {
        self.wait(&self.access_polls, deadline, |waiting| waiting.take_status(number))
            .inspect_err(|_| self.lose("an access did not end in time"))
    }

    /// Waits until an access has ended, and leaves its status.
    ///
    /// # Errors
    /// `Lost` after the deadline, or when the connection has ended. The access goes on. `Interrupted`.
    pub fn wait_ended(&self, number: u64, deadline: Instant) -> Result<(), ExportError> {
        self.wait(&self.access_polls, deadline, |waiting| waiting.status(number).map(|_| ()))
    }

    /// Makes progress.
    pub fn progress(&self) {
        self.device.progress();
    }

    /// Replaces a queue pair that has failed, unless another thread has.
    ///
    /// # Errors
    /// `Lost`; `Nic`.
    pub fn repair(&self, link: Link, failed: u64, deadline: Instant) -> Result<(), ExportError> {
        let _repairing = self.repairing.lock();
        if self.pair(link)?.1 != failed {
            return Ok(());
        }
        let new =
            OpenPair::new(&self.domain.pd, &self.data_cq, DEPTH).map_err(|error| self.explain(error))?;
        // Another call on this thread would wait for the lock.
        let call = || self.call(Request::Pair { link, endpoint: new.endpoint }, deadline);
        let connected = match uninterruptible(call) {
            Ok(Answer::Paired { endpoint }) => {
                new.connect(self.path, endpoint, 0).map_err(|error| self.explain(error))
            }
            Ok(_) => Err(ExportError::Protocol),
            Err(error) => Err(error),
        };
        if let Err(error) = connected {
            destroy(&new.qp);
            return Err(error);
        }
        let old = self.pairs.lock().of(link).replace(Pair { qp: new.qp, generation: failed + 1 });
        if let Some(old) = old {
            destroy(&old.qp);
        }
        if self.is_lost() {
            // Closing the session may have missed the new one.
            self.destroy_pairs();
        }
        // Completions of the old one may be lost with it.
        let mut waiting = self.waiting.lock();
        for transfer in waiting.transfers.values_mut() {
            if transfer.link == link && transfer.generation <= failed {
                transfer.status.get_or_insert(WcStatus::Flushed);
            }
        }
        self.arrived.notify_all();
        Ok(())
    }

    /// Handles completions. Returns whether there were any.
    pub fn handle_completions(&self) -> bool {
        let mut was_active = false;
        loop {
            let mut completions = Vec::new();
            // Without completions nothing is answered, and the calls fail by their deadlines.
            let _ = self.control_cq.take(COMPLETIONS_PER_PASS, &mut |wc| completions.push(*wc));
            let _ = self.data_cq.take(COMPLETIONS_PER_PASS, &mut |wc| completions.push(*wc));
            if completions.is_empty() {
                if was_active {
                    self.send_deferred();
                }
                return was_active;
            }
            was_active = true;
            for wc in completions {
                match wc.opcode {
                    WcOpcode::Recv if wc.status == WcStatus::Success => self.receive(&wc),
                    _ if is_untracked(&wc) && wc.status == WcStatus::Success => {
                        if let Some(control) = self.control.lock().as_mut() {
                            // A queue pair in the error state reports that by its completions.
                            let _ = control.post();
                        }
                    }
                    _ if self.is_control(wc.qpn) => self.lose(&format!("{:?}", wc.status)),
                    _ => {
                        let mut waiting = self.waiting.lock();
                        if let Some(transfer) = waiting.transfers.get_mut(&wc.wr_id) {
                            transfer.status = Some(wc.status);
                        }
                    }
                }
            }
            self.arrived.notify_all();
        }
    }

    fn is_control(&self, qpn: u32) -> bool {
        self.control.lock().as_ref().is_some_and(|control| control.qpn() == qpn)
    }

    fn receive(&self, wc: &terrace_nic::Wc) {
        let mut bytes = Vec::new();
        let taken = match self.control.lock().as_mut() {
            Some(control) => control.take_message(wc, &mut bytes),
            None => return,
        };
        if let Err(error) = taken {
            self.lose(&error.to_string());
            return;
        }
        let message = match Message::decode(&bytes) {
            Ok(message) => message,
            Err(error) => {
                self.lose(&error.to_string());
                return;
            }
        };
        let mut waiting = self.waiting.lock();
        match message.body {
            Body::Answer(answer) => match waiting.answers.get_mut(&message.id) {
                Some(state @ AnswerState::Awaited) => *state = AnswerState::Here(answer),
                Some(AnswerState::Unread) => drop(waiting.answers.remove(&message.id)),
                _ => tracing::debug!(id = message.id, "an answer to an unknown request"),
            },
            Body::Event(event) => {
                waiting.push_event(event);
                self.announced.notify_all();
            }
            Body::Request(_) => {}
        }
    }

    /// Takes the events that have come.
    pub fn take_events(&self) -> Vec<Event> {
        std::mem::take(&mut self.waiting.lock().events)
    }

    /// Waits until there are events, the connection has ended, or for so long. Answers to requests do not wake it.
    pub fn wait_events(&self, timeout: Duration) {
        let deadline = Instant::now() + timeout;
        self.device.progress();
        let mut waiting = self.waiting.lock();
        while waiting.events.is_empty() && !self.is_lost() && Instant::now() < deadline {
            self.announced.wait_until(&mut waiting, deadline);
        }
    }

    /// Destroys the queue pairs. Accesses in flight are lost.
    pub fn close(&self) {
        // This end is the first: nobody waits for the server.
        self.has_kept_lease.get_or_init(|| false);
        self.lose("it is closed");
        if let Some(control) = self.control.lock().take() {
            control.close();
        }
        self.destroy_pairs();
    }

    fn destroy_pairs(&self) {
        std::mem::take(&mut *self.pairs.lock()).all().for_each(|pair| destroy(&pair.qp));
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.close();
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use terrace_nic::{PathChoice, PortConfig};

    use super::*;
    use crate::client::tests::start;
    use crate::client::{Client, ClientConfig};
    use crate::proto::{LockKind, OpenAccess};
    use crate::server::{Server, ServerConfig};

    /// Fills a session with requests that are not answered before `free` removes them.
    fn fill(session: &Session) {
        let others = OTHERS..OTHERS + u64::from(session.settings.requests_max);
        session.waiting.lock().answers.extend(others.map(|id| (id, AnswerState::Awaited)));
    }

    const OTHERS: u64 = u64::MAX - 1000;

    fn free(session: &Session) {
        session.waiting.lock().answers.retain(|id, _| *id < OTHERS);
    }

    #[test]
    fn a_close_waits_until_the_server_permits_one_more_request() {
        let (_directory, server, client, file) = start(PathChoice::Local);
        let deadline = client.shared.deadline();
        let session = client.shared.session(deadline).unwrap();
        fill(&session);
        drop(file);
        std::thread::sleep(Duration::from_millis(200));
        assert_eq!(server.stats().open_files, 1);
        free(&session);
        client.attributes(client.root()).unwrap();
        while server.stats().open_files > 0 {
            assert!(Instant::now() < deadline);
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn a_client_with_all_its_requests_in_flight_keeps_its_lease() {
        let directory = tempfile::tempdir().unwrap();
        let address = Some(Ipv4Addr::LOCALHOST.into());
        let port = PortConfig { address, path: PathChoice::Udp, ..PortConfig::default() };
        let lease = Duration::from_secs(1);
        let config = ServerConfig::new(directory.path().into(), (Ipv4Addr::LOCALHOST, 0).into());
        let server = Server::open(&ServerConfig { port: port.clone(), lease, ..config }).unwrap();
        let config = ClientConfig { port, ..ClientConfig::new(server.address()) };
        let client = Client::connect(&config).unwrap();
        let session = client.shared.session(client.shared.deadline()).unwrap();
        fill(&session);
        std::thread::sleep(3 * lease);
        assert!(!session.is_lost());
    }

    #[test]
    fn a_file_is_closed_although_its_close_could_not_be_sent_in_time() {
        let (_directory, server, client, file) = start(PathChoice::Local);
        file.close().unwrap();
        let config = ClientConfig { timeout: Duration::from_secs(1), ..client.shared.config.clone() };
        let client = Client::connect(&config).unwrap();
        let id = client.lookup_path("file".as_ref()).unwrap().id;
        let file = client.open(id, OpenAccess::READ).unwrap();
        let session = client.shared.session(client.shared.deadline()).unwrap();
        fill(&session);
        assert!(matches!(file.close(), Err(ExportError::Lost)));
        free(&session);
        let deadline = Instant::now() + Duration::from_secs(20);
        while server.stats().open_files > 0 {
            assert!(Instant::now() < deadline, "the server has it open");
            client.attributes(client.root()).unwrap();
        }
        assert!(!session.is_lost());
    }

    #[test]
    fn a_dropped_file_is_closed_soon_although_no_call_follows() {
        let (_directory, server, client, file) = start(PathChoice::Local);
        let id = file.id();
        drop(file);
        let wait_until_open = |count: usize| {
            let deadline = Instant::now() + Duration::from_secs(2);
            while server.stats().open_files != count {
                assert!(Instant::now() < deadline, "{} are open", server.stats().open_files);
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        wait_until_open(0);
        let files: Vec<_> =
            (0..2 * DEFERRED_MAX).map(|_| client.open(id, OpenAccess::READ).unwrap()).collect();
        wait_until_open(files.len());
        drop(files);
        wait_until_open(0);
    }

    #[test]
    fn a_program_that_takes_no_events_learns_that_some_are_lost() {
        let mut waiting = Waiting::default();
        let changed =
            |ino| Event::Changed { id: FileId { ino, ..FileId::default() }, change: ChangeSet::all() };
        (1..=EVENTS_MAX as u64).for_each(|ino| waiting.push_event(changed(ino)));
        assert_eq!(waiting.events.len(), EVENTS_MAX);
        waiting.push_event(changed(0));
        let lost = Event::Changed { id: FileId::default(), change: ChangeSet::LOST };
        assert_eq!(waiting.events, [lost, changed(0)]);
    }

    #[test]
    fn a_lock_whose_lease_has_ended_is_not_reclaimed_from_the_next_server() {
        for has_ended in [false, true] {
            let directory = tempfile::tempdir().unwrap();
            let address = Some(Ipv4Addr::LOCALHOST.into());
            let port = PortConfig { address, path: PathChoice::Udp, ..PortConfig::default() };
            let config = ServerConfig::new(directory.path().into(), (Ipv4Addr::LOCALHOST, 0).into());
            let config = ServerConfig { port: port.clone(), ..config };
            let server = Server::open(&config).unwrap();
            let listen = server.address();
            let client = Client::connect(&ClientConfig { port, ..ClientConfig::new(listen) }).unwrap();
            let access = OpenAccess::READ | OpenAccess::WRITE;
            let file = client.create(client.root(), "file".as_ref(), 0o644, access, true).unwrap();
            file.lock(1, LockKind::Exclusive, Duration::ZERO).unwrap();
            let session = client.shared.session(client.shared.deadline()).unwrap();
            if has_ended {
                // As if nothing had been answered for so long.
                *session.answered_since.lock() -= session.lease() * 2;
            }
            drop(server);
            let _server = Server::open(&ServerConfig { listen, ..config }).unwrap();
            let written = file.write_at(0, b"x");
            assert_eq!(matches!(written, Err(ExportError::LockLost)), has_ended, "{written:?}");
        }
    }
}
