//! What the peer learns of this end's regions: descriptions of keys, and version tables that it may READ. A key that has been
//! described is retained: when its region has ended, the peer is asked to forget it, and no other region gets the key before
//! the peer has.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use terrace_access::layout::Layout;
use terrace_access::proto::{Body, Done, Found, Mode, Open, Opened, RegionDescription, Status, Table};
use terrace_memory::Pager;
use terrace_nic::{AccessNeed, Mr, MrRequest, PagedKey, QueuePair, RetainedKey};

use crate::ending::end_table;
use crate::forgets::Forgets;
use crate::memory::status;
use crate::session::Session;

/// `ibv_access_flags`.
const REMOTE_READ: u32 = 1 << 2;
const PAGE: u64 = 4096;

/// A version table that the peer may READ. It keeps the pager, whose memory it is.
struct OpenTable {
    mr: Arc<Mr>,
    pager: Arc<dyn Pager>,
}

impl Drop for OpenTable {
    fn drop(&mut self) {
        end_table(self.mr.clone(), self.pager.clone());
    }
}

/// The region of a key, as it was described.
struct PagedRegion {
    id: u64,
    start: u64,
    pager_start: u64,
    length: u64,
    pager: Weak<dyn Pager>,
    table: Option<OpenTable>,
}

impl PagedRegion {
    fn new(id: u64, key: &PagedKey) -> PagedRegion {
        let (start, pager_start, length) = (key.start, key.range.addr, key.range.len);
        PagedRegion { id, start, pager_start, length, pager: Arc::downgrade(&key.pager), table: None }
    }

    /// Whether the key has been this region's ever since.
    fn is_of(&self, key: &PagedKey) -> bool {
        let place = (self.start, self.pager_start, self.length);
        place == (key.start, key.range.addr, key.range.len)
            && std::ptr::addr_eq(self.pager.as_ptr(), Arc::as_ptr(&key.pager))
    }
}

/// A key that the peer knows.
struct KnownKey {
    /// `None` for memory that is never absent.
    region: Option<PagedRegion>,
    has_ended: bool,
    /// Released behind the table.
    _retained: RetainedKey,
}

/// What a session's peer has learned.
#[derive(Default)]
pub(crate) struct Regions {
    /// By rkey.
    known: HashMap<u32, KnownKey>,
    /// Those of them whose regions have ended.
    pub forgets: Forgets,
}

