//! The device side: files, reads into frames, and writes of frames.
//!
//! Reads are asynchronous: io_uring, or threads where io_uring is forbidden. The threads that serve peers submit and
//! reap them. Writes and syncs block the caller, which is a thread of `write_back`: direct writes through io_uring stall
//! (decision 25). Registered buffers would pin every frame of the pool and save a fiftieth of a read's cost, and a ring
//! that several threads use can be neither `SINGLE_ISSUER` nor `DEFER_TASKRUN`. It is `COOP_TASKRUN`: otherwise the end of each
//! read interrupts the thread that submitted it, which looks for ended reads anyway. If that thread makes no system call, and
//! another one reaps, an ended read waits for the next tick of the kernel.
//!
//! | module | content |
//! |---|---|
//! | `request` | requests, and the traits of stores |
//! | `ring` | an io_uring |
//! | `uring` | reads by io_uring |
//! | `threads` | threads that carry out requests |
//! | `blocking` | reads, writes and syncs that block |
//! | `faulty` | a store that injects faults, for tests |
//! | `injected` | a store with the faults of a plan |
//! | `file` | the file of a region |

mod blocking;
mod faulty;
mod file;
mod injected;
mod request;
mod ring;
mod threads;
mod uring;

use std::fmt::Debug;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

pub(crate) use blocking::read_now;
pub use faulty::{Faults, Faulty};
pub(crate) use file::Files;
pub use file::{BackingFile, remove_unwritten};
pub(crate) use injected::Injected;
pub(crate) use request::{FrameMemory, RUN_FRAMES_MAX};
pub use request::{FrameRun, ReadCompletion, ReadDevice, ReadRequest, WriteDevice};
pub use ring::{Ring, RingRequest};
pub use threads::Threads;

/// The number of reads that run at the same time where threads read.
const READ_THREADS: usize = 16;

/// The two halves of a store.
#[derive(Debug)]
pub struct Store {
    /// Reads into frames.
    pub reads: Box<dyn ReadDevice>,
    /// Writes frames.
    pub writes: Arc<dyn WriteDevice>,
}

/// Opens stores.
pub trait StoreFactory: Send + Sync + Debug {
    /// Opens a store for about `depth` reads at a time. `pool` stays open, and with it the pool's lock, until the last
    /// read has ended, even if the process is killed before.
    ///
    /// # Errors
    /// The error of the kernel.
    fn open(&self, depth: u32, pool: BorrowedFd<'_>) -> io::Result<Store>;
}

/// io_uring for reads; threads where it is forbidden, as in many containers.
#[derive(Clone, Copy, Debug, Default)]
pub struct Best;

impl StoreFactory for Best {
    fn open(&self, depth: u32, pool: BorrowedFd<'_>) -> io::Result<Store> {
        match uring::open(depth, pool) {
            Ok(ring) => Ok(Store { reads: Box::new(ring), writes: Arc::new(blocking::Blocking) }),
            Err(error) if matches!(error.raw_os_error(), Some(libc::EPERM | libc::ENOSYS | libc::EACCES)) => {
                tracing::info!(%error, "no io_uring here: threads read files");
                OnlyThreads.open(depth, pool)
            }
            Err(error) => Err(error),
        }
    }
}

/// Threads, even where io_uring is available.
#[derive(Clone, Copy, Debug, Default)]
pub struct OnlyThreads;

impl StoreFactory for OnlyThreads {
    fn open(&self, _depth: u32, _pool: BorrowedFd<'_>) -> io::Result<Store> {
        // A thread that is killed in a read keeps the process, and so the pool's lock, until the read has ended.
        Ok(Store {
            reads: Box::new(Threads::open(READ_THREADS, |read| read_now(read))?),
            writes: Arc::new(blocking::Blocking),
        })
    }
}
