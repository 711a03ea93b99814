//! The memory of clients that have gone. A thread takes it back, because that can wait: a same-host client that is stopped in
//! an access keeps its region for up to 10 seconds, and memory is zeroed. A region that cannot end yet is tried again.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use terrace_nic::Error;
use terrace_sync::Mutex;

use super::Inner;
use super::tenant::Tenant;

/// The time until regions that could not end are tried again.
const RETRY: Duration = Duration::from_secs(1);

/// Passes clients to the thread, which ends soon after this is dropped.
pub(super) struct Reclaimer(Sender<Tenant>);

impl Reclaimer {
    /// Starts the thread.
    ///
    /// # Errors
    /// ENOMEM if the system refuses a thread.
    pub fn start(inner: Arc<Mutex<Inner>>) -> Result<Reclaimer, Error> {
        let (sender, gone) = channel();
        let builder = std::thread::Builder::new().name("memory-reclaim".into());
        let started = builder.spawn(move || run(&inner, &gone));
        started.map(|_| Reclaimer(sender)).map_err(|_| Error::NoMemory("a thread"))
    }

    /// Ends a client, soon, and frees its memory.
    pub fn end(&self, tenant: Tenant) {
        // The thread runs as long as this.
        let _ = self.0.send(tenant);
    }
}

fn run(inner: &Mutex<Inner>, gone: &Receiver<Tenant>) {
    let mut waiting: Vec<Tenant> = Vec::new();
    loop {
        let next = match waiting.is_empty() {
            true => gone.recv().map_err(|_| RecvTimeoutError::Disconnected),
            false => gone.recv_timeout(RETRY),
        };
        match next {
            Ok(tenant) => waiting.extend(reclaim(inner, tenant)),
            Err(RecvTimeoutError::Timeout) => {
                waiting = waiting.drain(..).filter_map(|tenant| reclaim(inner, tenant)).collect();
            }
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

/// Takes the memory of a client back. Returns the client if it still has some.
fn reclaim(inner: &Mutex<Inner>, mut tenant: Tenant) -> Option<Tenant> {
    let memory = inner.lock().frames.memory().clone();
    // Without the lock: other clients are served meanwhile.
    let slabs = tenant.release_all(&memory);
    let (is_done, reserved_pages) = (!tenant.has_slabs(), tenant.reserved_pages());
    // A space that is reserved as a whole ends with its client.
    let left = (!is_done).then_some(tenant);
    let mut inner = inner.lock();
    slabs.into_iter().for_each(|slab| inner.frames.put_back(slab));
    if is_done {
        inner.ending -= 1;
        inner.ending_pages -= reserved_pages;
    }
    left
}
