//! Management datagrams as the program uses them: its handlers, and sending.

use std::sync::atomic::Ordering;

use terrace_fabric::TxBatch;
use terrace_fabric::udp::Probe;
use terrace_wire::{Path, Psn};

use super::{ManagementHandler, instance_of, write};
use crate::clock::LazyTimestamp;
use crate::device::Device;
use crate::error::Error;

impl Device {
    /// Sets the handler of management datagrams; without a handler they are dropped. The thread that makes progress
    /// calls it, without locks of the device held; what takes long belongs elsewhere. Datagrams to another GID than the
    /// device's first are received while a queue pair uses that GID.
    pub fn on_management(&self, handler: ManagementHandler) {
        self.management.handlers.write().rest = Some(handler);
    }

    /// Sets the handler of one class (IBTA volume 1, 13.4.4), in place of the handler of all other classes.
    pub fn on_management_class(&self, class: u8, handler: ManagementHandler) {
        let mut handlers = self.management.handlers.write();
        handlers.by_class.retain(|(taken, _)| *taken != class);
        handlers.by_class.push((class, handler));
    }

    /// Receives management datagrams at every GID of the device from now on: peers that connect by address may use any
    /// of them.
    pub fn receive_at_all_gids(&self) {
        self.activate_all_gids();
    }

    /// Sends a management datagram to the device whose instance's port the path names. It may get lost.
    ///
    /// # Errors
    /// EINVAL for more than [`MANAGEMENT_BYTES_MAX`](crate::MANAGEMENT_BYTES_MAX) or no bytes, or a path to no instance's port; ENODEV when the
    /// device is closed.
    pub fn send_management(&self, path: &Path, payload: &[u8]) -> Result<(), Error> {
        self.check_open()?;
        let instance = instance_of(path.remote.port())?;
        let psn = Psn::new(self.management.next_psn.fetch_add(1, Ordering::Relaxed));
        let mut unit = self.tx.take();
        write(&mut unit.batch, path, psn, [instance, self.port.instance()], payload)
            .inspect_err(|_| unit.batch.clear())?;
        self.activate_gid(path.source_gid_index);
        self.flush(unit, &LazyTimestamp::new(&*self.clock, None));
        Ok(())
    }

    /// Sends a management datagram from a port of its own, to detect that the receiver's port is closed. Answers come
    /// to the device.
    ///
    /// # Errors
    /// As for [`Device::send_management`]; the system's.
    pub fn probe_management(&self, path: &Path, payload: &[u8]) -> Result<Probe, Error> {
        self.check_open()?;
        let instance = instance_of(path.remote.port())?;
        let psn = Psn::new(self.management.next_psn.fetch_add(1, Ordering::Relaxed));
        let gid = self.gids().get(usize::from(path.source_gid_index));
        let gid = gid.ok_or(Error::Invalid("no GID at source_gid_index"))?;
        let mut batch = TxBatch::new(0);
        write(&mut batch, path, psn, [instance, self.port.instance()], payload)?;
        self.activate_gid(path.source_gid_index);
        Probe::send(gid, &mut batch).map_err(|error| Error::System(error.raw_os_error().unwrap_or(0)))
    }
}
