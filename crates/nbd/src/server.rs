//! The socket of a device, and the thread that serves it.
//!
//! One thread has the device and all sockets. It sleeps while no request is in flight, and polls while some are. Nothing it
//! calls blocks, and all of its buffers are allocated at the start.

mod client;
mod listener;

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, Event, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::io::Errno;

use crate::counters::Counters;
use crate::device::{CONNECTIONS_MAX, Device};
use crate::polling::Polling;
use crate::queue::PageQueue;
use client::Client;

/// How long a client may take from its connection to its first request.
const NEGOTIATION_TIME: Duration = Duration::from_secs(10);
/// How long requests may take to end, and clients to take replies, after [`Server::stop`].
pub(crate) const DRAIN_TIME: Duration = Duration::from_secs(10);
/// The time until the next attempt to accept a client, after the system has refused.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);
/// What names the listening socket and the stop event among the sources of events. Clients have their indexes.
const LISTENER: u64 = 1 << 32;
const STOP: u64 = 1 << 33;

/// Why a device cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The path of the socket cannot be used.
    #[error("cannot listen at {}: {source}", path.display())]
    Socket {
        /// The path.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file cannot be mounted.
    #[error("cannot mount at {}: {source}", mount_point.display())]
    Mount {
        /// The mount point.
        mount_point: PathBuf,
        /// The kernel's reason, or fusermount3's.
        source: io::Error,
    },
    /// The system refuses a resource.
    #[error("cannot serve: {0}")]
    System(#[from] io::Error),
}

/// A device that is served at a unix socket, until it is stopped or dropped.
pub struct Server {
    path: PathBuf,
    stop: Arc<OwnedFd>,
    counters: Arc<Counters>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Serves pages as a device at a socket that only this user can connect to. A socket that a killed server has left
    /// there is replaced.
    ///
    /// # Errors
    /// See [`ServerError`].
    pub fn start<Q: PageQueue>(path: &Path, queue: Q) -> Result<Server, ServerError> {
        let listener = listener::listen(path)
            .map_err(|source| ServerError::Socket { path: path.to_path_buf(), source })?;
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC).map_err(io::Error::from)?);
        let device = Device::new(queue, CONNECTIONS_MAX);
        let counters = device.counters().clone();
        let worker = Worker::new(device, listener, stop.clone())?;
        let thread = std::thread::Builder::new().name("terrace-nbd".into()).spawn(move || worker.run())?;
        Ok(Server { path: path.to_path_buf(), stop, counters, thread: Some(thread) })
    }

    /// The device's counters.
    pub fn counters(&self) -> &Arc<Counters> {
        &self.counters
    }

    /// Takes no more requests, answers those that were taken, and closes. This takes at most 10 seconds.
    pub fn stop(self) {}
}

impl Drop for Server {
    fn drop(&mut self) {
        // An event that is pending already is as good.
        let _ = rustix::io::write(&*self.stop, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            // A panic has been reported.
            let _ = thread.join();
        }
        // Somebody else may have removed it.
        let _ = std::fs::remove_file(&self.path);
    }
}

struct Worker<Q> {
    device: Device<Q>,
    listener: UnixListener,
    epoll: OwnedFd,
    stop: Arc<OwnedFd>,
    clients: Vec<Client>,
    /// When a client is to be accepted that the system has refused: without descriptors, it stays in the listener's queue.
    accept_at: Option<Instant>,
    has_logged_refusal: bool,
    /// When the server was stopped.
    stopped: Option<Instant>,
}

