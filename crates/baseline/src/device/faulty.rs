//! A device for tests that injects faults, from a seed.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::epoll;
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;

use super::request::{Command, Completion, Device, DeviceFactory, Request};

/// The faults, each with its frequency per thousand requests.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    /// Seed of the random choice of requests.
    pub seed: u64,
    /// Requests that fail with `EIO`.
    pub io_errors_permille: u32,
    /// Writes that fail with `ENOSPC`.
    pub disk_full_permille: u32,
    /// Requests that are returned with `ECANCELED`, as a ring does when the submitting thread exits.
    pub canceled_permille: u32,
    /// Requests that move fewer bytes than requested.
    pub short_permille: u32,
    /// Completions are delayed by a random number of calls of [`Device::reap`], up to this.
    pub delay_looks_max: u32,
}

/// Opens devices that inject faults.
#[derive(Clone, Debug)]
pub struct Faulty {
    inner: Arc<dyn DeviceFactory>,
    faults: Faults,
    healed: Arc<AtomicBool>,
}

impl Faulty {
    /// Injects faults into the devices of `inner`.
    pub fn new(inner: Arc<dyn DeviceFactory>, faults: Faults) -> Faulty {
        Faulty { inner, faults, healed: Arc::default() }
    }

    /// With `true`, stops all faults but delays; with `false`, resumes them.
    pub fn heal(&self, healed: bool) {
        self.healed.store(healed, Ordering::Relaxed);
    }
}

impl DeviceFactory for Faulty {
    fn open(&self, depth: u32) -> io::Result<Box<dyn Device>> {
        let inner = self.inner.open(depth)?;
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let both = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for source in [inner.descriptor(), event.as_fd()] {
            epoll::add(&both, source, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        }
        let (faults, healed) = (self.faults, self.healed.clone());
        Ok(Box::new(FaultyDevice {
            inner,
            faults,
            healed,
            state: faults.seed,
            held: Vec::new(),
            event,
            both,
        }))
    }
}

/// The device of a [`Faulty`].
#[derive(Debug)]
struct FaultyDevice {
    inner: Box<dyn Device>,
    faults: Faults,
    healed: Arc<AtomicBool>,
    /// State of the random number generator.
    state: u64,
    /// Completions to be reported after this many calls of `reap`.
    held: Vec<(u32, Completion)>,
    /// Readable while `held` is not empty.
    event: OwnedFd,
    /// Readable when the inner device or `event` is.
    both: OwnedFd,
}

impl FaultyDevice {
    /// SplitMix64.
    fn random(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.state ^ (self.state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn happens(&mut self, permille: u32) -> bool {
        self.random() % 1000 < u64::from(permille) && !self.healed.load(Ordering::Relaxed)
    }

    /// The error with which a request fails, if any, in place of being carried out.
    fn refusal(&mut self, request: &Request) -> Option<Errno> {
        let is_write = matches!(request.command, Command::Write { .. });
        if self.happens(self.faults.io_errors_permille) {
            Some(Errno::IO)
        } else if is_write && self.happens(self.faults.disk_full_permille) {
            Some(Errno::NOSPC)
        } else if self.happens(self.faults.canceled_permille) {
            Some(Errno::CANCELED)
        } else {
            None
        }
    }

    fn hold(&mut self, completion: Completion) {
        let looks = (self.random() % (u64::from(self.faults.delay_looks_max) + 1)) as u32;
        self.held.push((looks, completion));
        // Fails only if the counter overflows, and then it is readable.
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }
}

impl Device for FaultyDevice {
    fn submit(&mut self, requests: &mut Vec<Request>) {
        let mut good = Vec::new();
        for request in requests.drain(..) {
            match self.refusal(&request) {
                Some(error) => self.hold(Completion { request, result: Err(error) }),
                None => good.push(request),
            }
        }
        self.inner.submit(&mut good);
    }

    fn reap(&mut self, done: &mut Vec<Completion>) {
        let mut new = Vec::new();
        self.inner.reap(&mut new);
        for mut completion in new {
            // All bytes were moved, but fewer are reported: for the requester that equals a short transfer.
            if let Ok(count @ 2..) = completion.result
                && self.happens(self.faults.short_permille)
            {
                completion.result = Ok(1 + self.random() as usize % (count - 1));
            }
            self.hold(completion);
        }
        for (looks, completion) in std::mem::take(&mut self.held) {
            match looks {
                0 => done.push(completion),
                _ => self.held.push((looks - 1, completion)),
            }
        }
        if self.held.is_empty() {
            let _ = rustix::io::read(&self.event, &mut [0u8; 8]);
        }
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.both.as_fd()
    }
}
