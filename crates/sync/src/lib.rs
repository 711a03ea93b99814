//! Locks that a process may fork over, and one for what one thread uses nearly always, and others now and then.
//!
//! [`Mutex`], [`RwLock`] and [`Condvar`] are the ordinary ones (`futex`). [`LeaningMutex`] is the other; [`allow_leaning`] has to be called
//! once before any leans. [`wait_a_little`] is for those who wait without a lock.

#![warn(missing_docs)]

mod futex;
mod leaning;
mod platform;

pub use futex::{
    ArcMutexGuard, ArcRwLockWriteGuard, Condvar, Mutex, MutexGuard, RawMutex, RawRwLock, RwLock,
    RwLockReadGuard,
};
pub use leaning::{Guard, LeaningMutex};
pub use platform::{allow_leaning, wait_a_little};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::platform::{FIRST_WISH, may_lean};

    /// A thread comes, takes it and ends.
    fn visit(mutex: &LeaningMutex<()>) {
        std::thread::scope(|scope| scope.spawn(|| drop(mutex.lock())).join().expect("no panic"));
    }

    /// After how many uses by this thread it leans, if it does after so many at most.
    fn use_until_it_leans(mutex: &LeaningMutex<()>, uses_max: u32) -> Option<u32> {
        (1..=uses_max).find(|_| {
            drop(mutex.lock());
            mutex.leans()
        })
    }

    #[test]
    fn it_leans_to_who_uses_it_alone_and_takes_twice_as_long_the_next_time() {
        allow_leaning();
        let mutex = LeaningMutex::new(());
        let Some(uses) = use_until_it_leans(&mutex, 4 * FIRST_WISH) else {
            assert!(!may_lean(), "it has not leaned");
            return;
        };
        assert_eq!(uses, FIRST_WISH);
        for wish in [2 * FIRST_WISH, 4 * FIRST_WISH] {
            visit(&mutex);
            assert!(!mutex.leans(), "somebody else has used it");
            assert_eq!(use_until_it_leans(&mutex, 8 * FIRST_WISH), Some(wish));
        }
    }

    /// Of so many uses one is another thread's: that of a timer, say.
    const USES_PER_VISIT: u32 = 50_000;

    #[test]
    fn it_leans_again_when_nobody_takes_it_back_every_time_any_more() {
        allow_leaning();
        if !may_lean() {
            return;
        }
        let mutex = LeaningMutex::new(());
        for _ in 0..20 {
            use_until_it_leans(&mutex, 1 << 20).expect("nobody else uses it");
            visit(&mutex);
        }
        let share = || {
            let leaning = (0..USES_PER_VISIT).filter(|_| {
                drop(mutex.lock());
                mutex.leans()
            });
            let share = leaning.count() as f64 / f64::from(USES_PER_VISIT);
            visit(&mutex);
            share
        };
        let shares: Vec<_> = (0..40).map(|_| share()).collect();
        assert!(
            shares[35..].iter().all(|share| *share > 0.9),
            "shares of uses for which it leans: {shares:.2?}"
        );
    }
}
