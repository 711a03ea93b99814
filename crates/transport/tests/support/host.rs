//! Memory with keys: one flat address space from 0, regions in it, a shared receive queue, and a log of region
//! operations. Parts of it may be absent: the test ends peers' accesses to those.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

use terrace_transport::{
    AtomicOp, BindWindow, Completion, Data, Deferred, Host, LocalError, QpEvent, RecvWr, RemoteAccess,
    RemoteError, Sge, StagingBudget, StagingReservation, Time, Wc, WcStatus,
};

/// Rights of a region, by letter: `l`ocal write, remote `r`ead, remote `w`rite, remote `a`tomic, flush to `g`lobal
/// visibility, flush to `p`ersistence, `m` for a memory window, which the peer may invalidate, and `e` for a region to
/// whose end the peer may append.
#[derive(Clone, Debug)]
pub struct Region {
    pub addr: u64,
    pub len: u64,
    pub rights: String,
    /// Whether a flush of it fails.
    pub broken: bool,
}

impl Region {
    fn covers(&self, addr: u64, len: u64) -> bool {
        addr >= self.addr && addr.checked_add(len).is_some_and(|end| end <= self.addr + self.len)
    }

    fn allows(&self, right: char) -> bool {
        self.rights.contains(right)
    }
}

/// What a queue pair has reported to its host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    SendComplete(Wc),
    RecvComplete(Wc),
    Raised(QpEvent),
}

/// The NIC around the queue pair under test. `FAST` says whether the queue pair may take its fast paths.
#[derive(Debug, Default)]
pub struct Memory<const FAST: bool = true> {
    /// Whether the peer may no longer access memory without packets.
    pub is_withdrawn: Cell<bool>,
    /// Reports, oldest first.
    pub events: RefCell<VecDeque<Event>>,
    pub bytes: RefCell<Vec<u8>>,
    pub regions: RefCell<BTreeMap<u32, Region>>,
    pub shared_receives: RefCell<VecDeque<RecvWr>>,
    /// Executed flushes, binds and invalidations, and accesses to absent memory that began; oldest first.
    pub log: RefCell<VecDeque<String>>,
    /// Bytes that the queue pair has moved through memory.
    pub moved_bytes: Cell<u64>,
    /// The data of the run that arrives.
    pub run: RefCell<Vec<u8>>,
    /// How long an unreliable service pauses after each packet, in nanoseconds.
    pub pause_ns: Cell<Option<u64>>,
    /// Addresses whose memory is absent.
    pub absent: RefCell<Vec<Range<u64>>>,
    /// Whether requests for absent memory get an RNR NAK.
    pub faulting: Cell<bool>,
    pub slots: Arc<Slots>,
    /// Index of this memory among those that share the slots.
    pub number: usize,
    pub under_way: RefCell<VecDeque<UnderWay>>,
    /// What peers have appended to regions, by key. It begins at offset 0.
    pub records: RefCell<BTreeMap<u32, Vec<u8>>>,
    /// Whether APPENDs end only when the test ends them.
    pub defers_appends: Cell<bool>,
    pub staging: RefCell<Arc<StagingBudget>>,
    /// Shared receive queues of XRC, by number.
    pub srqs: RefCell<BTreeMap<u32, VecDeque<RecvWr>>>,
    /// Regions that only requests for one of these queues can reach, by key.
    pub behind: RefCell<BTreeMap<u32, u32>>,
    /// The queue that the request in execution names; 0 for none.
    pub srqn: Cell<u32>,
}

/// Slots for accesses to absent memory; several memories may share them. An access holds its slot until it has ended
/// and its data is dropped.
#[derive(Debug, Default)]
pub struct Slots(Mutex<SlotCount>);

#[derive(Debug, Default)]
struct SlotCount {
    /// `None` for any number.
    free: Option<usize>,
    /// The memories that found no slot.
    waiting: Vec<usize>,
    /// Those whose queue pairs are to be woken because a slot was freed.
    wakeups: Vec<usize>,
    /// Whether another user takes the next freed slot.
    is_stolen: bool,
}

