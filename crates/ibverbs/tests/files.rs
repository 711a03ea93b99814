//! Regions that are files, by the C ABI: a file that cannot be opened for a while.

mod common;

use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use common::*;
use terrace_ibverbs::abi::*;

/// A limit that only a hang reaches. The kernel breaks a lease after 45 seconds.
const HANG: Duration = Duration::from_secs(20);

/// A file with a lease of this process: each `open` of it waits until the lease ends.
struct Leased(File);

impl Leased {
    fn new() -> Leased {
        let file = tempfile::tempfile().expect("a file");
        // SAFETY: system calls with a descriptor and integers.
        unsafe {
            // The signal of a lease that is to end would end the process.
            libc::signal(libc::SIGIO, libc::SIG_IGN);
            assert_eq!(libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_WRLCK), 0, "{}", errno());
        }
        Leased(file)
    }

    /// Waits until an `open` waits for the lease.
    fn wait_for_open(&self) {
        let started = Instant::now();
        // SAFETY: a system call with a descriptor.
        while unsafe { libc::fcntl(self.0.as_raw_fd(), libc::F_GETLEASE) } == libc::F_WRLCK {
            assert!(started.elapsed() < HANG, "nobody opens the file");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn end_lease(&self) {
        // SAFETY: a system call with a descriptor and an integer.
        assert_eq!(unsafe { libc::fcntl(self.0.as_raw_fd(), libc::F_SETLEASE, libc::F_UNLCK) }, 0);
    }
}

#[test]
fn a_file_that_cannot_be_opened_delays_no_registration_of_another_one_and_no_fork() {
    let context = open();
    // SAFETY: an open device.
    let pd = unsafe { ibv_alloc_pd(context) } as usize;
    let register = move |descriptor| {
        let access = IBV_ACCESS_REMOTE_READ as i32;
        // SAFETY: a domain of this device.
        let mr = unsafe { terrace_bind_file(pd as *mut ibv_pd, descriptor, access) };
        assert!(!mr.is_null(), "errno {}", errno());
    };
    let (leased, other) = (Leased::new(), tempfile::tempfile().expect("a file"));
    let (leased_fd, other_fd) = (leased.0.as_raw_fd(), other.as_raw_fd());
    let waiting = std::thread::spawn(move || register(leased_fd));
    leased.wait_for_open();
    let (done, is_done) = channel();
    let has_registered = done.clone();
    std::thread::spawn(move || {
        register(other_fd);
        has_registered.send("registered").expect("a test that waits");
    });
    assert_eq!(is_done.recv_timeout(HANG), Ok("registered"));
    std::thread::spawn(move || {
        // SAFETY: the child ends at once.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: of this child, which has no other thread.
            unsafe { libc::_exit(0) };
        }
        // SAFETY: a child of this process, and no status is asked for.
        assert_eq!(unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) }, child);
        done.send("forked").expect("a test that waits");
    });
    assert_eq!(is_done.recv_timeout(HANG), Ok("forked"));
    assert!(!waiting.is_finished());
    leased.end_lease();
    waiting.join().expect("a region");
}
