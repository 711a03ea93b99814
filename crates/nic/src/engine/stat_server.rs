//! The server side of `terrace stat`.

use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::Duration;

use crate::device::Device;
use crate::stat;
use crate::unix_socket::{Spare, accept_waiting, is_trusted};

/// How long a client gets to read the answer.
const READ_TIMEOUT: Duration = Duration::from_secs(1);

/// Answers each connection with a snapshot of the device, if it comes from the same user or from root.
pub(super) struct StatServer {
    listener: UnixListener,
    spare: Spare,
}

impl StatServer {
    /// Listens on the process's socket. Failure costs the statistics and nothing else.
    pub fn open() -> Option<StatServer> {
        match stat::listen() {
            Ok(listener) => Some(StatServer { listener, spare: Spare::new() }),
            Err(error) => {
                tracing::debug!(%error, "no status socket");
                None
            }
        }
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }

    /// Answers the waiting clients. A thread of its own does the writing, because a reader may be slow.
    pub fn serve(&self, device: &Arc<Device>) {
        accept_waiting(&self.listener, &self.spare, |socket| {
            if is_trusted(&socket) {
                let snapshot = device.snapshot();
                let thread = std::thread::Builder::new().name("terrace-stat".into());
                // Without a thread there is no answer, and the client sees the end of the stream.
                let _ = thread.spawn(move || answer(socket.into(), &snapshot));
            }
        });
    }
}

fn answer(mut stream: UnixStream, snapshot: &stat::DeviceSnapshot) {
    let Ok(text) = serde_json::to_vec(snapshot) else { return };
    if stream.set_nonblocking(false).is_ok() && stream.set_write_timeout(Some(READ_TIMEOUT)).is_ok() {
        // A client that goes away gets no answer.
        let _ = stream.write_all(&text);
    }
}
