//! The exported regions of a device, by rkey.

use std::collections::HashMap;
use std::sync::Arc;

use terrace_access::layout::Layout;
use terrace_access::proto::{Described, Mode, RegionDescription, Status, Table};
use terrace_hostmem::HostRange;
use terrace_memory::Pager;
use terrace_nic::{Error, Mr, MrRequest, Pd};
use terrace_sync::RwLock;

/// `ibv_access_flags`.
pub(crate) const REMOTE_WRITE: u32 = 1 << 1;
/// `ibv_access_flags`.
pub(crate) const REMOTE_READ: u32 = 1 << 2;

/// A region to export.
pub struct Exported {
    /// Its registration, which has the same pager and the signature page of `signature_key`.
    pub mr: Arc<Mr>,
    /// The flags of the registration (`ibv_access_flags`).
    pub access: u32,
    /// Its pager.
    pub pager: Arc<dyn Pager>,
    /// The key that the signature page is derived from.
    pub signature_key: [u8; 32],
    /// The access mode for clients.
    pub mode: Mode,
    /// The name by which clients open it, if any.
    pub name: Option<String>,
}

/// An exported region.
pub(crate) struct Export {
    pub exported: Exported,
    pub region_id: u64,
    pub layout: Layout,
    bitmap: Arc<Mr>,
    versions: Arc<Mr>,
}

impl Export {
    /// Registers the region's tables in `tables_pd`, for reading.
    fn new(exported: Exported, tables_pd: &Arc<Pd>, region_id: u64) -> Result<Export, Error> {
        let translation = exported.pager.translation();
        let covered = HostRange { addr: exported.mr.addr(), len: exported.mr.length() };
        if !translation.covers(covered) {
            return Err(Error::Invalid("the region is not within its pager's range"));
        }
        let lead = covered.addr - translation.range().addr;
        let layout = Layout::new(exported.mr.iova(), covered.len, lead, translation.unit_bytes() as u32)
            .ok_or(Error::Invalid("a region of this size cannot be described"))?;
        let bitmap = translation.bitmap();
        let bitmap = register_table(tables_pd, bitmap.as_ptr() as u64, size_of_val(bitmap))?;
        let HostRange { addr, len } = translation.versions();
        let versions = match register_table(tables_pd, addr, len as usize) {
            Ok(versions) => versions,
            Err(error) => {
                deregister_table(&bitmap);
                return Err(error);
            }
        };
        Ok(Export { exported, region_id, layout, bitmap, versions })
    }

    /// The description for a client that requests it by rkey.
    pub fn describe(&self) -> Described {
        match self.exported.mode {
            Mode::Plain => Described::Plain,
            Mode::OneSided | Mode::RpcOnly => Described::Extended(self.description()),
        }
    }

    /// The description for a client that opens the region by name.
    pub fn description(&self) -> RegionDescription {
        let Export { exported: Exported { signature_key, mode, .. }, layout, region_id, .. } = self;
        RegionDescription {
            layout: *layout,
            signature_key: *signature_key,
            region_id: *region_id,
            mode: *mode,
        }
    }

    /// The residency bitmap and the version table.
    pub fn tables(&self) -> (Table, Table) {
        let table = |mr: &Mr| Table { va: mr.addr(), length_bytes: mr.length(), rkey: mr.rkey() };
        (table(&self.bitmap), table(&self.versions))
    }

    /// The range in the pager's addresses, if the region permits the access (`ibv_access_flags`) and covers the range.
    /// Counts the access, so that accesses by RPC are in the statistics, too.
    pub fn begin_access(&self, va: u64, len: u64, access: u32) -> Result<HostRange, Status> {
        if self.exported.access & access != access {
            return Err(Status::AccessDenied);
        }
        if !self.layout.covers(va, len) {
            return Err(Status::OutOfRange);
        }
        let translation = self.exported.pager.translation();
        let range = HostRange { addr: translation.range().addr + self.layout.grid(va), len };
        translation.count(range, translation.is_present(range));
        Ok(range)
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        // The tables are memory of the pager, which is dropped after them.
        deregister_table(&self.bitmap);
        deregister_table(&self.versions);
    }
}

fn register_table(pd: &Arc<Pd>, addr: u64, len: usize) -> Result<Arc<Mr>, Error> {
    pd.reg_mr(MrRequest { addr, length: len as u64, iova: addr, access: REMOTE_READ, paging: None })
}

fn deregister_table(table: &Mr) {
    if let Err(error) = table.dereg() {
        tracing::error!(%error, "a table of a region cannot be deregistered");
    }
}

/// All exported regions of a device.
#[derive(Default)]
pub(crate) struct Exports {
    by_rkey: RwLock<HashMap<u32, Arc<Export>>>,
}

impl Exports {
    /// Adds a region under its rkey.
    pub fn add(&self, exported: Exported, tables_pd: &Arc<Pd>) -> Result<(), Error> {
        let rkey = exported.mr.rkey();
        if exported.name.as_ref().is_some_and(|name| self.find(name).is_some()) {
            return Err(Error::Invalid("a region of that name is exported already"));
        }
        // The id is random, so that no other registration, of any process, has the same.
        let export = Export::new(exported, tables_pd, rand::random())?;
        self.by_rkey.write().insert(rkey, Arc::new(export));
        Ok(())
    }

    /// Removes a region. Jobs in execution finish.
    pub fn remove(&self, rkey: u32) {
        let removed = self.by_rkey.write().remove(&rkey);
        drop(removed);
    }

    /// Whether no region is exported.
    pub fn is_empty(&self) -> bool {
        self.by_rkey.read().is_empty()
    }

    /// The region with this rkey.
    pub fn get(&self, rkey: u32) -> Option<Arc<Export>> {
        self.by_rkey.read().get(&rkey).cloned()
    }

    /// The region with this name.
    pub fn find(&self, name: &str) -> Option<Arc<Export>> {
        self.by_rkey.read().values().find(|export| export.exported.name.as_deref() == Some(name)).cloned()
    }

    /// The protection domain of the named regions.
    pub fn named_pd(&self) -> Option<Arc<Pd>> {
        let by_rkey = self.by_rkey.read();
        by_rkey.values().find(|export| export.exported.name.is_some()).map(|export| export.exported.mr.pd())
    }
}
