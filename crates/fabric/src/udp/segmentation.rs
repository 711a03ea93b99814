//! The destinations to which packets leave one by one, because the kernel refuses to segment what is sent there.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use terrace_sync::Mutex;

/// How long packets to a destination leave one by one. Its route, and what the route's interface can do, may change.
const REFUSAL: Duration = Duration::from_secs(1);

/// What the kernel has refused lately.
#[derive(Debug, Default)]
pub(super) struct Segmentation {
    /// Whether there are refusals, for a check without the lock.
    any: AtomicBool,
    refused_until: Mutex<HashMap<IpAddr, Instant>>,
    has_logged: AtomicBool,
}

impl Segmentation {
    /// Whether a run to that destination may be sent whole.
    #[inline]
    pub fn permits(&self, destination: IpAddr) -> bool {
        !self.any.load(Relaxed) || self.permits_at(destination, Instant::now())
    }

    #[cold]
    fn permits_at(&self, destination: IpAddr, now: Instant) -> bool {
        let mut refused_until = self.refused_until.lock();
        let is_refused = refused_until.get(&destination).is_some_and(|until| now < *until);
        if !is_refused && refused_until.remove(&destination).is_some() {
            self.any.store(!refused_until.is_empty(), Relaxed);
        }
        !is_refused
    }

    /// Notes that the kernel has refused to segment a run to that destination, and takes single packets.
    #[cold]
    pub fn note_refusal(&self, destination: IpAddr, now: Instant) {
        let mut refused_until = self.refused_until.lock();
        refused_until.retain(|_, until| now < *until);
        refused_until.insert(destination, now + REFUSAL);
        self.any.store(true, Relaxed);
        if !self.has_logged.swap(true, Relaxed) {
            tracing::info!(%destination, "UDP segmentation offload failed; sending packets one by one");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_concerns_one_destination_for_a_while() {
        let (segmentation, start) = (Segmentation::default(), Instant::now());
        let [refusing, other] = [1, 2].map(|last| IpAddr::from([10, 0, 0, last]));
        assert!(segmentation.permits(refusing));
        segmentation.note_refusal(refusing, start);
        assert!(!segmentation.permits_at(refusing, start) && segmentation.permits_at(other, start));
        let later = start + REFUSAL;
        segmentation.note_refusal(other, later);
        assert!(segmentation.permits_at(refusing, later) && !segmentation.permits_at(other, later));
        assert!(segmentation.permits_at(other, later + REFUSAL));
        assert!(!segmentation.any.load(Relaxed), "no lock is taken any more");
    }
}
