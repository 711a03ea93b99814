//! Sending pending responses (acknowledgements, READ responses, atomic results) in order.

use terrace_wire::{Aeth, Extensions, Opcode, Operation, Path, Position, Psn, Service, Syndrome, Trailer};

use super::duplicates::refuse_repetition;
use super::parked::{ReadAnswer, Settled, Source};
use super::{Owed, PATIENCE_TIMER, Responder, event_of};
use crate::common::{Call, Common, push_packet};
use crate::host::{Host, RemoteError, Sink};
use crate::types::{QpEvent, QpType};

/// Result of an attempt to send one packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answered {
    Sent,
    Nothing,
    SinkFull,
    Broken(QpEvent),
}

impl Responder {
    /// Whether a response other than a plain ACK can be sent.
    pub(crate) fn owes_more_than_ack(&self) -> bool {
        let more = self.owed.len() > 1 || self.owed.front().is_some_and(|owed| !is_plain_ack(owed));
        (more && !self.parked) || self.impatient
    }

    pub(crate) fn owes(&self) -> bool {
        (!self.owed.is_empty() && !self.parked) || self.impatient
    }

    /// Offers the pending ACK to `take` if it is the only pending response, and drops it if `take` accepts it.
    pub(crate) fn hand_over_ack(&mut self, take: impl FnOnce(Psn) -> bool) {
        if let Some(Owed::Ack { psn, .. }) = self.owed.front()
            && self.owes()
            && !self.owes_more_than_ack()
            && take(*psn)
        {
            self.owed.pop_front();
        }
    }

    /// Sends one packet of the pending responses.
    pub(crate) fn emit(&mut self, call: &mut Call<'_, impl Host>, sink: &mut impl Sink) -> Answered {
        if self.impatient {
            return self.ask_for_patience(call, sink);
        }
        if self.parked {
            return Answered::Nothing;
        }
        if let Some(broken) = self.settle(call) {
            return broken;
        }
        self.schedule(call);
        let Some(owed) = self.owed.front_mut() else { return Answered::Nothing };
        let pushed = match owed {
            Owed::Read(_) => return self.emit_read(call, sink),
            // Deferred until memory is there.
            Owed::Settle(_) | Owed::Parked(_) | Owed::Tell(_) => {
                self.parked = true;
                return Answered::Nothing;
            }
            Owed::Ack { psn, syndrome, msn } => {
                let ext =
                    Extensions { aeth: Some(Aeth { syndrome: *syndrome, msn: *msn }), ..Default::default() };
                push_answer(call, sink, Operation::Acknowledge, *psn, &ext)
            }
            Owed::AtomicResult { psn, value, msn } => {
                let ext =
                    Extensions { aeth: Some(ack_with(*msn)), atomic_ack: Some(*value), ..Default::default() };
                push_answer(call, sink, Operation::AtomicAcknowledge, *psn, &ext)
            }
            Owed::Done { psn, msn } => {
                let ext = Extensions { aeth: Some(ack_with(*msn)), ..Default::default() };
                push_answer(call, sink, Operation::ReadResponse, *psn, &ext)
            }
        };
        match pushed {
            None => Answered::SinkFull,
            Some(len) => {
                count(call, len);
                self.owed.pop_front();
                Answered::Sent
            }
        }
    }

    /// Sends an RNR NAK to a peer that repeats a deferred operation, unless that has completed.
    fn ask_for_patience(&mut self, call: &mut Call<'_, impl Host>, sink: &mut impl Sink) -> Answered {
        if let Some(psn) = self.waits_at(call) {
            let syndrome = Syndrome::RnrNak { timer: PATIENCE_TIMER };
            let ext = Extensions { aeth: Some(Aeth { syndrome, msn: self.msn }), ..Default::default() };
            let Some(len) = push_answer(call, sink, Operation::Acknowledge, psn, &ext) else {
                return Answered::SinkFull;
            };
            count(call, len);
            call.counters.rnr_naks_sent += 1;
            self.impatient = false;
            return Answered::Sent;
        }
        self.impatient = false;
        self.emit(call, sink)
    }

    /// Completes the oldest deferred operations, until a response can be sent or has to wait.
    fn settle(&mut self, call: &mut Call<'_, impl Host>) -> Option<Answered> {
        loop {
            match self.owed.front_mut()? {
                Owed::Settle(settle) => match settle.look() {
                    Settled::Failed(psn, error) => return Some(self.fail(call, psn, self.msn, error)),
                    Settled::InPart(ack) => {
                        self.owe_first(call, ack);
                        return None;
                    }
                    Settled::All(ack) => {
                        self.owed.pop_front();
                        self.woken |= self.hungry;
                        self.tell_settled(call);
                        self.owe_first(call, ack);
                    }
                },
                Owed::Parked(parked) => {
                    let (psn, msn) = (parked.psn, parked.msn);
                    match parked.answer()? {
                        Ok(answer) => {
                            if let Owed::AtomicResult { value, .. } = answer {
                                self.remember_value(psn, value, msn);
                            }
                            self.owed[0] = answer;
                            self.tell_settled(call);
                        }
                        Err(error) => return Some(self.fail(call, psn, msn, error)),
                    }
                }
                _ => return None,
            }
        }
    }

