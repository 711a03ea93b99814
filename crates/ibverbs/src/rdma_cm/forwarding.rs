//! Which process of this host a datagram is for, and what a NIC does with datagrams while its process has no connection
//! manager.

use std::net::IpAddr;
use std::sync::Arc;

use terrace_cm::{Cm, Config, Limits, Timing};
use terrace_nic::Device;
use terrace_wire::Path;
use terrace_wire::cm::{CM_CLASS, service_of};

use super::clock::now;
use super::rendezvous;
use super::resolve::own_address;

/// The slot of another process of this host that listens for a service at one of a device's addresses.
fn elsewhere(device: &Device, service_id: u64, address: IpAddr) -> Option<u8> {
    let (space, port) = service_of(service_id)?;
    let own = own_address(device.gids(), address)?;
    let slot = rendezvous::find_lately(space, port, own.address)?;
    (slot != device.slot()).then_some(slot)
}

/// Forwards a datagram to the process of this host that it is for, or else has the connection manager handle it.
pub fn forward_or_handle(cm: &mut Cm, device: &Device, path: &Path, bytes: &[u8]) {
    let elsewhere = |service, address| elsewhere(device, service, address);
    if let Some(slot) = cm.meant_for(path, bytes, &elsewhere)
        // It may get lost, as any datagram.
        && !matches!(device.forward_management(slot, path, bytes), Ok(false))
    {
        return;
    }
    cm.handle_mad(now(), path, bytes, &elsewhere);
}

/// Has a NIC serve connection requests while its process has no connection manager: a request for another process is
/// forwarded to that process, and a request without a listener is refused. No state is kept.
pub fn serve_without_manager(device: &Arc<Device>) {
    let weak = Arc::downgrade(device);
    let handler = move |path: &Path, bytes: &[u8]| {
        let Some(device) = weak.upgrade() else { return };
        let limits = Limits { connections_max: 0, ..Limits::default() };
        let (guid, slot) = (device.node_guid(), device.slot());
        let mut cm = Cm::new(Config { guid, slot, path_mtu: 5, seed: 0, timing: Timing::default(), limits });
        forward_or_handle(&mut cm, &device, path, bytes);
        while let Some(transmit) = cm.poll_transmit() {
            // It may get lost, as any datagram.
            let _ = device.send_management(&transmit.path, &transmit.bytes);
        }
    };
    device.on_management_class(CM_CLASS, Arc::new(handler));
}
