//! A paged mapping of the program.

use std::sync::{Arc, Mutex, PoisonError};

use terrace_vm::Swapped;
use terrace_vm::maps::{FileId, Run};

use super::backing;
use super::budget::Region;
use super::pager::MappingPager;
use super::ranges::{self, Listed};
use crate::shim::signals::without_signals;

/// A paged mapping.
pub struct PagedMapping {
    pub run: Run,
    pub region: Region,
    pub pager: Arc<MappingPager>,
    /// Of private memory that has moved into a swap file. Taken when the mapping ends.
    pub swapped: Mutex<Option<Swapped>>,
    pub listed: Listed,
}

impl PagedMapping {
    pub fn new(run: Run, region: Region, swapped: Option<Swapped>) -> PagedMapping {
        let pager = Arc::new(MappingPager::new(region.pager(&run)));
        let listed = ranges::add(run.range, run.file, swapped.is_some());
        PagedMapping { run, region, pager, swapped: Mutex::new(swapped), listed }
    }

    /// Releases the mapping from its budget.
    fn release(&self) {
        // What the program gives up of memory that was private is still to be emptied.
        self.listed.set_leased(false);
        self.region.remove();
    }

    /// Whether its memory was private before.
    pub fn is_swapped(&self) -> bool {
        self.swapped.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// Whether a file is its swap file.
    pub fn is_swap_file(&self, file: FileId) -> bool {
        let swapped = self.swapped.lock().unwrap_or_else(PoisonError::into_inner);
        swapped.as_ref().is_some_and(|swapped| swapped.is_file(file))
    }

    /// Gives the program back what is left of the mapping.
    pub fn end(self: Arc<Self>) {
        if !self.pager.is_ordinary() {
            self.release();
        }
        self.listed.remove();
        if let Some(swapped) = self.swapped.lock().unwrap_or_else(PoisonError::into_inner).take() {
            if let Err(error) = without_signals(|| swapped.end()) {
                tracing::warn!(
                    %error, addr = format_args!("{:#x}", self.run.range.addr),
                    "memory that was registered stays a mapping of its swap file, which forked children do not inherit"
                );
            }
            return;
        }
        if matches!(self.region, Region::Baseline(..)) && backing::is_locked_by_us(self.run.file.inode()) {
            // It has several descriptors, see `ProgramFile`.
            std::mem::forget(self);
        }
    }

    /// Makes the mapping ordinary memory. Called before the program changes it.
    pub fn make_ordinary(&self) {
        if self.pager.is_ordinary() {
            return;
        }
        self.pager.make_ordinary(|| self.release());
        let name = String::from_utf8_lossy(&self.run.path);
        tracing::warn!(file = %name, "the program changes the mapping: its regions become ordinary on-demand regions");
    }
}
