//! What the threads of a server share.

use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use terrace_files::Files;
use terrace_nic::{Cq, Device, ProgressCallback, Wc, WcOpcode, WcStatus};
use terrace_sync::{Mutex, RwLock};

use super::connection::{Connection, EVENTS_SENT};
use super::holdings::Holdings;
use super::identity::act_as;
use super::locks::{HeldLock, LockHistory, release_locks};
use super::made::MadeFiles;
use super::opens::{Open, Rights};
use super::requests::Serving;
use super::revoker::Revoker;
use super::stats::ExportStats;
use super::tree;
use super::watches::{Interest, Watches};
use super::workers::{Job, Work};
use crate::proto::{Answer, ChangeSet, Event, FileId, LockKind, Revocation};
use crate::rules::{Identity, Rules};

/// The most completions that are handled at once.
const COMPLETIONS_PER_PASS: usize = 64;

/// For how long after the end of a connection its locks are kept because a same-host client is stopped in the middle of an
/// access of a file that it maps.
const ENDING_TIME: Duration = Duration::from_secs(5);

/// How long a change of rights waits for the accesses that it has ended the right to. A client that is stopped in the middle of one
/// would hold a worker for longer.
const REVOKE_WAIT: Duration = Duration::from_secs(10);
/// How long it waits for those by one key before it tries the next one.
const REVOKE_TRY: Duration = Duration::from_millis(20);

/// What the threads of a server share.
pub struct State {
    pub device: Arc<Device>,
    pub cq: Arc<Cq>,
    pub files: Files,
    pub root: Arc<OwnedFd>,
    pub root_id: FileId,
    pub rules: Rules,
    pub lease: Duration,
    /// Distinguishes this run of the host from earlier ones, whose writes that were not committed may be lost.
    pub boot: u64,
    /// The descriptors of files that were looked up.
    pub looked_up: Arc<Holdings>,
    /// The descriptors of files that are open or locked.
    pub holdings: Arc<Holdings>,
    pub watches: Watches,
    pub work: Work,
    /// Held while rights are checked, or changed by a client that has the file open.
    pub checking: Mutex<()>,
    next_open: AtomicU64,
    connections: RwLock<HashMap<u32, Arc<Connection>>>,
    /// Who has which file open: connection and number.
    opened: Mutex<HashMap<FileId, HashSet<(u32, u64)>>>,
    pub revoker: Revoker,
    pub lock_history: LockHistory,
    pub made: MadeFiles,
    /// Connections that have ended and may still have locks.
    ending: Mutex<Vec<Ending>>,
    /// Connections whose sockets are to be closed.
    ended: Mutex<Vec<u32>>,
    requests: AtomicU64,
    refused: AtomicU64,
    revoked: AtomicU64,
}

/// A connection that has ended.
struct Ending {
    connection: Arc<Connection>,
    since: Instant,
    /// Its queue pairs are destroyed, and its keys are revoked or wait for that.
    is_closed: bool,
}

/// What a server's state begins with.
pub struct NewState {
    pub device: Arc<Device>,
    pub cq: Arc<Cq>,
    pub files: Files,
    pub root: OwnedFd,
    pub root_id: FileId,
    pub rules: Rules,
    pub lease: Duration,
    pub looked_up: Arc<Holdings>,
    pub holdings: Arc<Holdings>,
    pub watches: Watches,
    pub made: MadeFiles,
}

impl State {
    /// Without clients.
    pub fn new(new: NewState) -> State {
        let NewState { device, cq, files, root, root_id, rules, lease, looked_up, holdings, watches, made } =
            new;
        State {
            device,
            cq,
            files,
            root: Arc::new(root),
            root_id,
            rules,
            lease,
            boot: boot(),
            looked_up,
            holdings,
            watches,
            work: Work::default(),
            checking: Mutex::default(),
            next_open: AtomicU64::new(1),
            connections: RwLock::default(),
            opened: Mutex::default(),
            revoker: Revoker::default(),
            lock_history: LockHistory::new(lease),
            made,
            ending: Mutex::default(),
            ended: Mutex::default(),
            requests: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            revoked: AtomicU64::new(0),
        }
    }

