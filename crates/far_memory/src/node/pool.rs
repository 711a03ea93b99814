//! The pages that a node lends, and the queue of free ones.
//!
//! The free-page queue is a ring of page addresses, big-endian as work queue entries have them. Chains take a page by a
//! masked fetch-and-add on `head` and an atomic exchange of the element for [`EMPTY`](Pool::empty), and return one by a
//! masked fetch-and-add on `tail` and a WRITE. An element is taken once, whatever the heads are. When the pool is empty,
//! `head` runs past `tail`; [`Pool::rebuild`] repairs that.
//!
//! A page's address is not that of its memory. It has fixed bits in places where no other part of an address has them,
//! so that eight bytes that straddle two entries of a table are in no region:
//!
//! ```text
//!   byte   0    1    2    3 to 6      7
//!          a5   5a   3c   page << 4   77      (page number: at most 27 bits; low half of byte 6: 1)
//! ```

use std::sync::Arc;

use terrace_nic::{Buffer, Error, Mr, MrRequest, Pd};

use super::access;
use crate::page_store::PAGE_BYTES;

/// Address of the first page.
const POOL_BASE: u64 = 0xa55a_3c00_0000_0177;
/// Pages of a pool at most: 512 GiB. Byte 3 of an address then never is byte 0 of one.
pub(crate) const POOL_PAGES_MAX: u64 = 1 << 27;
/// Address of the ring, a multiple of its length.
const RING_BASE: u64 = 1 << 60;
/// Elements of a ring at least: `head` may run so far past `tail` before it is repaired.
const RING_LEN_MIN: u64 = 1 << 17;
/// Address of `head` for work requests; `tail` is a cache line behind it.
const COUNTERS_BASE: u64 = 1 << 59;
const TAIL_OFFSET: u64 = 64;
/// Elements that are read or written at a time.
const CHUNK: usize = 512;

/// The pages and the free-page queue.
pub(crate) struct Pool {
    /// The pages, and one that stores into an empty pool overwrite. No chain can read that one.
    frames: Buffer,
    /// The ring; behind it `head` and `tail`.
    ring: Buffer,
    page_count: u64,
    ring_len: u64,
}

/// The keys by which the chains of a protection domain access the pool.
pub(crate) struct PoolKeys {
    /// Reading pages.
    pub read: Arc<Mr>,
    /// Writing pages, and the one behind them.
    pub write: Arc<Mr>,
    pub ring: Arc<Mr>,
    pub counters: Arc<Mr>,
}

impl PoolKeys {
    /// Deregisters them.
    pub fn withdraw(&self) {
        for mr in [&self.read, &self.write, &self.ring, &self.counters] {
            // It fails only if the device has closed, and the region has ended with it.
            let _ = mr.dereg();
        }
    }
}

/// How the pool is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FreePages {
    pub count: u64,
    /// Whether stores have found the pool empty, so that the ring is to be repaired.
    pub is_overrun: bool,
}

impl Pool {
    /// A pool of free pages.
    pub fn new(pd: &Arc<Pd>, page_count: u64) -> Result<Pool, Error> {
        let ring_len = (2 * page_count).next_power_of_two().max(RING_LEN_MIN);
        let frames = Buffer::new(pd, (page_count as usize + 1) * PAGE_BYTES, access::LOCAL_WRITE)?;
        let ring = Buffer::new(pd, ring_len as usize * 8 + PAGE_BYTES, access::LOCAL_WRITE)?;
        let pool = Pool { frames, ring, page_count, ring_len };
        pool.write_ring(&mut (0..page_count))?;
        Ok(pool)
    }

    pub fn page_count(&self) -> u64 {
        self.page_count
    }

    fn ring_bytes(&self) -> u64 {
        self.ring_len * 8
    }

    /// Registers it for the chains of a protection domain.
    pub fn register(&self, pd: &Arc<Pd>) -> Result<PoolKeys, Error> {
        let register =
            |addr, length, iova, access| pd.reg_mr(MrRequest { addr, length, iova, access, paging: None });
        let (frames, ring) = (self.frames.addr(), self.ring.addr());
        let pool_bytes = self.page_count * PAGE_BYTES as u64;
        let mut made = Vec::with_capacity(4);
        let requests = [
            (frames, pool_bytes, POOL_BASE, access::LOCAL_WRITE | access::REMOTE_READ),
            (frames, pool_bytes + PAGE_BYTES as u64, POOL_BASE, access::LOCAL_WRITE | access::REMOTE_WRITE),
            (ring, self.ring_bytes(), RING_BASE, access::RING),
            (ring + self.ring_bytes(), 2 * TAIL_OFFSET, COUNTERS_BASE, access::RING),
        ];
        for (addr, length, iova, access) in requests {
            match register(addr, length, iova, access) {
                Ok(mr) => made.push(mr),
                Err(error) => {
                    made.iter().for_each(|mr: &Arc<Mr>| _ = mr.dereg());
                    return Err(error);
                }
            }
        }
        let [read, write, ring, counters] =
            made.try_into().map_err(|_| Error::NoMemory("keys of the pool"))?;
        Ok(PoolKeys { read, write, ring, counters })
    }

    /// What takes the place of a page's address in an empty queue: the address of the page behind the pool.
    pub fn empty(&self) -> u64 {
        address_of(self.page_count)
    }

    /// Addresses of `head` and `tail` for work requests.
    pub fn counters(&self) -> (u64, u64) {
        (COUNTERS_BASE, COUNTERS_BASE + TAIL_OFFSET)
    }

