//! The platform's primitives for the locks. The models in `tests/biased_model.rs` and `tests/futex_model.rs` replace
//! this module with loom's types.

pub(crate) use std::hint::spin_loop;
use std::sync::atomic::AtomicU8;
pub(crate) use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use lock_api::RawMutex as _;
use rustix::thread::futex;
use rustix::thread::{MembarrierCommand, membarrier, membarrier_query};

pub(crate) use crate::futex::Mutex;
pub(crate) use crate::words::RawMutex;

/// Consecutive acquisitions by one thread that bias a mutex for the first time. A revocation is a system call that
/// interrupts all running threads of the process.
pub(crate) const FIRST_BIAS_THRESHOLD: u32 = 1 << 10;

pub(crate) fn raw_mutex() -> RawMutex {
    RawMutex::INIT
}

/// Acquires the mutex without a guard, until [`unlock`].
pub(crate) fn lock(mutex: &RawMutex) {
    mutex.lock();
}

/// # Safety
/// The calling thread holds the mutex.
pub(crate) unsafe fn unlock(mutex: &RawMutex) {
    // SAFETY: the caller's.
    unsafe { mutex.unlock() };
}

/// Spins of a thread before it sleeps: most critical sections are shorter than going to sleep.
pub(crate) const SPINS: u32 = 100;

/// Sleeps until another thread wakes it, the word no longer holds `expected`, or the timeout expires.
pub(crate) fn sleep(word: &AtomicU32, expected: u32, timeout: Option<Duration>) {
    let timeout = timeout.map(|timeout| futex::Timespec {
        tv_sec: timeout.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: timeout.subsec_nanos().into(),
    });
    // Woken, changed, interrupted or timed out: the caller checks its condition.
    let _ = futex::wait(word, futex::Flags::PRIVATE, expected, timeout.as_ref());
}

/// Wakes at most `count` sleepers and returns how many it woke.
pub(crate) fn wake(word: &AtomicU32, count: u32) -> usize {
    // The call cannot fail for a mapped word.
    futex::wake(word, futex::Flags::PRIVATE, count).unwrap_or(0)
}

/// The count that wakes all sleepers. The kernel's count is signed.
pub(crate) const ALL: u32 = i32::MAX as u32;

/// A thread's wait for a mutex.
pub(crate) struct Wait(Instant);

/// The time after which a waiting thread gets the mutex reserved. Otherwise a thread that repeatedly releases and
/// acquires the mutex would starve the others, because it acquires the mutex again before they are awake.
const STARVATION_LIMIT: Duration = Duration::from_micros(500);

impl Wait {
    /// A wait that begins now.
    pub(crate) fn begin() -> Wait {
        Wait(Instant::now())
    }

    /// Whether the thread has waited for longer than [`STARVATION_LIMIT`].
    pub(crate) fn is_long(&self) -> bool {
        self.0.elapsed() > STARVATION_LIMIT
    }
}

/// Whether mutexes may be biased in this process.
static MAY_BIAS: AtomicU8 = AtomicU8::new(UNKNOWN);
const UNKNOWN: u8 = 0;
const YES: u8 = 1;
const NO: u8 = 2;

/// Allows biased mutexes in this process, where the kernel can revoke a bias: `membarrier(2)` with private expedited
/// barriers, Linux 4.14. The registration takes some milliseconds in a process that has threads already, so no
/// latency-critical thread should call this. Further calls do nothing.
pub fn allow_bias() {
    if MAY_BIAS.load(Ordering::Acquire) == UNKNOWN {
        let is_supported = has_token()
            && membarrier_query().contains_command(MembarrierCommand::RegisterPrivateExpedited)
            && register_and_try();
        MAY_BIAS.store(if is_supported { YES } else { NO }, Ordering::Release);
    }
}

fn register_and_try() -> bool {
    membarrier(MembarrierCommand::RegisterPrivateExpedited).is_ok()
        && membarrier(MembarrierCommand::PrivateExpedited).is_ok()
}

/// Whether mutexes may be biased.
pub(crate) fn may_bias() -> bool {
    MAY_BIAS.load(Ordering::Acquire) == YES
}

/// The biased thread's counterpart to [`heavy_barrier`].
#[inline(always)]
pub(crate) fn light_barrier() {
    std::sync::atomic::compiler_fence(Ordering::SeqCst);
}

/// Makes every thread of the process execute a full barrier during this call. A thread's accesses before its barrier
/// happen before the return of the call, and the caller's accesses before the call happen before those after the
/// barrier.
pub(crate) fn heavy_barrier() {
    if membarrier(MembarrierCommand::PrivateExpedited).is_err() && !register_and_try() {
        // The call worked in `allow_bias`; a system call filter may have been installed since. Other processors see a
        // processor's stores within microseconds.
        std::thread::sleep(FILTERED_WAIT);
    }
}

const FILTERED_WAIT: Duration = Duration::from_millis(20);

/// A number that no other living thread has: not 0, and a multiple of 64. Valid only if [`has_token`] returns true.
#[inline(always)]
pub(crate) fn token() -> usize {
    // The address of the thread's control block, which its first word holds (ELF handling for thread-local storage,
    // 3.4.6) and glibc aligns to 64. The address of a thread-local variable would also suffice, but a library needs a
    // call to get it.
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

/// Spins before sleeps. Most holders of a queue pair's lock release it sooner.
const SPINS_BEFORE_SLEEPS: u32 = 2000;
const SLEEP: Duration = Duration::from_micros(20);

/// Waits between two checks of a condition that another thread or process will change soon. `checks` is the number of
/// checks so far.
pub fn back_off(checks: u32) {
    if checks < SPINS_BEFORE_SLEEPS {
        std::hint::spin_loop();
    } else {
        std::thread::sleep(SLEEP);
    }
}
