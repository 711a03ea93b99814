//! Locks that survive `fork`: each is one futex word, so the kernel keeps the waiters.
//!
//! `parking_lot` keeps waiters in a table of the process, which has locks of its own. In a child of `fork` those may be
//! held by a thread that the child does not have, or a lock may be handed to such a thread. Here a child only has to
//! release the locks that the forking thread held. The guards are `lock_api`'s, as in `parking_lot`.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use lock_api::{GuardSend, RawMutex as _};
use rustix::thread::futex;

/// A mutex.
pub type Mutex<T> = lock_api::Mutex<RawMutex, T>;
/// Holds a [`Mutex`] until it is dropped.
pub type MutexGuard<'a, T> = lock_api::MutexGuard<'a, RawMutex, T>;
/// The same, with an `Arc` of the mutex.
pub type ArcMutexGuard<T> = lock_api::ArcMutexGuard<RawMutex, T>;
/// A lock with many readers or one writer. A waiting writer goes before readers that come later, so no thread may read
/// recursively.
pub type RwLock<T> = lock_api::RwLock<RawRwLock, T>;
/// Holds an [`RwLock`] for reading until it is dropped.
pub type RwLockReadGuard<'a, T> = lock_api::RwLockReadGuard<'a, RawRwLock, T>;
/// Holds an [`RwLock`] for writing until it is dropped, with an `Arc` of it.
pub type ArcRwLockWriteGuard<T> = lock_api::ArcRwLockWriteGuard<RawRwLock, T>;

/// Spins before a sleep: most critical sections of these locks are shorter than going to sleep.
const SPINS: u32 = 100;

/// Sleeps until another thread wakes it, the word no longer holds `expected`, or the time is over.
fn sleep(word: &AtomicU32, expected: u32, patience: Option<Duration>) {
    let patience = patience.map(|left| futex::Timespec {
        tv_sec: left.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: left.subsec_nanos().into(),
    });
    // Woken, changed, interrupted or timed out: the caller checks its condition.
    let _ = futex::wait(word, futex::Flags::PRIVATE, expected, patience.as_ref());
}

/// Wakes at most `count` sleepers and returns how many it woke.
fn wake(word: &AtomicU32, count: u32) -> usize {
    // Cannot fail for a word that is mapped.
    futex::wake(word, futex::Flags::PRIVATE, count).unwrap_or(0)
}

/// All sleepers; the kernel's count is signed.
const ALL: u32 = i32::MAX as u32;

/// The word of a [`Mutex`]. A waiting thread only ever raises the state, in this order.
pub struct RawMutex {
    state: AtomicU32,
}

const FREE: u32 = 0;
/// Free, but for a thread that has waited and was woken.
const RESERVED: u32 = 1;
const TAKEN: u32 = 2;
/// Taken, perhaps with sleepers.
const AWAITED: u32 = 3;
/// Taken, and a thread has waited for longer than [`PATIENCE`].
const STARVED: u32 = 4;

/// How long a thread may be overtaken. A thread that takes the mutex again and again would starve others: it is back
/// before they are awake.
const PATIENCE: Duration = Duration::from_micros(500);

impl RawMutex {
    #[cold]
    fn lock_slow(&self) {
        for _ in 0..SPINS {
            match self.state.load(Ordering::Relaxed) {
                FREE if self.try_lock() => return,
                AWAITED | STARVED => break,
                _ => std::hint::spin_loop(),
            }
        }
        let mut mark = AWAITED;
        let mut began = None;
        loop {
            let before = self.state.fetch_max(mark, Ordering::Acquire);
            if before < TAKEN {
                return;
            }
            let began = *began.get_or_insert_with(Instant::now);
            sleep(&self.state, before.max(mark), None);
            if began.elapsed() > PATIENCE {
                mark = STARVED;
            }
        }
    }

    #[cold]
    fn unlock_slow(&self, before: u32) {
        let free_to = |from, to| self.state.compare_exchange(from, to, Ordering::Relaxed, Ordering::Relaxed);
        let is_reserved = before == STARVED && free_to(FREE, RESERVED).is_ok();
        if wake(&self.state, 1) == 0 && is_reserved {
            // No thread sleeps. In a child of `fork` no woken thread will come to take the reservation.
            let _ = free_to(RESERVED, FREE);
        }
    }
}

