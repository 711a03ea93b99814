//! The sessions of a device.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};
use terrace_access::proto::{Datagram, Status};
use terrace_access::signature::{KEY_BYTES, SignaturePage};
use terrace_nic::{Device, Error, Path, ProgressCallback, QueuePair, Time};
use terrace_sync::{Backlog, Mutex};

use crate::control_cqs::ControlCqs;
use crate::counters::Totals;
use crate::link::qpn_of;
use crate::session::{Joining, Session};
use crate::settings::Settings;

/// The management class of the protocol's datagrams.
const MANAGEMENT_CLASS: u8 = 0x3d;
/// The most queued datagrams. Further ones are dropped; the peers retransmit them.
const DATAGRAMS_MAX: usize = 256;

/// A random key for a signature page.
pub fn new_signature_key() -> [u8; KEY_BYTES] {
    rand::random()
}

/// The sessions of a device.
pub struct Service {
    device: Weak<Device>,
    pub(crate) settings: Settings,
    pub(crate) signature_key: [u8; KEY_BYTES],
    pub(crate) control_cqs: ControlCqs,
    /// By the numbers of the program's queue pairs.
    sessions: Mutex<HashMap<u32, Weak<Session>>>,
    /// By the numbers of the control queue pairs.
    control_qps: Mutex<HashMap<u32, Weak<Session>>>,
    datagrams: Backlog<(Path, Datagram)>,
    pub(crate) ready: Backlog<Arc<Session>>,
    pub(crate) totals: Totals,
    /// Those with a deadline, and some that have none any more: an expiry of the timer visits no others.
    pub(crate) timed: Backlog<Weak<Session>>,
    /// Expires when a session has to be run.
    timer: OwnedFd,
    /// When the timer expires; `u64::MAX` for never.
    timer_at: AtomicU64,
    /// Locked while `timer_at` and the timer change.
    setting: Mutex<()>,
    /// By the upper 24 bits of a key: sessions whose peers know the key.
    key_watchers: Mutex<HashMap<u32, Vec<Weak<Session>>>>,
    /// The next region id. The first one is random, so that a peer does not take a region for one of an earlier process.
    next_region_id: AtomicU64,
}

