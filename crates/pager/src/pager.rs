//! The loop of the pager's one thread.

use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use terrace_vm::handshake::{self, Hello};
use terrace_vm::userfault::{Message, Userfaultfd};
use terrace_vm::{BackingStore, EvictionArea};

use crate::memory::{Memory, Statistics};
use crate::process::{Fault, Link, Process};
use crate::status::{PagerStatus, ProcessPages, SharedStatus};

/// Before the pager sleeps, it polls for this time: waking a thread on another processor takes longer than most faults.
const SPIN: Duration = Duration::from_micros(60);
/// The shortest sleep: for transfers and changes of mappings, whose end no descriptor announces.
const SLEEP_MIN: Duration = Duration::from_millis(1);
/// The pager polls for the end of loads, unless nothing has happened for this time: their node may be stopped.
const LOAD_POLL_MAX: Duration = Duration::from_millis(10);
/// Messages of one process that are read in one turn.
const MESSAGES_MAX: usize = 64;
/// Connections that say nothing end after this time. A process that is stopped, or lacks a frame, may need much of it.
const HELLO_TIMEOUT: Duration = Duration::from_secs(60);
/// The interval of checks of what the kernel does not report. It doubles up to the maximum while nothing happens.
const CHECK_INTERVAL: Duration = Duration::from_millis(10);
const CHECK_INTERVAL_MAX: Duration = Duration::from_millis(160);
/// The pager goes on for this time without a process: one may be between `execve(2)` and its first instruction.
const GRACE: Duration = Duration::from_secs(1);
/// Threads that wait for a frame get one after this time, if no page leaves.
const STARVATION: Duration = Duration::from_secs(2);
/// The next time they wait this long for each page that has left since, and not longer than the first time: while no page can
/// leave, they do not wait again.
const STARVATION_PER_PAGE: Duration = Duration::from_micros(100);

/// How a pager runs.
pub struct Settings {
    /// The memory of all processes and of the pager, in bytes.
    pub local_bytes: u64,
    /// Whether pages are loaded before they are touched, if a trend of faults says which.
    pub prefetches: bool,
    /// Where the pager writes its state.
    pub status: Arc<SharedStatus>,
    /// Processes join here.
    pub listener: UnixListener,
    /// The pager ends when this process (a pidfd) has ended, and all that joined have.
    pub root: Option<OwnedFd>,
    /// The pager ends when this is set and all processes that joined have ended.
    pub stop: Arc<AtomicBool>,
}

/// Handles the faults of processes.
pub struct Pager {
    memory: Memory,
    processes: Vec<Process>,
    /// Connections of processes that have not said what they are, and when they came.
    joining: Vec<(UnixStream, Instant)>,
    settings: Settings,
    last_id: u64,
    spins: bool,
    active_at: Instant,
    checked_at: Instant,
    check_interval: Duration,
    /// When the last process ended, or the pager began.
    empty_since: Instant,
    /// When a thread began to wait for a frame, while no page left.
    starving_since: Option<(Instant, u32)>,
    /// How many pages had left when threads got frames beyond the budget the last time.
    exceeded_at: Option<u32>,
    reported_losses: u64,
    /// Whether processes wait to join that the pager has no descriptors for.
    lacks_descriptors: bool,
    has_reported_error: bool,
}

impl Pager {
    /// A pager over a store. It raises the limit of this process's descriptors as far as it may: each paged process takes
    /// two.
    ///
    /// # Errors
    /// The system's.
    pub fn new(settings: Settings, store: Box<dyn BackingStore>) -> std::io::Result<Pager> {
        settings.listener.set_nonblocking(true)?;
        raise_descriptor_limit();
        let now = Instant::now();
        let mut memory = Memory::new(store, settings.local_bytes);
        memory.prefetches = settings.prefetches;
        Ok(Pager {
            memory,
            processes: Vec::new(),
            joining: Vec::new(),
            settings,
            last_id: 0,
            spins: std::thread::available_parallelism().is_ok_and(|count| count.get() > 1),
            active_at: now,
            checked_at: now,
            check_interval: CHECK_INTERVAL,
            empty_since: now,
            starving_since: None,
            exceeded_at: None,
            reported_losses: 0,
            lacks_descriptors: false,
            has_reported_error: false,
        })
    }

