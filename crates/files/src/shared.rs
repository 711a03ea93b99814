//! What all files of a process share.

use std::sync::Arc;

use crate::budget::Budget;
use crate::descriptors::Descriptors;
use crate::published::Lengths;
use crate::workers::Workers;

/// What all files of a process share.
#[derive(Debug)]
pub struct Shared {
    /// The windows.
    pub budget: Arc<Budget>,
    /// The descriptors.
    pub descriptors: Arc<Descriptors>,
    /// The threads that wait for disks.
    pub workers: Arc<Workers>,
    /// The lengths that peers see.
    pub lengths: Lengths,
}
