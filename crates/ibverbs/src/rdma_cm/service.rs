//! The process's connection manager: one lock, one NIC, and a thread that sleeps until a timer is due.
//!
//! The thread that makes progress on the NIC handles datagrams; the thread that writes a command executes it. The
//! thread here does the rest: retransmissions, and files whose last descriptor was closed.
//!
//! The lock is the innermost of this library: a thread that holds it opens or closes no NIC, and does not block.

use std::ffi::c_int;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use terrace_cm::{Cm, Config, Limits, Timing, Transmit};
use terrace_nic::{Device, Time};
use terrace_wire::Path;
use terrace_wire::cm::CM_CLASS;

use super::attributes::mtu_code;
use super::clock::now;
use super::descriptor::{self, FileId};
use super::forwarding::{forward_or_handle, serve_without_manager};
use super::id::{File, Ids};
use super::probes::Probes;
use crate::errno::{ENOMEM, Errno, Result};
use crate::shim::signals::without_signals;
use crate::{identity, nic};

/// A process's connection manager.
pub struct Service {
    pub cm: Cm,
    pub ids: Ids,
    pub device: Option<Arc<Device>>,
    pub next_listener: u64,
    /// An eventfd: a write to it wakes the thread.
    wake_event: OwnedFd,
    /// The time at which the thread's sleep times out.
    wake_at: Option<Time>,
    has_thread: bool,
    /// Probes that may still fail with an ICMP error.
    probes: Probes,
}

static SERVICE: Mutex<Option<Box<Service>>> = Mutex::new(None);

fn locked() -> MutexGuard<'static, Option<Box<Service>>> {
    SERVICE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `work` on the connection manager, then sends the resulting datagrams and queues the resulting events.
///
/// # Errors
/// ENODEV without a connection manager, in a child that uses its parent's descriptor; else the error of `work`.
pub fn with<T>(work: impl FnOnce(&mut Service) -> Result<T>) -> Result<T> {
    // A signal handler may write to the device as well, or fork.
    without_signals(|| {
        let mut service = locked();
        let service = service.as_mut().ok_or(Errno(libc::ENODEV))?;
        let result = work(service);
        service.drain_outputs();
        result
    })
}

/// Checks that a file belongs to this process's connection manager.
///
/// # Errors
/// ENODEV when the file belongs to the connection manager of the process that this one was forked from.
pub fn check(file: FileId) -> Result<()> {
    with(|service| if service.ids.files.contains_key(&file) { Ok(()) } else { Err(Errno(libc::ENODEV)) })
}

/// Opens a NIC for the connection manager if it has none.
///
/// # Errors
/// The errors of opening a NIC.
pub fn ensure_device() -> Result<()> {
    if with(|service| Ok(service.device.is_some()))? {
        return Ok(());
    }
    // The lock is not held here: opening a NIC blocks.
    let device = nic::acquire_for_service()?;
    let used = with(|service| Ok(service.attach_device(&device)));
    if !matches!(used, Ok(true)) {
        nic::release_from_service();
    }
    nic::ensure_demultiplexer();
    used.map(|_| ())
}

/// Opens the device.
///
/// # Errors
/// EMFILE and similar errors.
pub fn open_channel(flags: c_int) -> Result<RawFd> {
    identity::get()?;
    let mut service = locked();
    let service = match &mut *service {
        Some(service) => service,
        none => none.insert(Box::new(Service::new()?)),
    };
    service.start_thread()?;
    let (theirs, ours) = socket_pair(flags)?;
    // A forked child continues its parent's numbers, because the parent's files stay in the child's list of
    // descriptors.
    static NEXT_FILE: AtomicU64 = AtomicU64::new(0);
    let file = FileId(NEXT_FILE.fetch_add(1, Relaxed));
    let fd = theirs.as_raw_fd();
    if !descriptor::add(fd, file) {
        return Err(Errno(libc::EMFILE));
    }
    std::mem::forget(theirs);
    service.ids.files.insert(file, File { events: Default::default(), fd, end: ours });
    service.wake_thread();
    Ok(fd)
}