impl Regions {
    /// The answer to the peer's question about a key.
    pub fn describe(&mut self, session: &Session, qp: &QueuePair, rkey: u32) -> Body<'static> {
        // The region may end at any time: from here on, the session learns of it.
        let retained = qp.retain_key(rkey);
        session.service.watch_key(rkey, session);
        match self.find(session, qp, rkey, retained) {
            Ok(found) => found.map_or(Body::Done(Done::one(Status::Plain)), Body::Found),
            Err(status) => {
                if !self.known.keys().any(|known| known >> 8 == rkey >> 8) {
                    session.service.unwatch_key(rkey, session);
                }
                Body::Done(Done::one(status))
            }
        }
    }

    /// `None` for memory that is never absent.
    fn find(
        &mut self,
        session: &Session,
        qp: &QueuePair,
        rkey: u32,
        retained: RetainedKey,
    ) -> Result<Option<Found>, Status> {
        // A peer that may not access the memory learns nothing of it.
        let permits = |need| qp.check_peer_right(rkey, need);
        [AccessNeed::Read, AccessNeed::Write, AccessNeed::Atomic]
            .into_iter()
            .map(permits)
            .reduce(Result::or)
            .unwrap_or(Ok(()))
            .map_err(status)?;
        let key = qp.paged_key(rkey).map_err(status)?;
        let layout = match &key {
            None => None,
            Some(key) => Some(layout_of(key).ok_or(Status::Invalid)?),
        };
        let known = self.known.entry(rkey).or_insert(KnownKey {
            region: None,
            has_ended: false,
            _retained: retained,
        });
        if known.has_ended {
            return Err(Status::NoSuchRegion);
        }
        let Some((key, layout)) = key.zip(layout) else {
            close_table(qp, known.region.take());
            return Ok(None);
        };
        if !known.region.as_ref().is_some_and(|region| region.is_of(&key)) {
            let id = session.service.new_region_id();
            close_table(qp, known.region.replace(PagedRegion::new(id, &key)));
        }
        let region_id = known.region.as_ref().map_or(0, |region| region.id);
        let signature_key = session.service.signature_key;
        let region = RegionDescription { layout, signature_key, region_id, mode: Mode::OneSided };
        Ok(Some(Found { rkey, region }))
    }

    /// Has the peer READ the versions of a region.
    pub fn open(&mut self, qp: &Arc<QueuePair>, open: &Open) -> Result<Opened, Status> {
        let key = qp.paged_key(open.rkey).map_err(status)?.ok_or(Status::Plain)?;
        // WRITEs are checked by versions, and nothing else is.
        qp.check_peer(open.rkey, key.start, 1, AccessNeed::Write).map_err(status)?;
        let known = self.known.get_mut(&open.rkey).and_then(|known| known.region.as_mut());
        let region = known.filter(|region| region.id == open.region_id && region.is_of(&key));
        let region = region.ok_or(Status::NoSuchRegion)?;
        if qp.query().max_dest_rd_atomic == 0 {
            return Err(Status::AccessDenied);
        }
        let layout = layout_of(&key).ok_or(Status::Invalid)?;
        let all = key.pager.translation().versions();
        let entry_bytes = all.len / key.pager.translation().range().len.div_ceil(PAGE).max(1);
        let length = (layout.lead_bytes() + layout.length()).div_ceil(PAGE) * entry_bytes;
        if length == 0 || length > all.len {
            return Err(Status::Unsupported);
        }
        if region.table.is_none() {
            let request =
                MrRequest { addr: all.addr, length, iova: all.addr, access: REMOTE_READ, paging: None };
            let mr = qp.pd().reg_mr(request).map_err(|_| Status::Unsupported)?;
            qp.permit_reads_of(mr.rkey(), true);
            region.table = Some(OpenTable { mr, pager: key.pager });
        }
        let mr = &region.table.as_ref().ok_or(Status::Unsupported)?.mr;
        let versions = Table { va: mr.addr(), length_bytes: length, rkey: mr.rkey() };
        Ok(Opened { bitmap: Table { va: 0, length_bytes: 0, rkey: 0 }, versions })
    }

    /// Notes that the region or window of a key has ended, whose low 8 bits may have been others: the peer has to forget it.
    /// The version table stays until it has: checks of WRITEs may be under way.
    pub fn end(&mut self, key: u32) {
        let is_ended = |rkey: u32, known: &KnownKey| rkey >> 8 == key >> 8 && !known.has_ended;
        for (rkey, known) in self.known.iter_mut().filter(|(rkey, known)| is_ended(**rkey, known)) {
            known.has_ended = true;
            self.forgets.add(*rkey);
        }
    }

    /// Takes that the peer has forgotten a key. False if it has not been asked to.
    pub fn note_forgotten(&mut self, qp: &QueuePair, rkey: u32) -> bool {
        let is_asked = self.forgets.note_answer(rkey);
        if is_asked && let Some(known) = self.known.remove(&rkey) {
            close_table(qp, known.region);
        }
        is_asked
    }

    /// Whether the peer knows no key.
    pub fn is_empty(&self) -> bool {
        self.known.is_empty()
    }

    /// Forgets what the peer knows, because it cannot be asked to forget it any more. The queue pair is in the error state:
    /// the peer accesses nothing by these keys, which may become other regions'.
    pub fn clear(&mut self, session: &Session, qp: &QueuePair) {
        for (rkey, known) in self.known.drain() {
            session.service.unwatch_key(rkey, session);
            close_table(qp, known.region);
        }
        self.forgets = Forgets::default();
    }

    /// The keys that the peer knows.
    pub fn keys(&self) -> impl Iterator<Item = u32> + '_ {
        self.known.keys().copied()
    }
}

/// Ends the peer's right to READ the version table of a region.
fn close_table(qp: &QueuePair, region: Option<PagedRegion>) {
    if let Some(table) = region.and_then(|region| region.table) {
        qp.permit_reads_of(table.mr.rkey(), false);
    }
}

/// The layout of a paged key for the peer.
fn layout_of(key: &PagedKey) -> Option<Layout> {
    let translation = key.pager.translation();
    let lead = key.range.addr.checked_sub(translation.range().addr)?;
    Layout::new(key.start, key.range.len, lead, translation.unit_bytes() as u32)
}
