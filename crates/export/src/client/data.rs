//! One-sided accesses to an open file.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::Instant;

use smallvec::{SmallVec, smallvec};
use terrace_nic::{Error, QueuePair, SendOp, Sge, WcStatus};

use super::buffers::{RecordMemory, SLOT_BYTES, Slot};
use super::interrupt;
use super::session::{Opening, Session};
use crate::error::{AccessKind, ExportError};
use crate::proto::Link;

/// The most pieces of one call in flight.
const PIECES_MAX: usize = 16;
/// [`Access::begin`] has all of an access in flight that is no longer, if no other access uses the session's slots.
pub const IN_FLIGHT_MAX: usize = PIECES_MAX * SLOT_BYTES;
/// Placement of a FLUSH: persistence. Selectivity: the whole region (IBTA annex A19).
const PERSISTENT: u8 = 1 << 1;
const WHOLE_REGION: u8 = 1;
/// Copies without packets are made in pieces of so many bytes, so that none takes long.
const DIRECT_BYTES_MAX: usize = 1 << 20;

/// Why an access was not made.
pub enum Failure {
    /// The server refused it, and the queue pair of this generation has failed: the file may have changed.
    Refused { kind: AccessKind, generation: u64, status: WcStatus },
    /// Something else.
    Error(ExportError),
}

impl From<ExportError> for Failure {
    fn from(error: ExportError) -> Failure {
        Failure::Error(error)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::Error(error.into())
    }
}

/// A part of a call in flight.
struct Piece<'a> {
    number: u64,
    /// The span, and the bytes of it.
    span: usize,
    part: Range<usize>,
    slot: Slot<'a>,
}

/// Bytes that lie one after another in the file.
pub struct Span<'a> {
    /// Where in the file.
    pub offset: u64,
    /// The program's memory.
    pub bytes: Bytes<'a>,
}

/// Most accesses have one, for which nothing is allocated.
pub type Spans<'a> = SmallVec<[Span<'a>; 1]>;

/// What of some spans has not been begun.
#[derive(Default)]
struct Cursor {
    span: usize,
    begun: usize,
}

impl Cursor {
    /// The next part: a span, and up to `bytes_max` bytes of it. `None` at the end of the last one.
    fn next(&mut self, spans: &[Span<'_>], bytes_max: usize) -> Option<(usize, Range<usize>)> {
        while let Some(span) = spans.get(self.span) {
            let len = span.bytes.len();
            if self.begun < len {
                return Some((self.span, self.begun..len.min(self.begun + bytes_max)));
            }
            (self.span, self.begun) = (self.span + 1, 0);
        }
        None
    }
}

/// The program's memory of an access.
pub enum Bytes<'a> {
    /// To read into.
    Into(&'a mut [u8]),
    /// To write.
    From(&'a [u8]),
}

impl Bytes<'_> {
    fn len(&self) -> usize {
        match self {
            Bytes::Into(bytes) => bytes.len(),
            Bytes::From(bytes) => bytes.len(),
        }
    }

    fn operation(&self, va: u64, rkey: u32) -> SendOp {
        match self {
            Bytes::Into(_) => SendOp::Read { va, rkey },
            Bytes::From(_) => SendOp::Write { va, rkey },
        }
    }

    /// Makes the access without packets. False if it was not made.
    pub fn access_now(
        &mut self,
        qp: &QueuePair,
        rkey: u32,
        va: u64,
        part: Range<usize>,
    ) -> Result<bool, Error> {
        match self {
            Bytes::Into(bytes) => qp.read_now(rkey, va, &mut bytes[part]),
            Bytes::From(bytes) => qp.write_now(rkey, va, &bytes[part]),
        }
    }

    /// Fills a slot with bytes to write.
    fn fill(&self, slot: &Slot<'_>, part: Range<usize>) -> Result<(), Error> {
        match self {
            Bytes::Into(_) => Ok(()),
            Bytes::From(bytes) => slot.write(&bytes[part]),
        }
    }

    /// Takes bytes that were read out of a slot.
    fn take(&mut self, slot: &Slot<'_>, part: Range<usize>) -> Result<(), Error> {
        match self {
            Bytes::Into(bytes) => slot.read(&mut bytes[part]),
            Bytes::From(_) => Ok(()),
        }
    }
}

/// A READ or WRITE of all bytes of some spans, under way.
pub struct Access<'a> {
    opening: &'a Opening,
    spans: Spans<'a>,
    generation: u64,
    /// What is neither copied nor in flight.
    rest: Cursor,
    pieces: VecDeque<Piece<'a>>,
    failed: Option<WcStatus>,
}

