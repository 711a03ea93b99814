//! Locks for what one thread uses nearly always, and others now and then.
//!
//! [`LeaningMutex`] is the only one. [`allow_leaning`] has to be called once before any leans. [`wait_a_little`] is for those who wait
//! without a lock.

#![warn(missing_docs)]

mod leaning;
mod platform;

pub use leaning::{Guard, LeaningMutex};
pub use platform::{allow_leaning, wait_a_little};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::platform::{FIRST_WISH, may_lean};

    #[test]
    fn it_leans_to_who_uses_it_alone_and_takes_twice_as_long_the_next_time() {
        allow_leaning();
        let mutex = LeaningMutex::new(());
        let use_until_it_leans = || {
            (1..=4 * FIRST_WISH).find(|_| {
                drop(mutex.lock());
                mutex.leans()
            })
        };
        let Some(uses) = use_until_it_leans() else {
            assert!(!may_lean(), "it has not leaned");
            return;
        };
        assert_eq!(uses, FIRST_WISH);
        for wish in [2 * FIRST_WISH, 4 * FIRST_WISH] {
            std::thread::scope(|scope| scope.spawn(|| drop(mutex.lock())).join().expect("no panic"));
            assert!(!mutex.leans(), "somebody else has used it");
            assert_eq!(use_until_it_leans(), Some(wish));
        }
    }
}