impl Service {
    /// Makes the service of a device, which lives until the device is closed. All paged regions of the device have the
    /// signature page of `signature_key`.
    ///
    /// # Errors
    /// The errors of creating the device's objects; the system's, without a descriptor for a timer.
    pub fn attach(
        device: &Arc<Device>,
        settings: Settings,
        signature_key: [u8; KEY_BYTES],
    ) -> Result<Arc<Service>, Error> {
        let timer = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC)
            .map_err(|errno| Error::System(errno.raw_os_error()))?;
        let service = Arc::new(Service {
            device: Arc::downgrade(device),
            settings,
            signature_key,
            control_cqs: ControlCqs::new(),
            sessions: Mutex::default(),
            control_qps: Mutex::default(),
            datagrams: Backlog::default(),
            ready: Backlog::default(),
            totals: Totals::default(),
            timed: Backlog::default(),
            timer,
            timer_at: AtomicU64::new(u64::MAX),
            setting: Mutex::default(),
            key_watchers: Mutex::default(),
            next_region_id: AtomicU64::new(rand::random()),
        });
        let receiver = Arc::downgrade(&service);
        device.on_management_class(
            MANAGEMENT_CLASS,
            Arc::new(move |path: &Path, bytes: &[u8]| {
                if let (Some(service), Ok(datagram)) = (receiver.upgrade(), Datagram::decode(bytes)) {
                    service.datagrams.add_below(DATAGRAMS_MAX, (*path, datagram));
                    service.request();
                }
            }),
        );
        let watcher = Arc::downgrade(&service);
        device.watch_keys(Arc::new(move |key| {
            if let Some(service) = watcher.upgrade() {
                service.note_key_ended(key);
            }
        }));
        device.attach(service.clone());
        Ok(service)
    }

    /// Answers peers' requests for sessions on a device that has none.
    pub fn refuse_on(device: &Arc<Device>) {
        let sender = Arc::downgrade(device);
        let refuse = move |path: &Path, bytes: &[u8]| {
            if let (Some(device), Ok(Datagram::Join { tid, .. })) =
                (sender.upgrade(), Datagram::decode(bytes))
            {
                send(&device, path, &Datagram::Joined { tid, joined: Err(Status::Plain) });
            }
        };
        device.on_management_class(MANAGEMENT_CLASS, Arc::new(refuse));
    }

    /// Has the work requests of an RC queue pair go through a session from now on. Before the first one.
    pub fn manage(self: &Arc<Service>, qp: &Arc<QueuePair>) {
        let session = Session::new(self, qp);
        self.sessions.lock().insert(session.qpn, Arc::downgrade(&session));
        // A queue pair keeps its first session.
        let _ = qp.set_stage(session);
    }

    /// The signature page of a key.
    pub fn signature_page(key: &[u8; KEY_BYTES]) -> Arc<[u8; terrace_access::signature::PAGE_BYTES]> {
        SignaturePage::derive(key).shared()
    }

    pub(crate) fn device(&self) -> Option<Arc<Device>> {
        self.device.upgrade()
    }

    /// Has the callbacks called soon.
    pub(crate) fn request(&self) {
        if let Some(device) = self.device.upgrade() {
            device.request_callbacks();
        }
    }

    /// Adds a session's control queue pair, or removes it.
    pub(crate) fn set_control(&self, qpn: u32, session: Option<&Session>) {
        let mut control_qps = self.control_qps.lock();
        match session {
            Some(session) => _ = control_qps.insert(qpn, session.weak()),
            None => _ = control_qps.remove(&qpn),
        }
    }

    /// A region id that no other region has.
    pub(crate) fn new_region_id(&self) -> u64 {
        self.next_region_id.fetch_add(1, Ordering::Relaxed)
    }

    /// Has a session learn of the end of a key's region or window. Its low 8 bits do not count: binds change those of
    /// windows.
    pub(crate) fn watch_key(&self, key: u32, session: &Session) {
        let mut watchers = self.key_watchers.lock();
        let of_key = watchers.entry(key >> 8).or_default();
        if !of_key.iter().any(|watcher| std::ptr::eq(watcher.as_ptr(), session)) {
            of_key.push(session.weak());
        }
    }

    /// Ends what [`Service::watch_key`] has begun.
    pub(crate) fn unwatch_key(&self, key: u32, session: &Session) {
        let mut watchers = self.key_watchers.lock();
        if let Some(of_key) = watchers.get_mut(&(key >> 8)) {
            of_key.retain(|watcher| !std::ptr::eq(watcher.as_ptr(), session));
            if of_key.is_empty() {
                watchers.remove(&(key >> 8));
            }
        }
    }

    fn note_key_ended(&self, key: u32) {
        let watchers = self.key_watchers.lock().remove(&(key >> 8));
        for session in watchers.into_iter().flatten().filter_map(|watcher| watcher.upgrade()) {
            session.inputs.ended_keys.add(key);
            session.list();
            self.request();
        }
    }

    /// Forgets the session of a queue pair that has ended.
    pub(crate) fn forget(&self, qpn: u32) {
        let mut sessions = self.sessions.lock();
        // The number may be another queue pair's by now.
        if sessions.get(&qpn).is_some_and(|session| session.strong_count() == 0) {
            sessions.remove(&qpn);
        }
    }

    /// Sends a datagram. It may get lost.
    pub(crate) fn send(&self, path: &Path, datagram: &Datagram) {
        if let Some(device) = self.device() {
            send(&device, path, datagram);
        }
    }

    /// Has the engine wake up at a time, at the latest. The session has stored its deadline before: either this finds the
    /// time that [`Service::handle_timer`] has set, or that finds the deadline.
    pub(crate) fn note_deadline(&self, at: u64) {
        if at < self.timer_at.load(Ordering::SeqCst) {
            let _setting = self.setting.lock();
            if at < self.timer_at.load(Ordering::SeqCst) {
                self.timer_at.store(at, Ordering::SeqCst);
                self.arm(at);
            }
        }
    }

    fn arm(&self, at: u64) {
        let Some(device) = self.device() else { return };
        let ns = at.saturating_sub(device.now().0).max(1);
        let it_value = Timespec { tv_sec: (ns / 1_000_000_000) as i64, tv_nsec: (ns % 1_000_000_000) as i64 };
        let once = Itimerspec { it_interval: Timespec::default(), it_value };
        if let Err(error) = timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &once) {
            tracing::error!(%error, "a timer cannot be set");
        }
    }

    /// Lists the sessions whose deadline has passed, and sets the timer for the next one.
    fn handle_timer(&self, now: Time) {
        let mut next = u64::MAX;
        let setting = self.setting.lock();
        self.timer_at.store(u64::MAX, Ordering::SeqCst);
        let sessions: Vec<Arc<Session>> = self.timed.take().iter().filter_map(Weak::upgrade).collect();
        for session in &sessions {
            session.is_timed.store(false, Ordering::SeqCst);
            match session.deadline.load(Ordering::SeqCst) {
                at if at <= now.0 => {
                    session.deadline.store(u64::MAX, Ordering::SeqCst);
                    session.inputs.is_due.store(true, Ordering::Release);
                    session.list();
                }
                u64::MAX => {}
                at => {
                    session.list_timed();
                    next = next.min(at);
                }
            }
        }
        if next == u64::MAX {
            // The expiration is forgotten, too.
            let never = Timespec::default();
            let _ = timerfd_settime(
                &self.timer,
                TimerfdTimerFlags::empty(),
                &Itimerspec { it_interval: never, it_value: never },
            );
        } else {
            self.timer_at.store(next, Ordering::SeqCst);
            self.arm(next);
        }
        // Before the sessions: some may end here.
        drop(setting);
    }

    fn handle_datagrams(&self) {
        for (path, datagram) in self.datagrams.take() {
            match datagram {
                Datagram::Join { tid, join } => match self.session(join.to_qpn) {
                    Some(session) => {
                        session.inputs.joining.add(Joining::Asked { path, tid, join });
                        session.list();
                    }
                    None => self.send(&path, &Datagram::Joined { tid, joined: Err(Status::Plain) }),
                },
                Datagram::Joined { tid, joined } => {
                    if let Some(session) = self.session(qpn_of(tid)) {
                        session.inputs.joining.add(Joining::Answered { path, tid, joined });
                        session.list();
                    }
                }
                _ => {}
            }
        }
    }

    fn session(&self, qpn: u32) -> Option<Arc<Session>> {
        self.sessions.lock().get(&qpn)?.upgrade()
    }

    fn handle_completions(&self) {
        let mut completions = Vec::new();
        self.control_cqs.take_completions(|wc| completions.push(*wc));
        for wc in completions {
            let session = self.control_qps.lock().get(&wc.qpn).and_then(Weak::upgrade);
            if let Some(session) = session {
                session.inputs.control.add(wc);
                session.list();
            }
        }
    }
}

/// Sends a datagram. A lost one is sent again.
fn send(device: &Arc<Device>, path: &Path, datagram: &Datagram) {
    if let Err(error) = device.send_management(path, &datagram.encode()) {
        tracing::debug!(%error, to = %path.remote, "management datagram not sent");
    }
}

impl ProgressCallback for Service {
    fn advance(&self) -> bool {
        if self.timer_at.load(Ordering::Relaxed) != u64::MAX
            && let Some(device) = self.device()
        {
            let now = device.now();
            if self.timer_at.load(Ordering::Relaxed) <= now.0 {
                self.handle_timer(now);
            }
        }
        if !self.datagrams.is_empty() {
            self.handle_datagrams();
        }
        if self.control_cqs.has_completions() {
            self.handle_completions();
        }
        let ready = self.ready.take();
        ready.iter().for_each(|session| session.run_listed());
        !ready.is_empty()
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.timer.as_fd())
    }

    fn report(&self) -> Option<(String, serde_json::Value)> {
        Some(("np".into(), self.totals.report()))
    }
}
