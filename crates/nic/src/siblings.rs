//! Devices of one process that stand in for each other.
//!
//! Peers that know nothing of slots send everything to slot 0's UDP port, whatever a queue pair's number says. A process that has
//! slot 0 and other slots as well, because it opened its device more than once, gets such packets at one device that are for
//! another one, and passes them on.

use std::net::IpAddr;
use std::sync::{Arc, Weak};

use parking_lot::RwLock;
use terrace_wire::{Packet, QPN_SLOT_SHIFT, RxMeta};

use crate::device::Device;

static SIBLINGS: RwLock<Vec<Weak<Device>>> = RwLock::new(Vec::new());

/// The device with that slot of that address.
fn find(slot: u32, address: IpAddr) -> Option<Arc<Device>> {
    let fits = |device: &Arc<Device>| {
        u32::from(device.port.slot()) == slot && device.gids().iter().any(|gid| gid.addr == address)
    };
    SIBLINGS.read().iter().filter_map(Weak::upgrade).find(fits)
}

impl Device {
    /// Takes packets from the process's other devices that have joined, and passes on what is theirs.
    pub fn join_siblings(self: &Arc<Self>) {
        let mut siblings = SIBLINGS.write();
        siblings.retain(|device| device.strong_count() > 0);
        siblings.push(Arc::downgrade(self));
    }

    /// Passes a packet on to whoever has its queue pair. False if nobody has.
    #[cold]
    pub(crate) fn pass_on(&self, meta: &RxMeta, packet: &Packet<'_>) -> bool {
        let slot = packet.bth.qpn >> QPN_SLOT_SHIFT;
        if slot == u32::from(self.port.slot()) {
            return false;
        }
        find(slot, meta.destination.to_canonical())
            .is_some_and(|sibling| sibling.take_passed_on(meta, packet))
    }

    /// Handles a packet that another device has received. Its answer leaves with this device's next look.
    fn take_passed_on(&self, meta: &RxMeta, packet: &Packet<'_>) -> bool {
        let Some(qp) = self.query_qp_by_number(packet.bth.qpn) else { return false };
        let mut core = qp.lock();
        if core.dead {
            return false;
        }
        let host = qp.host(&core);
        core.qp.handle_packet(self.clock.now(), meta, packet, &host);
        self.deliver(&qp, &mut core);
        drop(core);
        self.look_at(&qp);
        true
    }
}
