//! What the lists of a device know of a queue pair: the lists are generic in it, and [`Schedule`] has its marks.

use terrace_transport::Time;

use crate::ack::AckMark;
use crate::sync::{AtomicBool, AtomicU64, Ordering};

/// A time that never comes.
pub(crate) const NEVER: Time = Time(u64::MAX);

/// The marks by which a queue pair is scheduled.
pub(crate) struct Schedule {
    /// The queue pair's number.
    pub qpn: u32,
    /// Whether it is on the device's pending list.
    pub is_pending: AtomicBool,
    /// Whether the executor of entries in memory has to visit it.
    pub is_runnable: AtomicBool,
    /// What holds back its ACK.
    pub ack: AckMark,
    /// Whether it is on the receiver's list of queue pairs with deferred ACKs. Set under the QP and receive locks, cleared
    /// under the receive lock or by destruction.
    pub is_on_ack_list: AtomicBool,
    /// When its live timer entry fires, in nanoseconds.
    pub timer_at: AtomicU64,
    /// Whether absent memory that it waits for may be present now.
    is_woken: AtomicBool,
    /// Whether it waits for a grant of its peer's [`InFlightBudget`](crate::in_flight::InFlightBudget), and the bytes of
    /// the grant that it has.
    waits_for_grant: AtomicBool,
    granted_bytes: AtomicU64,
}

impl Schedule {
    pub fn new(qpn: u32) -> Schedule {
        Schedule {
            qpn,
            is_pending: AtomicBool::new(false),
            is_runnable: AtomicBool::new(false),
            ack: AckMark::new(),
            is_on_ack_list: AtomicBool::new(false),
            timer_at: AtomicU64::new(NEVER.0),
            is_woken: AtomicBool::new(false),
            waits_for_grant: AtomicBool::new(false),
            granted_bytes: AtomicU64::new(0),
        }
    }

    /// Notes that absent memory may be present now.
    pub fn wake(&self) {
        self.is_woken.store(true, Ordering::SeqCst);
    }

    /// Whether it was woken and has not been handled since.
    pub fn is_woken(&self) -> bool {
        self.is_woken.load(Ordering::SeqCst)
    }

    /// The same, and resets it.
    #[inline]
    pub fn take_woken(&self) -> bool {
        self.is_woken.load(Ordering::Relaxed) && self.is_woken.swap(false, Ordering::SeqCst)
    }

    /// Notes that it waits for a grant; false if it did already.
    pub fn mark_waiting(&self) -> bool {
        !self.waits_for_grant.swap(true, Ordering::SeqCst)
    }

    /// Whether it waits for a grant.
    pub fn is_waiting(&self) -> bool {
        self.waits_for_grant.load(Ordering::SeqCst)
    }

    /// Notes that it does not wait for a grant.
    pub fn stop_waiting(&self) {
        self.waits_for_grant.store(false, Ordering::SeqCst);
    }

    /// Gives it a grant, and returns the bytes of the grant that this one replaces.
    pub fn give_grant(&self, bytes: u64) -> u64 {
        let before_bytes = self.granted_bytes.swap(bytes, Ordering::SeqCst);
        self.waits_for_grant.store(false, Ordering::SeqCst);
        before_bytes
    }

    /// Takes the grant, and returns its bytes; 0 if there is none.
    #[inline]
    pub fn take_grant(&self) -> u64 {
        match self.granted_bytes.load(Ordering::Relaxed) {
            0 => 0,
            _ => self.granted_bytes.swap(0, Ordering::SeqCst),
        }
    }

    /// Marks the queue pair as pending; false if it was marked already.
    pub fn mark_pending(&self) -> bool {
        !self.is_pending.swap(true, Ordering::SeqCst)
    }
}
