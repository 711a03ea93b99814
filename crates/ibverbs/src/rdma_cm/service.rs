//! The process's connection manager: one lock, one NIC, and a thread that sleeps until something is due.
//!
//! Datagrams are handled by whoever makes progress on the NIC, commands by the thread that writes them. The thread here does the
//! rest: repetitions, and files whose last descriptor was closed.
//!
//! The lock is the innermost of this library: whoever holds it opens or closes no NIC, and waits for nothing.

use std::ffi::c_int;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use terrace_cm::{Cm, Config, Limits, Timing, Transmit};
use terrace_nic::{Device, Probe, Time};
use terrace_wire::Path;
use terrace_wire::cm::{CM_CLASS, service_of};

use super::attributes::mtu_code;
use super::descriptor::{self, FileId};
use super::id::{File, Ids};
use super::rendezvous;
use super::resolve::own_address;
use crate::errno::{ENOMEM, Errno, Result};
use crate::shim::without_signals;
use crate::{fork, identity, nic};

/// A process's connection manager.
pub struct Service {
    pub cm: Cm,
    pub ids: Ids,
    pub device: Option<Arc<Device>>,
    pub next_listener: u64,
    /// A byte that is written here wakes the thread.
    bell: OwnedFd,
    /// Until when the thread sleeps.
    sleeps_until: Option<Time>,
    has_thread: bool,
    /// Probes that may yet be refused, where they went, and until when that is waited for.
    probes: Vec<(Probe, SocketAddr, Time)>,
}

static SERVICE: Mutex<Option<Box<Service>>> = Mutex::new(None);

fn locked() -> MutexGuard<'static, Option<Box<Service>>> {
    SERVICE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Nanoseconds of the monotonic clock.
pub fn now() -> Time {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: room for the answer. The clock is always there.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    Time(now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64)
}

/// Does something with the connection manager, and then what came of it: datagrams leave, events are queued.
///
/// # Errors
/// ENODEV when this process has none: it is a child that uses its parent's descriptor; else what `work` says.
pub fn with<T>(work: impl FnOnce(&mut Service) -> Result<T>) -> Result<T> {
    // A handler may write to the device as well, or fork.
    without_signals(|| {
        let mut service = locked();
        let service = service.as_mut().ok_or(Errno(libc::ENODEV))?;
        let result = work(service);
        service.settle();
        result
    })
}

/// The same for a command to a file.
///
/// # Errors
/// ENODEV when it is not a file of this process's manager, but of the one of the process that this one was forked from.
pub fn check(file: FileId) -> Result<()> {
    with(|service| if service.ids.files.contains_key(&file) { Ok(()) } else { Err(Errno(libc::ENODEV)) })
}

