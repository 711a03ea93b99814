//! The length of a file as same-host peers see it, who map the file themselves.

use std::sync::{Arc, OnceLock};

use terrace_shm::{FileLength, FileLengths};
use terrace_sync::Mutex;

/// The published lengths of a process's files, once a peer has asked for one.
#[derive(Debug, Default)]
pub struct Lengths(OnceLock<Option<Arc<FileLengths>>>);

impl Lengths {
    fn add(&self) -> Option<FileLength> {
        let lengths = self.0.get_or_init(|| {
            FileLengths::new().inspect_err(|error| tracing::warn!(%error, "peers cannot map files")).ok()
        });
        lengths.as_ref()?.add()
    }
}

/// The published length of a file.
#[derive(Debug, Default)]
pub struct Published(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    length: Option<FileLength>,
    /// The length that the file is about to have: peers see no more.
    limit: Option<u64>,
}

impl State {
    fn set(&self, len: u64) {
        if let Some(length) = &self.length {
            length.set(self.limit.map_or(len, |limit| limit.min(len)));
        }
    }
}

impl Published {
    /// Sets the length, if it is published.
    pub fn set(&self, len: u64) {
        self.0.lock().set(len);
    }

    /// Publishes the length, and returns where: the lengths, and the number among them. `None` if there are too many.
    pub fn publish(&self, lengths: &Lengths, len: u64) -> Option<(Arc<FileLengths>, u32)> {
        let mut state = self.0.lock();
        if state.length.is_none() {
            state.length = lengths.add();
        }
        state.set(len);
        state.length.as_ref().map(|length| (length.lengths().clone(), length.number()))
    }

    /// Shows peers no more than `limit` of a file that has `len` bytes, or all of it again. Returns whether peers may have
    /// seen more.
    pub fn limit(&self, limit: Option<u64>, len: u64) -> bool {
        let mut state = self.0.lock();
        state.limit = limit;
        state.set(len);
        state.length.is_some()
    }
}
