//! A pager for tests: absent bytes lie in its store, and the test decides when an access to them ends. The tests of
//! other crates share this file.
//!
//! Absent memory is corrupted, so that a direct access to it is found out.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use terrace_hostmem::{AtomicOp, HostRange};
use terrace_memory::{AccessError, Pager, Transfer, Translation, Waker};
use terrace_sync::{Mutex, MutexGuard};

use super::units::{UNIT_BYTES, Units};

/// The byte that overwrites absent memory.
const SPOILED: u8 = 0xdb;

/// Memory as the program sees it, by offset.
pub trait Cells: Send + Sync {
    fn get(&self, offset: usize, out: &mut [u8]);
    fn set(&self, offset: usize, data: &[u8]);

    /// Stores `new` if the word is `_expected`, and returns whether it was. This default assumes that no other thread
    /// changes the memory: it always stores, in a separate step.
    fn exchange(&self, offset: usize, _expected: u64, new: u64) -> bool {
        self.set(offset, &new.to_ne_bytes());
        true
    }
}

/// Gives the time at which an access that starts now shall end.
pub type Schedule = Box<dyn FnMut() -> u64 + Send>;

pub struct TestPager {
    units: Units,
    /// The memory that exists, a part of the pager's range.
    memory: HostRange,
    cells: Box<dyn Cells>,
    // Not the standard library's mutex: while one thread ends accesses all the time, others might wait seconds for it.
    state: Mutex<State>,
}

struct State {
    /// The bytes of the absent units; as long as the memory.
    store: Vec<u8>,
    accesses: VecDeque<Access>,
    /// How many accesses may be under way.
    room: usize,
    schedule: Schedule,
    /// The wakers of refused accesses: too many were under way.
    starving: Vec<Waker>,
    /// How many accesses have started.
    asked: u64,
    /// What was appended. It begins at offset 0, and is not a part of the memory.
    records: Vec<u8>,
}

struct Access {
    what: What,
    range: HostRange,
    /// Units that were present at the start: the change of those was carried out at once.
    done: Vec<usize>,
    due: u64,
    transfer: Arc<TestTransfer>,
    waker: Waker,
}

enum What {
    Read,
    Write(Vec<u8>),
    Atomic(AtomicOp),
    Flush,
    Append { offset: u64 },
}

impl fmt::Debug for TestPager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TestPager").field("units", &self.units).finish_non_exhaustive()
    }
}

impl TestPager {
    /// A pager for a part of memory. Its range begins `ahead` bytes earlier, which moves the borders of units.
    /// All units are absent; the store is a copy of the memory.
    pub fn new(memory: HostRange, ahead: u64, cells: Box<dyn Cells>) -> Arc<TestPager> {
        let mut store = vec![0; memory.len as usize];
        cells.get(0, &mut store);
        cells.set(0, &vec![SPOILED; store.len()]);
        let range = HostRange { addr: memory.addr - ahead, len: memory.len + ahead };
        Arc::new(TestPager {
            units: Units::new(range),
            memory,
            cells,
            state: Mutex::new(State {
                store,
                accesses: VecDeque::new(),
                room: usize::MAX,
                schedule: Box::new(|| 0),
                starving: Vec::new(),
                asked: 0,
                records: Vec::new(),
            }),
        })
    }

