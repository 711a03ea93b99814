//! Fetches the wanted parts of a range from a pager, many at a time.

use std::collections::VecDeque;
use std::sync::Arc;

use smallvec::SmallVec;
use terrace_access::pages::PageBitmap;
use terrace_hostmem::{HostRange, PAGE_BYTES};
use terrace_memory::{AccessError, Pager, Transfer, Waker};

use crate::room::{Room, Share};

/// Longest piece that is fetched at a time, in bytes.
pub(super) const PIECE_BYTES_MAX: u64 = 64 << 10;
/// Pieces of one request that are fetched at a time.
const IN_FLIGHT_MAX: usize = 16;

/// A part of the range that the client wants, by its distance from the range's first byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub offset: u64,
    pub len: u64,
}

/// The data of a piece. Its buffer is in use until this is dropped.
#[derive(Debug)]
pub(super) struct Brought {
    pub transfer: Arc<dyn Transfer>,
    _share: Share,
}

/// Pieces that have been fetched.
pub(super) type Fetched = SmallVec<[(Piece, Brought); 1]>;

/// The part of a range that is still to be fetched.
pub(super) struct Fetch {
    /// The range in the pager's addresses.
    range: HostRange,
    pieces: Pieces,
    /// Credits for fetched data, returned when it is dropped.
    room: Arc<Room>,
    /// A piece that found too few credits.
    put_off: Option<Piece>,
    in_flight: VecDeque<(Piece, Brought)>,
    failed: Option<AccessError>,
}

impl Fetch {
    /// All of the range without `pages`. `lead` is how far into its page the range begins.
    pub fn new(range: HostRange, pages: Option<PageBitmap>, lead: usize, room: Arc<Room>) -> Fetch {
        let pieces = match pages {
            None => Pieces::all(range.len),
            Some(pages) => Pieces::of(pages, lead as u64, range.len),
        };
        Fetch { range, pieces, room, put_off: None, in_flight: VecDeque::new(), failed: None }
    }

    /// Begins to fetch as many pieces as there are credits for. Returns whether it began any.
    pub fn begin(&mut self, pager: &dyn Pager, waker: &Waker) -> bool {
        let before_count = self.in_flight.len();
        while self.failed.is_none() && self.in_flight.len() < IN_FLIGHT_MAX {
            let Some(piece) = self.put_off.take().or_else(|| self.pieces.next()) else { break };
            let range = HostRange { addr: self.range.addr + piece.offset, len: piece.len };
            let Some(share) = self.room.take(piece.len.next_multiple_of(PAGE_BYTES), waker) else {
                self.put_off = Some(piece);
                break;
            };
            match pager.read(range, waker) {
                Ok(transfer) => self.in_flight.push_back((piece, Brought { transfer, _share: share })),
                Err(AccessError::NotReady) => {
                    self.put_off = Some(piece);
                    break;
                }
                Err(error) => self.failed = Some(error),
            }
        }
        self.in_flight.len() > before_count
    }

    /// The pieces that have been fetched since the last call.
    pub fn take(&mut self) -> Fetched {
        let mut fetched = Fetched::new();
        for (piece, brought) in std::mem::take(&mut self.in_flight) {
            match brought.transfer.outcome() {
                None => self.in_flight.push_back((piece, brought)),
                Some(Ok(())) => fetched.push((piece, brought)),
                Some(Err(error)) => self.failed = Some(error),
            }
        }
        fetched
    }

    /// How it ended, once no piece is in flight and none is left.
    pub fn outcome(&self) -> Option<Result<(), AccessError>> {
        let is_all = self.put_off.is_none() && self.pieces.is_empty();
        match self.failed {
            _ if !self.in_flight.is_empty() => None,
            Some(error) => Some(Err(error)),
            None => is_all.then_some(Ok(())),
        }
    }
}

/// The runs of wanted pages, cut to the largest piece. They are found one after the other: a client can name many.
struct Pieces {
    pages: PageBitmap,
    /// How far into its page the range begins.
    lead: u64,
    /// Length of the range.
    len: u64,
    next_page: usize,
    /// The rest of the next run.
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
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    use terrace_hostmem::AtomicOp;
    use terrace_memory::Presence;

    use super::*;

    fn pages(wanted: impl IntoIterator<Item = usize>, page_count: usize) -> PageBitmap {
        let mut pages = PageBitmap::new(page_count);
        wanted.into_iter().for_each(|page| pages.insert(page));
        pages
    }