    /// Adds a connection.
    pub fn add_connection(&self, connection: Arc<Connection>) {
        self.connections.write().insert(connection.qpn, connection);
    }

    /// The connection with this queue pair number of ours.
    pub fn connection(&self, qpn: u32) -> Option<Arc<Connection>> {
        self.connections.read().get(&qpn).cloned()
    }

    /// All connections.
    pub fn connections(&self) -> Vec<Arc<Connection>> {
        self.connections.read().values().cloned().collect()
    }

    /// Ends a connection. A worker releases what it had.
    pub fn end(&self, connection: &Arc<Connection>, why: &str) {
        if connection.begin_end() {
            tracing::debug!(client = %connection.peer, why, "a client's connection has ended");
            // First, so that its client finds its locks in one of the two.
            let ending = Ending { connection: connection.clone(), since: Instant::now(), is_closed: false };
            self.ending.lock().push(ending);
            self.connections.write().remove(&connection.qpn);
            self.ended.lock().push(connection.qpn);
            self.work.add(Job::End(connection.clone()));
        }
    }

    /// Ends the connections that a client had before. Returns whether one of them is not closed yet, or a request of it is still
    /// carried out: what the client has begun there may take effect after what it does on the next connection.
    pub fn end_earlier(&self, client: u64, identity: &Identity, gid: &[u8; 16]) -> bool {
        let is_same = |connection: &Connection| {
            connection.client == client && connection.identity.uid == identity.uid && connection.gid == *gid
        };
        let mut earlier = self.connections();
        earlier.retain(|connection| is_same(connection));
        for connection in &earlier {
            self.end(connection, "its client has connected again");
        }
        // Those that were not in the table any more are here until they are closed and nothing runs.
        let is_under_way = |ending: &Ending| !ending.is_closed || ending.connection.has_running();
        let is_ending = |ending: &Ending| is_same(&ending.connection) && is_under_way(ending);
        !earlier.is_empty() || self.ending.lock().iter().any(is_ending)
    }

    /// The connections with this queue pair number that may have files open: also one that has ended, whose queue pairs and keys
    /// are there until a worker closes it.
    fn connections_with_opens(&self, qpn: u32) -> Vec<Arc<Connection>> {
        // In this order: a connection is among the ending ones before it leaves the table.
        let current = self.connection(qpn);
        let ending = self.ending.lock();
        let ended = ending.iter().map(|ending| ending.connection.clone());
        current.into_iter().chain(ended.filter(|connection| connection.qpn == qpn)).collect()
    }

    /// Takes a lock that the client of a connection still has on a connection that has ended, for the caller to add it to the
    /// new one: no other client can have it meanwhile. `reclaimed` is the kind that the client believes to have, if it does:
    /// it has none any more if its lease had ended.
    pub fn take_earlier_lock(
        &self,
        connection: &Connection,
        key: (FileId, u64),
        reclaimed: Option<LockKind>,
    ) -> Option<HeldLock> {
        let ending = self.ending.lock();
        let earlier = ending.iter().map(|ending| &ending.connection).filter(|other| {
            other.client == connection.client
                && other.identity.uid == connection.identity.uid
                && other.gid == connection.gid
                && (reclaimed.is_none() || !other.has_lease_ended())
        });
        earlier.into_iter().find_map(|other| {
            let mut locks = other.locks.lock();
            let covers = |held: &HeldLock| reclaimed.is_none_or(|kind| held.covers(kind));
            if locks.get(&key).is_some_and(covers) { locks.remove(&key) } else { None }
        })
    }

    /// Releases the locks of connections that have ended: no request of theirs is carried out, and no access by their keys of
    /// the file is under way. A file that same-host clients do not map is therefore never changed under another client's
    /// lock. The keys of other files wait for same-host clients, which may be stopped in the middle of an access: for
    /// [`ENDING_TIME`] at most.
    pub fn release_ended_locks(&self) {
        self.ending.lock().retain(|Ending { connection, since, is_closed }| {
            if !is_closed || connection.has_running() {
                return true;
            }
            let is_overdue = since.elapsed() > ENDING_TIME;
            if !connection.locks.lock().is_empty() {
                let kept = self.revoker.files_with_keys(&connection.domain, is_overdue);
                release_locks(&self.lock_history, connection, |id| !kept.contains(&id));
            }
            !connection.locks.lock().is_empty()
        });
    }