    /// How many accesses may be under way, and when each ends.
    pub fn set_habits(&self, room: usize, schedule: Schedule) {
        let mut state = self.lock();
        (state.room, state.schedule) = (room, schedule);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Maps a unit, unless changes of it are under way.
    pub fn admit(&self, unit: usize) -> bool {
        let state = self.lock();
        let range = self.units.unit_range(unit);
        let changed = |access: &Access| !matches!(access.what, What::Read) && overlap(access.range, range);
        if self.units.is_unit_present(unit) || state.accesses.iter().any(changed) {
            return false;
        }
        if let Some((start, end)) = self.inside(range) {
            self.cells.set(start, &state.store[start..end]);
        }
        self.units.admit(unit);
        true
    }

    /// Unmaps a unit.
    pub fn expel(&self, unit: usize) -> bool {
        let mut state = self.lock();
        if !self.units.is_unit_present(unit) {
            return false;
        }
        self.units.expel(unit);
        if let Some((start, end)) = self.inside(self.units.unit_range(unit)) {
            self.cells.get(start, &mut state.store[start..end]);
            self.cells.set(start, &vec![SPOILED; end - start]);
        }
        true
    }

    /// The offsets of a range in `memory`.
    fn inside(&self, range: HostRange) -> Option<(usize, usize)> {
        let start = range.addr.max(self.memory.addr);
        let end = (range.addr + range.len).min(self.memory.addr + self.memory.len);
        (start < end).then(|| ((start - self.memory.addr) as usize, (end - self.memory.addr) as usize))
    }

    /// How many accesses are under way, and how many have started altogether.
    pub fn counts(&self) -> (usize, u64) {
        let state = self.lock();
        (state.accesses.len(), state.asked)
    }

    /// The time at which the next access ends.
    pub fn next_due(&self) -> Option<u64> {
        self.lock().accesses.iter().map(|access| access.due).min()
    }

    /// Ends the accesses that are due. Returns how many.
    pub fn complete_due(&self, now: u64) -> usize {
        let mut count = 0;
        // An access that overlaps an earlier one waits for the earlier one, whatever its own time.
        while self.complete_where(|access| access.due <= now, Ok(())) {
            count += 1;
        }
        count
    }

    /// Ends the oldest access. False when there is none.
    pub fn complete_one(&self, outcome: Result<(), AccessError>) -> bool {
        self.complete_where(|_| true, outcome)
    }

    /// Ends the latest access that overlaps no earlier one. False when there is none.
    pub fn complete_latest(&self) -> bool {
        let latest = self.lock().accesses.len();
        (0..latest).rev().any(|index| self.complete(index, Ok(())))
    }

    fn complete_where(&self, good: impl Fn(&Access) -> bool, outcome: Result<(), AccessError>) -> bool {
        let candidates: Vec<usize> = {
            let state = self.lock();
            (0..state.accesses.len()).filter(|index| good(&state.accesses[*index])).collect()
        };
        candidates.into_iter().any(|index| self.complete(index, outcome))
    }

    /// Ends an access, unless it overlaps an earlier one.
    fn complete(&self, index: usize, outcome: Result<(), AccessError>) -> bool {
        let mut state = self.lock();
        let Some(access) = state.accesses.get(index) else { return false };
        if state.accesses.iter().take(index).any(|earlier| overlap(earlier.range, access.range)) {
            return false;
        }
        let Some(access) = state.accesses.remove(index) else { return false };
        let result = outcome.map(|()| self.carry_out(&mut state, &access));
        let starving = std::mem::take(&mut state.starving);
        drop(state);
        *access.transfer.0.lock() = Some(result);
        (access.waker)();
        starving.iter().for_each(|waker| waker());
        true
    }

    fn carry_out(&self, state: &mut State, access: &Access) -> Vec<u8> {
        let HostRange { addr, len } = access.range;
        let due = |unit: usize| !access.done.contains(&unit);
        let mut before = vec![0; len as usize];
        match &access.what {
            What::Flush => {}
            What::Append { offset } => return offset.to_ne_bytes().to_vec(),
            What::Read => self.get(state, addr, &mut before),
            What::Write(data) => self.set(state, addr, data, due),
            What::Atomic(op) => loop {
                self.get(state, addr, &mut before);
                let value = u64::from_ne_bytes(before[..].try_into().expect("8 bytes"));
                let after = op.apply(value);
                // Other threads change present units at the same time.
                let unit = self.units.units_of(access.range).start;
                if !self.units.is_unit_present(unit) {
                    break self.set(state, addr, &after.to_ne_bytes(), due);
                }
                if !due(unit) || self.cells.exchange((addr - self.memory.addr) as usize, value, after) {
                    break;
                }
            },
        }
        before
    }

    fn get(&self, state: &State, addr: u64, out: &mut [u8]) {
        self.each_unit(addr, out.len(), |unit, offset, part| {
            let out = &mut out[part.clone()];
            match self.units.is_unit_present(unit) {
                true => self.cells.get(offset, out),
                false => out.copy_from_slice(&state.store[offset..offset + part.len()]),
            }
        });
    }

    fn set(&self, state: &mut State, addr: u64, data: &[u8], which: impl Fn(usize) -> bool) {
        self.each_unit(addr, data.len(), |unit, offset, part| {
            if !which(unit) {
                return;
            }
            let data = &data[part.clone()];
            match self.units.is_unit_present(unit) {
                true => self.cells.set(offset, data),
                false => state.store[offset..offset + part.len()].copy_from_slice(data),
            }
        });
    }

    fn each_unit(&self, addr: u64, len: usize, mut act: impl FnMut(usize, usize, std::ops::Range<usize>)) {
        let mut done = 0;
        while done < len {
            let here = addr + done as u64;
            let to_next = UNIT_BYTES - (here - self.units.range().addr) % UNIT_BYTES;
            let part = done..len.min(done + to_next as usize);
            let unit = ((here - self.units.range().addr) / UNIT_BYTES) as usize;
            act(unit, (here - self.memory.addr) as usize, part.clone());
            done = part.end;
        }
    }

    /// All that was appended.
    pub fn records(&self) -> Vec<u8> {
        self.lock().records.clone()
    }

    /// Reads the memory, present or not.
    pub fn peek(&self, addr: u64, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        self.get(&self.lock(), addr, &mut out);
        out
    }

    /// Writes the memory, present or not.
    pub fn poke(&self, addr: u64, data: &[u8]) {
        self.set(&mut self.lock(), addr, data, |_| true);
    }

    fn ask(&self, what: What, range: HostRange, waker: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        self.ask_locked(&mut self.lock(), what, range, waker)
    }

    fn ask_locked(
        &self,
        state: &mut State,
        what: What,
        range: HostRange,
        waker: &Waker,
    ) -> Result<Arc<dyn Transfer>, AccessError> {
        assert!(self.units.covers(range), "a pager may rely on that");
        if state.accesses.len() >= state.room {
            state.starving.push(waker.clone());
            return Err(AccessError::NotReady);
        }
        state.asked += 1;
        let earlier = state.accesses.iter().filter(|access| overlap(access.range, range));
        let not_before = earlier.map(|access| access.due).max().unwrap_or(0);
        let due = (state.schedule)().max(not_before);
        let transfer = Arc::new(TestTransfer::default());
        let present = |unit: &usize| self.units.is_unit_present(*unit);
        let mut done: Vec<usize> = self.units.units_of(range).filter(present).collect();
        match &what {
            What::Write(data) => self.set(state, range.addr, data, |unit| done.contains(&unit)),
            What::Atomic(_) if !done.is_empty() => {
                let access = Access {
                    what,
                    range,
                    done: Vec::new(),
                    due,
                    transfer: transfer.clone(),
                    waker: waker.clone(),
                };
                let before = self.carry_out(state, &access);
                *transfer.0.lock() = Some(Ok(before));
                return Ok(transfer);
            }
            _ => done.clear(),
        }
        let access = Access { what, range, done, due, transfer: transfer.clone(), waker: waker.clone() };
        state.accesses.push_back(access);
        Ok(transfer)
    }
}

fn overlap(a: HostRange, b: HostRange) -> bool {
    a.addr < b.addr + b.len && b.addr < a.addr + a.len
}

impl TestPager {
    pub fn units(&self) -> &Units {
        &self.units
    }
}

impl Pager for TestPager {
    fn translation(&self) -> &dyn Translation {
        &self.units
    }

