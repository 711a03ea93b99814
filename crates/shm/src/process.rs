//! Copies by the kernel, from or to memory of another process that cannot be mapped here.
//!
//! A call costs a microsecond beside the bytes: the kernel finds the process, asks its security modules, and finds each
//! page ([decision 46](../../../docs/decisions/0046-private-memory-is-copied-by-the-kernel.md)). Pieces that share a call
//! share half of that.

use std::io;
use std::ptr;

use smallvec::SmallVec;
use terrace_hostmem::HostRange;

use crate::source::{Direction, Missing};

/// Pieces in one call at most. Twice as many would make a piece cheaper by 3 to 8 %.
pub(crate) const PIECES_MAX: usize = 16;

/// Memory of the other process, and as much of this one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    /// Where it is in the other process.
    pub host: u64,
    /// Where it is here. It is registered for the copy, or borrowed.
    pub local: HostRange,
}

/// Whether the kernel permits copies from and to this process: the Yama module may not.
pub(crate) fn is_permitted(pid: i32) -> bool {
    let mut byte = 0u8;
    let ours = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    // Nothing is mapped there: the error says whether the kernel would have accessed the process.
    let theirs = libc::iovec { iov_base: ptr::null_mut(), iov_len: 1 };
    // SAFETY: one byte of ours; the kernel checks the other side.
    let moved = unsafe { libc::process_vm_readv(pid, &raw const ours, 1, &raw const theirs, 1, 0) };
    moved >= 0 || io::Error::last_os_error().raw_os_error() == Some(libc::EFAULT)
}

/// Copies one piece.
#[inline(never)]
pub(crate) fn copy(direction: Direction, pid: i32, host: u64, local: HostRange) -> Result<(), Missing> {
    if local.len == 0 {
        return Ok(());
    }
    let (ours, count) = local_parts(direction, local);
    let theirs = [part(host, local.len)];
    let moved = call(direction, pid, &ours[..count], &theirs);
    if moved == local.len { Ok(()) } else { Err(Missing) }
}

/// Copies pieces, which are not empty, one after the other. Returns how many were copied, from the first on; a part of
/// the next one may have been copied, too.
pub(crate) fn copy_pieces(direction: Direction, pid: i32, pieces: &[Piece]) -> usize {
    let mut ours: SmallVec<[libc::iovec; 2 * PIECES_MAX]> = SmallVec::new();
    let mut theirs: SmallVec<[libc::iovec; PIECES_MAX]> = SmallVec::new();
    for piece in pieces {
        let (parts, count) = local_parts(direction, piece.local);
        ours.extend_from_slice(&parts[..count]);
        theirs.push(part(piece.host, piece.local.len));
    }
    let mut left = call(direction, pid, &ours, &theirs);
    let is_copied = |piece: &&Piece| {
        let rest = left.checked_sub(piece.local.len);
        left = rest.unwrap_or(0);
        rest.is_some()
    };
    pieces.iter().take_while(is_copied).count()
}

/// The system call. Returns the number of bytes copied.
fn call(direction: Direction, pid: i32, ours: &[libc::iovec], theirs: &[libc::iovec]) -> u64 {
    let (our_count, their_count) = (ours.len() as libc::c_ulong, theirs.len() as libc::c_ulong);
    // SAFETY: the local ranges are registered, or borrowed for this call; the kernel checks both sides.
    let moved = unsafe {
        match direction {
            Direction::Read => {
                libc::process_vm_readv(pid, ours.as_ptr(), our_count, theirs.as_ptr(), their_count, 0)
            }
            Direction::Write => {
                libc::process_vm_writev(pid, ours.as_ptr(), our_count, theirs.as_ptr(), their_count, 0)
            }
        }
    };
    u64::try_from(moved).unwrap_or(0)
}

fn part(addr: u64, len: u64) -> libc::iovec {
    libc::iovec { iov_base: addr as *mut libc::c_void, iov_len: len as usize }
}

/// The parts in which the kernel copies a local range, and their number. It copies a part with string instructions,
/// which may store in any order, but the parts one after the other. Programs that poll the last byte to learn of a
/// WRITE's arrival need that byte to come last. A READ has a completion for that.
///
/// The other end needs no parts: each of them would have the kernel find its page again.
pub(crate) fn local_parts(direction: Direction, range: HostRange) -> ([libc::iovec; 2], usize) {
    let last = if direction == Direction::Write { range.len.min(1) } else { 0 };
    let parts = [part(range.addr, range.len - last), part(range.addr + range.len - last, last)];
    (parts, 1 + last as usize)
}