/// Sees to it that the connection manager has a NIC.
///
/// # Errors
/// Those of opening one.
pub fn ensure_device() -> Result<()> {
    if with(|service| Ok(service.device.is_some()))? {
        return Ok(());
    }
    // Without the lock: what opens a NIC waits for others.
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
/// EMFILE and its like.
pub fn open_channel(flags: c_int) -> Result<RawFd> {
    fork::install()?;
    identity::get()?;
    let mut service = locked();
    let service = match &mut *service {
        Some(service) => service,
        none => none.insert(Box::new(Service::new()?)),
    };
    service.start_thread()?;
    let (theirs, ours) = socket_pair(flags)?;
    // Numbers go on in a forked child, which has its parent's files in the list of descriptors.
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

/// The program's end, which is as `flags` say, and ours.
fn socket_pair(flags: c_int) -> Result<(OwnedFd, OwnedFd)> {
    let mut ends = [0; 2];
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: room for two descriptors.
    if unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, ends.as_mut_ptr()) } != 0 {
        return Err(Errno::last());
    }
    // SAFETY: just opened, nobody else's.
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
            // SAFETY: just opened, nobody else's.
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

    /// Takes a NIC, unless another thread has brought one meanwhile.
    fn adopt(&mut self, device: &Arc<Device>) -> bool {
        if self.device.is_some() {
            return false;
        }
        device.on_management_class(CM_CLASS, Arc::new(receive));
        device.hear_at_all_gids();
        device.on_peer_gone(Arc::new(note_peer_gone));
        self.cm.set_port(device.slot(), mtu_code(device.port_attributes().active_mtu));
        self.device = Some(device.clone());
        // The thread sleeps less deeply with some NICs.
        self.ring();
        true
    }

    fn ring(&self) {
        // SAFETY: an open descriptor and eight readable bytes.
        unsafe { libc::write(self.bell.as_raw_fd(), 1u64.to_ne_bytes().as_ptr().cast(), 8) };
    }

    /// Sends what the manager wants sent, queues what it has to tell, and sees to it that it is called in time.
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

    /// Of probes to one peer at a time, one is sent so that a refusal is heard of: it is about all connections to that peer.
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

    /// Takes in which probes were refused, and forgets those that will not be any more.
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

    /// The last descriptor of a file is closed: so are its identifiers.
    fn close(&mut self, file: FileId) {
        descriptor::remove(file);
        for number in self.ids.of_file(file) {
            self.destroy(number);
        }
        self.ids.files.remove(&file);
    }

    /// Ends an identifier: how many events of it the program has got.
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

    /// A file without events is not readable. Only the program's end can be emptied, if it is still where it was.
    pub fn quiet_if_empty(&mut self, file: FileId) {
        if let Some(it) = self.ids.files.get(&file)
            && it.events.is_empty()
            && descriptor::lookup(it.fd) == Some(file)
        {
            descriptor::silence(it.fd);
        }
    }

    /// Whether peers may reach its NIC only through another process, which may end.
    fn depends_on_others(&self) -> bool {
        self.device.as_ref().is_some_and(|device| device.slot() != 0)
    }

    /// What the thread looks after, and until when it may sleep.
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

/// A process of this host that some queue pair was connected to has ended, or has closed its NIC.
fn note_peer_gone(address: SocketAddr) {
    // Without a connection manager there is nobody to be told.
    let _ = with(|service| {
        service.cm.suspect_host(now(), address.ip());
        Ok(())
    });
}

/// A seed that nobody can guess.
fn random_seed() -> Result<u64> {
    let mut seed = [0; 8];
    // SAFETY: room for eight bytes.
    let got = unsafe { libc::getrandom(seed.as_mut_ptr().cast(), seed.len(), 0) };
    if got == 8 { Ok(u64::from_ne_bytes(seed)) } else { Err(Errno::last()) }
}

/// Which process of this host listens for a service at one of a device's addresses.
fn elsewhere(device: &Device, service_id: u64, address: IpAddr) -> Option<u8> {
    let (space, port) = service_of(service_id)?;
    let own = own_address(device.gids(), address)?;
    let slot = rendezvous::find_lately(space, port, own.address)?;
    (slot != device.slot()).then_some(slot)
}

/// Takes a datagram in. Called by whoever makes progress on the NIC.
fn receive(path: &Path, bytes: &[u8]) {
    let handled = with(|service| {
        let Some(device) = service.device.clone() else { return Ok(()) };
        take_in(&mut service.cm, &device, path, bytes);
        Ok(())
    });
    // In a child of the process whose NIC it is: the parent has got it, too.
    let _ = handled;
}

/// Has a connection manager handle a datagram, or the process of this host that it is for.
fn take_in(cm: &mut Cm, device: &Device, path: &Path, bytes: &[u8]) {
    let elsewhere = |service, address| elsewhere(device, service, address);
    if let Some(slot) = cm.meant_for(path, bytes, &elsewhere)
        // It may get lost, as any of them.
        && !matches!(device.pass_on_management(slot, path, bytes), Ok(false))
    {
        return;
    }
    cm.handle_mad(now(), path, bytes, &elsewhere);
}

/// Has a NIC help peers that ask it for connections while its process has no connection manager: what is for another process is
/// passed on to it, and what is for nobody is refused. Nothing is kept of them.
pub fn show_the_way(device: &Arc<Device>) {
    let weak = Arc::downgrade(device);
    let handler = move |path: &Path, bytes: &[u8]| {
        let Some(device) = weak.upgrade() else { return };
        let limits = Limits { connections_max: 0, ..Limits::default() };
        let (guid, slot) = (device.node_guid(), device.slot());
        let mut cm = Cm::new(Config { guid, slot, path_mtu: 5, seed: 0, timing: Timing::default(), limits });
        take_in(&mut cm, &device, path, bytes);
        while let Some(transmit) = cm.poll_transmit() {
            // It may get lost, as any of them.
            let _ = device.send_management(&transmit.path, &transmit.bytes);
        }
    };
    device.on_management_class(CM_CLASS, Arc::new(handler));
}

/// How long a refusal of a probe is waited for, and how many probes at a time; beyond them refusals are not heard of.
const REFUSED_WITHIN_NS: u64 = 1_000_000_000;
const PROBES_MAX: usize = 32;

/// How often a process that is not in slot 0 looks whether anybody is.
const LOOK_INTERVAL_NS: u64 = 1_000_000_000;

/// The thread.
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
            show_the_way(&device);
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

/// Sleeps until the bell rings, a file's last descriptor is closed, or the time has come. Returns the files that are closed.
fn sleep(bell: RawFd, ends: &[(RawFd, FileId)], probes: &[RawFd], until: Option<Time>) -> Vec<FileId> {
    let watch = |fd, events| libc::pollfd { fd, events, revents: 0 };
    let mut fds = vec![watch(bell, libc::POLLIN)];
    // That the other end is closed is told unasked.
    fds.extend(ends.iter().map(|(fd, _)| watch(*fd, 0)));
    // And so are errors.
    fds.extend(probes.iter().map(|fd| watch(*fd, 0)));
    let timeout_ms = until.map_or(-1, |until| {
        let ns = until.0.saturating_sub(now().0);
        i32::try_from(ns.div_ceil(1_000_000)).unwrap_or(i32::MAX)
    });
    // SAFETY: an array of that length.
    unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, timeout_ms) };
    if fds[0].revents != 0 {
        let mut count = [0u8; 8];
        // SAFETY: an open descriptor and room for eight bytes.
        unsafe { libc::read(bell, count.as_mut_ptr().cast(), 8) };
    }
    let hung_up = |fd: &libc::pollfd| fd.revents & (libc::POLLHUP | libc::POLLERR) != 0;
    std::iter::zip(&fds[1..], ends).filter(|(fd, _)| hung_up(fd)).map(|(_, (_, file))| *file).collect()
}

