//! One-sided accesses to an open file.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::Instant;

use terrace_nic::{Error, QueuePair, SendOp, Sge, WcStatus};

use super::buffers::{RECORD_BYTES_MAX, SLOT_BYTES, Slot};
use super::session::{Opening, Session};
use crate::error::ExportError;
use crate::proto::Link;

/// The most pieces of one call in flight.
const PIECES_MAX: usize = 16;
/// Placement of a FLUSH: persistence. Selectivity: the whole region (IBTA annex A19).
const PERSISTENT: u8 = 1 << 1;
const WHOLE_REGION: u8 = 1;
/// Copies without packets are made in pieces of so many bytes, so that none takes long.
const DIRECT_BYTES_MAX: usize = 1 << 20;

/// Why an access was not made.
pub enum Failure {
    /// The server refused it, and the queue pair of this generation has failed: the file may have changed.
    Refused { link: Link, generation: u64, status: WcStatus },
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

/// A piece of a call in flight.
struct Piece<'a> {
    number: u64,
    part: Range<usize>,
    slot: Slot<'a>,
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
    fn access_now(&mut self, qp: &QueuePair, rkey: u32, va: u64, part: Range<usize>) -> Result<bool, Error> {
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

/// READs or WRITEs all bytes from an offset on. The caller has checked that the file is that long.
pub fn access(
    opening: &Opening,
    offset: u64,
    mut bytes: Bytes<'_>,
    deadline: Instant,
) -> Result<(), Failure> {
    let (session, rkey) = (&opening.session, opening.rkey);
    let (qp, generation) = session.pair(Link::Data)?;
    let mut begun = 0;
    // While nothing is in flight, a same-host peer's file is copied from and to a mapping.
    while begun < bytes.len() {
        let part = begun..bytes.len().min(begun + DIRECT_BYTES_MAX);
        let end = part.end;
        match bytes.access_now(&qp, rkey, offset + begun as u64, part) {
            Ok(true) => begun = end,
            // The NIC refuses a queue pair that another thread has destroyed meanwhile. A work request says why.
            Ok(false) | Err(_) => break,
        }
    }
    let mut pieces: VecDeque<Piece<'_>> = VecDeque::new();
    let mut failed = None;
    loop {
        while failed.is_none() && begun < bytes.len() && pieces.len() < PIECES_MAX {
            let Some(mut slot) = slot(session, pieces.is_empty(), deadline)? else { break };
            let part = begun..bytes.len().min(begun + SLOT_BYTES);
            bytes.fill(&slot, part.clone())?;
            let op = bytes.operation(offset + begun as u64, rkey);
            match session.begin(Link::Data, op, &[slot.sge(part.len())]) {
                Ok(number) => {
                    begun = part.end;
                    slot.set_in_flight(true);
                    pieces.push_back(Piece { number, part, slot });
                }
                Err(ExportError::Full) if pieces.is_empty() => wait_for_room(session, deadline)?,
                Err(ExportError::Full) => break,
                Err(error) => return Err(error.into()),
            }
        }
        let Some(mut piece) = pieces.pop_front() else { break };
        let status = session.finish(piece.number, deadline)?;
        piece.slot.set_in_flight(false);
        match status {
            WcStatus::Success => bytes.take(&piece.slot, piece.part)?,
            status => failed = failed.or(Some(status)),
        }
    }
    refused(failed, Link::Data, generation)
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
    Ok(())
}

fn refused(status: Option<WcStatus>, link: Link, generation: u64) -> Result<(), Failure> {
    match status {
        None => Ok(()),
        // The server's NIC does not answer: the connection is lost.
        Some(WcStatus::RetryExceeded | WcStatus::RnrRetryExceeded) => Err(ExportError::Lost.into()),
        Some(status) => Err(Failure::Refused { link, generation, status }),
    }
}

/// Appends a record of up to [`RECORD_BYTES_MAX`], and returns its offset.
pub fn append(opening: &Opening, record: &[u8], commit: bool, deadline: Instant) -> Result<u64, Failure> {
    let session = &opening.session;
    if record.len() <= SLOT_BYTES {
        let mut slot = session.buffers.take(deadline)?;
        slot.write(record)?;
        let sges = [slot.sge(record.len()), slot.offset_sge()];
        append_from(opening, &sges, commit, deadline, |is_in_flight| slot.set_in_flight(is_in_flight))?;
        return Ok(slot.offset()?);
    }
    session.buffers.with_record(|buffer, is_in_flight| {
        buffer.write(0, record)?;
        let sges = [buffer.sge(0, record.len() as u32), buffer.sge(RECORD_BYTES_MAX, 8)];
        append_from(opening, &sges, commit, deadline, |now| *is_in_flight = now)?;
        let mut offset = [0; 8];
        buffer.read(RECORD_BYTES_MAX, &mut offset)?;
        Ok(u64::from_ne_bytes(offset))
    })
}

/// Appends the record of `sges`. `set_in_flight` is told from when to when the NIC may access that memory.
fn append_from(
    opening: &Opening,
    sges: &[Sge],
    commit: bool,
    deadline: Instant,
    mut set_in_flight: impl FnMut(bool),
) -> Result<(), Failure> {
    let session = &opening.session;
    let (_, generation) = session.pair(Link::Append)?;
    let op = SendOp::Append { rkey: opening.rkey, commit };
    let number = loop {
        match session.begin(Link::Append, op, sges) {
            Ok(number) => break number,
            Err(ExportError::Full) => wait_for_room(session, deadline)?,
            Err(error) => return Err(error.into()),
        }
    };
    set_in_flight(true);
    let status = session.finish(number, deadline).map_err(unanswered)?;
    set_in_flight(false);
    let status = Some(status).filter(|status| *status != WcStatus::Success);
    refused(status, Link::Append, generation).map_err(|failure| match failure {
        Failure::Error(error) => unanswered(error).into(),
        refused => refused,
    })
}

/// A record whose acknowledgement is missing may be in the file.
fn unanswered(error: ExportError) -> ExportError {
    match error {
        ExportError::Lost => ExportError::Unanswered,
        error => error,
    }
}

/// Makes all of a file persistent that was acknowledged.
pub fn commit(opening: &Opening, deadline: Instant) -> Result<(), Failure> {
    let session = &opening.session;
    let (_, generation) = session.pair(Link::Data)?;
    let op = SendOp::Flush {
        va: 0,
        rkey: opening.rkey,
        length: 0,
        placement: PERSISTENT,
        selectivity: WHOLE_REGION,
    };
    let number = loop {
        match session.begin(Link::Data, op, &[]) {
            Ok(number) => break number,
            Err(ExportError::Full) => wait_for_room(session, deadline)?,
            Err(error) => return Err(error.into()),
        }
    };
    let status = session.finish(number, deadline)?;
    refused(Some(status).filter(|status| *status != WcStatus::Success), Link::Data, generation)
}
