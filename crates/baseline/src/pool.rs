//! Bounce buffers: a fixed number, so that no peer determines how much memory they take.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt::Debug;
use std::io;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use terrace_memory::Waker;
use terrace_sync::Mutex;

use crate::sys::Mapping;

/// The longest transfer, in bytes.
pub const TRANSFER_BYTES_MAX: u64 = 64 << 10;
/// The pages that such a transfer spans when it does not begin at a page.
const SPAN_BYTES_MAX: usize = TRANSFER_BYTES_MAX as usize + 4096;
/// The sizes of buffers, and the shares of the pool for each size.
const CLASSES: [(usize, usize); 3] = [(4096, 3), (16 << 10, 2), (SPAN_BYTES_MAX, 3)];
/// The class that a few requesters with many reads could exhaust.
const LARGEST: usize = CLASSES.len() - 1;

/// A requester that was woken, and has not come back while this many buffers were freed, is forgotten.
const MISSED_MAX: u32 = 64;

/// A fixed set of page-aligned buffers.
pub(crate) struct Pool {
    memory: Mapping,
    free: Mutex<Free>,
}

#[derive(Default)]
struct Free {
    /// Offsets of the free buffers of each class. Last in, first out: memory that was never needed is never touched.
    offsets: [Vec<u32>; CLASSES.len()],
    /// Requesters that got no buffer.
    waiting: Vec<Waker>,
    /// Requesters that were woken and have not come back, with the number of buffers freed since.
    told: Vec<(Waker, u32)>,
    /// How many of the largest buffers each requester holds; without entries of zero.
    held: HashMap<usize, u32>,
}

/// Identifies a requester by its waker.
fn identity(waker: &Waker) -> usize {
    Arc::as_ptr(waker).cast::<()>() as usize
}

impl Free {
    fn holds_none(&self, waker: &Waker) -> bool {
        !self.held.contains_key(&identity(waker))
    }

    /// Whether the requester must wait: it holds a largest buffer, and all free ones are reserved for waiting
    /// requesters that hold none.
    fn is_to_wait(&self, waker: &Waker) -> bool {
        if (self.waiting.is_empty() && self.told.is_empty()) || self.holds_none(waker) {
            return false;
        }
        let told = self.told.iter().map(|(told, _)| told);
        let poor_count = self.waiting.iter().chain(told).filter(|other| self.holds_none(other)).count();
        poor_count > 0 && self.offsets[LARGEST].len() <= poor_count
    }

    fn turn_away(&mut self, waker: &Waker) {
        if !self.waiting.iter().any(|known| Arc::ptr_eq(known, waker)) {
            self.waiting.push(waker.clone());
        }
    }
}

impl Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("bytes", &self.memory.range().len).finish()
    }
}

impl Pool {
    /// A pool of about `bytes` bytes, with at least four buffers of each size.
    ///
    /// # Errors
    /// When there is no address space.
    pub(crate) fn new(bytes: usize) -> io::Result<Arc<Pool>> {
        let shares: usize = CLASSES.iter().map(|class| class.1).sum();
        let counts = CLASSES.map(|(size, share)| (bytes / shares * share / size).max(4));
        let total = CLASSES.iter().zip(counts).map(|((size, _), count)| size * count).sum();
        let mut free = Free::default();
        let mut next = 0;
        for ((offsets, (size, _)), count) in free.offsets.iter_mut().zip(CLASSES).zip(counts) {
            offsets.extend((0..count).rev().map(|index| (next + index * size) as u32));
            next += count * size;
        }
        Ok(Arc::new(Pool { memory: Mapping::of_zeros(total)?, free: Mutex::new(free) }))
    }

    /// Allocates a buffer of at least `len` bytes with arbitrary content. `None` when there is none; the waker is then
    /// called when a buffer is freed.
    pub(crate) fn take(self: &Arc<Pool>, len: usize, waker: &Waker) -> Option<Buffer> {
        self.take_from(&mut self.free.lock(), len, waker)
    }

    /// [`Pool::take`] for allocations ahead of need: a requester that holds a largest buffer leaves one for each
    /// waiting requester that holds none. So no requester starves.
    pub(crate) fn take_in_turn(self: &Arc<Pool>, len: usize, waker: &Waker) -> Option<Buffer> {
        let mut free = self.free.lock();
        if len > CLASSES[LARGEST - 1].0 && free.is_to_wait(waker) {
            // The waker is called when the requester's own buffer is freed, at the latest.
            free.turn_away(waker);
            return None;
        }
        self.take_from(&mut free, len, waker)
    }

    fn take_from(self: &Arc<Pool>, free: &mut Free, len: usize, waker: &Waker) -> Option<Buffer> {
        if !free.told.is_empty() {
            free.told.retain(|(told, _)| !Arc::ptr_eq(told, waker));
        }
        for (class, (size, _)) in CLASSES.iter().enumerate() {
            if *size < len {
                continue;
            }
            if let Some(offset) = free.offsets[class].pop() {
                let addr = self.memory.range().addr + u64::from(offset);
                let holder = identity(waker);
                if class == LARGEST {
                    *free.held.entry(holder).or_default() += 1;
                }
                let (pool, class) = (self.clone(), class as u8);
                return Some(Buffer { pool, addr, len: *size, class, holder, quietly: false });
            }
        }
        free.turn_away(waker);
        None
    }

