//! Messages between processes of one host: one datagram per message, with descriptors.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

/// The version of messages and segments together.
pub(super) const LAYOUT: u32 = 17;
/// Longest message in bytes.
const MESSAGE_BYTES_MAX: usize = 512;
/// Most descriptors with one message.
const DESCRIPTORS_MAX: usize = 4;

/// A message. `key` and `version` name a published region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Message {
    /// The first message of the connecting side; with the segment of its reader slots, and its ring.
    Hello { layout: u32 },
    /// The answer; with the shared registry, the ring's consumer page, and the consumer's doorbell.
    Welcome,
    /// Asks how this region is reached.
    Ask { key: u32, version: u64 },
    /// Answers `Ask`.
    Answer { key: u32, version: u64, path: RegionPath },
    /// The region is no more. Sent to peers that may have mapped it.
    Forget { key: u32, version: u64 },
}

/// How a region is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum RegionPath {
    /// By mapping the attached file: `len` bytes from `offset` on are those at `addr`.
    Mapped { offset: u64, addr: u64, len: u64 },
    /// By the attached file, as far as the attached page table permits. The third file has `count` counters. Nobody makes a
    /// swap file shorter.
    Cached { offset: u64, count: u32, is_swap_file: bool, addr: u64, len: u64 },
    /// By mapping the attached file, whose offsets are the addresses, as far as the file reaches: its length is `number` in
    /// the attached segment.
    File { number: u32, addr: u64, len: u64 },
    /// In the frames of the attached file, `count` of them from `offset` on, by the attached page table and two files of
    /// counters.
    Framed { offset: u64, count: u32, addr: u64, len: u64 },
    /// By the kernel.
    Process,
    /// By packets only.
    Packets,
    /// By packets, until it is asked again: the process cannot tell now, for it lacks descriptors or memory.
    Unknown,
}

/// A received message with its descriptors.
pub(super) type Received = (Message, SmallVec<[OwnedFd; DESCRIPTORS_MAX]>);

/// Sends a message without blocking.
///
/// # Errors
/// When the peer has gone, or does not read.
pub(super) fn send(socket: impl AsFd, message: &Message, files: &[BorrowedFd<'_>]) -> Result<(), Errno> {
    let bytes = serde_json::to_vec(message).map_err(|_| Errno::INVAL)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(files)) {
        return Err(Errno::INVAL);
    }
    sendmsg(socket, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?;
    Ok(())
}

/// Receives a message. `None` when the peer has gone. Descriptors are missing when the process has none left.
///
/// # Errors
/// `AGAIN` when there is none; `BADMSG` for a malformed one.
pub(super) fn receive(socket: impl AsFd) -> Result<Option<Received>, Errno> {
    let mut bytes = [0; MESSAGE_BYTES_MAX];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let got = recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags)?;
    let mut files = SmallVec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = message {
            files.extend(received);
        }
    }
    if got.bytes == 0 {
        return Ok(None);
    }
    if got.flags.contains(ReturnFlags::TRUNC) {
        return Err(Errno::BADMSG);
    }
    let message = serde_json::from_slice(&bytes[..got.bytes]).map_err(|_| Errno::BADMSG)?;
    Ok(Some((message, files)))
}
