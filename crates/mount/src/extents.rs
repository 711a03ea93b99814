//! The dirty bytes of a file: adjacent writes are joined into extents. [`DirtyFile`](crate::write_behind::DirtyFile) says when they are
//! written.

use std::collections::BTreeMap;
use std::ops::Range;

use terrace_sync::Mutex;

/// An extent of so many bytes is full.
pub(crate) const EXTENT_BYTES: usize = 1 << 20;
/// The most extents that are written together, and no more than [`EXTENT_BYTES`] unless it is one: the network takes them in
/// parallel.
pub(crate) const EXTENTS_MAX: usize = 16;
/// What an extent costs besides its bytes: an entry of the map and a block of the heap. It counts as so many dirty bytes, so that
/// scattered writes of a few bytes take no more memory than others.
pub(crate) const EXTENT_COST: usize = 128;
/// Extents of fewer bytes have a buffer of their own, which grows.
const SMALL: usize = 64 << 10;
/// Buffers that are kept for further extents.
const SPARE_BUFFERS: usize = 16;

/// Buffers for further extents.
#[derive(Default)]
pub(crate) struct Buffers(Mutex<Vec<Vec<u8>>>);

impl Buffers {
    /// An empty buffer. Fresh memory would cost a page fault for each page of it.
    fn take(&self, len: usize) -> Vec<u8> {
        match len {
            SMALL.. => self.0.lock().pop().unwrap_or_else(|| Vec::with_capacity(EXTENT_BYTES)),
            _ => Vec::with_capacity(len),
        }
    }

    pub(crate) fn give_back(&self, mut buffer: Vec<u8>) {
        if buffer.capacity() >= EXTENT_BYTES {
            buffer.clear();
            let mut spare = self.0.lock();
            if spare.len() < SPARE_BUFFERS {
                spare.push(buffer);
            }
        }
    }
}

/// Adjacent dirty bytes.
struct Extent {
    bytes: Vec<u8>,
    /// Grows from extent to extent. What overwrites an extent takes its number, so that those who wait for the older bytes wait
    /// for the newer ones.
    number: u64,
}

/// Where a range of a file is.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// No byte of it is dirty.
    Clean,
    /// All of it is dirty; here it is.
    Dirty(Vec<u8>),
    /// Some bytes are dirty: they have to be written before the range is read.
    Mixed,
}

pub(crate) fn overlaps(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}

pub(crate) fn range_of(offset: u64, bytes: &[u8]) -> Range<u64> {
    offset..offset + bytes.len() as u64
}

/// The extents of a file.
#[derive(Default)]
pub(crate) struct Extents {
    /// By offset; they do not overlap.
    by_offset: BTreeMap<u64, Extent>,
    /// Their bytes.
    bytes: usize,
    /// The number of the newest extent.
    newest: u64,
    /// Where the extents ended that were taken last. The next ones are looked for from here on: before it are those that were to
    /// stay.
    taken_end: u64,
}

/// An extent that is to be written.
pub(crate) struct Taken {
    pub(crate) offset: u64,
    pub(crate) bytes: Vec<u8>,
    pub(crate) number: u64,
}

impl Extents {
    pub(crate) fn is_empty(&self) -> bool {
        self.by_offset.is_empty()
    }

    /// The number of the newest extent.
    pub(crate) fn newest(&self) -> u64 {
        self.newest
    }

    /// The memory that they take, in bytes.
    pub(crate) fn cost(&self) -> usize {
        self.bytes + self.by_offset.len() * EXTENT_COST
    }

    /// The end of the last byte; 0 if there is none.
    pub(crate) fn end(&self) -> u64 {
        self.by_offset.iter().next_back().map_or(0, |(&start, extent)| range_of(start, &extent.bytes).end)
    }

    /// Whether there are extents whose number is not larger than `newest`.
    pub(crate) fn has_until(&self, newest: u64) -> bool {
        self.by_offset.values().any(|extent| extent.number <= newest)
    }

    /// Looks for a range.
    pub(crate) fn find(&self, range: &Range<u64>) -> Found {
        let Some((&start, Extent { bytes, .. })) = self.by_offset.range(..range.end).next_back() else {
            return Found::Clean;
        };
        let extent = range_of(start, bytes);
        if extent.start <= range.start && range.end <= extent.end {
            let at = (range.start - start) as usize;
            return Found::Dirty(bytes[at..at + (range.end - range.start) as usize].to_vec());
        }
        if overlaps(&extent, range) { Found::Mixed } else { Found::Clean }
    }