impl<'a> Access<'a> {
    /// Begins an access of bytes from an offset on. See [`Access::begin_all`].
    pub fn begin(
        opening: &'a Opening,
        offset: u64,
        bytes: Bytes<'a>,
        deadline: Instant,
    ) -> Result<Access<'a>, Failure> {
        Access::begin_all(opening, smallvec![Span { offset, bytes }], deadline)
    }

    /// Begins an access of spans that do not overlap, in any order: copies what needs no packets, and posts as much of the
    /// rest as there is room for. The caller has checked that the file is that long.
    pub fn begin_all(
        opening: &'a Opening,
        spans: Spans<'a>,
        deadline: Instant,
    ) -> Result<Access<'a>, Failure> {
        let (qp, generation) = opening.session.pair(Link::Data)?;
        let (rest, pieces) = (Cursor::default(), VecDeque::new());
        let mut access = Access { opening, spans, generation, rest, pieces, failed: None };
        access.copy(&qp);
        access.post(deadline)?;
        Ok(access)
    }

    /// While nothing is in flight, a same-host peer's file is copied from and to a mapping.
    fn copy(&mut self, qp: &QueuePair) {
        while let Some((at, part)) = self.rest.next(&self.spans, DIRECT_BYTES_MAX) {
            let Span { offset, bytes } = &mut self.spans[at];
            let end = part.end;
            match bytes.access_now(qp, self.opening.rkey, *offset + part.start as u64, part) {
                Ok(true) => self.rest.begun = end,
                // The NIC refuses a queue pair that another thread has destroyed meanwhile. A work request says why.
                Ok(false) | Err(_) => break,
            }
        }
    }

    fn post(&mut self, deadline: Instant) -> Result<(), Failure> {
        let session = &self.opening.session;
        while self.failed.is_none() && self.pieces.len() < PIECES_MAX {
            let Some((span, part)) = self.rest.next(&self.spans, SLOT_BYTES) else { break };
            let Some(mut slot) = slot(session, self.pieces.is_empty(), deadline)? else { break };
            let Span { offset, bytes } = &self.spans[span];
            bytes.fill(&slot, part.clone())?;
            let op = bytes.operation(offset + part.start as u64, self.opening.rkey);
            match session.begin(Link::Data, op, &[slot.sge(part.len())]) {
                Ok(number) => {
                    self.rest.begun = part.end;
                    slot.set_in_flight(true);
                    self.pieces.push_back(Piece { number, span, part, slot });
                }
                Err(ExportError::Full) if self.pieces.is_empty() => wait_for_room(session, deadline)?,
                Err(ExportError::Full) => break,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Waits until all that is in flight has ended, but no longer than until then. Returns whether it has, or never will.
    pub fn wait_ended(&self, until: Instant) -> bool {
        let session = &self.opening.session;
        self.pieces.iter().all(|piece| session.wait_ended(piece.number, until).is_ok()) || session.is_lost()
    }

    /// Waits until all of it is done.
    pub fn finish(mut self, deadline: Instant) -> Result<(), Failure> {
        while let Some(mut piece) = self.pieces.pop_front() {
            let status = self.opening.session.finish(piece.number, deadline)?;
            piece.slot.set_in_flight(false);
            match status {
                WcStatus::Success => self.spans[piece.span].bytes.take(&piece.slot, piece.part)?,
                status => self.failed = self.failed.or(Some(status)),
            }
            self.post(deadline)?;
        }
        // All spans are of one kind.
        let is_read = self.spans.iter().any(|span| matches!(span.bytes, Bytes::Into(_)));
        refused(self.failed, if is_read { AccessKind::Read } else { AccessKind::Write }, self.generation)
    }
}

/// READs or WRITEs all bytes from an offset on. The caller has checked that the file is that long.
pub fn access(opening: &Opening, offset: u64, bytes: Bytes<'_>, deadline: Instant) -> Result<(), Failure> {
    Access::begin(opening, offset, bytes, deadline)?.finish(deadline)
}

/// A slot. Only a call that has none waits for one.
fn slot(session: &Session, waits: bool, deadline: Instant) -> Result<Option<Slot<'_>>, ExportError> {
    if waits { session.buffers.take(deadline).map(Some) } else { Ok(session.buffers.try_take()) }
}

/// Other threads have filled the send queue.
fn wait_for_room(session: &Session, deadline: Instant) -> Result<(), ExportError> {
    if Instant::now() >= deadline {
        return Err(ExportError::Lost);
    }
    session.progress();
    std::thread::yield_now();
    interrupt::check()
}

fn refused(status: Option<WcStatus>, kind: AccessKind, generation: u64) -> Result<(), Failure> {
    match status {
        None => Ok(()),
        // The server's NIC does not answer: the connection is lost.
        Some(WcStatus::RetryExceeded | WcStatus::RnrRetryExceeded) => Err(ExportError::Lost.into()),
        Some(status) => Err(Failure::Refused { kind, generation, status }),
    }
}

/// An append under way.
pub struct Append<'a> {
    opening: &'a Opening,
    generation: u64,
    number: u64,
    memory: RecordMemory<'a>,
}

