//! Requests whose memory is absent. The host carries them out meanwhile ([`Deferred`]); here they wait in their place among
//! what the peer is owed, so that answers keep their order whatever arrives first:
//!
//! - A READ is fetched ahead, at most [`FETCH_BYTES_MAX`] at a time, from the moment it is accepted.
//! - A WRITE's ACK, and everything behind it, waits until the write is done.
//! - A completion that tells the program of a message waits for the writes before it: it stands behind one of them.
//! - What others could see before those writes (an atomic, a FLUSH) is told to come back.

use std::collections::VecDeque;

use terrace_wire::{OpcodeInfo, Psn, Reth, Syndrome};

use super::{ABSENT, Incoming, Kept, OWED_MAX, Owed, Refusal, Responder, UNSETTLED};
use crate::common::Common;
use crate::host::{Deferred, Host, RemoteAccess, RemoteError};
use crate::types::{QpType, Wc};

/// Most bytes of a READ that are fetched at a time; a multiple of every path MTU. While they leave, as many are fetched.
const FETCH_BYTES_MAX: u64 = 64 << 10;

/// Packets of WRITEs that may be under way at a time.
const WRITES_MAX: usize = 512;

/// The answer to a READ.
#[derive(Debug)]
pub(super) struct ReadAnswer {
    pub(super) psn: Psn,
    pub(super) va: u64,
    pub(super) rkey: u32,
    pub(super) length: u64,
    pub(super) packets: u32,
    /// Packets that have left.
    pub(super) sent: u32,
    pub(super) msn: u32,
    /// Whether the peer asks for it again: then it takes no resource that a new READ could need.
    pub(super) repeat: bool,
    /// What is being fetched, oldest first: no more than two parts.
    parts: VecDeque<Part>,
    /// Whether there was no room to fetch the next packet's data.
    starved: bool,
}

/// A part of a READ that its host fetches.
#[derive(Debug)]
struct Part {
    start: u64,
    end: u64,
    data: Box<dyn Deferred>,
}

/// Where the next packet's data is.
pub(super) enum Source<'a> {
    Memory,
    /// In a part that has been fetched, this far from its beginning.
    Part(&'a dyn Deferred, u64),
    /// Nowhere yet.
    UnderWay,
}

impl ReadAnswer {
    /// The answer to this request.
    pub(super) fn new(common: &Common, reth: Reth, psn: Psn) -> ReadAnswer {
        let length = u64::from(reth.length);
        ReadAnswer {
            psn,
            va: reth.va,
            rkey: reth.rkey,
            length,
            packets: length.div_ceil(common.mtu()).max(1) as u32,
            sent: 0,
            msn: 0,
            repeat: false,
            parts: VecDeque::new(),
            starved: false,
        }
    }

    /// Checks the request, and begins to fetch what is absent.
    pub(super) fn prepare(&mut self, common: &mut Common, host: &impl Host) -> Result<(), RemoteError> {
        match host.remote_check(self.rkey, self.va, self.length, RemoteAccess::Read) {
            Err(RemoteError::NotReady) => self.fetch(common, host, 0),
            result => result,
        }
    }

