//! A same-host peer that stops in the middle of a copy keeps the page that it copies, and holds nothing else up.

mod common;

use std::os::fd::AsFd;

use common::{PAGE, Scratch, Served, numbered};
use terrace_shm::{PeerReaders, ReaderSlots};

#[test]
fn a_stopped_reader_keeps_its_page_alone() {
    let scratch = Scratch::new("stopped").with_numbered_pages(400);
    let served = Served::new(&scratch, scratch.config(64), None);
    let slots = ReaderSlots::new().unwrap();
    let _readers = PeerReaders::admit(slots.file().as_fd().try_clone_to_owned().unwrap(), 1).unwrap();
    let mut slot = slots.take(7).unwrap();
    served.write(3 * PAGE, &[9; 8]).unwrap();
    for page in 0..30 {
        served.read(page * PAGE, 8).unwrap();
    }
    let guard = slot.enter_for(None, 1, served.range(3 * PAGE, 2 * PAGE));
    // Its pages are unmapped, but their frames are not reused: they come back without a read.
    for page in 30..400 {
        assert_eq!(served.read(page * PAGE, 4096).unwrap(), numbered(page));
    }
    let before = served.region.stats();
    assert!(before.evictions > 300, "{before:?}");
    assert_eq!(served.read(4 * PAGE, 4096).unwrap(), numbered(4));
    assert_eq!(served.region.stats().pages_read, before.pages_read);
    // A dirty page can be flushed meanwhile. It stays dirty: a store of the reader may still come.
    served.write(3 * PAGE + 8, &[8; 8]).unwrap();
    served.flush(3 * PAGE, 8).unwrap();
    assert_eq!(std::fs::read(scratch.file()).unwrap()[3 * 4096..][..16], [[9; 8], [8; 8]].concat());
    assert!(served.pages.stats().dirty_bytes > 0);
    drop(guard);
    served.flush(3 * PAGE, 8).unwrap();
    assert_eq!(served.pages.stats().dirty_bytes, 0);
    for page in 0..400 {
        served.read(page * PAGE, 8).unwrap();
    }
    assert!(served.read(3 * PAGE, 16).unwrap() == [[9; 8], [8; 8]].concat());
    served.pages.remove(&served.region);
}
