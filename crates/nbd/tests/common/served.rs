//! A device of pages in memory at a socket, and the messages of a client.
#![allow(dead_code)] // Every test file uses some of it.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tempfile::TempDir;
use terrace_nbd::Server;

use crate::common::{Control, MemoryQueue};

pub struct Served {
    pub server: Option<Server>,
    pub control: Arc<Control>,
    pub directory: TempDir,
}

impl Served {
    pub fn new(bytes: u64) -> Served {
        let directory = tempfile::tempdir().expect("a directory");
        let (queue, control) = MemoryQueue::new(bytes / 4096, 64, 1);
        let server = Server::start(&directory.path().join("nbd"), queue).expect("a server");
        Served { server: Some(server), control, directory }
    }

    pub fn path(&self) -> PathBuf {
        self.directory.path().join("nbd")
    }

    pub fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.path().display())
    }

    pub fn connect(&self) -> UnixStream {
        let socket = UnixStream::connect(self.path()).expect("a connection");
        socket.set_read_timeout(Some(Duration::from_secs(20))).expect("a timeout");
        socket
    }

    /// A connection in its transmission phase.
    pub fn negotiate(&self) -> UnixStream {
        let mut socket = self.connect();
        greet(&mut socket);
        socket
    }

    pub fn stop(&mut self) {
        self.server.take().expect("a server").stop();
    }
}

/// Brings a connection to its transmission phase.
pub fn greet(socket: &mut UnixStream) {
    socket.write_all(b"\0\0\0\x03IHAVEOPT\0\0\0\x01\0\0\0\0").expect("an option");
    let mut greeting = [0; 28];
    socket.read_exact(&mut greeting).expect("a greeting");
}

pub fn request(command: u16, cookie: u64, offset: u64, length: u32) -> Vec<u8> {
    let mut bytes = 0x2560_9513u32.to_be_bytes().to_vec();
    bytes.extend_from_slice(&[0, 0]);
    bytes.extend_from_slice(&command.to_be_bytes());
    bytes.extend_from_slice(&cookie.to_be_bytes());
    bytes.extend_from_slice(&offset.to_be_bytes());
    bytes.extend_from_slice(&length.to_be_bytes());
    bytes
}

/// The next reply's error and cookie.
pub fn reply(socket: &mut UnixStream) -> (u32, u64) {
    let mut bytes = [0; 16];
    socket.read_exact(&mut bytes).expect("a reply");
    let number = |at: usize| u32::from_be_bytes(bytes[at..at + 4].try_into().expect("4 bytes"));
    assert_eq!(number(0), 0x6744_6698);
    (number(4), u64::from(number(8)) << 32 | u64::from(number(12)))
}
