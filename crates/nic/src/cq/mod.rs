//! Completion queues and completion channels.

pub(crate) mod count;
pub(crate) mod poll;

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use terrace_sync::{BiasedMutex, Guard, Mutex};
use terrace_transport::{Time, Wc, WcStatus};

use crate::device::Device;
use crate::entries::Entries;
use crate::error::Error;
use crate::event_account::EventAccount;
use crate::semaphore::Semaphore;
use crate::use_count::UseCount;
use crate::work_queue::Resume;

/// Parameters of a new completion queue.
#[derive(Clone)]
pub struct CqInit {
    /// Entries that it must hold, at least 1.
    pub depth: u32,
    /// The channel of its events.
    pub channel: Option<Arc<CompChannel>>,
    /// The creator's cookie.
    pub cookie: u64,
}

/// A completion queue.
pub struct Cq {
    device: Arc<Device>,
    me: Weak<Cq>,
    channel: Option<Arc<CompChannel>>,
    cookie: u64,
    queue: BiasedMutex<Queue>,
    /// Entries in the queue, for a check without the lock.
    len: AtomicU32,
    /// Whether an entry did not fit. Changed under the lock.
    overrun: AtomicBool,
    /// Its number, if it was asked for: entries in memory may wait for its completions.
    number: OnceLock<u32>,
    /// Completions that bypassed the queue. Changed under the device's receive lock.
    bypassed: AtomicU32,
    pub(crate) users: UseCount,
    pub(crate) async_account: EventAccount,
    pub(crate) completion_account: EventAccount,
}

struct Queue {
    entries: Entries,
    /// When each entry was added, if times are kept.
    times: Option<VecDeque<Time>>,
    depth: u32,
    armed: Armed,
    /// Entries that were added before the last event.
    announced: usize,
    /// Entries that were ever added, and those that were lost because they did not fit, modulo 2^32.
    produced: u32,
    /// Whether an entry that does not fit displaces the oldest.
    ignores_overrun: bool,
    waiters: Vec<CountWaiter>,
}

/// The WAIT of a work queue for a count of completions.
struct CountWaiter {
    index: u32,
    resume: Resume,
}

/// Completions that raise the next event.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Armed {
    No,
    Solicited,
    Any,
}

impl Armed {
    fn wants(self, wc: &Wc) -> bool {
        match self {
            Armed::No => false,
            Armed::Any => true,
            Armed::Solicited => wc.solicited || wc.status != WcStatus::Success,
        }
    }
}

/// Entries that are allocated at first; more are allocated on demand.
const INITIAL_ENTRIES: u32 = 256;

impl Device {
    /// Makes a completion queue; EINVAL when the depth is out of range.
    pub fn create_cq(self: &Arc<Self>, init: CqInit) -> Result<Arc<Cq>, Error> {
        self.check_open()?;
        Cq::new(self, init)
    }
}

impl Cq {
    fn new(device: &Arc<Device>, init: CqInit) -> Result<Arc<Cq>, Error> {
        check_depth(device, init.depth)?;
        if init.channel.as_ref().is_some_and(|channel| !channel.belongs_to(device)) {
            return Err(Error::Invalid("completion channel of another device"));
        }
        device.quotas.cq.take()?;
        if let Some(channel) = &init.channel {
            channel.users.add().inspect_err(|_| device.quotas.cq.give_back())?;
        }
        Ok(Arc::new_cyclic(|me| Cq {
            device: device.clone(),
            me: me.clone(),
            channel: init.channel,
            cookie: init.cookie,
            queue: BiasedMutex::new(Queue {
                entries: Entries::with_capacity(init.depth.min(INITIAL_ENTRIES) as usize),
                times: None,
                depth: init.depth,
                armed: Armed::No,
                announced: 0,
                produced: 0,
                ignores_overrun: false,
                waiters: Vec::new(),
            }),
            len: AtomicU32::new(0),
            overrun: AtomicBool::new(false),
            number: OnceLock::new(),
            bypassed: AtomicU32::new(0),
            users: UseCount::default(),
            async_account: EventAccount::default(),
            completion_account: EventAccount::default(),
        }))
    }

    /// The creator's cookie.
    pub fn cookie(&self) -> u64 {
        self.cookie
    }

    /// Entries that it holds before it overruns.
    pub fn depth(&self) -> u32 {
        self.queue.lock().depth
    }

    /// The channel of its events.
    pub fn channel(&self) -> Option<&Arc<CompChannel>> {
        self.channel.as_ref()
    }

    /// Keeps the time of each entry from now on, for [`Cq::poll_timed`]; entries that wait have come now.
    pub fn keep_times(&self) {
        let now = self.device.now();
        let mut queue = self.queue.lock();
        let waiting = queue.entries.len();
        queue.times.get_or_insert_with(|| VecDeque::from(vec![now; waiting]));
    }