    /// Runs until all processes have ended; see [`Settings`].
    pub fn run(&mut self) -> Statistics {
        loop {
            let mut is_active = self.end_transfers();
            is_active |= self.read_messages();
            is_active |= self.end_requests();
            self.find_unpaged();
            self.resume();
            self.evict();
            let now = Instant::now();
            if is_active {
                self.active_at = now;
                self.check_interval = CHECK_INTERVAL;
            } else if now - self.active_at >= SPIN || !self.spins {
                self.wait();
            }
            if now - self.checked_at >= self.check_interval {
                self.checked_at = now;
                self.check_interval = (2 * self.check_interval).min(CHECK_INTERVAL_MAX);
                self.check();
                self.settings.status.set(self.status());
                if self.is_over(now) {
                    return self.memory.statistics;
                }
            }
        }
    }

    fn status(&self) -> PagerStatus {
        let (limit_pages, local_pages) = self.memory.frames();
        let processes = self.processes.iter().map(|process| ProcessPages {
            pid: process.pid,
            local_pages: process.frames,
            far_pages: process.pages.absent(),
        });
        PagerStatus {
            limit_pages,
            local_pages,
            unpaged_pages: self.processes.iter().map(|process| process.unpaged).sum(),
            counts: self.memory.statistics,
            processes: processes.collect(),
        }
    }

    fn end_transfers(&mut self) -> bool {
        let timeout = Duration::ZERO;
        let loads = self.memory.poll(timeout);
        for &(completion, id, addr) in &loads {
            match self.processes.iter_mut().find(|process| process.id == id) {
                Some(process) => process.end_load(&mut self.memory, addr, completion),
                None => self.memory.release_buffer(completion.buffer),
            }
        }
        !loads.is_empty()
    }

    fn read_messages(&mut self) -> bool {
        let mut children = Vec::new();
        let (mut is_active, mut failure) = (false, None);
        for process in &mut self.processes {
            process.has_read_error = false;
            for _ in 0..MESSAGES_MAX {
                if !process.may_read() {
                    break;
                }
                let message = match process.userfaultfd.read() {
                    Ok(Some(message)) => message,
                    Ok(None) => break,
                    Err(error) => {
                        process.has_read_error = true;
                        failure = Some(error);
                        break;
                    }
                };
                is_active = true;
                match message {
                    Message::Fault { page, is_store, is_protected } => {
                        self.memory.statistics.faults += 1;
                        process.handle_fault(&mut self.memory, Fault { page, is_store, is_protected });
                    }
                    Message::Remove(range) => process.remove(&mut self.memory, range),
                    Message::Unmap(range) => process.forget(&mut self.memory, range),
                    Message::Remap { from, to } => process.remap(&mut self.memory, from, to),
                    Message::Fork(userfaultfd) => {
                        self.last_id += 1;
                        children.push(process.fork(&mut self.memory, self.last_id, userfaultfd));
                    }
                }
            }
        }
        self.processes.append(&mut children);
        if let Some(error) = failure {
            self.report_error(&error);
        }
        is_active
    }

    fn end_requests(&mut self) -> bool {
        let mut has_ended = false;
        for process in &mut self.processes {
            has_ended |= process.request.is_some() && process.end_request(&mut self.memory);
        }
        has_ended
    }

    /// Looks for memory that came without a message, in the processes that are due for it.
    fn find_unpaged(&mut self) {
        let mut is_due = false;
        for process in &mut self.processes {
            if process.is_search_due && process.may_read() {
                is_due = true;
                process.is_search_due = false;
                if process.find_unpaged(&mut self.memory) {
                    self.check_interval = CHECK_INTERVAL;
                }
            }
        }
        if is_due {
            self.memory.set_unpaged(self.processes.iter().map(|process| process.unpaged).sum());
        }
    }

    fn resume(&mut self) {
        for process in &mut self.processes {
            process.resume(&mut self.memory);
        }
        let lacks_frames = self.memory.free_frames() == 0
            && self.processes.iter().any(|process| !process.waiting.is_empty());
        let evictions = self.memory.evictions;
        self.starving_since = self.starving_since.filter(|(_, before)| lacks_frames && *before == evictions);
        if lacks_frames {
            let (since, _) = *self.starving_since.get_or_insert_with(|| (Instant::now(), evictions));
            if since.elapsed() >= self.starvation() {
                self.exceed_limit();
            }
        }
    }

