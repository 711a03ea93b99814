//! The memory of a baseline's node, in slabs that its processor gives and takes back.

use std::sync::Arc;

use terrace_nic::{Buffer, Error, Mr, MrRequest, Pd};

use crate::node::access;
use crate::page_store::{PAGE_BYTES, Page};

/// Address of a client's first slab, for READs and WRITEs.
const SPACE_BASE: u64 = 1 << 58;
/// Bytes that are zeroed at a time.
const ZERO_BYTES: usize = 64 << 10;

/// The memory of all slabs.
pub(super) struct SlabMemory {
    buffer: Buffer,
    slab_pages: u64,
}

/// The slabs.
pub(super) struct Frames {
    memory: Arc<SlabMemory>,
    /// Numbers of those that nobody has.
    free: Vec<u32>,
}

impl Frames {
    /// Slabs of so many pages, all free. What is left of `page_count` is not used.
    pub fn new(pd: &Arc<Pd>, page_count: u64, slab_pages: u64) -> Result<Frames, Error> {
        let count = u32::try_from(page_count / slab_pages).map_err(|_| Error::Invalid("too many slabs"))?;
        let bytes = page_count as usize * PAGE_BYTES;
        let buffer = Buffer::new(pd, bytes, access::LOCAL_WRITE)?;
        let memory = Arc::new(SlabMemory { buffer, slab_pages });
        Ok(Frames { memory, free: (0..count).rev().collect() })
    }

    pub fn memory(&self) -> &Arc<SlabMemory> {
        &self.memory
    }

    pub fn slab_pages(&self) -> u64 {
        self.memory.slab_pages
    }

    /// Pages that nobody has.
    pub fn free_pages(&self) -> u64 {
        self.free.len() as u64 * self.slab_pages()
    }

    pub fn take_slab(&mut self) -> Option<u32> {
        self.free.pop()
    }

    pub fn put_back(&mut self, slab: u32) {
        self.free.push(slab);
    }
}

impl SlabMemory {
    fn slab_bytes(&self) -> usize {
        self.slab_pages as usize * PAGE_BYTES
    }

    /// Registers a slab as number `index` of a client's space.
    pub fn register(&self, pd: &Arc<Pd>, slab: u32, index: u64) -> Result<Arc<Mr>, Error> {
        let (offset, length) = (slab as usize * self.slab_bytes(), self.slab_bytes() as u64);
        pd.reg_mr(MrRequest {
            addr: self.buffer.addr() + offset as u64,
            length,
            iova: SPACE_BASE.wrapping_add(index.wrapping_mul(length)),
            access: access::LOCAL_WRITE | access::REMOTE_READ | access::REMOTE_WRITE,
            paging: None,
        })
    }

    /// Overwrites a slab with zeros, which another client may READ before it WRITEs.
    pub fn clear(&self, slab: u32) -> Result<(), Error> {
        static ZEROS: [u8; ZERO_BYTES] = [0; ZERO_BYTES];
        let (begin, bytes) = (slab as usize * self.slab_bytes(), self.slab_bytes());
        let mut chunks = (0..bytes).step_by(ZERO_BYTES);
        chunks.try_for_each(|at| self.buffer.write(begin + at, &ZEROS[..ZERO_BYTES.min(bytes - at)]))
    }

    /// Copies a slab of one page out.
    pub fn read(&self, slab: u32, into: &mut Page) -> Result<(), Error> {
        self.buffer.read(slab as usize * self.slab_bytes(), into)
    }

    /// Copies a slab of one page in.
    pub fn write(&self, slab: u32, from: &Page) -> Result<(), Error> {
        self.buffer.write(slab as usize * self.slab_bytes(), from)
    }
}

/// A client's space that is reserved as a whole, in memory of its own.
pub(super) fn reserve(pd: &Arc<Pd>, page_count: u64) -> Result<Buffer, Error> {
    let access = access::LOCAL_WRITE | access::REMOTE_READ | access::REMOTE_WRITE;
    Buffer::new(pd, page_count as usize * PAGE_BYTES, access)
}
