//! A peer that accesses this process's memory: what it is told of regions.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::event::epoll;
use rustix::io::Errno;
use terrace_hostmem::HostRange;
use terrace_memory::{PeerTables, RegionMemory, SharedFile};
use terrace_shm::{BackedBy, PeerReaders, RxRing, Version};

use super::PeerSocket;
use super::thread::check_peer;
use crate::device::Device;
use crate::local::Command;
use crate::local::message::{self, LAYOUT, Message, Received, RegionPath};

impl PeerSocket {
    /// `None` ends the connection.
    pub(super) fn handle(&mut self, device: &Arc<Device>, (message, mut files): Received) -> Option<()> {
        match message {
            Message::Hello { layout: LAYOUT } if self.readers.is_none() => {
                let rx_ring = RxRing::new(files.pop()?).ok()?;
                // Before the peer gets access to anything.
                let pid = check_peer(&self.socket)?;
                self.readers = Some(PeerReaders::admit(files.pop()?, pid).ok()?);
                let is_first = !device.memory.is_published();
                let published = device.memory.publish();
                let registry =
                    published.inspect_err(|error| tracing::warn!(%error, "no shared registry")).ok()?;
                if is_first {
                    device.publish_all_queue_pairs();
                }
                let consumer_page = rx_ring.consumer_page().try_clone_to_owned().ok()?;
                device.add_peer_rx(self.number, rx_ring, self.gid_index);
                let doorbell = device.engine.doorbell();
                // The engine may be about to sleep without having announced it in the new ring.
                doorbell.ring();
                let files = [registry, consumer_page.as_fd(), doorbell.fd()];
                message::send(&self.socket, &Message::Welcome, &files).ok()
            }
            Message::Ask { key, version } if self.readers.is_some() => {
                self.unsent.question = Some((key, Version(version)));
                Some(())
            }
            _ => None,
        }
    }

    /// Sends what is unsent.
    ///
    /// # Errors
    /// `AGAIN` when there is no space for all of it; otherwise the peer has gone.
    pub(super) fn send_unsent(&mut self, device: &Device) -> Result<(), Errno> {
        while let Some(&(key, version)) = self.unsent.ended.last() {
            message::send(&self.socket, &Message::Forget { key, version: version.0 }, &[])?;
            self.unsent.ended.pop();
        }
        if let Some((key, version)) = self.unsent.question {
            self.answer(device, key, version)?;
            self.unsent.question = None;
        }
        Ok(())
    }

    /// Has the thread woken when the socket has space, or when there is a message to be read.
    pub(super) fn watch_for_room(&mut self, waits: &OwnedFd, for_room: bool) -> Result<(), Errno> {
        if self.unsent.waits_for_room != for_room {
            let event = if for_room { epoll::EventFlags::OUT } else { epoll::EventFlags::IN };
            epoll::modify(waits, &self.socket, epoll::EventData::new_u64(0), event)?;
            self.unsent.waits_for_room = for_room;
        }
        Ok(())
    }

    fn answer(&mut self, device: &Device, key: u32, version: Version) -> Result<(), Errno> {
        let mut memory = device.memory.memory_of(key, version);
        let file = memory.as_ref().and_then(RegionMemory::shared_file);
        let backed = match (&file, &memory) {
            (None, Some(memory)) => find_backing(device, memory),
            _ => Ok(None),
        };
        let answer = |path| Message::Answer { key, version: version.0, path };
        let backed = match backed {
            Ok(backed) => backed,
            Err(error) => {
                tracing::debug!(%error, key, "the file behind a region cannot be looked for now");
                return message::send(&self.socket, &answer(RegionPath::Unknown), &[]);
            }
        };
        let is_framed = memory.as_ref().is_some_and(RegionMemory::is_framed);
        if backed.is_some() || is_framed || file.is_some() {
            // Invalidation removes the region before it reads `shared`. If it read `shared` before this insertion, the
            // region is gone by now.
            device.local.shared.lock().insert(key);
            memory = device.memory.memory_of(key, version);
            if memory.is_none() {
                device.local.command(Command::Recall(key));
            }
        }
        let tables = memory.as_ref().and_then(|memory| memory.pager.as_ref()?.translation().peer_tables());
        if let (Some(SharedFile { file, range, lengths, number }), Some(_)) = (&file, &memory) {
            let path = RegionPath::File { number: *number, addr: range.addr, len: range.len };
            message::send(&self.socket, &answer(path), &[file.as_fd(), lengths.file()])?;
            self.may_map.insert(key, version);
            return Ok(());
        }
        if let Some(PeerTables::Frames { entries, counters, hits, pool, pool_to_read, offset, count }) =
            tables
            && let Some(memory) = &memory
        {
            let HostRange { addr, len } = memory.range_of_pager();
            let path = RegionPath::Framed { offset, count, addr, len };
            let pool = if memory.is_writable { pool } else { pool_to_read };
            message::send(&self.socket, &answer(path), &[pool, entries, counters, hits])?;
            self.may_map.insert(key, version);
            return Ok(());
        }
        match (&backed, &memory) {
            (Some(backed), Some(memory)) => {
                let (offset, HostRange { addr, len }) = (backed.offset, backed.range);
                match (&memory.pager, tables) {
                    (None, _) => {
                        let path = RegionPath::Mapped { offset, addr, len };
                        message::send(&self.socket, &answer(path), &[backed.file.as_fd()])?;
                    }
                    (Some(_), Some(PeerTables::Cached { entries, counters, count, is_swap_file })) => {
                        let path = RegionPath::Cached { offset, count, is_swap_file, addr, len };
                        message::send(
                            &self.socket,
                            &answer(path),
                            &[backed.file.as_fd(), entries, counters],
                        )?;
                    }
                    (Some(_), _) => return message::send(&self.socket, &answer(RegionPath::Packets), &[]),
                }
                self.may_map.insert(key, version);
                Ok(())
            }
            (None, Some(memory)) if memory.pager.is_none() => {
                message::send(&self.socket, &answer(RegionPath::Process), &[])
            }
            _ => message::send(&self.socket, &answer(RegionPath::Packets), &[]),
        }
    }
}

/// The file behind a region; of a paged region, behind its pager's whole range.
fn find_backing(device: &Device, memory: &RegionMemory) -> io::Result<Option<BackedBy>> {
    let wanted = memory.range_of_pager();
    let Some(backings) = device.local.backings.read().clone() else { return Ok(None) };
    let Some(backed) = backings.find(wanted, memory.is_writable)? else { return Ok(None) };
    let covers = backed.range.addr <= wanted.addr
        && backed.range.len >= wanted.len
        && wanted.addr - backed.range.addr <= backed.range.len - wanted.len;
    let fits = covers && (memory.pager.is_none() || backed.range == wanted);
    Ok(fits.then_some(backed))
}