    /// How long threads wait for a frame while no page leaves.
    fn starvation(&self) -> Duration {
        self.exceeded_at.map_or(STARVATION, |before| {
            STARVATION.min(STARVATION_PER_PAGE * self.memory.evictions.wrapping_sub(before))
        })
    }

    fn exceed_limit(&mut self) {
        if self.exceeded_at.replace(self.memory.evictions).is_none() {
            tracing::warn!(
                "the local memory of --local is exceeded: no page can leave (locked, pinned or shared memory, or memory nodes that are full or do not answer)"
            );
        }
        self.memory.exceed_limit();
    }

    /// The process with the most frames has pages leave.
    fn evict(&mut self) {
        let count = self.memory.pages_to_evict();
        // A process that waits for buffers comes first: its faults wait, too.
        if count == 0 || self.processes.iter().any(Process::lacks_buffers) {
            return;
        }
        let candidates = self.processes.iter_mut().filter(|process| process.can_evict());
        if let Some(process) = candidates.max_by_key(|process| process.frames) {
            process.begin_eviction(&mut self.memory, count);
        }
    }

    /// The time until something is due that no descriptor announces.
    fn time_to_sleep(&self, now: Instant) -> Duration {
        let (has_transfers, has_loads) = self.memory.transfers();
        if has_loads && now - self.active_at < LOAD_POLL_MAX {
            return Duration::ZERO;
        }
        let has_waiting =
            self.processes.iter().any(|process| !process.waiting.is_empty() || !process.loaded.is_empty());
        if has_transfers || has_waiting {
            return SLEEP_MIN;
        }
        let evictions = self.processes.iter().filter_map(Process::next_eviction);
        let evictions = evictions.filter(|_| self.memory.pages_to_evict() > 0);
        let promises = self.processes.iter().filter_map(Process::promised_until);
        let due = evictions.chain(promises).chain(self.memory.next_store()).min();
        let sleep = due.map_or(self.check_interval, |due| due.saturating_duration_since(now));
        // A descriptor that could not be read is not watched: it would be ready.
        let has_read_error = self.processes.iter().any(|process| process.has_read_error);
        sleep.max(SLEEP_MIN).min(if has_read_error { CHECK_INTERVAL } else { self.check_interval })
    }

    /// Sleeps until a descriptor is ready or something is due.
    fn wait(&mut self) {
        let timeout = self.time_to_sleep(Instant::now());
        let mut watched: Vec<BorrowedFd<'_>> = Vec::new();
        if !self.lacks_descriptors {
            watched.push(self.settings.listener.as_fd());
            watched.extend(self.joining.iter().map(|(socket, _)| socket.as_fd()));
        }
        let joining_count = watched.len();
        for process in &self.processes {
            watched.extend(process.link.iter().map(|link| link.socket.as_fd()));
            let is_watched = process.may_read() && !process.has_read_error;
            watched.extend(is_watched.then(|| process.userfaultfd.as_fd()));
        }
        let mut descriptors: Vec<_> =
            watched.iter().map(|descriptor| PollFd::from_borrowed_fd(*descriptor, PollFlags::IN)).collect();
        let timeout = Timespec::try_from(timeout).expect("short times");
        // EINTR and a lack of memory: the next turn tries again.
        let _ = poll(&mut descriptors, Some(&timeout));
        let has_joined =
            descriptors[..joining_count].iter().any(|descriptor| !descriptor.revents().is_empty());
        drop(descriptors);
        if has_joined {
            self.accept();
        }
        self.drain_links();
        self.remove_ended();
    }

    /// Reads what woke the pager. A process whose connection has ended has ended, unless the system has refused its thread and the
    /// program has closed the connection: then it goes on as one that has not joined.
    fn drain_links(&mut self) {
        for process in &mut self.processes {
            let is_connected = process.link.as_mut().is_none_or(Link::drain);
            match !is_connected && process.lacks_thread() && process.userfaultfd.is_alive() {
                true => (process.link, process.pid) = (None, None),
                false if !is_connected => process.end(&mut self.memory),
                false => {}
            }
        }
    }