impl Slots {
    fn lock(&self) -> MutexGuard<'_, SlotCount> {
        self.0.lock().expect("one thread")
    }

    /// Sets the number of free slots.
    pub fn set(&self, free: Option<usize>) {
        self.lock().free = free;
    }

    /// Gives the next freed slot to another user.
    pub fn steal(&self) {
        self.lock().is_stolen = true;
    }

    fn take(&self, memory: usize) -> bool {
        let mut count = self.lock();
        match &mut count.free {
            Some(0) => {
                if !count.waiting.contains(&memory) {
                    count.waiting.push(memory);
                }
                return false;
            }
            Some(free) => *free -= 1,
            None => {}
        }
        true
    }

    fn give_back(&self) {
        let mut count = self.lock();
        if !std::mem::take(&mut count.is_stolen) {
            count.free = count.free.map(|free| free + 1);
        }
        let waiting = std::mem::take(&mut count.waiting);
        count.wakeups.extend(waiting);
    }

    /// Takes the memories whose queue pairs the caller is to wake because a slot was freed.
    pub fn take_wakeups(&self) -> Vec<usize> {
        std::mem::take(&mut self.lock().wakeups)
    }
}

/// An access to absent memory.
#[derive(Debug)]
pub struct UnderWay {
    what: What,
    transfer: Arc<Transfer>,
}

#[derive(Debug)]
enum What {
    Read { va: u64, len: u64 },
    Write { va: u64, data: Vec<u8> },
    Atomic { va: u64, op: AtomicOp },
    Flush,
    Append { offset: u64 },
}

/// An access's result, once it has ended.
pub struct Transfer(Mutex<Option<Result<Vec<u8>, RemoteError>>>, Arc<Slots>);

impl Drop for Transfer {
    fn drop(&mut self) {
        self.1.give_back();
    }
}

impl std::fmt::Debug for Transfer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Transfer")
    }
}

#[derive(Debug)]
struct Handle(Arc<Transfer>);

impl Deferred for Handle {
    fn outcome(&self) -> Option<Result<(), RemoteError>> {
        let result = self.0.0.lock().expect("one thread");
        result.as_ref().map(|result| result.as_ref().map(drop).map_err(|error| *error))
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), RemoteError> {
        let result = self.0.0.lock().expect("one thread");
        let Some(Ok(data)) = result.as_ref() else { return Err(RemoteError::NotReady) };
        out.copy_from_slice(&data[offset as usize..][..out.len()]);
        Ok(())
    }
}

/// A byte's initial content: adjacent pages differ.
pub fn pattern(addr: u64) -> u8 {
    (addr ^ (addr >> 8).wrapping_mul(31) ^ (addr >> 16).wrapping_mul(57)).wrapping_mul(167) as u8
}

impl Memory {
    /// An address space of `len` bytes, filled with the pattern, without regions.
    pub fn new(len: usize) -> Memory {
        Memory::with_paths(len)
    }
}

impl<const FAST: bool> Memory<FAST> {
    /// The same, with or without fast paths.
    pub fn with_paths(len: usize) -> Memory<FAST> {
        let bytes = (0..len as u64).map(pattern).collect();
        Memory { bytes: RefCell::new(bytes), ..Memory::default() }
    }

    fn check_withdrawn(&self, wc: &Wc) {
        let is_error = wc.status != WcStatus::Success;
        assert!(!is_error || self.is_withdrawn.get(), "{wc:?} precedes the withdrawal");
    }

    /// The oldest report.
    pub fn poll_event(&self) -> Option<Event> {
        self.events.borrow_mut().pop_front()
    }

    pub fn add_region(&self, key: u32, addr: u64, len: u64, rights: &str) {
        let region = Region { addr, len, rights: rights.to_owned(), broken: false };
        self.regions.borrow_mut().insert(key, region);
    }

    pub fn read(&self, addr: u64, len: usize) -> Vec<u8> {
        self.bytes.borrow()[addr as usize..][..len].to_vec()
    }

    pub fn write(&self, addr: u64, data: &[u8]) {
        self.bytes.borrow_mut()[addr as usize..][..data.len()].copy_from_slice(data);
    }

    fn local(&self, key: u32, addr: u64, len: u64, write: bool) -> Result<(), LocalError> {
        let regions = self.regions.borrow();
        let region = regions.get(&key).filter(|_| self.is_in_sight(key)).ok_or(LocalError::Protection)?;
        let good = region.covers(addr, len) && (!write || region.allows('l'));
        if good { Ok(()) } else { Err(LocalError::Protection) }
    }

    fn is_in_sight(&self, key: u32) -> bool {
        self.behind.borrow().get(&key).is_none_or(|srqn| *srqn == self.srqn.get())
    }

