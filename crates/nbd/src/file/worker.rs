//! The thread that has the device: it takes requests from the channel, and answers them. It sleeps while no request is in
//! flight, and polls while some are ([`Polling`]).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, SyncSender};
use std::time::{Duration, Instant};

use fuser::{ReplyData, ReplyEmpty, ReplyWrite};
use slab::Slab;

use super::WRITE_BYTES_MAX;
use crate::device::{Device, REQUESTS};
use crate::polling::Polling;
use crate::protocol::{Command, Errno, Header};
use crate::queue::PageQueue;
use crate::server::DRAIN_TIME;

/// The only connection of the device.
const CONNECTION: usize = 0;

/// A request that needs pages. Dropping it answers with EIO.
pub(super) struct Request {
    pub(super) offset: u64,
    pub(super) length: u64,
    /// Those of a WRITE, in a buffer that goes back.
    pub(super) data: Vec<u8>,
    pub(super) reply: Reply,
}

/// What is sent when a request has ended. Dropping it sends EIO.
pub(super) enum Reply {
    /// To a READ, whose range is below the end of the file.
    Read(ReplyData),
    /// To a WRITE of so many bytes.
    Write(ReplyWrite, u32),
    /// To a request for zeros, which frees whole pages.
    Zero(ReplyEmpty),
}

impl Reply {
    fn send(self, error: Option<Errno>, data: &[u8]) {
        let errno = error.map(|error| fuser::Errno::from_i32(error as i32));
        match (self, errno) {
            (Reply::Read(reply), None) => reply.data(data),
            (Reply::Write(reply, length), None) => reply.written(length),
            (Reply::Zero(reply), None) => reply.ok(),
            (Reply::Read(reply), Some(errno)) => reply.error(errno),
            (Reply::Write(reply, _), Some(errno)) => reply.error(errno),
            (Reply::Zero(reply), Some(errno)) => reply.error(errno),
        }
    }
}

pub(super) struct Worker<Q> {
    device: Device<Q>,
    /// Requests, or `None` to wake the thread.
    requests: Receiver<Option<Request>>,
    /// Where buffers of WRITEs go back to.
    free: SyncSender<Vec<u8>>,
    is_stopped: Arc<AtomicBool>,
    /// A request that the device could not take yet. Others wait behind it.
    next: Option<Request>,
    /// The data of the WRITE that the device is beginning, and how many bytes of them it has used.
    data: Option<(Vec<u8>, usize)>,
    /// Replies of requests in flight. Their keys are the requests' cookies.
    replies: Slab<Reply>,
    output: Vec<u8>,
    /// When the thread has found that the server was stopped.
    stopped: Option<Instant>,
}

impl<Q: PageQueue> Worker<Q> {
    pub(super) fn new(
        mut device: Device<Q>,
        requests: Receiver<Option<Request>>,
        free: SyncSender<Vec<u8>>,
        is_stopped: Arc<AtomicBool>,
    ) -> Worker<Q> {
        // A new device has it.
        let _ = device.attach();
        Worker {
            device,
            requests,
            free,
            is_stopped,
            next: None,
            data: None,
            replies: Slab::with_capacity(REQUESTS),
            output: Vec::with_capacity(WRITE_BYTES_MAX as usize),
            stopped: None,
        }
    }

    pub(super) fn run(mut self) {
        let mut polling = Polling::begin();
        while !self.is_drained() {
            let mut has_progressed = self.device.advance() > 0 || self.device.goes_on();
            has_progressed |= self.take_requests();
            self.send_replies();
            // After requests are taken, so that a wake-up among them is not forgotten.
            if self.stopped.is_none() && self.is_stopped.load(Relaxed) {
                self.stopped = Some(Instant::now());
            }
            if has_progressed || self.is_busy() {
                self.sleep(polling.pause(Instant::now(), has_progressed));
            } else if self.stopped.is_none() {
                // The server has a sender as long as this thread runs.
                self.next = self.requests.recv().ok().flatten();
            }
        }
    }

    /// Sleeps for so long, or until a request comes that the thread may take.
    fn sleep(&mut self, time: Duration) {
        match self.next.is_none() && self.stopped.is_none() {
            _ if time.is_zero() => {}
            true => self.next = self.requests.recv_timeout(time).ok().flatten(),
            false => std::thread::sleep(time),
        }
    }

    /// Whether requests are in flight or wait for the device.
    fn is_busy(&self) -> bool {
        self.next.is_some() || !self.replies.is_empty()
    }

    /// Whether the server was stopped and nothing is left to do.
    fn is_drained(&self) -> bool {
        self.stopped.is_some_and(|stopped| stopped.elapsed() > DRAIN_TIME || !self.is_busy())
    }

    /// Takes requests while the device can. Returns whether there was one.
    fn take_requests(&mut self) -> bool {
        let mut has_taken = false;
        loop {
            self.continue_request();
            if self.device.is_beginning(CONNECTION) {
                return has_taken;
            }
            let Some(request) = self.next.take().or_else(|| self.receive()) else { return has_taken };
            self.next = self.begin(request);
            if self.next.is_some() {
                return has_taken;
            }
            has_taken = true;
        }
    }

    /// The next request. After the stop, those of handles that are still open are not taken.
    fn receive(&self) -> Option<Request> {
        if self.stopped.is_some() { None } else { self.requests.try_recv().ok().flatten() }
    }

    /// Begins what is possible of the current request's operations.
    fn continue_request(&mut self) {
        let Some((data, used)) = &mut self.data else {
            self.device.continue_request(CONNECTION, &[]);
            return;
        };
        *used += self.device.continue_request(CONNECTION, &data[*used..]);
        if !self.device.is_beginning(CONNECTION)
            && let Some((buffer, _)) = self.data.take()
        {
            // There is space for all of them.
            let _ = self.free.try_send(buffer);
        }
    }

    /// Begins a request, or returns it if the device has too many.
    fn begin(&mut self, request: Request) -> Option<Request> {
        let command = match request.reply {
            Reply::Read(_) => Command::Read,
            Reply::Write(..) => Command::Write,
            Reply::Zero(_) => Command::WriteZeroes,
        };
        let (offset, length) = (request.offset, request.length);
        let cookie = self.replies.vacant_key() as u64;
        if !self.device.begin_request(CONNECTION, &Header { flags: 0, command, cookie, offset, length }) {
            return Some(request);
        }
        if command == Command::Write {
            self.data = Some((request.data, 0));
        }
        self.replies.insert(request.reply);
        None
    }

    fn send_replies(&mut self) {
        while let Some((cookie, error)) = self.device.take_finished(CONNECTION, &mut self.output) {
            if let Some(reply) = self.replies.try_remove(cookie as usize) {
                reply.send(error, &self.output);
            }
            self.output.clear();
        }
    }
}
