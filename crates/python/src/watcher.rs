//! The thread that polls for accesses with callbacks. It exists once there has been a callback, and sleeps while none waits.

use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Weak};
use std::thread::Builder;

use terrace_sync::Mutex;

use crate::connection::Connection;

/// The thread, which ends when this is dropped.
#[derive(Default)]
pub struct Watcher(Mutex<Option<Sender<()>>>);

impl Watcher {
    /// Starts the thread, if there is none.
    ///
    /// # Errors
    /// The system's: there are as many threads as are permitted.
    pub fn start(&self, connection: &Arc<Connection>) -> io::Result<()> {
        let mut sender = self.0.lock();
        if sender.is_none() {
            let (wakes, receiver) = channel();
            let connection = Arc::downgrade(connection);
            Builder::new().spawn(move || watch(&receiver, &connection))?;
            *sender = Some(wakes);
        }
        Ok(())
    }

    /// Has the thread poll until no callback waits.
    pub fn wake(&self) {
        if let Some(sender) = self.0.lock().as_ref() {
            // The thread receives as long as the sender exists.
            let _ = sender.send(());
        }
    }
}

fn watch(receiver: &Receiver<()>, connection: &Weak<Connection>) {
    for () in receiver {
        let Some(connection) = connection.upgrade() else { return };
        connection.serve_callbacks();
    }
}
