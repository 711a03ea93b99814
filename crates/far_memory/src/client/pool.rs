//! What a client knows of the pool of one of its nodes: whether the last store of a new page has found a page there.

use std::time::{Duration, Instant};

/// How long a pool that was empty counts as empty: after the first time, and at most. A store into an empty pool has the node
/// repair its free-page queue.
const EMPTY_MIN: Duration = Duration::from_millis(50);
const EMPTY_MAX: Duration = Duration::from_secs(1);
/// The time until the refill probes a pool that was empty: after the first time, and at most.
const PROBE_MIN: Duration = Duration::from_secs(1);
const PROBE_MAX: Duration = Duration::from_secs(60);

/// A node's pool.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PoolState(Option<Empty>);

#[derive(Clone, Copy, Debug)]
struct Empty {
    /// Until when stores of new pages are not worth a try.
    until: Instant,
    pause: Duration,
    probe_at: Instant,
    probe_pause: Duration,
}

impl PoolState {
    /// Notes that a store found no page. The pauses double each time.
    pub fn note_empty(&mut self, now: Instant) {
        let Some(empty) = &mut self.0 else {
            let (pause, probe_pause) = (EMPTY_MIN, PROBE_MIN);
            self.0 = Some(Empty { until: now + pause, pause, probe_at: now + probe_pause, probe_pause });
            return;
        };
        // Stores that were in flight together count as one.
        if now >= empty.until {
            empty.pause = (2 * empty.pause).min(EMPTY_MAX);
            empty.until = now + empty.pause;
        }
        if now >= empty.probe_at {
            empty.probe_pause = (2 * empty.probe_pause).min(PROBE_MAX);
            empty.probe_at = now + empty.probe_pause;
        }
    }

    /// Notes that a store found a page, or that the client has returned one.
    pub fn note_page(&mut self) {
        self.0 = None;
    }

    /// Whether the last store found no page.
    pub fn was_empty(&self) -> bool {
        self.0.is_some()
    }

    /// Whether a store of a new page is worth a try.
    pub fn may_have_page(&self, now: Instant) -> bool {
        self.0.is_none_or(|empty| now >= empty.until)
    }

    /// Whether a copy that can wait is worth a try.
    pub fn may_be_probed(&self, now: Instant) -> bool {
        self.0.is_none_or(|empty| now >= empty.probe_at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_that_stays_empty_is_probed_more_and_more_rarely() {
        let (mut pool, begin) = (PoolState::default(), Instant::now());
        assert!(pool.may_be_probed(begin) && !pool.was_empty());
        let (mut now, mut pauses) = (begin, Vec::new());
        for _ in 0..8 {
            // Sixteen copies that were in flight together.
            (0..16).for_each(|_| pool.note_empty(now));
            let probed = now;
            while !pool.may_be_probed(now) {
                now += Duration::from_millis(500);
            }
            pauses.push((now - probed).as_secs());
        }
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 60, 60]);
        pool.note_page();
        assert!(pool.may_be_probed(begin) && pool.may_have_page(begin));
    }

    #[test]
    fn stores_of_new_pages_try_an_empty_pool_again_within_a_second() {
        let (mut pool, mut now) = (PoolState::default(), Instant::now());
        for _ in 0..8 {
            pool.note_empty(now);
            assert!(!pool.may_have_page(now));
            now += EMPTY_MAX;
            assert!(pool.may_have_page(now));
        }
    }
}
