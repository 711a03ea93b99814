//! A node's memory: the cells that the device reads and writes, and the model of their content.
//!
//! Memory is allocated in chunks, each with its own region. Spans are never reused, and have gaps between them. All
//! memory starts with random content, so that the check at the end detects every wrong byte.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use terrace_nic::{Error, Mr, MrRequest, Pd, Sge};

use crate::paging::{Pagers, TestPager};
use crate::rng::{SimRng, Stream};

/// `ibv_access_flags`.
pub(crate) const LOCAL_WRITE: u32 = 1;
pub(crate) const REMOTE_WRITE: u32 = 1 << 1;
pub(crate) const REMOTE_READ: u32 = 1 << 2;
pub(crate) const REMOTE_ATOMIC: u32 = 1 << 3;
pub(crate) const MW_BIND: u32 = 1 << 4;
pub(crate) const FLUSH: u32 = 1 << 8 | 1 << 9;

/// The use of memory, which decides its region's access rights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Sources, result buffers and receive buffers, without remote access.
    Private,
    /// Memory with all remote access.
    Open,
    /// Memory with remote access through windows only.
    Windowed,
}

/// A part of a node's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    chunk: u32,
    start: u32,
    len: u32,
}

impl Span {
    pub fn len(self) -> usize {
        self.len as usize
    }

    /// Returns the part of `len` bytes that starts at `offset`.
    pub fn part(self, offset: usize, len: usize) -> Span {
        assert!(offset + len <= self.len(), "a part lies within its span");
        Span { chunk: self.chunk, start: self.start + offset as u32, len: len as u32 }
    }

    /// Returns the overlap of the two, as offsets into this span.
    pub fn overlap(self, other: Span) -> Option<std::ops::Range<usize>> {
        let start = self.start.max(other.start);
        let end = (self.start + self.len).min(other.start + other.len);
        let overlaps = self.chunk == other.chunk && start < end;
        overlaps.then(|| (start - self.start) as usize..(end - self.start) as usize)
    }

    /// Returns the offset of `other`, which lies within this span.
    pub fn offset_of(self, other: Span) -> usize {
        (other.start - self.start) as usize
    }
}

struct Chunk {
    purpose: Purpose,
    cells: Arc<[AtomicU64]>,
    /// The pager, if units of the chunk may be absent.
    pager: Option<Arc<TestPager>>,
    model: Vec<u8>,
    mr: Arc<Mr>,
    /// The address by which work requests name the first byte.
    iova: u64,
    used: usize,
}

/// A node's memory.
pub(crate) struct Memory {
    pd: Arc<Pd>,
    pagers: Option<Arc<Pagers>>,
    chunks: Vec<Chunk>,
    rng: SimRng,
}

/// The least size of a chunk.
const CHUNK_BYTES_MIN: usize = 64 << 10;

/// A byte that differs from the model.
#[derive(Debug)]
pub(crate) struct Difference {
    #[allow(dead_code)] // Debug prints it.
    pub address: u64,
    #[allow(dead_code)]
    pub purpose: Purpose,
    #[allow(dead_code)]
    pub actual: Vec<u8>,
    #[allow(dead_code)]
    pub model: Vec<u8>,
}

impl Memory {
    pub fn new(pd: &Arc<Pd>, seed: u64, node: u8, pagers: Option<Arc<Pagers>>) -> Memory {
        Memory { pd: pd.clone(), pagers, chunks: Vec::new(), rng: SimRng::new(seed, Stream::Memory(node)) }
    }

    /// Allocates memory, optionally aligned to 8 bytes. The model gets the same random content.
    pub fn take(&mut self, purpose: Purpose, len: usize, aligned: bool) -> Result<Span, Error> {
        let gap = if aligned { 0 } else { self.rng.index(16) };
        let fits = |chunk: &Chunk| {
            let start = if aligned { chunk.used.next_multiple_of(8) } else { chunk.used + gap };
            (chunk.purpose == purpose && start + len <= chunk.model.len()).then_some(start)
        };
        // Only the newest chunk of a purpose has free bytes.
        let found = self.chunks.iter().enumerate().rev().find(|(_, chunk)| chunk.purpose == purpose);
        let found = found.and_then(|(index, chunk)| Some((index, fits(chunk)?)));
        let (index, start) = match found {
            Some(found) => found,
            None => (self.add_chunk(purpose, (len + 8).max(CHUNK_BYTES_MIN))?, 0),
        };
        // One unused byte separates adjacent spans.
        self.chunks[index].used = start + len + 1;
        Ok(Span { chunk: index as u32, start: start as u32, len: len as u32 })
    }

