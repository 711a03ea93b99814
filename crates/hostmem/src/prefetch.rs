//! Hints to the processor's caches. An address may have no memory: nothing waits for it, and there is no page fault. They do
//! nothing where the compiler has no such instruction.

/// Has the processor load the cache line of an address, to be read.
#[inline(always)]
pub fn prefetch(addr: u64) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: a hint about an address, which the processor ignores when nothing is mapped there.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(addr as *const i8);
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = addr;
}

/// The same, to be written.
#[inline(always)]
pub fn prefetch_to_write(addr: u64) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // By name: where the intrinsic may not assume that this instruction exists, it prefetches a shared line. 64-bit
    // processors without the instruction do nothing.
    // SAFETY: a hint, that reads and writes nothing and cannot fault.
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) addr, options(nostack, preserves_flags));
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = addr;
}
