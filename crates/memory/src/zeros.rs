//! Zeros whose pages are allocated as they are touched.

use std::io;

/// The size of a huge page. A shorter mapping must not be allocated as a whole at the first touch.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// A private mapping of zeros. For lengths like these `malloc` may reuse memory: then it fills all of it with zeros,
/// and so allocates all of it, needed or not.
#[derive(Debug)]
pub struct Zeros {
    addr: u64,
    len: usize,
}

impl Zeros {
    /// Maps so many bytes.
    ///
    /// # Errors
    /// Those of `mmap`: among others, for no bytes.
    pub fn new(len: usize) -> io::Result<Zeros> {
        let (protection, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping at an address that the kernel chooses aliases nothing.
        let addr = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, -1, 0) };
        if addr == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        if len < HUGE_PAGE_BYTES {
            // SAFETY: advice about the mapping that was just made; without it, it merely takes more.
            let _ = unsafe { libc::madvise(addr, len, libc::MADV_NOHUGEPAGE) };
        }
        Ok(Zeros { addr: addr as u64, len })
    }

    /// First byte.
    pub fn addr(&self) -> u64 {
        self.addr
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Always false: no mapping is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for Zeros {
    fn drop(&mut self) {
        // SAFETY: unmaps what the constructor mapped. No reference to it is handed out; accesses by address survive its
        // absence.
        let _ = unsafe { libc::munmap(self.addr as *mut libc::c_void, self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pages of the mapping that are in memory.
    fn resident_pages(zeros: &Zeros) -> usize {
        let mut present = vec![0u8; zeros.len().div_ceil(4096)];
        // SAFETY: the range is mapped, and there is a byte for each of its pages.
        let failed =
            unsafe { libc::mincore(zeros.addr() as *mut libc::c_void, zeros.len(), present.as_mut_ptr()) };
        assert_eq!(failed, 0);
        present.iter().filter(|byte| **byte & 1 == 1).count()
    }

    #[test]
    fn only_what_is_touched_takes_memory() {
        // In the second round, `malloc` would have memory that was used before.
        for _ in 0..2 {
            let all: Vec<Zeros> = (0..8).map(|_| Zeros::new(1 << 20).expect("a mapping")).collect();
            assert!(all.iter().all(|zeros| resident_pages(zeros) == 0));
            // SAFETY: within the mapping, which no other code uses.
            unsafe { (all[3].addr() as *mut u8).add(5000).write_volatile(7) };
            let pages: Vec<usize> = all.iter().map(resident_pages).collect();
            assert_eq!(pages, [0, 0, 0, 1, 0, 0, 0, 0]);
        }
        assert!(Zeros::new(0).is_err());
    }
}
