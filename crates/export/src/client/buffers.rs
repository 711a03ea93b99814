//! Registered memory for one-sided accesses. Data is copied between it and the program's memory.

use std::sync::Arc;
use std::time::Instant;

use terrace_nic::{APPEND_LEN_MAX, Buffer, Error, Pd, Sge};
use terrace_sync::{Condvar, Mutex};

use super::interrupt;
use crate::error::ExportError;

/// The most bytes of a record, which may not be divided.
pub const RECORD_BYTES_MAX: usize = APPEND_LEN_MAX as usize;
/// Bytes of a slot.
pub const SLOT_BYTES: usize = 256 << 10;
/// Slots. A slot has 8 bytes more, for an append's offset.
const SLOTS: usize = 32;
const STRIDE: usize = SLOT_BYTES + 64;

/// `ibv_access_flags`.
const LOCAL_WRITE: u32 = 1;

/// The slots of a session.
pub struct Buffers {
    memory: Buffer,
    records: Buffer,
    free: Mutex<Free>,
    freed: Condvar,
}

/// The unused parts of the memory.
struct Free {
    slots: Vec<usize>,
    has_records: bool,
    /// The session has ended: memory of accesses that were abandoned does not come back.
    is_lost: bool,
}

/// A slot, which is free again when this is dropped.
pub struct Slot<'a> {
    buffers: &'a Buffers,
    index: usize,
    /// The NIC may access it. It is not used again before the session ends, because the NIC repeats requests from it, or
    /// writes a late response to it.
    is_in_flight: bool,
}

impl Buffers {
    /// Registers the memory. Pages take memory when they are used.
    pub fn new(pd: &Arc<Pd>) -> Result<Buffers, Error> {
        Ok(Buffers {
            memory: Buffer::new(pd, SLOTS * STRIDE, LOCAL_WRITE)?,
            records: Buffer::new(pd, RECORD_BYTES_MAX + 64, LOCAL_WRITE)?,
            free: Mutex::new(Free { slots: (0..SLOTS).rev().collect(), has_records: true, is_lost: false }),
            freed: Condvar::default(),
        })
    }

    /// A free slot, if there is one.
    pub fn try_take(&self) -> Option<Slot<'_>> {
        let index = self.free.lock().slots.pop()?;
        Some(Slot { buffers: self, index, is_in_flight: false })
    }

    /// Waits for a free slot.
    ///
    /// # Errors
    /// `Lost` after the deadline, or when the session has ended; `Interrupted`.
    pub fn take(&self, deadline: Instant) -> Result<Slot<'_>, ExportError> {
        let index = self.wait(deadline, |free| free.slots.pop())?;
        Ok(Slot { buffers: self, index, is_in_flight: false })
    }

    /// Waits until `take` returns a part of what is free.
    fn wait<T>(&self, deadline: Instant, take: impl Fn(&mut Free) -> Option<T>) -> Result<T, ExportError> {
        loop {
            let mut free = self.free.lock();
            if let Some(taken) = take(&mut free) {
                return Ok(taken);
            }
            if free.is_lost || Instant::now() >= deadline {
                return Err(ExportError::Lost);
            }
            self.freed.wait_until(&mut free, interrupt::next_check(deadline));
            drop(free);
            interrupt::check()?;
        }
    }

    /// The session has ended: nobody waits any more.
    pub fn lose(&self) {
        self.free.lock().is_lost = true;
        self.freed.notify_all();
    }

    /// The memory for a record, and for 8 bytes behind it: a slot, or for longer ones memory of which there is one piece.
    ///
    /// # Errors
    /// As for [`Buffers::take`].
    pub fn take_record(&self, len: usize, deadline: Instant) -> Result<RecordMemory<'_>, ExportError> {
        if len <= SLOT_BYTES {
            return Ok(RecordMemory::Slot(self.take(deadline)?));
        }
        self.wait(deadline, |free| std::mem::take(&mut free.has_records).then_some(()))?;
        Ok(RecordMemory::Long(LongRecord { buffers: self, is_in_flight: false }))
    }

    /// The number of free slots.
    #[cfg(test)]
    pub fn free_slots(&self) -> usize {
        self.free.lock().slots.len()
    }
}

impl Slot<'_> {
    fn at(&self) -> usize {
        self.index * STRIDE
    }

    /// Says whether a work request that names the slot is in flight.
    pub fn set_in_flight(&mut self, is_in_flight: bool) {
        self.is_in_flight = is_in_flight;
    }

    /// Copies bytes in.
    pub fn write(&self, data: &[u8]) -> Result<(), Error> {
        self.buffers.memory.write(self.at(), data)
    }

    /// Copies bytes out.
    pub fn read(&self, into: &mut [u8]) -> Result<(), Error> {
        self.buffers.memory.read(self.at(), into)
    }

    /// Its first bytes, for a work request.
    pub fn sge(&self, len: usize) -> Sge {
        self.buffers.memory.sge(self.at(), len as u32)
    }

    /// The 8 bytes behind the slot, for a work request.
    pub fn offset_sge(&self) -> Sge {
        self.buffers.memory.sge(self.at() + SLOT_BYTES, 8)
    }

    /// The number in these 8 bytes.
    pub fn offset(&self) -> Result<u64, Error> {
        let mut bytes = [0; 8];
        self.buffers.memory.read(self.at() + SLOT_BYTES, &mut bytes)?;
        Ok(u64::from_ne_bytes(bytes))
    }
}

/// The memory of a record.
pub enum RecordMemory<'a> {
    Slot(Slot<'a>),
    Long(LongRecord<'a>),
}

/// The memory for long records, which is free again when this is dropped, as a [`Slot`] is.
pub struct LongRecord<'a> {
    buffers: &'a Buffers,
    is_in_flight: bool,
}

impl RecordMemory<'_> {
    /// Says whether a work request that names the memory is in flight.
    pub fn set_in_flight(&mut self, now: bool) {
        match self {
            RecordMemory::Slot(slot) => slot.set_in_flight(now),
            RecordMemory::Long(long) => long.is_in_flight = now,
        }
    }

    /// Copies a record in. Returns the elements of a work request for it and for its offset.
    pub fn write(&self, record: &[u8]) -> Result<[Sge; 2], Error> {
        match self {
            RecordMemory::Slot(slot) => {
                slot.write(record)?;
                Ok([slot.sge(record.len()), slot.offset_sge()])
            }
            RecordMemory::Long(LongRecord { buffers, .. }) => {
                let buffer = &buffers.records;
                buffer.write(0, record)?;
                Ok([buffer.sge(0, record.len() as u32), buffer.sge(RECORD_BYTES_MAX, 8)])
            }
        }
    }

    /// The offset that the NIC has written.
    pub fn offset(&self) -> Result<u64, Error> {
        match self {
            RecordMemory::Slot(slot) => slot.offset(),
            RecordMemory::Long(LongRecord { buffers, .. }) => {
                let mut bytes = [0; 8];
                buffers.records.read(RECORD_BYTES_MAX, &mut bytes)?;
                Ok(u64::from_ne_bytes(bytes))
            }
        }
    }
}

impl Drop for Slot<'_> {
    fn drop(&mut self) {
        if !self.is_in_flight {
            self.buffers.free.lock().slots.push(self.index);
            // Threads wait for other memory, too.
            self.buffers.freed.notify_all();
        }
    }
}

impl Drop for LongRecord<'_> {
    fn drop(&mut self) {
        if !self.is_in_flight {
            self.buffers.free.lock().has_records = true;
            self.buffers.freed.notify_all();
        }
    }
}
