//! A client with the queue of its accesses.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use pyo3::{Py, PyAny, PyResult, Python};
use terrace_node::{Client, ClientConfig, ClientCounters, Completion, RegionHandle, Span};
use terrace_sync::Mutex;

use crate::access::{Access, Kind};
use crate::failure::Failure;
use crate::watcher::Watcher;

/// The connection to a memory node, with accesses that have begun and accesses that wait for them.
pub struct Connection {
    /// `None` when the connection is closed.
    client: Mutex<Option<Arc<Client>>>,
    queue: Mutex<Queue>,
    /// The number of callbacks that wait.
    callback_count: AtomicUsize,
    watcher: Watcher,
    /// The process that has connected: another one has none of its threads.
    pid: u32,
    depth: usize,
}

#[derive(Default)]
struct Queue {
    next_tag: u64,
    /// By the tags of their steps in flight.
    in_flight: HashMap<u64, Arc<Access>>,
    /// Accesses with the index of the first step that has not begun, oldest first.
    waiting: VecDeque<(Arc<Access>, usize)>,
    /// Reused.
    spans: Vec<Span>,
}

impl Connection {
    /// Connects to a memory node.
    pub fn new(config: &ClientConfig) -> Result<Arc<Connection>, Failure> {
        let client = Client::connect(config)?;
        Ok(Arc::new(Connection {
            client: Mutex::new(Some(Arc::new(client))),
            queue: Mutex::default(),
            callback_count: AtomicUsize::new(0),
            watcher: Watcher::default(),
            pid: std::process::id(),
            depth: config.depth.max(1) as usize,
        }))
    }

    /// The client, unless it is closed or belongs to another process.
    pub fn client(&self) -> Result<Arc<Client>, Failure> {
        // A fork may have copied the lock while another thread held it.
        if !self.is_of_this_process() {
            return Err(Failure::forked());
        }
        self.client.lock().clone().ok_or_else(Failure::closed)
    }

    /// Whether this process has connected, not the one that forked it.
    pub fn is_of_this_process(&self) -> bool {
        self.pid == std::process::id()
    }

    /// Whether this process has closed the connection.
    pub fn is_closed(&self) -> bool {
        self.is_of_this_process() && self.client.lock().is_none()
    }

    /// Opens a region by its name.
    pub fn open(&self, name: &str) -> Result<(RegionHandle, u64), Failure> {
        let client = self.client()?;
        let region = client.open(name)?;
        Ok((region.handle(), region.len()))
    }

    /// The counters so far.
    pub fn counters(&self) -> Result<ClientCounters, Failure> {
        Ok(self.client()?.counters())
    }

    /// Begins an access. Accesses to the same bytes take effect in the order in which they begin.
    pub fn begin(&self, access: &Arc<Access>) -> Result<(), Failure> {
        let client = self.client()?;
        if access.steps.is_empty() {
            access.end(None);
            return Ok(());
        }
        let issued = {
            let mut queue = self.queue.lock();
            queue.waiting.push_back((access.clone(), 0));
            queue.issue(&client, self.depth)
        };
        self.fail_after(issued);
        // A close in the meantime may have ended all accesses but this one.
        if self.is_closed() {
            self.fail(Failure::closed());
        }
        Ok(())
    }

    /// Makes progress. Returns whether steps have finished.
    pub fn advance(&self) -> bool {
        let Ok(client) = self.client() else { return false };
        let mut done = Vec::new();
        if let Err(error) = client.poll(&mut done) {
            self.fail(error.into());
            return true;
        }
        if done.is_empty() {
            return false;
        }
        let mut ended = Vec::new();
        let issued = {
            let mut queue = self.queue.lock();
            queue.finish_steps(&done, &mut ended);
            queue.issue(&client, self.depth)
        };
        ended.iter().for_each(|access| self.end(access, None));
        self.fail_after(issued);
        true
    }

    /// Checks that the access has ended or can end: in another process nothing makes progress.
    pub fn check_progress(&self, access: &Access) -> Result<(), Failure> {
        if access.is_done() || self.is_of_this_process() { Ok(()) } else { Err(Failure::forked()) }
    }

    /// Makes progress until the access or the time ends. Returns whether the access has ended.
    pub fn wait(&self, access: &Access, until: Instant) -> bool {
        loop {
            if access.is_done() {
                return true;
            }
            if !self.advance() {
                // Clients and servers may share few cores.
                std::thread::yield_now();
            }
            if Instant::now() >= until {
                return access.is_done();
            }
        }
    }

    /// Calls a function when the access ends, at once if it has ended.
    ///
    /// # Errors
    /// ConnectionLostError in a forked child, where the access does not end; OSError where no thread can be started to poll for
    /// it; what the function raises.
    pub fn add_callback(
        self: &Arc<Connection>,
        py: Python<'_>,
        access: &Access,
        callback: Py<PyAny>,
    ) -> PyResult<()> {
        self.check_progress(access).map_err(|failure| failure.into_exception(py))?;
        self.watcher.start(self)?;
        let mut callback = Some(callback);
        // Counted before it can be called and uncounted.
        self.callback_count.fetch_add(1, Ordering::SeqCst);
        py.detach(|| access.add_callback(&mut callback));
        if let Some(callback) = callback {
            self.callback_count.fetch_sub(1, Ordering::SeqCst);
            callback.call0(py)?;
        } else {
            self.watcher.wake();
        }
        Ok(())
    }

