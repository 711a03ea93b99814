//! Write-behind: bytes that programs have written and the server does not have yet.
//!
//! Each inode has one [`DirtyFile`], shared by all of its open files. Adjacent writes are joined into extents. A full extent is
//! written by a worker at once; the others are written when the file is closed or synchronized, when another operation
//! depends on them, when they are old, or when all files together have too many dirty bytes.
//!
//! ```text
//!             write                 take                    Ok
//!   (clean) --------> extent -------------> in flight -------------> (clean)
//!                        ^  join, overwrite     |
//!                        |                      | Err: the bytes are dropped, the error is counted; all of the
//!                        |                      |      file's, if the server did not answer in time
//!                        +-- never over a range in flight: a second extent of that range waits for the first
//! ```
//!
//! An error is reported once to each open file, by the next `fsync` or `close`, and to the file that is opened next if no
//! file has reported it, or when the export is unmounted.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use fuser::Errno;
use terrace_export::ExportError;
use terrace_sync::{Condvar, Mutex};

use crate::attributes::errno;
use crate::extents::{Buffers, EXTENT_COST, Extents, Found, Taken, overlaps, range_of};
use crate::turns;

/// Writes bytes to the server.
pub(crate) trait Sink: Send + Sync {
    /// Writes all bytes of some extents that do not overlap, beyond the end of the file too. Returns whether the server has noted
    /// the time.
    ///
    /// # Errors
    /// Why they may not be in the file: `Lost` if the server has not answered in time.
    fn write(&self, extents: &[(u64, &[u8])]) -> Result<bool, ExportError>;
}

/// The dirty bytes of all files, and buffers for more.
#[derive(Default)]
pub(crate) struct Budget {
    dirty: AtomicUsize,
    limit: usize,
    buffers: Buffers,
}

impl Budget {
    /// At most `limit` bytes are dirty before writers write them themselves.
    pub(crate) fn new(limit: usize) -> Budget {
        Budget { limit, ..Budget::default() }
    }

    fn is_exceeded(&self) -> bool {
        self.dirty.load(Ordering::Relaxed) > self.limit
    }

    fn is_half_used(&self) -> bool {
        self.dirty.load(Ordering::Relaxed) > self.limit / 2
    }
}

/// The dirty bytes of a file.
pub(crate) struct DirtyFile {
    state: Mutex<State>,
    written: Condvar,
    budget: Arc<Budget>,
}

/// Extents that are written together, and where they go.
struct Batch {
    sink: Arc<dyn Sink>,
    extents: Vec<Taken>,
}

#[derive(Default)]
struct State {
    extents: Extents,
    /// Ranges that are being written, with the numbers of their extents.
    in_flight: Vec<(Range<u64>, u64)>,
    /// How many writes there were, and how many of them are older than the time of modification that the server has noted.
    writes: u64,
    stamped: u64,
    /// Where the bytes go: the open file that has written last.
    sink: Option<Arc<dyn Sink>>,
    /// When the oldest of the extents was made.
    since: Option<Instant>,
    /// When extents were last written to the server.
    written: Option<Instant>,
    /// How often all extents were given up, because the server did not answer in time.
    give_ups: u64,
    errors: Errors,
}

/// Errors of write-behind, counted.
#[derive(Default)]
struct Errors {
    count: u64,
    last: Option<Errno>,
    is_reported: bool,
}

impl Errors {
    fn note(&mut self, errno: Errno) {
        self.count += 1;
        self.last = Some(errno);
        self.is_reported = false;
    }
}

/// What an open file has reported of the errors.
#[derive(Debug, Default)]
pub(crate) struct ErrorCursor(Mutex<u64>);

/// What the caller of [`DirtyFile::write`] has to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// Nothing.
    Nothing,
    /// Let a worker call [`DirtyFile::write_some`].
    Submit,
}

