//! The directory of swap files.

use std::path::{Path, PathBuf};

use terrace_hostmem::{HostRange, PAGE_BYTES, pages_of};

use crate::maps;
use crate::moving::Mover;
use crate::refusal::{Refusal, SwapError};
use crate::reserve;
use crate::swap_file::SwapFile;
use crate::swapped::{Swapped, close_unmapped};

/// Shorter ranges stay private. Each range has a file, and mappings of its own.
pub const BACKED_MIN_BYTES: u64 = 1 << 20;

/// Moves private memory into swap files.
#[derive(Debug)]
pub struct SwapSpace {
    directory: PathBuf,
}

impl SwapSpace {
    /// Checks that files can be created in a directory.
    ///
    /// # Errors
    /// `Create`, `InMemory`.
    pub fn open(directory: &Path) -> Result<SwapSpace, SwapError> {
        let path = directory.to_owned();
        let tried = SwapFile::create(directory, PAGE_BYTES).and_then(|file| {
            // Memory that the program gives up becomes a hole.
            file.discard(0, PAGE_BYTES)?;
            file.is_in_memory()
        });
        match tried {
            Ok(false) => {
                reserve::begin();
                Ok(SwapSpace { directory: path })
            }
            Ok(true) => Err(SwapError::InMemory { path }),
            Err(source) => Err(SwapError::Create { path, source }),
        }
    }

    /// Moves the pages that contain a range into a swap file. The program finds the same bytes at the same addresses at all
    /// times; its other threads may wait for some milliseconds when they touch them. Other processes must not copy to the
    /// pages meanwhile (`process_vm_writev(2)`), so pages stay where they are if `is_registered`.
    ///
    /// # Errors
    /// All of [`Refusal`]. The memory is private then, as before.
    pub fn back(
        &self,
        range: HostRange,
        is_registered: impl FnOnce(HostRange) -> bool,
    ) -> Result<Swapped, Refusal> {
        let (addr, len) = Some(range)
            .filter(|range| range.len >= BACKED_MIN_BYTES)
            .and_then(pages_of)
            .ok_or(Refusal::Small)?;
        let pages = HostRange { addr, len };
        let mappings = maps::list(pages).map_err(Refusal::system("list the process's mappings"))?;
        let covered: u64 = mappings.iter().map(|mapping| mapping.range().len).sum();
        if covered != pages.len || !mappings.iter().all(maps::Mapping::is_private_memory) {
            return Err(Refusal::NotPrivate);
        }
        if is_registered(pages) {
            return Err(Refusal::Registered);
        }
        if has_stack_in(pages).map_err(Refusal::system("list the process's mappings"))? {
            return Err(Refusal::Stack);
        }
        if has_pinned_memory().map_err(Refusal::system("read /proc/self/status"))? {
            return Err(Refusal::Pinned);
        }
        close_unmapped();
        let file = SwapFile::create(&self.directory, pages.len);
        let file = file.map_err(Refusal::system("create a swap file"))?;
        let mut mover = Mover::new(&file)?;
        let moved = mappings.iter().try_for_each(|mapping| {
            let part = mapping.range();
            // SAFETY: just found to be such memory. The program registers it, so it does not unmap it meanwhile.
            unsafe { mover.move_mapping(part, part.addr - pages.addr) }
        });
        // Nobody waits from now on.
        drop(mover);
        let swapped = Swapped::new(pages, file);
        match moved {
            Ok(()) => Ok(swapped),
            Err(error) => {
                swapped.end().map_err(Refusal::system("make it private again"))?;
                Err(error)
            }
        }
    }
}

/// Whether the mapping that this thread's stack is in has a part of a range.
fn has_stack_in(pages: HostRange) -> std::io::Result<bool> {
    let local = 0u8;
    let stack = maps::at(std::ptr::from_ref(&local).addr() as u64)?;
    Ok(stack.is_some_and(|stack| stack.range().overlaps(pages)))
}

/// Whether the kernel counts pages of this process as pinned for long: devices, or rings of io_uring, go on using them
/// when memory has moved.
fn has_pinned_memory() -> std::io::Result<bool> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let pinned = status.lines().find_map(|line| line.strip_prefix("VmPin:"));
    Ok(pinned.is_some_and(|pinned| pinned.split_whitespace().next() != Some("0")))
}