    /// Begins to fetch the part from `offset` on. When there is no room, it is noted.
    pub(super) fn fetch(
        &mut self,
        common: &mut Common,
        host: &impl Host,
        offset: u64,
    ) -> Result<(), RemoteError> {
        let len = FETCH_BYTES_MAX.min(self.length - offset);
        self.starved = false;
        match host.fetch(self.rkey, self.va.wrapping_add(offset), len) {
            Ok(data) => {
                common.counters.fetches += 1;
                self.parts.push_back(Part { start: offset, end: offset + len, data });
                Ok(())
            }
            Err(RemoteError::NotReady) => {
                self.starved = true;
                Ok(())
            }
            // The memory is of the ordinary kind by now.
            Err(RemoteError::Retry) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Where the data at `offset` is.
    pub(super) fn source(&self, offset: u64) -> Result<Source<'_>, RemoteError> {
        match self.parts.front() {
            Some(part) if part.start <= offset => match part.data.outcome() {
                None => Ok(Source::UnderWay),
                Some(Ok(())) => Ok(Source::Part(&*part.data, offset - part.start)),
                Some(Err(error)) => Err(error),
            },
            _ if self.starved => Ok(Source::UnderWay),
            _ => Ok(Source::Memory),
        }
    }

    /// A packet with the data at `offset` has left. When it was the first of a part, the next part is fetched meanwhile.
    pub(super) fn advance(&mut self, common: &mut Common, host: &impl Host, offset: u64) {
        self.sent += 1;
        let next = offset + common.mtu();
        let Some(part) = self.parts.front() else { return };
        let (begins, end) = (part.start == offset, part.end);
        if begins && end < self.length && self.parts.len() == 1 {
            // What goes wrong here is found out when it is that part's turn.
            let _ = self.fetch(common, host, end);
            self.starved = false;
        }
        if next >= end {
            self.parts.pop_front();
        }
    }
}

/// WRITEs that are under way, and the ACKs that wait for them.
#[derive(Debug, Default)]
pub(super) struct Settle {
    writes: VecDeque<Write>,
}

#[derive(Debug)]
struct Write {
    psn: Psn,
    transfer: Box<dyn Deferred>,
    /// PSN and MSN of the latest ACK that waits for this write and for none after it.
    ack: Option<(Psn, u32)>,
}

/// What has become of the writes that an entry waits for.
pub(super) enum Settled {
    /// Some are under way; this ACK need not wait for them.
    InPart(Option<(Psn, u32)>),
    All(Option<(Psn, u32)>),
    Failed(Psn, RemoteError),
}

impl Settle {
    /// Owes an ACK for everything up to `psn` once the latest write is done.
    pub(super) fn owe_ack(&mut self, up_to: Psn, msn: u32) {
        let Some(write) = self.writes.back_mut() else { return };
        let psn = write.ack.map_or(up_to, |(psn, _)| if psn.is_before(up_to) { up_to } else { psn });
        write.ack = Some((psn, msn));
    }

    /// Takes the writes away that have ended, in order.
    pub(super) fn look(&mut self) -> Settled {
        let mut ack = None;
        while let Some(write) = self.writes.front() {
            match write.transfer.outcome() {
                None => return Settled::InPart(ack),
                Some(Ok(())) => ack = write.ack.or(ack),
                Some(Err(error)) => return Settled::Failed(write.psn, error),
            }
            self.writes.pop_front();
        }
        Settled::All(ack)
    }
}

/// An atomic or a FLUSH that is under way.
#[derive(Debug)]
pub(super) struct Parked {
    pub(super) psn: Psn,
    pub(super) msn: u32,
    /// Whether the answer has a value, or is empty.
    pub(super) returns_value: bool,
    pub(super) transfer: Box<dyn Deferred>,
}

impl Parked {
    /// The answer, once there is one.
    pub(super) fn answer(&self) -> Option<Result<Owed, RemoteError>> {
        let outcome = self.transfer.outcome()?;
        let (psn, msn) = (self.psn, self.msn);
        Some(outcome.and_then(|()| {
            if !self.returns_value {
                return Ok(Owed::Done { psn, msn });
            }
            let mut value = [0; 8];
            self.transfer.read(0, &mut value)?;
            Ok(Owed::AtomicResult { psn, value: u64::from_ne_bytes(value), msn })
        }))
    }
}

impl Owed {
    /// The PSN of what waits for memory, if this does.
    fn waits_at(&self, mtu: u64) -> Option<Psn> {
        match self {
            Owed::Read(read) => {
                let under_way = matches!(read.source(u64::from(read.sent) * mtu), Ok(Source::UnderWay));
                under_way.then(|| read.psn.plus(read.sent))
            }
            Owed::Settle(settle) => settle.writes.front().map(|write| write.psn),
            Owed::Parked(parked) => Some(parked.psn),
            _ => None,
        }
    }

    /// Whether this stands for a change of memory that has yet to come about.
    pub(super) fn is_unsettled(&self) -> bool {
        matches!(self, Owed::Settle(_) | Owed::Parked(_))
    }
}

impl Responder {
    /// What was parked is looked at again.
    pub(crate) fn wake(&mut self) {
        self.parked = false;
        self.woken = true;
    }

    /// The PSN at which everything that is owed waits for memory.
    pub(super) fn waits_at(&self, common: &Common) -> Option<Psn> {
        self.owed.front()?.waits_at(common.mtu())
    }

    /// Whether changes of memory that the peer has asked for have yet to come about.
    pub(super) fn is_unsettled(&self) -> bool {
        self.owed.iter().any(Owed::is_unsettled)
    }

