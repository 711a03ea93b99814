//! A node's memory, twice: the cells that the device reads and writes, and the model of their content.
//!
//! Memory comes in chunks, each a region of its own. Places are never reused and have gaps between them. All memory
//! is filled with noise, so that the check at the end finds every stray byte.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use terrace_nic::{Error, Mr, MrRequest, Pd, Sge};

use crate::dice::{Dice, Stream};
use crate::paging::{Pagers, TestPager};

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
    /// Sources, landing places and receive buffers: no remote access.
    Private,
    /// All remote access is permitted.
    Open,
    /// Remote access only through windows.
    Windowed,
}

/// A part of a node's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    chunk: u32,
    start: u32,
    len: u32,
}

impl Place {
    pub fn len(self) -> usize {
        self.len as usize
    }

    /// The part of `len` bytes that begins `offset` bytes into the place.
    pub fn part(self, offset: usize, len: usize) -> Place {
        assert!(offset + len <= self.len(), "a part lies within its place");
        Place { chunk: self.chunk, start: self.start + offset as u32, len: len as u32 }
    }

    /// The overlap of the two, as offsets into this place.
    pub fn overlap(self, other: Place) -> Option<std::ops::Range<usize>> {
        let start = self.start.max(other.start);
        let end = (self.start + self.len).min(other.start + other.len);
        let overlaps = self.chunk == other.chunk && start < end;
        overlaps.then(|| (start - self.start) as usize..(end - self.start) as usize)
    }

    /// The offset of `other`, which lies within this place.
    pub fn offset_of(self, other: Place) -> usize {
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
    dice: Dice,
}

/// A chunk holds at least this many bytes.
const CHUNK_BYTES_MIN: usize = 64 << 10;

/// A byte that differs from the model.
#[derive(Debug)]
pub(crate) struct Difference {
    #[allow(dead_code)] // For people, through Debug.
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
        Memory { pd: pd.clone(), pagers, chunks: Vec::new(), dice: Dice::new(seed, Stream::Memory(node)) }
    }

    /// Allocates fresh memory, aligned to 8 bytes if asked. The model gets the same noise.
    pub fn take(&mut self, purpose: Purpose, len: usize, aligned: bool) -> Result<Place, Error> {
        let gap = if aligned { 0 } else { self.dice.index(16) };
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
        // One unused byte separates adjacent places.
        self.chunks[index].used = start + len + 1;
        Ok(Place { chunk: index as u32, start: start as u32, len: len as u32 })
    }

    fn add_chunk(&mut self, purpose: Purpose, len: usize) -> Result<usize, Error> {
        let model = self.dice.bytes(len.next_multiple_of(8));
        let words = model.chunks_exact(8).map(|bytes| u64::from_ne_bytes(bytes.try_into().expect("8 bytes")));
        let cells: Arc<[AtomicU64]> = words.map(AtomicU64::new).collect();
        let access = match purpose {
            Purpose::Private => LOCAL_WRITE,
            Purpose::Open => LOCAL_WRITE | REMOTE_WRITE | REMOTE_READ | REMOTE_ATOMIC | FLUSH,
            Purpose::Windowed => LOCAL_WRITE | MW_BIND,
        };
        // Addresses on the wire must not depend on this process's address space.
        let iova = (self.chunks.len() as u64 + 1) << 32 | (self.dice.word() & 0xffff_fff8);
        let pagers = self.pagers.as_ref().filter(|_| purpose != Purpose::Private);
        let (pager, paging) = pagers.map(|pagers| pagers.add(cells.clone())).unzip();
        let request =
            MrRequest { addr: cells.as_ptr() as u64, length: model.len() as u64, iova, access, paging };
        let mr = self.pd.reg_mr(request)?;
        self.chunks.push(Chunk { purpose, cells, pager, model, mr, iova, used: 0 });
        Ok(self.chunks.len() - 1)
    }

    fn chunk(&self, place: Place) -> &Chunk {
        &self.chunks[place.chunk as usize]
    }

    /// The address by which work requests and peers name the place.
    pub fn address(&self, place: Place) -> u64 {
        self.chunk(place).iova + u64::from(place.start)
    }

    /// One past the last address of the region that the place is in.
    pub fn region_end(&self, place: Place) -> u64 {
        self.chunk(place).iova + self.chunk(place).model.len() as u64
    }

    /// The key of the region; lkey and rkey are the same.
    pub fn key(&self, place: Place) -> u32 {
        self.chunk(place).mr.lkey()
    }

    pub fn sge(&self, place: Place) -> Sge {
        Sge { addr: self.address(place), length: place.len, lkey: self.key(place) }
    }

    /// The memory's content.
    pub fn actual(&self, place: Place) -> Vec<u8> {
        let Chunk { cells, pager, .. } = self.chunk(place);
        if let Some(pager) = pager {
            return pager.peek(cells.as_ptr() as u64 + u64::from(place.start), place.len());
        }
        let (start, end) = (place.start as usize, place.start as usize + place.len());
        let words = cells[start / 8..end.div_ceil(8).max(start / 8)].iter();
        let bytes: Vec<u8> = words.flat_map(|cell| cell.load(Ordering::Relaxed).to_ne_bytes()).collect();
        bytes[start % 8..start % 8 + place.len()].to_vec()
    }

    /// The model's content.
    pub fn model(&self, place: Place) -> &[u8] {
        let start = place.start as usize;
        &self.chunk(place).model[start..start + place.len()]
    }

    /// Changes the model.
    pub fn expect(&mut self, place: Place, bytes: &[u8]) {
        let start = place.start as usize;
        let model = &mut self.chunks[place.chunk as usize].model;
        model[start..start + place.len()].copy_from_slice(bytes);
    }

    /// Copies the memory's content into the model.
    pub fn accept(&mut self, place: Place) {
        let actual = self.actual(place);
        self.expect(place, &actual);
    }

    /// Stores bytes into memory and model, as the program does.
    pub fn store(&mut self, place: Place, bytes: &[u8]) {
        self.expect(place, bytes);
        let chunk = &self.chunks[place.chunk as usize];
        if let Some(pager) = &chunk.pager {
            return pager.poke(chunk.cells.as_ptr() as u64 + u64::from(place.start), bytes);
        }
        let (start, end) = (place.start as usize, place.start as usize + place.len());
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
            let whole = Place { chunk: index as u32, start: 0, len: chunk.model.len() as u32 };
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
