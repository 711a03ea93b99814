//! The memory of clients that have gone. A thread takes it back, because that can wait: a same-host client that is stopped in
//! an access keeps the memory of that access, and memory is zeroed. What cannot end yet is tried again.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use terrace_nic::Error;
use terrace_sync::Mutex;

/// The time until memory that could not be taken back is tried again.
const RETRY: Duration = Duration::from_secs(1);

/// Passes clients to the thread, which ends soon after this is dropped.
pub(crate) struct Reclaimer<T> {
    gone: Sender<T>,
    /// Of clients whose memory could not be taken back yet.
    addresses: Arc<Mutex<Vec<IpAddr>>>,
}

impl<T: Send + 'static> Reclaimer<T> {
    /// Starts the thread, which calls `reclaim` with each client until that does not return the client.
    ///
    /// # Errors
    /// ENOMEM if the system refuses a thread.
    pub fn start(
        address_of: fn(&T) -> IpAddr,
        reclaim: impl FnMut(T) -> Option<T> + Send + 'static,
    ) -> Result<Reclaimer<T>, Error> {
        let (gone, receiver) = channel();
        let addresses = Arc::new(Mutex::new(Vec::new()));
        let noted = addresses.clone();
        let note = move |waiting: &[T]| *noted.lock() = waiting.iter().map(address_of).collect();
        let builder = std::thread::Builder::new().name("memory-reclaim".into());
        let started = builder.spawn(move || run(reclaim, &receiver, &note));
        started.map(|_| Reclaimer { gone, addresses }).map_err(|_| Error::NoMemory("a thread"))
    }

    /// Ends a client, soon, and frees its memory.
    pub fn end(&self, client: T) {
        // The thread runs as long as this.
        let _ = self.gone.send(client);
    }

    /// The address of each client that has gone and whose memory could not be taken back yet.
    pub fn addresses(&self) -> Vec<IpAddr> {
        self.addresses.lock().clone()
    }
}

fn run<T>(mut reclaim: impl FnMut(T) -> Option<T>, gone: &Receiver<T>, note: &impl Fn(&[T])) {
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
        note(&waiting);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn clients_whose_memory_cannot_be_taken_back_keep_their_places() {
        let address = |number: u8| IpAddr::from([192, 0, 2, number]);
        let stuck = address(1);
        let reclaim = move |client: IpAddr| (client == stuck).then_some(client);
        let reclaimer = Reclaimer::start(|client| *client, reclaim).expect("a thread");
        [1, 2, 1].into_iter().for_each(|number| reclaimer.end(address(number)));
        let begin = Instant::now();
        while reclaimer.addresses() != [stuck; 2] {
            assert!(begin.elapsed() < Duration::from_secs(60), "{:?}", reclaimer.addresses());
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
