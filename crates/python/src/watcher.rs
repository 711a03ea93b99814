//! The thread that polls for accesses with callbacks. It exists once there has been a callback, and sleeps while none waits.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Weak};

use terrace_sync::Mutex;

use crate::connection::Connection;

/// The thread, which ends when this is dropped.
#[derive(Default)]
pub struct Watcher(Mutex<Option<Sender<()>>>);

impl Watcher {
    /// Has the thread poll until no callback waits.
    pub fn wake(&self, connection: &Arc<Connection>) {
        let mut sender = self.0.lock();
        let sender = sender.get_or_insert_with(|| {
            let (sender, receiver) = channel();
            let connection = Arc::downgrade(connection);
            std::thread::spawn(move || watch(&receiver, &connection));
            sender
        });
        // The thread receives as long as the sender exists.
        let _ = sender.send(());
    }
}

fn watch(receiver: &Receiver<()>, connection: &Weak<Connection>) {
    for () in receiver {
        let Some(connection) = connection.upgrade() else { return };
        connection.serve_callbacks();
    }
}
