//! A store with the delays and errors of a fault plan.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use rustix::io::Errno;
use terrace_faults::{Delayed, Faults, StorageOperation};

use super::request::{FrameRun, ReadCompletion, ReadDevice, ReadRequest, WriteDevice};
use super::{Store, StoreFactory};

/// Opens stores whose requests are delayed or failed as the plan says.
#[derive(Debug)]
pub(crate) struct Injected {
    pub(crate) inner: Arc<dyn StoreFactory>,
    pub(crate) faults: Arc<Faults>,
}

impl StoreFactory for Injected {
    fn open(&self, depth: u32, pool: BorrowedFd<'_>) -> io::Result<Store> {
        let inner = self.inner.open(depth, pool)?;
        let delayed = Delayed::new(self.faults.clone(), inner.reads.descriptor())?;
        let reads = InjectedReads { inner: inner.reads, delayed };
        let writes = InjectedWrites { inner: inner.writes, faults: self.faults.clone() };
        Ok(Store { reads: Box::new(reads), writes: Arc::new(writes) })
    }
}

#[derive(Debug)]
struct InjectedReads {
    inner: Box<dyn ReadDevice>,
    delayed: Delayed<ReadRequest>,
}

impl ReadDevice for InjectedReads {
    fn submit(&mut self, requests: &mut Vec<ReadRequest>) {
        self.delayed.release(requests, |_| StorageOperation::Read);
        self.inner.submit(requests);
    }

    fn reap(&mut self, done: &mut Vec<ReadCompletion>) {
        let failed = self.delayed.take_failed();
        done.extend(failed.map(|(request, error)| ReadCompletion {
            request,
            result: Err(Errno::from_raw_os_error(error)),
        }));
        self.inner.reap(done);
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.delayed.descriptor()
    }
}

#[derive(Debug)]
struct InjectedWrites {
    inner: Arc<dyn WriteDevice>,
    faults: Arc<Faults>,
}

impl InjectedWrites {
    /// Sleeps for the plan's delay, then returns its error.
    fn suffer(&self, operation: StorageOperation) -> Result<(), Errno> {
        let fate = self.faults.storage(operation);
        std::thread::sleep(fate.delay);
        fate.error.map_or(Ok(()), |error| Err(Errno::from_raw_os_error(error)))
    }
}

impl WriteDevice for InjectedWrites {
    fn write(&self, file: BorrowedFd<'_>, offset: u64, run: &FrameRun) -> Result<usize, Errno> {
        self.suffer(StorageOperation::WriteBack)?;
        self.inner.write(file, offset, run)
    }

    fn sync(&self, file: BorrowedFd<'_>) -> Result<(), Errno> {
        self.suffer(StorageOperation::Sync)?;
        self.inner.sync(file)
    }
}