impl DirtyFile {
    /// A clean file.
    pub(crate) fn new(budget: Arc<Budget>) -> DirtyFile {
        DirtyFile { state: Mutex::default(), written: Condvar::default(), budget }
    }

    /// Remembers a write. The offset and the length together are less than 2^63, as the kernel has checked.
    pub(crate) fn write(&self, sink: &Arc<dyn Sink>, offset: u64, bytes: &[u8]) -> Next {
        let is_full = {
            let mut state = self.state.lock();
            state.sink = Some(sink.clone());
            state.since.get_or_insert_with(Instant::now);
            state.writes += 1;
            let before = state.extents.cost();
            let is_full = state.extents.insert(offset, bytes, &self.budget.buffers);
            let after = state.extents.cost();
            // What joins extents may cost less than they did.
            self.budget.dirty.fetch_add(after.wrapping_sub(before), Ordering::Relaxed);
            is_full
        };
        // A writer that is faster than the server writes by itself, so it takes the server's time.
        while self.budget.is_exceeded() && self.write_some() {}
        if is_full { Next::Submit } else { Next::Nothing }
    }

    /// Writes up to [`EXTENTS_MAX`] extents if more than half of what may be dirty is, unless another thread writes some: a server that
    /// is stopped would hold all threads otherwise.
    pub(crate) fn write_excess(&self) {
        if self.budget.is_half_used() && self.state.lock().in_flight.is_empty() {
            // It takes longer than the program until its next write.
            turns::pass();
            self.write_some();
        }
    }

    /// Whether nothing is dirty or in flight.
    pub(crate) fn is_clean(&self) -> bool {
        let state = self.state.lock();
        state.extents.is_empty() && state.in_flight.is_empty()
    }

    /// When bytes were last written to the server.
    pub(crate) fn last_written(&self) -> Option<Instant> {
        self.state.lock().written
    }

    /// Whether there were writes whose time the server has not noted.
    pub(crate) fn is_unstamped(&self) -> bool {
        let state = self.state.lock();
        state.stamped != state.writes
    }

    /// Whether the server has not noted the time of the first so many writes: the caller has it do so.
    pub(crate) fn begin_stamp(&self, writes: u64) -> bool {
        let mut state = self.state.lock();
        let is_unstamped = state.stamped < writes;
        state.stamped = state.stamped.max(writes);
        is_unstamped
    }

    /// Whether bytes have been dirty for longer than `age`.
    pub(crate) fn is_old(&self, age: Duration) -> bool {
        self.state.lock().since.is_some_and(|since| since.elapsed() >= age)
    }

    /// The server could not be asked to note the time of the first so many writes: the next stamp tries again.
    pub(crate) fn undo_stamp(&self, writes: u64) {
        let mut state = self.state.lock();
        if state.stamped == writes {
            state.stamped = writes - 1;
        }
    }

    /// Looks for a range among the dirty bytes.
    pub(crate) fn find(&self, range: &Range<u64>) -> Found {
        let state = self.state.lock();
        if state.in_flight.iter().any(|(other, _)| overlaps(other, range)) {
            return Found::Mixed;
        }
        state.extents.find(range)
    }

    /// The end of the last byte that is dirty or in flight; 0 if none is.
    pub(crate) fn end(&self) -> u64 {
        let state = self.state.lock();
        let in_flight = state.in_flight.iter().map(|(range, _)| range.end);
        in_flight.max().unwrap_or(0).max(state.extents.end())
    }

    /// Writes up to [`EXTENTS_MAX`] extents. `false` if there is none that can be written now.
    pub(crate) fn write_some(&self) -> bool {
        self.write_some_until(u64::MAX)
    }

