//! What the clones of a client and its files share: the current session, and what to do when it is lost.

use std::collections::{HashMap, HashSet, VecDeque};
use std::ffi::OsStr;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::{Arc, Weak};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use terrace_nic::{Device, ProgressCallback};
use terrace_sync::{Condvar, Mutex};

use super::config::{Change, ClientConfig};
use super::connect::connect;
use super::interrupt::{self, uninterruptible};
use super::known::Known;
use super::send_timer::SendTimer;
use super::session::{Deferred, Session};
use crate::error::{ExportError, UNKNOWN_FILE};
use crate::proto::{Answer, ChangeSet, Event, FileId, LockKind, Request, Text};

/// The pauses between attempts to connect.
const PAUSE_MIN: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// The most changes that wait for the program.
const CHANGES_MAX: usize = 4096;
/// How often files are reclaimed for one request: the server forgets the oldest of thousands.
const RECLAIMS_MAX: usize = 4;

/// Whether a request may be repeated when its answer was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repeat {
    Yes,
    No,
}

/// A lock that a client holds.
#[derive(Clone, Copy, Debug)]
pub struct HeldLock {
    kind: LockKind,
    /// The server that has granted it last ([`SetupAnswer::instance`](crate::proto::SetupAnswer)).
    instance: u64,
    /// The session on which it is held.
    serial: u64,
    /// Another client may have had it since this one did.
    is_lost: bool,
}

#[derive(Default)]
struct Current {
    session: Option<Arc<Session>>,
    /// The thread that is connecting.
    connecting: Option<ThreadId>,
    serial: u64,
    /// The last session whose lease had not ended when its server closed the socket.
    leased_serial: Option<u64>,
}

/// What the clones of a client share.
pub struct Shared {
    device: Arc<Device>,
    pub config: ClientConfig,
    /// See [`SetupRequest::client`](crate::proto::SetupRequest).
    client: u64,
    root: FileId,
    is_read_only: bool,
    current: Mutex<Current>,
    progress: Arc<Progress>,
    connected: Condvar,
    known: Mutex<Known>,
    changes: Mutex<VecDeque<Change>>,
    locks: Mutex<HashMap<(FileId, u64), HeldLock>>,
    watches: Mutex<HashSet<FileId>>,
}

/// Handles the completions of a session, and sends its deferred requests. Not a reference to [`Shared`], whose end closes the device.
struct Progress {
    session: Mutex<Option<Arc<Session>>>,
    timer: SendTimer,
}

impl ProgressCallback for Progress {
    fn advance(&self) -> bool {
        let Some(session) = self.session.lock().clone() else { return false };
        let is_time = self.timer.take();
        if is_time {
            session.send_deferred();
        }
        session.handle_completions() || is_time
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.timer.as_fd())
    }
}

impl Shared {
    /// Connects.
    pub fn connect(config: &ClientConfig) -> Result<Arc<Shared>, ExportError> {
        let timer = SendTimer::new().map_err(|errno| ExportError::Nic(errno.into()))?;
        let device = Device::open(config.port.device().map_err(ExportError::Port)?)?;
        let deadline = Instant::now() + config.timeout;
        let client = rand::random();
        let session = connect(&device, config.server, 1, client, deadline).inspect_err(|_| device.close())?;
        let (root, is_read_only) = (session.settings.root, session.settings.is_read_only);
        let progress = Arc::new(Progress { session: Mutex::new(Some(session.clone())), timer });
        device.attach(progress.clone());
        let shared = Arc::new(Shared {
            device,
            config: config.clone(),
            client,
            root,
            is_read_only,
            current: Mutex::new(Current { session: Some(session), serial: 1, ..Current::default() }),
            progress,
            connected: Condvar::default(),
            known: Mutex::default(),
            changes: Mutex::default(),
            locks: Mutex::default(),
            watches: Mutex::default(),
        });
        let weak = Arc::downgrade(&shared);
        let keep = move || keep_lease(&weak);
        let spawned = std::thread::Builder::new().name("terrace-lease".into()).spawn(keep);
        spawned.map_err(|error| {
            ExportError::Nic(terrace_nic::Error::System(
                error.raw_os_error().unwrap_or(Errno::AGAIN.raw_os_error()),
            ))
        })?;
        Ok(shared)
    }

