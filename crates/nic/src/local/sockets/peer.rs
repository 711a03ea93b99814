//! A peer whose memory this process accesses: what it tells of regions.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use terrace_hostmem::HostRange;
use terrace_shm::{
    BackedBy, Cached, FrameTables, Framed, Frames, Mapped, MappedFile, PeerMemory, Source, TxRing, Version,
    is_scarcity,
};

use super::Peer;
use super::later::Later;
use crate::device::Device;
use crate::local::Command;
use crate::local::message::{Message, Received, RegionPath};
use crate::local::rings::{PeerTx, SameHostPeer};

/// Half the time after which a region is asked for again whose files could not be found, received or mapped. It doubles
/// with each attempt, up to the second value.
const SCARCITY_DELAY: Duration = Duration::from_millis(500);
const SCARCITY_DELAY_MAX: Duration = Duration::from_secs(4);

impl Peer {
    /// `None` for a protocol violation.
    pub(super) fn handle(
        &mut self,
        device: &Device,
        (message, files): Received,
        later: &mut Later,
    ) -> Option<()> {
        match message {
            Message::Welcome if self.same_host_peer.is_none() => {
                let mut files = files.into_iter();
                let (registry, consumer_page, doorbell) = (files.next()?, files.next()?, files.next()?);
                let memory = PeerMemory::new(registry, self.reader_slots.clone(), self.pid).ok()?;
                let tx_ring = TxRing::new(self.ring.take()?, consumer_page).ok()?;
                let peer_tx = Arc::new(PeerTx::new(tx_ring, doorbell).ok()?);
                let same_host_peer = SameHostPeer { memory, peer_tx };
                device.local.peers.write().insert(self.address, same_host_peer.clone());
                device.local.generation.fetch_add(1, Ordering::Release);
                (self.same_host_peer, self.delay) = (Some(same_host_peer), None);
                Some(())
            }
            Message::Answer { key, version, path } => {
                let (memory, version) = (&self.same_host_peer.as_ref()?.memory, Version(version));
                match self.source(path, files) {
                    Some(source) => {
                        memory.set_source(key, version, source);
                        self.lacking.remove(&(key, version));
                    }
                    None => {
                        tracing::debug!(
                            key,
                            "a region is asked for again: descriptors or memory are lacking"
                        );
                        let delay = self.lacking.entry((key, version)).or_insert(SCARCITY_DELAY);
                        later.add(Command::Ask(self.address, key, version), Some(*delay), Instant::now());
                        *delay = (2 * *delay).min(SCARCITY_DELAY_MAX);
                    }
                }
                Some(())
            }
            Message::Forget { key, version } => {
                self.same_host_peer.as_ref()?.memory.forget(key, Version(version));
                self.lacking.remove(&(key, Version(version)));
                Some(())
            }
            _ => None,
        }
    }

    /// A region whose files cannot be used goes by packets. `None` if they cannot be used now: one of the processes lacks
    /// descriptors, memory or mappings.
    fn source(&self, path: RegionPath, files: impl IntoIterator<Item = OwnedFd>) -> Option<Source> {
        let mut files = files.into_iter();
        let mut backed = |offset, addr, len| {
            files.next().map(|file| BackedBy { file, offset, range: HostRange { addr, len } })
        };
        let source = match path {
            RegionPath::Unknown => return None,
            RegionPath::Packets => Ok(Source::Packets),
            RegionPath::Process => Ok(private_memory(self.pid)),
            RegionPath::Mapped { offset, addr, len } => {
                Mapped::new(&backed(offset, addr, len)?).map(Source::Mapped)
            }
            RegionPath::File { number, addr, len } => {
                let backed = backed(addr, addr, len)?;
                MappedFile::new(&backed, files.next()?, number).map(Source::File)
            }
            RegionPath::Framed { offset, count, addr, len } => {
                let file = files.next()?;
                let (entries, counters, hits) = (files.next()?, files.next()?, files.next()?);
                let (range, frames) = (HostRange { addr, len }, Frames { file, offset, count });
                Framed::new(range, frames, FrameTables { entries, counters, hits }).map(Source::Framed)
            }
            RegionPath::Cached { offset, count, is_swap_file, addr, len } => {
                let backed = backed(offset, addr, len)?;
                let (entries, counters) = (files.next()?, files.next()?);
                Cached::new(backed, is_swap_file, entries, counters, count).map(Source::Cached)
            }
        };
        match source {
            Err(error) if is_scarcity(&error) => None,
            Err(error) => {
                tracing::debug!(%error, ?path, "a region is reached by packets only");
                Some(Source::Packets)
            }
            Ok(source) => Some(source),
        }
    }
}

/// How private memory of a peer is accessed.
fn private_memory(pid: i32) -> Source {
    let source = Source::process(pid);
    if matches!(source, Source::Packets) {
        tracing::info!(
            pid,
            "the kernel forbids copies from and to this process (kernel.yama.ptrace_scope, or a container's seccomp \
             filter): its private memory is accessed through a ring, slower"
        );
    }
    source
}
