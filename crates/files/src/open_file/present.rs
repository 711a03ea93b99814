//! Accesses that need not wait for a disk.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::io::Errno;
use terrace_hostmem::{AtomicOp, HostRange, fault, prefetch};
use terrace_memory::AccessError;

use super::{Direction, Kind, OpenFile};
use crate::sys::{Handle, coarse_ms};
use crate::window::Window;

impl OpenFile {
    /// Whether an access has to wait for a deferred one.
    #[inline]
    fn is_blocked(&self, part: HostRange, direction: Direction) -> bool {
        self.pending_count.load(Ordering::Acquire) != 0
            && self.rest().pending.lock().conflicts(part, direction == Direction::Read)
    }

    /// Has the processor load the first line at an offset, if a window has it.
    #[inline]
    pub fn prefetch(&self, offset: u64) {
        if let Some(layout) = self.layout.try_read()
            && let Some(window) = layout.window(HostRange { addr: offset, len: 1 })
        {
            prefetch(window.place(offset));
        }
    }

    /// Whether an access can be made now: not while the layout changes.
    pub fn is_present(self: &Arc<OpenFile>, part: HostRange) -> bool {
        let now_ms = coarse_ms();
        if self.is_within(part, now_ms) && !self.is_blocked(part, Direction::Write) {
            let Some(layout) = self.layout.try_read() else { return false };
            if layout.window(part).is_some_and(|window| window.is_known(part, now_ms)) {
                return true;
            }
        }
        let Some(Ok(handle)) = self.check_end(part, now_ms) else { return false };
        if self.is_blocked(part, Direction::Write) {
            return false;
        }
        let Some(layout) = self.layout.try_read() else { return false };
        match layout.window(part) {
            _ if self.kind == Kind::Memory => true,
            Some(window) => self.needs_no_disk(&handle, window, part, Direction::Read, now_ms),
            // The access itself finds out.
            None => !self.may_wait.load(Ordering::Relaxed),
        }
    }

    /// Whether no page of a range within a window has to be read from the disk.
    #[inline]
    fn needs_no_disk(
        &self,
        handle: &Handle,
        window: &Window,
        part: HostRange,
        direction: Direction,
        now_ms: u64,
    ) -> bool {
        window.is_known(part, now_ms)
            || window.ask(part, |page| match self.kind {
                Kind::Memory => direction == Direction::Write,
                Kind::Disk => {
                    let end = (page.addr + page.len).min(self.len.load(Ordering::Relaxed));
                    handle.is_hole(page.addr, end)
                }
            })
    }

    /// Reads a range if that takes no disk. `None` also while the layout changes: the thread that serves packets does not wait.
    ///
    /// # Errors
    /// `OutOfRange` beyond the end.
    pub fn read(self: &Arc<OpenFile>, part: HostRange, out: &mut [u8]) -> Option<Result<(), AccessError>> {
        let now_ms = coarse_ms();
        if self.is_within(part, now_ms) && !self.is_blocked(part, Direction::Read) {
            let layout = self.layout.try_read()?;
            if let Some(window) = layout.window(part).filter(|window| window.is_known(part, now_ms)) {
                return copy_out(window, part, out).then_some(Ok(()));
            }
        }
        self.read_pieces(part, out, now_ms)
    }

    /// Reads a range of which part has no window, is not known to be in memory, or may lie beyond the end.
    #[cold]
    fn read_pieces(
        self: &Arc<OpenFile>,
        part: HostRange,
        mut out: &mut [u8],
        now_ms: u64,
    ) -> Option<Result<(), AccessError>> {
        let handle = match self.check_end(part, now_ms)? {
            Ok(handle) => handle,
            Err(error) => return Some(Err(error)),
        };
        if self.is_blocked(part, Direction::Read) {
            return None;
        }
        for piece in self.pieces(part) {
            self.make_window(&handle, piece, Direction::Read, now_ms);
            let layout = self.layout.try_read()?;
            let (here, rest) = out.split_at_mut(piece.len as usize);
            if let Some(window) = layout.window(piece) {
                if self.needs_no_disk(&handle, window, piece, Direction::Read, now_ms) {
                    if !copy_out(window, piece, here) {
                        return None;
                    }
                    out = rest;
                    continue;
                }
                if self.kind == Kind::Disk {
                    return None;
                }
            }
            if let Err(error) = self.read_by_call(&handle, piece, here)? {
                return Some(Err(error));
            }
            out = rest;
        }
        Some(Ok(()))
    }