    /// The exported directory.
    pub fn root(&self) -> FileId {
        self.root
    }

    /// Whether nothing may be changed.
    pub fn is_read_only(&self) -> bool {
        self.is_read_only
    }

    /// Sends a request whose answer nobody waits for: soon after the next call, or after some milliseconds. A program that closes a file
    /// often makes a call at once, which would wait while the server closes the file.
    pub fn cast(&self, session: &Session, request: Request) {
        match session.defer(request) {
            Deferred::Few => self.progress.timer.set(),
            Deferred::Many => session.send_deferred(),
        }
    }

    /// The end of a call that begins now.
    pub fn deadline(&self) -> Instant {
        Instant::now() + self.config.timeout
    }

    /// The current session. Connects if there is none.
    ///
    /// # Errors
    /// `Lost` after the deadline; `Refused`; `Interrupted`.
    pub fn session(&self, deadline: Instant) -> Result<Arc<Session>, ExportError> {
        let mut current = self.current.lock();
        loop {
            if let Some(session) = current.session.as_ref().filter(|session| !session.is_lost()) {
                return Ok(session.clone());
            }
            let Some(connecting) = current.connecting else { break };
            // A call that is made while this thread connects, by what interrupts it, would wait for itself.
            if connecting == thread::current().id() || Instant::now() >= deadline {
                return Err(ExportError::Lost);
            }
            self.connected.wait_until(&mut current, interrupt::next_check(deadline));
            drop(current);
            interrupt::check()?;
            current = self.current.lock();
        }
        current.connecting = Some(thread::current().id());
        current.serial += 1;
        let (old, serial) = (current.session.take(), current.serial);
        drop(current);
        if let Some(old) = old {
            old.close();
            if old.has_kept_lease() {
                self.current.lock().leased_serial = Some(old.serial);
            }
        }
        let connected = self.reconnect(serial, deadline);
        if let Ok(session) = &connected {
            *self.progress.session.lock() = Some(session.clone());
            // The server is there. An interrupted lock would count as lost.
            uninterruptible(|| self.restore(session));
        }
        let mut current = self.current.lock();
        current.connecting = None;
        current.session = connected.as_ref().ok().cloned();
        drop(current);
        self.connected.notify_all();
        connected
    }