    fn remove_ended(&mut self) {
        let before = self.processes.len();
        self.processes.retain(|process| !process.has_ended);
        if before > 0 && self.processes.is_empty() {
            self.empty_since = Instant::now();
        }
    }

    /// Accepts connections, and admits the processes that have said what they are. The pager waits for none of them: what a
    /// process does before it says so may be a fault.
    fn accept(&mut self) {
        self.lacks_descriptors = false;
        loop {
            match self.settings.listener.accept() {
                Ok((socket, _)) if socket.set_nonblocking(true).is_ok() => {
                    self.joining.push((socket, Instant::now()));
                }
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => {
                    self.lacks_descriptors = true;
                    self.report_error(&error);
                    break;
                }
            }
        }
        for (socket, since) in std::mem::take(&mut self.joining) {
            // Descriptors that come with a message are lost if there are no numbers for them.
            if let Err(error) = socket.try_clone().and_then(|_first| socket.try_clone()) {
                self.lacks_descriptors = true;
                self.report_error(&error);
                self.joining.push((socket, since));
                continue;
            }
            let admitted = match handshake::receive_hello(&socket) {
                Err(error) if error.kind() == ErrorKind::WouldBlock && since.elapsed() < HELLO_TIMEOUT => {
                    self.joining.push((socket, since));
                    continue;
                }
                Err(error) => Err(error),
                Ok((hello, descriptors)) => self.admit(socket, hello, descriptors),
            };
            if let Err(error) = admitted {
                tracing::warn!(%error, "a process could not join the pager");
            }
        }
    }

    fn admit(&mut self, socket: UnixStream, hello: Hello, descriptors: Vec<OwnedFd>) -> std::io::Result<()> {
        // Not by rustix, for which a process of another PID namespace, whose number is 0 here, is an error.
        let peer = getsockopt(&socket, PeerCredentials)?;
        if peer.uid() != rustix::process::geteuid().as_raw() && peer.uid() != 0 {
            return Err(ErrorKind::PermissionDenied.into());
        }
        let pid = u32::try_from(peer.pid()).ok().filter(|&pid| pid > 0);
        let mut descriptors = descriptors.into_iter();
        let area = match descriptors.next() {
            Some(area) => EvictionArea::open(area)?,
            None => EvictionArea::without_thread()?,
        };
        if hello.identity == 0 {
            let userfaultfd: Userfaultfd = descriptors.next().ok_or(ErrorKind::InvalidData)?.into();
            handshake::send_welcome(&socket, userfaultfd.as_fd())?;
            self.last_id += 1;
            let link = Some(Link { socket, area });
            let mut process = Process::new(self.last_id, userfaultfd, link, hello.identity_page);
            process.pid = pid;
            self.processes.push(process);
            return Ok(());
        }
        let child = self.processes.iter_mut().find(|process| process.id == hello.identity);
        let child = child.filter(|child| child.link.is_none()).ok_or(ErrorKind::InvalidData)?;
        if hello.may_lack_memory {
            let known = pid.ok_or(ErrorKind::NotFound.into());
            if let Err(error) = known.and_then(|pid| child.forget_uninherited(&mut self.memory, pid)) {
                tracing::warn!(%error, ?pid, "a child may find bytes of its parent in place of zeros");
            }
        }
        handshake::send_welcome(&socket, child.userfaultfd.as_fd())?;
        child.pid = pid;
        child.join(&mut self.memory, Link { socket, area });
        Ok(())
    }

    /// Says once that the pager lacks descriptors, or memory of the system: forks and programs that start wait for them.
    fn report_error(&mut self, error: &std::io::Error) {
        if !std::mem::replace(&mut self.has_reported_error, true) {
            tracing::warn!(%error, "the pager cannot go on with a fork, or with a program that starts");
        }
    }

    /// What the loop sees only when it sleeps, it sees here, too. Children that have not joined end without a sign; memory
    /// comes without one; losses are reported.
    fn check(&mut self) {
        self.accept();
        self.drain_links();
        for process in &mut self.processes {
            let may_go_unnoticed = process.link.is_none() || process.lacks_thread();
            if may_go_unnoticed && !process.userfaultfd.is_alive() {
                process.end(&mut self.memory);
            }
            process.is_search_due = true;
        }
        self.remove_ended();
        let losses = self.memory.statistics.losses;
        if losses > self.reported_losses {
            let count = losses - self.reported_losses;
            self.reported_losses = losses;
            tracing::error!(
                "{count} pages are lost with their memory node: the program gets SIGBUS where it needs them"
            );
        }
    }