    /// Reads by a system call if that takes no disk.
    fn read_by_call(
        &self,
        handle: &Handle,
        part: HostRange,
        out: &mut [u8],
    ) -> Option<Result<(), AccessError>> {
        let read = match self.kind {
            Kind::Memory => handle.read_exact(part.addr, out),
            Kind::Disk if self.may_wait.load(Ordering::Relaxed) => return None,
            Kind::Disk => handle.read_cached(part.addr, out),
        };
        match read {
            Ok(()) => Some(Ok(())),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Some(Err(AccessError::OutOfRange)),
            Err(error) => {
                if Errno::from_io_error(&error) == Some(Errno::OPNOTSUPP) {
                    self.may_wait.store(true, Ordering::Relaxed);
                }
                // A deferred read finds out what is wrong.
                None
            }
        }
    }

    /// Writes to a range if that takes no disk. `None` also while the layout changes.
    ///
    /// # Errors
    /// `OutOfRange` beyond the end; `Permission` if the file is not open for writing.
    pub fn write(self: &Arc<OpenFile>, addr: u64, data: &[u8]) -> Option<Result<(), AccessError>> {
        self.change(HostRange { addr, len: data.len() as u64 }, |addr, offset, len| {
            let data = &data[offset..offset + len];
            // SAFETY: a range of a window, which the lock keeps, and to which no Rust reference exists.
            unsafe { fault::copy_to(addr, data) }.is_ok()
        })
    }

    /// Performs an atomic operation on 8 aligned bytes if that takes no disk.
    ///
    /// # Errors
    /// As for [`OpenFile::write`].
    pub fn atomic(self: &Arc<OpenFile>, addr: u64, op: AtomicOp) -> Option<Result<u64, AccessError>> {
        let mut before = 0;
        let changed = self.change(HostRange { addr, len: 8 }, |addr, _, _| {
            // SAFETY: as for a write; windows begin at pages, so the address is as aligned as the offset.
            match unsafe { fault::atomic(addr, op) } {
                Ok(value) => {
                    before = value;
                    true
                }
                Err(fault::Fault) => false,
            }
        });
        changed.map(|result| result.map(|()| before))
    }

    /// Changes a range by `act` if that takes no disk. `act` gets the address of each part that lies in one window, where in
    /// the range it begins, and its length. It returns false if the memory is not accessible.
    #[inline]
    fn change(
        self: &Arc<OpenFile>,
        part: HostRange,
        mut act: impl FnMut(u64, usize, usize) -> bool,
    ) -> Option<Result<(), AccessError>> {
        let now_ms = coarse_ms();
        if self.is_within(part, now_ms) && !self.is_blocked(part, Direction::Write) {
            let layout = self.layout.try_read()?;
            if !layout.traits.is_writable {
                return Some(Err(AccessError::Permission));
            }
            if let Some(window) = layout.window(part).filter(|window| window.is_known(part, now_ms)) {
                let is_done = act(window.place(part.addr), 0, part.len as usize);
                return is_done.then_some(Ok(()));
            }
        }
        self.change_pieces(part, &mut act, now_ms)
    }

    /// The same for a range of which part has no window, is not known to be in memory, or may lie beyond the end.
    #[cold]
    fn change_pieces(
        self: &Arc<OpenFile>,
        part: HostRange,
        act: &mut dyn FnMut(u64, usize, usize) -> bool,
        now_ms: u64,
    ) -> Option<Result<(), AccessError>> {
        if !self.layout.try_read()?.traits.is_writable {
            return Some(Err(AccessError::Permission));
        }
        let handle = match self.check_end(part, now_ms)? {
            Ok(handle) => handle,
            Err(error) => return Some(Err(error)),
        };
        if self.is_blocked(part, Direction::Write) {
            return None;
        }
        for piece in self.pieces(part) {
            self.make_window(&handle, piece, Direction::Write, now_ms);
        }
        let layout = self.layout.try_read()?;
        // The file may have been truncated since.
        if part.addr.saturating_add(part.len) > self.len.load(Ordering::Relaxed) {
            return Some(Err(AccessError::OutOfRange));
        }
        for piece in self.pieces(part) {
            let window = layout.window(piece)?;
            if !self.needs_no_disk(&handle, window, piece, Direction::Write, now_ms) {
                return None;
            }
        }
        for piece in self.pieces(part) {
            let addr = layout.window(piece)?.place(piece.addr);
            if !act(addr, (piece.addr - part.addr) as usize, piece.len as usize) {
                return None;
            }
        }
        Some(Ok(()))
    }
}

/// Copies from a window. False after a fault: the file has become shorter, or a page cannot be read.
#[inline]
fn copy_out(window: &Window, part: HostRange, out: &mut [u8]) -> bool {
    // SAFETY: a range of the window, which the caller's lock keeps, and to which no exclusive Rust reference exists.
    unsafe { fault::copy_from(window.place(part.addr), out) }.is_ok()
}
