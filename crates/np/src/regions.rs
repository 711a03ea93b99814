//! What the peer learns of this end's regions: descriptions of keys, and version tables that it may READ.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use terrace_access::layout::Layout;
use terrace_access::proto::{Body, Done, Found, Mode, Open, Opened, RegionDescription, Status, Table};
use terrace_memory::Pager;
use terrace_nic::{AccessNeed, Mr, MrRequest, PagedKey, QueuePair};

use crate::memory::status;
use crate::session::Session;

/// `ibv_access_flags`.
const REMOTE_READ: u32 = 1 << 2;
const PAGE: u64 = 4096;

/// A version table that the peer may READ. It keeps the pager, whose memory it is.
struct OpenTable {
    region_id: u64,
    mr: Arc<Mr>,
    _pager: Arc<dyn Pager>,
}

impl Drop for OpenTable {
    fn drop(&mut self) {
        if let Err(error) = self.mr.dereg() {
            tracing::error!(%error, "a version table cannot be deregistered");
        }
    }
}

/// What a session's peer has learned.
#[derive(Default)]
pub(crate) struct Regions {
    /// By rkey.
    tables: HashMap<u32, OpenTable>,
}

impl Regions {
    /// The answer to the peer's question about a key.
    pub fn describe(&self, session: &Session, qp: &QueuePair, rkey: u32) -> Body<'static> {
        let done = |status| Body::Done(Done::one(status));
        let key = match qp.paged_key(rkey) {
            Ok(Some(key)) => key,
            Ok(None) => return done(Status::Plain),
            Err(error) => return done(status(error)),
        };
        // The addresses are for those only who may access one of them.
        let permits = |need| qp.check_peer(rkey, key.start, 1, need).is_ok();
        if ![AccessNeed::Read, AccessNeed::Write, AccessNeed::Atomic].into_iter().any(permits) {
            return done(Status::AccessDenied);
        }
        let Some((layout, region_id)) = layout_of(session, rkey, &key) else { return done(Status::Invalid) };
        let signature_key = session.service.signature_key;
        let region = RegionDescription { layout, signature_key, region_id, mode: Mode::OneSided };
        Body::Found(Found { rkey, region })
    }

    /// Has the peer READ the versions of a region.
    pub fn open(&mut self, session: &Session, qp: &Arc<QueuePair>, open: &Open) -> Result<Opened, Status> {
        let key = qp.paged_key(open.rkey).map_err(status)?.ok_or(Status::Plain)?;
        // WRITEs are checked by versions, and nothing else is.
        qp.check_peer(open.rkey, key.start, 1, AccessNeed::Write).map_err(status)?;
        let (layout, region_id) = layout_of(session, open.rkey, &key).ok_or(Status::Invalid)?;
        if region_id != open.region_id {
            return Err(Status::NoSuchRegion);
        }
        if qp.query().max_dest_rd_atomic == 0 {
            return Err(Status::AccessDenied);
        }
        let all = key.pager.translation().versions();
        let entry_bytes = all.len / key.pager.translation().range().len.div_ceil(PAGE).max(1);
        let length = (layout.lead_bytes() + layout.length()).div_ceil(PAGE) * entry_bytes;
        if length == 0 || length > all.len {
            return Err(Status::Unsupported);
        }
        if self.tables.get(&open.rkey).is_none_or(|table| table.region_id != region_id) {
            if let Some(old) = self.tables.remove(&open.rkey) {
                qp.permit_reads_of(old.mr.rkey(), false);
            }
            let request =
                MrRequest { addr: all.addr, length, iova: all.addr, access: REMOTE_READ, paging: None };
            let mr = qp.pd().reg_mr(request).map_err(|_| Status::Unsupported)?;
            qp.permit_reads_of(mr.rkey(), true);
            self.tables.insert(open.rkey, OpenTable { region_id, mr, _pager: key.pager });
        }
        let mr = &self.tables[&open.rkey].mr;
        let versions = Table { va: mr.addr(), length_bytes: length, rkey: mr.rkey() };
        Ok(Opened { bitmap: Table { va: 0, length_bytes: 0, rkey: 0 }, versions })
    }
}

/// The layout of a paged key for the peer, and the id of its registration.
fn layout_of(session: &Session, rkey: u32, key: &PagedKey) -> Option<(Layout, u64)> {
    let translation = key.pager.translation();
    let lead = key.range.addr.checked_sub(translation.range().addr)?;
    let layout = Layout::new(key.start, key.range.len, lead, translation.unit_bytes() as u32)?;
    let mut hasher = DefaultHasher::new();
    let pager = Arc::as_ptr(&key.pager).cast::<()>() as u64;
    (session.service.salt, rkey, pager, key.start, key.range.addr, key.range.len).hash(&mut hasher);
    Some((layout, hasher.finish()))
}