/// Opens the program's end, with `flags`, and our end.
fn socket_pair(flags: c_int) -> Result<(OwnedFd, OwnedFd)> {
    let mut ends = [0; 2];
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: an array of two descriptors to be written to.
    if unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, ends.as_mut_ptr()) } != 0 {
        return Err(Errno::last());
    }
    // SAFETY: just opened, owned by nothing else.
    let [theirs, ours] = ends.map(|end| unsafe { OwnedFd::from_raw_fd(end) });
    let closes = if flags & libc::O_CLOEXEC != 0 { libc::FD_CLOEXEC } else { 0 };
    // SAFETY: flags of an open descriptor of ours.
    unsafe {
        libc::fcntl(theirs.as_raw_fd(), libc::F_SETFD, closes);
        libc::fcntl(theirs.as_raw_fd(), libc::F_SETFL, flags & libc::O_NONBLOCK);
    }
    Ok((theirs, ours))
}

impl Service {
    fn new() -> Result<Service> {
        // SAFETY: flags only.
        let wake_event = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if wake_event < 0 {
            return Err(Errno::last());
        }
        let config = Config {
            guid: identity::get()?.node_guid,
            instance: 0,
            path_mtu: 5,
            seed: random_seed()?,
            timing: Timing::default(),
            limits: Limits::default(),
        };
        Ok(Service {
            cm: Cm::new(config),
            ids: Ids::default(),
            device: None,
            next_listener: 0,
            // SAFETY: just opened, owned by nothing else.
            wake_event: unsafe { OwnedFd::from_raw_fd(wake_event) },
            wake_at: None,
            has_thread: false,
            probes: Probes::default(),
        })
    }

    fn start_thread(&mut self) -> Result<()> {
        if !self.has_thread {
            without_signals(|| {
                std::thread::Builder::new().name("terrace-cm".into()).stack_size(256 << 10).spawn(run)
            })
            .map_err(|error| Errno(error.raw_os_error().unwrap_or(ENOMEM.0)))?;
            self.has_thread = true;
        }
        Ok(())
    }

    /// Uses a NIC, unless another thread has set one meanwhile.
    fn attach_device(&mut self, device: &Arc<Device>) -> bool {
        if self.device.is_some() {
            return false;
        }
        device.on_management_class(CM_CLASS, Arc::new(receive));
        device.receive_at_all_gids();
        device.on_peer_gone(Arc::new(handle_peer_gone));
        self.cm.set_port(device.instance(), mtu_code(device.port_attributes().active_mtu));
        self.device = Some(device.clone());
        // The thread wakes periodically if the NIC's instance index is not 0.
        self.wake_thread();
        true
    }

    fn wake_thread(&self) {
        // SAFETY: an open descriptor and eight readable bytes.
        unsafe { libc::write(self.wake_event.as_raw_fd(), 1u64.to_ne_bytes().as_ptr().cast(), 8) };
    }

    /// Sends the manager's datagrams, queues its events, and wakes the thread if a timer is due earlier than its
    /// wake-up.
    fn drain_outputs(&mut self) {
        loop {
            while let Some(transmit) = self.cm.poll_transmit() {
                if let Some(device) = self.device.clone()
                    && let Err(error) = self.send(&device, &transmit)
                {
                    tracing::debug!(%error, to = %transmit.path.remote, "connection datagram not sent");
                }
            }
            let Some(event) = self.cm.poll_event() else { break };
            self.report(event);
        }
        let due = self.cm.poll_timeout();
        if due.is_some_and(|due| self.wake_at.is_none_or(|until| due < until)) {
            self.wake_at = due;
            self.wake_thread();
        }
    }

    /// Sends a datagram: a probe, if it can be, from a socket that reports ICMP errors.
    fn send(&mut self, device: &Device, transmit: &Transmit) -> std::result::Result<(), terrace_nic::Error> {
        let peer = transmit.path.remote;
        if !transmit.is_probe || !self.probes.wants(peer, now()) {
            return device.send_management(&transmit.path, &transmit.bytes);
        }
        let probe = device.probe_management(&transmit.path, &transmit.bytes)?;
        self.probes.add(probe, peer, now());
        self.wake_thread();
        Ok(())
    }

    /// Reports the ICMP errors of probes to the manager.
    fn handle_probe_errors(&mut self) {
        for peer in self.probes.take_refused(now()) {
            self.cm.handle_port_unreachable(now(), peer.ip(), peer.port());
        }
    }

