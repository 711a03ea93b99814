//! The pager between the NIC and a paged mapping: the program may remove the mapping at any time.
//!
//! While the mapping is unchanged since the registration, all requests go to the mapping's pager. Before the program
//! unmaps, moves or protects any part of it, the region becomes ordinary memory permanently: the pager releases it and
//! all of it counts as present. The NIC then copies from and to the mapped memory, and gets a fault where no memory is
//! mapped.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use terrace_hostmem::{AtomicOp, HostRange};
use terrace_memory::{AccessError, Pager, Transfer, Translation, Waker, WholeRange, sync_mapping};
use terrace_pages::cached::CachedRegion;
use terrace_shm::GracePeriod;
use terrace_sync::{Mutex, RwLock};

use super::backing::ProgramFile;

/// The timeout of a program that changes a mapping, for readers of other processes to leave it.
const READERS_TIMEOUT: Duration = Duration::from_secs(1);

/// The pager of a mapping.
#[derive(Debug)]
pub enum Inner {
    /// By pages in the page cache. The program's file is dropped behind its region.
    Cached(Arc<CachedRegion>, #[expect(dead_code, reason = "only its end matters")] Option<Arc<ProgramFile>>),
    /// A mode for comparison. The range is absent until the pager is disabled.
    Baseline(Arc<dyn Pager>, WholeRange),
}

impl Inner {
    fn pager(&self) -> &dyn Pager {
        match self {
            Inner::Cached(region, _) => &**region,
            Inner::Baseline(pager, _) => &**pager,
        }
    }

    fn translation(&self) -> &dyn Translation {
        match self {
            Inner::Cached(region, _) => region.translation(),
            Inner::Baseline(_, range) => range,
        }
    }

    /// Withdraws the tables from same-host peers for good. Accesses that they have begun end with the grace period.
    fn withdraw(&self) -> GracePeriod {
        match self {
            Inner::Cached(region, _) => region.withdraw(),
            // They have none.
            Inner::Baseline(..) => GracePeriod::default(),
        }
    }

    /// Makes all of a region present that has been released.
    fn make_all_present(&self) {
        match self {
            Inner::Cached(region, _) => region.make_ordinary(),
            Inner::Baseline(_, range) => range.make_present(),
        }
    }
}

/// A pager that can be disabled.
#[derive(Debug)]
pub struct MappingPager {
    inner: Inner,
    /// Locked for reading during a request to the pager, for writing while it is disabled.
    is_paged: RwLock<bool>,
    is_ordinary: AtomicBool,
    /// Wakers of requests that arrive meanwhile.
    waiting: Mutex<Waiting>,
}

#[derive(Default)]
struct Waiting(Vec<Waker>);

impl std::fmt::Debug for Waiting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} waiting", self.0.len())
    }
}

impl MappingPager {
    /// Passes all requests to `inner`.
    pub fn new(inner: Inner) -> MappingPager {
        MappingPager {
            inner,
            is_paged: RwLock::new(true),
            is_ordinary: AtomicBool::new(false),
            waiting: Mutex::default(),
        }
    }

    /// Whether the pager is disabled.
    pub fn is_ordinary(&self) -> bool {
        self.is_ordinary.load(Ordering::SeqCst)
    }

    /// Disables the pager. `release` returns when the inner pager no longer accesses the mapping.
    pub fn make_ordinary(&self, release: impl FnOnce()) {
        let mut is_paged = self.is_paged.write();
        if *is_paged {
            // For same-host peers, what is present would be the file's bytes. A reader that is preempted in the middle of
            // an access accesses the file, as before.
            if let Err(reached) = self.inner.withdraw().wait(READERS_TIMEOUT) {
                tracing::warn!("{reached}, while its mapping is changed");
            }
            release();
            self.inner.make_all_present();
            *is_paged = false;
            self.is_ordinary.store(true, Ordering::SeqCst);
        }
        drop(is_paged);
        self.wake();
    }

    /// Passes a request to the pager. Once the pager is disabled, the requester has to retry: everything is present
    /// then.
    fn forward<T>(
        &self,
        waker: &Waker,
        ask: impl FnOnce(&dyn Pager) -> Result<T, AccessError>,
    ) -> Result<T, AccessError> {
        if let Some(is_paged) = self.is_paged.try_read()
            && *is_paged
        {
            return ask(self.inner.pager());
        }
        self.waiting.lock().0.push(waker.clone());
        if self.is_ordinary() {
            self.wake();
        }
        Err(AccessError::NotReady)
    }

