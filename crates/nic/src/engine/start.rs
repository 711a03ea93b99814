//! The engine as the rest of the device uses it: starting its thread, and what it must know of the program's polls.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use terrace_sync::without_signals;

use super::stat_server::StatServer;
use super::{Mode, driver};
use crate::device::Device;
use crate::error::Error;

impl Device {
    /// Starts the engine's thread, unless the device has no engine.
    pub(crate) fn start_engine(self: &Arc<Self>) -> Result<(), Error> {
        if !self.engine.wanted {
            return Ok(());
        }
        let doorbell = self.engine.doorbell();
        let stat = self.engine.stat_socket.then(StatServer::open).flatten();
        let device = self.clone();
        let spawned = without_signals(|| {
            let builder = std::thread::Builder::new().name("terrace-engine".into());
            builder.spawn(move || driver::run(device, doorbell, stat))
        });
        let thread = spawned.map_err(|error| Error::System(error.raw_os_error().unwrap_or(0)))?;
        self.engine.handle.lock().thread = Some(thread);
        Ok(())
    }

    /// Notes that a thread of the program polls an empty completion queue, and returns the rough count of polls so far.
    #[inline]
    pub(crate) fn note_poll(self: &Arc<Self>) -> u32 {
        self.ensure_engine();
        self.engine.note_poll()
    }

    /// Starts the engine if this process is a forked child that has none yet.
    #[inline]
    pub(crate) fn ensure_engine(self: &Arc<Self>) {
        if self.engine.missing.load(Ordering::Relaxed) {
            self.restart_engine();
        }
    }

    /// Counts an armed completion queue; [`Device::note_armed`] must follow.
    pub(crate) fn count_armed(&self) {
        self.engine.sleepers.fetch_add(1, Ordering::SeqCst);
    }

    /// Notes that a completion queue was armed: the program is about to sleep, so deferred work must leave, and the
    /// engine must take over.
    pub(crate) fn note_armed(self: &Arc<Self>) {
        self.ensure_engine();
        if self.has_waiting() {
            self.progress();
        }
        if self.engine.announced.is_mode(Mode::Standby) {
            self.engine.wake();
        }
    }

    /// Notes that an armed completion queue has had its event.
    pub(crate) fn note_disarmed(&self) {
        self.engine.sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    /// Has the engine make progress until the guard is dropped, also if other threads poll: the caller is about to sleep.
    pub fn leave_to_engine(self: &Arc<Self>) -> LeftToEngine<'_> {
        self.engine.sleeping_threads.fetch_add(1, Ordering::SeqCst);
        self.count_armed();
        self.note_armed();
        LeftToEngine(self)
    }

    /// Makes progress for a short while, until `done`: for a thread that is about to sleep.
    pub(crate) fn wait_spinning(&self, done: impl Fn() -> bool) {
        if done() {
            return;
        }
        let hit = self.spin(self.engine.waiting.take(), done, || ());
        self.engine.waiting.note(hit);
    }

    /// Makes progress until `done`, for so long at most, with `pause` after each pass. Returns whether it is done.
    pub(crate) fn spin(&self, limit: Duration, mut done: impl FnMut() -> bool, pause: impl Fn()) -> bool {
        let started = Instant::now();
        while started.elapsed() < limit {
            self.progress();
            if done() {
                return true;
            }
            pause();
        }
        false
    }
}

/// A thread that sleeps until the engine has made progress ([`Device::leave_to_engine`]).
pub struct LeftToEngine<'a>(&'a Device);

impl Drop for LeftToEngine<'_> {
    fn drop(&mut self) {
        self.0.note_disarmed();
        self.0.engine.sleeping_threads.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};
    use std::sync::atomic::AtomicBool;

    use terrace_sync::SpinBudget;

    use super::*;
    use crate::{PathChoice, PortConfig};

    fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while !condition() {
            assert!(Instant::now() < deadline, "{what}");
            std::thread::yield_now();
        }
    }

    #[test]
    fn the_engine_leaves_the_network_to_a_thread_that_polls_unless_another_one_sleeps() {
        let address = Some(IpAddr::V4(Ipv4Addr::LOCALHOST));
        let port = PortConfig { address, path: PathChoice::Udp, ..PortConfig::default() };
        let device = Device::open(port.device().expect("a port on the loopback")).expect("a device");
        let has_ended = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !has_ended.load(Ordering::Relaxed) {
                    device.poll_until(&SpinBudget::default(), || false);
                }
            });
            wait_until("the engine stands by", || device.engine.is_in_standby());
            let left = device.leave_to_engine();
            wait_until("the engine makes progress", || !device.engine.is_in_standby());
            drop(left);
            wait_until("the engine stands by again", || device.engine.is_in_standby());
            has_ended.store(true, Ordering::Relaxed);
        });
        wait_until("nobody polls any more", || !device.engine.is_in_standby());
        device.close();
    }
}
