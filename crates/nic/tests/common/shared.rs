//! Memory that same-host peers can map: files in memory.
#![allow(dead_code)] // Every test file uses its own part of this.

use std::io;
use std::sync::{Arc, RwLock};

use terrace_baseline::BackingFile;
use terrace_hostmem::HostRange;
use terrace_nic::*;

use crate::common::{Node, REMOTE_ALL};

/// The files behind a node's memory.
#[derive(Clone, Default)]
pub struct Files(Arc<RwLock<Vec<BackingFile>>>);

/// A region over a file in memory.
pub struct SharedRegion {
    pub addr: u64,
    pub mr: Arc<Mr>,
}

impl Backings for Files {
    fn find(&self, range: HostRange, _: bool) -> io::Result<Option<BackedBy>> {
        let files = self.0.read().expect("whole");
        let has_range =
            |all: HostRange| range.addr >= all.addr && range.addr + range.len <= all.addr + all.len;
        let file = files.iter().find(|file| has_range(file.map()));
        file.map(|file| Ok(BackedBy { file: file.open_again()?, offset: 0, range: file.map() })).transpose()
    }
}

impl Files {
    /// Becomes the source of the device's backing files.
    pub fn on(node: &Node) -> Files {
        let files = Files::default();
        node.device.set_backings(Arc::new(files.clone()));
        files
    }

    /// Adds a file. It stays mapped.
    pub fn add(&self, file: BackingFile) -> HostRange {
        let all = file.map();
        self.0.write().expect("whole").push(file);
        all
    }

    pub fn region(&self, node: &Node, len: usize) -> SharedRegion {
        let path = tempfile::NamedTempFile::new_in("/dev/shm").expect("a name in memory");
        let file = BackingFile::open(path.path(), Some(len as u64)).expect("a file in memory");
        let addr = self.add(file).addr;
        SharedRegion { addr, mr: register(node, addr, len as u64) }
    }
}

impl SharedRegion {
    /// The only such region of its node.
    pub fn new(node: &Node, len: usize) -> SharedRegion {
        Files::on(node).region(node, len)
    }
}

pub fn register(node: &Node, addr: u64, len: u64) -> Arc<Mr> {
    let request = MrRequest { addr, length: len, iova: addr, access: REMOTE_ALL, paging: None };
    node.pd.reg_mr(request).expect("a region")
}
