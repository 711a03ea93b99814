//! Forwarding of datagrams to other processes of this host, and a NIC's service of datagrams while its process has no
//! connection manager.

use std::net::IpAddr;
use std::sync::Arc;

use terrace_cm::{Cm, Config, Limits, Timing};
use terrace_nic::Device;
use terrace_sync::{Mutex, MutexGuard};
use terrace_wire::Path;
use terrace_wire::cm::{CM_CLASS, service_of};

use super::clock::now;
use super::rendezvous;
use super::resolve::own_address;

/// The instance index of another process of this host that listens for a service at one of a device's addresses.
fn find_instance(device: &Device, service_id: u64, address: IpAddr) -> Option<u8> {
    let (space, port) = service_of(service_id)?;
    let own = own_address(device.gids(), address)?;
    let instance = rendezvous::find_cached(space, port, own.address)?;
    (instance != device.instance()).then_some(instance)
}

/// Forwards a datagram that belongs to another process of this host, and passes any other one to the connection
/// manager.
pub fn forward_or_handle(cm: &mut Cm, device: &Device, path: &Path, bytes: &[u8]) {
    let find_instance = |service, address| find_instance(device, service, address);
    if let Some(instance) = cm.instance_of_datagram(path, bytes, &find_instance)
        // The datagram may get lost, as any datagram.
        && !matches!(device.forward_management(instance, path, bytes), Ok(false))
    {
        return;
    }
    cm.handle_mad(now(), path, bytes, &find_instance);
}

/// Held while a NIC handles a datagram for a process without a connection manager.
static HANDLING: Mutex<()> = Mutex::new(());

/// Keeps other threads from handling datagrams while the process forks.
pub fn hold_for_fork() -> MutexGuard<'static, ()> {
    HANDLING.lock()
}

/// Makes a NIC serve connection requests while its process has no connection manager. A request for another process is
/// forwarded to that process. A request without a listener is rejected. No connection is kept.
pub fn serve_without_manager(device: &Arc<Device>) {
    let weak = Arc::downgrade(device);
    let limits = Limits { connections_max: 0, ..Limits::default() };
    let (guid, instance) = (device.node_guid(), device.instance());
    let cm = Cm::new(Config { guid, instance, path_mtu: 5, seed: 0, timing: Timing::default(), limits });
    let cm = Mutex::new(cm);
    let handler = move |path: &Path, bytes: &[u8]| {
        let Some(device) = weak.upgrade() else { return };
        let _handling = HANDLING.lock();
        let mut cm = cm.lock();
        forward_or_handle(&mut cm, &device, path, bytes);
        while let Some(transmit) = cm.poll_transmit() {
            // The datagram may get lost, as any datagram.
            let _ = device.send_management(&transmit.path, &transmit.bytes);
        }
    };
    device.on_management_class(CM_CLASS, Arc::new(handler));
}
