//! Sending pending responses (acknowledgements, READ responses, atomic results) in order.

use terrace_wire::{Aeth, Extensions, Opcode, Operation, Path, Position, Psn, Service, Syndrome, Trailer};

use super::Responder;
use super::duplicates::refuse_repetition;
use super::read::{ReadResponse, Source};
use super::refusal::{DEFERRED_TIMER, event_of};
use super::response::{Progress, Response};
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
    pub(crate) fn wants_to_emit_more_than_ack(&self) -> bool {
        let more =
            self.pending.len() > 1 || self.pending.front().is_some_and(|response| !is_plain_ack(response));
        (more && !self.blocked) || self.rnr_due
    }

    pub(crate) fn wants_to_emit(&self) -> bool {
        (!self.pending.is_empty() && !self.blocked) || self.rnr_due
    }

    /// Offers the pending ACK to `take` if it is the only pending response, and drops it if `take` accepts it.
    pub(crate) fn piggyback_ack(&mut self, take: impl FnOnce(Psn) -> bool) {
        if let Some(Response::Ack { psn, .. }) = self.pending.front()
            && self.wants_to_emit()
            && !self.wants_to_emit_more_than_ack()
            && take(*psn)
        {
            self.pending.pop_front();
        }
    }

    /// Sends one packet of the pending responses.
    pub(crate) fn emit(&mut self, call: &mut Call<'_, impl Host>, sink: &mut impl Sink) -> Answered {
        if self.rnr_due {
            return self.emit_rnr_nak(call, sink);
        }
        if self.blocked {
            return Answered::Nothing;
        }
        if let Some(broken) = self.finish_deferred(call) {
            return broken;
        }
        self.schedule(call);
        if let Some(answered) = self.emit_read_for_ack(call, sink) {
            return answered;
        }
        let Some(response) = self.pending.front_mut() else { return Answered::Nothing };
        let pushed = match response {
            Response::Read(_) => return self.emit_read(call, sink),
            // Deferred until memory is there.
            Response::Writes(_) | Response::Deferred(_) | Response::Completion(_) => {
                self.blocked = true;
                return Answered::Nothing;
            }
            Response::Ack { psn, syndrome, msn } => {
                let ext =
                    Extensions { aeth: Some(Aeth { syndrome: *syndrome, msn: *msn }), ..Default::default() };
                push_answer(call, sink, Operation::Acknowledge, *psn, &ext)
            }
            Response::AtomicResult { psn, value, msn } => {
                let ext =
                    Extensions { aeth: Some(ack_with(*msn)), atomic_ack: Some(*value), ..Default::default() };
                push_answer(call, sink, Operation::AtomicAcknowledge, *psn, &ext)
            }
            Response::Done { psn, msn } => {
                let ext = Extensions { aeth: Some(ack_with(*msn)), ..Default::default() };
                push_answer(call, sink, Operation::ReadResponse, *psn, &ext)
            }
        };
        match pushed {
            None => Answered::SinkFull,
            Some(len) => {
                count(call, len);
                self.pending.pop_front();
                Answered::Sent
            }
        }
    }

    /// Sends an RNR NAK to a peer that repeats a deferred operation, unless that has completed.
    fn emit_rnr_nak(&mut self, call: &mut Call<'_, impl Host>, sink: &mut impl Sink) -> Answered {
        if let Some(psn) = self.blocked_psn(call) {
            let syndrome = Syndrome::RnrNak { timer: DEFERRED_TIMER };
            let ext = Extensions { aeth: Some(Aeth { syndrome, msn: self.msn }), ..Default::default() };
            let Some(len) = push_answer(call, sink, Operation::Acknowledge, psn, &ext) else {
                return Answered::SinkFull;
            };
            count(call, len);
            call.counters.rnr_naks_sent += 1;
            self.rnr_due = false;
            return Answered::Sent;
        }
        self.rnr_due = false;
        self.emit(call, sink)
    }

    /// Completes the oldest deferred operations, until a response can be sent or has to wait.
    fn finish_deferred(&mut self, call: &mut Call<'_, impl Host>) -> Option<Answered> {
        loop {
            match self.pending.front_mut()? {
                Response::Writes(writes) => match writes.poll() {
                    Progress::Failed(psn, error) => return Some(self.fail(call, psn, self.msn, error)),
                    Progress::Partial(ack) => {
                        self.queue_deferred_ack(call, ack);
                        return None;
                    }
                    Progress::Complete(ack) => {
                        self.pending.pop_front();
                        self.schedule_due |= self.reads_waiting;
                        self.deliver_completions(call);
                        self.queue_deferred_ack(call, ack);
                    }
                },
                Response::Deferred(operation) => {
                    let (psn, msn) = (operation.psn, operation.msn);
                    match operation.response()? {
                        Ok(answer) => {
                            if let Response::AtomicResult { value, .. } = answer {
                                self.record_value(psn, value, msn);
                            }
                            self.pending[0] = answer;
                            self.deliver_completions(call);
                        }
                        Err(error) => return Some(self.fail(call, psn, msn, error)),
                    }
                }
                _ => return None,
            }
        }
    }

    /// Sends the first packet of a READ response in place of the ACK in front of it, because a response acknowledges all earlier requests
    /// (IBTA volume 1, 9.7.5.1.2). `None` if the ACK has to go first: there is no such response, or it cannot be sent yet.
    fn emit_read_for_ack(
        &mut self,
        call: &mut Call<'_, impl Host>,
        sink: &mut impl Sink,
    ) -> Option<Answered> {
        let is_new =
            |response: &Response| matches!(response, Response::Read(read) if read.sent == 0 && !read.repeat);
        if !self.pending.get(1).is_some_and(is_new) || !self.pending.front().is_some_and(is_plain_ack) {
            return None;
        }
        let ack = self.pending.pop_front()?;
        let answered = self.emit_read(call, sink);
        match answered {
            // A NAK acknowledges what is before it, too.
            Answered::Sent | Answered::Broken(_) => return Some(answered),
            Answered::SinkFull | Answered::Nothing => self.pending.push_front(ack),
        }
        self.blocked = false;
        (answered == Answered::SinkFull).then_some(answered)
    }

    /// Sends one packet of READ data. If the memory is gone by now, a NAK takes the place of the rest.
    fn emit_read(&mut self, call: &mut Call<'_, impl Host>, sink: &mut impl Sink) -> Answered {
        let Some(Response::Read(read)) = self.pending.front_mut() else { return Answered::Nothing };
        let Some(path) = call.attr.path else { return Answered::Nothing };
        let offset = u64::from(read.sent) * call.mtu();
        let mut pushed = push_data(call, read, &path, offset, call.host, sink);
        if matches!(pushed, Err(RemoteError::NotReady | RemoteError::Retry)) {
            let fetched = if read.awaits_buffer() { Ok(()) } else { read.fetch(call) };
            pushed = fetched.and_then(|()| match read.is_blocked() {
                true => Ok(Pushed::Fetching),
                // The fetched data may be there already.
                false => push_data(call, read, &path, offset, call.host, sink),
            });
        }
        match pushed {
            Ok(Pushed::SinkFull) => Answered::SinkFull,
            Ok(Pushed::Fetching) => {
                self.blocked = true;
                self.reads_waiting |= read.is_waiting();
                Answered::Nothing
            }
            Ok(Pushed::Sent(len)) => {
                read.advance(call, offset);
                self.reads_waiting |= read.is_waiting();
                if read.sent == read.end {
                    self.pending.pop_front();
                    self.schedule_due |= self.reads_waiting;
                }
                count(call, len);
                Answered::Sent
            }
            Err(error) => {
                let (here, msn) = (read.next_psn(), read.msn);
                if read.repeat {
                    self.pending[0] = refuse_repetition(call, here, msn, error);
                    return self.emit(call, sink);
                }
                self.fail(call, here, msn, error)
            }
        }
    }

    /// Fails a request that was accepted. The pending responses behind it are dropped: the connection ends here.
    fn fail(&mut self, call: &mut Call<'_, impl Host>, psn: Psn, msn: u32, error: RemoteError) -> Answered {
        let code = error.into();
        self.drop_pending(call, 0);
        if call.is(QpType::Uc) {
            return Answered::Broken(QpEvent::Fatal);
        }
        call.counters.error_naks_sent += 1;
        self.pending.push_back(Response::Ack { psn, syndrome: Syndrome::Nak(code), msn });
        Answered::Broken(event_of(code))
    }
}

/// Result of pushing a packet of READ data.
enum Pushed {
    Sent(usize),
    SinkFull,
    /// The data is not fetched yet.
    Fetching,
}

/// Pushes the packet with a READ's data from `offset` on.
fn push_data(
    common: &Common,
    read: &ReadResponse,
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
    if matches!(source, Source::Fetching) {
        return Ok(Pushed::Fetching);
    }
    let fill = |out: &mut [u8]| match source {
        _ if out.is_empty() => Ok(()),
        Source::Part(data, skipped) => data.read(skipped, out),
        _ => read.reach(host, |host| host.remote_read(read.rkey, read.va.wrapping_add(offset), out)),
    };
    let pushed = push_packet(sink, path, bth, &ext, len, fill)?;
    Ok(pushed.map_or(Pushed::SinkFull, Pushed::Sent))
}

pub(super) fn is_plain_ack(response: &Response) -> bool {
    matches!(response, Response::Ack { syndrome: Syndrome::Ack { .. }, .. })
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
