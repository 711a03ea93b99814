//! Which NIC of this process the contexts and the connection manager use.
//!
//! Every context has a NIC of its own, with one exception: the connection manager (`rdma_cm`) and one context share
//! one, whichever of them comes first. So a program that connects by librdmacm, which opens its context when it first
//! needs one, has a single slot: if that is slot 0, peers that know only the standard's UDP port reach both its queue
//! pair 1 and its queue pairs.
//!
//! In another slot such peers reach it through the process that has slot 0. When that process ends, a process that
//! connects by address opens one more NIC in slot 0, which only forwards the packets that come to that port
//! ([`stand_in`]).

use std::net::{IpAddr, SocketAddr, SocketAddrV6, UdpSocket};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak};

use terrace_nic::{Device, Gid};
use terrace_wire::ROCE_PORT;

use crate::backings::ProgramFiles;
use crate::errno::Result;
use crate::rdma_cm::forwarding;
use crate::{identity, room};

/// The NIC that may be shared.
#[derive(Default)]
struct Shared {
    device: Option<Arc<Device>>,
    /// Whether a context has it.
    by_context: bool,
    /// How often the connection manager has it.
    by_service: u32,
    /// The NIC in slot 0 that forwards packets.
    front: Option<Arc<Device>>,
}

impl Shared {
    /// NICs without users, for the caller to close after it has released the lock.
    fn take_unused(&mut self) -> [Option<Arc<Device>>; 2] {
        let front = if self.by_service > 0 { None } else { self.front.take() };
        [if self.by_context || self.by_service > 0 { None } else { self.device.take() }, front]
    }
}

static SHARED: Mutex<Shared> =
    Mutex::new(Shared { device: None, by_context: false, by_service: 0, front: None });

fn shared() -> MutexGuard<'static, Shared> {
    // Nothing panics while it holds the lock; after a panic the contents would still be valid.
    SHARED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The devices of this process, those that only forward among them.
pub type Devices = Vec<Weak<Device>>;

/// See [`devices`].
static DEVICES: Mutex<Devices> = Mutex::new(Vec::new());

/// The devices of this process, to be paused around a fork.
pub fn devices() -> MutexGuard<'static, Devices> {
    // As above.
    DEVICES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The same; `None` while another thread has the list.
pub fn try_devices() -> Option<MutexGuard<'static, Devices>> {
    match DEVICES.try_lock() {
        Ok(devices) => Some(devices),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// Adds a device to the list.
fn track(device: &Arc<Device>) {
    let mut devices = devices();
    devices.retain(|other| other.strong_count() > 0);
    devices.push(Arc::downgrade(device));
}

/// Keeps other threads from opening and closing NICs while the process forks.
pub struct Hold(MutexGuard<'static, Shared>);

/// See [`Hold`].
pub fn hold_for_fork() -> Hold {
    Hold(shared())
}

fn open() -> Result<Arc<Device>> {
    let device = identity::open_device()?;
    introduce(&device);
    Ok(device)
}

/// Registers a NIC wherever every NIC has to be registered.
fn introduce(device: &Arc<Device>) {
    device.set_backings(Arc::new(ProgramFiles));
    track(device);
    device.join_colocated();
    forwarding::serve_without_manager(device);
}

/// A NIC for a context.
///
/// # Errors
/// Those of [`identity::open_device`].
pub fn for_context() -> Result<Arc<Device>> {
    let mut shared = shared();
    if shared.by_context {
        return open();
    }
    let device = match &shared.device {
        Some(device) => device.clone(),
        None => open()?,
    };
    shared.device = Some(device.clone());
    shared.by_context = true;
    Ok(device)
}

/// A context is closed: its NIC is closed, unless the connection manager still needs it.
pub fn closed_by_context(device: &Arc<Device>) {
    let mut shared = shared();
    let unused = match &shared.device {
        Some(own) if Arc::ptr_eq(own, device) => {
            shared.by_context = false;
            shared.take_unused()
        }
        _ => [Some(device.clone()), None],
    };
    drop(shared);
    unused.into_iter().flatten().for_each(|device| device.close());
}

/// A NIC for the connection manager.
///
/// # Errors
/// Those of [`identity::open_device`]; EMFILE when the process has no descriptors left for one.
pub fn for_service() -> Result<Arc<Device>> {
    let mut shared = shared();
    let device = match &shared.device {
        Some(device) => device.clone(),
        None => {
            room::for_device()?;
            open()?
        }
    };
    shared.device = Some(device.clone());
    shared.by_service += 1;
    Ok(device)
}

/// The connection manager needs it no longer.
pub fn released_by_service() {
    let mut shared = shared();
    shared.by_service = shared.by_service.saturating_sub(1);
    let unused = shared.take_unused();
    drop(shared);
    unused.into_iter().flatten().for_each(|device| device.close());
}

/// Makes the connection manager's NIC reachable for peers that know only the standard's UDP port: asks the process in
/// slot 0 to listen at every address; if slot 0 is free, opens a NIC there. Costs a few system calls.
pub fn stand_in() {
    let mut shared = shared();
    let Some(device) = shared.device.clone() else { return };
    if device.slot() == 0 || shared.by_service == 0 || shared.front.is_some() {
        return;
    }
    device.ask_demultiplexer_to_listen();
    if !device.gids().first().is_some_and(is_front_free) {
        return;
    }
    // Another process may have taken the slot meanwhile.
    if let Ok(front) = identity::open_front() {
        introduce(&front);
        front.receive_at_all_gids();
        tracing::info!("slot 0 of the address was free: passing on what comes to its port");
        shared.front = Some(front);
    }
}

/// Whether the port of slot 0 is free at an address.
fn is_front_free(gid: &Gid) -> bool {
    let place = match gid.addr {
        IpAddr::V6(v6) if v6.is_unicast_link_local() => {
            SocketAddrV6::new(v6, ROCE_PORT, 0, gid.ifindex).into()
        }
        addr => SocketAddr::new(addr, ROCE_PORT),
    };
    UdpSocket::bind(place).is_ok()
}

/// In a forked child: its connection manager, and the next context that it opens, have a NIC of their own. The
/// parent's NIC has the parent's sockets.
pub fn forget_in_child(hold: Hold) {
    let Hold(mut shared) = hold;
    // Dropping them would wait for threads that the child does not have.
    std::mem::forget((shared.device.take(), shared.front.take()));
    (shared.by_context, shared.by_service) = (false, 0);
}