    fn give_back(&self, buffer: &Buffer) {
        let (class, quietly) = (usize::from(buffer.class), buffer.quietly);
        let mut free = self.free.lock();
        free.offsets[class].push((buffer.addr - self.memory.range().addr) as u32);
        if class == LARGEST
            && let Entry::Occupied(mut held) = free.held.entry(buffer.holder)
        {
            *held.get_mut() -= 1;
            if *held.get() == 0 {
                held.remove();
            }
        }
        if quietly || (free.waiting.is_empty() && free.told.is_empty()) {
            return;
        }
        let waiting = std::mem::take(&mut free.waiting);
        free.told.retain_mut(|(told, missed)| {
            *missed += 1;
            *missed < MISSED_MAX && !waiting.iter().any(|waker| Arc::ptr_eq(waker, told))
        });
        free.told.extend(waiting.iter().map(|waker| (waker.clone(), 0)));
        drop(free);
        for waker in waiting {
            waker();
        }
    }
}

/// A page-aligned buffer; returns to its pool when dropped.
pub struct Buffer {
    pool: Arc<Pool>,
    addr: u64,
    len: usize,
    class: u8,
    /// The requester that took the buffer.
    holder: usize,
    quietly: bool,
}

impl Buffer {
    /// Frees the buffer without calling wakers.
    pub(crate) fn give_back_quietly(mut self) {
        self.quietly = true;
    }
}

impl Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Buffer").field("len", &self.len).finish()
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the pool's memory is mapped while the pool lives, it is initialised (with zeros), and this part of it
        // belongs to this buffer alone.
        unsafe { std::slice::from_raw_parts(self.addr as *const u8, self.len) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `deref`, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.addr as *mut u8, self.len) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.pool.give_back(self);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// A waker, and a count of its calls.
    fn counting() -> (Waker, Arc<AtomicUsize>) {
        let called = Arc::new(AtomicUsize::new(0));
        let count = called.clone();
        let waker: Waker = Arc::new(move || {
            count.fetch_add(1, Ordering::Relaxed);
        });
        (waker, called)
    }

    #[test]
    fn buffers_do_not_overlap_and_a_refused_requester_hears_of_room() {
        let pool = Pool::new(0).unwrap();
        let (waker, called) = counting();
        let mut taken: Vec<Buffer> = std::iter::from_fn(|| pool.take(1, &waker)).collect();
        assert_eq!(taken.len(), 4 * CLASSES.len());
        for (index, buffer) in taken.iter_mut().enumerate() {
            assert_eq!(buffer.as_ptr() as usize % 4096, 0);
            buffer.fill(index as u8);
        }
        for (index, buffer) in taken.iter().enumerate() {
            assert!(buffer.iter().all(|&byte| byte == index as u8));
        }
        assert!(pool.take(1, &waker).is_none());
        assert_eq!(called.load(Ordering::Relaxed), 0);
        taken.pop().unwrap().give_back_quietly();
        assert_eq!(called.load(Ordering::Relaxed), 0);
        taken.extend(pool.take(1, &waker));
        taken.pop();
        assert_eq!(called.load(Ordering::Relaxed), 1, "asked three times, told once");
        assert!(pool.take(SPAN_BYTES_MAX, &waker).is_some());
        assert!(pool.take(SPAN_BYTES_MAX + 1, &waker).is_none());
    }

    #[test]
    fn a_requester_with_a_large_buffer_waits_until_others_have_one() {
        let pool = Pool::new(0).unwrap();
        let [(greedy, told), (modest, modest_told), (gone, _)] = [(); 3].map(|()| counting());
        let mut taken: Vec<Buffer> =
            std::iter::from_fn(|| pool.take_in_turn(SPAN_BYTES_MAX, &greedy)).collect();
        assert_eq!(taken.len(), 4, "while nobody else wants any, all are its own");
        assert!(pool.take_in_turn(SPAN_BYTES_MAX, &modest).is_none());
        taken.pop();
        assert!(pool.take_in_turn(SPAN_BYTES_MAX, &greedy).is_none(), "one is free, but not for this one");
        assert!(pool.take_in_turn(4096, &greedy).is_some(), "of the small ones there are enough");
        assert_eq!(modest_told.load(Ordering::Relaxed), 1);
        let his = pool.take_in_turn(SPAN_BYTES_MAX, &modest);
        assert!(his.is_some());
        taken.pop();
        let another = pool.take_in_turn(SPAN_BYTES_MAX, &greedy);
        assert!(another.is_some(), "nobody has none that wants one");
        taken.extend(another);
        // A waiting requester that never comes back.
        assert!(pool.take_in_turn(SPAN_BYTES_MAX, &gone).is_none());
        taken.pop();
        assert!(pool.take_in_turn(SPAN_BYTES_MAX, &greedy).is_none());
        assert!(pool.take(SPAN_BYTES_MAX, &greedy).is_some(), "what an access needs beside its first buffer");
        assert!(pool.take_in_turn(SPAN_BYTES_MAX, &greedy).is_none());
        let told_before = told.load(Ordering::Relaxed);
        drop(pool.take(1, &modest));
        assert_eq!(told.load(Ordering::Relaxed), told_before + 1);
        (0..MISSED_MAX).for_each(|_| drop(pool.take(1, &modest)));
        assert!(pool.take_in_turn(SPAN_BYTES_MAX, &greedy).is_some(), "it has waited long enough");
    }
}