/// How often peers are told of the end of a process, and how long it waits for their answer each time. The kernel would repeat it
/// for a minute; nobody wants to wait for that.
const GOODBYES: u32 = 6;
const GOODBYE_PAUSE: Duration = Duration::from_millis(50);
const GOODBYE_STEP: Duration = Duration::from_millis(1);

/// When the process exits: peers are told that their connections end. One that is not told may wait for ever.
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

/// Does a part of it. Whether peers have yet to answer; `None` while another thread has the manager, which may never run again.
fn farewell(act: fn(&mut Cm)) -> Option<bool> {
    let mut service = SERVICE.try_lock().ok()?;
    let Some(service) = service.as_mut().filter(|service| service.device.is_some()) else {
        return Some(false);
    };
    act(&mut service.cm);
    service.settle();
    Some(service.cm.awaits_goodbyes())
}

/// Keeps the connection manager still while the process forks.
pub struct Hold {
    service: MutexGuard<'static, Option<Box<Service>>>,
    _descriptors: descriptor::Hold,
}

/// See [`Hold`].
pub fn hold_for_fork() -> Hold {
    Hold { service: locked(), _descriptors: descriptor::hold_for_fork() }
}

/// In a forked child: the connections are the parent's, and so is everything that would tell peers of their end.
pub fn forget_in_child(hold: Hold) {
    let Hold { mut service, _descriptors } = hold;
    std::mem::forget(service.take());
}
