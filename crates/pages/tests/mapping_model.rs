//! Copies beside evictions, in every interleaving that loom finds: a reader keeps nothing of another page, and a write
//! reaches its page or is not made.
//!
//! `src/mapping.rs` is compiled here once more with loom's atomics.

#[path = "../src/mapping.rs"]
mod mapping;

/// Stands in for `src/sync.rs`.
mod sync {
    pub(crate) use loom::sync::atomic::{AtomicU16, AtomicU64, Ordering, fence};
}

use loom::sync::Arc;
use loom::thread;
use mapping::{is_pinned, pin_writable, publish, read, revoke};
use sync::{AtomicU16, AtomicU64, Ordering};
use terrace_shm::{PageEntry, PageState};

/// The page's bytes, and those of the page that gets the frame after it.
const OURS: u64 = 10;
const OTHER: u64 = 77;

struct Page {
    entry: AtomicU64,
    pins: AtomicU16,
    frame: AtomicU64,
}

fn entry(state: PageState, version: u32) -> PageEntry {
    PageEntry::new(state, 0, version)
}

fn page(state: PageState) -> Arc<Page> {
    Arc::new(Page {
        entry: AtomicU64::new(entry(state, 1).word()),
        pins: AtomicU16::new(0),
        frame: AtomicU64::new(OURS),
    })
}

fn model(body: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(body);
}

#[test]
fn a_reader_keeps_nothing_of_another_page() {
    model(|| {
        let page = page(PageState::Clean);
        let reader = {
            let page = page.clone();
            thread::spawn(move || read(&page.entry, |_| page.frame.load(Ordering::Relaxed)))
        };
        revoke(&page.entry, entry(PageState::Leaving, 2));
        // Readers do not keep the frame. Another page comes, and is mapped elsewhere.
        page.frame.store(OTHER, Ordering::Relaxed);
        if let Some(copied) = reader.join().unwrap() {
            assert_eq!(copied, OURS);
        }
    });
}

#[test]
fn a_page_that_returns_to_the_frame_is_read_whole() {
    model(|| {
        let page = page(PageState::Clean);
        let reader = {
            let page = page.clone();
            thread::spawn(move || read(&page.entry, |_| page.frame.load(Ordering::Relaxed)))
        };
        revoke(&page.entry, entry(PageState::Leaving, 2));
        page.frame.store(OTHER, Ordering::Relaxed);
        page.frame.store(OURS + 1, Ordering::Relaxed);
        publish(&page.entry, entry(PageState::Clean, 3));
        if let Some(copied) = reader.join().unwrap() {
            assert_ne!(copied, OTHER);
        }
    });
}

#[test]
fn a_write_reaches_its_page_or_is_not_made() {
    model(|| {
        let page = page(PageState::Dirty);
        let writer = {
            let page = page.clone();
            thread::spawn(move || {
                let Some(_pin) = pin_writable(&page.entry, |_| &page.pins) else { return false };
                page.frame.store(OURS + 1, Ordering::Relaxed);
                true
            })
        };
        // A write-back begins: the bytes that it writes are those of every write that was made.
        revoke(&page.entry, entry(PageState::Clean, 1));
        let is_quiet = !is_pinned(&page.pins);
        let written_back = page.frame.load(Ordering::Relaxed);
        let is_written = writer.join().unwrap();
        if is_quiet && is_written {
            assert_eq!(written_back, OURS + 1);
        }
    });
}