    /// Handles the closing of a file's last descriptor: destroys the file's identifiers.
    fn close(&mut self, file: FileId) {
        descriptor::remove(file);
        for number in self.ids.numbers_of_file(file) {
            self.destroy(number);
        }
        self.ids.files.remove(&file);
    }

    /// Destroys an identifier. Returns the number of its events that the program has received.
    pub fn destroy(&mut self, number: u32) -> u32 {
        let Some(file) = self.ids.find(number).map(|id| id.file) else { return 0 };
        for event in self.ids.take_events(file, number) {
            if let Some(request) = event.request {
                self.cm.drop_request(request.conn, now());
            }
        }
        self.clear_readable_if_empty(file);
        let Some(id) = self.ids.remove(number) else { return 0 };
        if let Some(listener) = id.listener {
            self.cm.stop_listening(listener, now());
        }
        if let Some(conn) = id.conn {
            self.cm.destroy(conn, now());
        }
        id.events_reported
    }

    /// Makes a file without events unreadable. The byte is in the program's end, which can be read only while its
    /// descriptor is still this file's.
    pub fn clear_readable_if_empty(&mut self, file: FileId) {
        if let Some(it) = self.ids.files.get(&file)
            && it.events.is_empty()
            && descriptor::lookup(it.fd) == Some(file)
        {
            descriptor::clear_readable(it.fd);
        }
    }

    /// Whether peers may reach the NIC only through the process with instance index 0, which may exit.
    fn depends_on_others(&self) -> bool {
        self.device.as_ref().is_some_and(|device| device.instance() != 0)
    }

    /// The descriptors that the thread polls, and the time at which its sleep times out.
    fn watch(&mut self) -> (Vec<(RawFd, FileId)>, Option<Time>) {
        let next_check = self.depends_on_others().then(|| now().after_ns(INSTANCE_0_CHECK_NS));
        self.wake_at =
            [self.cm.poll_timeout(), next_check, self.probes.deadline()].into_iter().flatten().min();
        let ends = self.ids.files.iter().map(|(file, it)| (it.end.as_raw_fd(), *file)).collect();
        (ends, self.wake_at)
    }

    /// Gives the NIC up if the manager has nothing left to do: from now on the NIC serves connection requests without
    /// it. Another thread that attaches the NIC does so before this or after it.
    fn detach_unused_device(&mut self) -> Option<Arc<Device>> {
        let is_unused = self.ids.files.is_empty() && self.cm.connection_count() == 0;
        let device = self.device.take_if(|_| is_unused)?;
        serve_without_manager(&device);
        Some(device)
    }
}

/// Handles the end of a process of this host, or the closing of its NIC.
fn handle_peer_gone(address: SocketAddr) {
    // Without a connection manager there is nothing to update.
    let _ = with(|service| {
        service.cm.suspect_host(now(), address.ip());
        Ok(())
    });
}

/// An unpredictable seed.
fn random_seed() -> Result<u64> {
    let mut seed = [0; 8];
    // SAFETY: eight bytes to be written to.
    let got = unsafe { libc::getrandom(seed.as_mut_ptr().cast(), seed.len(), 0) };
    if got == 8 { Ok(u64::from_ne_bytes(seed)) } else { Err(Errno::last()) }
}

/// Handles a datagram. Called by the thread that makes progress on the NIC.
fn receive(path: &Path, bytes: &[u8]) {
    let handled = with(|service| {
        let Some(device) = service.device.clone() else { return Ok(()) };
        forward_or_handle(&mut service.cm, &device, path, bytes);
        Ok(())
    });
    // The call fails in a child of the process that owns the NIC. The parent receives the datagram, too.
    let _ = handled;
}

/// Interval at which a process with another instance index checks whether instance index 0 is in use.
const INSTANCE_0_CHECK_NS: u64 = 1_000_000_000;

