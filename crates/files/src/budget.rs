//! How many windows there are, and which one leaves for another.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use terrace_sync::Mutex;

/// Windows that are looked at to find one that can leave.
const LOOKS: usize = 32;

/// What became of a window that was to leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It is gone.
    Gone,
    /// It was accessed lately, or is being accessed.
    Stays,
}

/// A file that has windows.
pub trait Owner: Send + Sync + std::fmt::Debug {
    /// Has the window that begins at an offset leave, unless it was accessed since the last call or is being accessed.
    fn try_drop_window(&self, start: u64) -> Fate;
}

/// The windows of a process.
#[derive(Debug)]
pub struct Budget {
    windows_max: usize,
    count: AtomicUsize,
    /// The bytes of all windows.
    bytes: AtomicU64,
    /// In the order in which they were made, or accessed when they would have left. Windows that have gone are found out
    /// when their turn comes, or when they are half of the queue.
    queue: Mutex<VecDeque<Weak<Place>>>,
}

/// Where a window is.
#[derive(Debug)]
struct Place {
    file: Weak<dyn Owner>,
    /// The offset of the window's first byte.
    start: u64,
}

/// A window's share of the budget.
#[derive(Debug)]
pub struct Share {
    budget: Arc<Budget>,
    bytes: u64,
    /// The queue refers to it for as long as there is the window.
    _place: Arc<Place>,
}

impl Share {
    /// The window has so many bytes.
    pub fn set_bytes(&mut self, bytes: u64) {
        self.budget.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.budget.bytes.fetch_sub(self.bytes, Ordering::Relaxed);
        self.bytes = bytes;
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.budget.count.fetch_sub(1, Ordering::Relaxed);
        self.budget.bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl Budget {
    /// A budget of this many windows.
    pub fn new(windows_max: usize) -> Arc<Budget> {
        Arc::new(Budget {
            windows_max,
            count: AtomicUsize::new(0),
            bytes: AtomicU64::new(0),
            queue: Mutex::default(),
        })
    }

    /// The number of windows.
    pub fn count(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    /// The bytes of all windows.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Whether a new window takes the place of another one.
    pub fn is_full(&self) -> bool {
        self.count() >= self.windows_max
    }

    /// A share for the window of `file` that begins at `start`. Another window leaves if there are too many: the oldest
    /// that was not accessed since it was looked at last. `None` if none could leave. The caller may hold its own file's
    /// windows: those of other files are taken only if they are free.
    pub fn take(self: &Arc<Budget>, file: &Arc<dyn Owner>, start: u64) -> Option<Share> {
        let mut queue = self.queue.lock();
        let mut left = Vec::new();
        for _ in 0..LOOKS {
            if !self.is_full() {
                break;
            }
            let weak = queue.pop_front()?;
            let Some(place) = weak.upgrade() else { continue };
            let Some(other) = place.file.upgrade() else { continue };
            let fate = if std::ptr::addr_eq(Arc::as_ptr(&other), Arc::as_ptr(file)) {
                Fate::Stays
            } else {
                other.try_drop_window(place.start)
            };
            if fate == Fate::Stays {
                queue.push_back(weak);
            }
            // Its file may end with this reference, which takes other locks.
            left.push(other);
        }
        let taken = self.count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |count| {
            (count < self.windows_max).then_some(count + 1)
        });
        let share = taken.is_ok().then(|| {
            if queue.len() >= 2 * self.windows_max {
                queue.retain(|place| place.strong_count() > 0);
            }
            let place = Arc::new(Place { file: Arc::downgrade(file), start });
            queue.push_back(Arc::downgrade(&place));
            Share { budget: self.clone(), bytes: 0, _place: place }
        });
        drop(queue);
        drop(left);
        share
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct File;

    impl Owner for File {
        fn try_drop_window(&self, _: u64) -> Fate {
            Fate::Stays
        }
    }

    #[test]
    fn windows_that_have_gone_leave_the_queue_although_their_file_is_open() {
        const WINDOWS_MAX: usize = 8;
        let budget = Budget::new(WINDOWS_MAX);
        let file: Arc<dyn Owner> = Arc::new(File);
        let kept: Vec<_> = (0..3).map(|start| budget.take(&file, start).unwrap()).collect();
        for _ in 0..100 {
            drop(budget.take(&file, 3).unwrap());
            assert!(budget.queue.lock().len() <= 2 * WINDOWS_MAX);
        }
        let queue = budget.queue.lock();
        let starts: Vec<_> = queue.iter().filter_map(Weak::upgrade).map(|place| place.start).collect();
        assert_eq!(starts, [0, 1, 2]);
        assert_eq!(budget.count(), kept.len());
    }
}
