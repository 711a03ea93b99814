//! Completion queues.

use std::cell::{RefCell, RefMut};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Weak};

use smallvec::SmallVec;
use terrace_sync::{BiasedMutex, Guard};
use terrace_transport::{Time, Wc, WcStatus};

use crate::channel::CompChannel;
use crate::device::Device;
use crate::entries::{Entries, Entry};
use crate::error::Error;
use crate::events::EventAccount;
use crate::limits::Life;

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
    pub(crate) life: Life,
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

impl Cq {
    pub(crate) fn new(device: &Arc<Device>, init: CqInit) -> Result<Arc<Cq>, Error> {
        check_depth(device, init.depth)?;
        if init.channel.as_ref().is_some_and(|channel| !channel.belongs_to(device)) {
            return Err(Error::Invalid("completion channel of another device"));
        }
        device.quotas.cq.take()?;
        if let Some(channel) = &init.channel {
            channel.life.hold();
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
            }),
            len: AtomicU32::new(0),
            overrun: AtomicBool::new(false),
            life: Life::default(),
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

    /// Passes up to `max` entries to `take`, which must not call verbs, nor panic, and returns how many. When the queue
    /// is empty, the device makes progress first. Fails with `Overrun` when the queue has overrun and is empty.
    #[inline]
    pub fn poll(&self, max: usize, take: &mut impl FnMut(&Wc)) -> Result<usize, Error> {
        match self.poll_waiting(max, take) {
            0 => self.poll_empty(max, take),
            count => Ok(count),
        }
    }

    /// The first half of [`Cq::poll`]: takes entries that wait already. In a caller that calls the halves one by one,
    /// each with a `take` of its own, most entries are taken without a call.
    #[inline(always)]
    pub fn poll_waiting(&self, max: usize, take: &mut impl FnMut(&Wc)) -> usize {
        if self.is_empty() {
            return 0;
        }
        self.take_waiting(max, take)
    }

    /// The second half, if the first one took nothing: makes progress if the queue is empty.
    #[inline(never)]
    pub fn poll_empty(&self, max: usize, take: &mut impl FnMut(&Wc)) -> Result<usize, Error> {
        let bypass = CompletionBypass { cq: self, room: max.min(CAUGHT_MAX), wcs: RefCell::default() };
        let has_entries = self.look(Some(&bypass));
        // Not moved: they were written just now.
        let caught = bypass.wcs.borrow();
        let count = caught.len();
        if count == 0 {
            return if has_entries { self.take(max, take) } else { self.nothing_yet() };
        }
        caught.iter().for_each(&mut *take);
        // An error here recurs at the next poll.
        let rest = if has_entries && max > count { self.take(max - count, take).unwrap_or(0) } else { 0 };
        Ok(count + rest)
    }

    /// [`Cq::poll`] with the time of each entry, by the device's clock; of a queue that keeps no times, 0.
    pub fn poll_timed(&self, max: usize, take: &mut impl FnMut(&Wc, Time)) -> Result<usize, Error> {
        if !self.look(None) {
            return self.nothing_yet();
        }
        let count = self.take_entries(max, |entries, times| match times {
            Some(times) => {
                let times = times.drain(..entries.len());
                entries.iter().zip(times).for_each(|(wc, time)| take(wc, time));
            }
            None => entries.iter().for_each(|wc| take(wc, Time::default())),
        });
        self.taken(count)
    }

    /// The same as [`Cq::poll`] without making progress: for a program that makes progress in another way.
    pub fn take(&self, max: usize, take: &mut impl FnMut(&Wc)) -> Result<usize, Error> {
        self.taken(self.take_waiting(max, take))
    }

    #[inline(always)]
    fn take_waiting(&self, max: usize, take: &mut impl FnMut(&Wc)) -> usize {
        self.take_entries(max, |entries, times| {
            if let Some(times) = times {
                forget_times(times, entries.len());
            }
            entries.iter().for_each(|wc| take(wc));
        })
    }

    /// Makes progress if the queue is empty. Returns whether it has entries then.
    #[inline]
    fn look(&self, bypass: Option<&CompletionBypass<'_>>) -> bool {
        if self.is_empty() {
            let polls = self.device.note_poll();
            self.device.progress_for(self, polls, bypass);
        }
        !self.is_empty()
    }

    /// The result of a poll that has taken so many.
    fn taken(&self, count: usize) -> Result<usize, Error> {
        if count == 0 { self.nothing() } else { Ok(count) }
    }

    fn nothing_yet(&self) -> Result<usize, Error> {
        // The program will poll again at once.
        std::hint::spin_loop();
        self.nothing()
    }

