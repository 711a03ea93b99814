//! The server side of `terrace stat`.

use std::io::{ErrorKind, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::Duration;

use rustix::net::sockopt::socket_peercred;

use crate::device::Device;
use crate::stat;
use crate::unix_socket::Spare;

/// Connections that are accepted at a time: other users connect, too, and must not keep the engine here.
const CONNECTIONS_AT_A_TIME: usize = 16;

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
        for _ in 0..CONNECTIONS_AT_A_TIME {
            match self.listener.accept() {
                Ok((stream, _)) if may_ask(&stream) => {
                    let snapshot = device.snapshot();
                    let thread = std::thread::Builder::new().name("terrace-stat".into());
                    // Without a thread there is no answer, and the client sees the end of the stream.
                    let _ = thread.spawn(move || answer(stream, &snapshot));
                }
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(_) => return self.spare.turn_away(|| drop(self.listener.accept())),
            }
        }
    }
}

fn may_ask(stream: &UnixStream) -> bool {
    let own = rustix::process::geteuid();
    socket_peercred(stream).is_ok_and(|peer| peer.uid == own || peer.uid.is_root())
}

fn answer(mut stream: UnixStream, snapshot: &stat::DeviceSnapshot) {
    let Ok(text) = serde_json::to_vec(snapshot) else { return };
    if stream.set_nonblocking(false).is_ok() && stream.set_write_timeout(Some(READ_TIMEOUT)).is_ok() {
        // A client that goes away gets no answer.
        let _ = stream.write_all(&text);
    }
}