    /// Drops all.
    pub(crate) fn clear(&mut self, buffers: &Buffers) {
        self.bytes = 0;
        for (_, extent) in std::mem::take(&mut self.by_offset) {
            buffers.give_back(extent.bytes);
        }
    }

    /// Takes up to [`EXTENTS_MAX`] extents that `is_free` and whose number is not larger than `newest`.
    pub(crate) fn take(&mut self, newest: u64, is_free: impl Fn(&Range<u64>) -> bool) -> Vec<Taken> {
        let mut bytes_sum = 0;
        let from_there_on =
            self.by_offset.range(self.taken_end..).chain(self.by_offset.range(..self.taken_end));
        let offsets = from_there_on
            .filter(|&(&start, extent)| extent.number <= newest && is_free(&range_of(start, &extent.bytes)))
            .take(EXTENTS_MAX)
            .take_while(|(_, extent)| {
                let is_first = bytes_sum == 0;
                bytes_sum += extent.bytes.len();
                is_first || bytes_sum <= EXTENT_BYTES
            });
        let offsets: Vec<u64> = offsets.map(|(&start, _)| start).collect();
        let mut taken = Vec::with_capacity(offsets.len());
        for offset in offsets {
            let Some(Extent { bytes, number }) = self.by_offset.remove(&offset) else { continue };
            self.bytes -= bytes.len();
            self.taken_end = range_of(offset, &bytes).end;
            taken.push(Taken { offset, bytes, number });
        }
        taken
    }

    /// Inserts a write. Returns whether its extent is full.
    pub(crate) fn insert(&mut self, offset: u64, bytes: &[u8], buffers: &Buffers) -> bool {
        if let Some((&start, extent)) = self.by_offset.range_mut(..=offset).next_back() {
            let at = offset - start;
            let extent = &mut extent.bytes;
            if at + bytes.len() as u64 <= extent.len() as u64 {
                extent[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
                return false;
            }
            let has_room = extent.len() + bytes.len() <= EXTENT_BYTES;
            if at == extent.len() as u64
                && has_room
                && !self.has_extent_in(offset..offset + bytes.len() as u64)
            {
                return self.append(start, bytes, buffers);
            }
        }
        let number = self.remove(range_of(offset, bytes), buffers).unwrap_or_else(|| {
            self.newest += 1;
            self.newest
        });
        let mut extent = buffers.take(bytes.len());
        extent.extend_from_slice(bytes);
        let is_full = extent.len() >= EXTENT_BYTES;
        self.bytes += bytes.len();
        self.by_offset.insert(offset, Extent { bytes: extent, number });
        is_full
    }

    fn has_extent_in(&self, range: Range<u64>) -> bool {
        self.by_offset.range(range).next().is_some()
    }

    /// Appends to the extent at `start`, which has room.
    fn append(&mut self, start: u64, bytes: &[u8], buffers: &Buffers) -> bool {
        let Some(Extent { bytes: extent, .. }) = self.by_offset.get_mut(&start) else {
            return false;
        };
        if extent.len() + bytes.len() > SMALL && extent.capacity() < EXTENT_BYTES {
            let mut larger = buffers.take(EXTENT_BYTES);
            larger.extend_from_slice(extent);
            *extent = larger;
        }
        extent.extend_from_slice(bytes);
        self.bytes += bytes.len();
        extent.len() >= EXTENT_BYTES
    }

    /// Removes a range from the extents: what is left of them on both sides becomes extents of its own. Returns the smallest
    /// number of those that had bytes of it.
    fn remove(&mut self, range: Range<u64>, buffers: &Buffers) -> Option<u64> {
        let first = self.by_offset.range(..=range.start).next_back().map_or(range.start, |(&start, _)| start);
        let hit: Vec<u64> = self
            .by_offset
            .range(first..range.end)
            .filter(|&(&start, extent)| overlaps(&range_of(start, &extent.bytes), &range))
            .map(|(&start, _)| start)
            .collect();
        let mut smallest = None;
        for start in hit {
            let Some(Extent { mut bytes, number }) = self.by_offset.remove(&start) else { continue };
            smallest = Some(smallest.map_or(number, |smallest: u64| smallest.min(number)));
            let extent = range_of(start, &bytes);
            self.bytes -= (extent.end.min(range.end) - extent.start.max(range.start)) as usize;
            if extent.end > range.end {
                let rest = bytes[(range.end - start) as usize..].to_vec();
                self.by_offset.insert(range.end, Extent { bytes: rest, number });
            }
            if start < range.start {
                bytes.truncate((range.start - start) as usize);
                self.by_offset.insert(start, Extent { bytes, number });
            } else {
                buffers.give_back(bytes);
            }
        }
        smallest
    }
}
