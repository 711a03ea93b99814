//! Work requests that the caller executes without packets.

use super::Qp;
use crate::common::{Call, Common, Verdict};
use crate::host::Host;
use crate::requester::{self, Requester, Row};
use crate::types::{QpState, QpType, SendFlags, SendWr, WcStatus};

impl Qp {
    /// Whether this work request is valid and may be executed without packets: it is a READ, a WRITE or an atomic, not
    /// [by packets](SendFlags::BY_PACKETS), and [`Qp::may_access_direct`].
    #[inline(always)]
    pub fn may_go_direct(&self, wr: &SendWr) -> bool {
        let row = Row::of(&wr.op);
        row.is_direct
            && !wr.flags.contains(SendFlags::BY_PACKETS)
            && self.may_access_direct(row.expects_response())
            && Requester::validate(&self.common, wr).is_ok()
    }

    /// Whether an access to the peer's memory that is made now without packets takes effect in order, and a work request
    /// could make it: the queue pair is of RC, its send queue exists and is empty in RTS. READs and atomics, which expect
    /// responses, need a queue pair that may have some outstanding.
    #[inline(always)]
    pub fn may_access_direct(&self, expects_response: bool) -> bool {
        let Common { config, attr, .. } = &self.common;
        attr.state == QpState::Rts
            && self.requester.len() == 0
            && config.qp_type == QpType::Rc
            && (!expects_response || attr.max_rd_atomic > 0)
            && config.cap.max_send_wr > 0
    }

    /// Counts and completes a send work request that the caller has executed without packets, as
    /// [`Qp::may_go_direct`] permits.
    #[inline(always)]
    pub fn complete_direct(&mut self, wr: &SendWr, host: &impl Host) {
        self.count_direct(wr.payload.len());
        requester::complete_success(&self.common, wr, host);
    }

    /// Counts an access of `len` bytes that was made without packets.
    #[inline]
    pub fn count_direct(&mut self, len: u64) {
        self.common.counters.direct += 1;
        self.common.counters.direct_bytes += len;
    }

    /// Completes in error a request whose result could not be stored: the queue pair enters the error state.
    pub fn fail_direct(&mut self, wr: &SendWr, host: &impl Host) {
        let call = &mut Call { common: &mut self.common, host };
        requester::complete(call, wr, WcStatus::LocalProtection, 0);
        self.apply(Verdict::RequesterFatal, host);
    }
}
