//! Memory that neighbours can map: a file in memory.

use std::sync::Arc;

use terrace_memory::HostRange;
use terrace_nic::*;
use terrace_tier::BackingFile;

use crate::common::{Node, REMOTE_ALL};

/// A region over a file in memory. Its node's device can have one.
pub struct SharedRegion {
    pub addr: u64,
    pub mr: Arc<Mr>,
}

struct OneFile(BackingFile);

impl Backings for OneFile {
    fn find(&self, range: HostRange, _: bool) -> Option<BackedBy> {
        let all = self.0.map();
        let is_part = range.addr >= all.addr && range.addr + range.len <= all.addr + all.len;
        let file = is_part.then(|| self.0.open_again().ok())??;
        Some(BackedBy { file, offset: 0, range: all })
    }
}

impl SharedRegion {
    pub fn new(node: &Node, len: usize) -> SharedRegion {
        let path = tempfile::NamedTempFile::new_in("/dev/shm").expect("a name in memory");
        let file = BackingFile::open(path.path(), Some(len as u64), false).expect("a file in memory");
        let addr = file.map().addr;
        node.device.set_backings(Arc::new(OneFile(file)));
        SharedRegion { addr, mr: register(node, addr, len as u64) }
    }
}

/// A region with all rights.
pub fn register(node: &Node, addr: u64, len: u64) -> Arc<Mr> {
    let request = MrRequest { addr, length: len, iova: addr, access: REMOTE_ALL, paging: None };
    node.pd.reg_mr(request).expect("a region")
}
