//! The sockets to same-host peers.

mod later;
mod peer;
mod reader;
pub(super) mod thread;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use later::Later;

use terrace_shm::{PeerReaders, ReaderSlots, RingFile, Version};

use super::rings::SameHostPeer;
use crate::unix_socket::Spare;

/// A peer that may access this process's memory, once it has sent `Hello`. It is not read while it does not take what
/// it is sent. So at most one answer and one `Forget` for each region that it may have mapped are unsent.
struct PeerSocket {
    socket: OwnedFd,
    /// The regions that it may have mapped, by their keys.
    may_map: HashMap<u32, Version>,
    unsent: Unsent,
    /// The index of the own GID that it has connected to.
    gid_index: u8,
    /// Identifies its ring.
    number: u64,
    readers: Option<PeerReaders>,
}

/// Messages that do not fit into a peer's socket.
#[derive(Default)]
struct Unsent {
    /// The region of an unanswered `Ask`.
    question: Option<(u32, Version)>,
    /// The regions of unsent `Forget`s.
    ended: Vec<(u32, Version)>,
    /// Whether the socket is watched for space, and not for messages.
    waits_for_room: bool,
}

/// A peer whose memory this process may access, once it has sent `Welcome`.
struct Peer {
    socket: OwnedFd,
    address: SocketAddr,
    pid: i32,
    reader_slots: Arc<ReaderSlots>,
    /// How long the attempt to connect to it was delayed, until `Welcome`.
    delay: Option<Duration>,
    /// Until `Welcome` brings the consumer page.
    ring: Option<RingFile>,
    /// Regions whose files were not to be had, with the times after which they were asked for again.
    lacking: HashMap<(u32, Version), Duration>,
    same_host_peer: Option<SameHostPeer>,
}

/// The sockets of the thread that connects to same-host peers, and the peers at their other ends.
pub(crate) struct Sockets {
    waits: Arc<OwnedFd>,
    /// With the indexes of their GIDs.
    listeners: Vec<(u8, OwnedFd)>,
    spare: Spare,
    readers: Vec<PeerSocket>,
    /// How many peers were ever accepted.
    accepted_count: u64,
    peers: Vec<Peer>,
    later: Later,
    /// Peers that have gone since the last report.
    gone: Vec<SocketAddr>,
}

impl Sockets {
    /// In a forked child: the other ends must not take it for its parent. The peers' readers are the parent's, and
    /// their list may be locked by a thread that the child does not have.
    pub fn close_in_child(mut self) {
        self.readers.drain(..).for_each(|peer_socket| std::mem::forget(peer_socket.readers));
    }
}
