//! The directory of swap files.

use std::path::{Path, PathBuf};

use terrace_hostmem::{HostRange, PAGE_BYTES, pages_of};

use crate::guard::Guard;
use crate::maps;
use crate::moving::Mover;
use crate::pagemap::Pagemap;
use crate::refusal::{Refusal, SwapError};
use crate::swap_file::SwapFile;
use crate::swapped::Swapped;

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
            Ok(false) => Ok(SwapSpace { directory: path }),
            Ok(true) => Err(SwapError::InMemory { path }),
            Err(source) => Err(SwapError::Create { path, source }),
        }
    }

    /// Moves the pages that contain a range into a swap file. The program finds the same bytes at the same addresses at all
    /// times; its other threads may wait for some milliseconds when they touch them. Without
    /// other threads, the privilege to have them wait is not needed.
    ///
    /// # Errors
    /// All of [`Refusal`]. The memory is private then, as before.
    pub fn back(&self, range: HostRange) -> Result<Swapped, Refusal> {
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
        let guard = match Guard::open() {
            Ok(guard) => Some(guard),
            Err(Refusal::Privilege) if is_alone() => None,
            Err(error) => return Err(error),
        };
        let pagemap = Pagemap::open().map_err(Refusal::system("open /proc/self/pagemap"))?;
        let file =
            SwapFile::create(&self.directory, pages.len).map_err(Refusal::system("create a swap file"))?;
        let mover = Mover { pagemap: &pagemap, guard: guard.as_ref(), file: &file };
        let moved = mappings.iter().try_for_each(|mapping| {
            let part = mapping.range();
            // SAFETY: just found to be such memory. The program registers it, so it does not unmap it meanwhile.
            unsafe { mover.move_mapping(part, part.addr - pages.addr) }
        });
        let begun = Swapped::new(pages, file).map_err(Refusal::system("find the swap file's mapping"));
        match (moved, begun) {
            (Ok(()), swapped) => swapped,
            (Err(error), begun) => {
                begun?.end().map_err(Refusal::system("map the swap file"))?;
                Err(error)
            }
        }
    }
}

/// Whether this thread is the only one that runs the program. Terrace's own threads, whose names begin with `terrace-`,
/// touch the program's memory only where it is registered.
fn is_alone() -> bool {
    let is_own = |task: &std::fs::DirEntry| {
        std::fs::read_to_string(task.path().join("comm")).is_ok_and(|name| name.starts_with("terrace-"))
    };
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    tasks.filter(|task| !is_own(task)).count() == 1
}