/// The connection manager's thread.
fn run() {
    let mut checked_at = now();
    loop {
        let watched = {
            let mut service = locked();
            let Some(service) = service.as_mut() else { return };
            (service.watch(), service.probes.fds(), service.wake_event.as_raw_fd())
        };
        let ((ends, until), probes, wake_event) = watched;
        let hung_up = sleep(wake_event, &ends, &probes, until);
        let detached = with(|service| {
            service.handle_probe_errors();
            hung_up.iter().for_each(|file| service.close(*file));
            service.cm.handle_timeout(now());
            Ok(())
        })
        .and_then(|()| with(|service| Ok(service.detach_unused_device())));
        if let Ok(Some(device)) = detached {
            drop(device);
            nic::release_from_service();
        }
        if now() >= checked_at.after_ns(INSTANCE_0_CHECK_NS)
            && let Ok(true) = with(|service| Ok(service.depends_on_others()))
        {
            checked_at = now();
            nic::ensure_demultiplexer();
        }
    }
}

/// Sleeps until the eventfd is signalled, a file's last descriptor is closed, or `until`. Returns the files that are
/// closed.
fn sleep(wake_event: RawFd, ends: &[(RawFd, FileId)], probes: &[RawFd], until: Option<Time>) -> Vec<FileId> {
    let watch = |fd, events| libc::pollfd { fd, events, revents: 0 };
    let mut fds = vec![watch(wake_event, libc::POLLIN)];
    // `poll` always reports POLLHUP when the other end is closed.
    fds.extend(ends.iter().map(|(fd, _)| watch(*fd, 0)));
    // `poll` always reports POLLERR.
    fds.extend(probes.iter().map(|fd| watch(*fd, 0)));
    let timeout_ms = until.map_or(-1, |until| {
        let ns = until.0.saturating_sub(now().0);
        i32::try_from(ns.div_ceil(1_000_000)).unwrap_or(i32::MAX)
    });
    // SAFETY: an array of that length.
    unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, timeout_ms) };
    if fds[0].revents != 0 {
        let mut count = [0u8; 8];
        // SAFETY: an open descriptor and eight bytes to be written to.
        unsafe { libc::read(wake_event, count.as_mut_ptr().cast(), 8) };
    }
    let hung_up = |fd: &libc::pollfd| fd.revents & (libc::POLLHUP | libc::POLLERR) != 0;
    std::iter::zip(&fds[1..], ends).filter(|(fd, _)| hung_up(fd)).map(|(_, (_, file))| *file).collect()
}

/// Transmissions of a DREQ when the process exits, and the timeout of each. The kernel retransmits for a minute, which
/// would delay the exit too much.
const DREQ_ROUNDS: u32 = 6;
const DREP_TIMEOUT: Duration = Duration::from_millis(50);
const DREP_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Disconnects every connection when the process exits. A peer that gets no DREQ may wait for ever.
pub fn disconnect_all() {
    let mut act: fn(&mut Cm) = |cm| cm.destroy_all(now());
    for _ in 0..DREQ_ROUNDS {
        let until = Instant::now() + DREP_TIMEOUT;
        while Instant::now() < until {
            match try_disconnect_step(act) {
                Some(false) => return,
                Some(true) => act = |_| (),
                None => {}
            }
            std::thread::sleep(DREP_POLL_INTERVAL);
        }
        act = Cm::resend_dreqs;
    }
}

/// Runs `act` if the lock is free. Returns whether a DREQ is unanswered, or `None` while another thread holds the lock.
/// That thread may never run again.
fn try_disconnect_step(act: fn(&mut Cm)) -> Option<bool> {
    let mut service = SERVICE.try_lock().ok()?;
    let Some(service) = service.as_mut().filter(|service| service.device.is_some()) else {
        return Some(false);
    };
    act(&mut service.cm);
    service.drain_outputs();
    Some(service.cm.has_unanswered_dreqs())
}

/// Holds the connection manager's locks while the process forks.
pub struct Hold {
    service: MutexGuard<'static, Option<Box<Service>>>,
    _descriptors: descriptor::Hold,
}

/// See [`Hold`].
pub fn hold_for_fork() -> Hold {
    Hold { service: locked(), _descriptors: descriptor::hold_for_fork() }
}

/// Forgets the manager in a forked child without dropping it: the connections are the parent's. The parent's ports would
/// stay bound as long as the child has descriptors of them.
pub fn forget_in_child(hold: Hold) {
    let Hold { mut service, _descriptors } = hold;
    if let Some(mut service) = service.take() {
        service.ids.close_claims();
        std::mem::forget(service);
    }
}