// SAFETY: `state` rises from below TAKEN by one thread's compare-and-swap or `fetch_max` at a time, and falls below it
// only by `unlock`.
unsafe impl lock_api::RawMutex for RawMutex {
    const INIT: RawMutex = RawMutex { state: AtomicU32::new(FREE) };

    type GuardMarker = GuardSend;

    #[inline]
    fn lock(&self) {
        if !self.try_lock() {
            self.lock_slow();
        }
    }

    #[inline]
    fn try_lock(&self) -> bool {
        self.state.compare_exchange(FREE, TAKEN, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    #[inline]
    unsafe fn unlock(&self) {
        let before = self.state.swap(FREE, Ordering::Release);
        if before != TAKEN {
            self.unlock_slow(before);
        }
    }

    #[inline]
    fn is_locked(&self) -> bool {
        self.state.load(Ordering::Relaxed) >= TAKEN
    }
}

/// The word of an [`RwLock`].
///
/// ```text
///   bit 31            bit 30           bits 0 to 29
///   a writer waits    threads sleep    readers; all ones: a writer
/// ```
/// A thread sets bit 30 before it sleeps. The thread that leaves the lock free while bit 30 is set clears it and wakes
/// all sleepers. Readers do not enter while bit 31 is set. A writer clears bit 31 when it enters or leaves; other
/// waiting writers set it again when they check the word.
pub struct RawRwLock {
    state: AtomicU32,
}

const HOLDERS: u32 = (1 << 30) - 1;
const WRITER: u32 = HOLDERS;
const SLEEPERS: u32 = 1 << 30;
const WRITER_WAITS: u32 = 1 << 31;

impl RawRwLock {
    /// The state after a reader enters; `None` if it may not.
    fn with_reader(state: u32) -> Option<u32> {
        // Not `then_some`: a word with all bits set has no successor.
        (state & WRITER_WAITS == 0 && state & HOLDERS < WRITER - 1).then(|| state + 1)
    }

    /// The state after a writer enters; `None` if it may not.
    fn with_writer(state: u32) -> Option<u32> {
        (state & HOLDERS == 0).then_some((state & SLEEPERS) | WRITER)
    }

    fn try_enter(&self, entered: fn(u32) -> Option<u32>) -> bool {
        self.state.fetch_update(Ordering::Acquire, Ordering::Relaxed, entered).is_ok()
    }

    /// Sleeps, with `bits` set, until it may enter.
    #[cold]
    fn enter_slow(&self, entered: fn(u32) -> Option<u32>, bits: u32) {
        for _ in 0..SPINS {
            if self.try_enter(entered) {
                return;
            }
            std::hint::spin_loop();
        }
        loop {
            let mark = |state| entered(state).is_none().then_some(state | bits);
            match self.state.fetch_update(Ordering::Relaxed, Ordering::Relaxed, mark) {
                Ok(before) => sleep(&self.state, before | bits, None),
                Err(_) if self.try_enter(entered) => return,
                Err(_) => {}
            }
        }
    }

    /// Called when no reader is left: wakes the sleepers. A waiting writer goes first.
    #[cold]
    fn wake_sleepers(&self) {
        let no_sleepers =
            |state| (state & HOLDERS == 0 && state & SLEEPERS != 0).then_some(state & !SLEEPERS);
        if self.state.fetch_update(Ordering::Relaxed, Ordering::Relaxed, no_sleepers).is_ok() {
            wake(&self.state, ALL);
        }
    }
}

// SAFETY: a writer enters only while there are no holders, and readers only while there is no writer; each leaves once.
unsafe impl lock_api::RawRwLock for RawRwLock {
    const INIT: RawRwLock = RawRwLock { state: AtomicU32::new(0) };

    type GuardMarker = GuardSend;

    #[inline]
    fn lock_shared(&self) {
        if !self.try_lock_shared() {
            self.enter_slow(RawRwLock::with_reader, SLEEPERS);
        }
    }

    #[inline]
    fn try_lock_shared(&self) -> bool {
        self.try_enter(RawRwLock::with_reader)
    }

    #[inline]
    unsafe fn unlock_shared(&self) {
        let left = self.state.fetch_sub(1, Ordering::Release) - 1;
        if left & HOLDERS == 0 && left & SLEEPERS != 0 {
            self.wake_sleepers();
        }
    }

    #[inline]
    fn lock_exclusive(&self) {
        if !self.try_lock_exclusive() {
            self.enter_slow(RawRwLock::with_writer, SLEEPERS | WRITER_WAITS);
        }
    }

    #[inline]
    fn try_lock_exclusive(&self) -> bool {
        self.try_enter(RawRwLock::with_writer)
    }

    #[inline]
    unsafe fn unlock_exclusive(&self) {
        // Sleepers set their bits again when they wake. In a child of `fork` the parent's sleepers do not exist, so the
        // bits stay clear.
        if self.state.swap(0, Ordering::Release) & SLEEPERS != 0 {
            wake(&self.state, ALL);
        }
    }

    #[inline]
    fn is_locked(&self) -> bool {
        self.state.load(Ordering::Relaxed) & HOLDERS != 0
    }

    #[inline]
    fn is_locked_exclusive(&self) -> bool {
        self.state.load(Ordering::Relaxed) & HOLDERS == WRITER
    }
}

/// A condition variable for [`Mutex`].
#[derive(Debug, Default)]
pub struct Condvar {
    /// Changes with every notification.
    calls: AtomicU32,
}

impl Condvar {
    /// A condition variable without waiters.
    pub const fn new() -> Condvar {
        Condvar { calls: AtomicU32::new(0) }
    }

    /// Wakes all waiters.
    pub fn notify_all(&self) {
        self.notify(ALL);
    }

    /// Wakes one waiter.
    pub fn notify_one(&self) {
        self.notify(1);
    }

    fn notify(&self, count: u32) {
        self.calls.fetch_add(1, Ordering::Relaxed);
        wake(&self.calls, count);
    }

    /// Waits for a notification. It may wake without one.
    pub fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        self.wait_at_most(guard, None);
    }

    /// The same, for at most `patience`.
    pub fn wait_for<T>(&self, guard: &mut MutexGuard<'_, T>, patience: Duration) {
        self.wait_at_most(guard, Some(patience));
    }

    /// The same, until `deadline`. True if the deadline has passed.
    pub fn wait_until<T>(&self, guard: &mut MutexGuard<'_, T>, deadline: Instant) -> bool {
        self.wait_at_most(guard, Some(deadline.saturating_duration_since(Instant::now())));
        Instant::now() >= deadline
    }

    fn wait_at_most<T>(&self, guard: &mut MutexGuard<'_, T>, patience: Option<Duration>) {
        // A notifier changes the condition under the mutex, so it notifies after this load.
        let calls = self.calls.load(Ordering::Relaxed);
        MutexGuard::unlocked(guard, || sleep(&self.calls, calls, patience));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;
    use std::thread;

    use super::*;

    const THREADS: usize = 4;
    const ROUNDS: u64 = 20_000;

    #[test]
    fn a_mutex_has_one_holder() {
        let mutex = Mutex::new(0_u64);
        thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| {
                    for round in 0..ROUNDS {
                        let mut value = mutex.lock();
                        let before = *value;
                        if round.is_multiple_of(64) {
                            thread::yield_now();
                        }
                        *value = before + 1;
                    }
                });
            }
        });
        assert_eq!(*mutex.lock(), THREADS as u64 * ROUNDS);
        let held = mutex.lock();
        assert!(mutex.try_lock().is_none() && mutex.is_locked());
        drop(held);
        assert!(!mutex.is_locked());
    }

    #[test]
    fn a_thread_that_takes_it_again_at_once_does_not_keep_others_out() {
        let (mutex, done) = (Mutex::new(()), AtomicBool::new(false));
        thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    let _held = mutex.lock();
                    let until = Instant::now() + Duration::from_millis(1);
                    while Instant::now() < until {
                        std::hint::spin_loop();
                    }
                }
            });
            for _ in 0..100 {
                drop(mutex.lock());
            }
            done.store(true, Ordering::Relaxed);
        });
        assert!(mutex.try_lock().is_some());
    }

    #[test]
    fn what_a_child_inherits_with_waiters_that_it_does_not_have_is_free_once_it_is_given_back() {
        // The words as a child inherits them: they say that threads wait, and no thread does.
        let mutex: Mutex<()> = Mutex::new(());
        for state in [AWAITED, STARVED] {
            // SAFETY: the mutex is this thread's own.
            unsafe { mutex.raw() }.state.store(state, Ordering::Relaxed);
            // SAFETY: this thread holds it.
            unsafe { mutex.force_unlock() };
            assert!(mutex.try_lock().is_some(), "{state}");
        }
        let lock: RwLock<()> = RwLock::new(());
        // SAFETY: the lock is this thread's own.
        unsafe { lock.raw() }.state.store(WRITER | SLEEPERS | WRITER_WAITS, Ordering::Relaxed);
        // SAFETY: this thread holds it.
        unsafe { lock.force_unlock_write() };
        assert!(lock.try_read().is_some());
    }

    #[test]
    fn no_reader_enters_while_a_writer_has_it_and_others_wait() {
        let lock: RwLock<()> = RwLock::new(());
        // SAFETY: the lock is this thread's own.
        unsafe { lock.raw() }.state.store(WRITER | SLEEPERS | WRITER_WAITS, Ordering::Relaxed);
        assert!(lock.try_read().is_none() && lock.try_write().is_none());
    }

    #[test]
    fn a_writer_is_alone_and_readers_see_what_it_has_written() {
        let pair = RwLock::new((0_u64, 0_u64));
        thread::scope(|scope| {
            for number in 0..THREADS {
                let pair = &pair;
                scope.spawn(move || {
                    for round in 0..ROUNDS {
                        if (number as u64 + round).is_multiple_of(4) {
                            let mut pair = pair.write();
                            pair.0 += 1;
                            if round.is_multiple_of(64) {
                                thread::yield_now();
                            }
                            pair.1 += 1;
                        } else {
                            let pair = pair.read();
                            assert_eq!(pair.0, pair.1);
                        }
                    }
                });
            }
        });
        let pair = pair.read();
        assert_eq!(*pair, (THREADS as u64 * ROUNDS / 4, THREADS as u64 * ROUNDS / 4));
    }

    #[test]
    fn readers_without_end_do_not_keep_a_writer_out() {
        let (lock, done) = (RwLock::new(()), AtomicBool::new(false));
        thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| {
                    let mut mine = lock.read();
                    while !done.load(Ordering::Relaxed) {
                        // At any time at least one thread reads.
                        thread::yield_now();
                        drop(mine);
                        mine = lock.read();
                    }
                });
            }
            for _ in 0..100 {
                drop(lock.write());
            }
            done.store(true, Ordering::Relaxed);
        });
    }

    #[test]
    fn what_is_tried_and_not_got_leaves_no_trace() {
        let lock = Arc::new(RwLock::new(1));
        let read = lock.read();
        assert!(lock.try_write().is_none() && lock.try_read().is_some());
        drop(read);
        let write = lock.write_arc();
        assert!(lock.try_read().is_none() && lock.try_write().is_none() && lock.is_locked_exclusive());
        drop(write);
        assert!(lock.try_write().is_some() && !lock.is_locked());
    }

    #[test]
    fn a_condition_is_waited_for_until_it_is_so_or_it_is_too_late() {
        let (queue, more) = (Mutex::new(Vec::new()), Condvar::new());
        thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| {
                    for _ in 0..1000 {
                        let mut queue = queue.lock();
                        while queue.pop().is_none() {
                            more.wait(&mut queue);
                        }
                    }
                });
            }
            for number in 0..THREADS * 1000 {
                queue.lock().push(number);
                more.notify_one();
            }
        });
        let mut queue = queue.lock();
        assert!(queue.is_empty());
        more.wait_for(&mut queue, Duration::from_millis(1));
        let deadline = Instant::now() + Duration::from_millis(2);
        while !more.wait_until(&mut queue, deadline) {}
        assert!(Instant::now() >= deadline);
    }
}
