//! What the code that processes and threads share without a lock is built from. The models in `tests/*_model.rs`
//! replace this module with loom's types.

pub(crate) use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};

pub(crate) use terrace_sync::RwLock;

/// Bytes for the records of a ring. Small enough to stay in a processor's cache, and enough for about a hundred packets
/// of the largest MTU.
pub(crate) const RING_BYTES: u64 = 512 << 10;
/// Every header and the pad, generously.
pub(crate) const HEADERS_BYTES_MAX: usize = 512;
/// Longest packet, from the BTH to the pad: the largest MTU and the headers. A longer record is a run.
pub const PACKET_BYTES_MAX: usize = 4096 + HEADERS_BYTES_MAX;
/// Of a run this is copied first: its headers are in it.
pub(crate) const RUN_HEAD_BYTES: usize = 128;

/// A `fence(SeqCst)`: no load or store before it is delayed past one after it. The instruction that compilers use for
/// it on x86, `mfence`, also waits for stores to memory of other kinds, and takes ten times as long on some processors;
/// any locked instruction orders loads and stores of ordinary memory (AMD64 manual, volume 2, 7.1.3 and 7.4.2). The
/// kernel's `smp_mb` is this one. Decision 34.
#[inline(always)]
pub(crate) fn full_fence() {
    // SAFETY: changes nothing, wherever the stack pointer is: the word below it is the thread's own.
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    unsafe {
        std::arch::asm!("lock or dword ptr [rsp - 4], 0", options(nostack));
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    std::sync::atomic::fence(Ordering::SeqCst);
}