    /// Writes some extents whose number is not larger than `newest`. `false` if there is none that can be written now.
    fn write_some_until(&self, newest: u64) -> bool {
        let mut state = self.state.lock();
        let Some(Batch { sink, extents: taken }) = state.take_extents(newest) else {
            return false;
        };
        // All other bytes are on the server already.
        let is_last = state.extents.is_empty() && state.in_flight.len() == taken.len();
        let writes = state.writes;
        drop(state);
        let extents: Vec<_> = taken.iter().map(|extent| (extent.offset, &extent.bytes[..])).collect();
        let result = write_extents(&*sink, &extents);
        let mut state = self.state.lock();
        state.written = Some(Instant::now());
        state.in_flight.retain(|(other, _)| !extents.iter().any(|(offset, _)| *offset == other.start));
        match result {
            Ok(is_time_noted) if is_time_noted && is_last => state.stamped = state.stamped.max(writes),
            Ok(_) => {}
            Err(ExportError::Lost) => state.give_up(&self.budget),
            Err(error) => state.errors.note(errno(&error)),
        }
        drop(state);
        for extent in taken {
            self.budget.dirty.fetch_sub(extent.bytes.len() + EXTENT_COST, Ordering::Relaxed);
            self.budget.buffers.give_back(extent.bytes);
        }
        self.written.notify_all();
        true
    }

    /// Writes everything that was dirty when it is called, and waits for what of it others are writing; not for what is written
    /// meanwhile, which may have no end. The caller asks for the result with [`report`](Self::report). Returns how many writes
    /// there had been.
    ///
    /// # Errors
    /// `EIO` if the server did not answer in time: there is no point in asking it for more. That is reported, too.
    pub(crate) fn write_all(&self) -> Result<u64, Errno> {
        let (newest, writes, give_ups) = {
            let state = self.state.lock();
            (state.extents.newest(), state.writes, state.give_ups)
        };
        loop {
            if self.write_some_until(newest) {
                continue;
            }
            let mut state = self.state.lock();
            if !state.has_until(newest) {
                return if state.give_ups == give_ups { Ok(writes) } else { Err(Errno::EIO) };
            }
            if !state.in_flight.is_empty() {
                turns::pass();
                self.written.wait(&mut state);
            }
        }
    }

    /// Drops everything that is dirty, as if the server had not answered in time.
    pub(crate) fn give_up(&self) {
        let mut state = self.state.lock();
        if !state.extents.is_empty() {
            state.give_up(&self.budget);
        }
    }

    /// An error of the file that every open file has to report.
    pub(crate) fn note_error(&self, errno: Errno) {
        self.state.lock().errors.note(errno);
    }

    /// The cursor of a file that is opened now.
    pub(crate) fn cursor(&self) -> ErrorCursor {
        let errors = &self.state.lock().errors;
        let is_unseen = errors.count > 0 && !errors.is_reported;
        ErrorCursor(Mutex::new(errors.count - u64::from(is_unseen)))
    }

    /// The last error of write-behind, if no open file has reported it.
    pub(crate) fn unreported_error(&self) -> Option<Errno> {
        let errors = &self.state.lock().errors;
        if errors.is_reported { None } else { errors.last }
    }

    /// The last error of write-behind, unless the open file has reported it.
    ///
    /// # Errors
    /// That error.
    pub(crate) fn report(&self, cursor: &ErrorCursor) -> Result<(), Errno> {
        let mut state = self.state.lock();
        let mut seen = cursor.0.lock();
        if *seen == state.errors.count {
            return Ok(());
        }
        *seen = state.errors.count;
        state.errors.is_reported = true;
        state.errors.last.map_or(Ok(()), Err)
    }
}

impl State {
    /// Drops all extents, and counts one error. Each would take the time in which a call fails without an answer, and there may
    /// be thousands.
    fn give_up(&mut self, budget: &Budget) {
        self.errors.note(Errno::EIO);
        self.give_ups += 1;
        budget.dirty.fetch_sub(self.extents.cost(), Ordering::Relaxed);
        self.extents.clear(&budget.buffers);
        (self.since, self.sink) = (None, None);
    }

