//! Copies and atomics on memory that may not be there.
//!
//! On x86-64 they are routines of our own (`x86_64.rs`): the SIGSEGV and SIGBUS handlers know their instruction
//! addresses and, when one of them faults, continue at a place that returns an error. Without a fault that costs
//! nothing. Elsewhere the kernel copies for us (`portable.rs`).
//!
//! # Signals
//! The kernel kills the process when a fault happens while SIGSEGV (or SIGBUS) is *blocked* in the faulting thread, or
//! while our handler is not the installed one. So:
//! - [`install`] puts our handlers in front of what the program had installed. A fault that is not ours goes on to the
//!   program's handler, or has the default effect, as if we were not there.
//! - A library that interposes `sigaction` and `signal` calls [`note_program_handler`] instead of the real function, so
//!   that ours stays in front when the program installs one later.
//! - Each thread unblocks both signals when it first copies, because threads inherit masks. A program may block them
//!   later: a library that interposes `sigprocmask`, `pthread_sigmask` and `sigaction` (for `sa_mask`) passes sets that
//!   are about to be blocked through [`sanitize_mask`].
//!
//! Interposition does not see raw system calls by which the program blocks or replaces the signals.

mod handler;
mod mask;
#[cfg_attr(target_arch = "x86_64", allow(dead_code, reason = "kept compiling where only tests use it"))]
mod portable;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod x86_64;

use crate::atomic_op::AtomicOp;

pub use handler::{explain_bus_errors, install, note_process, note_program_handler};
pub use mask::{sanitize_mask, unblock_in_this_thread};

#[cfg(not(target_arch = "x86_64"))]
use portable as machine;
#[cfg(target_arch = "x86_64")]
use x86_64 as machine;

/// The memory was not accessible.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[error("the memory is not accessible")]
pub struct Fault;

/// Copies from the program's memory at `source`. Naturally aligned parts of the source of up to 8 bytes are each read
/// with one load.
///
/// # Errors
/// [`Fault`] when part of the source is not readable; `out` is then partly written.
///
/// # Safety
/// `source .. source + out.len()` is memory to which no exclusive Rust reference exists, or no memory at all.
#[inline]
pub unsafe fn copy_from(source: u64, out: &mut [u8]) -> Result<(), Fault> {
    mask::unblock_once();
    // SAFETY: `out` is writable and ours; the source is as the caller promises.
    unsafe { machine::copy(out.as_mut_ptr() as u64, source, out.len(), source) }
}

/// Copies to the program's memory at `target`, ascending, the last byte last. Naturally aligned parts of the target of
/// up to 8 bytes are each written with one store.
///
/// # Errors
/// [`Fault`] when part of the target is not writable; the bytes before the fault are then written.
///
/// # Safety
/// `target .. target + data.len()` is memory that may be overwritten, or no memory at all.
#[inline]
pub unsafe fn copy_to(target: u64, data: &[u8]) -> Result<(), Fault> {
    mask::unblock_once();
    // SAFETY: `data` is readable; the target is as the caller promises.
    unsafe { machine::copy(target, data.as_ptr() as u64, data.len(), target) }
}

/// Copies between two places that may both not be there, ascending, the last byte last. The anchor is one of the two;
/// naturally aligned parts of it of up to 8 bytes are each accessed with one load or store.
///
/// # Errors
/// [`Fault`] when part of the source is not readable, or of the target not writable; the bytes before the fault are
/// then written.
///
/// # Safety
/// `target .. target + len` is memory that may be overwritten, and no exclusive Rust reference exists to
/// `source .. source + len`; or there is no memory.
#[inline(always)]
pub unsafe fn copy_across(target: u64, source: u64, len: usize, anchor: u64) -> Result<(), Fault> {
    mask::unblock_once();
    // SAFETY: as the caller promises.
    unsafe { machine::copy(target, source, len, anchor) }
}

/// Copies from the program's memory at `source` to memory that other threads may access, or the other way round, in any
/// order and in accesses of any size: for long copies between processors, of data that nobody reads before the copy is
/// done. Where the processor has fast string instructions it does not fetch
/// the lines that it overwrites from the other processor's cache
/// ([decision 48](../../../../docs/decisions/0048-string-instructions-between-processors.md)).
///
/// # Errors
/// [`Fault`] when part of the source is not readable, or of the target not writable; any bytes may then be written.
///
/// # Safety
/// As for [`copy_across`].
#[inline]
pub unsafe fn copy_unordered(target: u64, source: u64, len: usize) -> Result<(), Fault> {
    mask::unblock_once();
    // SAFETY: as the caller promises.
    unsafe { machine::copy_unordered(target, source, len) }
}

/// Performs an atomic operation on the 8 bytes at `addr`; returns their old value.
///
/// # Errors
/// [`Fault`] when the bytes are not readable and writable.
///
/// # Safety
/// As for [`compare_swap`].
#[inline]
pub unsafe fn atomic(addr: u64, op: AtomicOp) -> Result<u64, Fault> {
    // SAFETY: as the caller promises.
    unsafe {
        match op {
            AtomicOp::CompareSwap { compare, swap: new } => compare_swap(addr, compare, new),
            AtomicOp::FetchAdd { add } => fetch_add(addr, add),
            AtomicOp::Write { value } => swap(addr, value),
            AtomicOp::MaskedCompareSwap { .. } | AtomicOp::MaskedFetchAdd { .. } => masked(addr, op),
        }
    }
}

/// Performs an operation for which processors have no instruction.
///
/// # Safety
/// As for [`compare_swap`].
#[inline(never)]
unsafe fn masked(addr: u64, op: AtomicOp) -> Result<u64, Fault> {
    // SAFETY: as the caller promises.
    let mut before = unsafe { fetch_add(addr, 0)? };
    // Another round needs a change of the word by somebody else between two instructions: a stopped process makes none.
    loop {
        // SAFETY: the same.
        let seen = unsafe { compare_swap(addr, before, op.apply(before))? };
        if seen == before {
            return Ok(before);
        }
        before = seen;
    }
}

/// Stores `swap` if the 8 bytes at `addr` hold `compare`; returns their old value.
///
/// # Errors
/// [`Fault`] when the bytes are not readable and writable.
///
/// # Safety
/// `addr` is a multiple of 8, and memory that may be overwritten, or no memory at all.
#[inline]
pub unsafe fn compare_swap(addr: u64, compare: u64, swap: u64) -> Result<u64, Fault> {
    mask::unblock_once();
    // SAFETY: as the caller promises.
    unsafe { machine::compare_swap(addr, compare, swap) }
}

/// Adds `add` to the 8 bytes at `addr`, modulo 2^64; returns their old value.
///
/// # Errors
/// [`Fault`] when the bytes are not readable and writable.
///
/// # Safety
/// As for [`compare_swap`].
#[inline]
pub unsafe fn fetch_add(addr: u64, add: u64) -> Result<u64, Fault> {
    mask::unblock_once();
    // SAFETY: as the caller promises.
    unsafe { machine::fetch_add(addr, add) }
}

/// Stores `value` to the 8 bytes at `addr`; returns their old value.
///
/// # Errors
/// [`Fault`] when the bytes are not readable and writable.
///
/// # Safety
/// As for [`compare_swap`].
#[inline]
pub unsafe fn swap(addr: u64, value: u64) -> Result<u64, Fault> {
    mask::unblock_once();
    // SAFETY: as the caller promises.
    unsafe { machine::swap(addr, value) }
}
