//! Carrying out a `Read`: the pages that the client asks for are fetched by the pager, many at a time, and written into the
//! client's memory as they come.

use std::collections::VecDeque;
use std::sync::Arc;

use smallvec::SmallVec;
use terrace_access::pages::PageBitmap;
use terrace_access::proto::{Read, Status, immediate_of};
use terrace_memory::{AccessError, HostRange, PAGE_BYTES, Transfer, Waker};
use terrace_nic::{ByteSource, Payload, Provided, SendOp};

use super::Progress;
use crate::control::Control;
use crate::exports::{Export, REMOTE_READ};
use crate::room::{Room, Share};

/// Longest piece that is fetched at a time, in bytes.
pub(super) const PIECE_BYTES_MAX: u64 = 64 << 10;
/// Pieces of one request that are fetched at a time.
const IN_FLIGHT_MAX: usize = 16;

/// A part of the range that the client wants, by its distance from the range's first byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece {
    offset: u64,
    len: u64,
}

pub(super) struct ReadJob {
    export: Arc<Export>,
    room: Arc<Room>,
    /// The pager's name for the client's range.
    range: HostRange,
    dest_va: u64,
    dest_rkey: u32,
    pieces: Pieces,
    /// A piece that there was no room for.
    put_off: Option<Piece>,
    in_flight: VecDeque<(Piece, Fetched)>,
    failed: Option<Status>,
}

impl ReadJob {
    /// Checks the request. What is fetched for it takes room, until the client has it.
    pub fn new(export: Arc<Export>, read: &Read, room: Arc<Room>) -> Result<ReadJob, Status> {
        let len = u64::from(read.length);
        let range = export.begin_access(read.va, len, REMOTE_READ)?;
        let (page_count, lead) = (export.layout.page_count(read.va, len), export.layout.page_offset(read.va));
        let pieces = match &read.pages {
            None => Pieces::all(len),
            Some(pages) if pages.wanted.page_count() == page_count && usize::from(pages.offset) == lead => {
                Pieces::of(pages.wanted.clone(), lead as u64, len)
            }
            // The client has another idea of the region's grid.
            Some(_) => return Err(Status::Invalid),
        };
        let (dest_va, dest_rkey) = (read.dest_va, read.dest_rkey);
        let in_flight = VecDeque::new();
        Ok(ReadJob {
            export,
            room,
            range,
            dest_va,
            dest_rkey,
            pieces,
            put_off: None,
            in_flight,
            failed: None,
        })
    }

    /// Sends what has been fetched, and fetches on. With the last of it goes the answer to the request `id`.
    pub fn advance(&mut self, control: &mut Control, id: u64, waker: &Waker) -> Progress {
        // What the page cache has is there at once, however much it is: then there is room for more.
        loop {
            if self.send_fetched(control, id) {
                return Progress::Told;
            }
            if !self.fetch(waker) {
                break;
            }
        }
        match (self.in_flight.is_empty() && self.put_off.is_none(), self.failed) {
            (true, failed) => Progress::Done(failed.unwrap_or(Status::Ok)),
            (false, _) => Progress::Waiting,
        }
    }

    /// Begins to fetch as many pieces as there is room for. Returns whether it began any.
    fn fetch(&mut self, waker: &Waker) -> bool {
        let before_count = self.in_flight.len();
        while self.failed.is_none() && self.in_flight.len() < IN_FLIGHT_MAX {
            let Some(piece) = self.put_off.take().or_else(|| self.pieces.next()) else { break };
            let range = HostRange { addr: self.range.addr + piece.offset, len: piece.len };
            let Some(share) = self.room.take(piece.len.next_multiple_of(PAGE_BYTES), waker) else {
                self.put_off = Some(piece);
                break;
            };
            match self.export.exported.pager.read(range, waker) {
                Ok(transfer) => self.in_flight.push_back((piece, Fetched { transfer, _share: share })),
                Err(AccessError::NotReady) => {
                    self.put_off = Some(piece);
                    break;
                }
                Err(error) => self.failed = Some(status_of(error)),
            }
        }
        self.in_flight.len() > before_count
    }

    /// Returns whether that was all, and the client has been told so by an immediate.
    fn send_fetched(&mut self, control: &mut Control, id: u64) -> bool {
        let mut fetched = self.take_fetched();
        let is_all = self.in_flight.is_empty() && self.put_off.is_none() && self.pieces.is_empty();
        let answer = immediate_of(id).filter(|_| is_all && self.failed.is_none());
        let last = fetched.pop();
        for (piece, fetched) in fetched {
            self.send(control, piece, fetched, None);
        }
        let Some((piece, fetched)) = last else { return false };
        self.send(control, piece, fetched, answer);
        answer.is_some()
    }