    /// Sends one packet of READ data. If the memory is gone by now, a NAK takes the place of the rest.
    fn emit_read(&mut self, call: &mut Call<'_, impl Host>, sink: &mut impl Sink) -> Answered {
        let Some(Owed::Read(read)) = self.owed.front_mut() else { return Answered::Nothing };
        let Some(path) = call.attr.path else { return Answered::Nothing };
        let offset = u64::from(read.sent) * call.mtu();
        let mut pushed = push_data(call, read, &path, offset, call.host, sink);
        if matches!(pushed, Err(RemoteError::NotReady | RemoteError::Retry)) {
            let asked = if read.lacks_room() { Ok(()) } else { read.fetch(call) };
            pushed = asked.and_then(|()| match read.is_blocked() {
                true => Ok(Pushed::UnderWay),
                // The fetched data may be there already.
                false => push_data(call, read, &path, offset, call.host, sink),
            });
        }
        match pushed {
            Ok(Pushed::SinkFull) => Answered::SinkFull,
            Ok(Pushed::UnderWay) => {
                self.parked = true;
                self.hungry |= read.is_hungry();
                Answered::Nothing
            }
            Ok(Pushed::Sent(len)) => {
                read.advance(call, offset);
                self.hungry |= read.is_hungry();
                if read.sent == read.end {
                    self.owed.pop_front();
                    self.woken |= self.hungry;
                }
                count(call, len);
                Answered::Sent
            }
            Err(error) => {
                let (here, msn) = (read.next_psn(), read.msn);
                if read.repeat {
                    self.owed[0] = refuse_repetition(call, here, msn, error);
                    return self.emit(call, sink);
                }
                self.fail(call, here, msn, error)
            }
        }
    }

    /// Fails a request that was accepted. The pending responses behind it are dropped: the connection ends here.
    fn fail(&mut self, call: &mut Call<'_, impl Host>, psn: Psn, msn: u32, error: RemoteError) -> Answered {
        let code = error.into();
        self.forget_owed(call, 0);
        if call.is(QpType::Uc) {
            return Answered::Broken(QpEvent::Fatal);
        }
        call.counters.error_naks_sent += 1;
        self.owed.push_back(Owed::Ack { psn, syndrome: Syndrome::Nak(code), msn });
        Answered::Broken(event_of(code))
    }
}

/// Result of pushing a packet of READ data.
enum Pushed {
    Sent(usize),
    SinkFull,
    /// The data is not there yet.
    UnderWay,
}

/// Pushes the packet with a READ's data from `offset` on.
fn push_data(
    common: &Common,
    read: &ReadAnswer,
    path: &Path,
    offset: u64,
    host: &impl Host,
    sink: &mut impl Sink,
) -> Result<Pushed, RemoteError> {
    let len = common.mtu().min(read.length - offset) as usize;
    let position = match (read.sent == 0, read.sent + 1 == read.packets) {
        (true, true) => Position::Only,
        (true, false) => Position::First,
        (false, true) => Position::Last,
        (false, false) => Position::Middle,
    };
    let opcode = answer_opcode(common, Operation::ReadResponse, position);
    let aeth = (position != Position::Middle).then(|| ack_with(read.msn));
    let ext = Extensions { aeth, ..Default::default() };
    let bth = common.bth(opcode, read.next_psn());
    let source = read.source(offset)?;
    if matches!(source, Source::UnderWay) {
        return Ok(Pushed::UnderWay);
    }
    let fill = |out: &mut [u8]| match source {
        _ if out.is_empty() => Ok(()),
        Source::Part(data, skipped) => data.read(skipped, out),
        _ => read.reach(host, |host| host.remote_read(read.rkey, read.va.wrapping_add(offset), out)),
    };
    let pushed = push_packet(sink, path, bth, &ext, len, fill)?;
    Ok(pushed.map_or(Pushed::SinkFull, Pushed::Sent))
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

/// The opcode of a response; only reliable connections have them.
fn answer_opcode(common: &Common, operation: Operation, position: Position) -> Opcode {
    let service = if common.is(QpType::XrcRecv) { Service::Xrc } else { Service::Rc };
    Opcode::for_message(service, operation, position, Trailer::None)
        .expect("the table has acknowledgements, and READ responses in every position")
}

fn push_answer(
    common: &Common,
    sink: &mut impl Sink,
    operation: Operation,
    psn: Psn,
    ext: &Extensions,
) -> Option<usize> {
    let path = common.attr.path?;
    let opcode = answer_opcode(common, operation, Position::Only);
    let filled: Result<_, std::convert::Infallible> =
        push_packet(sink, &path, common.bth(opcode, psn), ext, 0, |_| Ok(()));
    match filled {
        Ok(pushed) => pushed,
    }
}
