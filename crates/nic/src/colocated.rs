//! Co-located devices, which take each other's packets.
//!
//! Peers that know nothing of instances send everything to instance 0's UDP port, whatever the queue pair number says.
//! The process with instance 0 gets packets for other devices of its address, and forwards them: within the process, if
//! it has opened its device more than once, and else to the process that has the instance (`forwarding`).

use std::net::IpAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use terrace_sync::RwLock;
use terrace_wire::{Packet, QPN_INSTANCE_SHIFT, RxMeta};

use crate::device::Device;
use crate::error::Error;
use crate::management::is_management;

static COLOCATED: RwLock<Vec<Weak<Device>>> = RwLock::new(Vec::new());

/// In a forked child: the parent's device takes no packets that are meant for the child's. No thread has the list
/// during a fork: receiving threads read it, and threads that open devices change it.
pub(crate) fn remove(device: &Arc<Device>) {
    COLOCATED.write().retain(|other| !std::ptr::eq(other.as_ptr(), Arc::as_ptr(device)));
}

/// The device with that instance of that address.
fn find(instance: u32, address: IpAddr) -> Option<Arc<Device>> {
    let fits = |device: &Arc<Device>| {
        u32::from(device.port.instance()) == instance && device.gids().iter().any(|gid| gid.addr == address)
    };
    COLOCATED.read().iter().filter_map(Weak::upgrade).find(fits)
}

impl Device {
    /// Takes packets from the host's other devices that have joined, and forwards theirs.
    ///
    /// # Errors
    /// When the system has no descriptors or memory left for the sockets. Peers that know only the standard port would not
    /// reach the device.
    pub fn join_colocated(self: &Arc<Self>) -> Result<(), Error> {
        self.open_inbound()?;
        self.is_colocated.store(true, Ordering::SeqCst);
        let mut colocated = COLOCATED.write();
        colocated.retain(|device| device.strong_count() > 0);
        colocated.push(Arc::downgrade(self));
        drop(colocated);
        self.announce_demultiplexer();
        Ok(())
    }

    /// Whether it has joined.
    pub(crate) fn is_colocated(&self) -> bool {
        self.is_colocated.load(Ordering::Relaxed)
    }

    /// Forwards a packet to the device that has its queue pair. False if no device of this process has it, and this
    /// device does not forward to other processes.
    #[cold]
    pub(crate) fn forward(&self, meta: &RxMeta, packet: &Packet<'_>, bytes: &[u8]) -> bool {
        let instance = packet.bth.qpn >> QPN_INSTANCE_SHIFT;
        if instance == u32::from(self.port.instance()) {
            return false;
        }
        // Not here: the handler of a management datagram is called without locks.
        let colocated = match is_management(packet.bth.qpn) {
            true => None,
            false => find(instance, meta.destination.to_canonical()),
        };
        match colocated {
            Some(device) => device.handle_forwarded(meta, packet),
            None => self.forward_to_process(meta, bytes, packet.bth.qpn),
        }
    }

    /// Handles a packet that another device has received. The response leaves with this device's next pass.
    pub(crate) fn handle_forwarded(&self, meta: &RxMeta, packet: &Packet<'_>) -> bool {
        let Some(qp) = self.query_qp_by_number(packet.bth.qpn) else { return false };
        let mut core = qp.lock();
        if core.nic.dead {
            return false;
        }
        let (transport, host) = core.parts(&qp, None);
        transport.handle_packet(|| self.clock.now(), meta, packet, None, &host);
        self.publish_state(&qp, &mut core);
        drop(core);
        self.schedule_pass(&qp);
        true
    }
}
