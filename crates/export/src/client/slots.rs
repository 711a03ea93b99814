//! Registered memory for accesses in flight, in slots of one size.

use std::sync::Arc;

use terrace_nic::{Buffer, Error, Sge};

use crate::ends::Domain;

/// `ibv_access_flags`.
const LOCAL_WRITE: u32 = 1;
/// Bytes behind each access's, for a record's offset.
const OFFSET_BYTES: usize = 64;

/// The slots. They belong to the domain of one connection.
pub struct Slots {
    buffer: Buffer,
    stride: usize,
    /// Dropped after the buffer.
    _domain: Arc<Domain>,
}

impl Slots {
    /// Registers so many slots for accesses of up to `access_bytes`.
    ///
    /// # Errors
    /// As for [`Buffer::new`].
    pub fn new(domain: &Arc<Domain>, count: usize, access_bytes: usize) -> Result<Slots, Error> {
        let stride = access_bytes.next_multiple_of(OFFSET_BYTES) + OFFSET_BYTES;
        let buffer = Buffer::new(&domain.pd, count * stride, LOCAL_WRITE)?;
        Ok(Slots { buffer, stride, _domain: domain.clone() })
    }

    /// Copies the bytes of an access in.
    ///
    /// # Errors
    /// As for [`Buffer::write`].
    pub fn write(&self, slot: usize, data: &[u8]) -> Result<(), Error> {
        self.buffer.write(slot * self.stride, data)
    }

    /// Copies the first `len` bytes of an access out.
    ///
    /// # Errors
    /// As for [`Buffer::read`].
    pub fn read(&self, slot: usize, len: usize) -> Result<Vec<u8>, Error> {
        let mut bytes = vec![0; len];
        self.buffer.read(slot * self.stride, &mut bytes)?;
        Ok(bytes)
    }

    /// The first `len` bytes of an access, for a work request.
    pub fn sge(&self, slot: usize, len: usize) -> Sge {
        self.buffer.sge(slot * self.stride, len as u32)
    }

    /// The place of a record's offset, for a work request.
    pub fn offset_sge(&self, slot: usize) -> Sge {
        self.buffer.sge(self.offset_at(slot), 8)
    }

    /// The offset that the NIC has written there.
    ///
    /// # Errors
    /// As for [`Buffer::read`].
    pub fn offset(&self, slot: usize) -> Result<u64, Error> {
        let mut bytes = [0; 8];
        self.buffer.read(self.offset_at(slot), &mut bytes)?;
        Ok(u64::from_ne_bytes(bytes))
    }

    fn offset_at(&self, slot: usize) -> usize {
        (slot + 1) * self.stride - OFFSET_BYTES
    }
}