    /// The connections that have ended since the last call.
    pub fn drain_ended(&self) -> Vec<u32> {
        std::mem::take(&mut self.ended.lock())
    }

    /// Does a job, in a worker.
    pub fn carry_out(&self, job: Job) {
        match job {
            Job::Serve(connection) => {
                let (request, wants_worker) = connection.take_request();
                if wants_worker {
                    self.work.add(Job::Serve(connection.clone()));
                }
                let Some((id, request)) = request else { return };
                self.requests.fetch_add(1, Ordering::Relaxed);
                let answer = Serving { state: self, connection: &connection }.serve(request);
                if matches!(answer, Answer::Failed { .. }) {
                    self.refused.fetch_add(1, Ordering::Relaxed);
                }
                if connection.answer(id, answer) {
                    self.work.add(Job::Serve(connection.clone()));
                }
                if connection.has_ended() {
                    self.release_ended_locks();
                }
            }
            Job::End(connection) => {
                connection.close();
                self.release_all(&connection);
                for ending in self.ending.lock().iter_mut() {
                    ending.is_closed |= Arc::ptr_eq(&ending.connection, &connection);
                }
                self.release_ended_locks();
            }
            Job::Check(id) => self.check_rights(id),
        }
    }

    /// Adds an open file to a connection, and returns its number.
    pub fn add_open(&self, connection: &Connection, open: Arc<Open>) -> u64 {
        let number = self.next_open.fetch_add(1, Ordering::Relaxed);
        self.opened.lock().entry(open.id).or_default().insert((connection.qpn, number));
        match self.watches.add(open.id, open.node.as_fd(), Interest::Rights) {
            Ok(()) => open.is_watched.store(true, Ordering::Relaxed),
            Err(error) => tracing::debug!(%error, "local changes of a file's rights are not seen"),
        }
        connection.opens.lock().insert(number, open);
        number
    }

    /// The open files of a connection that are this file.
    pub fn opens_of(&self, connection: &Connection, id: FileId) -> Vec<Arc<Open>> {
        let opened = self.opened.lock();
        let numbers = opened.get(&id).into_iter().flatten().filter(|(qpn, _)| *qpn == connection.qpn);
        let numbers: Vec<_> = numbers.map(|(_, number)| *number).collect();
        drop(opened);
        let opens = connection.opens.lock();
        numbers.iter().filter_map(|number| opens.get(number).cloned()).collect()
    }

    /// Has the key of a file revoked that was taken out of its connection's table: before this returns, unless the client is
    /// stopped in the middle of an access, or its accesses wait for a slow disk. Without an access under way, no other thread
    /// takes part.
    pub fn release(&self, connection: &Connection, number: u64, open: Arc<Open>) {
        self.withdraw(connection, number, &open);
        if open.revoke_within(Duration::ZERO).is_err() {
            self.revoker.revoke(open);
        }
    }

    /// Takes a file out of the tables of open files that was taken out of its connection's.
    fn withdraw(&self, connection: &Connection, number: u64, open: &Open) {
        let mut opened = self.opened.lock();
        if let Some(users) = opened.get_mut(&open.id) {
            users.remove(&(connection.qpn, number));
            if users.is_empty() {
                opened.remove(&open.id);
            }
        }
        drop(opened);
        if open.is_watched.swap(false, Ordering::Relaxed) {
            self.watches.remove(open.id);
        }
    }