    fn remote(&self, key: u32, addr: u64, len: u64, right: char) -> Result<(), RemoteError> {
        let regions = self.regions.borrow();
        let region = regions.get(&key).filter(|_| self.is_in_sight(key)).ok_or(RemoteError::Access)?;
        let good = region.covers(addr, len) && region.allows(right);
        if good { Ok(()) } else { Err(RemoteError::Access) }
    }

    /// Cuts a part of a list's concatenation into pieces of memory.
    fn pieces(sges: &[Sge], mut offset: u64, mut len: usize) -> Vec<(Sge, usize)> {
        let mut pieces = Vec::new();
        for sge in sges {
            let skipped = offset.min(sge.length.into());
            offset -= skipped;
            let here = (u64::from(sge.length) - skipped).min(len as u64) as usize;
            if here > 0 {
                pieces.push((Sge { addr: sge.addr + skipped, length: here as u32, lkey: sge.lkey }, here));
                len -= here;
            }
        }
        assert_eq!(len, 0, "the queue pair keeps within the list");
        pieces
    }

    /// The error for a range that is absent in part.
    fn presence(&self, va: u64, len: u64) -> Result<(), RemoteError> {
        let absent = self.absent.borrow();
        if !absent.iter().any(|range| range.start < va + len && va < range.end) {
            return Ok(());
        }
        Err(if self.faulting.get() { RemoteError::Retry } else { RemoteError::NotReady })
    }

    fn defer(
        &self,
        name: &str,
        key: u32,
        va: u64,
        len: u64,
        what: What,
    ) -> Result<Box<dyn Deferred>, RemoteError> {
        if !self.slots.take(self.number) {
            return Err(RemoteError::NotReady);
        }
        self.log.borrow_mut().push_back(format!("{name} key={key:#x} va={va:#x} len={len}"));
        let transfer = Arc::new(Transfer(Mutex::default(), self.slots.clone()));
        self.under_way.borrow_mut().push_back(UnderWay { what, transfer: transfer.clone() });
        Ok(Box::new(Handle(transfer)))
    }

    /// Ends an access to absent memory. False if there is none with this index.
    pub fn complete(&self, index: usize, outcome: Result<(), RemoteError>) -> bool {
        let Some(UnderWay { what, transfer }) = self.under_way.borrow_mut().remove(index) else {
            return false;
        };
        let result = outcome.map(|()| match what {
            What::Flush => Vec::new(),
            What::Read { va, len } => self.read(va, len as usize),
            What::Write { va, data } => {
                self.write(va, &data);
                Vec::new()
            }
            What::Atomic { va, op } => self.perform(va, op).to_ne_bytes().to_vec(),
            What::Append { offset } => offset.to_ne_bytes().to_vec(),
        });
        *transfer.0.lock().expect("one thread") = Some(result);
        true
    }

    fn perform(&self, va: u64, op: AtomicOp) -> u64 {
        let before = u64::from_ne_bytes(self.read(va, 8).try_into().expect("8 bytes were read"));
        let after = match op {
            AtomicOp::CompareSwap { compare, swap } if before == compare => swap,
            AtomicOp::CompareSwap { .. } => before,
            AtomicOp::FetchAdd { add } => before.wrapping_add(add),
            AtomicOp::Write { value } => value,
            AtomicOp::MaskedCompareSwap { compare, swap, compare_mask, swap_mask }
                if before & compare_mask == compare & compare_mask =>
            {
                before & !swap_mask | swap & swap_mask
            }
            AtomicOp::MaskedCompareSwap { .. } => before,
            // Bit by bit, unlike the NIC: the carry out of a field's highest bit is lost.
            AtomicOp::MaskedFetchAdd { add, boundary } => {
                let (mut sum, mut carry) = (0, 0);
                for bit in (0..64).map(|index| 1u64 << index) {
                    let ones = u32::from(before & bit != 0) + u32::from(add & bit != 0) + carry;
                    sum |= if ones & 1 == 1 { bit } else { 0 };
                    carry = if boundary & bit == 0 { ones >> 1 } else { 0 };
                }
                sum
            }
        };
        self.write(va, &after.to_ne_bytes());
        before
    }

    fn bytes_of(&self, data: Data<'_>) -> Vec<u8> {
        match data {
            Data::Bytes(bytes) => bytes.to_vec(),
            Data::Run(_) => self.run.borrow().clone(),
        }
    }

    fn count(&self, len: usize) {
        self.moved_bytes.set(self.moved_bytes.get() + len as u64);
    }
}

impl<const FAST: bool> Host for Memory<FAST> {
    const HAS_FAST_PATHS: bool = FAST;

