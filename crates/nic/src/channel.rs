//! Completion channels.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Weak};

use terrace_sync::Mutex;

use crate::cq::Cq;
use crate::device::Device;
use crate::error::Error;
use crate::limits::Life;
use crate::semaphore::Semaphore;

/// The channel on which a program waits for completion events of its queues.
pub struct CompChannel {
    device: Arc<Device>,
    waiting: Mutex<VecDeque<Weak<Cq>>>,
    /// One token for every entry of `waiting`, except that a token may briefly be ahead or behind.
    tokens: Semaphore,
    pub(crate) life: Life,
}

impl CompChannel {
    pub(crate) fn new(device: &Arc<Device>) -> Result<Arc<CompChannel>, Error> {
        Ok(Arc::new(CompChannel {
            device: device.clone(),
            waiting: Mutex::new(VecDeque::new()),
            tokens: Semaphore::new()?,
            life: Life::default(),
        }))
    }

    /// Readable while events wait. Only `poll` and `fcntl` are of use to others.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.tokens.fd()
    }

    /// The queue whose event is the oldest; it counts as unacknowledged until [`Cq::ack_events`]. Waits for one
    /// unless the descriptor has O_NONBLOCK. Fails with `Again` (non-blocking) or `Interrupted`.
    pub fn get_event(&self) -> Result<Arc<Cq>, Error> {
        if !self.tokens.is_nonblocking() {
            self.device.wait_spinning(|| !self.waiting.lock().is_empty());
        }
        loop {
            self.tokens.take()?;
            // No event: the queue was destroyed between its token and this lock.
            if let Some(cq) = self.take_waiting() {
                return Ok(cq);
            }
        }
    }

    fn take_waiting(&self) -> Option<Arc<Cq>> {
        let mut waiting = self.waiting.lock();
        // A queue that was dropped instead of destroyed is gone.
        let cq = std::iter::from_fn(|| waiting.pop_front()).find_map(|cq| cq.upgrade())?;
        // Before the lock is released: destroying the queue must either withdraw the event or wait for its
        // acknowledgement.
        cq.completion_account.hand_out();
        Some(cq)
    }

    /// Destroys the channel; EBUSY while completion queues use it.
    pub fn destroy(&self) -> Result<(), Error> {
        self.life.end()
    }

    /// Whether this is the device that it was created on.
    pub(crate) fn belongs_to(&self, device: &Arc<Device>) -> bool {
        Arc::ptr_eq(&self.device, device)
    }

    pub(crate) fn notify(&self, cq: Weak<Cq>) {
        self.waiting.lock().push_back(cq);
        self.tokens.post();
    }

    /// Discards the events of a queue that is being destroyed.
    pub(crate) fn withdraw(&self, cq: &Cq) {
        self.waiting.lock().retain(|waiting| {
            let ours = std::ptr::eq(waiting.as_ptr(), cq);
            if ours {
                self.tokens.try_take();
            }
            !ours
        });
    }
}
