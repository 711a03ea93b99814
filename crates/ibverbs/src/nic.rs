//! The NICs of this process's contexts and of its connection manager.
//!
//! Every context has a NIC of its own, with one exception: the connection manager (`rdma_cm`) and the first context
//! share a NIC. So a program that connects by librdmacm has a single instance index. If the index is 0, peers that know
//! only the standard's UDP port reach both the process's queue pair 1 and its other queue pairs.
//!
//! Otherwise such peers reach the process through the process with instance index 0, the port demultiplexer. When that
//! process ends, a process that connects by address opens one more NIC with instance index 0. This NIC only forwards
//! the packets that arrive at the standard port ([`ensure_demultiplexer`]).

use std::net::{IpAddr, SocketAddr, SocketAddrV6, UdpSocket};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak};

use terrace_nic::{Device, Gid};
use terrace_wire::ROCE_PORT;

use crate::backings::ProgramFiles;
use crate::errno::Result;
use crate::process_lock::{Locked, lock};
use crate::rdma_cm::forwarding;
use crate::{identity, np, room};

/// The shared NIC and its users.
#[derive(Default)]
struct Shared {
    device: Option<Arc<Device>>,
    /// Whether a context uses `device`.
    by_context: bool,
    /// References by the connection manager.
    by_service: u32,
    /// The additional NIC with instance index 0, which forwards packets.
    demultiplexer: Option<Arc<Device>>,
}

impl Shared {
    /// Removes the NICs without users. The caller closes them after releasing the lock.
    fn take_unused(&mut self) -> [Option<Arc<Device>>; 2] {
        let demultiplexer = if self.by_service > 0 { None } else { self.demultiplexer.take() };
        [if self.by_context || self.by_service > 0 { None } else { self.device.take() }, demultiplexer]
    }
}

static SHARED: Mutex<Shared> =
    Mutex::new(Shared { device: None, by_context: false, by_service: 0, demultiplexer: None });

fn shared() -> Locked<Shared> {
    lock(&SHARED)
}

/// The devices of this process, including those that only forward packets.
pub type Devices = Vec<Weak<Device>>;

/// See [`devices`].
static DEVICES: Mutex<Devices> = Mutex::new(Vec::new());

/// The devices of this process, to be paused around a fork.
pub fn devices() -> MutexGuard<'static, Devices> {
    // No code panics while it holds the lock; the list would be valid even after a panic.
    DEVICES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// As [`devices`]; `None` while another thread holds the lock.
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
pub struct Hold(Locked<Shared>);

/// See [`Hold`].
pub fn hold_for_fork() -> Hold {
    Hold(shared())
}

fn open() -> Result<Arc<Device>> {
    let device = identity::open_device()?;
    np::serve(&device).inspect_err(|_| device.close())?;
    register(&device)?;
    Ok(device)
}

/// Registers a NIC with the fork handlers, the host's co-located devices and the connection manager. A NIC that other
/// devices could not reach is closed.
fn register(device: &Arc<Device>) -> Result<()> {
    device.set_backings(Arc::new(ProgramFiles));
    track(device);
    device.join_colocated().inspect_err(|_| device.close())?;
    forwarding::serve_without_manager(device);
    Ok(())
}

/// Acquires a NIC for a context.
///
/// # Errors
/// Those of [`identity::open_device`].
pub fn acquire_for_context() -> Result<Arc<Device>> {
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

/// Releases the NIC of a closed context, and closes it unless the connection manager still uses it.
pub fn release_from_context(device: &Arc<Device>) {
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

/// Acquires a NIC for the connection manager.
///
/// # Errors
/// Those of [`identity::open_device`]; EMFILE when the process has no descriptors left for one.
pub fn acquire_for_service() -> Result<Arc<Device>> {
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

/// Releases the connection manager's reference to its NIC.
pub fn release_from_service() {
    let mut shared = shared();
    shared.by_service = shared.by_service.saturating_sub(1);
    let unused = shared.take_unused();
    drop(shared);
    unused.into_iter().flatten().for_each(|device| device.close());
}

/// Makes the connection manager's NIC reachable for peers that know only the standard's UDP port. Requests the process
/// with instance index 0 to listen at every address, or opens a NIC with instance index 0 if there is none. Costs a few
/// system calls.
pub fn ensure_demultiplexer() {
    let mut shared = shared();
    let Some(device) = shared.device.clone() else { return };
    if device.instance() == 0 || shared.by_service == 0 || shared.demultiplexer.is_some() {
        return;
    }
    device.ask_demultiplexer_to_listen();
    if !device.gids().first().is_some_and(is_standard_port_free) {
        return;
    }
    // Another process may have taken the instance index meanwhile.
    let Ok(demultiplexer) = identity::open_demultiplexer() else { return };
    if let Err(error) = register(&demultiplexer) {
        tracing::warn!(
            errno = error.0,
            "no NIC with instance index 0: peers that know only the standard port do not reach this process"
        );
        return;
    }
    demultiplexer.receive_at_all_gids();
    tracing::info!("opened a NIC with instance index 0, which forwards packets from the standard port");
    shared.demultiplexer = Some(demultiplexer);
}

/// Whether the standard port is free at an address.
fn is_standard_port_free(gid: &Gid) -> bool {
    let socket_address = match gid.addr {
        IpAddr::V6(v6) if v6.is_unicast_link_local() => {
            SocketAddrV6::new(v6, ROCE_PORT, 0, gid.ifindex).into()
        }
        addr => SocketAddr::new(addr, ROCE_PORT),
    };
    UdpSocket::bind(socket_address).is_ok()
}

/// Forgets the parent's NICs in a forked child, because their sockets are the parent's. The child's connection manager
/// and its next context share a new NIC.
pub fn forget_in_child(hold: Hold) {
    let Hold(mut shared) = hold;
    // A drop would wait for threads that the child does not have.
    std::mem::forget((shared.device.take(), shared.demultiplexer.take()));
    (shared.by_context, shared.by_service) = (false, 0);
}
