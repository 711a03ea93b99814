//! Fetches the wanted pages of a range from a pager, in concurrent chunks.

use std::collections::VecDeque;
use std::sync::Arc;

use smallvec::SmallVec;
use terrace_access::pages::PageBitmap;
use terrace_hostmem::{HostRange, PAGE_BYTES};
use terrace_memory::{AccessError, Pager, Transfer, Waker};

use crate::credits::{Credits, Reservation};

/// The longest chunk in bytes.
pub(super) const CHUNK_BYTES_MAX: u64 = 64 << 10;
/// The most chunks of one request in flight.
const IN_FLIGHT_MAX: usize = 16;

/// A wanted chunk of the range, by its offset from the range's first byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Chunk {
    pub offset: u64,
    pub len: u64,
}

/// The transfer of a chunk. Its buffer and its credits are in use until this is dropped.
#[derive(Debug)]
pub(super) struct FetchedData {
    pub transfer: Arc<dyn Transfer>,
    _reservation: Reservation,
}

/// Chunks that have been fetched.
pub(super) type Fetched = SmallVec<[(Chunk, FetchedData); 1]>;

/// The fetch of a range's wanted pages.
pub(super) struct Fetch {
    /// The range in the pager's addresses.
    range: HostRange,
    chunks: Chunks,
    /// Credits for the data in flight.
    credits: Arc<Credits>,
    /// A chunk that waits for credits, or for the pager.
    deferred: Option<Chunk>,
    in_flight: VecDeque<(Chunk, FetchedData)>,
    failed: Option<AccessError>,
}

impl Fetch {
    /// The fetch of the wanted `pages`, or of the whole range. The range begins `lead` bytes into its page.
    pub fn new(range: HostRange, pages: Option<PageBitmap>, lead: usize, credits: Arc<Credits>) -> Fetch {
        let chunks = match pages {
            None => Chunks::all(range.len),
            Some(pages) => Chunks::of(pages, lead as u64, range.len),
        };
        Fetch { range, chunks, credits, deferred: None, in_flight: VecDeque::new(), failed: None }
    }

    /// Begins to fetch chunks, as far as credits suffice. Returns whether it began any.
    pub fn begin(&mut self, pager: &dyn Pager, waker: &Waker) -> bool {
        let before_count = self.in_flight.len();
        while self.failed.is_none() && self.in_flight.len() < IN_FLIGHT_MAX {
            let Some(chunk) = self.deferred.take().or_else(|| self.chunks.next()) else { break };
            let range = HostRange { addr: self.range.addr + chunk.offset, len: chunk.len };
            let Some(reservation) = self.credits.reserve(chunk.len.next_multiple_of(PAGE_BYTES), waker)
            else {
                self.deferred = Some(chunk);
                break;
            };
            match pager.read(range, waker) {
                Ok(transfer) => {
                    self.in_flight.push_back((chunk, FetchedData { transfer, _reservation: reservation }))
                }
                Err(AccessError::NotReady) => {
                    self.deferred = Some(chunk);
                    break;
                }
                Err(error) => self.failed = Some(error),
            }
        }
        self.in_flight.len() > before_count
    }

    /// Takes the fetched chunks.
    pub fn take_fetched(&mut self) -> Fetched {
        let mut fetched = Fetched::new();
        for (chunk, data) in std::mem::take(&mut self.in_flight) {
            match data.transfer.outcome() {
                None => self.in_flight.push_back((chunk, data)),
                Some(Ok(())) => fetched.push((chunk, data)),
                Some(Err(error)) => self.failed = Some(error),
            }
        }
        fetched
    }

    /// The outcome; `None` while chunks are in flight or left.
    pub fn outcome(&self) -> Option<Result<(), AccessError>> {
        let is_all = self.deferred.is_none() && self.chunks.is_empty();
        match self.failed {
            _ if !self.in_flight.is_empty() => None,
            Some(error) => Some(Err(error)),
            None => is_all.then_some(Ok(())),
        }
    }
}

/// The runs of wanted pages, divided into chunks. They are computed lazily, because a request can have many.
struct Chunks {
    pages: PageBitmap,
    /// The offset of the range's first byte in its page.
    lead: u64,
    /// The length of the range.
    len: u64,
    next_page: usize,
    /// The rest of the current run.
    run: Option<Chunk>,
}

impl Chunks {
    /// The chunks of the whole range.
    fn all(len: u64) -> Chunks {
        let run = Some(Chunk { offset: 0, len });
        Chunks { pages: PageBitmap::default(), lead: 0, len, next_page: 0, run }
    }