    /// Writes a packet's data, at once or by and by.
    pub(super) fn write(
        &mut self,
        common: &mut Common,
        host: &impl Host,
        rkey: u32,
        va: u64,
        data: &[u8],
    ) -> Result<(), Refusal> {
        match host.remote_write(rkey, va, data) {
            Ok(()) => return Ok(()),
            Err(RemoteError::NotReady) if self.writes_under_way() < WRITES_MAX => {}
            Err(error) => return Err(error.into()),
        }
        let transfer = host.put(rkey, va, data)?;
        common.counters.puts += 1;
        let write = Write { psn: self.expected, transfer, ack: None };
        match self.owed.back_mut() {
            Some(Owed::Settle(settle)) => settle.writes.push_back(write),
            _ => self.owed.push_back(Owed::Settle(Settle { writes: VecDeque::from([write]) })),
        }
        Ok(())
    }

    fn writes_under_way(&self) -> usize {
        let writes = |owed: &Owed| if let Owed::Settle(settle) = owed { settle.writes.len() } else { 0 };
        self.owed.iter().map(writes).sum()
    }

    /// Tells the program of a message, when all that the peer wrote before it is there.
    pub(super) fn tell(&mut self, common: &mut Common, wc: Wc) {
        match self.is_unsettled() {
            true => self.owed.push_back(Owed::Tell(wc)),
            false => common.complete_receive(wc),
        }
    }

    /// Tells of the messages that wait for nothing any more. READs that are answered before them do not matter.
    pub(super) fn tell_settled(&mut self, common: &mut Common) {
        let mut index = 0;
        while let Some(owed) = self.owed.get(index) {
            match owed {
                Owed::Tell(wc) => {
                    common.complete_receive(*wc);
                    self.owed.remove(index);
                }
                owed if owed.is_unsettled() => return,
                _ => index += 1,
            }
        }
    }

    /// Messages that cannot be told of yet may be as many as fit among what is owed. An unreliable peer cannot be told to
    /// come back: of its messages there are at most as many as receives were posted.
    pub(super) fn require_room_to_tell(&self, common: &Common) -> Result<(), Refusal> {
        let is_full = self.owed.len() >= OWED_MAX && !common.is(QpType::Uc);
        if is_full && self.is_unsettled() { Err(ABSENT) } else { Ok(()) }
    }

    /// While writes are under way, nothing breaks the connection: its NAK would acknowledge them, and what the program
    /// has not been told of yet could not be told any more. The peer sends the bad packet again, and then it does.
    pub(super) fn postpone(&mut self, info: &OpcodeInfo, refusal: Refusal) -> Refusal {
        let for_now = matches!(refusal, Refusal::NotReady | Refusal::ComeBack { .. });
        if for_now || !self.is_unsettled() {
            return refusal;
        }
        let is_new = |incoming: &mut Incoming| matches!(incoming, Incoming::Send { offset: 0, .. });
        if info.position.is_first()
            && let Some(Incoming::Send { receive, .. }) = self.incoming.take_if(is_new)
        {
            self.give_back(receive);
        }
        UNSETTLED
    }

    /// Gives READs room that had none, the oldest first.
    pub(super) fn feed(&mut self, common: &mut Common, host: &impl Host) {
        if !std::mem::take(&mut self.woken) {
            return;
        }
        for owed in &mut self.owed {
            if let Owed::Read(read) = owed
                && read.starved
            {
                let offset = u64::from(read.sent) * common.mtu();
                // What goes wrong here is found out when it is that READ's turn.
                let _ = read.fetch(common, host, offset);
                if read.starved {
                    return;
                }
            }
        }
    }

    /// Notes what an atomic has returned, in case the peer asks again.
    pub(super) fn remember_value(&mut self, at: Psn, value: u64, msn: u32) {
        if let Some(kept) = self.history.iter_mut().rev().find(|kept| kept.psn == at) {
            kept.what = Kept::Atomic { value, msn };
        }
    }

    /// Forgets what is owed from the entry `first` on; the program learns that the messages in there are lost.
    pub(super) fn forget_owed(&mut self, common: &mut Common, first: usize) {
        for owed in self.owed.drain(first..) {
            if let Owed::Tell(wc) = owed {
                let wc = common.flushed_receive(wc.wr_id);
                common.complete_receive(wc);
            }
        }
        self.parked = false;
    }

    /// An ACK that has waited for writes leaves first.
    pub(super) fn owe_first(&mut self, common: &Common, ack: Option<(Psn, u32)>) {
        if let Some((psn, msn)) = ack
            && !common.is(QpType::Uc)
        {
            self.owed.push_front(Owed::Ack { psn, syndrome: Syndrome::Ack { credits: 31 }, msn });
        }
    }
}