    /// Revokes keys, all within [`REVOKE_WAIT`] or as soon as possible after that. Calls `ended` with what belongs to each when it is
    /// revoked, or left to the revoker. A client that is stopped in the middle of an access delays no other client's key.
    pub fn revoke<T>(&self, mut keys: Vec<(Arc<Open>, T)>, mut ended: impl FnMut(T)) {
        let deadline = Instant::now() + REVOKE_WAIT;
        let mut limit = Duration::ZERO;
        while !keys.is_empty() {
            for (open, user) in std::mem::take(&mut keys) {
                match open.revoke_within(limit) {
                    Ok(()) => ended(user),
                    Err(_) if Instant::now() < deadline => keys.push((open, user)),
                    Err(error) => {
                        tracing::warn!(%error, "a key is revoked later: a client or a disk does not end an access");
                        self.revoker.add(open);
                        ended(user);
                    }
                }
            }
            limit = REVOKE_TRY;
        }
    }

    /// Releases all that a connection has that has ended, except its locks.
    pub fn release_all(&self, connection: &Connection) {
        let opens = std::mem::take(&mut *connection.opens.lock());
        for (number, open) in opens {
            self.withdraw(connection, number, &open);
            // The client's queue pairs are destroyed, so nobody waits for the keys.
            if open.revoke_within(Duration::ZERO).is_err() {
                self.revoker.add(open);
            }
        }
        let watches = std::mem::take(&mut *connection.watches.lock());
        watches.into_iter().for_each(|id| self.watches.remove(id));
    }

    /// Revokes the keys of a file whose clients may not access it any more so.
    pub fn check_rights(&self, id: FileId) {
        if !self.opened.lock().contains_key(&id) {
            return self.revoker.wait(id);
        }
        let checking = self.checking.lock();
        let users: Vec<_> = self.opened.lock().get(&id).into_iter().flatten().copied().collect();
        let lost = users.into_iter().filter_map(|(qpn, number)| {
            self.connections_with_opens(qpn).into_iter().find_map(|connection| {
                let (open, reason) = self.remove_lost(&connection, number)?;
                Some((open, (connection, Event::Revoked { open: number, reason })))
            })
        });
        let lost: Vec<_> = lost.collect();
        // A client may be stopped in the middle of an access: others can open files meanwhile.
        drop(checking);
        self.revoke(lost, |(connection, event)| {
            self.revoker.end(id);
            connection.send_event(event);
        });
        // Those that another thread has found.
        self.revoker.wait(id);
    }

    /// Checks a file that a client is just opening, and returns why it may not access it any more, if so. Changes between
    /// opening it and [`State::add_open`] have not found it.
    pub fn check_opened(&self, connection: &Connection, number: u64) -> Option<Revocation> {
        let checking = self.checking.lock();
        let (open, reason) = self.remove_lost(connection, number)?;
        drop(checking);
        let id = open.id;
        self.revoke(vec![(open, ())], |()| self.revoker.end(id));
        Some(reason)
    }

    /// Takes an open file whose client has lost the right out of the tables, for the caller to revoke its key, and says why.
    /// `checking` is locked.
    fn remove_lost(&self, connection: &Connection, number: u64) -> Option<(Arc<Open>, Revocation)> {
        let open = connection.opens.lock().get(&number).cloned()?;
        let reason = self.lost_right(connection, &open)?;
        let removed = connection.opens.lock().remove(&number)?;
        // Before the tables have it no more, so that others wait for the revocation.
        self.revoker.begin(removed.id);
        self.withdraw(connection, number, &removed);
        self.revoked.fetch_add(1, Ordering::Relaxed);
        Some((removed, reason))
    }

    /// Why a client may not access a file any more, if so.
    fn lost_right(&self, connection: &Connection, open: &Open) -> Option<Revocation> {
        let Ok(attributes) = tree::attributes(open.node.as_fd()) else {
            return Some(Revocation::Permission);
        };
        let is_unlinked = attributes.links == 0 && !open.is_unlinked_by_own.load(Ordering::Relaxed);
        if is_unlinked && !self.rules.keep_unlinked {
            return Some(Revocation::Unlinked);
        }
        let Ok(now) = Rights::of(open.node.as_fd(), &attributes) else {
            return Some(Revocation::Permission);
        };
        if *open.rights.lock() == now {
            return None;
        }
        // Writes would not clear them. The client opens the file again, which does.
        let gains_privileges = tree::privileges_of(now.mode) != 0 && connection.identity.uid != 0;
        if open.access.changes() && gains_privileges {
            return Some(Revocation::Permission);
        }
        let access = open.access & !crate::proto::OpenAccess::TRUNCATE;
        // Without a descriptor or memory nobody knows whether the right is left: the client opens the file again.
        if let Err(error) = act_as(&connection.identity, || tree::open(open.node.as_fd(), access)) {
            tracing::debug!(%error, client = %connection.peer, "a client does not keep an open file");
            return Some(Revocation::Permission);
        }
        *open.rights.lock() = now;
        None
    }

