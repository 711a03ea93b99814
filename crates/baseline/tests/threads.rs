//! Copies that take page faults wait in parallel, and only their requesters wait for them.

mod common;

use std::sync::Arc;

use common::*;
use terrace_baseline::{BaselineConfig, IoMethod};
use terrace_hostmem::HostRange;
use terrace_memory::{Pager, Transfer};

const PAGE: u64 = 4096;

/// A mapping whose pages arrive when the test serves them.
struct SlowPages(i32);

/// The kernel's constants for userfaultfd, which the libc crate lacks.
mod userfault {
    pub const API: u64 = 0xc018_aa3f;
    pub const REGISTER: u64 = 0xc020_aa00;
    pub const ZEROPAGE: u64 = 0xc020_aa04;
    pub const MISSING: u64 = 1;
}

impl SlowPages {
    /// `None` where userfaultfd is not permitted.
    fn new(range: HostRange) -> Option<SlowPages> {
        let mut api = [0xaa_u64, 0, 0];
        let mut register = [range.addr, range.len, userfault::MISSING, 0];
        // SAFETY: the arrays have the layout of the kernel's structures, and live across the calls.
        unsafe {
            let fd = libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC) as i32;
            let works = fd >= 0
                && libc::ioctl(fd, userfault::API as _, &mut api) == 0
                && libc::ioctl(fd, userfault::REGISTER as _, &mut register) == 0;
            works.then_some(SlowPages(fd))
        }
    }

    /// Waits for the next page fault, and returns its page.
    fn wait_for_fault(&self) -> u64 {
        let mut event = [0_u64; 4];
        // SAFETY: an event has 32 bytes.
        let count = unsafe { libc::read(self.0, event.as_mut_ptr().cast(), size_of_val(&event)) };
        assert_eq!(count, 32);
        event[2] & !(PAGE - 1)
    }

    fn serve(&self, page: u64) {
        let mut zero = [page, PAGE, 0, 0];
        // SAFETY: the array has the layout of the kernel's structure, and lives across the call.
        assert_eq!(unsafe { libc::ioctl(self.0, userfault::ZEROPAGE as _, &mut zero) }, 0);
    }
}

impl Drop for SlowPages {
    fn drop(&mut self) {
        // SAFETY: the descriptor is ours.
        unsafe { libc::close(self.0) };
    }
}

#[test]
fn page_faults_are_waited_for_side_by_side() {
    let config = BaselineConfig { io: IoMethod::Mapping, threads: 3, ..tiering(1 << 20) };
    let served = Served::new("/dev/shm", "slow", 4 * PAGE, true, config);
    let Some(pages) = SlowPages::new(served.file.map()) else {
        eprintln!("skipped: no userfaultfd");
        return;
    };
    // All faults must come before any is served: serial copies would never take the second one.
    let read = |page: u64| served.region.read(served.range(page * PAGE, 8), &served.waker).unwrap();
    let reads: Vec<Arc<dyn Transfer>> = (0..3).map(read).collect();
    let mut waiting: Vec<u64> = (0..3).map(|_| pages.wait_for_fault()).collect();
    waiting.sort_unstable();
    assert_eq!(waiting, [0, 1, 2].map(|page| served.addr() + page * PAGE));
    assert!(reads.iter().all(|read| read.outcome().is_none()));
    waiting.into_iter().rev().for_each(|page| pages.serve(page));
    reads.iter().for_each(|read| served.wait(read).unwrap());
    assert_eq!(served.region.stats().misses, 3);
}

#[test]
fn a_region_ends_after_what_its_threads_have_begun() {
    let config = BaselineConfig { io: IoMethod::Mapping, threads: 4, ..tiering(1 << 20) };
    let served = Served::new("/tmp", "end", 256 * PAGE, true, config);
    let write =
        |page: u64| served.region.write(served.addr() + page * PAGE, &[page as u8; 64], &served.waker);
    let writes: Vec<_> = (0..64).map(|page| write(page).unwrap()).collect();
    served.baseline.remove(&served.region);
    assert!(writes.iter().all(|write| write.outcome() == Some(Ok(()))));
    let file = std::fs::read(&served.scratch.0).unwrap();
    assert!((0..64).all(|page| file[page * PAGE as usize] == page as u8));
}