    /// The chunks of the wanted pages.
    fn of(pages: PageBitmap, lead: u64, len: u64) -> Chunks {
        let mut chunks = Chunks { pages, lead, len, next_page: 0, run: None };
        chunks.run = chunks.next_run();
        chunks
    }

    fn is_empty(&self) -> bool {
        self.run.is_none()
    }

    fn next_run(&mut self) -> Option<Chunk> {
        let run = self.pages.next_run(self.next_page)?;
        self.next_page = run.end;
        let offset = (run.start as u64 * PAGE_BYTES).saturating_sub(self.lead);
        let end = (run.end as u64 * PAGE_BYTES - self.lead).min(self.len);
        Some(Chunk { offset, len: end - offset })
    }
}

impl Iterator for Chunks {
    type Item = Chunk;

    /// The next chunk, of the maximum length unless the run ends earlier.
    fn next(&mut self) -> Option<Chunk> {
        let run = self.run.as_mut()?;
        let chunk = Chunk { offset: run.offset, len: run.len.min(CHUNK_BYTES_MAX) };
        run.offset += chunk.len;
        run.len -= chunk.len;
        if run.len == 0 {
            self.run = self.next_run();
        }
        Some(chunk)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    use terrace_hostmem::AtomicOp;
    use terrace_memory::{Translation, WholeRange};

    use super::*;

    fn pages(wanted: impl IntoIterator<Item = usize>, page_count: usize) -> PageBitmap {
        let mut pages = PageBitmap::new(page_count);
        wanted.into_iter().for_each(|page| pages.insert(page));
        pages
    }

    fn chunks(wanted: &[usize], page_count: usize, lead: u64, len: u64) -> Vec<(u64, u64)> {
        let pages = pages(wanted.iter().copied(), page_count);
        Chunks::of(pages, lead, len).map(|chunk| (chunk.offset, chunk.len)).collect()
    }

    #[test]
    fn pieces_are_the_wanted_pages_within_the_range() {
        assert_eq!(chunks(&[0], 1, 100, 8), [(0, 8)]);
        assert_eq!(chunks(&[0, 2], 3, 4000, 5000), [(0, 96), (4192, 808)]);
        assert_eq!(chunks(&[1], 3, 4000, 5000), [(96, 4096)]);
        assert_eq!(chunks(&[0, 1, 2], 3, 0, 3 * 4096), [(0, 3 * 4096)]);
    }

    #[test]
    fn long_runs_are_divided() {
        let all: Vec<usize> = (0..40).collect();
        let divided = [(0, 65536), (65536, 65536), (131072, 32768)];
        assert_eq!(chunks(&all, 40, 0, 40 * 4096), divided);
        let whole: Vec<_> = Chunks::all(40 * 4096).map(|chunk| (chunk.offset, chunk.len)).collect();
        assert_eq!(whole, divided);
    }

    const RANGE: HostRange = HostRange { addr: 0x10_0000_0000, len: 8 << 20 };

    /// A scripted pager: transfers finish at once or later, the number of reads is limited, and a read of the byte at
    /// `bad` fails.
    #[derive(Debug)]
    struct ScriptedPager {
        translation: WholeRange,
        /// Whether the transfers of later requests finish at once.
        is_immediate: AtomicBool,
        reads_left: AtomicUsize,
        bad: Option<u64>,
        transfers: std::sync::Mutex<Vec<Arc<ScriptedTransfer>>>,
    }

    #[derive(Debug)]
    struct ScriptedTransfer {
        is_done: AtomicBool,
        result: Result<(), AccessError>,
    }

    impl Transfer for ScriptedTransfer {
        fn outcome(&self) -> Option<Result<(), AccessError>> {
            self.is_done.load(Ordering::Relaxed).then_some(self.result)
        }

        fn read(&self, _: u64, _: &mut [u8]) -> Result<(), AccessError> {
            self.result
        }
    }

    impl ScriptedPager {
        fn new(is_immediate: bool) -> ScriptedPager {
            ScriptedPager {
                translation: WholeRange::absent(RANGE),
                is_immediate: AtomicBool::new(is_immediate),
                reads_left: AtomicUsize::new(usize::MAX),
                bad: None,
                transfers: std::sync::Mutex::default(),
            }
        }

        fn finish_all(&self) {
            self.transfers
                .lock()
                .unwrap()
                .drain(..)
                .for_each(|transfer| transfer.is_done.store(true, Ordering::Relaxed));
        }
    }

    impl Pager for ScriptedPager {
        fn translation(&self) -> &dyn Translation {
            &self.translation
        }

        fn read(&self, range: HostRange, _: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
            assert!(range.len <= CHUNK_BYTES_MAX && self.translation.covers(range));
            let left = self.reads_left.load(Ordering::Relaxed);
            self.reads_left.store(left.checked_sub(1).ok_or(AccessError::NotReady)?, Ordering::Relaxed);
            let is_done = AtomicBool::new(self.is_immediate.load(Ordering::Relaxed));
            let is_bad = self
                .bad
                .is_some_and(|bad| (range.addr..range.addr + range.len).contains(&(RANGE.addr + bad)));
            let transfer =
                ScriptedTransfer { is_done, result: if is_bad { Err(AccessError::Device) } else { Ok(()) } };
            let transfer = Arc::new(transfer);
            self.transfers.lock().unwrap().push(transfer.clone());
            Ok(transfer)
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
        Fetch::new(RANGE, Some(pages(0..page_count, page_count)), 0, Credits::new(u64::MAX))
    }

    fn no_op_waker() -> Waker {
        Arc::new(|| ())
    }

    /// Takes fetched chunks and begins others until nothing changes. Returns the bytes that were fetched.
    fn drive(fetch: &mut Fetch, pager: &ScriptedPager) -> u64 {
        let mut bytes = 0;
        loop {
            bytes += fetch.take_fetched().iter().map(|(chunk, _)| chunk.len).sum::<u64>();
            if !fetch.begin(pager, &no_op_waker()) {
                return bytes;
            }
        }
    }

    #[test]
    fn data_of_immediate_transfers_is_fetched_in_one_call() {
        let (mut fetch, pager) = (whole(), ScriptedPager::new(true));
        assert_eq!(fetch.outcome(), None);
        assert_eq!(drive(&mut fetch, &pager), RANGE.len);
        assert_eq!(fetch.outcome(), Some(Ok(())));
    }

    #[test]
    fn the_outcome_is_none_while_chunks_are_left() {
        // The transfers of the first batch finish at once; later ones do not.
        let (mut fetch, pager) = (whole(), ScriptedPager::new(true));
        assert!(fetch.begin(&pager, &no_op_waker()));
        assert_eq!(fetch.take_fetched().len(), IN_FLIGHT_MAX);
        assert_eq!(fetch.outcome(), None);
        pager.is_immediate.store(false, Ordering::Relaxed);
        assert_eq!(drive(&mut fetch, &pager), 0);
        let mut bytes = IN_FLIGHT_MAX as u64 * CHUNK_BYTES_MAX;
        while fetch.outcome().is_none() {
            pager.finish_all();
            bytes += drive(&mut fetch, &pager);
        }
        assert_eq!((bytes, fetch.outcome()), (RANGE.len, Some(Ok(()))));
    }

    #[test]
    fn a_deferred_chunk_is_fetched_later() {
        let (mut fetch, pager) = (whole(), ScriptedPager::new(true));
        pager.reads_left.store(3, Ordering::Relaxed);
        let mut bytes = drive(&mut fetch, &pager);
        assert_eq!((bytes, fetch.outcome()), (3 * CHUNK_BYTES_MAX, None));
        pager.reads_left.store(usize::MAX, Ordering::Relaxed);
        bytes += drive(&mut fetch, &pager);
        assert_eq!((bytes, fetch.outcome()), (RANGE.len, Some(Ok(()))));
    }

    #[test]
    fn fetched_data_is_limited_by_credits() {
        let (mut fetch, pager) =
            (Fetch::new(RANGE, None, 0, Credits::new(3 * CHUNK_BYTES_MAX)), ScriptedPager::new(true));
        let (mut bytes, waker) = (0, no_op_waker());
        while fetch.outcome().is_none() {
            assert!(fetch.begin(&pager, &waker), "dropped chunks return their credits");
            let fetched = fetch.take_fetched();
            assert!(!fetch.begin(&pager, &waker), "all credits are in use");
            bytes += fetched.iter().map(|(chunk, _)| chunk.len).sum::<u64>();
        }
        assert_eq!((bytes, fetch.outcome()), (RANGE.len, Some(Ok(()))));
    }

    #[test]
    fn nothing_is_requested_after_a_failure() {
        let (mut fetch, mut pager) = (whole(), ScriptedPager::new(false));
        pager.bad = Some(3 * CHUNK_BYTES_MAX);
        drive(&mut fetch, &pager);
        assert_eq!(pager.transfers.lock().unwrap().len(), IN_FLIGHT_MAX);
        pager.finish_all();
        assert_eq!(drive(&mut fetch, &pager), (IN_FLIGHT_MAX as u64 - 1) * CHUNK_BYTES_MAX);
        assert!(pager.transfers.lock().unwrap().is_empty());
        assert_eq!(fetch.outcome(), Some(Err(AccessError::Device)));
    }
}
