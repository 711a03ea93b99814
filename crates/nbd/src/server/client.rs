//! A client's socket, and the bytes that are on their way from and to it.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Instant;

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::fd::OwnedFd;

/// Bytes that are received and not handled, at most.
const INPUT_BYTES: usize = 256 << 10;
/// Bytes that are to be sent, at most.
pub const OUTPUT_BYTES: usize = 256 << 10;

pub struct Client {
    socket: Option<UnixStream>,
    pub connected: Instant,
    input: Box<[u8]>,
    /// What of `input` is received and not handled.
    begin: usize,
    end: usize,
    /// What is to be sent, of which the first `sent` bytes are.
    pub output: Vec<u8>,
    sent: usize,
    interest: EventFlags,
}

impl Client {
    /// Allocates buffers for one client after another.
    pub fn new() -> Client {
        Client {
            socket: None,
            connected: Instant::now(),
            input: vec![0; INPUT_BYTES].into(),
            begin: 0,
            end: 0,
            output: Vec::with_capacity(OUTPUT_BYTES),
            sent: 0,
            interest: EventFlags::IN,
        }
    }

    pub fn is_open(&self) -> bool {
        self.socket.is_some()
    }

    pub fn open(&mut self, socket: UnixStream) {
        self.socket = Some(socket);
        self.connected = Instant::now();
        (self.begin, self.end, self.sent) = (0, 0, 0);
        self.output.clear();
        self.interest = EventFlags::IN;
    }

    pub fn close(&mut self) {
        self.socket = None;
    }

    pub fn input(&self) -> &[u8] {
        &self.input[self.begin..self.end]
    }

    pub fn consume(&mut self, count: usize) {
        self.begin += count;
        if self.begin == self.end {
            (self.begin, self.end) = (0, 0);
        }
    }

    /// Receives what there is and fits. An error if the client has gone.
    pub fn receive(&mut self) -> io::Result<()> {
        if self.begin > 0 {
            self.input.copy_within(self.begin..self.end, 0);
            (self.begin, self.end) = (0, self.end - self.begin);
        }
        let Some(socket) = &mut self.socket else { return Ok(()) };
        if self.end == self.input.len() {
            return Ok(());
        }
        match socket.read(&mut self.input[self.end..]) {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => {
                self.end += count;
                Ok(())
            }
            Err(error) if is_temporary(&error) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Sends what the socket takes, and returns how much.
    pub fn send(&mut self) -> io::Result<usize> {
        let Some(socket) = &mut self.socket else { return Ok(0) };
        if self.output.is_empty() {
            return Ok(0);
        }
        let count = match socket.write(&self.output[self.sent..]) {
            Ok(count) => count,
            Err(error) if is_temporary(&error) => 0,
            Err(error) => return Err(error),
        };
        self.sent += count;
        if self.sent == self.output.len() {
            self.output.clear();
            self.sent = 0;
        }
        Ok(count)
    }

    /// Asks for the events that can be handled: bytes for which there is space, space for bytes that are to be sent.
    pub fn update_interest(&mut self, epoll: &OwnedFd, index: u64) -> io::Result<()> {
        let Some(socket) = &self.socket else { return Ok(()) };
        let mut wanted = EventFlags::empty();
        wanted.set(EventFlags::IN, self.end - self.begin < self.input.len());
        wanted.set(EventFlags::OUT, !self.output.is_empty());
        if wanted != self.interest {
            epoll::modify(epoll, socket, EventData::new_u64(index), wanted)?;
            self.interest = wanted;
        }
        Ok(())
    }
}

fn is_temporary(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}