    fn read(&self, range: HostRange, waker: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        assert!(range.len <= 64 << 10, "no more is fetched at a time");
        self.ask(What::Read, range, waker)
    }

    fn write(&self, addr: u64, data: &[u8], waker: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        self.ask(What::Write(data.to_vec()), HostRange { addr, len: data.len() as u64 }, waker)
    }

    fn atomic(&self, addr: u64, op: AtomicOp, waker: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        assert!(addr.is_multiple_of(8));
        self.ask(What::Atomic(op), HostRange { addr, len: 8 }, waker)
    }

    fn flush(&self, range: HostRange, waker: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        self.ask(What::Flush, range, waker)
    }

    fn append(&self, data: &[u8], _commit: bool, waker: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        let nowhere = HostRange { addr: self.memory.addr, len: 0 };
        let mut state = self.lock();
        let offset = state.records.len() as u64;
        let transfer = self.ask_locked(&mut state, What::Append { offset }, nowhere, waker)?;
        state.records.extend_from_slice(data);
        Ok(transfer)
    }
}

/// The result of an access, once it has ended.
#[derive(Debug, Default)]
struct TestTransfer(Mutex<Option<Result<Vec<u8>, AccessError>>>);

impl Transfer for TestTransfer {
    fn outcome(&self) -> Option<Result<(), AccessError>> {
        let result = self.0.lock();
        result.as_ref().map(|result| result.as_ref().map(drop).map_err(|error| *error))
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), AccessError> {
        let result = self.0.lock();
        let data = result.as_ref().ok_or(AccessError::NotReady)?.as_ref().map_err(|error| *error)?;
        let part = data.get(offset as usize..).and_then(|data| data.get(..out.len()));
        out.copy_from_slice(part.ok_or(AccessError::OutOfRange)?);
        Ok(())
    }

    /// The pager of these tests does not look whether an access is cancelled.
    fn cancel(&self) {
        self.0.lock().get_or_insert(Err(AccessError::Fault));
    }
}