    /// Arms the queue for one event at the next completion, or at the next one that is solicited or an error. The event
    /// comes at once if such an entry waits and was added after the last event. IBTA volume 1, 11.4.2.2, leaves those
    /// entries to the program, which is to poll again after arming; but UCX polls, arms and sleeps, because RNICs do
    /// raise the event. Older entries raise none: perftest arms before it takes the entries that it was woken for, and
    /// then reads every event as an entry. Without a channel this does nothing; as with other devices, it is no mistake
    /// then.
    pub fn request_notify(&self, solicited_only: bool) -> Result<(), Error> {
        self.users.check()?;
        if self.channel.is_none() {
            return Ok(());
        }
        let mut queue = self.queue.lock();
        let before = queue.armed;
        // A queue that is armed for any event stays so when it is armed for solicited ones (IBTA volume 1, 11.4.2.2).
        let arming = match before != Armed::Any && solicited_only {
            true => Armed::Solicited,
            false => Armed::Any,
        };
        if queue.entries.as_slice()[queue.announced..].iter().any(|wc| arming.wants(wc)) {
            self.announce(&mut queue);
            return Ok(());
        }
        queue.armed = arming;
        if before == Armed::No {
            // Under the lock: the count is never less than the number of armed queues.
            self.device.count_armed();
        }
        drop(queue);
        if before == Armed::No {
            self.device.note_armed();
        }
        Ok(())
    }

    /// Changes the number of entries that the queue holds; EINVAL when more entries wait.
    pub fn resize(&self, depth: u32) -> Result<u32, Error> {
        check_depth(&self.device, depth)?;
        let mut queue = self.queue.lock();
        if queue.entries.len() > depth as usize {
            return Err(Error::Invalid("more completions wait than would fit"));
        }
        queue.depth = depth;
        Ok(depth)
    }

    /// Acknowledges completion events.
    pub fn ack_events(&self, count: u32) {
        self.completion_account.acknowledge(count);
    }

    /// Destroys the queue: EBUSY while queue pairs use it. Waits until every delivered event is acknowledged.
    pub fn destroy(&self) -> Result<(), Error> {
        self.users.end()?;
        if let Some(number) = self.number.get() {
            self.device.numbered_cqs.remove(*number);
        }
        self.disarm(&mut self.queue.lock());
        self.device.events.withdraw(&self.async_account);
        if let Some(channel) = &self.channel {
            channel.withdraw(self);
            self.completion_account.wait_acknowledged();
            channel.users.remove();
        }
        self.device.quotas.cq.give_back();
        Ok(())
    }

    /// Whether this is the device that it was created on.
    pub(crate) fn belongs_to(&self, device: &Arc<Device>) -> bool {
        Arc::ptr_eq(&self.device, device)
    }

    /// Whether the queue is empty; takes no lock.
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.len.load(Ordering::Acquire) == 0
    }

    /// Adds an entry, and returns whether that raised an event. An entry that does not fit overruns the queue, which
    /// the device is notified of.
    #[inline(always)]
    pub(crate) fn push(&self, wc: Wc) -> bool {
        let mut queue = self.queue.lock();
        queue.produced = queue.produced.wrapping_add(1);
        if queue.entries.len() >= queue.depth as usize && !self.make_room(&mut queue) {
            self.report_overrun(queue);
            return false;
        }
        queue.entries.push(wc);
        if let Some(times) = &mut queue.times {
            times.push_back(self.device.now());
        }
        self.publish_len(&queue);
        if !queue.waiters.is_empty() {
            self.resume_waiters(&mut queue);
        }
        let is_awaited = queue.armed.wants(&wc);
        if is_awaited {
            self.announce(&mut queue);
        }
        is_awaited
    }

    /// Drops the oldest entry of a full queue that ignores overruns; otherwise false.
    #[cold]
    fn make_room(&self, queue: &mut Queue) -> bool {
        if queue.ignores_overrun {
            queue.entries.forget_first(1);
            queue.announced = queue.announced.saturating_sub(1);
            if let Some(times) = &mut queue.times {
                times.pop_front();
            }
        }
        queue.ignores_overrun
    }

    #[cold]
    #[inline(never)]
    fn report_overrun(&self, mut queue: Guard<'_, Queue>) {
        // The entry is lost, but it counts.
        self.resume_waiters(&mut queue);
        let is_first = !self.overrun.swap(true, Ordering::AcqRel);
        drop(queue);
        if is_first {
            self.device.note_overrun(self.strong());
        }
    }

    /// Raises one event for all entries in the queue.
    #[inline(never)]
    fn announce(&self, queue: &mut Queue) {
        self.disarm(queue);
        queue.announced = queue.entries.len();
        if let Some(channel) = &self.channel {
            channel.notify(self.me.clone());
        }
    }

    /// Discards the entries of a queue pair that is reset or destroyed (IBTA volume 1, 10.3.1.1, and what the providers
    /// do).
    pub(crate) fn purge(&self, qpn: u32) {
        self.retain(|wc| wc.qpn != qpn);
    }

    /// Discards the completions of a shared receive queue of XRC that is destroyed.
    pub(crate) fn purge_receives_of(&self, srqn: u32) {
        self.retain(|wc| wc.srqn != srqn);
    }

    fn retain(&self, stays: impl Fn(&Wc) -> bool) {
        let mut guard = self.queue.lock();
        let queue = &mut *guard;
        if let Some(times) = &mut queue.times {
            let mut entries = queue.entries.as_slice().iter();
            times.retain(|_| entries.next().is_some_and(|wc| stays(wc)));
        }
        let announced = &queue.entries.as_slice()[..queue.announced];
        queue.announced = announced.iter().filter(|wc| stays(wc)).count();
        queue.entries.retain(stays);
        self.publish_len(queue);
    }

    fn disarm(&self, queue: &mut Queue) {
        if std::mem::replace(&mut queue.armed, Armed::No) != Armed::No {
            self.device.note_disarmed();
        }
    }

    #[inline(always)]
    fn publish_len(&self, queue: &Queue) {
        self.len.store(queue.entries.len() as u32, Ordering::Release);
    }

    fn strong(&self) -> Arc<Cq> {
        self.me.upgrade().expect("a method is running, so somebody holds the queue")
    }
}

