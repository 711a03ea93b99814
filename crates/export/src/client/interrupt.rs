//! Calls whose thread has something else to do while they wait.

use std::cell::Cell;
use std::time::{Duration, Instant};

use crate::error::ExportError;

/// How often a waiting call asks whether it is to end.
const INTERVAL: Duration = Duration::from_millis(50);

/// What the calls of a thread ask while they wait.
#[derive(Clone, Copy)]
struct Interrupt {
    is_interrupted: fn() -> bool,
    last_asked: Instant,
}

thread_local! {
    static INTERRUPT: Cell<Option<Interrupt>> = const { Cell::new(None) };
    static BEFORE_SLEEP: Cell<Option<fn()>> = const { Cell::new(None) };
}

/// Has this thread call `hook` whenever it is about to sleep in a call of a [`Client`](crate::Client) or
/// [`RemoteFile`](crate::RemoteFile), from now on. The hook makes no such call.
pub fn call_before_sleep(hook: fn()) {
    BEFORE_SLEEP.set(Some(hook));
}

/// The thread is about to sleep.
pub fn before_sleep() {
    if let Some(hook) = BEFORE_SLEEP.get() {
        hook();
    }
}

/// Calls `act`. While a call of a [`Client`](crate::Client) or [`RemoteFile`](crate::RemoteFile) in it waits on this thread, it asks
/// `is_interrupted` 20 times a second, and ends with [`ExportError::Interrupted`] if that is true. Nobody knows then whether the
/// server has done what was asked. The connection ends, and the next call connects again.
///
/// `is_interrupted` may make calls of the same client. While this thread is the one that connects, they are
/// [`ExportError::Lost`].
pub fn interruptible<T>(is_interrupted: fn() -> bool, act: impl FnOnce() -> T) -> T {
    with(Some(Interrupt { is_interrupted, last_asked: Instant::now() }), act)
}

/// Calls `act`, which holds a lock that calls made by `is_interrupted` may need.
pub fn uninterruptible<T>(act: impl FnOnce() -> T) -> T {
    with(None, act)
}

fn with<T>(interrupt: Option<Interrupt>, act: impl FnOnce() -> T) -> T {
    struct Restore(Option<Interrupt>);
    impl Drop for Restore {
        fn drop(&mut self) {
            INTERRUPT.set(self.0);
        }
    }
    let _restore = Restore(INTERRUPT.replace(interrupt));
    act()
}

/// Asks whether the call that waits is to end. The caller holds no lock.
///
/// # Errors
/// `Interrupted`.
pub fn check() -> Result<(), ExportError> {
    let Some(interrupt) = INTERRUPT.get().filter(|interrupt| interrupt.last_asked.elapsed() >= INTERVAL)
    else {
        return Ok(());
    };
    INTERRUPT.set(Some(Interrupt { last_asked: Instant::now(), ..interrupt }));
    if (interrupt.is_interrupted)() { Err(ExportError::Interrupted) } else { Ok(()) }
}

/// When a call that is about to sleep until `deadline` calls [`check`] next, or the deadline.
pub fn next_check(deadline: Instant) -> Instant {
    before_sleep();
    match INTERRUPT.get() {
        Some(_) => deadline.min(Instant::now() + INTERVAL),
        None => deadline,
    }
}

/// Sleeps.
///
/// # Errors
/// `Interrupted`.
pub fn sleep(time: Duration) -> Result<(), ExportError> {
    let end = Instant::now() + time;
    while Instant::now() < end {
        std::thread::sleep(next_check(end).saturating_duration_since(Instant::now()));
        check()?;
    }
    Ok(())
}