    fn complete_send(&self, completion: impl Completion) {
        let wc = completion.entry();
        self.check_withdrawn(&wc);
        self.events.borrow_mut().push_back(Event::SendComplete(wc));
    }

    fn complete_receive(&self, completion: impl Completion) {
        let wc = completion.entry();
        self.check_withdrawn(&wc);
        self.events.borrow_mut().push_back(Event::RecvComplete(wc));
    }

    fn withdraw(&self) {
        self.is_withdrawn.set(true);
    }

    fn raise(&self, event: QpEvent) {
        self.events.borrow_mut().push_back(Event::Raised(event));
    }

    fn gather(&self, sges: &[Sge], offset: u64, out: &mut [u8]) -> Result<(), LocalError> {
        let mut at = 0;
        for (piece, len) in Self::pieces(sges, offset, out.len()) {
            self.local(piece.lkey, piece.addr, len as u64, false)?;
            out[at..at + len].copy_from_slice(&self.read(piece.addr, len));
            at += len;
        }
        self.count(at);
        Ok(())
    }

    fn scatter(&self, sges: &[Sge], offset: u64, data: &[u8]) -> Result<(), LocalError> {
        let mut at = 0;
        for (piece, len) in Self::pieces(sges, offset, data.len()) {
            self.local(piece.lkey, piece.addr, len as u64, true)?;
            self.write(piece.addr, &data[at..at + len]);
            at += len;
        }
        self.count(at);
        Ok(())
    }

    fn scatter_to_receive(&self, sges: &[Sge], offset: u64, data: Data<'_>) -> Result<(), LocalError> {
        self.scatter(sges, offset, &self.bytes_of(data))
    }

    fn remote_check(&self, rkey: u32, va: u64, len: u64, access: RemoteAccess) -> Result<(), RemoteError> {
        let right = match access {
            RemoteAccess::Read => 'r',
            RemoteAccess::Write => 'w',
            RemoteAccess::Atomic => 'a',
            RemoteAccess::Flush => 'g',
        };
        self.remote(rkey, va, len, right)?;
        self.presence(va, len)
    }

    fn remote_read(&self, rkey: u32, va: u64, out: &mut [u8]) -> Result<(), RemoteError> {
        self.remote(rkey, va, out.len() as u64, 'r')?;
        self.presence(va, out.len() as u64)?;
        out.copy_from_slice(&self.read(va, out.len()));
        self.count(out.len());
        Ok(())
    }

    fn remote_write(&self, rkey: u32, va: u64, data: Data<'_>) -> Result<(), RemoteError> {
        let data = self.bytes_of(data);
        self.remote(rkey, va, data.len() as u64, 'w')?;
        self.presence(va, data.len() as u64)?;
        self.write(va, &data);
        self.count(data.len());
        Ok(())
    }

    fn remote_atomic(&self, rkey: u32, va: u64, op: AtomicOp) -> Result<u64, RemoteError> {
        self.remote(rkey, va, 8, if matches!(op, AtomicOp::Write { .. }) { 'w' } else { 'a' })?;
        if !va.is_multiple_of(8) {
            return Err(RemoteError::Invalid);
        }
        self.presence(va, 8)?;
        Ok(self.perform(va, op))
    }

    fn fetch(&self, rkey: u32, va: u64, len: u64) -> Result<Box<dyn Deferred>, RemoteError> {
        self.remote(rkey, va, len, 'r')?;
        self.defer("fetch", rkey, va, len, What::Read { va, len })
    }

    fn put(&self, rkey: u32, va: u64, data: Data<'_>) -> Result<Box<dyn Deferred>, RemoteError> {
        let data = self.bytes_of(data);
        self.remote(rkey, va, data.len() as u64, 'w')?;
        self.defer("put", rkey, va, data.len() as u64, What::Write { va, data })
    }

    fn put_atomic(&self, rkey: u32, va: u64, op: AtomicOp) -> Result<Box<dyn Deferred>, RemoteError> {
        self.remote(rkey, va, 8, if matches!(op, AtomicOp::Write { .. }) { 'w' } else { 'a' })?;
        self.defer("put-atomic", rkey, va, 8, What::Atomic { va, op })
    }

    fn flush(
        &self,
        rkey: u32,
        va: u64,
        len: u64,
        _placement: u8,
        _selectivity: u8,
    ) -> Result<Box<dyn Deferred>, RemoteError> {
        self.defer("flush-later", rkey, va, len, What::Flush)
    }

