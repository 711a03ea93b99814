//! Asynchronous events.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use terrace_sync::Mutex;

use crate::cq::Cq;
use crate::device::Device;
use crate::error::Error;
use crate::event_account::EventAccount;
use crate::qp::QueuePair;
use crate::semaphore::Semaphore;
use crate::srq::Srq;

/// An event outside of any work request; `ibv_async_event`.
#[derive(Clone)]
pub enum AsyncEvent {
    /// The completion queue has overrun.
    CqError(Arc<Cq>),
    /// The queue pair has failed for a reason that no completion can report.
    QpFatal(Arc<QueuePair>),
    /// A peer's request was invalid.
    QpRequestError(Arc<QueuePair>),
    /// A peer's request accessed memory without permission.
    QpAccessError(Arc<QueuePair>),
    /// The first packet arrived while the queue pair was ready to receive.
    CommunicationEstablished(Arc<QueuePair>),
    /// The send queue has drained.
    SqDrained(Arc<QueuePair>),
    /// A queue pair in error will take no more work requests from its shared receive queue.
    LastWqeReached(Arc<QueuePair>),
    /// Fewer work requests are left than the limit that was armed.
    SrqLimitReached(Arc<Srq>),
}

impl AsyncEvent {
    /// The value of `ibv_event_type`.
    pub fn code(&self) -> u32 {
        match self {
            AsyncEvent::CqError(_) => 0,
            AsyncEvent::QpFatal(_) => 1,
            AsyncEvent::QpRequestError(_) => 2,
            AsyncEvent::QpAccessError(_) => 3,
            AsyncEvent::CommunicationEstablished(_) => 4,
            AsyncEvent::SqDrained(_) => 5,
            AsyncEvent::SrqLimitReached(_) => 15,
            AsyncEvent::LastWqeReached(_) => 16,
        }
    }

    /// Acknowledges the event, which lets the object be destroyed. Once for every delivered event.
    pub fn ack(&self) {
        self.account().acknowledge(1);
    }

    fn account(&self) -> &EventAccount {
        match self {
            AsyncEvent::CqError(cq) => &cq.async_account,
            AsyncEvent::QpFatal(qp)
            | AsyncEvent::QpRequestError(qp)
            | AsyncEvent::QpAccessError(qp)
            | AsyncEvent::CommunicationEstablished(qp)
            | AsyncEvent::SqDrained(qp)
            | AsyncEvent::LastWqeReached(qp) => &qp.async_account,
            AsyncEvent::SrqLimitReached(srq) => &srq.async_account,
        }
    }
}

impl Device {
    /// Fewer work requests are left than the queue's limit.
    pub(crate) fn raise_limit_reached(&self, srq: Arc<Srq>) {
        self.events.raise(AsyncEvent::SrqLimitReached(srq));
    }
}

/// The device's queue of asynchronous events.
pub(crate) struct AsyncQueue {
    waiting: Mutex<VecDeque<AsyncEvent>>,
    tokens: Semaphore,
    closed: AtomicBool,
}

impl AsyncQueue {
    pub fn new() -> Result<AsyncQueue, Error> {
        Ok(AsyncQueue {
            waiting: Mutex::new(VecDeque::new()),
            tokens: Semaphore::new()?,
            closed: AtomicBool::new(false),
        })
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.tokens.fd()
    }

    pub fn raise(&self, event: AsyncEvent) {
        tracing::debug!(code = event.code(), "asynchronous event");
        self.waiting.lock().push_back(event);
        self.tokens.post();
    }

    /// The oldest event; waits for one unless the descriptor is non-blocking.
    pub fn get(&self) -> Result<AsyncEvent, Error> {
        loop {
            if self.closed.load(Ordering::Acquire) {
                return Err(Error::NoDevice("closed"));
            }
            self.tokens.take()?;
            let mut waiting = self.waiting.lock();
            // No event: it was withdrawn between its token and this lock, or the device was closed.
            if let Some(event) = waiting.pop_front() {
                event.account().count_delivered();
                return Ok(event);
            }
        }
    }

    /// Discards the events of an object that is being destroyed, then waits until the delivered ones are acknowledged.
    pub fn withdraw(&self, account: &EventAccount) {
        self.waiting.lock().retain(|event| {
            let ours = std::ptr::eq(event.account(), account);
            if ours {
                self.tokens.try_take();
            }
            !ours
        });
        account.wait_acknowledged();
    }

    /// Wakes all waiting threads. Undelivered events hold queue pairs, and these the device: they are discarded.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Release);
        let undelivered = std::mem::take(&mut *self.waiting.lock());
        drop(undelivered);
        for _ in 0..CLOSE_TOKENS {
            self.tokens.post();
        }
    }
}

/// Enough tokens that every thread that could wait for events of a closed device gets one.
const CLOSE_TOKENS: usize = 64;