    /// Polls while callbacks wait.
    pub fn serve_callbacks(&self) {
        const SPIN: Duration = Duration::from_micros(100);
        const NAP: Duration = Duration::from_micros(50);
        let mut advanced_at = Instant::now();
        while self.callback_count.load(Ordering::SeqCst) > 0 && !self.is_closed() {
            if self.advance() {
                advanced_at = Instant::now();
            } else if advanced_at.elapsed() < SPIN {
                std::thread::yield_now();
            } else {
                std::thread::sleep(NAP);
            }
        }
    }

    /// Closes the connection. Accesses that have not ended fail.
    pub fn close(&self) {
        if !self.is_of_this_process() {
            return;
        }
        let client = self.client.lock().take();
        self.fail(Failure::closed());
        drop(client);
    }

    fn fail_after(&self, issued: Result<(), Failure>) {
        if let Err(failure) = issued {
            self.fail(failure);
        }
    }

    /// Ends all accesses.
    fn fail(&self, failure: Failure) {
        let (in_flight, waiting) = {
            let mut queue = self.queue.lock();
            (std::mem::take(&mut queue.in_flight), std::mem::take(&mut queue.waiting))
        };
        let waiting = waiting.into_iter().map(|(access, _)| access);
        for access in in_flight.into_values().chain(waiting) {
            if !access.is_done() {
                self.end(&access, Some(failure.clone()));
            }
        }
    }

    fn end(&self, access: &Access, failure: Option<Failure>) {
        let called_count = access.end(failure);
        self.callback_count.fetch_sub(called_count, Ordering::SeqCst);
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        if self.is_of_this_process() {
            self.close();
        } else {
            // Closing would wait for threads that this process does not have.
            std::mem::forget(self.client.get_mut().take());
        }
    }
}

/// A forked child has a copy of the parent's random number generator. Its connections would have the numbers of the parent's
/// next ones, and the server would take one for the other.
pub fn reseed_after_fork() {
    static SEEDED_BY: AtomicU32 = AtomicU32::new(0);
    let pid = std::process::id();
    if SEEDED_BY.swap(pid, Ordering::Relaxed) != pid {
        // The generator seeds itself again after some output even if the kernel gives no seed now.
        let _ = rand::rng().reseed();
    }
}

impl Queue {
    /// Begins waiting steps, in order, up to `depth` in flight.
    fn issue(&mut self, client: &Client, depth: usize) -> Result<(), Failure> {
        while self.in_flight.len() < depth {
            let Some((access, first)) = self.waiting.front().cloned() else { break };
            let free_count = depth - self.in_flight.len();
            // The steps of one range have the same memory.
            let steps = &access.steps[first..];
            let of_range = |step: &&crate::access::Step| step.range == steps[0].range;
            let count = steps.iter().take(free_count).take_while(of_range).count();
            self.begin_steps(client, &access, first, count)?;
            match first + count {
                next if next == access.steps.len() => _ = self.waiting.pop_front(),
                next => self.waiting[0].1 = next,
            }
        }
        Ok(())
    }

    fn begin_steps(
        &mut self,
        client: &Client,
        access: &Arc<Access>,
        first: usize,
        count: usize,
    ) -> Result<(), Failure> {
        let ranges = access.ranges();
        let range = &ranges[access.steps[first].range];
        let at = range.memory.as_ref().map_or(0, |memory| memory.at);
        self.spans.clear();
        for step in &access.steps[first..first + count] {
            let tag = self.next_tag;
            self.next_tag += 1;
            self.in_flight.insert(tag, access.clone());
            self.spans.push(Span {
                offset: range.offset + step.at,
                at: at + step.at as usize,
                len: step.len,
                tag,
            });
        }
        let region = client.region(&access.region);
        match (access.kind, &range.memory) {
            (Kind::Read, Some(memory)) => region.read_many(memory.buffer(), &self.spans)?,
            (Kind::Write, Some(memory)) => region.write_many(memory.buffer(), &self.spans)?,
            _ => self.spans.iter().try_for_each(|span| region.commit(span.offset, span.len, span.tag))?,
        }
        Ok(())
    }

    /// Counts finished steps, and appends the accesses whose last steps they were.
    fn finish_steps(&mut self, done: &[Completion], ended: &mut Vec<Arc<Access>>) {
        for completion in done {
            // The accesses of a failed connection have ended.
            let Some(access) = self.in_flight.remove(&completion.tag) else { continue };
            if access.finish_step(Failure::of_status(completion.status)) {
                ended.push(access);
            }
        }
    }
}
