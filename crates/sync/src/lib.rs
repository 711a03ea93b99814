//! Locks that survive `fork`, and a biased mutex for data that mostly one thread uses.
//!
//! [`Mutex`], [`RwLock`] and [`Condvar`] are ordinary locks (`futex`, their words in `words`). [`BiasedMutex`] is the
//! biased one; [`allow_bias`] has to be called once before any mutex is biased. [`back_off`] is for waits without a
//! lock. [`Backlog`] is a list of items that wait for another thread. [`SpinBudget`] says how long to poll before sleeping.
//! [`Uncancelled`] keeps `pthread_cancel` from ending a thread that holds a lock, and threads that are started [`without_signals`] run
//! no handlers of the program. [`write_line_now`] tells the user something, and waits for no reader.

#![warn(missing_docs)]

mod backlog;
mod biased;
mod cancellation;
mod futex;
mod line;
mod platform;
mod signals;
mod spin_budget;
mod words;

pub use backlog::Backlog;
pub use biased::{BiasedMutex, Guard};
pub use cancellation::Uncancelled;
pub use futex::{
    ArcMutexGuard, ArcRwLockWriteGuard, Condvar, Mutex, MutexGuard, RawMutex, RawRwLock, RwLock,
    RwLockReadGuard,
};
pub use line::write_line_now;
pub use platform::{allow_bias, back_off};
pub use signals::without_signals;
pub use spin_budget::SpinBudget;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::platform::{FIRST_BIAS_THRESHOLD, may_bias};

    /// Acquires the mutex once in a new thread.
    fn lock_in_another_thread(mutex: &BiasedMutex<()>) {
        std::thread::scope(|scope| scope.spawn(|| drop(mutex.lock())).join().expect("no panic"));
    }

    /// The number of uses by this thread after which the mutex is biased, if at most `uses_max`.
    fn use_until_biased(mutex: &BiasedMutex<()>, uses_max: u32) -> Option<u32> {
        (1..=uses_max).find(|_| {
            drop(mutex.lock());
            mutex.is_biased()
        })
    }

    #[test]
    fn a_single_thread_biases_the_mutex_and_each_revocation_doubles_the_threshold() {
        allow_bias();
        let mutex = BiasedMutex::new(());
        let Some(uses) = use_until_biased(&mutex, 4 * FIRST_BIAS_THRESHOLD) else {
            assert!(!may_bias(), "the mutex is not biased");
            return;
        };
        assert_eq!(uses, FIRST_BIAS_THRESHOLD);
        for bias_threshold in [2 * FIRST_BIAS_THRESHOLD, 4 * FIRST_BIAS_THRESHOLD] {
            lock_in_another_thread(&mutex);
            assert!(!mutex.is_biased(), "another thread has used the mutex");
            assert_eq!(use_until_biased(&mutex, 8 * FIRST_BIAS_THRESHOLD), Some(bias_threshold));
        }
    }

    /// One in this many uses is by another thread, such as a timer.
    const USES_PER_REVOCATION: u32 = 50_000;

    #[test]
    fn rare_revocations_do_not_prevent_a_new_bias() {
        allow_bias();
        if !may_bias() {
            return;
        }
        let mutex = BiasedMutex::new(());
        for _ in 0..20 {
            use_until_biased(&mutex, 1 << 20).expect("no other thread uses the mutex");
            lock_in_another_thread(&mutex);
        }
        let share = || {
            let biased = (0..USES_PER_REVOCATION).filter(|_| {
                drop(mutex.lock());
                mutex.is_biased()
            });
            let share = biased.count() as f64 / f64::from(USES_PER_REVOCATION);
            lock_in_another_thread(&mutex);
            share
        };
        let shares: Vec<_> = (0..40).map(|_| share()).collect();
        assert!(
            shares[35..].iter().all(|share| *share > 0.9),
            "shares of uses on the biased fast path: {shares:.2?}"
        );
    }
}
