//! The memory of clients that have gone. A thread takes it back, because that can wait: a same-host client that is stopped in
//! an access keeps the memory of that access, and memory is zeroed. What cannot end yet is tried again.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use terrace_nic::Error;

/// The time until memory that could not be taken back is tried again.
const RETRY: Duration = Duration::from_secs(1);

/// Passes clients to the thread, which ends soon after this is dropped.
pub(crate) struct Reclaimer<T> {
    gone: Sender<T>,
    /// Clients whose memory could not be taken back yet.
    waiting: Arc<AtomicUsize>,
}

impl<T: Send + 'static> Reclaimer<T> {
    /// Starts the thread, which calls `reclaim` with each client until that does not return the client.
    ///
    /// # Errors
    /// ENOMEM if the system refuses a thread.
    pub fn start(reclaim: impl FnMut(T) -> Option<T> + Send + 'static) -> Result<Reclaimer<T>, Error> {
        let (gone, receiver) = channel();
        let waiting = Arc::new(AtomicUsize::new(0));
        let counted = waiting.clone();
        let builder = std::thread::Builder::new().name("memory-reclaim".into());
        let started = builder.spawn(move || run(reclaim, &receiver, &counted));
        started.map(|_| Reclaimer { gone, waiting }).map_err(|_| Error::NoMemory("a thread"))
    }

    /// Ends a client, soon, and frees its memory.
    pub fn end(&self, client: T) {
        // The thread runs as long as this.
        let _ = self.gone.send(client);
    }

    /// Clients that have gone and whose memory could not be taken back yet.
    pub fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }
}

fn run<T>(mut reclaim: impl FnMut(T) -> Option<T>, gone: &Receiver<T>, count: &AtomicUsize) {
    let mut waiting: Vec<T> = Vec::new();
    loop {
        let next = match waiting.is_empty() {
            true => gone.recv().map_err(|_| RecvTimeoutError::Disconnected),
            false => gone.recv_timeout(RETRY),
        };
        match next {
            Ok(client) => waiting.extend(reclaim(client)),
            Err(RecvTimeoutError::Timeout) => {
                waiting = waiting.drain(..).filter_map(&mut reclaim).collect();
            }
            Err(RecvTimeoutError::Disconnected) => return,
        }
        count.store(waiting.len(), Ordering::Relaxed);
    }
}
