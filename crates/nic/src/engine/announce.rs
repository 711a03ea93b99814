//! What the engine announces: its mode, and until when it sleeps. A thread that adds work decides by that whether to
//! wake it.
//!
//! ```text
//!   the engine                            another thread
//!   mode = armed, or                      adds work
//!   sleeps_until = the next timer
//!   -- both sequentially consistent --    -- both sequentially consistent --
//!   is there work? then it does not       has the engine announced it?
//!   sleep                                 then wakes it
//! ```

use terrace_transport::Time;

use crate::sync::{AtomicU8, AtomicU64, Ordering};

/// The engine's mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Mode {
    Armed,
    Standby,
}

/// What the engine announces.
#[derive(Debug)]
pub(crate) struct Announced {
    mode: AtomicU8,
    /// Until when the engine sleeps, in nanoseconds; 0 while it need not be woken.
    sleeps_until: AtomicU64,
}

impl Announced {
    /// An armed engine that does not sleep.
    pub fn new() -> Announced {
        Announced { mode: AtomicU8::new(Mode::Armed as u8), sleeps_until: AtomicU64::new(0) }
    }

    /// The engine changes its mode.
    pub fn set_mode(&self, mode: Mode) {
        self.mode.store(mode as u8, Ordering::SeqCst);
    }

    /// Whether this is the engine's mode.
    pub fn is_mode(&self, mode: Mode) -> bool {
        self.mode.load(Ordering::SeqCst) == mode as u8
    }

    /// The engine is about to sleep until `deadline`: it must check for work after this.
    pub fn fall_asleep(&self, deadline: Option<Time>) {
        self.sleeps_until.store(deadline.map_or(u64::MAX, |deadline| deadline.0), Ordering::SeqCst);
    }

    /// The engine is awake.
    pub fn wake_up(&self) {
        self.sleeps_until.store(0, Ordering::SeqCst);
    }

    /// Whether the engine sleeps past a deadline, of which a thread has noted before that it is due then.
    pub fn sleeps_past(&self, deadline: Time) -> bool {
        self.sleeps_until.load(Ordering::SeqCst) > deadline.0
    }
}
