//! A device that is a file: a file system of one file, by FUSE, for a loop device.
//!
//! ```text
//!   loop device -> kernel's FUSE -> /dev/fuse -> filesystem (fuser's thread) -> channel -> worker (the device's thread)
//!                                      ^                                                     |
//!                                      +------------------ replies --------------------------+
//! ```
//!
//! The file has no page cache (`FOPEN_DIRECT_IO`): a page that the kernel swaps out would have a copy there, in the memory that
//! is to become free. Data of WRITEs are copied into buffers that are allocated at the start; without a free one, the
//! request waits in the kernel.

mod filesystem;
mod worker;

use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{self, SyncSender};
use std::thread::JoinHandle;

use fuser::{Config, MountOption};
use terrace_sync::Mutex;

use crate::counters::Counters;
use crate::device::{Device, REQUESTS};
use crate::queue::PageQueue;
use crate::server::ServerError;
use filesystem::SwapFile;
use worker::{Request, Worker};

/// The name of the file below the mount point.
pub const FILE_NAME: &str = "swap";
/// Bytes of a WRITE at most: the kernel splits longer ones. READs have no more.
const WRITE_BYTES_MAX: u32 = 128 << 10;
/// WRITEs whose data are copied and not stored yet.
const WRITE_BUFFERS: usize = 32;

/// A device that is served as a file, until it is stopped or dropped.
pub struct FileServer {
    mounted: terrace_fuse::Mounted,
    requests: SyncSender<Option<Request>>,
    is_stopped: Arc<AtomicBool>,
    counters: Arc<Counters>,
    thread: Option<JoinHandle<()>>,
}

impl FileServer {
    /// Connections of the device that such a server needs.
    pub const CONNECTIONS: usize = 1;

    /// Serves pages as the file [`FILE_NAME`] below a mount point, an empty directory. `source` is the name in `/proc/mounts`. A
    /// mount that a killed server has left there is replaced.
    ///
    /// When this returns, all threads run and have their buffers.
    ///
    /// # Errors
    /// See [`ServerError`].
    pub fn start<Q: PageQueue>(
        mount_point: &Path,
        source: &str,
        queue: Q,
    ) -> Result<FileServer, ServerError> {
        let size_bytes = queue.page_count().saturating_mul(terrace_far_memory::PAGE_BYTES as u64);
        let device = Device::new(queue, Self::CONNECTIONS);
        let counters = device.counters().clone();
        let is_stopped = Arc::new(AtomicBool::new(false));
        let (requests, received) = mpsc::sync_channel(REQUESTS);
        let (free, buffers) = mpsc::sync_channel(WRITE_BUFFERS);
        for _ in 0..WRITE_BUFFERS {
            // There is space for all of them.
            let _ = free.try_send(Vec::with_capacity(WRITE_BYTES_MAX as usize));
        }
        let worker = Worker::new(device, received, free, is_stopped.clone());
        let file =
            |end| SwapFile::new(size_bytes, requests.clone(), Mutex::new(buffers), counters.clone(), end);
        let mounted = terrace_fuse::Mounted::mount(file, mount_point, &config(source))
            .map_err(|source| ServerError::Mount { mount_point: mount_point.to_path_buf(), source })?;
        let thread = std::thread::Builder::new().name("terrace-file".into()).spawn(move || worker.run())?;
        // A request that fuser's thread answers: it has its buffer from then on, and allocates nothing more.
        let _ = rustix::fs::statvfs(mount_point);
        Ok(FileServer { mounted, requests, is_stopped, counters, thread: Some(thread) })
    }

    /// The device's counters. Its connections are handles of the file.
    pub fn counters(&self) -> &Arc<Counters> {
        &self.counters
    }

    /// A descriptor that hangs up (`POLLHUP`) when the file has been unmounted from outside and no handle of it is open: nothing
    /// can use it any more.
    pub fn ended(&self) -> BorrowedFd<'_> {
        self.mounted.ended()
    }

    /// Unmounts, answers the requests that were taken, and closes. This takes at most 12 seconds. Handles of the file that are
    /// open fail from then on.
    pub fn stop(self) {}
}

impl Drop for FileServer {
    fn drop(&mut self) {
        if let Err(error) = self.mounted.unmount() {
            tracing::warn!(%error, "the swap file's directory stays mounted");
        }
        self.is_stopped.store(true, Relaxed);
        // A thread that sleeps has no request left in the channel, and is woken. With a full one it does not sleep.
        let _ = self.requests.try_send(None);
        if let Some(thread) = self.thread.take() {
            // A panic has been reported.
            let _ = thread.join();
        }
    }
}

fn config(source: &str) -> Config {
    let mut config = Config::default();
    config.mount_options = terrace_fuse::options(source);
    config.mount_options.push(MountOption::NoExec);
    config
}