    /// Whether there are extents, dirty or in flight, whose number is not larger than `newest`.
    fn has_until(&self, newest: u64) -> bool {
        self.extents.has_until(newest) || self.in_flight.iter().any(|&(_, number)| number <= newest)
    }

    /// Takes extents that overlap nothing in flight and whose number is not larger than `newest`.
    fn take_extents(&mut self, newest: u64) -> Option<Batch> {
        let sink = self.sink.clone()?;
        let is_free = |range: &Range<u64>| !self.in_flight.iter().any(|(other, _)| overlaps(other, range));
        let extents = self.extents.take(newest, is_free);
        self.in_flight
            .extend(extents.iter().map(|extent| (range_of(extent.offset, &extent.bytes), extent.number)));
        if self.extents.is_empty() {
            self.since = None;
            // An open file is not kept open by what it has written.
            self.sink = None;
        }
        (!extents.is_empty()).then_some(Batch { sink, extents })
    }
}

/// Writes extents together. If the server refuses that, writes each alone, so that one that it refuses takes no other along.
///
/// # Errors
/// Of the first one that cannot be written; `Lost` if the server does not answer.
fn write_extents(sink: &dyn Sink, extents: &[(u64, &[u8])]) -> Result<bool, ExportError> {
    let together = sink.write(extents);
    if extents.len() == 1 || matches!(together, Ok(_) | Err(ExportError::Lost)) {
        return together;
    }
    let mut all = Ok(false);
    for extent in extents {
        match sink.write(&[*extent]) {
            Err(ExportError::Lost) => return Err(ExportError::Lost),
            alone => all = all.and(alone.map(|_| false)),
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use std::sync::Weak;

    use super::*;
    use crate::extents::{EXTENT_BYTES, EXTENTS_MAX};
    use proptest::prelude::*;

    /// A file of the server in memory, with errors on demand.
    #[derive(Default)]
    struct Memory {
        bytes: Mutex<Vec<u8>>,
        error: Mutex<Option<Errno>>,
        /// The server does not answer; and how often it was asked.
        is_silent: Mutex<bool>,
        asked: AtomicUsize,
        /// An offset at which nothing can be written.
        bad: Mutex<Option<u64>>,
        /// Extents are only written alone.
        refuses_many: Mutex<bool>,
        /// The number of extents of each call.
        batches: Mutex<Vec<usize>>,
    }

    impl Sink for Memory {
        fn write(&self, extents: &[(u64, &[u8])]) -> Result<bool, ExportError> {
            self.asked.fetch_add(1, Ordering::Relaxed);
            if *self.is_silent.lock() {
                return Err(ExportError::Lost);
            }
            if let Some(errno) = *self.error.lock() {
                return Err(ExportError::Os(errno.code()));
            }
            let is_bad = extents.iter().any(|(offset, _)| *self.bad.lock() == Some(*offset));
            if is_bad || (*self.refuses_many.lock() && extents.len() > 1) {
                return Err(ExportError::Os(Errno::ENOSPC.code()));
            }
            let mut file = self.bytes.lock();
            for &(offset, bytes) in extents {
                let end = offset as usize + bytes.len();
                if file.len() < end {
                    file.resize(end, 0);
                }
                file[offset as usize..end].copy_from_slice(bytes);
            }
            self.batches.lock().push(extents.len());
            Ok(extents.len() == 1 && extents[0].1.len() < 100)
        }
    }

    fn dirty_file(limit: usize) -> (DirtyFile, Arc<Memory>, Arc<dyn Sink>) {
        let memory = Arc::<Memory>::default();
        let sink: Arc<dyn Sink> = memory.clone();
        (DirtyFile::new(Arc::new(Budget::new(limit))), memory, sink)
    }

    #[test]
    fn adjacent_writes_become_one_extent() {
        let (file, memory, sink) = dirty_file(EXTENT_BYTES);
        for at in 0..100u64 {
            assert_eq!(file.write(&sink, at * 1000, &[at as u8; 1000]), Next::Nothing);
        }
        assert_eq!(file.find(&(500..1500)), Found::Dirty([[0; 500], [1; 500]].concat()));
        assert_eq!(file.find(&(99_999..100_001)), Found::Mixed);
        assert_eq!(file.find(&(100_000..100_001)), Found::Clean);
        assert!(file.write_some());
        assert!(file.is_clean());
        assert_eq!(memory.bytes.lock().len(), 100_000);
    }

    #[test]
    fn extents_are_written_together_up_to_a_number_and_a_size() {
        let (file, memory, sink) = dirty_file(8 * EXTENT_BYTES);
        for at in 0..EXTENTS_MAX as u64 + 3 {
            file.write(&sink, at * 1000, &[1; 10]);
        }
        file.write_all().unwrap();
        for at in 0..3 {
            file.write(&sink, at * EXTENT_BYTES as u64, &[2; EXTENT_BYTES / 2 - 1]);
        }
        file.write_all().unwrap();
        assert_eq!(*memory.batches.lock(), [EXTENTS_MAX, 3, 2, 1]);
        assert!(file.is_clean());
        assert_eq!(file.budget.dirty.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn an_extent_that_cannot_be_written_takes_no_other_along() {
        let (file, memory, sink) = dirty_file(EXTENT_BYTES);
        let cursor = file.cursor();
        *memory.bad.lock() = Some(1000);
        for at in 0..4 {
            file.write(&sink, at * 1000, &[7; 10]);
        }
        file.write_all().unwrap();
        assert!(file.is_clean());
        let bytes = memory.bytes.lock();
        let written: Vec<u8> = (0..4).map(|at| bytes[at * 1000 + 9]).collect();
        assert_eq!(written, [7, 0, 7, 7]);
        assert_eq!(file.report(&cursor).map_err(|errno| errno.code()), Err(Errno::ENOSPC.code()));
        assert!(file.report(&cursor).is_ok());
    }

    #[test]
    fn a_server_that_does_not_answer_is_waited_for_once() {
        let (file, memory, sink) = dirty_file(8 * EXTENT_BYTES);
        let cursor = file.cursor();
        *memory.is_silent.lock() = true;
        for at in 0..1000 {
            file.write(&sink, at * 10_000, &[7; 4096]);
        }
        assert!(file.write_all().is_err());
        assert_eq!(memory.asked.load(Ordering::Relaxed), 1);
        assert!(file.is_clean());
        assert_eq!(file.budget.dirty.load(Ordering::Relaxed), 0);
        assert_eq!(file.report(&cursor).map_err(|errno| errno.code()), Err(Errno::EIO.code()));
        *memory.is_silent.lock() = false;
        file.write(&sink, 0, b"back");
        file.write_all().unwrap();
        assert_eq!(&*memory.bytes.lock(), b"back");
        assert!(file.report(&cursor).is_ok());
    }

    #[test]
    fn a_time_that_the_server_could_not_note_is_noted_later() {
        let (file, _, sink) = dirty_file(EXTENT_BYTES);
        file.write(&sink, 0, &[1; 100]);
        let writes = file.write_all().unwrap();
        assert!(file.begin_stamp(writes));
        file.undo_stamp(writes);
        assert!(file.is_unstamped() && file.begin_stamp(writes));
        file.write(&sink, 0, &[1; 100]);
        let later = file.write_all().unwrap();
        assert!(file.begin_stamp(later));
        file.undo_stamp(writes);
        assert!(!file.is_unstamped(), "later writes have a time");
    }

    #[test]
    fn extents_that_can_be_written_alone_are_no_error() {
        let (file, memory, sink) = dirty_file(EXTENT_BYTES);
        let cursor = file.cursor();
        *memory.refuses_many.lock() = true;
        file.write(&sink, 0, &[7; 10]);
        file.write(&sink, 1000, &[7; 10]);
        file.write_all().unwrap();
        assert_eq!(memory.bytes.lock().len(), 1010);
        assert!(file.report(&cursor).is_ok());
    }

    #[test]
    fn the_time_of_the_last_bytes_is_that_of_the_file_if_the_server_notes_it() {
        let (file, _, sink) = dirty_file(EXTENT_BYTES);
        file.write(&sink, 0, &[1; 10]);
        assert!(file.is_unstamped());
        file.write_all().unwrap();
        assert!(!file.is_unstamped());
        file.write(&sink, 0, &[1; 10]);
        file.write(&sink, 1000, &[1; 100]);
        let writes = file.write_all().unwrap();
        assert!(file.begin_stamp(writes), "the last extent was written without the time");
        assert!(!file.begin_stamp(writes) && !file.is_unstamped());
        file.write(&sink, 0, &[1; 100]);
        file.write_all().unwrap();
        file.write(&sink, 1000, &[1; 10]);
        file.write_all().unwrap();
        assert!(!file.is_unstamped(), "the last extent was written with the time");
    }

    #[test]
    fn a_full_extent_is_for_a_worker() {
        let (file, _, sink) = dirty_file(8 * EXTENT_BYTES);
        let half = vec![1; EXTENT_BYTES / 2];
        assert_eq!(file.write(&sink, 0, &half), Next::Nothing);
        assert_eq!(file.write(&sink, half.len() as u64, &half), Next::Submit);
    }

    #[test]
    fn more_than_half_of_the_limit_is_written_when_the_program_has_its_answer() {
        let (file, memory, sink) = dirty_file(2 * (500 + EXTENT_COST));
        file.write(&sink, 0, &[1; 500]);
        file.write_excess();
        assert!(memory.bytes.lock().is_empty(), "so much may be dirty");
        file.write(&sink, 500, &[1]);
        assert!(memory.bytes.lock().is_empty(), "the program has no answer yet");
        file.write_excess();
        assert_eq!(memory.bytes.lock().len(), 501);
    }

    #[test]
    fn a_writer_over_the_limit_writes_itself() {
        let (file, memory, sink) = dirty_file(1000);
        file.write(&sink, 0, &[1; 1001]);
        assert_eq!(memory.bytes.lock().len(), 1001);
    }

    #[test]
    fn scattered_bytes_count_with_the_memory_that_they_take() {
        let (file, memory, sink) = dirty_file(1280);
        for at in 0..100 {
            file.write(&sink, 2 * at, &[1]);
            assert!(file.state.lock().extents.cost() <= 1280);
        }
        assert!(memory.bytes.lock().len() > 100);
        file.write(&sink, 0, &[2; 200]);
        file.write_all().unwrap();
        assert_eq!(file.budget.dirty.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn extents_that_are_to_stay_are_not_searched_for_each_batch() {
        let (file, _, sink) = dirty_file(EXTENT_BYTES);
        let batch = EXTENTS_MAX as u64;
        for at in 0..batch + 4 {
            file.write(&sink, 1000 * at, &[1]);
        }
        let newest = file.state.lock().extents.newest();
        assert!(file.write_some_until(newest));
        for at in 0..batch {
            file.write(&sink, 1000 * at, &[2]);
        }
        assert!(file.write_some());
        let state = file.state.lock();
        assert_eq!(state.extents.find(&(0..1)), Found::Clean, "after the last ones come the first");
        assert_eq!(state.extents.find(&(1000 * (batch - 1)..1000 * (batch - 1) + 1)), Found::Dirty(vec![2]));
        assert_eq!(state.extents.find(&(1000 * batch..1000 * batch + 1)), Found::Clean);
    }

    #[test]
    fn an_error_is_reported_once_to_each_open_file_and_to_one_opened_later_if_nobody_knows_it() {
        let (file, memory, sink) = dirty_file(EXTENT_BYTES);
        let (first, second) = (file.cursor(), file.cursor());
        *memory.error.lock() = Some(Errno::ENOSPC);
        file.write(&sink, 0, b"lost");
        file.write_all().unwrap();
        let later = file.cursor();
        assert_eq!(file.unreported_error().map(|errno| errno.code()), Some(Errno::ENOSPC.code()));
        for cursor in [&first, &second, &later] {
            assert_eq!(file.report(cursor).map_err(|errno| errno.code()), Err(Errno::ENOSPC.code()));
            assert!(file.report(cursor).is_ok());
        }
        assert!(file.report(&file.cursor()).is_ok(), "it has been reported");
        assert!(file.unreported_error().is_none());
    }

    /// Dirties a further byte with each write, as a program does that never stops writing.
    struct Busy {
        file: Weak<DirtyFile>,
        own: Weak<Busy>,
        writes: AtomicUsize,
    }

    impl Sink for Busy {
        fn write(&self, _extents: &[(u64, &[u8])]) -> Result<bool, ExportError> {
            let count = self.writes.fetch_add(1, Ordering::Relaxed) + 1;
            if let (Some(file), Some(own)) = (self.file.upgrade(), self.own.upgrade()) {
                let sink: Arc<dyn Sink> = own;
                file.write(&sink, 1000 - 10 * count as u64, &[1]);
            }
            Ok(true)
        }
    }

    #[test]
    fn write_all_does_not_wait_for_what_is_written_meanwhile() {
        let file = Arc::new(DirtyFile::new(Arc::new(Budget::new(EXTENT_BYTES))));
        let busy = Arc::new_cyclic(|own| Busy {
            file: Arc::downgrade(&file),
            own: own.clone(),
            writes: AtomicUsize::new(0),
        });
        let sink: Arc<dyn Sink> = busy.clone();
        file.write(&sink, 1000, &[1]);
        file.write_all().unwrap();
        assert_eq!(busy.writes.load(Ordering::Relaxed), 1);
        assert!(!file.is_clean());
    }

    #[test]
    fn write_all_waits_for_what_overwrites_older_bytes() {
        let (file, memory, sink) = dirty_file(EXTENT_BYTES);
        file.write(&sink, 10, &[1; 10]);
        let newest = file.state.lock().extents.newest();
        file.write(&sink, 5, &[2; 10]);
        assert!(file.write_some_until(newest));
        assert!(file.is_clean());
        assert_eq!(memory.bytes.lock()[5..20], [[2; 10].as_slice(), &[1; 5]].concat());
    }

    proptest! {
        #[test]
        fn the_file_has_every_write_in_order(
            writes in proptest::collection::vec((0..300u64, 1..80usize, any::<bool>()), 1..60),
            limit in 1..500usize,
        ) {
            let (file, memory, sink) = dirty_file(limit);
            let mut expected = Vec::new();
            for (number, &(offset, len, reads)) in writes.iter().enumerate() {
                let end = offset as usize + len;
                if expected.len() < end {
                    expected.resize(end, 0);
                }
                expected[offset as usize..end].fill(number as u8);
                file.write(&sink, offset, &vec![number as u8; len]);
                if reads {
                    match file.find(&(offset..end as u64)) {
                        Found::Dirty(bytes) => prop_assert_eq!(&bytes[..], &expected[offset as usize..end]),
                        Found::Mixed => {}
                        Found::Clean => {
                            prop_assert_eq!(&memory.bytes.lock()[offset as usize..end], &expected[offset as usize..end]);
                        }
                    }
                }
            }
            file.write_all().unwrap();
            prop_assert!(file.is_clean());
            prop_assert_eq!(file.budget.dirty.load(Ordering::Relaxed), 0);
            prop_assert_eq!(&*memory.bytes.lock(), &expected);
        }
    }
}