    fn pieces(wanted: &[usize], page_count: usize, lead: u64, len: u64) -> Vec<(u64, u64)> {
        let pages = pages(wanted.iter().copied(), page_count);
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

    const RANGE: HostRange = HostRange { addr: 0x10_0000_0000, len: 8 << 20 };

    /// A scripted pager: data is there at once or later, so many reads are admitted, and one at `bad` fails.
    #[derive(Debug)]
    struct Desk {
        presence: Presence,
        /// Whether data that is requested from now on is there at once.
        is_quick: AtomicBool,
        reads_left: AtomicUsize,
        bad: Option<u64>,
        asked: std::sync::Mutex<Vec<Arc<Ticket>>>,
    }

    #[derive(Debug)]
    struct Ticket {
        is_done: AtomicBool,
        result: Result<(), AccessError>,
    }

    impl Transfer for Ticket {
        fn outcome(&self) -> Option<Result<(), AccessError>> {
            self.is_done.load(Ordering::Relaxed).then_some(self.result)
        }

        fn read(&self, _: u64, _: &mut [u8]) -> Result<(), AccessError> {
            self.result
        }
    }

    impl Desk {
        fn new(is_quick: bool) -> Desk {
            Desk {
                presence: Presence::new(RANGE),
                is_quick: AtomicBool::new(is_quick),
                reads_left: AtomicUsize::new(usize::MAX),
                bad: None,
                asked: std::sync::Mutex::default(),
            }
        }

        fn finish_all(&self) {
            self.asked
                .lock()
                .unwrap()
                .drain(..)
                .for_each(|ticket| ticket.is_done.store(true, Ordering::Relaxed));
        }
    }

    impl Pager for Desk {
        fn presence(&self) -> &Presence {
            &self.presence
        }

        fn read(&self, range: HostRange, _: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
            assert!(range.len <= PIECE_BYTES_MAX && self.presence.covers(range));
            let left = self.reads_left.load(Ordering::Relaxed);
            self.reads_left.store(left.checked_sub(1).ok_or(AccessError::NotReady)?, Ordering::Relaxed);
            let is_done = AtomicBool::new(self.is_quick.load(Ordering::Relaxed));
            let is_bad = self
                .bad
                .is_some_and(|bad| (range.addr..range.addr + range.len).contains(&(RANGE.addr + bad)));
            let ticket = Ticket { is_done, result: if is_bad { Err(AccessError::Device) } else { Ok(()) } };
            let ticket = Arc::new(ticket);
            self.asked.lock().unwrap().push(ticket.clone());
            Ok(ticket)
        }

        fn write(&self, _: u64, _: &[u8], _: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
            Err(AccessError::OutOfRange)
        }

        fn atomic(&self, _: u64, _: AtomicOp, _: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
            Err(AccessError::OutOfRange)
        }

        fn flush(&self, _: HostRange, _: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
            Err(AccessError::OutOfRange)
        }
    }

    fn whole() -> Fetch {
        let page_count = (RANGE.len / PAGE_BYTES) as usize;
        Fetch::new(RANGE, Some(pages(0..page_count, page_count)), 0, Room::new(u64::MAX))
    }

    fn nobody() -> Waker {
        Arc::new(|| ())
    }

    /// Takes and begins until nothing changes; returns the bytes that came.
    fn drive(fetch: &mut Fetch, desk: &Desk) -> u64 {
        let mut bytes = 0;
        loop {
            bytes += fetch.take().iter().map(|(piece, _)| piece.len).sum::<u64>();
            if !fetch.begin(desk, &nobody()) {
                return bytes;
            }
        }
    }

    #[test]
    fn what_is_there_at_once_is_all_brought() {
        let (mut fetch, desk) = (whole(), Desk::new(true));
        assert_eq!(fetch.outcome(), None);
        assert_eq!(drive(&mut fetch, &desk), RANGE.len);
        assert_eq!(fetch.outcome(), Some(Ok(())));
    }

    #[test]
    fn there_is_more_to_come_while_pieces_wait_for_their_turn() {
        // The pieces of the first batch are fetched at once; those behind them are not.
        let (mut fetch, desk) = (whole(), Desk::new(true));
        assert!(fetch.begin(&desk, &nobody()));
        assert_eq!(fetch.take().len(), IN_FLIGHT_MAX);
        assert_eq!(fetch.outcome(), None);
        desk.is_quick.store(false, Ordering::Relaxed);
        assert_eq!(drive(&mut fetch, &desk), 0);
        let mut bytes = IN_FLIGHT_MAX as u64 * PIECE_BYTES_MAX;
        while fetch.outcome().is_none() {
            desk.finish_all();
            bytes += drive(&mut fetch, &desk);
        }
        assert_eq!((bytes, fetch.outcome()), (RANGE.len, Some(Ok(()))));
    }

    #[test]
    fn a_piece_that_is_put_off_is_not_lost() {
        let (mut fetch, desk) = (whole(), Desk::new(true));
        desk.reads_left.store(3, Ordering::Relaxed);
        let mut bytes = drive(&mut fetch, &desk);
        assert_eq!((bytes, fetch.outcome()), (3 * PIECE_BYTES_MAX, None));
        desk.reads_left.store(usize::MAX, Ordering::Relaxed);
        bytes += drive(&mut fetch, &desk);
        assert_eq!((bytes, fetch.outcome()), (RANGE.len, Some(Ok(()))));
    }

    #[test]
    fn no_more_is_brought_than_there_is_room_for() {
        let (mut fetch, desk) = (Fetch::new(RANGE, None, 0, Room::new(3 * PIECE_BYTES_MAX)), Desk::new(true));
        let (mut bytes, waker) = (0, nobody());
        while fetch.outcome().is_none() {
            assert!(fetch.begin(&desk, &waker), "what was taken has come back");
            let fetched = fetch.take();
            assert!(!fetch.begin(&desk, &waker), "all room is taken");
            bytes += fetched.iter().map(|(piece, _)| piece.len).sum::<u64>();
        }
        assert_eq!((bytes, fetch.outcome()), (RANGE.len, Some(Ok(()))));
    }

    #[test]
    fn nothing_more_is_asked_for_after_a_failure() {
        let (mut fetch, mut desk) = (whole(), Desk::new(false));
        desk.bad = Some(3 * PIECE_BYTES_MAX);
        drive(&mut fetch, &desk);
        assert_eq!(desk.asked.lock().unwrap().len(), IN_FLIGHT_MAX);
        desk.finish_all();
        assert_eq!(drive(&mut fetch, &desk), (IN_FLIGHT_MAX as u64 - 1) * PIECE_BYTES_MAX);
        assert!(desk.asked.lock().unwrap().is_empty());
        assert_eq!(fetch.outcome(), Some(Err(AccessError::Device)));
    }
}