    /// The pieces that are there.
    fn take_fetched(&mut self) -> SmallVec<[(Piece, Fetched); 1]> {
        let (mut fetched, failed) = (SmallVec::new(), &mut self.failed);
        for (piece, part) in std::mem::take(&mut self.in_flight) {
            match part.transfer.outcome() {
                None => self.in_flight.push_back((piece, part)),
                Some(Ok(())) => fetched.push((piece, part)),
                Some(Err(error)) => *failed = Some(status_of(error)),
            }
        }
        if failed.is_some() {
            self.put_off = None;
        }
        fetched
    }

    fn send(&self, control: &mut Control, piece: Piece, fetched: Fetched, answer: Option<u32>) {
        let (va, rkey) = (self.dest_va.wrapping_add(piece.offset), self.dest_rkey);
        let source = Arc::new(fetched);
        let payload = Payload::Provided(Provided { source, offset: 0, len: piece.len as u32 });
        let op = match answer {
            // Immediates are in network byte order.
            Some(immediate) => SendOp::WriteImm { va, rkey, imm: immediate.to_be() },
            None => SendOp::Write { va, rkey },
        };
        control.push(op, payload, None);
    }
}

/// What a transfer brings, and as it leaves: straight from the pager's buffer into the packet. That buffer is taken until the
/// client has acknowledged it.
#[derive(Debug)]
struct Fetched {
    transfer: Arc<dyn Transfer>,
    _share: Share,
}

impl ByteSource for Fetched {
    fn copy(&self, offset: u64, out: &mut [u8]) -> bool {
        self.transfer.read(offset, out).is_ok()
    }
}

/// What the client is told.
pub(super) fn status_of(error: AccessError) -> Status {
    match error {
        AccessError::OutOfRange => Status::OutOfRange,
        AccessError::NoSpace => Status::NoSpace,
        _ => Status::DeviceError,
    }
}

/// The runs of wanted pages, cut to what is fetched at a time. They are found one after the other: a client can name many.
struct Pieces {
    pages: PageBitmap,
    /// How far into its page the range begins.
    lead: u64,
    /// Length of the range.
    len: u64,
    next_page: usize,
    /// What is left of the run that is next.
    run: Option<Piece>,
}

impl Pieces {
    /// All of the range.
    fn all(len: u64) -> Pieces {
        let run = Some(Piece { offset: 0, len });
        Pieces { pages: PageBitmap::default(), lead: 0, len, next_page: 0, run }
    }

    fn of(pages: PageBitmap, lead: u64, len: u64) -> Pieces {
        let mut pieces = Pieces { pages, lead, len, next_page: 0, run: None };
        pieces.run = pieces.next_run();
        pieces
    }

    fn is_empty(&self) -> bool {
        self.run.is_none()
    }

    fn next_run(&mut self) -> Option<Piece> {
        let run = self.pages.next_run(self.next_page)?;
        self.next_page = run.end;
        let offset = (run.start as u64 * PAGE_BYTES).saturating_sub(self.lead);
        let end = (run.end as u64 * PAGE_BYTES - self.lead).min(self.len);
        Some(Piece { offset, len: end - offset })
    }
}

impl Iterator for Pieces {
    type Item = Piece;

    /// Pieces end at multiples of their greatest length within the run, as far as pages do.
    fn next(&mut self) -> Option<Piece> {
        let run = self.run.as_mut()?;
        let piece = Piece { offset: run.offset, len: run.len.min(PIECE_BYTES_MAX) };
        run.offset += piece.len;
        run.len -= piece.len;
        if run.len == 0 {
            self.run = self.next_run();
        }
        Some(piece)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(wanted: &[usize], page_count: usize, lead: u64, len: u64) -> Vec<(u64, u64)> {
        let mut pages = PageBitmap::new(page_count);
        wanted.iter().for_each(|&page| pages.insert(page));
        Pieces::of(pages, lead, len).map(|piece| (piece.offset, piece.len)).collect()
    }

    #[test]
    fn pieces_are_the_wanted_pages_within_the_range() {
        assert_eq!(pieces(&[0], 1, 100, 8), [(0, 8)]);
        assert_eq!(pieces(&[0, 2], 3, 4000, 5000), [(0, 96), (4192, 808)]);
        assert_eq!(pieces(&[1], 3, 4000, 5000), [(96, 4096)]);
        assert_eq!(pieces(&[0, 1, 2], 3, 0, 3 * 4096), [(0, 3 * 4096)]);
    }

    #[test]
    fn long_runs_are_cut() {
        let all: Vec<usize> = (0..40).collect();
        let cut = [(0, 65536), (65536, 65536), (131072, 32768)];
        assert_eq!(pieces(&all, 40, 0, 40 * 4096), cut);
        let whole: Vec<_> = Pieces::all(40 * 4096).map(|piece| (piece.offset, piece.len)).collect();
        assert_eq!(whole, cut);
    }
}
