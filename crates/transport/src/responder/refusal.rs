//! Why the responder refuses a request, and with which NAK or RNR timer.

use terrace_wire::NakCode;

use crate::host::RemoteError;
use crate::types::QpEvent;

/// Why a request is not executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    Nak(NakCode),
    /// No receive is posted: RNR NAK.
    NotReady,
    /// The request needs absent memory, or would overtake one that does: RNR NAK with this timer code.
    Rnr {
        timer: u8,
    },
    /// The message is longer than its receive: the receive completes in error, too.
    ReceiveTooShort,
    /// The receive's own memory cannot be written.
    ReceiveProtection,
    /// The peer may not invalidate this key (IBTA volume 1, 9.9.3, class J): the receive completes in error, without an
    /// answer.
    Invalidation,
}

impl From<RemoteError> for Refusal {
    fn from(error: RemoteError) -> Refusal {
        match error {
            RemoteError::NotReady | RemoteError::Retry => ABSENT,
            error => Refusal::Nak(error.into()),
        }
    }
}

impl From<RemoteError> for NakCode {
    fn from(error: RemoteError) -> NakCode {
        match error {
            RemoteError::Access => NakCode::RemoteAccess,
            RemoteError::Invalid => NakCode::InvalidRequest,
            RemoteError::Operation | RemoteError::NotReady | RemoteError::Retry => NakCode::RemoteOperation,
        }
    }
}

/// The program's event when a NAK with this code ends the connection.
pub(crate) fn event_of(code: NakCode) -> QpEvent {
    match code {
        NakCode::RemoteAccess => QpEvent::AccessError,
        NakCode::RemoteOperation => QpEvent::Fatal,
        _ => QpEvent::RequestError,
    }
}

/// The memory is absent, and no buffer is free to wait for it, or the region does not allow that: 0.12 ms.
pub(super) const ABSENT: Refusal = Refusal::Rnr { timer: 7 };

/// The request must not overtake pending writes. The RNR NAK is sent after their ACK, so the peer need
/// not wait any longer then: 0.01 ms, the shortest RNR timer.
pub(super) const CHANGE_PENDING: Refusal = Refusal::Rnr { timer: 1 };

/// The budget for incomplete records of APPENDs is used up: 0.64 ms. They are completed or dropped meanwhile.
pub(super) const STAGING_FULL: Refusal = Refusal::Rnr { timer: 12 };

/// The RNR timer for a peer that repeats a deferred operation: 10.24 ms. Its retry count against a silent responder is
/// limited, and busy storage sometimes takes longer than that.
pub(super) const DEFERRED_TIMER: u8 = 20;

pub(super) const INVALID_REQUEST: Refusal = Refusal::Nak(NakCode::InvalidRequest);
