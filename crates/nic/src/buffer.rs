//! Registered memory for callers without unsafe code.

use std::any::Any;
use std::sync::Arc;

use terrace_memory::{Accessor, Zeros};
use terrace_transport::Sge;

use crate::device::Pd;
use crate::error::Error;
use crate::mr::{Mr, MrRequest};

/// Registered memory that is freed with its region. Peers, too, can change the bytes at any time. So no caller gets a
/// reference to them, and reads copy them out.
pub struct Buffer {
    mr: Arc<Mr>,
    memory: Memory,
}

/// Never read: only its address counts.
enum Memory {
    Heap(Box<[u8]>),
    /// Only used pages take memory.
    Mapped(Zeros),
    /// Memory of another owner, which is dropped after the registration.
    Foreign {
        addr: u64,
        len: usize,
        _owner: Box<dyn Any + Send + Sync>,
    },
}

/// Length in bytes from which on a mapping, whose unused pages take no memory, is worth two system calls and a page
/// fault for each page.
const MAPPED_BYTES_MIN: usize = 256 << 10;

impl Memory {
    fn new(len: usize) -> Result<Memory, Error> {
        if len < MAPPED_BYTES_MIN {
            return Ok(Memory::Heap(vec![0; len].into_boxed_slice()));
        }
        Zeros::new(len).map(Memory::Mapped).map_err(|_| Error::NoMemory("memory for a buffer"))
    }

    fn addr(&self) -> u64 {
        match self {
            Memory::Heap(memory) => memory.as_ptr() as u64,
            Memory::Mapped(zeros) => zeros.addr(),
            Memory::Foreign { addr, .. } => *addr,
        }
    }

    fn len(&self) -> usize {
        match self {
            Memory::Heap(memory) => memory.len(),
            Memory::Mapped(zeros) => zeros.len(),
            Memory::Foreign { len, .. } => *len,
        }
    }
}

impl Buffer {
    /// Registers `len` bytes of zeros with these `ibv_access_flags`. See [`MrRequest`] for the errors.
    pub fn new(pd: &Arc<Pd>, len: usize, access: u32) -> Result<Buffer, Error> {
        Buffer::register(pd, Memory::new(len)?, access)
    }

    /// Registers `len` bytes at `addr`, which `owner` keeps in place. The owner is dropped after the last access.
    ///
    /// The memory may change at any time, so no reference to it may exist while peers or work requests access it. Accesses
    /// to unmapped memory fail. See [`MrRequest`] for the errors.
    pub fn over(
        pd: &Arc<Pd>,
        addr: u64,
        len: usize,
        owner: Box<dyn Any + Send + Sync>,
        access: u32,
    ) -> Result<Buffer, Error> {
        Buffer::register(pd, Memory::Foreign { addr, len, _owner: owner }, access)
    }

    fn register(pd: &Arc<Pd>, memory: Memory, access: u32) -> Result<Buffer, Error> {
        let (addr, length) = (memory.addr(), memory.len() as u64);
        let request = MrRequest { addr, length, iova: addr, access, paging: None };
        Ok(Buffer { mr: pd.reg_mr(request)?, memory })
    }

    /// First byte, as in work requests and peers' requests.
    pub fn addr(&self) -> u64 {
        self.mr.addr()
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.memory.len()
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The region.
    pub fn mr(&self) -> &Arc<Mr> {
        &self.mr
    }

    /// A part of it, for a work request.
    pub fn sge(&self, offset: usize, length: u32) -> Sge {
        Sge { addr: self.addr() + offset as u64, length, lkey: self.mr.lkey() }
    }

    /// Copies bytes out.
    ///
    /// # Errors
    /// EINVAL for a range that is not within the buffer.
    pub fn read(&self, offset: usize, out: &mut [u8]) -> Result<(), Error> {
        self.mr.pd().copy_out(&self.sge(0, 0), offset as u64, out)
    }

    /// Copies bytes in.
    ///
    /// # Errors
    /// EINVAL for a range that is not within the buffer, and for one that was registered without local write access.
    pub fn write(&self, offset: usize, data: &[u8]) -> Result<(), Error> {
        let (pd, va) = (self.mr.pd(), self.addr().wrapping_add(offset as u64));
        let who = Accessor::local(pd.handle(), 0);
        pd.device()
            .memory
            .write(who, self.mr.lkey(), va, data)
            .map_err(|_| Error::Invalid("not within the buffer, or not permitted"))
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // Memory that peers or queue pairs could still write to must not go back to the allocator.
        if self.mr.dereg().is_err() {
            std::mem::forget(std::mem::replace(&mut self.memory, Memory::Heap(Box::default())));
        }
    }
}
