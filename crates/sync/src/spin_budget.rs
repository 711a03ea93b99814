//! How long to poll for what other threads or processes send before sleeping.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// A wakeup across processors takes about as long as this, so polling longer gains nothing.
const SPIN: Duration = Duration::from_micros(50);
/// A call takes two wakeups across processors, or a little longer, if the other process does not poll.
const CALL_SPIN: Duration = Duration::from_micros(200);

/// After this many fruitless spins in a row ...
const MISSES_MAX: u32 = 3;
/// ... only one in so many is tried.
const TRY_EVERY: u32 = 16;

/// Decides whether spinning pays. It does not where peers are slower than a wakeup, nor where the peer needs the very
/// processor that is being spun on: then the answer comes only once the spinning has stopped.
#[derive(Debug)]
pub struct SpinBudget {
    /// The longest spin.
    spin: Duration,
    /// Spins in a row, tried or not, in which nothing came.
    misses: AtomicU32,
}

impl Default for SpinBudget {
    /// For single messages.
    fn default() -> SpinBudget {
        SpinBudget { spin: SPIN, misses: AtomicU32::new(0) }
    }
}

impl SpinBudget {
    /// For the answers to calls that another process carries out, and for the next call of a process that has its answer.
    pub fn for_calls() -> SpinBudget {
        SpinBudget { spin: CALL_SPIN, ..SpinBudget::default() }
    }

    /// For how long to spin now.
    pub fn take(&self) -> Duration {
        let misses = self.misses.load(Ordering::Relaxed);
        if misses < MISSES_MAX || misses.is_multiple_of(TRY_EVERY) { self.spin } else { Duration::ZERO }
    }

    /// Notes whether the spin found anything.
    pub fn note(&self, hit: bool) {
        match hit {
            true => self.misses.store(0, Ordering::Relaxed),
            false => _ = self.misses.fetch_add(1, Ordering::Relaxed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fruitless_spins_become_rare_until_a_hit() {
        let budget = SpinBudget::default();
        let mut tried = 0;
        for _ in 0..1600 {
            tried += u64::from(!budget.take().is_zero());
            budget.note(false);
        }
        assert!((90..110).contains(&tried), "{tried}");
        budget.note(true);
        assert_eq!(budget.take(), SPIN);
    }
}
