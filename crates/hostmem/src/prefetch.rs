//! Hints to the processor's caches.

/// Has the processor load the cache line of an address, which may have no memory: nothing waits for it, and it takes no
/// page fault. Does nothing where the compiler has no such instruction.
#[inline(always)]
pub fn prefetch(addr: u64) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint about an address, which the processor ignores when nothing is mapped there.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(addr as *const i8);
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = addr;
}