    fn remote_flush(
        &self,
        rkey: u32,
        va: u64,
        len: u64,
        placement: u8,
        selectivity: u8,
    ) -> Result<(), RemoteError> {
        let regions = self.regions.borrow();
        let region = regions.get(&rkey).ok_or(RemoteError::Access)?;
        let whole_region = selectivity == 1;
        let permitted =
            [(1, 'g'), (2, 'p')].iter().all(|(bit, right)| placement & bit == 0 || region.allows(*right));
        if !permitted || !(whole_region || region.covers(va, len)) {
            return Err(RemoteError::Access);
        }
        if region.broken {
            return Err(RemoteError::Operation);
        }
        if !whole_region {
            self.presence(va, len)?;
        }
        let what = format!(
            "flush key={rkey:#x} va={va:#x} len={len} placement={placement} selectivity={selectivity}"
        );
        self.log.borrow_mut().push_back(what);
        Ok(())
    }

    fn check_append(&self, rkey: u32) -> Result<(), RemoteError> {
        let regions = self.regions.borrow();
        let region = regions.get(&rkey).ok_or(RemoteError::Access)?;
        if region.allows('w') && region.allows('e') { Ok(()) } else { Err(RemoteError::Access) }
    }

    fn reserve_staging(&self, bytes: u32) -> Option<StagingReservation> {
        self.staging.borrow().reserve(bytes)
    }

    fn copy_run(&self, out: &mut [u8]) -> Result<(), RemoteError> {
        out.copy_from_slice(&self.run.borrow());
        Ok(())
    }

    fn append(&self, rkey: u32, record: &[u8], commit: bool) -> Result<Box<dyn Deferred>, RemoteError> {
        self.check_append(rkey)?;
        let offset = self.records.borrow().get(&rkey).map_or(0, Vec::len) as u64;
        let name = if commit { "commit-append" } else { "append" };
        let len = record.len() as u64;
        let deferred = self.defer(name, rkey, offset, len, What::Append { offset })?;
        self.records.borrow_mut().entry(rkey).or_default().extend_from_slice(record);
        if !self.defers_appends.get() {
            let latest = self.under_way.borrow().len() - 1;
            self.complete(latest, Ok(()));
        }
        Ok(deferred)
    }

    fn remote_invalidate(&self, rkey: u32) -> Result<(), RemoteError> {
        let mut regions = self.regions.borrow_mut();
        if !regions.get(&rkey).is_some_and(|region| region.allows('m')) {
            return Err(RemoteError::Access);
        }
        regions.remove(&rkey);
        self.log.borrow_mut().push_back(format!("invalidate key={rkey:#x}"));
        Ok(())
    }

    fn local_invalidate(&self, rkey: u32) -> Result<(), LocalError> {
        self.regions.borrow_mut().remove(&rkey).ok_or(LocalError::Protection)?;
        self.log.borrow_mut().push_back(format!("invalidate key={rkey:#x}"));
        Ok(())
    }

    fn bind_window(&self, bind: &BindWindow) -> Result<(), LocalError> {
        self.local(bind.region_lkey, bind.addr, bind.length, false)?;
        self.add_region(bind.new_rkey, bind.addr, bind.length, "rwam");
        self.log.borrow_mut().push_back(format!("bind key={:#x}", bind.new_rkey));
        Ok(())
    }

    fn with_srq<T>(&self, srqn: u32, act: impl FnOnce(&Self) -> T) -> Option<T> {
        if !self.srqs.borrow().contains_key(&srqn) {
            return None;
        }
        let before = self.srqn.replace(srqn);
        let result = act(self);
        self.srqn.set(before);
        Some(result)
    }

    fn take_shared_receive(&self) -> Option<RecvWr> {
        if let Some(queue) = self.srqs.borrow_mut().get_mut(&self.srqn.get()) {
            return queue.pop_front();
        }
        self.shared_receives.borrow_mut().pop_front()
    }

    fn return_shared_receive(&self, receive: RecvWr) -> Option<RecvWr> {
        match self.srqs.borrow_mut().get_mut(&self.srqn.get()) {
            Some(queue) => queue.push_front(receive),
            None => self.shared_receives.borrow_mut().push_front(receive),
        }
        None
    }

    fn pace(&self, now: Time, _len: usize) -> Option<Time> {
        self.pause_ns.get().map(|pause_ns| now.after_ns(pause_ns))
    }
}
