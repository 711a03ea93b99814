//! Sources of copies to the program's memory: bytes of this process, and bytes that another process may change.

use std::marker::PhantomData;

use crate::fault::{self, Fault};

/// Bytes that are copied to the program's memory.
pub trait CopySource: Copy {
    /// Their number.
    fn bytes(&self) -> usize;

    /// Copies them to `target`, ascending, the last byte last, unless the source says otherwise. Naturally aligned parts of
    /// the target of up to 8 bytes are each written with one store.
    ///
    /// # Errors
    /// [`Fault`] when part of the target is not writable; the bytes before the fault are then written.
    ///
    /// # Safety
    /// As for [`fault::copy_to`].
    unsafe fn copy_to(&self, target: u64) -> Result<(), Fault>;

    /// Calls `act` with the bytes, which no longer change.
    ///
    /// # Errors
    /// [`Fault`] when they are not readable.
    fn with_bytes<R>(&self, act: impl FnOnce(&[u8]) -> R) -> Result<R, Fault>;
}

impl CopySource for &[u8] {
    #[inline(always)]
    fn bytes(&self) -> usize {
        self.len()
    }

    #[inline(always)]
    unsafe fn copy_to(&self, target: u64) -> Result<(), Fault> {
        // SAFETY: as the caller promises.
        unsafe { fault::copy_to(target, self) }
    }

    #[inline(always)]
    fn with_bytes<R>(&self, act: impl FnOnce(&[u8]) -> R) -> Result<R, Fault> {
        Ok(act(self))
    }
}

/// Bytes in a mapping that another process may write to at any time. They can only be copied: a check on them says
/// nothing about a later read.
#[derive(Clone, Copy, Debug)]
pub struct SharedBytes<'a> {
    addr: u64,
    len: usize,
    mapping: PhantomData<&'a ()>,
}

impl SharedBytes<'_> {
    /// `len` bytes at `addr`.
    ///
    /// # Safety
    /// They are mapped and readable during the lifetime, and no exclusive reference to them exists.
    #[inline]
    pub unsafe fn new(addr: u64, len: usize) -> Self {
        SharedBytes { addr, len, mapping: PhantomData }
    }

    /// `len` of them from `offset` on; `None` if they are fewer.
    #[inline]
    pub fn part(self, offset: usize, len: usize) -> Option<Self> {
        if offset > self.len || len > self.len - offset {
            return None;
        }
        Some(SharedBytes { addr: self.addr + offset as u64, len, ..self })
    }

    /// Copies as many of them as `out` has.
    ///
    /// # Errors
    /// [`Fault`] when they are not readable, or fewer.
    pub fn copy_into(self, out: &mut [u8]) -> Result<(), Fault> {
        if out.len() > self.len {
            return Err(Fault);
        }
        // SAFETY: as `new` requires.
        unsafe { fault::copy_from(self.addr, out) }
    }
}

/// The same bytes, copied in any order ([`fault::copy_unordered`]).
#[derive(Clone, Copy, Debug)]
pub struct Unordered<'a>(pub SharedBytes<'a>);

impl CopySource for Unordered<'_> {
    #[inline(always)]
    fn bytes(&self) -> usize {
        self.0.len
    }

    #[inline(always)]
    unsafe fn copy_to(&self, target: u64) -> Result<(), Fault> {
        // SAFETY: the source as `SharedBytes::new` requires, the target as the caller promises.
        unsafe { fault::copy_unordered(target, self.0.addr, self.0.len) }
    }

    fn with_bytes<R>(&self, act: impl FnOnce(&[u8]) -> R) -> Result<R, Fault> {
        self.0.with_bytes(act)
    }
}

impl CopySource for SharedBytes<'_> {
    #[inline(always)]
    fn bytes(&self) -> usize {
        self.len
    }

    #[inline(always)]
    unsafe fn copy_to(&self, target: u64) -> Result<(), Fault> {
        // SAFETY: the source as `new` requires, the target as the caller promises.
        unsafe { fault::copy_across(target, self.addr, self.len, target) }
    }

    fn with_bytes<R>(&self, act: impl FnOnce(&[u8]) -> R) -> Result<R, Fault> {
        let mut bytes = vec![0; self.len];
        self.copy_into(&mut bytes)?;
        Ok(act(&bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_within_the_whole() {
        let whole = *b"0123456789";
        // SAFETY: `whole` outlives it.
        let bytes = unsafe { SharedBytes::new(whole.as_ptr() as u64, whole.len()) };
        let text = |offset, len| {
            let part = bytes.part(offset, len)?;
            Some(part.with_bytes(<[u8]>::to_vec).expect("mapped"))
        };
        assert_eq!(text(2, 3).as_deref(), Some(&b"234"[..]));
        assert_eq!(text(10, 0).as_deref(), Some(&b""[..]));
        for (offset, len) in [(0, 11), (11, 0), (10, 1), (usize::MAX, 1), (1, usize::MAX)] {
            assert_eq!(text(offset, len), None);
        }
    }

    #[test]
    fn bytes_are_copied_whole() {
        let (from, mut to) = ([7u8; 100], [0u8; 100]);
        // SAFETY: `from` outlives it.
        let bytes = unsafe { SharedBytes::new(from.as_ptr() as u64, from.len()) };
        // SAFETY: `to` is ours.
        unsafe { bytes.copy_to(to.as_mut_ptr() as u64) }.expect("mapped");
        assert_eq!(from, to);
        to.fill(0);
        // SAFETY: the same.
        unsafe { Unordered(bytes).copy_to(to.as_mut_ptr() as u64) }.expect("mapped");
        assert_eq!(from, to);
    }
}
