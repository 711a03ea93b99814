//! Deferred ACKs: whether the ACK of a queue pair leaves at once, waits for the next request, or leaves before it. Each
//! queue pair has one [`AckState`]; [`AckList`](crate::tx::AckList) has those that may have deferred an ACK.
//!
//! ```text
//!             the pass defers it                  the next pass releases it
//!   Unheld ------------------------> Deferred -----------------------------> Unheld
//!     |                                  |
//!     |  its message made an event       |                                 no ACK is pending
//!     +--------------> Urgent <----------+              (from each state) ------------------> Unheld
//! ```

use crate::sync::{AtomicU8, Ordering};

/// What holds back a queue pair's ACK.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum AckState {
    /// Nothing: an ACK leaves with what is sent next.
    Unheld,
    /// An ACK is deferred to the next receive pass, so that a request may leave first and carry it.
    Deferred,
    /// A message has woken the program: its ACK leaves before the program's answer, and is released like a deferred one.
    Urgent,
}

/// What changes an [`AckState`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AckEvent {
    /// A receive pass found an ACK to be all that the queue pair has to send.
    Deferred,
    /// The completion of a message has made an event.
    Woken,
    /// A pass has moved the queue pair to its work list.
    Released,
    /// No ACK is pending.
    Sent,
}

impl AckState {
    #[inline(always)]
    const fn after(self, event: AckEvent) -> AckState {
        match (self, event) {
            (_, AckEvent::Sent) | (AckState::Deferred, AckEvent::Released) => AckState::Unheld,
            (_, AckEvent::Woken) => AckState::Urgent,
            (AckState::Unheld, AckEvent::Deferred) => AckState::Deferred,
            (state, AckEvent::Deferred | AckEvent::Released) => state,
        }
    }

    const fn from_byte(byte: u8) -> AckState {
        match byte {
            0 => AckState::Unheld,
            1 => AckState::Deferred,
            _ => AckState::Urgent,
        }
    }
}

/// The [`AckState`] of a queue pair. All but releases change it under the queue pair's lock; deferrals and releases under
/// the receive lock. So a change that a release overtakes is none that a release undoes.
pub(crate) struct AckMark(AtomicU8);

impl AckMark {
    pub fn new() -> AckMark {
        AckMark(AtomicU8::new(AckState::Unheld as u8))
    }

    #[inline(always)]
    pub fn state(&self) -> AckState {
        AckState::from_byte(self.0.load(Ordering::Relaxed))
    }

    /// Notes an event under the queue pair's lock.
    #[inline(always)]
    pub fn note(&self, event: AckEvent) {
        self.0.store(self.state().after(event) as u8, Ordering::Relaxed);
    }

    /// Releases the ACK, under the receive lock only. False if there was nothing to release.
    #[inline]
    pub fn release(&self) -> bool {
        let state = self.state();
        let released = state.after(AckEvent::Released);
        if released != state {
            // If it fails, the ACK has left, or has become urgent. Handling the queue pair is right for both.
            let _ =
                self.0.compare_exchange(state as u8, released as u8, Ordering::Relaxed, Ordering::Relaxed);
        }
        state != AckState::Unheld
    }
}

/// What becomes of the ACKs that a receive pass has deferred, at its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AtPassEnd {
    /// They leave.
    Release,
    /// The next pass releases them, unless requests carry them before.
    Keep,
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATES: [AckState; 3] = [AckState::Unheld, AckState::Deferred, AckState::Urgent];

    #[test]
    fn an_urgent_ack_stays_urgent_until_it_has_left() {
        assert_eq!(STATES.map(|state| state.after(AckEvent::Woken)), [AckState::Urgent; 3]);
        for event in [AckEvent::Deferred, AckEvent::Released, AckEvent::Woken] {
            assert_eq!(AckState::Urgent.after(event), AckState::Urgent);
        }
        assert_eq!(STATES.map(|state| state.after(AckEvent::Sent)), [AckState::Unheld; 3]);
    }

    #[test]
    fn states_and_their_bytes_agree() {
        assert_eq!(STATES.map(|state| AckState::from_byte(state as u8)), STATES);
    }
}
