//! Readahead of one open file: a reader that goes forward finds the next bytes here.
//!
//! The kernel reads ahead 128 KiB, which is less than a network holds. This reads further: the window begins at
//! [`WINDOW_MIN`] once [`RUN_MIN`] bytes have been read one after another, and doubles up to [`WINDOW_MAX`] with what is used of it.
//! The kernel sends requests in parallel, so a request counts as the next one if it is within [`SLACK`] of it.

use std::collections::VecDeque;
use std::ops::Range;

use fuser::Errno;
use terrace_sync::{Condvar, Mutex};

use crate::turns;

/// Bytes of one read ahead.
pub(crate) const CHUNK_BYTES: u64 = 512 << 10;
/// So many bytes one after another begin readahead.
const RUN_MIN: u64 = 256 << 10;
/// The first window in bytes.
const WINDOW_MIN: u64 = CHUNK_BYTES;
/// The last window in bytes.
const WINDOW_MAX: u64 = 4 << 20;
/// The distance in bytes at which requests that the kernel sends in parallel overtake each other.
const SLACK: u64 = 256 << 10;

/// Readahead of one open file.
#[derive(Default)]
pub(crate) struct ReadAhead {
    state: Mutex<State>,
    arrived: Condvar,
}

#[derive(Default)]
struct State {
    /// Where the next request of a reader that goes forward begins.
    next: u64,
    /// Bytes that have been read one after another.
    run: u64,
    window: u64,
    /// In the order of their offsets, without gaps.
    chunks: VecDeque<Chunk>,
    /// Numbers the chunks.
    last_number: u64,
    /// [`Inode`](crate::inodes::Inode)'s count of changes when the chunks were asked for.
    changes: u64,
}

struct Chunk {
    number: u64,
    range: Range<u64>,
    content: Content,
}

enum Content {
    Pending,
    /// Shorter than the range where the file ends.
    Ready(Vec<u8>),
}

/// A read for [`ReadAhead::complete`] that a worker carries out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fetch {
    number: u64,
    pub(crate) range: Range<u64>,
}

impl ReadAhead {
    /// Takes note of a request, and returns what should be read ahead. `file_len` is the end of the file as far as it is
    /// known, `changes` the number of changes of the file: chunks from before a change are dropped.
    pub(crate) fn note(&self, request: &Range<u64>, file_len: u64, changes: u64) -> Vec<Fetch> {
        let mut state = self.state.lock();
        let first = state.first_number();
        let fetches = state.note(request, file_len, changes);
        let has_dropped = first.is_some() && state.first_number() != first;
        drop(state);
        if has_dropped {
            // A dropped chunk does not arrive, and a reader may wait for it.
            self.arrived.notify_all();
        }
        fetches
    }

    /// Fills the buffer from the chunks, waiting for those that are being read. Returns the number of bytes, less than
    /// the buffer's at the end of the file, or `None` if the range has to be read from the server.
    pub(crate) fn copy(&self, offset: u64, buffer: &mut [u8]) -> Option<usize> {
        let range = offset..offset + buffer.len() as u64;
        let mut state = self.state.lock();
        let mut filled = 0;
        while filled < buffer.len() {
            let at = range.start + filled as u64;
            let chunk = state.chunks.iter().find(|chunk| chunk.range.contains(&at))?;
            let Content::Ready(bytes) = &chunk.content else {
                turns::pass();
                self.arrived.wait(&mut state);
                continue;
            };
            let from = (at - chunk.range.start) as usize;
            let available = bytes.get(from..).unwrap_or_default();
            let count = available.len().min(buffer.len() - filled);
            buffer[filled..filled + count].copy_from_slice(&available[..count]);
            filled += count;
            if from + count == bytes.len() && (bytes.len() as u64) < chunk.range.end - chunk.range.start {
                break;
            }
        }
        Some(filled)
    }

    /// Whether a read is still to be made: its chunk has not been dropped since it was requested.
    pub(crate) fn wants(&self, fetch: &Fetch) -> bool {
        self.state.lock().chunks.iter().any(|chunk| chunk.number == fetch.number)
    }

    /// Delivers what has been read; after an error the chunk and those behind it are dropped, so that readers meet the
    /// error themselves.
    pub(crate) fn complete(&self, fetch: &Fetch, result: Result<Vec<u8>, Errno>, changes: u64) {
        let mut state = self.state.lock();
        let at = state.chunks.iter().position(|chunk| chunk.number == fetch.number);
        match (at, result) {
            (Some(at), Ok(bytes)) if changes == state.changes => {
                state.chunks[at].content = Content::Ready(bytes);
            }
            (Some(at), _) => state.chunks.truncate(at),
            (None, _) => {}
        }
        drop(state);
        self.arrived.notify_all();
    }
}

impl State {
    /// See [`ReadAhead::note`]. Drops chunks from the first one on.
    fn note(&mut self, request: &Range<u64>, file_len: u64, changes: u64) -> Vec<Fetch> {
        if self.changes != changes {
            self.changes = changes;
            self.chunks.clear();
        }
        if !self.is_next(request) {
            *self = State { next: request.end, changes, last_number: self.last_number, ..State::default() };
            return Vec::new();
        }
        self.run += request.end.saturating_sub(self.next);
        self.next = self.next.max(request.end);
        self.drop_passed();
        if self.run < RUN_MIN { Vec::new() } else { self.extend_window(file_len) }
    }

    fn first_number(&self) -> Option<u64> {
        self.chunks.front().map(|chunk| chunk.number)
    }

    fn is_next(&self, request: &Range<u64>) -> bool {
        request.start <= self.next + SLACK && request.end + SLACK >= self.next
    }