    /// Handles what the kernel reports of watched files.
    pub fn handle_changes(&self) {
        let connections = self.connections();
        self.watches.take(|id, change| {
            let Some(id) = id else {
                self.handle_lost_changes(&connections);
                return;
            };
            // One that is being opened is checked when it has been.
            if change.contains(ChangeSet::ATTRIBUTES) && self.opened.lock().contains_key(&id) {
                self.work.add(Job::Check(id));
            }
            for connection in &connections {
                if connection.watches.lock().contains(&id) {
                    connection.send_event(Event::Changed { id, change });
                }
            }
        });
    }

    fn handle_lost_changes(&self, connections: &[Arc<Connection>]) {
        let ids: Vec<_> = self.opened.lock().keys().copied().collect();
        ids.into_iter().for_each(|id| self.work.add(Job::Check(id)));
        for connection in connections {
            if !connection.watches.lock().is_empty() {
                let (id, change) = (FileId::default(), ChangeSet::LOST);
                connection.send_event(Event::Changed { id, change });
            }
        }
    }

    /// The statistics now.
    pub fn stats(&self) -> ExportStats {
        let mut clients: Vec<_> = self.connections().iter().map(|connection| connection.stats()).collect();
        clients.sort_by(|one, other| one.client.cmp(&other.client));
        ExportStats {
            open_files: clients.iter().map(|client| client.open_files).sum(),
            locks: clients.iter().map(|client| client.locks).sum(),
            requests: self.requests.load(Ordering::Relaxed),
            refused: self.refused.load(Ordering::Relaxed),
            revoked: self.revoked.load(Ordering::Relaxed),
            clients,
        }
    }

    fn handle_completion(&self, wc: &Wc, bytes: &mut Vec<u8>) {
        let Some(connection) = self.connection(wc.qpn) else { return };
        if wc.status != WcStatus::Success {
            self.end(&connection, &format!("{:?}", wc.status));
            return;
        }
        match wc.opcode {
            WcOpcode::Recv => match connection.receive(wc, bytes) {
                Ok(true) => self.work.add(Job::Serve(connection)),
                Ok(false) => {}
                Err(why) => self.end(&connection, &why),
            },
            WcOpcode::RecvRdmaWithImm => self.end(&connection, "a WRITE with immediate"),
            _ if wc.wr_id == EVENTS_SENT => connection.handle_events_sent(),
            _ => connection.post(),
        }
    }
}

/// The number of this run of the host's system.
fn boot() -> u64 {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let digits: String = id.chars().filter(char::is_ascii_hexdigit).take(16).collect();
    // Without it each process counts as another run.
    u64::from_str_radix(&digits, 16).unwrap_or_else(|_| rand::random())
}

/// Receives messages.
pub struct Receiver {
    pub state: Arc<State>,
    pub bytes: Mutex<Vec<u8>>,
}

impl ProgressCallback for Receiver {
    fn advance(&self) -> bool {
        if self.state.cq.is_empty() {
            return false;
        }
        let mut completions = Vec::with_capacity(COMPLETIONS_PER_PASS);
        // Queue pairs whose completions an overrun has lost are in the error state, and their connections end by lease.
        let _ = self.state.cq.take(COMPLETIONS_PER_PASS, &mut |wc| completions.push(*wc));
        let mut bytes = self.bytes.lock();
        completions.iter().for_each(|wc| self.state.handle_completion(wc, &mut bytes));
        if !self.state.cq.is_empty() {
            self.state.device.request_callbacks();
        }
        true
    }

    fn report(&self) -> Option<(String, serde_json::Value)> {
        Some(("export".into(), serde_json::to_value(self.state.stats()).ok()?))
    }
}
