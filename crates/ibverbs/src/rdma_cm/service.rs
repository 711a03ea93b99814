//! The process's connection manager: one lock, one NIC, and a thread that sleeps until a timer is due.
//!
//! The thread that makes progress on the NIC handles datagrams; the thread that writes a command executes it. The
//! thread here does the rest: retransmissions, and files whose last descriptor was closed.
//!
//! The lock is the innermost of this library: a thread that holds it opens or closes no NIC, and does not block.

use std::ffi::c_int;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use terrace_cm::{Cm, Config, Limits, Timing, Transmit};
use terrace_nic::{Device, Probe, Time};
use terrace_wire::Path;
use terrace_wire::cm::CM_CLASS;

use super::attributes::mtu_code;
use super::clock::now;
use super::descriptor::{self, FileId};
use super::forwarding::{forward_or_handle, serve_without_manager};
use super::id::{File, Ids};
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
    bell: OwnedFd,
    /// The time at which the thread wakes by itself.
    sleeps_until: Option<Time>,
    has_thread: bool,
    /// Probes that may still be refused, their destinations, and the times at which waiting for a refusal ends.
    probes: Vec<(Probe, SocketAddr, Time)>,
}

static SERVICE: Mutex<Option<Box<Service>>> = Mutex::new(None);

fn locked() -> MutexGuard<'static, Option<Box<Service>>> {
    SERVICE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `work` on the connection manager, then sends the datagrams and queues the events that resulted.
