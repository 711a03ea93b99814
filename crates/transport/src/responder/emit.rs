//! Sending what is owed: acknowledgements, READ responses, atomic results, in the order they came to be owed.

use terrace_wire::{Aeth, Extensions, Opcode, Operation, Position, Psn, Service, Syndrome, Trailer};

use super::duplicates::refuse_repetition;
use super::{Owed, Responder, event_of};
use crate::common::{Common, push_packet};
use crate::host::{Host, RemoteError, Sink};
use crate::types::QpEvent;

/// What came of trying to send one packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answered {
    Sent,
    Nothing,
    SinkFull,
    Broken(QpEvent),
}

impl Responder {
    /// Whether anything but a plain ACK is owed.
    pub(crate) fn owes_more_than_ack(&self) -> bool {
        self.owed.len() > 1 || self.owed.front().is_some_and(|owed| !is_plain_ack(owed))
    }

    pub(crate) fn owes(&self) -> bool {
        !self.owed.is_empty()
    }

    /// Sends one packet of what is owed.
    pub(crate) fn emit(&mut self, common: &mut Common, host: &impl Host, sink: &mut impl Sink) -> Answered {
        let Some(owed) = self.owed.front_mut() else { return Answered::Nothing };
        let pushed = match owed {
            Owed::Read { .. } => return self.emit_read(common, host, sink),
            Owed::Ack { psn, syndrome, msn } => {
                let ext =
                    Extensions { aeth: Some(Aeth { syndrome: *syndrome, msn: *msn }), ..Default::default() };
                push_answer(common, sink, Opcode::RcAcknowledge, *psn, &ext)
            }
            Owed::AtomicResult { psn, value, msn } => {
                let ext =
                    Extensions { aeth: Some(ack_with(*msn)), atomic_ack: Some(*value), ..Default::default() };
                push_answer(common, sink, Opcode::RcAtomicAcknowledge, *psn, &ext)
            }
            Owed::Done { psn, msn } => {
                let ext = Extensions { aeth: Some(ack_with(*msn)), ..Default::default() };
                push_answer(common, sink, Opcode::RcReadResponseOnly, *psn, &ext)
            }
        };
        match pushed {
            None => Answered::SinkFull,
            Some(len) => {
                count(common, len);
                self.owed.pop_front();
                Answered::Sent
            }
        }
    }

    /// One packet of a READ's data. Memory that is gone by now turns the rest into a NAK.
    fn emit_read(&mut self, common: &mut Common, host: &impl Host, sink: &mut impl Sink) -> Answered {
        let Some(Owed::Read { psn, va, rkey, length, packets, sent, msn, repeat }) = self.owed.front_mut()
        else {
            return Answered::Nothing;
        };
        let offset = u64::from(*sent) * common.mtu();
        let len = common.mtu().min(*length - offset) as usize;
        let position = match (*sent == 0, *sent + 1 == *packets) {
            (true, true) => Position::Only,
            (true, false) => Position::First,
            (false, true) => Position::Last,
            (false, false) => Position::Middle,
        };
        let opcode = Opcode::for_message(Service::Rc, Operation::ReadResponse, position, Trailer::None)
            .expect("the table has READ responses in every position");
        let aeth = (position != Position::Middle).then(|| ack_with(*msn));
        let ext = Extensions { aeth, ..Default::default() };
        let (at, key, here) = (va.wrapping_add(offset), *rkey, psn.plus(*sent));
        let Some(path) = common.attr.path else { return Answered::Nothing };
        let bth = common.bth(opcode, here);
        let fill = |out: &mut [u8]| if out.is_empty() { Ok(()) } else { host.remote_read(key, at, out) };
        match push_packet(sink, &path, bth, &ext, len, fill) {
            Ok(None) => Answered::SinkFull,
            Ok(Some(len)) => {
                *sent += 1;
                if *sent == *packets {
                    self.owed.pop_front();
                }
                count(common, len);
                Answered::Sent
            }
            Err(error) => {
                let (msn, repeat) = (*msn, *repeat);
                if repeat {
                    self.owed[0] = refuse_repetition(common, here, msn, error);
                    return self.emit(common, host, sink);
                }
                self.fail_read(common, here, msn, error)
            }
        }
    }

    fn fail_read(&mut self, common: &mut Common, psn: Psn, msn: u32, error: RemoteError) -> Answered {
        let code = error.into();
        common.counters.error_naks_sent += 1;
        // Nothing that was owed after this READ may be answered: the connection ends here.
        self.owed.clear();
        self.owed.push_back(Owed::Ack { psn, syndrome: Syndrome::Nak(code), msn });
        Answered::Broken(event_of(code))
    }
}

fn is_plain_ack(owed: &Owed) -> bool {
    matches!(owed, Owed::Ack { syndrome: Syndrome::Ack { .. }, .. })
}

fn ack_with(msn: u32) -> Aeth {
    Aeth { syndrome: Syndrome::Ack { credits: 31 }, msn }
}

fn count(common: &mut Common, len: usize) {
    common.counters.tx_packets += 1;
    common.counters.tx_bytes += len as u64;
}

fn push_answer(
    common: &Common,
    sink: &mut impl Sink,
    opcode: Opcode,
    psn: Psn,
    ext: &Extensions,
) -> Option<usize> {
    let path = common.attr.path?;
    let filled: Result<_, std::convert::Infallible> =
        push_packet(sink, &path, common.bth(opcode, psn), ext, 0, |_| Ok(()));
    match filled {
        Ok(pushed) => pushed,
    }
}