    fn is_over(&self, now: Instant) -> bool {
        let root_ended = self.settings.root.as_ref().is_none_or(|root| {
            let mut descriptors = [PollFd::new(root, PollFlags::IN)];
            poll(&mut descriptors, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
        });
        let may_end =
            root_ended && (self.settings.root.is_some() || self.settings.stop.load(Ordering::Relaxed));
        may_end && self.processes.is_empty() && self.joining.is_empty() && now - self.empty_since >= GRACE
    }
}

fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }) {
        tracing::warn!(%error, "the limit of descriptors cannot be raised");
    }
}

#[cfg(test)]
mod tests {
    use terrace_hostmem::PAGE_BYTES;
    use terrace_vm::FileStore;

    use super::*;

    fn pager(store: Box<dyn BackingStore>) -> Pager {
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(folder.path().join("socket")).unwrap();
        let (status, stop) = (Arc::default(), Arc::default());
        let settings = Settings { local_bytes: 0, prefetches: false, status, listener, root: None, stop };
        Pager::new(settings, store).unwrap()
    }

    /// A pager with so many slots and a process whose pages are to leave, and the other ends of the process's link.
    fn crowded(slots: u64) -> (Pager, EvictionArea, UnixStream) {
        let mut pager = pager(Box::new(FileStore::new(tempfile::tempfile().unwrap(), slots, 64).unwrap()));
        let (socket, peer) = UnixStream::pair().unwrap();
        let (area, file) = EvictionArea::create().unwrap();
        let thread = EvictionArea::open(file).unwrap();
        thread.set_ready();
        let mut process = Process::without_userfaultfd(Some(Link { socket, area }));
        pager.memory.count_frames(200);
        (0..200).for_each(|index| process.enter(index * PAGE_BYTES, None, false, false));
        pager.processes.push(process);
        pager.check_interval = CHECK_INTERVAL_MAX;
        (pager, thread, peer)
    }

    #[test]
    fn a_pager_sleeps_until_the_next_attempt_while_no_page_can_leave() {
        let (mut pager, _thread, _peer) = crowded(64);
        while pager.memory.allocate_slot().is_some() {}
        assert_eq!(pager.time_to_sleep(Instant::now()), SLEEP_MIN, "an attempt is due");
        for _ in 0..20 {
            pager.processes[0].evict_after = None;
            pager.evict();
        }
        let after = pager.processes[0].evict_after.unwrap();
        assert!(pager.memory.pages_to_evict() > 0 && pager.processes[0].request.is_none());
        assert_eq!(pager.time_to_sleep(after - Duration::from_millis(60)), Duration::from_millis(60));
        assert_eq!(pager.time_to_sleep(after), SLEEP_MIN);
    }

    #[test]
    fn a_pager_polls_for_loads_unless_their_node_is_silent() {
        let store = FileStore::new(tempfile::tempfile().unwrap(), 64, 64).unwrap();
        let mut pager = pager(Box::new(store));
        let slot = pager.memory.allocate_slot().unwrap();
        pager.memory.begin_load(1, 0, slot).unwrap();
        assert_eq!(pager.time_to_sleep(pager.active_at), Duration::ZERO);
        assert_eq!(pager.time_to_sleep(pager.active_at + LOAD_POLL_MAX), SLEEP_MIN);
    }

    #[test]
    fn a_pager_sleeps_while_a_process_does_not_answer() {
        let (mut pager, _thread, _peer) = crowded(256);
        pager.evict();
        let now = pager.processes[0].promised_at.unwrap();
        let promise = pager.time_to_sleep(now);
        assert!(promise > SLEEP_MIN && promise < CHECK_INTERVAL_MAX, "{promise:?}");
        assert_eq!(pager.time_to_sleep(now + promise), SLEEP_MIN);
        pager.processes[0].withdraw_promise(&mut pager.memory);
        assert_eq!(pager.time_to_sleep(now + promise), CHECK_INTERVAL_MAX);
    }
}