    /// The highest bit of the field of `head` and `tail` that a fetch-and-add changes.
    pub fn boundary(&self) -> u64 {
        self.ring_bytes() / 2
    }

    /// Pages in the queue.
    pub fn free(&self) -> Result<FreePages, Error> {
        let (head, tail) = (self.counter(0)?, self.counter(TAIL_OFFSET)?);
        let count = (tail.wrapping_sub(head) % self.ring_bytes()) / 8;
        let is_overrun = count > self.page_count;
        Ok(FreePages { count: if is_overrun { 0 } else { count }, is_overrun })
    }

    /// Makes the queue anew: what is not marked is free. No chain may be in the middle of taking or returning a page.
    pub fn rebuild(&self, mapped: &Marks) -> Result<u64, Error> {
        self.write_ring(&mut mapped.clear_bits(self.page_count))
    }

    /// Writes the whole ring, and returns how many pages it has.
    fn write_ring(&self, free: &mut dyn Iterator<Item = u64>) -> Result<u64, Error> {
        let mut count = 0;
        let mut bytes = [0; CHUNK * 8];
        for first in (0..self.ring_len).step_by(CHUNK) {
            for element in bytes.chunks_exact_mut(8) {
                let page = free.next().inspect(|_| count += 1);
                element.copy_from_slice(&page.map_or(self.empty(), address_of).to_be_bytes());
            }
            self.ring.write(first as usize * 8, &bytes)?;
        }
        self.set_counter(0, RING_BASE)?;
        self.set_counter(TAIL_OFFSET, RING_BASE + count * 8)?;
        Ok(count)
    }

    fn counter(&self, offset: u64) -> Result<u64, Error> {
        let mut bytes = [0; 8];
        self.ring.read((self.ring_bytes() + offset) as usize, &mut bytes)?;
        Ok(u64::from_ne_bytes(bytes))
    }

    fn set_counter(&self, offset: u64, value: u64) -> Result<(), Error> {
        self.ring.write((self.ring_bytes() + offset) as usize, &value.to_ne_bytes())
    }

    /// Calls `with` with the page of each entry of a table that has one.
    pub fn for_each_page(&self, table: &Buffer, mut with: impl FnMut(u64)) -> Result<(), Error> {
        let mut bytes = [0; CHUNK * 8];
        let mut at = 0;
        while at < table.len() {
            let chunk = &mut bytes[..(table.len() - at).min(CHUNK * 8)];
            table.read(at, chunk)?;
            let pages = chunk.as_chunks::<8>().0.iter().map(|entry| u64::from_be_bytes(*entry));
            pages.filter_map(|address| self.page_at(address)).for_each(&mut with);
            at += chunk.len();
        }
        Ok(())
    }

    /// The page with this address.
    fn page_at(&self, address: u64) -> Option<u64> {
        let offset = address.checked_sub(POOL_BASE)?;
        let page = offset / PAGE_BYTES as u64;
        (offset.is_multiple_of(PAGE_BYTES as u64) && page < self.page_count).then_some(page)
    }
}

fn address_of(page: u64) -> u64 {
    POOL_BASE + page * PAGE_BYTES as u64
}

/// A bit for each page.
pub(crate) struct Marks(Vec<u64>);

impl Marks {
    pub fn new(page_count: u64) -> Marks {
        Marks(vec![0; page_count.div_ceil(64) as usize])
    }

    /// Marks a page, and returns whether it was marked.
    pub fn set(&mut self, page: u64) -> bool {
        let (word, bit) = (&mut self.0[(page / 64) as usize], 1 << (page % 64));
        let was_set = *word & bit != 0;
        *word |= bit;
        was_set
    }

    /// The pages that are not marked.
    fn clear_bits(&self, page_count: u64) -> impl Iterator<Item = u64> {
        (0..page_count).filter(|page| self.0[(page / 64) as usize] & 1 << (page % 64) == 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether an address is within the pages of the largest pool, or the one behind it.
    fn is_in_pool(address: u64) -> bool {
        address.checked_sub(POOL_BASE).is_some_and(|offset| offset < (POOL_PAGES_MAX + 1) * PAGE_BYTES as u64)
    }

    #[test]
    fn bytes_that_straddle_entries_are_no_address_of_a_page() {
        // Bytes of page numbers that resemble the fixed ones, in all combinations.
        let bytes = [0u64, 0x3c, 0x5a, 0x77, 0xa5, 0xff, 0x01, 0x71];
        let pages = bytes.iter().flat_map(|high| {
            let middle = bytes.iter().map(move |middle| (high & 0x7f) << 20 | middle << 12);
            middle.flat_map(|page| bytes.iter().map(move |low| page | low << 4 | 0xc))
        });
        let mut entries: Vec<u64> = pages.map(|page| address_of(page % POOL_PAGES_MAX)).collect();
        entries.push(0);
        entries.push(address_of(POOL_PAGES_MAX));
        for first in &entries {
            for second in &entries {
                let both = [first.to_be_bytes(), second.to_be_bytes()].concat();
                for window in both.windows(8).skip(1).take(7) {
                    let straddling = u64::from_be_bytes(window.try_into().expect("8 bytes"));
                    assert!(!is_in_pool(straddling), "{first:#x} {second:#x} {straddling:#x}");
                }
            }
        }
    }

    #[test]
    fn marks_say_what_is_free() {
        let mut marks = Marks::new(130);
        assert!(!marks.set(3));
        assert!(marks.set(3));
        assert!(!marks.set(129));
        assert_eq!(marks.clear_bits(130).count(), 128);
        assert!(!marks.clear_bits(130).any(|page| page == 3 || page == 129));
    }
}