    fn add_chunk(&mut self, purpose: Purpose, len: usize) -> Result<usize, Error> {
        let model = self.rng.bytes(len.next_multiple_of(8));
        let words = model.chunks_exact(8).map(|bytes| u64::from_ne_bytes(bytes.try_into().expect("8 bytes")));
        let cells: Arc<[AtomicU64]> = words.map(AtomicU64::new).collect();
        let access = match purpose {
            Purpose::Private => LOCAL_WRITE,
            Purpose::Open => LOCAL_WRITE | REMOTE_WRITE | REMOTE_READ | REMOTE_ATOMIC | FLUSH,
            Purpose::Windowed => LOCAL_WRITE | MW_BIND,
        };
        // Addresses on the wire must not depend on this process's address space.
        let iova = (self.chunks.len() as u64 + 1) << 32 | (self.rng.word() & 0xffff_fff8);
        let pagers = self.pagers.as_ref().filter(|_| purpose != Purpose::Private);
        let (pager, paging) = pagers.map(|pagers| pagers.add(cells.clone())).unzip();
        let request =
            MrRequest { addr: cells.as_ptr() as u64, length: model.len() as u64, iova, access, paging };
        let mr = self.pd.reg_mr(request)?;
        self.chunks.push(Chunk { purpose, cells, pager, model, mr, iova, used: 0 });
        Ok(self.chunks.len() - 1)
    }

    fn chunk(&self, span: Span) -> &Chunk {
        &self.chunks[span.chunk as usize]
    }

    /// Returns the address by which work requests and peers name the span.
    pub fn address(&self, span: Span) -> u64 {
        self.chunk(span).iova + u64::from(span.start)
    }

    /// Returns the end address of the span's region.
    pub fn region_end(&self, span: Span) -> u64 {
        self.chunk(span).iova + self.chunk(span).model.len() as u64
    }

    /// Returns the key of the span's region; lkey and rkey are the same.
    pub fn key(&self, span: Span) -> u32 {
        self.chunk(span).mr.lkey()
    }

    pub fn sge(&self, span: Span) -> Sge {
        Sge { addr: self.address(span), length: span.len, lkey: self.key(span) }
    }

    /// Returns the memory's content.
    pub fn actual(&self, span: Span) -> Vec<u8> {
        let Chunk { cells, pager, .. } = self.chunk(span);
        if let Some(pager) = pager {
            return pager.peek(cells.as_ptr() as u64 + u64::from(span.start), span.len());
        }
        let (start, end) = (span.start as usize, span.start as usize + span.len());
        let words = cells[start / 8..end.div_ceil(8).max(start / 8)].iter();
        let bytes: Vec<u8> = words.flat_map(|cell| cell.load(Ordering::Relaxed).to_ne_bytes()).collect();
        bytes[start % 8..start % 8 + span.len()].to_vec()
    }

    /// Returns the model's content.
    pub fn model(&self, span: Span) -> &[u8] {
        let start = span.start as usize;
        &self.chunk(span).model[start..start + span.len()]
    }

    /// Sets the model's content.
    pub fn expect(&mut self, span: Span, bytes: &[u8]) {
        let start = span.start as usize;
        let model = &mut self.chunks[span.chunk as usize].model;
        model[start..start + span.len()].copy_from_slice(bytes);
    }

    /// Copies the memory's content into the model.
    pub fn accept(&mut self, span: Span) {
        let actual = self.actual(span);
        self.expect(span, &actual);
    }

    /// Stores bytes into memory and model, as the program does.
    pub fn store(&mut self, span: Span, bytes: &[u8]) {
        self.expect(span, bytes);
        let chunk = &self.chunks[span.chunk as usize];
        if let Some(pager) = &chunk.pager {
            return pager.poke(chunk.cells.as_ptr() as u64 + u64::from(span.start), bytes);
        }
        let (start, end) = (span.start as usize, span.start as usize + span.len());
        for index in start / 8..end.div_ceil(8) {
            let word: [u8; 8] = chunk.model[index * 8..index * 8 + 8].try_into().expect("8 bytes");
            // Only the program's own bytes of the word: the device may be writing the others.
            let mask = (0..8).fold([0u8; 8], |mut mask, byte| {
                mask[byte] = if (start..end).contains(&(index * 8 + byte)) { 0xff } else { 0 };
                mask
            });
            let mask = u64::from_ne_bytes(mask);
            let old = chunk.cells[index].load(Ordering::Relaxed);
            let new = old & !mask | u64::from_ne_bytes(word) & mask;
            chunk.cells[index].store(new, Ordering::Relaxed);
        }
    }

    /// The first byte in which memory and model differ.
    pub fn difference(&self) -> Option<Difference> {
        (0..self.chunks.len()).find_map(|index| {
            let chunk = &self.chunks[index];
            let whole = Span { chunk: index as u32, start: 0, len: chunk.model.len() as u32 };
            let actual = self.actual(whole);
            let at = actual.iter().zip(&chunk.model).position(|(actual, model)| actual != model)?;
            let shown = at..(at + 32).min(actual.len());
            Some(Difference {
                address: chunk.iova + at as u64,
                purpose: chunk.purpose,
                actual: actual[shown.clone()].to_vec(),
                model: chunk.model[shown].to_vec(),
            })
        })
    }

    /// Deregisters the regions.
    pub fn close(&mut self) -> Result<(), Error> {
        self.chunks.drain(..).try_for_each(|chunk| chunk.mr.dereg())
    }
}
