//! Locks that survive `fork`, and a biased mutex for data that one thread uses nearly always.
//!
//! [`Mutex`], [`RwLock`] and [`Condvar`] are ordinary locks (`futex`, their words in `words`). [`BiasedMutex`] is the
//! biased one; [`allow_bias`] has to be called once before any mutex is biased. [`wait_a_little`] is for waits without
//! a lock. [`Backlog`] is a list of what waits for another thread.

#![warn(missing_docs)]

mod backlog;
mod biased;
mod futex;
mod platform;
mod words;

pub use backlog::Backlog;
pub use biased::{BiasedMutex, Guard};
pub use futex::{
    ArcMutexGuard, ArcRwLockWriteGuard, Condvar, Mutex, MutexGuard, RawMutex, RawRwLock, RwLock,
    RwLockReadGuard,
};
pub use platform::{allow_bias, wait_a_little};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::platform::{FIRST_BIAS_THRESHOLD, may_bias};

    /// A new thread takes the mutex once and ends.
    fn visit(mutex: &BiasedMutex<()>) {
        std::thread::scope(|scope| scope.spawn(|| drop(mutex.lock())).join().expect("no panic"));
    }

    /// How many uses by this thread bias the mutex, if at most `uses_max` do.
    fn use_until_it_leans(mutex: &BiasedMutex<()>, uses_max: u32) -> Option<u32> {
        (1..=uses_max).find(|_| {
            drop(mutex.lock());
            mutex.is_biased()
        })
    }

    #[test]
    fn it_leans_to_who_uses_it_alone_and_takes_twice_as_long_the_next_time() {
        allow_bias();
        let mutex = BiasedMutex::new(());
        let Some(uses) = use_until_it_leans(&mutex, 4 * FIRST_BIAS_THRESHOLD) else {
            assert!(!may_bias(), "it has not leaned");
            return;
        };
        assert_eq!(uses, FIRST_BIAS_THRESHOLD);
        for bias_threshold in [2 * FIRST_BIAS_THRESHOLD, 4 * FIRST_BIAS_THRESHOLD] {
            visit(&mutex);
            assert!(!mutex.is_biased(), "somebody else has used it");
            assert_eq!(use_until_it_leans(&mutex, 8 * FIRST_BIAS_THRESHOLD), Some(bias_threshold));
        }
    }

    /// One in so many uses is by another thread, such as a timer.
    const USES_PER_VISIT: u32 = 50_000;

    #[test]
    fn it_leans_again_when_nobody_takes_it_back_every_time_any_more() {
        allow_bias();
        if !may_bias() {
            return;
        }
        let mutex = BiasedMutex::new(());
        for _ in 0..20 {
            use_until_it_leans(&mutex, 1 << 20).expect("nobody else uses it");
            visit(&mutex);
        }
        let share = || {
            let biased = (0..USES_PER_VISIT).filter(|_| {
                drop(mutex.lock());
                mutex.is_biased()
            });
            let share = biased.count() as f64 / f64::from(USES_PER_VISIT);
            visit(&mutex);
            share
        };
        let shares: Vec<_> = (0..40).map(|_| share()).collect();
        assert!(
            shares[35..].iter().all(|share| *share > 0.9),
            "shares of uses on the biased fast path: {shares:.2?}"
        );
    }
}
