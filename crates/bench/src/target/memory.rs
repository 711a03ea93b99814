//! A region in the memory of this process, for rehearsals and tests.

use std::sync::{Arc, Mutex, PoisonError};

use super::{Body, Completion, Connect, Target, TargetError};
use crate::application::Application;

/// The region's bytes, shared by all targets.
pub type SharedBytes = Arc<Mutex<Vec<u8>>>;

/// A target that accesses memory of this process. Accesses complete at the next poll.
pub struct MemoryTarget {
    bytes: SharedBytes,
    buffers: Vec<Vec<u8>>,
    done: Vec<Completion>,
}

impl MemoryTarget {
    /// A region of `len` bytes with the content before the application's first access.
    pub fn region(len: usize, application: Application) -> SharedBytes {
        let mut bytes = vec![0; len];
        application.fill(&mut bytes, 0, len as u64);
        Arc::new(Mutex::new(bytes))
    }

    /// A connection to the region.
    pub fn new(bytes: SharedBytes, slots: usize, slot_bytes: usize) -> MemoryTarget {
        MemoryTarget { bytes, buffers: vec![vec![0; slot_bytes]; slots], done: Vec::new() }
    }

    fn access(
        &mut self,
        (offset, len, tag): (u64, usize, u64),
        copy: impl FnOnce(&mut [u8], &mut [u8]),
        slot: usize,
    ) -> Result<(), TargetError> {
        let mut bytes = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        let offset = offset as usize;
        let region = bytes
            .get_mut(offset..offset.saturating_add(len))
            .ok_or_else(|| TargetError(format!("{len} bytes at {offset} are outside of the region")))?;
        copy(region, &mut self.buffers[slot][..len]);
        self.done.push(Completion { tag, outcome: Ok(()) });
        Ok(())
    }
}

impl Target for MemoryTarget {
    fn read(&mut self, offset: u64, slot: usize, len: usize, tag: u64) -> Result<(), TargetError> {
        self.access((offset, len, tag), |region, buffer| buffer.copy_from_slice(region), slot)
    }

    fn write(&mut self, offset: u64, slot: usize, len: usize, tag: u64) -> Result<(), TargetError> {
        self.access((offset, len, tag), |region, buffer| region.copy_from_slice(buffer), slot)
    }

    fn find_file(&mut self, slot: usize, tag: u64) -> Result<(), TargetError> {
        self.store(slot, &0_u64.to_le_bytes())?;
        self.done.push(Completion { tag, outcome: Ok(()) });
        Ok(())
    }

    fn commit(&mut self, _: u64, _: usize, tag: u64) -> Result<(), TargetError> {
        self.done.push(Completion { tag, outcome: Ok(()) });
        Ok(())
    }

    fn poll(&mut self, done: &mut Vec<Completion>) -> Result<(), TargetError> {
        done.append(&mut self.done);
        Ok(())
    }

    fn store(&mut self, slot: usize, bytes: &[u8]) -> Result<(), TargetError> {
        self.buffers[slot][..bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn load(&mut self, slot: usize, bytes: &mut [u8]) -> Result<(), TargetError> {
        bytes.copy_from_slice(&self.buffers[slot][..bytes.len()]);
        Ok(())
    }
}

impl Connect for SharedBytes {
    fn with_target(
        &self,
        _: usize,
        slots: usize,
        slot_bytes: usize,
        body: Body<'_>,
    ) -> Result<(), TargetError> {
        body(&mut MemoryTarget::new(Arc::clone(self), slots, slot_bytes));
        Ok(())
    }
}