impl<'a> Append<'a> {
    /// Begins to append a record of up to [`RECORD_BYTES_MAX`](super::RECORD_BYTES_MAX).
    pub fn begin(
        opening: &'a Opening,
        record: &[u8],
        commit: bool,
        deadline: Instant,
    ) -> Result<Append<'a>, Failure> {
        let session = &opening.session;
        let mut memory = session.buffers.take_record(record.len(), deadline)?;
        let sges = memory.write(record)?;
        let op = SendOp::Append { rkey: opening.rkey, commit };
        let (number, generation) = begin(session, Link::Append, op, &sges, deadline)?;
        memory.set_in_flight(true);
        Ok(Append { opening, generation, number, memory })
    }

    /// Waits until it is done, and returns the record's offset.
    pub fn finish(mut self, deadline: Instant) -> Result<u64, Failure> {
        let status = self.opening.session.finish(self.number, deadline).map_err(unanswered)?;
        self.memory.set_in_flight(false);
        ended(status, AccessKind::Append, self.generation).map_err(|failure| match failure {
            Failure::Error(error) => unanswered(error).into(),
            refused => refused,
        })?;
        Ok(self.memory.offset()?)
    }
}

/// Appends a record of up to [`RECORD_BYTES_MAX`](super::RECORD_BYTES_MAX), and returns its offset.
pub fn append(opening: &Opening, record: &[u8], commit: bool, deadline: Instant) -> Result<u64, Failure> {
    Append::begin(opening, record, commit, deadline)?.finish(deadline)
}

/// Begins an access, as soon as there is room. Returns its number and the generation of its queue pair.
pub fn begin(
    session: &Session,
    link: Link,
    op: SendOp,
    sges: &[Sge],
    deadline: Instant,
) -> Result<(u64, u64), ExportError> {
    let (_, generation) = session.pair(link)?;
    loop {
        match session.begin(link, op, sges) {
            Err(ExportError::Full) => wait_for_room(session, deadline)?,
            begun => return Ok((begun?, generation)),
        }
    }
}

/// Whether an access with this status was made.
pub fn ended(status: WcStatus, kind: AccessKind, generation: u64) -> Result<(), Failure> {
    refused(Some(status).filter(|status| *status != WcStatus::Success), kind, generation)
}

/// A record whose acknowledgement is missing may be in the file.
fn unanswered(error: ExportError) -> ExportError {
    match error {
        ExportError::Lost => ExportError::Unanswered,
        error => error,
    }
}

/// A commit under way.
pub struct Commit<'a> {
    opening: &'a Opening,
    generation: u64,
    number: u64,
}

impl<'a> Commit<'a> {
    /// Begins to make all of a file persistent that was acknowledged.
    pub fn begin(opening: &'a Opening, deadline: Instant) -> Result<Commit<'a>, Failure> {
        let op = SendOp::Flush {
            va: 0,
            rkey: opening.rkey,
            length: 0,
            placement: PERSISTENT,
            selectivity: WHOLE_REGION,
        };
        let (number, generation) = begin(&opening.session, Link::Data, op, &[], deadline)?;
        Ok(Commit { opening, generation, number })
    }

    /// Waits until it is done.
    pub fn finish(self, deadline: Instant) -> Result<(), Failure> {
        let status = self.opening.session.finish(self.number, deadline)?;
        ended(status, AccessKind::Commit, self.generation)
    }
}

/// Makes all of a file persistent that was acknowledged.
pub fn commit(opening: &Opening, deadline: Instant) -> Result<(), Failure> {
    Commit::begin(opening, deadline)?.finish(deadline)
}