    /// Drops the chunks that the reader has passed.
    fn drop_passed(&mut self) {
        let passed = self.next.saturating_sub(SLACK);
        while self.chunks.front().is_some_and(|chunk| chunk.range.end <= passed) {
            self.chunks.pop_front();
            self.window = (self.window * 2).min(WINDOW_MAX);
        }
    }

    /// Adds chunks up to the window's end.
    fn extend_window(&mut self, file_len: u64) -> Vec<Fetch> {
        self.window = self.window.max(WINDOW_MIN);
        let end = (self.next + self.window).min(file_len);
        let mut start = self.chunks.back().map_or(self.next, |chunk| chunk.range.end);
        let mut fetches = Vec::new();
        while start < end {
            self.last_number += 1;
            let range = start..start + CHUNK_BYTES;
            start = range.end;
            self.chunks.push_back(Chunk {
                number: self.last_number,
                range: range.clone(),
                content: Content::Pending,
            });
            fetches.push(Fetch { number: self.last_number, range });
        }
        fetches
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REQUEST: u64 = 128 << 10;
    const LEN: u64 = 64 << 20;

    /// Reads forward from `offset`, so many requests. Returns the last fetches.
    fn read_forward(ahead: &ReadAhead, offset: u64, requests: u64) -> Vec<Fetch> {
        let ranges = (0..requests).map(|number| offset + number * REQUEST);
        ranges.map(|start| ahead.note(&(start..start + REQUEST), LEN, 0)).last().unwrap_or_default()
    }

    #[test]
    fn a_forward_reader_is_read_ahead_of() {
        let ahead = ReadAhead::default();
        assert_eq!(read_forward(&ahead, 0, 1), []);
        let fetches = read_forward(&ahead, REQUEST, 1);
        let ranges: Vec<_> = fetches.iter().map(|fetch| (fetch.range.start, fetch.range.end)).collect();
        assert_eq!(ranges, [(2 * REQUEST, 2 * REQUEST + CHUNK_BYTES)]);
        ahead.complete(&fetches[0], Ok(vec![7; CHUNK_BYTES as usize]), 0);
        let mut buffer = vec![0; REQUEST as usize];
        assert_eq!(ahead.copy(2 * REQUEST, &mut buffer), Some(buffer.len()));
        assert!(buffer.iter().all(|&byte| byte == 7));
        assert_eq!(ahead.copy(0, &mut buffer), None);
    }

    #[test]
    fn requests_out_of_order_are_forward_too_and_random_ones_are_not() {
        let ahead = ReadAhead::default();
        for number in [1, 0, 3, 2] {
            ahead.note(&(number * REQUEST..(number + 1) * REQUEST), LEN, 0);
        }
        assert!(!ahead.state.lock().chunks.is_empty());
        assert_eq!(ahead.note(&(LEN / 2..LEN / 2 + REQUEST), LEN, 0), []);
        assert!(ahead.state.lock().chunks.is_empty());
    }

    #[test]
    fn a_read_that_waits_for_a_chunk_goes_on_when_the_chunk_is_dropped() {
        const NEXT: u64 = 2 * REQUEST;
        let others = [
            (LEN / 2..LEN / 2 + REQUEST, 0),
            (NEXT..NEXT + REQUEST, 1),
            (NEXT..NEXT + CHUNK_BYTES + SLACK, 0),
        ];
        for (request, changes) in others {
            let ahead = std::sync::Arc::new(ReadAhead::default());
            assert_eq!(read_forward(&ahead, 0, 2).len(), 1);
            let (send, result) = std::sync::mpsc::channel();
            let reader = ahead.clone();
            std::thread::spawn(move || send.send(reader.copy(NEXT, &mut [0])));
            // It waits by now.
            std::thread::sleep(std::time::Duration::from_millis(100));
            ahead.note(&request, NEXT, changes);
            assert_eq!(result.recv_timeout(std::time::Duration::from_secs(10)), Ok(None));
        }
    }

    #[test]
    fn the_end_of_the_file_ends_the_window_and_a_short_chunk_the_read() {
        let ahead = ReadAhead::default();
        let len = 3 * REQUEST + 10;
        let fetches: Vec<Fetch> = (0..2)
            .flat_map(|number| ahead.note(&(number * REQUEST..(number + 1) * REQUEST), len, 0))
            .collect();
        assert_eq!(fetches.len(), 1);
        ahead.complete(&fetches[0], Ok(vec![1; (len - 2 * REQUEST) as usize]), 0);
        let mut buffer = vec![0; REQUEST as usize];
        assert_eq!(ahead.copy(3 * REQUEST, &mut buffer), Some(10));
        assert_eq!(ahead.note(&(2 * REQUEST..3 * REQUEST), len, 0), []);
    }

    #[test]
    fn a_change_drops_what_was_read_before_it() {
        let ahead = ReadAhead::default();
        let fetches = read_forward(&ahead, 0, 2);
        ahead.note(&(2 * REQUEST..3 * REQUEST), LEN, 1);
        ahead.complete(&fetches[0], Ok(vec![7; CHUNK_BYTES as usize]), 0);
        let mut buffer = [0];
        let chunk_is_new = ahead.state.lock().chunks.iter().all(|chunk| chunk.number != fetches[0].number);
        assert!(chunk_is_new);
        let error = ahead
            .state
            .lock()
            .chunks
            .front()
            .map(|chunk| Fetch { number: chunk.number, range: chunk.range.clone() });
        ahead.complete(&error.expect("a new chunk"), Err(Errno::EIO), 1);
        assert_eq!(ahead.copy(3 * REQUEST, &mut buffer), None);
    }
}