    /// The result of a poll of an empty queue.
    fn nothing(&self) -> Result<usize, Error> {
        // Entries may have come meanwhile, before it overran.
        if self.overrun.load(Ordering::Acquire) && self.is_empty() { Err(Error::Overrun) } else { Ok(0) }
    }

    #[inline(always)]
    fn take_entries(&self, max: usize, take: impl FnOnce(&[Entry], Option<&mut VecDeque<Time>>)) -> usize {
        let mut guard = self.queue.lock();
        let queue = &mut *guard;
        let count = queue.entries.len().min(max);
        take(&queue.entries.as_slice()[..count], queue.times.as_mut());
        queue.entries.forget_first(count);
        queue.announced = queue.announced.saturating_sub(count);
        self.publish_len(queue);
        count
    }

    /// Arms the queue for one event at the next completion, or at the next one that is solicited or an error. The event
    /// comes at once if such an entry waits and was added after the last event. IBTA volume 1, 11.4.2.2, leaves those
    /// entries to the program, which is to poll again after arming; but UCX polls, arms and sleeps, because RNICs do
    /// raise the event. Older entries raise none: perftest arms before it takes the entries that it was woken for, and
    /// then reads every event as an entry. Without a channel this does nothing; as with other devices, it is no mistake
    /// then.
    pub fn request_notify(&self, solicited_only: bool) -> Result<(), Error> {
        self.life.check()?;
        if self.channel.is_none() {
            return Ok(());
        }
        let mut queue = self.queue.lock();
        let before = queue.armed;
        // A queue that is armed for any event stays so when it is armed for solicited ones (IBTA volume 1, 11.4.2.2).
        let wish = match before != Armed::Any && solicited_only {
            true => Armed::Solicited,
            false => Armed::Any,
        };
        if queue.entries.as_slice()[queue.announced..].iter().any(|wc| wish.wants(wc)) {
            self.announce(&mut queue);
            return Ok(());
        }
        queue.armed = wish;
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
        self.life.end()?;
        self.disarm(&mut self.queue.lock());
        self.device.events.withdraw(&self.async_account);
        if let Some(channel) = &self.channel {
            channel.withdraw(self);
            self.completion_account.wait_settled();
            channel.life.release();
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
        if queue.entries.len() >= queue.depth as usize {
            self.note_overrun(queue);
            return false;
        }
        queue.entries.push(wc);
        if let Some(times) = &mut queue.times {
            times.push_back(self.device.now());
        }
        self.publish_len(&queue);
        let is_awaited = queue.armed.wants(&wc);
        if is_awaited {
            self.announce(&mut queue);
        }
        is_awaited
    }

    #[cold]
    #[inline(never)]
    fn note_overrun(&self, queue: Guard<'_, Queue>) {
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
        self.keep(|wc| wc.qpn != qpn);
    }

    /// Discards the completions of a shared receive queue of XRC that is destroyed.
    pub(crate) fn purge_receives_of(&self, srqn: u32) {
        self.keep(|wc| wc.srqn != srqn);
    }

    fn keep(&self, stays: impl Fn(&Wc) -> bool) {
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

#[cold]
#[inline(never)]
fn forget_times(times: &mut VecDeque<Time>, count: usize) {
    times.drain(..count);
}

/// A response, and the send completion that it brings.
const CAUGHT_MAX: usize = 2;

/// A poll of an empty queue: the first completions may go to it without going through the queue.
pub(crate) struct CompletionBypass<'a> {
    cq: &'a Cq,
    room: usize,
    wcs: RefCell<SmallVec<[Wc; CAUGHT_MAX]>>,
}

impl CompletionBypass<'_> {
    /// Where the next completion of that queue goes, if it may bypass the queue: the queue is empty, and no event is to
    /// be raised.
    #[inline]
    pub fn room(&self, cq: &Cq) -> Option<RefMut<'_, SmallVec<[Wc; CAUGHT_MAX]>>> {
        let wcs = self.wcs.borrow_mut();
        let may = std::ptr::eq(cq, self.cq)
            && wcs.len() < self.room
            && cq.is_empty()
            && !cq.overrun.load(Ordering::Acquire)
            && !cq.device.engine.has_armed_cqs();
        may.then_some(wcs)
    }

    /// Whether completions have bypassed the queue.
    pub fn has_caught(&self) -> bool {
        !self.wcs.borrow().is_empty()
    }
}

fn check_depth(device: &Device, depth: u32) -> Result<(), Error> {
    match (1..=device.limits().max_cqe).contains(&depth) {
        true => Ok(()),
        false => Err(Error::Invalid("completion queue depth out of range")),
    }
}
