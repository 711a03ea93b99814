//! A store for tests that injects faults, from a seed.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rustix::event::epoll;
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;

use super::request::{FrameRun, ReadCompletion, ReadDevice, ReadRequest, WriteDevice};
use super::{Store, StoreFactory};

/// The faults, each with its frequency per thousand requests.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    /// Seed of the random choice of requests.
    pub seed: u64,
    /// Reads that fail with `EIO`.
    pub read_errors_permille: u32,
    /// Reads that are returned with `ECANCELED`, as a ring does when the submitting thread exits.
    pub canceled_permille: u32,
    /// Reads that move fewer bytes than requested.
    pub short_permille: u32,
    /// Writes that fail with `ENOSPC`.
    pub write_errors_permille: u32,
    /// Syncs that fail with `EIO`.
    pub sync_errors_permille: u32,
    /// Completions are delayed by a random number of calls of [`ReadDevice::reap`], up to this.
    pub delay_reaps_max: u32,
}

/// Opens stores that inject faults.
#[derive(Clone, Debug)]
pub struct Faulty {
    inner: Arc<dyn StoreFactory>,
    dice: Arc<Dice>,
}

#[derive(Debug)]
struct Dice {
    faults: Faults,
    is_healed: AtomicBool,
    /// State of the random number generator.
    state: AtomicU64,
}

impl Dice {
    /// SplitMix64.
    fn random(&self) -> u64 {
        let state = self.state.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn happens(&self, permille: u32) -> bool {
        self.random() % 1000 < u64::from(permille) && !self.is_healed.load(Ordering::Relaxed)
    }
}

impl Faulty {
    /// Injects faults into the stores of `inner`.
    pub fn new(inner: Arc<dyn StoreFactory>, faults: Faults) -> Faulty {
        let (is_healed, state) = (AtomicBool::new(false), AtomicU64::new(faults.seed));
        Faulty { inner, dice: Arc::new(Dice { faults, is_healed, state }) }
    }

    /// With `true`, stops all faults but delays; with `false`, resumes them.
    pub fn heal(&self, is_healed: bool) {
        self.dice.is_healed.store(is_healed, Ordering::Relaxed);
    }
}

impl StoreFactory for Faulty {
    fn open(&self, depth: u32, pool: BorrowedFd<'_>) -> io::Result<Store> {
        let inner = self.inner.open(depth, pool)?;
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let both = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for source in [inner.reads.descriptor(), event.as_fd()] {
            epoll::add(&both, source, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        }
        let dice = self.dice.clone();
        let reads = FaultyReads { inner: inner.reads, dice: dice.clone(), held: Vec::new(), event, both };
        Ok(Store { reads: Box::new(reads), writes: Arc::new(FaultyWrites { inner: inner.writes, dice }) })
    }
}

#[derive(Debug)]
struct FaultyReads {
    inner: Box<dyn ReadDevice>,
    dice: Arc<Dice>,
    /// Completions to be reported after this many calls of `reap`.
    held: Vec<(u32, ReadCompletion)>,
    /// Readable while `held` is not empty.
    event: OwnedFd,
    /// Readable when the inner device or `event` is.
    both: OwnedFd,
}

impl FaultyReads {
    /// The error with which a read fails, if any, in place of being carried out.
    fn refusal(&self) -> Option<Errno> {
        let faults = &self.dice.faults;
        if self.dice.happens(faults.read_errors_permille) {
            Some(Errno::IO)
        } else if self.dice.happens(faults.canceled_permille) {
            Some(Errno::CANCELED)
        } else {
            None
        }
    }

    fn hold(&mut self, completion: ReadCompletion) {
        let reaps = (self.dice.random() % (u64::from(self.dice.faults.delay_reaps_max) + 1)) as u32;
        self.held.push((reaps, completion));
        // Fails only if the counter overflows, and then it is readable.
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }
}

impl ReadDevice for FaultyReads {
    fn submit(&mut self, requests: &mut Vec<ReadRequest>) {
        let mut good = Vec::new();
        for request in requests.drain(..) {
            match self.refusal() {
                Some(error) => self.hold(ReadCompletion { request, result: Err(error) }),
                None => good.push(request),
            }
        }
        self.inner.submit(&mut good);
    }

    fn reap(&mut self, done: &mut Vec<ReadCompletion>) {
        let mut new = Vec::new();
        self.inner.reap(&mut new);
        for mut completion in new {
            // All bytes were moved, but fewer are reported: for the requester that equals a short transfer.
            if let Ok(count @ 2..) = completion.result
                && self.dice.happens(self.dice.faults.short_permille)
            {
                completion.result = Ok(1 + self.dice.random() as usize % (count - 1));
            }
            self.hold(completion);
        }
        for (reaps, completion) in std::mem::take(&mut self.held) {
            match reaps {
                0 => done.push(completion),
                _ => self.held.push((reaps - 1, completion)),
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

#[derive(Debug)]
struct FaultyWrites {
    inner: Arc<dyn WriteDevice>,
    dice: Arc<Dice>,
}

impl WriteDevice for FaultyWrites {
    fn write(&self, file: BorrowedFd<'_>, offset: u64, run: &FrameRun) -> Result<usize, Errno> {
        if self.dice.happens(self.dice.faults.write_errors_permille) {
            return Err(Errno::NOSPC);
        }
        self.inner.write(file, offset, run)
    }

    fn sync(&self, file: BorrowedFd<'_>) -> Result<(), Errno> {
        if self.dice.happens(self.dice.faults.sync_errors_permille) {
            return Err(Errno::IO);
        }
        self.inner.sync(file)
    }
}