    fn wake(&self) {
        let wakers = std::mem::take(&mut self.waiting.lock().0);
        wakers.iter().for_each(|wake| wake());
    }
}

impl Pager for MappingPager {
    fn translation(&self) -> &dyn Translation {
        self.inner.translation()
    }

    fn read(&self, range: HostRange, waker: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        self.forward(waker, |inner| inner.read(range, waker))
    }

    fn write(&self, addr: u64, data: &[u8], waker: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        self.forward(waker, |inner| inner.write(addr, data, waker))
    }

    fn atomic(&self, addr: u64, op: AtomicOp, waker: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        self.forward(waker, |inner| inner.atomic(addr, op, waker))
    }

    fn pin(&self, range: HostRange) -> bool {
        match self.is_paged.try_read() {
            Some(is_paged) if *is_paged => self.inner.pager().pin(range),
            // All of ordinary memory counts as present.
            _ => self.is_ordinary(),
        }
    }

    fn pin_bytes_max(&self) -> u64 {
        if self.is_ordinary() { u64::MAX } else { self.inner.pager().pin_bytes_max() }
    }

    fn unpin(&self, range: HostRange) {
        self.inner.pager().unpin(range);
    }

    fn flush(&self, range: HostRange, waker: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        if self.is_ordinary() {
            return Ok(Arc::new(Synced(sync_mapping(range))));
        }
        self.forward(waker, |inner| inner.flush(range, waker))
    }
}

/// A completed flush.
#[derive(Debug)]
struct Synced(Result<(), AccessError>);

impl Transfer for Synced {
    fn outcome(&self) -> Option<Result<(), AccessError>> {
        Some(self.0)
    }

    fn read(&self, _offset: u64, _out: &mut [u8]) -> Result<(), AccessError> {
        Err(AccessError::OutOfRange)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;

    const RANGE: HostRange = HostRange { addr: 1 << 30, len: 3 << 20 };

    /// Fails all requests, with an error that no other pager returns.
    #[derive(Debug)]
    struct Refusing(WholeRange);

    impl Pager for Refusing {
        fn translation(&self) -> &dyn Translation {
            &self.0
        }

        fn read(&self, _: HostRange, _: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
            Err(AccessError::Permission)
        }

        fn write(&self, _: u64, _: &[u8], _: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
            Err(AccessError::Permission)
        }

        fn atomic(&self, _: u64, _: AtomicOp, _: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
            Err(AccessError::Permission)
        }

        fn flush(&self, _: HostRange, _: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
            Err(AccessError::Permission)
        }
    }

    #[test]
    fn requests_during_the_switch_are_woken_and_find_all_of_it_present() {
        let inner = Arc::new(Refusing(WholeRange::absent(RANGE)));
        let pager = Arc::new(MappingPager::new(Inner::Baseline(inner, WholeRange::absent(RANGE))));
        let woken = Arc::new(AtomicU32::new(0));
        let count = woken.clone();
        let waker: Waker = Arc::new(move || {
            count.fetch_add(1, Ordering::SeqCst);
        });
        assert_eq!(pager.read(RANGE, &waker).unwrap_err(), AccessError::Permission);
        pager.make_ordinary(|| {
            assert_eq!(pager.read(RANGE, &waker).unwrap_err(), AccessError::NotReady);
            assert_eq!(pager.write(RANGE.addr, &[1], &waker).unwrap_err(), AccessError::NotReady);
            assert_eq!(woken.load(Ordering::SeqCst), 0);
        });
        assert_eq!(woken.load(Ordering::SeqCst), 2);
        assert!(pager.translation().is_present(RANGE));
        assert_eq!(pager.read(RANGE, &waker).unwrap_err(), AccessError::NotReady);
        assert_eq!(woken.load(Ordering::SeqCst), 3);
        // The range is not mapped.
        let flushed = pager.flush(HostRange { addr: 4096, len: 1 }, &waker).unwrap();
        assert_eq!(flushed.outcome(), Some(Err(AccessError::Fault)));
        pager.make_ordinary(|| unreachable!("released twice"));
    }
}
