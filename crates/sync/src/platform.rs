//! What leaning is made of. The model in `tests/biased_model.rs` puts loom's types in this module's place.

use std::sync::atomic::AtomicU8;
pub(crate) use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::time::Duration;

use lock_api::RawMutex as _;
use rustix::thread::{MembarrierCommand, membarrier, membarrier_query};

pub(crate) use crate::futex::RawMutex;

/// How often a thread takes a mutex, and nobody else does, before it leans to that thread for the first time. Taking it away again
/// is a system call that interrupts all running threads of the process.
pub(crate) const FIRST_BIAS_THRESHOLD: u32 = 1 << 10;

pub(crate) fn raw_mutex() -> RawMutex {
    RawMutex::INIT
}

/// Takes it for good, until somebody calls [`unlock`].
pub(crate) fn lock(mutex: &RawMutex) {
    mutex.lock();
}

/// # Safety
/// The calling thread has it.
pub(crate) unsafe fn unlock(mutex: &RawMutex) {
    // SAFETY: the caller's.
    unsafe { mutex.unlock() };
}

/// Whether mutexes may lean in this process.
static MAY_LEAN: AtomicU8 = AtomicU8::new(UNKNOWN);
const UNKNOWN: u8 = 0;
const YES: u8 = 1;
const NO: u8 = 2;

/// Lets mutexes lean from now on, where the system can take them back: `membarrier(2)` with private expedited barriers, Linux 4.14.
/// To ask for those takes a process that has threads already some milliseconds, so this is not for the threads that are in a hurry.
/// Calling it again does nothing.
pub fn allow_bias() {
    if MAY_LEAN.load(Ordering::Acquire) == UNKNOWN {
        let can = has_token()
            && membarrier_query().contains_command(MembarrierCommand::RegisterPrivateExpedited)
            && register_and_try();
        MAY_LEAN.store(if can { YES } else { NO }, Ordering::Release);
    }
}

fn register_and_try() -> bool {
    membarrier(MembarrierCommand::RegisterPrivateExpedited).is_ok()
        && membarrier(MembarrierCommand::PrivateExpedited).is_ok()
}

/// Whether mutexes may lean.
pub(crate) fn may_bias() -> bool {
    MAY_LEAN.load(Ordering::Acquire) == YES
}

/// The thread's part of what [`heavy_barrier`] is for the others.
#[inline(always)]
pub(crate) fn light_barrier() {
    std::sync::atomic::compiler_fence(Ordering::SeqCst);
}

/// For every thread of the process, what it did before some moment during this call is seen by the caller afterwards, and what
/// the caller did before is seen by what it does after that moment.
pub(crate) fn heavy_barrier() {
    if membarrier(MembarrierCommand::PrivateExpedited).is_err() && !register_and_try() {
        // It was possible when leaning began; a filter for system calls may have come since. What a processor has stored is seen
        // by others within microseconds.
        std::thread::sleep(FILTERED_WAIT);
    }
}

const FILTERED_WAIT: Duration = Duration::from_millis(20);

/// A number that no other living thread has: not 0, and a multiple of 64. Only where [`has_token`].
#[inline(always)]
pub(crate) fn token() -> usize {
    // The address of the thread's control block, which its first word holds (ELF handling for thread-local storage, 3.4.6) and glibc
    // aligns to 64. A thread-local variable's address would do, but for a library that takes a call.
    #[cfg(all(target_arch = "x86_64", target_os = "linux", not(miri)))]
    {
        let token: usize;
        // SAFETY: a load of a word that every thread has.
        unsafe {
            std::arch::asm!("mov {}, qword ptr fs:[0]", out(reg) token, options(pure, readonly, nostack, preserves_flags));
        }
        token
    }
    #[cfg(not(all(target_arch = "x86_64", target_os = "linux", not(miri))))]
    {
        64
    }
}

fn has_token() -> bool {
    cfg!(all(target_arch = "x86_64", target_os = "linux", not(miri))) && token().is_multiple_of(64)
}

/// How often to look again before sleeping in between: longer than most things take for which queue pairs are locked.
const SPINS: u32 = 2000;
const NAP: Duration = Duration::from_micros(20);

/// What to do between two looks at something that another thread or process will change soon, when one has looked so often.
pub fn wait_a_little(looks: u32) {
    if looks < SPINS {
        std::hint::spin_loop();
    } else {
        std::thread::sleep(NAP);
    }
}
