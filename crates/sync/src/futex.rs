//! Locks that a process may fork over: each is one word, and its waiters are in the kernel.
//!
//! A lock of `parking_lot` keeps its waiters in a table of the process, which has locks of its own: in a child of `fork` those may be
//! taken by a thread that the child does not have, and a lock be handed to one. Here a child that gives back what the forking thread
//! has held is done with it. The guards are `lock_api`'s, as there.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use lock_api::{GuardSend, RawMutex as _};
use rustix::thread::futex;

/// A mutex.
pub type Mutex<T> = lock_api::Mutex<RawMutex, T>;
/// Has a [`Mutex`] until it is dropped.
pub type MutexGuard<'a, T> = lock_api::MutexGuard<'a, RawMutex, T>;
/// The same, with a share of it.
pub type ArcMutexGuard<T> = lock_api::ArcMutexGuard<RawMutex, T>;
/// A lock with many readers or one writer. A writer that waits comes before readers that come later, so no thread may read twice.
pub type RwLock<T> = lock_api::RwLock<RawRwLock, T>;
/// Reads what is in an [`RwLock`] until it is dropped.
pub type RwLockReadGuard<'a, T> = lock_api::RwLockReadGuard<'a, RawRwLock, T>;
/// Writes what is in an [`RwLock`] until it is dropped, with a share of that.
pub type ArcRwLockWriteGuard<T> = lock_api::ArcRwLockWriteGuard<RawRwLock, T>;

/// How often to look again before sleeping: what is done with these locks takes less than going to sleep does.
const SPINS: u32 = 100;

/// Sleeps until another thread wakes, unless the word has changed by now.
fn sleep(word: &AtomicU32, expected: u32, patience: Option<Duration>) {
    let patience = patience.map(|left| futex::Timespec {
        tv_sec: left.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: left.subsec_nanos().into(),
    });
    // Woken, changed, interrupted or too late: the caller looks.
    let _ = futex::wait(word, futex::Flags::PRIVATE, expected, patience.as_ref());
}

/// Wakes at most so many that sleep. How many there were.
fn wake(word: &AtomicU32, count: u32) -> usize {
    // Fails for no word that is there.
    futex::wake(word, futex::Flags::PRIVATE, count).unwrap_or(0)
}

/// As many as there are; the kernel's number is signed.
const ALL: u32 = i32::MAX as u32;

/// What a [`Mutex`] is locked by. Its states are in the order in which a thread that waits may raise them.
pub struct RawMutex {
    state: AtomicU32,
}

const FREE: u32 = 0;
/// Free for a thread that has waited, which is on its way.
const RESERVED: u32 = 1;
const TAKEN: u32 = 2;
/// Taken, and perhaps somebody sleeps.
const AWAITED: u32 = 3;
/// Taken, and somebody has waited for long.
const STARVED: u32 = 4;

/// How long a thread waits before it is not overtaken any more. One that takes the mutex again and again would keep others out for ever:
/// it is sooner back than they are awake.
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
            // Nobody sleeps. In a child of `fork`, nobody will come.
            let _ = free_to(RESERVED, FREE);
        }
    }
}

// SAFETY: `state` rises from below TAKEN by one thread's compare-and-swap or `fetch_max` at a time, and falls below it only by `unlock`.
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

/// What an [`RwLock`] is locked by.
///
/// ```text
///   bit 31            bit 30           bits 0 to 29
///   a writer waits    somebody sleeps  readers; all ones: a writer
/// ```
/// Who sleeps has set bit 30. The thread that leaves the lock free while it is set clears it and wakes everybody. Readers do not enter
/// while bit 31 is set. The writer that enters or leaves clears it; others that wait set it again when they look.
pub struct RawRwLock {
    state: AtomicU32,
}

const HOLDERS: u32 = (1 << 30) - 1;
const WRITER: u32 = HOLDERS;
const SLEEPERS: u32 = 1 << 30;
const WRITER_WAITS: u32 = 1 << 31;

impl RawRwLock {
    /// What the state becomes when a reader enters, if it may.
    fn with_reader(state: u32) -> Option<u32> {
        (state & WRITER_WAITS == 0 && state & HOLDERS < WRITER - 1).then_some(state + 1)
    }

    /// The same for a writer.
    fn with_writer(state: u32) -> Option<u32> {
        (state & HOLDERS == 0).then_some((state & SLEEPERS) | WRITER)
    }

    fn try_enter(&self, entered: fn(u32) -> Option<u32>) -> bool {
        self.state.fetch_update(Ordering::Acquire, Ordering::Relaxed, entered).is_ok()
    }

    /// Sleeps, with those bits set, until it may enter.
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

    /// No reader is left: those that sleep look, a waiting writer first.
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
        // Those that sleep set their bits again when they look. In a child of `fork`, those that do not exist there do not.
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

/// What threads that have a [`Mutex`] wait for, without it meanwhile.
#[derive(Debug, Default)]
pub struct Condvar {
    /// Moves on with every call of `notify_`.
    calls: AtomicU32,
}

impl Condvar {
    /// One that nobody waits for.
    pub const fn new() -> Condvar {
        Condvar { calls: AtomicU32::new(0) }
    }

    /// Wakes all that wait.
    pub fn notify_all(&self) {
        self.notify(ALL);
    }

    /// Wakes one that waits.
    pub fn notify_one(&self) {
        self.notify(1);
    }

    fn notify(&self, count: u32) {
        self.calls.fetch_add(1, Ordering::Relaxed);
        wake(&self.calls, count);
    }

    /// Waits until it is woken, or for no reason.
    pub fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        self.wait_at_most(guard, None);
    }

    /// The same, but no longer than that.
    pub fn wait_for<T>(&self, guard: &mut MutexGuard<'_, T>, patience: Duration) {
        self.wait_at_most(guard, Some(patience));
    }

    /// The same, until then. Whether it is that late.
    pub fn wait_until<T>(&self, guard: &mut MutexGuard<'_, T>, deadline: Instant) -> bool {
        self.wait_at_most(guard, Some(deadline.saturating_duration_since(Instant::now())));
        Instant::now() >= deadline
    }

    fn wait_at_most<T>(&self, guard: &mut MutexGuard<'_, T>, patience: Option<Duration>) {
        // Who notifies changes what is waited for with the mutex, so after this.
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
        // As at a fork: the words as they are while others wait, and nobody waits.
        let mutex: Mutex<()> = Mutex::new(());
        for state in [AWAITED, STARVED] {
            // SAFETY: the mutex is this thread's own.
            unsafe { mutex.raw() }.state.store(state, Ordering::Relaxed);
            // SAFETY: this thread has it.
            unsafe { mutex.force_unlock() };
            assert!(mutex.try_lock().is_some(), "{state}");
        }
        let lock: RwLock<()> = RwLock::new(());
        // SAFETY: the lock is this thread's own.
        unsafe { lock.raw() }.state.store(WRITER | SLEEPERS | WRITER_WAITS, Ordering::Relaxed);
        // SAFETY: this thread has it.
        unsafe { lock.force_unlock_write() };
        assert!(lock.try_read().is_some());
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
                        // At every moment one of them reads.
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
