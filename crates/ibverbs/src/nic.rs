//! Who uses which NIC of this process.
//!
//! Every context has a NIC of its own, with one exception: the connection manager (`rdma_cm`) and one context share one, whichever
//! of them comes first. So a program that connects by librdmacm, which opens its context when it first needs one, has a single
//! slot: if that is slot 0, peers that know only the standard's UDP port reach both its queue pair 1 and its queue pairs.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use terrace_nic::Device;

use crate::errno::Result;
use crate::{fork, identity, rdma_cm, room};

/// The NIC that may be shared.
#[derive(Default)]
struct Shared {
    device: Option<Arc<Device>>,
    /// Whether a context has it.
    by_context: bool,
    /// How often the connection manager has it.
    by_service: u32,
}

impl Shared {
    fn close_if_unused(&mut self) -> Option<Arc<Device>> {
        if self.by_context || self.by_service > 0 { None } else { self.device.take() }
    }
}

static SHARED: Mutex<Shared> = Mutex::new(Shared { device: None, by_context: false, by_service: 0 });

fn shared() -> MutexGuard<'static, Shared> {
    // Nothing panics while it holds the lock; if something did, the contents would still be good.
    SHARED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Locks out whoever opens or closes NICs, while the process forks.
pub struct Hold(MutexGuard<'static, Shared>);

/// See [`Hold`].
pub fn hold_for_fork() -> Hold {
    Hold(shared())
}

fn open() -> Result<Arc<Device>> {
    let device = identity::open_device()?;
    fork::track(&device);
    device.join_siblings();
    rdma_cm::show_the_way(&device);
    Ok(device)
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

/// A context is closed: its NIC falls silent, unless the connection manager still needs it.
pub fn closed_by_context(device: &Arc<Device>) {
    let mut shared = shared();
    let unused = match &shared.device {
        Some(own) if Arc::ptr_eq(own, device) => {
            shared.by_context = false;
            shared.close_if_unused()
        }
        _ => Some(device.clone()),
    };
    drop(shared);
    if let Some(device) = unused {
        device.close();
    }
}

/// A NIC for the connection manager.
///
/// # Errors
/// Those of [`identity::open_device`]; EMFILE when the process has no descriptors left for one.
pub fn for_service() -> Result<Arc<Device>> {
    fork::install()?;
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
    let unused = shared.close_if_unused();
    drop(shared);
    if let Some(device) = unused {
        device.close();
    }
}

/// In a forked child: what it connects by, and the next context that it opens, have a NIC of their own. The parent's has the
/// parent's sockets.
pub fn forget_in_child(hold: Hold) {
    let Hold(mut shared) = hold;
    // Its end would wait for threads that the child does not have.
    std::mem::forget(shared.device.take());
    (shared.by_context, shared.by_service) = (false, 0);
}
