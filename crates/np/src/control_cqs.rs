//! The completion queues of control queue pairs. Several queue pairs share one, but never so many that it could overrun.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use terrace_nic::{Cq, CqInit, Device, Error, Wc};
use terrace_sync::Mutex;

use crate::control::{RECEIVE_COUNT, SEND_COUNT};

/// Queue pairs of a completion queue.
const QPS_PER_CQ: u32 = 512;
/// Entries of a completion queue: two for each work request, because a queue pair may end before its completions are taken, and
/// another one take its place.
const CQ_DEPTH: u32 = 2 * QPS_PER_CQ * (RECEIVE_COUNT + SEND_COUNT);
/// The most completion queues: as many as 64 thousand queue pairs need.
const CQS_MAX: usize = 128;
const COMPLETIONS_PER_PASS: usize = 64;

/// A completion queue, and how many queue pairs have it.
struct SharedCq {
    cq: Arc<Cq>,
    user_count: AtomicU32,
}

/// The right of one queue pair to a completion queue.
pub(crate) struct CqShare(Arc<SharedCq>);

impl CqShare {
    /// The completion queue.
    pub fn cq(&self) -> &Arc<Cq> {
        &self.0.cq
    }
}

impl Drop for CqShare {
    fn drop(&mut self) {
        self.0.user_count.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The completion queues of a device's control queue pairs, made as they are needed.
pub(crate) struct ControlCqs {
    cqs: [OnceLock<Arc<SharedCq>>; CQS_MAX],
    /// Locked while one is chosen.
    choosing: Mutex<()>,
}

impl ControlCqs {
    pub fn new() -> ControlCqs {
        ControlCqs { cqs: [const { OnceLock::new() }; CQS_MAX], choosing: Mutex::new(()) }
    }

    /// A share of a completion queue that has room.
    ///
    /// # Errors
    /// Those of a new completion queue; `NoMemory` if there are as many as may be.
    pub fn take(&self, device: &Arc<Device>) -> Result<CqShare, Error> {
        let _choosing = self.choosing.lock();
        for place in &self.cqs {
            let shared = match place.get() {
                Some(shared) => shared,
                None => {
                    let cq = device.create_cq(CqInit { depth: CQ_DEPTH, channel: None, cookie: 0 })?;
                    place.get_or_init(|| Arc::new(SharedCq { cq, user_count: AtomicU32::new(0) }))
                }
            };
            if shared.user_count.load(Ordering::Relaxed) < QPS_PER_CQ {
                shared.user_count.fetch_add(1, Ordering::Relaxed);
                return Ok(CqShare(shared.clone()));
            }
        }
        Err(Error::NoMemory("completion queues of control queue pairs"))
    }

    /// Whether a completion waits.
    pub fn has_completions(&self) -> bool {
        self.cqs().any(|cq| !cq.is_empty())
    }

    /// Takes all completions.
    pub fn take_completions(&self, mut take: impl FnMut(&Wc)) {
        for cq in self.cqs() {
            let mut count = COMPLETIONS_PER_PASS;
            while count == COMPLETIONS_PER_PASS {
                count = 0;
                // It cannot overrun, which is the only error.
                let _ = cq.take(COMPLETIONS_PER_PASS, &mut |wc| {
                    count += 1;
                    take(wc);
                });
            }
        }
    }

    fn cqs(&self) -> impl Iterator<Item = &Arc<Cq>> {
        self.cqs.iter().map_while(|place| Some(&place.get()?.cq))
    }
}
