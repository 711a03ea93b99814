//! A region of 4 KiB pages in frames, larger than its memory.
#![allow(dead_code)] // Every test file uses its own part of this.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use terrace_memory::Translation;
use terrace_nic::*;
use terrace_pages::{BackingFile, PagedRegion, Pages, PagesConfig};

use crate::common::Node;

struct Progress(Arc<Pages>);

impl ProgressCallback for Progress {
    fn advance(&self) -> bool {
        self.0.advance()
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.0.descriptor())
    }
}

/// A region that a node serves.
pub struct Paged {
    pub mr: Arc<Mr>,
    pub pages: Arc<Pages>,
    pub region: Arc<PagedRegion>,
    _directory: tempfile::TempDir,
}

impl Paged {
    /// A region of so many bytes on a disk, with so much memory.
    pub fn new(node: &Node, region_bytes: u64, memory_bytes: u64, access: u32) -> Paged {
        let directory = tempfile::tempdir_in("/var/tmp").expect("a directory");
        let name = directory.path().file_name().and_then(|name| name.to_str()).expect("a name");
        let config = PagesConfig { is_kept: false, ..PagesConfig::new(name, memory_bytes) };
        let pages = Pages::open(config).expect("a pool");
        let file = BackingFile::open(&directory.path().join("region"), Some(region_bytes)).expect("a file");
        let region = pages.add(file).expect("a region");
        node.device.attach(Arc::new(Progress(pages.clone())));
        let range = region.range();
        let paging =
            Paging { pager: region.clone(), pattern: Arc::new([0xa5; 4096]), policy: RegionPolicy::Wait };
        let request =
            MrRequest { addr: range.addr, length: range.len, iova: range.addr, access, paging: Some(paging) };
        let mr = node.pd.reg_mr(request).expect("registered");
        Paged { mr, pages, region, _directory: directory }
    }
}
