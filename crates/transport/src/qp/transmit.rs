//! What can be sent: requests, responses, ACKs, CNPs.

use terrace_wire::{Extensions, Opcode, Psn, Time};

use super::Qp;
use crate::common::{Call, Verdict, push_packet};
use crate::host::{Host, Sink};
use crate::requester::Emitted;
use crate::responder::Answered;

/// When to send an ACK that is the only pending response. A caller that defers it does not call [`Qp::poll_transmit`] while
/// [`Qp::wants_only_to_acknowledge`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AckPolicy {
    /// After requests, so that both leave in one system call. A sink that can ([`Sink::carry_ack`]) piggybacks it on a
    /// request: the peer then gets the ACK of its message together with the reply.
    Now,
    /// Before requests, as an RNIC does that acknowledges a message before its program sees it. The peer then gets the
    /// ACK of its message before the reply.
    First,
}

/// Why `poll_transmit` stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transmit {
    /// There is nothing more to send now.
    Idle,
    /// The sink is full; call again once it was drained.
    SinkFull,
}

impl Qp {
    /// Sends what can be sent: requests and pending responses. Reads the clock only if needed.
    #[inline]
    pub fn poll_transmit(
        &mut self,
        now: impl Fn() -> Time,
        host: &impl Host,
        sink: &mut impl Sink,
        acks: AckPolicy,
    ) -> Transmit {
        if acks == AckPolicy::First && self.holds_ack() && !self.emit_responses(host, sink) {
            return Transmit::SinkFull;
        }
        if !self.emit_requests(&now, host, sink) {
            return Transmit::SinkFull;
        }
        if acks == AckPolicy::Now {
            self.responder.piggyback_ack(|psn| sink.carry_ack(psn));
        }
        if !self.emit_responses(host, sink) {
            return Transmit::SinkFull;
        }
        self.note_drained(host);
        if self.cnp_due { self.emit_cnp(sink) } else { Transmit::Idle }
    }

    /// False when the sink is full.
    fn emit_requests(&mut self, now: &impl Fn() -> Time, host: &impl Host, sink: &mut impl Sink) -> bool {
        loop {
            match self.requester.emit(now, &mut Call { common: &mut self.common, host }, sink) {
                Emitted::Sent => {}
                Emitted::Nothing => return true,
                Emitted::SinkFull => return false,
                Emitted::Broken => {
                    self.apply(Verdict::RequesterFatal, host);
                    return true;
                }
            }
        }
    }

    /// False when the sink is full.
    fn emit_responses(&mut self, host: &impl Host, sink: &mut impl Sink) -> bool {
        loop {
            if !self.responder.wants_to_emit() {
                return true;
            }
            match self.responder.emit(&mut Call { common: &mut self.common, host }, sink) {
                Answered::Sent => {}
                Answered::Nothing => return true,
                Answered::SinkFull => return false,
                Answered::Broken(event) => self.apply(Verdict::ResponderFatal(event), host),
            }
        }
    }

    fn emit_cnp(&mut self, sink: &mut impl Sink) -> Transmit {
        let Some(path) = self.common.attr.path else { return Transmit::Idle };
        let mut bth = self.common.bth(Opcode::Cnp, Psn::default());
        bth.becn = true;
        let Ok(pushed): Result<_, std::convert::Infallible> =
            push_packet(sink, &path, bth, &Extensions::default(), 0, |_| Ok(()));
        let Some(len) = pushed else { return Transmit::SinkFull };
        self.cnp_due = false;
        self.common.counters.cnps_sent += 1;
        self.common.counters.tx_packets += 1;
        self.common.counters.tx_bytes += len as u64;
        Transmit::Idle
    }
}