///
/// # Errors
/// ENODEV when this process has none: it is a child that uses its parent's descriptor; else the error of `work`.
pub fn with<T>(work: impl FnOnce(&mut Service) -> Result<T>) -> Result<T> {
    // A signal handler may write to the device as well, or fork.
    without_signals(|| {
        let mut service = locked();
        let service = service.as_mut().ok_or(Errno(libc::ENODEV))?;
        let result = work(service);
        service.settle();
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

/// Gives the connection manager a NIC if it has none.
///
/// # Errors
/// The errors of opening a NIC.
pub fn ensure_device() -> Result<()> {
    if with(|service| Ok(service.device.is_some()))? {
        return Ok(());
    }
    // Without the lock: opening a NIC blocks.
    let device = nic::for_service()?;
    let used = with(|service| Ok(service.adopt(&device)));
    if !matches!(used, Ok(true)) {
        nic::released_by_service();
    }
    nic::stand_in();
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
    // A forked child continues its parent's numbers: the parent's files stay in its list of descriptors.
    static NEXT_FILE: AtomicU64 = AtomicU64::new(0);
    let file = FileId(NEXT_FILE.fetch_add(1, Relaxed));
    let fd = theirs.as_raw_fd();
    if !descriptor::add(fd, file) {
        return Err(Errno(libc::EMFILE));
    }
    std::mem::forget(theirs);
    service.ids.files.insert(file, File { events: Default::default(), fd, end: ours });
    service.ring();
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
        let bell = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if bell < 0 {
            return Err(Errno::last());
        }
        let config = Config {
            guid: identity::get()?.node_guid,
            slot: 0,
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
            bell: unsafe { OwnedFd::from_raw_fd(bell) },
            sleeps_until: None,
            has_thread: false,
            probes: Vec::new(),
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

    /// Takes a NIC, unless another thread has set one meanwhile.
    fn adopt(&mut self, device: &Arc<Device>) -> bool {
        if self.device.is_some() {
            return false;
        }
        device.on_management_class(CM_CLASS, Arc::new(receive));
        device.receive_at_all_gids();
        device.on_peer_gone(Arc::new(note_peer_gone));
        self.cm.set_port(device.slot(), mtu_code(device.port_attributes().active_mtu));
        self.device = Some(device.clone());
        // The thread wakes periodically if the NIC is not in slot 0.
        self.ring();
        true
    }

    fn ring(&self) {
        // SAFETY: an open descriptor and eight readable bytes.
        unsafe { libc::write(self.bell.as_raw_fd(), 1u64.to_ne_bytes().as_ptr().cast(), 8) };
    }

    /// Sends the manager's datagrams, queues its events, and wakes the thread if a timer is due earlier than its
    /// wake-up.
    fn settle(&mut self) {
        loop {
            while let Some(transmit) = self.cm.poll_transmit() {
                if let Some(device) = self.device.clone()
                    && let Err(error) = self.send(&device, &transmit)
                {
                    tracing::debug!(%error, to = %transmit.path.remote, "connection datagram not sent");
                }
            }
            let Some(event) = self.cm.poll_event() else { break };
            self.tell(event);
        }
        let due = self.cm.poll_timeout();
        if due.is_some_and(|due| self.sleeps_until.is_none_or(|until| due < until)) {
            self.sleeps_until = due;
            self.ring();
        }
    }

    /// Of the probes to one peer, one at a time is sent so that a refusal is reported: it concerns all connections to
    /// that peer.
    fn send(&mut self, device: &Device, transmit: &Transmit) -> std::result::Result<(), terrace_nic::Error> {
        let peer = transmit.path.remote;
        let is_new = self.probes.len() < PROBES_MAX && self.probes.iter().all(|(_, other, _)| *other != peer);
        if !transmit.is_probe || !is_new {
            return device.send_management(&transmit.path, &transmit.bytes);
        }
        let probe = device.probe_management(&transmit.path, &transmit.bytes)?;
        self.probes.push((probe, peer, now().after_ns(REFUSED_WITHIN_NS)));
        self.ring();
        Ok(())
    }

    /// Reports refused probes to the manager, and drops those whose time is over.
    fn hear_refusals(&mut self) {
        let mut refused = Vec::new();
        self.probes.retain(|(probe, peer, until)| {
            let error = probe.take_error();
            if error.as_ref().is_some_and(|error| error.kind() == io::ErrorKind::ConnectionRefused) {
                refused.push(*peer);
            }
            error.is_none() && *until > now()
        });
        for peer in refused {
            self.cm.note_refused(now(), peer.ip(), peer.port());
        }
    }

    /// The last descriptor of a file is closed: its identifiers are destroyed.
    fn close(&mut self, file: FileId) {
        descriptor::remove(file);
        for number in self.ids.of_file(file) {
            self.destroy(number);
        }
        self.ids.files.remove(&file);
    }

    /// Destroys an identifier. Returns the number of its events that the program has received.
    pub fn destroy(&mut self, number: u32) -> u32 {
        let Some(file) = self.ids.find(number).map(|id| id.file) else { return 0 };
        for event in self.ids.take_events(file, number) {
            if let Some(request) = event.request {
                self.cm.forget_request(request.conn, now());
            }
        }
        self.quiet_if_empty(file);
        let Some(id) = self.ids.remove(number) else { return 0 };
        if let Some(listener) = id.listener {
            self.cm.stop_listening(listener, now());
        }
        if let Some(conn) = id.conn {
            self.cm.destroy(conn, now());
        }
        id.events_reported
    }

    /// Makes a file without events unreadable. Only the program's end can be drained, if its descriptor is still this
    /// file's.
    pub fn quiet_if_empty(&mut self, file: FileId) {
        if let Some(it) = self.ids.files.get(&file)
            && it.events.is_empty()
            && descriptor::lookup(it.fd) == Some(file)
        {
            descriptor::silence(it.fd);
        }
    }

    /// Whether peers may reach the NIC only through another process, which may end.
    fn depends_on_others(&self) -> bool {
        self.device.as_ref().is_some_and(|device| device.slot() != 0)
    }

    /// The descriptors that the thread polls, and the time at which it wakes by itself.
    fn watch(&mut self) -> (Vec<(RawFd, FileId)>, Option<Time>) {
        let next_look = self.depends_on_others().then(|| now().after_ns(LOOK_INTERVAL_NS));
        let probes_end = self.probes.iter().map(|(.., until)| *until).min();
        self.sleeps_until = [self.cm.poll_timeout(), next_look, probes_end].into_iter().flatten().min();
        let ends = self.ids.files.iter().map(|(file, it)| (it.end.as_raw_fd(), *file)).collect();
        (ends, self.sleeps_until)
    }

    fn is_unused(&self) -> bool {
        self.ids.files.is_empty() && self.cm.connection_count() == 0
    }
}

/// A process of this host that a queue pair was connected to has ended, or has closed its NIC.
fn note_peer_gone(address: SocketAddr) {
    // Without a connection manager there is nothing to update.
    let _ = with(|service| {
        service.cm.suspect_host(now(), address.ip());
        Ok(())
    });
}

/// A seed that peers cannot guess.
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
    // Fails in a child of the process that owns the NIC: the parent receives the datagram, too.
    let _ = handled;
}

/// How long a probe's refusal is waited for, and how many probes at a time; refusals of further probes are not noticed.
const REFUSED_WITHIN_NS: u64 = 1_000_000_000;
const PROBES_MAX: usize = 32;

/// How often a process that is not in slot 0 checks whether slot 0 is taken.
const LOOK_INTERVAL_NS: u64 = 1_000_000_000;

/// The connection manager's thread.
fn run() {
    let mut looked_at = now();
    loop {
        let watched = {
            let mut service = locked();
            let Some(service) = service.as_mut() else { return };
            let probes: Vec<RawFd> =
                service.probes.iter().map(|(probe, ..)| probe.as_fd().as_raw_fd()).collect();
            (service.watch(), probes, service.bell.as_raw_fd())
        };
        let ((ends, until), probes, bell) = watched;
        let hung_up = sleep(bell, &ends, &probes, until);
        let unused = with(|service| {
            service.hear_refusals();
            hung_up.iter().for_each(|file| service.close(*file));
            service.cm.handle_timeout(now());
            Ok(())
        })
        .and_then(|()| with(|service| Ok(service.is_unused().then(|| service.device.take()).flatten())));
        if let Ok(Some(device)) = unused {
            serve_without_manager(&device);
            drop(device);
            nic::released_by_service();
        }
        if now() >= looked_at.after_ns(LOOK_INTERVAL_NS)
            && let Ok(true) = with(|service| Ok(service.depends_on_others()))
        {
            looked_at = now();
            nic::stand_in();
        }
    }
}

/// Sleeps until the eventfd is signalled, a file's last descriptor is closed, or `until`. Returns the files that are
/// closed.
fn sleep(bell: RawFd, ends: &[(RawFd, FileId)], probes: &[RawFd], until: Option<Time>) -> Vec<FileId> {
    let watch = |fd, events| libc::pollfd { fd, events, revents: 0 };
    let mut fds = vec![watch(bell, libc::POLLIN)];
    // `poll` always reports POLLHUP: the other end is closed.
    fds.extend(ends.iter().map(|(fd, _)| watch(*fd, 0)));
    // And POLLERR.
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
        unsafe { libc::read(bell, count.as_mut_ptr().cast(), 8) };
    }
    let hung_up = |fd: &libc::pollfd| fd.revents & (libc::POLLHUP | libc::POLLERR) != 0;
    std::iter::zip(&fds[1..], ends).filter(|(fd, _)| hung_up(fd)).map(|(_, (_, file))| *file).collect()
}

/// How often a DREQ is sent when the process exits, and how long each waits for its DREP. The kernel would retransmit
/// for a minute; that would delay the exit too much.
const GOODBYES: u32 = 6;
const GOODBYE_PAUSE: Duration = Duration::from_millis(50);
const GOODBYE_STEP: Duration = Duration::from_millis(1);

/// At process exit: disconnects every connection. A peer that gets no DREQ may wait for ever.
pub fn say_goodbye() {
    let mut act: fn(&mut Cm) = |cm| cm.destroy_all(now());
    for _ in 0..GOODBYES {
        let until = Instant::now() + GOODBYE_PAUSE;
        while Instant::now() < until {
            match farewell(act) {
                Some(false) => return,
                Some(true) => act = |_| (),
                None => {}
            }
            std::thread::sleep(GOODBYE_STEP);
        }
        act = Cm::repeat_goodbyes;
    }
}

/// One step of it. Returns whether peers have yet to answer; `None` while another thread holds the lock: it may never
/// run again.
fn farewell(act: fn(&mut Cm)) -> Option<bool> {
    let mut service = SERVICE.try_lock().ok()?;
    let Some(service) = service.as_mut().filter(|service| service.device.is_some()) else {
        return Some(false);
    };
    act(&mut service.cm);
    service.settle();
    Some(service.cm.awaits_goodbyes())
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

/// In a forked child: forgets the manager without dropping it. The connections are the parent's, and a drop might
/// notify peers.
pub fn forget_in_child(hold: Hold) {
    let Hold { mut service, _descriptors } = hold;
    std::mem::forget(service.take());
}
