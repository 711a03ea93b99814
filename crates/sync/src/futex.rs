//! Locks that survive `fork`: each is one futex word, and the kernel keeps the waiters.
//!
//! `parking_lot` keeps waiters in a table of the process, which has locks of its own. In a child of `fork`, a thread
//! that the child does not have may hold those locks, or a lock may be handed to such a thread. With these locks a
//! child only has to release the locks that the forking thread held. The guards are `lock_api`'s, as in `parking_lot`.

use std::time::{Duration, Instant};

use lock_api::GuardSend;

use crate::platform::{ALL, AtomicU32};
use crate::words::{FREE, Notifications};
pub use crate::words::{RawMutex, RawRwLock};

/// A mutex.
pub type Mutex<T> = lock_api::Mutex<RawMutex, T>;
/// Holds a [`Mutex`] until it is dropped.
pub type MutexGuard<'a, T> = lock_api::MutexGuard<'a, RawMutex, T>;
/// As [`MutexGuard`], with an `Arc` of the mutex.
pub type ArcMutexGuard<T> = lock_api::ArcMutexGuard<RawMutex, T>;
/// A lock with many readers or one writer. A waiting writer has priority over later readers, so no thread may read
/// recursively.
pub type RwLock<T> = lock_api::RwLock<RawRwLock, T>;
/// Holds an [`RwLock`] for reading until it is dropped.
pub type RwLockReadGuard<'a, T> = lock_api::RwLockReadGuard<'a, RawRwLock, T>;
/// Holds an [`RwLock`] for writing until it is dropped, with an `Arc` of it.
pub type ArcRwLockWriteGuard<T> = lock_api::ArcRwLockWriteGuard<RawRwLock, T>;

// SAFETY: only one thread's compare-and-swap raises `state` from below TAKEN, and only `unlock` lowers
// it below TAKEN.
unsafe impl lock_api::RawMutex for RawMutex {
    const INIT: RawMutex = RawMutex { state: AtomicU32::new(FREE) };

    type GuardMarker = GuardSend;

    #[inline]
    fn lock(&self) {
        self.acquire();
    }

    #[inline]
    fn try_lock(&self) -> bool {
        self.try_acquire()
    }

    #[inline]
    unsafe fn unlock(&self) {
        self.release();
    }

    #[inline]
    fn is_locked(&self) -> bool {
        self.is_taken()
    }
}

// SAFETY: a writer acquires the lock only while there are no holders, and readers only while there is no writer. Each
// releases it once.
unsafe impl lock_api::RawRwLock for RawRwLock {
    const INIT: RawRwLock = RawRwLock { state: AtomicU32::new(0) };

    type GuardMarker = GuardSend;

    #[inline]
    fn lock_shared(&self) {
        self.acquire_shared();
    }

    #[inline]
    fn try_lock_shared(&self) -> bool {
        self.try_acquire_shared()
    }

    #[inline]
    unsafe fn unlock_shared(&self) {
        self.release_shared();
    }

    #[inline]
    fn lock_exclusive(&self) {
        self.acquire_exclusive();
    }

    #[inline]
    fn try_lock_exclusive(&self) -> bool {
        self.try_acquire_exclusive()
    }

    #[inline]
    unsafe fn unlock_exclusive(&self) {
        self.release_exclusive();
    }

    #[inline]
    fn is_locked(&self) -> bool {
        self.has_holders()
    }

    #[inline]
    fn is_locked_exclusive(&self) -> bool {
        self.has_writer()
    }
}

/// A condition variable for [`Mutex`].
#[derive(Debug)]
pub struct Condvar {
    notifications: Notifications,
}

impl Default for Condvar {
    fn default() -> Condvar {
        Condvar::new()
    }
}

impl Condvar {
    /// A condition variable without waiters.
    pub const fn new() -> Condvar {
        Condvar { notifications: Notifications(AtomicU32::new(0)) }
    }

    /// Wakes all waiters.
    pub fn notify_all(&self) {
        self.notifications.notify(ALL);
    }

    /// Wakes one waiter.
    pub fn notify_one(&self) {
        self.notifications.notify(1);
    }

    /// Waits for a notification. Wakeups may be spurious.
    pub fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        self.wait_at_most(guard, None);
    }

    /// As [`Condvar::wait`], for at most `timeout`.
    pub fn wait_for<T>(&self, guard: &mut MutexGuard<'_, T>, timeout: Duration) {
        self.wait_at_most(guard, Some(timeout));
    }

    /// As [`Condvar::wait`], until `deadline`. Returns true if the deadline has passed.
    pub fn wait_until<T>(&self, guard: &mut MutexGuard<'_, T>, deadline: Instant) -> bool {
        self.wait_at_most(guard, Some(deadline.saturating_duration_since(Instant::now())));
        Instant::now() >= deadline
    }

    fn wait_at_most<T>(&self, guard: &mut MutexGuard<'_, T>, timeout: Option<Duration>) {
        let count = self.notifications.count();
        MutexGuard::unlocked(guard, || self.notifications.wait(count, timeout));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;

    use super::*;
    use crate::words::{CONTENDED, SLEEPERS, STARVED, WRITER, WRITER_WAITS};

    const THREADS: usize = 4;
    const ROUNDS: u64 = 20_000;

    #[test]
    fn mutual_exclusion_holds() {
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
    fn a_thread_that_reacquires_a_mutex_starves_no_other() {
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
    fn an_inherited_lock_without_its_waiters_is_free_after_release() {
        // The words are as a child inherits them: they indicate waiters, but there are none.
        let mutex: Mutex<()> = Mutex::new(());
        for state in [CONTENDED, STARVED] {
            // SAFETY: the mutex is this thread's own.
            unsafe { mutex.raw() }.state.store(state, Ordering::Relaxed);
            // SAFETY: this thread holds the lock.
            unsafe { mutex.force_unlock() };
            assert!(mutex.try_lock().is_some(), "{state}");
        }
        let lock: RwLock<()> = RwLock::new(());
        // SAFETY: the lock is this thread's own.
        unsafe { lock.raw() }.state.store(WRITER | SLEEPERS | WRITER_WAITS, Ordering::Relaxed);
        // SAFETY: this thread holds the lock.
        unsafe { lock.force_unlock_write() };
        assert!(lock.try_read().is_some());
    }

    #[test]
    fn no_reader_acquires_a_lock_with_a_writer_and_waiters() {
        let lock: RwLock<()> = RwLock::new(());
        // SAFETY: the lock is this thread's own.
        unsafe { lock.raw() }.state.store(WRITER | SLEEPERS | WRITER_WAITS, Ordering::Relaxed);
        assert!(lock.try_read().is_none() && lock.try_write().is_none());
    }

    #[test]
    fn writers_exclude_readers_and_their_writes_are_visible() {
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
    fn overlapping_readers_do_not_starve_a_writer() {
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
    fn a_failed_try_lock_leaves_the_state_unchanged() {
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
    fn condition_variables_wake_by_notification_or_timeout() {
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