fn check_depth(device: &Device, depth: u32) -> Result<(), Error> {
    match (1..=device.limits().max_cqe).contains(&depth) {
        true => Ok(()),
        false => Err(Error::Invalid("completion queue depth out of range")),
    }
}

/// The channel on which a program waits for completion events of its queues.
pub struct CompChannel {
    device: Arc<Device>,
    waiting: Mutex<VecDeque<Weak<Cq>>>,
    /// One token for every entry of `waiting`, except that a token may briefly be ahead or behind.
    tokens: Semaphore,
    pub(crate) users: UseCount,
}

impl Device {
    /// Makes a completion channel.
    pub fn create_channel(self: &Arc<Self>) -> Result<Arc<CompChannel>, Error> {
        self.check_open()?;
        CompChannel::new(self)
    }
}

impl CompChannel {
    fn new(device: &Arc<Device>) -> Result<Arc<CompChannel>, Error> {
        Ok(Arc::new(CompChannel {
            device: device.clone(),
            waiting: Mutex::new(VecDeque::new()),
            tokens: Semaphore::new()?,
            users: UseCount::default(),
        }))
    }

    /// Readable while events wait. Only `poll` and `fcntl` are of use to others.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.tokens.fd()
    }

    /// The queue whose event is the oldest; it counts as unacknowledged until [`Cq::ack_events`]. Waits for one
    /// unless the descriptor has O_NONBLOCK. Fails with `Again` (non-blocking) or `Interrupted`.
    pub fn get_event(&self) -> Result<Arc<Cq>, Error> {
        if !self.tokens.is_nonblocking() {
            self.device.wait_spinning(|| !self.waiting.lock().is_empty());
        }
        loop {
            self.tokens.take()?;
            // No event: the queue was destroyed between its token and this lock.
            if let Some(cq) = self.take_waiting() {
                return Ok(cq);
            }
        }
    }

    fn take_waiting(&self) -> Option<Arc<Cq>> {
        let mut waiting = self.waiting.lock();
        // A queue that was dropped instead of destroyed is gone.
        let cq = std::iter::from_fn(|| waiting.pop_front()).find_map(|cq| cq.upgrade())?;
        // Before the lock is released: destroying the queue must either withdraw the event or wait for its
        // acknowledgement.
        cq.completion_account.count_delivered();
        Some(cq)
    }

    /// Destroys the channel; EBUSY while completion queues use it.
    pub fn destroy(&self) -> Result<(), Error> {
        self.users.end()
    }

    /// Whether this is the device that it was created on.
    pub(crate) fn belongs_to(&self, device: &Arc<Device>) -> bool {
        Arc::ptr_eq(&self.device, device)
    }

    pub(crate) fn notify(&self, cq: Weak<Cq>) {
        self.waiting.lock().push_back(cq);
        self.tokens.post();
    }

    /// Discards the events of a queue that is being destroyed.
    pub(crate) fn withdraw(&self, cq: &Cq) {
        self.waiting.lock().retain(|waiting| {
            let ours = std::ptr::eq(waiting.as_ptr(), cq);
            if ours {
                self.tokens.try_take();
            }
            !ours
        });
    }
}
