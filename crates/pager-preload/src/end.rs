//! The end of a process that has lost its pager.
//!
//! As the evictor, this code touches its own stack and the library's constants alone, and makes its system calls directly.

use std::io::Write;

/// How long writing the line may take: standard error may be a pipe that is full, and its reader stopped.
const LINE_TIME_MAX: libc::timespec = libc::timespec { tv_sec: 1, tv_nsec: 0 };

/// Kills this process, which has lost its pages and would find zeros in their place. Writes a line about it to the process's
/// standard error first.
pub(crate) fn end_process() -> ! {
    // SAFETY: no preconditions.
    let process = unsafe { libc::syscall(libc::SYS_getpid) };
    if kill_after(LINE_TIME_MAX) {
        report(process);
    }
    // SAFETY: no preconditions; a signal that cannot be blocked.
    unsafe {
        libc::syscall(libc::SYS_kill, process, libc::SIGKILL);
        loop {
            libc::syscall(libc::SYS_sched_yield);
        }
    }
}

/// Has the kernel kill this process after that time. Returns false if the kernel has no timer left.
fn kill_after(time: libc::timespec) -> bool {
    // SAFETY: zeros are valid for an object of numbers and addresses.
    let mut event: libc::sigevent = unsafe { std::mem::zeroed() };
    event.sigev_notify = libc::SIGEV_SIGNAL;
    event.sigev_signo = libc::SIGKILL;
    let once = libc::itimerspec { it_interval: libc::timespec { tv_sec: 0, tv_nsec: 0 }, it_value: time };
    let (mut timer, before) = (0 as libc::c_int, std::ptr::null_mut::<libc::itimerspec>());
    // SAFETY: the objects live on this stack during the calls.
    unsafe {
        let clock = libc::CLOCK_MONOTONIC;
        libc::syscall(libc::SYS_timer_create, clock, &raw const event, &raw mut timer) == 0
            && libc::syscall(libc::SYS_timer_settime, timer, 0, &raw const once, before) == 0
    }
}

/// Writes the line. Without a standard error there is none.
fn report(process: libc::c_long) {
    let mut line = [0_u8; 128];
    let mut rest = &mut line[..];
    let text =
        format_args!("terrace: process {process} is killed: its pager has ended, and its memory with it\n");
    if rest.write_fmt(text).is_err() {
        return;
    }
    let unused = rest.len();
    let len = line.len() - unused;
    // SAFETY: no preconditions; so many bytes can be read. The evictor has a table of descriptors of its own, without the
    // standard ones: the descriptor comes from the process's table.
    unsafe {
        let this = libc::syscall(libc::SYS_pidfd_open, process, 0);
        let errors = libc::syscall(libc::SYS_pidfd_getfd, this, libc::STDERR_FILENO, 0);
        libc::syscall(libc::SYS_write, errors, line.as_ptr(), len);
    }
}
