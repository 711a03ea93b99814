//! The messages by which a process joins its pager, over a unix socket, with descriptors.
//!
//! The process sends a [`Hello`]; the pager answers with one byte and the descriptor that handles the faults of the process.
//! From then on, a byte wakes the other side: after a request in the eviction area, or after its response. The pager learns
//! of the end of the process by the end of the connection.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

use terrace_hostmem::PAGE_BYTES;

use crate::eviction_area::BATCH_PAGES;
use crate::userfault::features;

/// The environment variable with the path of the pager's socket.
pub const SOCKET_VARIABLE: &str = "TERRACE_PAGER";

/// The features of the descriptors that a pager handles.
pub const FEATURES: u64 = features::WRITE_PROTECTED
    | features::FORK
    | features::REMAP
    | features::REMOVE
    | features::UNMAP
    | features::POISON
    | features::MOVE;

/// Memory of a process from its identity page on that is not paged: that page, the pages that pages move to, and the stack of
/// the thread that moves them.
pub const RESERVED_BYTES: u64 = PAGE_BYTES + BATCH_PAGES as u64 * PAGE_BYTES + (128 << 10);

const MAGIC: u64 = u64::from_le_bytes(*b"terrapg2");
const HELLO_BYTES: usize = 32;
const DESCRIPTORS_MAX: usize = 2;

/// The first message of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The address of a page that the pager fills with the number by which it knows the process.
    pub identity_page: u64,
    /// That number, if the process is a child whose descriptor the pager has from the kernel; else 0.
    pub identity: u64,
    /// Whether a child may lack memory that its parent has: `MADV_DONTFORK` or `MADV_WIPEONFORK` was used.
    pub may_lack_memory: bool,
}

impl Hello {
    fn encode(self) -> [u8; HELLO_BYTES] {
        let mut bytes = [0; HELLO_BYTES];
        let numbers = [MAGIC, self.identity_page, self.identity, self.may_lack_memory.into()];
        for (into, number) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(numbers) {
            *into = number.to_le_bytes();
        }
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Hello> {
        let [magic, identity_page, identity, may_lack_memory] = bytes.as_chunks::<8>().0 else { return None };
        let hello = Hello {
            identity_page: u64::from_le_bytes(*identity_page),
            identity: u64::from_le_bytes(*identity),
            may_lack_memory: u64::from_le_bytes(*may_lack_memory) != 0,
        };
        (u64::from_le_bytes(*magic) == MAGIC).then_some(hello)
    }
}

/// Sends a process's first message. The descriptors are those of its eviction area, and behind it, unless it is a child, of its
/// faults. A child that cannot have an area sends none.
///
/// # Errors
/// The system's.
pub fn send_hello(socket: impl AsFd, hello: Hello, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    send(socket, &hello.encode(), descriptors)
}

/// Receives a process's first message, with its descriptors.
///
/// # Errors
/// `InvalidData` if it is another message; the system's.
pub fn receive_hello(socket: impl AsFd) -> io::Result<(Hello, Vec<OwnedFd>)> {
    let mut bytes = [0; HELLO_BYTES];
    let (len, descriptors) = receive(socket, &mut bytes)?;
    let hello = Hello::decode(&bytes[..len]).ok_or(io::ErrorKind::InvalidData)?;
    Ok((hello, descriptors))
}

/// Answers a process.
///
/// # Errors
/// The system's.
pub fn send_welcome(socket: impl AsFd, userfaultfd: BorrowedFd<'_>) -> io::Result<()> {
    send(socket, b"w", &[userfaultfd])
}

/// Receives the pager's answer: the descriptor for the faults of this process.
///
/// # Errors
/// `UnexpectedEof` if the pager refuses or has ended; EMFILE if this process has no number left for the descriptor; the system's.
pub fn receive_welcome(socket: impl AsFd) -> io::Result<OwnedFd> {
    let (len, descriptors) = receive(socket, &mut [0])?;
    let missing = match len {
        0 => io::ErrorKind::UnexpectedEof.into(),
        _ => io::Error::from_raw_os_error(libc::EMFILE),
    };
    descriptors.into_iter().next().ok_or(missing)
}

fn send(socket: impl AsFd, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(descriptors));
    }
    sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

fn receive(socket: impl AsFd, bytes: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = recvmsg(socket, &mut [IoSliceMut::new(bytes)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = message {
            descriptors.extend(received);
        }
    }
    Ok((received.bytes, descriptors))
}