    fn reconnect(&self, serial: u64, deadline: Instant) -> Result<Arc<Session>, ExportError> {
        let mut pause = PAUSE_MIN;
        loop {
            match connect(&self.device, self.config.server, serial, self.client, deadline) {
                Ok(session) => return Ok(session),
                Err(ExportError::Refused(errno)) if is_momentary(errno) => {
                    tracing::debug!(errno, "an export has no room for this client");
                }
                Err(error @ (ExportError::Refused(_) | ExportError::Protocol | ExportError::Interrupted)) => {
                    return Err(error);
                }
                Err(error) => tracing::debug!(%error, "an export cannot be reached"),
            }
            if Instant::now() + pause >= deadline {
                return Err(ExportError::Lost);
            }
            interrupt::sleep(pause)?;
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    /// Takes the locks and watches of an earlier session again, as far as possible: also if the call that has connected has
    /// no time left.
    fn restore(&self, session: &Arc<Session>) {
        let deadline = self.deadline();
        self.restore_locks(session, deadline);
        let watches: Vec<_> = self.watches.lock().iter().copied().collect();
        for id in watches {
            // Each watcher is told that anything may have changed.
            let _ = self.call_on(session, Request::Watch { id, on: true }, deadline);
        }
        self.push_change(Change::Reconnected);
    }

    /// Reclaims the locks that were held on an earlier session. If this one is lost meanwhile, the next one does the rest.
    ///
    /// A server that has begun since does not know whether the earlier one has granted the lock to another client. It cannot
    /// have done so if the lease had not ended when it closed its socket.
    fn restore_locks(&self, session: &Arc<Session>, deadline: Instant) {
        let locks = self.locks.lock();
        let earlier = locks.iter().filter(|(_, lock)| lock.serial != session.serial && !lock.is_lost);
        let earlier: Vec<_> = earlier.map(|(key, lock)| (*key, *lock)).collect();
        drop(locks);
        let leased_serial = self.current.lock().leased_serial;
        for ((id, owner), HeldLock { kind, instance, serial, .. }) in earlier {
            let may_be_others = instance != session.settings.instance && leased_serial != Some(serial);
            let request = Request::ReclaimLock { id, owner, kind, instance };
            let reclaimed = match may_be_others {
                true => Err(ExportError::LockLost),
                false => self.call_on(session, request, deadline),
            };
            if matches!(reclaimed, Err(ExportError::Lost)) {
                return;
            }
            let mut locks = self.locks.lock();
            if let Some(lock) = locks.get_mut(&(id, owner)).filter(|lock| lock.serial == serial) {
                lock.serial = session.serial;
                lock.instance = session.settings.instance;
                lock.is_lost = !matches!(reclaimed, Ok(Answer::Done {}));
            }
        }
    }

    /// Sends a request on a session, and reclaims the files that the server does not know.
    ///
    /// # Errors
    /// `Os` if the server refuses it; `Lost`.
    pub fn call_on(
        &self,
        session: &Arc<Session>,
        request: Request,
        deadline: Instant,
    ) -> Result<Answer, ExportError> {
        for _ in 0..RECLAIMS_MAX {
            let has_deferred = session.has_deferred();
            match session.call(request.clone(), deadline)? {
                Answer::Failed { errno: UNKNOWN_FILE } => self.reclaim(session, &request, deadline)?,
                // The program has closed files whose descriptors the server had to have back first.
                Answer::Failed { errno } if has_deferred && is_lack_of_descriptors(errno) => {
                    session.end_deferred(deadline)?;
                }
                Answer::Failed { errno } => return Err(ExportError::Os(errno.into())),
                answer => return Ok(answer),
            }
        }
        Err(ExportError::Os(Errno::STALE.raw_os_error()))
    }

    fn reclaim(
        &self,
        session: &Arc<Session>,
        request: &Request,
        deadline: Instant,
    ) -> Result<(), ExportError> {
        for id in request.files().into_iter().flatten().filter(|id| *id != self.root) {
            let paths = self.known.lock().paths(self.root, id);
            let mut errno = Errno::STALE.raw_os_error();
            for path in paths {
                match session.call(Request::Reclaim { id, path: Text(path) }, deadline)? {
                    Answer::Failed { errno: refused } => errno = refused.into(),
                    _ => {
                        errno = 0;
                        break;
                    }
                }
            }
            if errno != 0 {
                return Err(ExportError::Os(errno));
            }
        }
        Ok(())
    }

    /// Sends a request, and connects again if the connection is lost.
    ///
    /// # Errors
    /// `Os` if the server refuses it; `Lost` after the timeout; `Unanswered` if it may not be repeated.
    pub fn call(&self, request: Request, repeat: Repeat) -> Result<Answer, ExportError> {
        let deadline = self.deadline();
        loop {
            let session = self.session(deadline)?;
            match self.call_on(&session, request.clone(), deadline) {
                Err(ExportError::Lost) if repeat == Repeat::No => return Err(ExportError::Unanswered),
                Err(ExportError::Lost) if Instant::now() < deadline => continue,
                result => return result,
            }
        }
    }

    /// Notes a name of a file.
    pub fn learn(&self, id: FileId, parent: FileId, name: &OsStr) {
        self.known.lock().learn(id, parent, name);
    }

    /// Notes a path of a file.
    pub fn learn_path(&self, id: FileId, path: &Path) {
        self.known.lock().learn_path(id, path);
    }

    /// The file of a name, as far as is known.
    pub fn known_file(&self, parent: FileId, name: &OsStr) -> Option<FileId> {
        self.known.lock().find(parent, name)
    }

    /// Notes that a name was removed.
    pub fn forget(&self, parent: FileId, name: &OsStr) {
        self.known.lock().forget(parent, name);
    }

    /// Notes that a file was renamed. With `exchange` the file of the new name got the old one.
    pub fn learn_rename(&self, from: (FileId, &OsStr), to: (FileId, &OsStr), exchange: bool) {
        self.known.lock().rename(from, to, exchange);
    }

    /// Locks a file, or fails with `EWOULDBLOCK`.
    pub fn lock(&self, id: FileId, owner: u64, kind: LockKind) -> Result<(), ExportError> {
        let (key, request) = ((id, owner), Request::Lock { id, owner, kind });
        if kind == LockKind::Unlock {
            let result = self.call(request, Repeat::Yes);
            let was_lost = self.locks.lock().remove(&key).is_some_and(|lock| lock.is_lost);
            return if was_lost { Err(ExportError::LockLost) } else { result.map(|_| ()) };
        }
        let held = self.locks.lock().get(&key).copied();
        if held.is_some_and(|held| held.is_lost) {
            return Err(ExportError::LockLost);
        }
        let is_downgrade = kind == LockKind::Shared && held.is_some_and(|held| held.kind != kind);
        if is_downgrade && let Some(held) = self.locks.lock().get_mut(&key) {
            // The server may have converted it when the answer is lost.
            held.kind = kind;
        }
        let deadline = self.deadline();
        let session = loop {
            let session = match self.session(deadline) {
                Ok(session) => session,
                Err(error) => return Err(self.not_locked(key, error, is_downgrade)),
            };
            match self.call_on(&session, request.clone(), deadline) {
                Ok(_) => break session,
                Err(ExportError::Lost) if Instant::now() < deadline => {}
                Err(error) => return Err(self.not_locked(key, error, is_downgrade)),
            }
        };
        let lock =
            HeldLock { kind, instance: session.settings.instance, serial: session.serial, is_lost: false };
        self.locks.lock().insert(key, lock);
        let kept = self.keep_lock(id, session.serial, deadline);
        if kept.is_err() && held.is_none() {
            // The caller believes that it has none.
            self.locks.lock().remove(&key);
            let session = self.current.lock().session.clone();
            if let Some(session) = session {
                let request = Request::Lock { id, owner, kind: LockKind::Unlock };
                // The lock ends with its connection otherwise, and is not reclaimed.
                let _ = self.call_on(&session, request, self.deadline());
            }
        }
        kept.map_err(|error| self.not_locked(key, error, is_downgrade))
    }

    /// Has a lock that was granted on a session reclaimed if the connection was lost meanwhile.
    fn keep_lock(&self, id: FileId, serial: u64, deadline: Instant) -> Result<(), ExportError> {
        let now = self.session(deadline)?;
        if now.serial != serial {
            // It was made when this lock was not among those to reclaim.
            uninterruptible(|| self.restore_locks(&now, deadline));
        }
        if self.has_lost_lock(id) { Err(ExportError::LockLost) } else { Ok(()) }
    }

    /// The error of a lock that was refused. A lock that could not be converted may be lost; and one that could not be
    /// converted to a shared one may be either, of which the caller must not believe that it is still exclusive.
    fn not_locked(&self, key: (FileId, u64), error: ExportError, is_downgrade: bool) -> ExportError {
        let is_none = matches!(error, ExportError::Os(errno) if errno == Errno::NOLCK.raw_os_error());
        let is_lost = is_none || is_downgrade;
        match self.locks.lock().get_mut(&key) {
            Some(held) if is_lost => {
                held.is_lost = true;
                ExportError::LockLost
            }
            _ => error,
        }
    }

    /// Whether a lock of a file was lost.
    pub fn has_lost_lock(&self, id: FileId) -> bool {
        let locks = self.locks.lock();
        !locks.is_empty() && locks.iter().any(|((file, _), lock)| *file == id && lock.is_lost)
    }

    /// Watches a file, or no longer.
    pub fn watch(&self, id: FileId, on: bool) -> Result<(), ExportError> {
        if !on {
            // A watch whose end the server does not hear of ends with the connection.
            self.watches.lock().remove(&id);
        }
        self.call(Request::Watch { id, on }, Repeat::Yes)?;
        if on {
            self.watches.lock().insert(id);
        }
        Ok(())
    }

    fn push_change(&self, change: Change) {
        let mut changes = self.changes.lock();
        if changes.len() >= CHANGES_MAX {
            changes.clear();
            changes.push_back(Change::Changed { id: FileId::default(), change: ChangeSet::LOST });
        }
        changes.push_back(change);
    }

    /// The next change.
    pub fn next_change(&self, timeout: Duration) -> Option<Change> {
        let deadline = Instant::now() + timeout;
        loop {
            let session = self.current.lock().session.clone();
            for event in session.iter().flat_map(|session| session.take_events()) {
                match event {
                    Event::Changed { id, change } => self.push_change(Change::Changed { id, change }),
                    // The accesses of the file fail, and say so.
                    Event::Revoked { open, reason } => tracing::debug!(open, ?reason, "a key was revoked"),
                }
            }
            if let Some(change) = self.changes.lock().pop_front() {
                return Some(change);
            }
            let rest = deadline.saturating_duration_since(Instant::now());
            if rest.is_zero() {
                return None;
            }
            match session.filter(|session| !session.is_lost()) {
                Some(session) => session.wait_events(rest),
                None => std::thread::sleep(rest.min(PAUSE_MIN)),
            }
        }
    }
}

/// Whether a server refuses a connection for a lack that may end: of memory or descriptors, or because its earlier connections
/// have not ended yet.
fn is_momentary(errno: i32) -> bool {
    [Errno::NOMEM, Errno::USERS].iter().any(|lack| lack.raw_os_error() == errno)
}

impl Drop for Shared {
    fn drop(&mut self) {
        if let Some(session) = self.current.lock().session.take() {
            session.close();
        }
        self.progress.session.lock().take();
        self.device.close();
    }
}

fn is_lack_of_descriptors(errno: u16) -> bool {
    [Errno::NFILE, Errno::MFILE, Errno::NOLCK].iter().any(|lack| lack.raw_os_error() == i32::from(errno))
}

/// Keeps the lease, and learns of the server's end, until the client ends.
fn keep_lease(weak: &Weak<Shared>) {
    loop {
        let Some(shared) = weak.upgrade() else { return };
        let session = match shared.session(Instant::now() + PAUSE_MAX) {
            Ok(session) => session,
            Err(_) => {
                drop(shared);
                std::thread::sleep(PAUSE_MAX);
                continue;
            }
        };
        drop(shared);
        let lease = session.lease();
        let interval = lease / 3;
        let timeout = Timespec { tv_sec: interval.as_secs() as i64, tv_nsec: interval.subsec_nanos().into() };
        let mut fds = [PollFd::new(&session.stream, PollFlags::IN | PollFlags::RDHUP)];
        match poll(&mut fds, Some(&timeout)) {
            Ok(0) => {
                // Without an answer the session is lost.
                let _ = session.call(Request::Renew {}, Instant::now() + lease);
            }
            Ok(_) => session.lose("the server has closed its socket"),
            Err(_) => {}
        }
    }
}
