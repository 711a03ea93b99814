//! The files that a connection has looked up: it can name no others, so a client cannot guess its way past a directory
//! that it may not search.

use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use terrace_sync::Mutex;

use crate::proto::FileId;

/// Most files of a connection.
const NODES_MAX: usize = 4096;
/// A connection keeps so many also when the process has few descriptors left.
const NODES_MIN: usize = 16;

/// The descriptors that all connections together may use.
#[derive(Debug)]
pub struct DescriptorBudget {
    used: AtomicUsize,
    max: usize,
}

impl DescriptorBudget {
    /// At most this many, as far as every connection has [`NODES_MIN`].
    pub fn new(max: usize) -> DescriptorBudget {
        DescriptorBudget { used: AtomicUsize::new(0), max }
    }

    fn is_used_up(&self) -> bool {
        self.used.load(Ordering::Relaxed) > self.max
    }
}

/// The files that a connection knows.
#[derive(Debug)]
pub struct Nodes {
    budget: Arc<DescriptorBudget>,
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    files: HashMap<FileId, Arc<OwnedFd>>,
    /// In the order in which they were looked up first.
    order: VecDeque<FileId>,
}

impl Nodes {
    /// None yet.
    pub fn new(budget: Arc<DescriptorBudget>) -> Nodes {
        Nodes { budget, known: Mutex::default() }
    }

    /// The file, if the connection knows it.
    pub fn get(&self, id: FileId) -> Option<Arc<OwnedFd>> {
        self.known.lock().files.get(&id).cloned()
    }

    /// Adds a file that the client has found. The oldest ones are forgotten; the client reclaims them.
    pub fn add(&self, id: FileId, file: OwnedFd) {
        let mut known = self.known.lock();
        if known.files.insert(id, Arc::new(file)).is_some() {
            return;
        }
        known.order.push_back(id);
        self.budget.used.fetch_add(1, Ordering::Relaxed);
        let max = if self.budget.is_used_up() { NODES_MIN } else { NODES_MAX };
        while known.order.len() > max {
            let Some(oldest) = known.order.pop_front() else { return };
            known.files.remove(&oldest);
            self.budget.used.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Drop for Nodes {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.known.lock().order.len(), Ordering::Relaxed);
    }
}
