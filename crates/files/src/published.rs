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
    /// The lengths that the file is about to have, by each change under way: peers see no more.
    limits: Vec<u64>,
}

impl State {
    fn set(&self, len: u64) {
        if let Some(length) = &self.length {
            length.set(self.limits.iter().copied().fold(len, u64::min));
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

    /// Shows peers no more than `limit` of a file that has `len` bytes, until [`Published::end_limit`]. Returns whether peers may
    /// have seen more.
    pub fn begin_limit(&self, limit: u64, len: u64) -> bool {
        let mut state = self.0.lock();
        state.limits.push(limit);
        state.set(len);
        state.length.is_some()
    }

    /// Ends a limit: the file has `len` bytes.
    pub fn end_limit(&self, limit: u64, len: u64) {
        let mut state = self.0.lock();
        if let Some(at) = state.limits.iter().position(|other| *other == limit) {
            state.limits.swap_remove(at);
        }
        state.set(len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_lasts_while_other_changes_begin_and_end() {
        let (published, lengths) = (Published::default(), Lengths::default());
        let (shared, number) = published.publish(&lengths, 100).unwrap();
        let seen = || {
            let mut bytes = [0; 8];
            let at = u64::from(number) * 8;
            rustix::io::pread(shared.file(), &mut bytes, at).unwrap();
            u64::from_ne_bytes(bytes)
        };
        assert_eq!(seen(), 100);
        assert!(published.begin_limit(50, 100));
        published.begin_limit(70, 100);
        published.set(200);
        assert_eq!(seen(), 50);
        published.end_limit(70, 200);
        assert_eq!(seen(), 50, "the other change has not ended");
        published.end_limit(50, 50);
        assert_eq!(seen(), 50);
        published.set(80);
        assert_eq!(seen(), 80);
    }
}
