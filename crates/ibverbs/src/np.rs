//! NP-RDMA for this process's devices: those that know nothing of absent memory (`TERRACE_NIC=commodity`) have a service,
//! through whose sessions the work requests of RC queue pairs go.

use std::sync::{Arc, OnceLock, Weak};

use terrace_nic::{Device, NicModel, QpType, QueuePair};
use terrace_np::{Service, Settings, new_signature_key};
use terrace_sync::{Mutex, MutexGuard};

use crate::errno::{EINVAL, Errno, Result};
use crate::log::write_line;

/// The services of open devices.
static SERVICES: Mutex<Vec<(Weak<Device>, Weak<Service>)>> = Mutex::new(Vec::new());

/// Holds the list's lock while the process forks.
pub struct Hold(MutexGuard<'static, Vec<(Weak<Device>, Weak<Service>)>>);

/// See [`Hold`].
pub fn hold_for_fork() -> Hold {
    Hold(SERVICES.lock())
}

/// Forgets the services in a forked child, because they are the parent's.
pub fn forget_in_child(hold: Hold) {
    let Hold(mut services) = hold;
    services.clear();
}

/// The key of the signature page of all paged regions of this process.
fn signature_key() -> &'static [u8; 32] {
    static KEY: OnceLock<[u8; 32]> = OnceLock::new();
    KEY.get_or_init(new_signature_key)
}

/// The signature page of all paged regions of this process.
pub fn signature_page() -> Arc<[u8; 4096]> {
    static PAGE: OnceLock<Arc<[u8; 4096]>> = OnceLock::new();
    PAGE.get_or_init(|| Service::signature_page(signature_key())).clone()
}

/// Makes the service of a device that needs one. Other devices tell peers that they have none.
///
/// # Errors
/// EINVAL for invalid settings, after a line for the user; those of the device.
pub fn serve(device: &Arc<Device>) -> Result<()> {
    if device.model() != NicModel::Commodity {
        Service::refuse_on(device);
        return Ok(());
    }
    let settings = Settings::from_env().map_err(|problem| {
        write_line(problem);
        EINVAL
    })?;
    let service = Service::attach(device, settings, *signature_key()).map_err(Errno::from)?;
    let mut services = SERVICES.lock();
    services.retain(|(device, _)| device.strong_count() > 0);
    services.push((Arc::downgrade(device), Arc::downgrade(&service)));
    Ok(())
}

/// Has the work requests of a new queue pair go through a session, if it is of RC and its device has a service.
pub fn manage(device: &Arc<Device>, qp: &Arc<QueuePair>) {
    if device.model() != NicModel::Commodity || qp.qp_type() != QpType::Rc {
        return;
    }
    let services = SERVICES.lock();
    let is_its =
        |(other, _): &&(Weak<Device>, Weak<Service>)| std::ptr::eq(other.as_ptr(), Arc::as_ptr(device));
    let service = services.iter().find(is_its).and_then(|(_, service)| service.upgrade());
    drop(services);
    if let Some(service) = service {
        service.manage(qp);
    }
}
