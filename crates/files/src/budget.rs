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
    /// In the order in which they were made, or accessed when they would have left: the file, and the window's first
    /// byte. Windows that have gone are found out when their turn comes.
    queue: Mutex<VecDeque<(Weak<dyn Owner>, u64)>>,
}

/// A window's place in the budget.
#[derive(Debug)]
pub struct Share {
    budget: Arc<Budget>,
    bytes: u64,
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
            let (weak, first) = queue.pop_front()?;
            let Some(other) = weak.upgrade() else { continue };
            let fate = if std::ptr::addr_eq(Arc::as_ptr(&other), Arc::as_ptr(file)) {
                Fate::Stays
            } else {
                other.try_drop_window(first)
            };
            if fate == Fate::Stays {
                queue.push_back((weak, first));
            }
            // Its file may end with this reference, which takes other locks.
            left.push(other);
        }
        let taken = self.count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |count| {
            (count < self.windows_max).then_some(count + 1)
        });
        let share = taken.is_ok().then(|| Share { budget: self.clone(), bytes: 0 });
        if share.is_some() {
            if queue.len() >= 2 * self.windows_max {
                queue.retain(|(weak, _)| weak.strong_count() > 0);
            }
            queue.push_back((Arc::downgrade(file), start));
        }
        drop(queue);
        drop(left);
        share
    }
}
