//! A child inherits regions, keys and handlers, in whatever state the parent's threads were.

mod common;

use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use common::finally::Finally;
use common::slow_page::SlowPage;
use common::*;
use terrace_memory::{AccessError, Registry, WindowBind, WindowKind};

/// Forks with the calls that `pthread_atfork` handlers make, runs `child` in the child, and returns how it ended.
fn fork(registry: &Registry, child: impl FnOnce()) -> ExitStatus {
    registry.before_fork();
    // SAFETY: the child calls only what these tests are about, and leaves without unwinding.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        registry.after_fork_child();
        // A child that hangs fails the test; it does not hang it.
        // SAFETY: plain system calls.
        unsafe { libc::alarm(10) };
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(child));
        // SAFETY: ends the child without running the parent's destructors.
        unsafe { libc::_exit(i32::from(result.is_err())) };
    }
    registry.after_fork_parent();
    assert!(pid > 0);
    let mut status = 0;
    // SAFETY: waits for our own child.
    assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
    ExitStatus::from_raw(status)
}

#[test]
fn a_child_uses_what_the_parent_registered() {
    let registry = registry();
    let (shared, private) = (Mapping::shared_anonymous(PAGE), Mapping::anonymous(PAGE));
    let (shared_key, private_key) =
        (shared.register(&registry, ALL).key, private.register(&registry, ALL).key);
    let status = fork(&registry, || {
        registry.write(peer(), shared_key, shared.addr, b"from the child").unwrap();
        registry.write(peer(), private_key, private.addr, b"from the child").unwrap();
        registry.deregister(shared_key).unwrap();
        registry.deregister(private_key).unwrap();
    });
    assert!(status.success(), "{status}");
    assert_eq!(&shared.bytes()[..14], b"from the child");
    assert_eq!(private.bytes()[..14], [0; 14], "copied on write");
    registry.read(peer(), shared_key, shared.addr, &mut [0]).unwrap();
}

#[test]
fn a_child_recovers_from_faults() {
    let registry = registry();
    let memory = Mapping::anonymous(2 * PAGE);
    let key = memory.register(&registry, ALL).key;
    memory.unmap(PAGE, PAGE);
    let status = fork(&registry, || {
        let gone = memory.addr + PAGE as u64;
        assert_eq!(registry.read(peer(), key, gone, &mut [0]), Err(AccessError::Fault));
        // The child's threads as well.
        thread::scope(|scope| {
            scope.spawn(|| assert_eq!(registry.write(peer(), key, gone, &[0]), Err(AccessError::Fault)));
        });
    });
    assert!(status.success(), "{status}");
}

#[test]
fn the_parents_copies_do_not_hold_up_the_child() {
    let Some(slow) = SlowPage::new() else { return };
    let registry = registry();
    let key = slow.memory.register(&registry, ALL).key;
    thread::scope(|scope| {
        scope.spawn(|| registry.read(peer(), key, slow.memory.addr, &mut [0; 8]).unwrap());
        slow.wait_for_fault();
        let status = fork(&registry, || registry.deregister(key).unwrap());
        slow.serve();
        assert!(status.success(), "{status}");
    });
    registry.deregister(key).unwrap();
}

#[test]
fn forking_waits_for_changes_under_way() {
    let Some(slow) = SlowPage::new() else { return };
    let registry = registry();
    let key = slow.memory.register(&registry, ALL).key;
    let deregistering = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| registry.read(peer(), key, slow.memory.addr, &mut [0; 8]).unwrap());
        slow.wait_for_fault();
        scope.spawn(|| {
            deregistering.store(true, Ordering::SeqCst);
            registry.deregister(key).unwrap();
        });
        scope.spawn(|| {
            while !deregistering.load(Ordering::SeqCst) {
                thread::yield_now();
            }
            thread::sleep(Duration::from_millis(100));
            slow.serve();
        });
        while !deregistering.load(Ordering::SeqCst) {
            thread::yield_now();
        }
        // Time for the other thread to start waiting for the copy.
        thread::sleep(Duration::from_millis(50));
        registry.before_fork();
        let served = slow.served.load(Ordering::SeqCst);
        registry.after_fork_parent();
        assert!(served, "forked in the middle of a change");
    });
}

#[test]
fn a_child_finds_no_change_half_made() {
    let registry = registry();
    let memory = Mapping::anonymous(PAGE);
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let window = registry.alloc_window(PD, WindowKind::Type2).unwrap();
                while !done.load(Ordering::Relaxed) {
                    let region_key = memory.register(&registry, ALL).key;
                    let (addr, len, access) = (memory.addr, 8, terrace_memory::Access::REMOTE_READ);
                    let (window_key, new_key) = (window, window);
                    let bind =
                        WindowBind { window_key, new_key, region_key, addr, len, access, pd: PD, qpn: QPN };
                    registry.bind_window(&bind).unwrap();
                    registry.read(peer(), window, addr, &mut [0; 8]).unwrap();
                    registry.invalidate(local(), window).unwrap();
                    registry.deregister(region_key).unwrap();
                }
            });
        }
        let _finally = Finally(&done);
        let end = Instant::now() + Duration::from_millis(500);
        while Instant::now() < end {
            let status = fork(&registry, || {
                let key = memory.register(&registry, ALL).key;
                registry.write(peer(), key, memory.addr, &[1; 64]).unwrap();
                registry.invalidate_windows_of(QPN);
                registry.deregister(key).unwrap();
                registry.counts();
            });
            assert!(status.success(), "{status}");
        }
    });
}