impl<Q: PageQueue> Worker<Q> {
    fn new(device: Device<Q>, listener: UnixListener, stop: Arc<OwnedFd>) -> io::Result<Worker<Q>> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &listener, EventData::new_u64(LISTENER), EventFlags::IN)?;
        epoll::add(&epoll, &*stop, EventData::new_u64(STOP), EventFlags::IN)?;
        let clients = (0..CONNECTIONS_MAX).map(|_| Client::new()).collect();
        Ok(Worker {
            device,
            listener,
            epoll,
            stop,
            clients,
            accept_at: None,
            has_logged_refusal: false,
            stopped: None,
        })
    }

    fn run(mut self) {
        let mut events: Vec<Event> = Vec::with_capacity(CONNECTIONS_MAX + 2);
        let mut polling = Polling::begin();
        while !self.is_drained() {
            let mut has_progressed = self.device.advance() > 0 || self.device.goes_on();
            for index in 0..CONNECTIONS_MAX {
                has_progressed |= self.serve(index);
            }
            let now = Instant::now();
            let timeout = match has_progressed || self.device.is_busy() {
                true => Some(polling.pause(now, has_progressed)),
                false => self.time_left(now),
            };
            events.clear();
            let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
            match epoll::wait(&self.epoll, spare_capacity(&mut events), timeout.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => {
                    tracing::error!(%error, "the device can no longer be served");
                    return;
                }
            }
            for event in &events {
                self.handle_event(event.data.u64(), event.flags);
            }
            if self.accept_at.is_some_and(|at| Instant::now() >= at) {
                self.accept();
            }
            self.close_late_clients();
        }
    }

    /// Whether the server was stopped and nothing is left to do.
    fn is_drained(&self) -> bool {
        self.stopped.is_some_and(|stopped| {
            stopped.elapsed() > DRAIN_TIME || self.clients.iter().all(|client| !client.is_open())
        })
    }

    /// Time until something is to be done although there is no event.
    fn time_left(&self, now: Instant) -> Option<Duration> {
        let negotiating = (0..CONNECTIONS_MAX).filter(|index| self.device.is_negotiating(*index));
        let deadlines = negotiating.map(|index| self.clients[index].connected + NEGOTIATION_TIME);
        let deadlines =
            deadlines.chain(self.stopped.map(|stopped| stopped + DRAIN_TIME)).chain(self.accept_at);
        // Beyond a deadline rather than before it.
        deadlines.min().map(|deadline| deadline.saturating_duration_since(now) + Duration::from_millis(1))
    }

    fn handle_event(&mut self, source: u64, flags: EventFlags) {
        match source {
            LISTENER => self.accept(),
            STOP => {
                // Once is enough, and the event stays.
                let _ = epoll::delete(&self.epoll, &*self.stop);
                let _ = epoll::delete(&self.epoll, &self.listener);
                self.accept_at = None;
                self.stopped = Some(Instant::now());
                (0..CONNECTIONS_MAX).for_each(|index| self.device.end(index));
            }
            index => {
                let index = index as usize;
                if flags.intersects(EventFlags::HUP | EventFlags::ERR) {
                    return self.close(index);
                }
                if flags.contains(EventFlags::IN) && self.clients[index].receive().is_err() {
                    self.close(index);
                }
            }
        }
    }

    fn accept(&mut self) {
        let socket = match self.listener.accept() {
            Ok((socket, _)) => socket,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return self.watch_listener(true),
            Err(error) => {
                if !std::mem::replace(&mut self.has_logged_refusal, true) {
                    tracing::warn!(%error, "clients cannot connect");
                }
                return self.watch_listener(false);
            }
        };
        self.has_logged_refusal = false;
        self.watch_listener(true);
        let Some(index) = self.device.connect() else {
            tracing::warn!("a client is refused: {CONNECTIONS_MAX} are connected");
            return;
        };
        let added = socket.set_nonblocking(true).and_then(|()| {
            Ok(epoll::add(&self.epoll, &socket, EventData::new_u64(index as u64), EventFlags::IN)?)
        });
        if let Err(error) = added {
            tracing::warn!(%error, "a client cannot be served");
            return self.device.disconnect(index);
        }
        self.clients[index].open(socket);
        self.count_connections();
    }

    /// Has the listener wake the thread when a client connects, or has the next attempt follow after some time.
    fn watch_listener(&mut self, is_watched: bool) {
        let was_watched = self.accept_at.is_none();
        self.accept_at = (!is_watched).then(|| Instant::now() + ACCEPT_RETRY);
        let flags = if is_watched { EventFlags::IN } else { EventFlags::empty() };
        if is_watched != was_watched
            && epoll::modify(&self.epoll, &self.listener, EventData::new_u64(LISTENER), flags).is_err()
        {
            // The system lacks memory, too.
            self.accept_at = Some(Instant::now() + ACCEPT_RETRY);
        }
    }

    /// Takes a client's requests and sends its replies, as far as possible. Returns whether anything was.
    fn serve(&mut self, index: usize) -> bool {
        if !self.clients[index].is_open() {
            return false;
        }
        let client = &mut self.clients[index];
        let used = match self.device.handle_input(index, client.input()) {
            Ok(used) => used,
            Err(error) => {
                tracing::warn!(%error, "a client does not speak NBD and is disconnected");
                self.close(index);
                return true;
            }
        };
        client.consume(used);
        if let Err(error) = self.device.emit(index, &mut client.output, client::OUTPUT_BYTES) {
            tracing::error!(%error, "a page cannot be sent");
            self.close(index);
            return true;
        }
        let sent = match client.send() {
            Ok(sent) => sent,
            Err(error) => {
                tracing::debug!(%error, "a client has gone");
                self.close(index);
                return true;
            }
        };
        if self.device.has_ended(index) && client.output.is_empty() {
            self.close(index);
            return true;
        }
        if let Err(error) = client.update_interest(&self.epoll, index as u64) {
            tracing::warn!(%error, "a client cannot be served");
            self.close(index);
        }
        used > 0 || sent > 0
    }

    fn close_late_clients(&mut self) {
        for index in 0..CONNECTIONS_MAX {
            let client = &self.clients[index];
            let is_negotiating = client.is_open() && self.device.is_negotiating(index);
            if is_negotiating && client.connected.elapsed() > NEGOTIATION_TIME {
                tracing::warn!("a client is disconnected: its negotiation takes too long");
                self.close(index);
            }
        }
    }

    fn close(&mut self, index: usize) {
        if self.clients[index].is_open() {
            // Closing the socket removes it from the sources of events.
            self.clients[index].close();
            self.device.disconnect(index);
            self.count_connections();
        }
    }

    fn count_connections(&self) {
        let count = self.clients.iter().filter(|client| client.is_open()).count();
        self.device.counters().set_connections(count as u64);
    }
}
