//! A work request of an initiator, its state, and what it conflicts with.

use std::ops::Range;
use std::sync::Arc;

use smallvec::SmallVec;
use terrace_transport::{SendFlags, SendOp, SendWr, Sge, Time, Wc, WcStatus};

use super::order::{Class, OrderBits};
use super::span::{Bounds, Span};
use super::{paged_region, sub_op, sub_payload};
use crate::pages::PageBitmap;
use crate::region::{Knowledge, Region};
use crate::request::{self, Local, Remote};
use crate::sge_list;
use crate::signature::PAGE_BYTES;

/// The sequence number of a work request of its initiator.
pub(super) type Seq = u64;

const PAGE: u64 = PAGE_BYTES as u64;

/// Where a request is on its way.
///
/// ```text
///            order permits it            local memory held         versions known
///   Queued ───────────────────> Holding ──────────────────> Learning ─────────────> Active ────────> Done
///      │                                        (WRITE only)   all posts, calls and checks over  │     │
///      └──── flushed ───────────────────────────────────────────────────────────> Active         │     │
///                                                                           ^    some pages: two-sided │
///                                                                           └────┴─ an earlier WRITE   ┘
///                                                                               to its bytes is repeated
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Waits for earlier requests.
    Queued,
    /// Waits for its local memory.
    Holding,
    /// A WRITE that waits for the versions of its pages.
    Learning,
    /// Posts, calls or checks of it are under way.
    Active,
    /// Nothing of it is under way.
    Done,
}

/// Whether the versions of a WRITE's pages are read again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Check {
    /// There is nothing to check, or it is over.
    None,
    /// The WRITE is posted; the READ of versions is not.
    Due,
    /// The READ of versions is posted behind it.
    Posted,
}

/// A work request.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) wr: SendWr,
    /// Bytes to send, or to read.
    pub(super) length: u64,
    pub(super) class: Class,
    pub(super) order: OrderBits,
    pub(super) remote: Option<Remote>,
    /// The region, if pages of it may be absent.
    pub(super) region: Option<Arc<Region>>,
    /// Whether the peer has not described the region yet.
    pub(super) is_unknown: bool,
    pub(super) state: State,
    /// Whether its local memory is held, or is about to be.
    pub(super) is_held: bool,
    /// Whether all of its local memory is held by now.
    pub(super) is_ready: bool,
    /// Whether it was begun behind a WRITE to the same bytes that was not checked.
    pub(super) is_chained: bool,
    /// The versions that its pages had before; `None` for pages that were absent.
    pub(super) bases: SmallVec<[Option<u32>; 2]>,
    /// The time of the oldest of them.
    pub(super) bases_at: Time,
    /// Pages that are to be repeated two-sided.
    pub(super) redo: PageBitmap,
    /// The number of its posts that are queued or on the queue pair.
    pub(super) posts: u32,
    /// The number of its calls that are unsent or unanswered.
    pub(super) calls: u32,
    pub(super) check: Check,
    /// Whether a part of it was repeated.
    pub(super) was_repeated: bool,
    /// The status of its failure, and the vendor error.
    pub(super) failure: Option<(WcStatus, u32)>,
    /// The NIC's completion, if the NIC executed all of it.
    pub(super) wc: Option<Wc>,
}

impl Entry {
    pub(super) fn new(wr: SendWr, known: &Knowledge, order: OrderBits) -> Entry {
        let length = match wr.op {
            SendOp::CompareSwap { .. }
            | SendOp::FetchAdd { .. }
            | SendOp::MaskedCompareSwap { .. }
            | SendOp::MaskedFetchAdd { .. }
            | SendOp::AtomicWrite { .. } => 8,
            _ => wr.payload.len(),
        };
        let mut entry = Entry {
            length,
            class: Class::of(&wr.op),
            order,
            remote: None,
            region: None,
            is_unknown: false,
            state: State::Queued,
            is_held: false,
            is_ready: false,
            is_chained: false,
            bases: SmallVec::new(),
            bases_at: Time(u64::MAX),
            redo: PageBitmap::default(),
            posts: 0,
            calls: 0,
            check: Check::None,
            was_repeated: false,
            failure: None,
            wc: None,
            wr,
        };
        entry.locate(known);
        entry
    }

    /// Notes what is known of its region. FLUSH is the NIC's: it does not depend on which pages are present.
    fn locate(&mut self, known: &Knowledge) {
        self.remote = Remote::of(&self.wr.op, self.length, known);
        let is_transfer = self.class != Class::Message;
        self.is_unknown = is_transfer && self.remote.is_some() && matches!(known, Knowledge::Unknown);
        self.region = match (paged_region(known), &self.remote) {
            // Beyond its bounds, and for an atomic between words, the NIC refuses it.
            (Some(region), Some(remote))
                if is_transfer
                    && region.layout().covers(remote.va, remote.length)
                    && (self.class != Class::Atomic || remote.va % 8 == 0) =>
            {
                Some(Arc::clone(region))
            }
            _ => None,
        };
    }

    /// Takes what the peer has described for a key. False if that is not its key, or was known.
    pub(super) fn describe(&mut self, rkey: u32, known: &Knowledge) -> bool {
        let is_its = self.is_unknown && self.remote.as_ref().is_some_and(|remote| remote.rkey == rkey);
        if is_its {
            self.locate(known);
        }
        is_its
    }

    /// A request that the peer permits if it permits this one, and that changes nothing. `None` for one that accesses no memory of the
    /// peer.
    pub(super) fn proof(&self) -> Option<SendOp> {
        let Remote { va, rkey, .. } = *self.remote.as_ref()?;
        Some(match self.wr.op {
            SendOp::Read { .. } => SendOp::Read { va, rkey },
            SendOp::Write { .. } | SendOp::WriteImm { .. } | SendOp::AtomicWrite { .. } => {
                SendOp::Write { va, rkey }
            }
            _ => SendOp::FetchAdd { va, rkey, add: 0 },
        })
    }

    /// The elements of its scatter/gather list; none for a payload outside the program's memory.
    pub(super) fn sges(&self) -> &[Sge] {
        self.wr.payload.sges().unwrap_or_default()
    }

    /// The first element of a byte range of it, as far as it is in the range.
    pub(super) fn element(&self, range: &Range<u64>) -> Option<Sge> {
        let first = sge_list::sub_elements(self.sges(), range.start, range.end - range.start).next();
        first.map(|(_, sge)| sge)
    }

    /// The work request for a byte range of it, with `notice`: how its end becomes known.
    pub(super) fn part(&self, token: u64, range: &Range<u64>, notice: SendFlags) -> SendWr {
        let flags = (self.wr.flags - SendFlags::SIGNALED) | notice;
        SendWr {
            wr_id: token,
            op: sub_op(self.wr.op, range.start),
            payload: sub_payload(&self.wr.payload, range),
            flags,
            target: self.wr.target.clone(),
        }
    }

    /// The region and the first address, of a request whose pages may be absent.
    pub(super) fn paged(&self) -> Option<(&Arc<Region>, u64)> {
        self.region.as_ref().zip(self.remote.as_ref().map(|remote| remote.va))
    }

    /// The number of its first page in its region, and how many pages it has.
    pub(super) fn pages(&self) -> Range<u64> {
        let Some((region, va)) = self.paged() else { return 0..0 };
        let first = region.layout().grid(va) / PAGE;
        first..first + region.layout().page_count(va, self.length) as u64
    }

    /// The byte range of some of its pages, counted from its first.
    pub(super) fn range_of(&self, pages: Range<usize>) -> Range<u64> {
        let offset = self.paged().map_or(0, |(region, va)| region.layout().page_offset(va) as u64);
        (pages.start as u64 * PAGE).saturating_sub(offset)
            ..(pages.end as u64 * PAGE - offset).min(self.length)
    }

    /// Marks one of its pages, counted from its first, to be repeated. True if it was not marked.
    pub(super) fn mark(&mut self, page: usize) -> bool {
        let count = self.pages().count();
        if self.redo.page_count() != count {
            self.redo = PageBitmap::new(count);
        }
        let is_new = !self.redo.contains(page);
        self.redo.insert(page);
        self.was_repeated = true;
        if self.state == State::Done {
            self.state = State::Active;
        }
        is_new
    }

    /// Marks all of its pages.
    pub(super) fn mark_all(&mut self) {
        for page in 0..self.pages().count() {
            self.mark(page);
        }
    }

    /// Whether nothing of it is under way.
    pub(super) fn is_idle(&self) -> bool {
        self.state == State::Active && self.posts == 0 && self.calls == 0 && self.check == Check::None
    }

    /// Whether it changes the program's memory. APPEND is a message for the order, and returns the record's offset.
    pub(super) fn returns_data(&self) -> bool {
        self.class.returns_data() || matches!(self.wr.op, SendOp::Append { .. })
    }

    /// What it accesses, compactly.
    pub(super) fn span(&self) -> Span {
        let local = self.sges().iter().map(|sge| Bounds::of(sge.addr, sge.length.into()));
        Span {
            remote: match &self.remote {
                None => Bounds::NONE,
                Some(remote) if remote.has_place() => Bounds::of(remote.va, remote.length),
                Some(_) => Bounds::ALL,
            },
            local: local.fold(Bounds::NONE, Bounds::with),
            class: self.class,
            returns_data: self.returns_data(),
            order: self.order,
            is_fenced: self.wr.flags.contains(SendFlags::FENCE),
        }
    }

    /// Whether two requests access a byte that one of them changes.
    pub(super) fn conflicts(&self, other: &Entry) -> bool {
        let changes_remote = self.class.writes() || other.class.writes();
        let changes_local = self.returns_data() || other.returns_data();
        (changes_remote && self.overlaps_remote(other)) || (changes_local && self.shares_local_memory(other))
    }

    /// Whether two requests access the same memory of the peer.
    pub(super) fn overlaps_remote(&self, other: &Entry) -> bool {
        matches!((&self.remote, &other.remote), (Some(left), Some(right)) if left.overlaps(right))
    }

    fn shares_local_memory(&self, other: &Entry) -> bool {
        self.sges()
            .iter()
            .any(|sge| other.sges().iter().any(|else_| Local::from(sge).overlaps(&else_.into())))
    }

    /// Whether two WRITEs to one region write a byte of this page of the region in common.
    pub(super) fn shares_page(&self, other: &Entry, page: u64) -> bool {
        let (Some((region, va)), Some((other_region, other_va))) = (self.paged(), other.paged()) else {
            return false;
        };
        let start = region.layout().grid(va).max(other_region.layout().grid(other_va)).max(page * PAGE);
        let end = (region.layout().grid(va) + self.length)
            .min(other_region.layout().grid(other_va) + other.length)
            .min((page + 1) * PAGE);
        region.description().region_id == other_region.description().region_id && start < end
    }

    /// Ends it as flushed, before anything of it has begun.
    pub(super) fn flush(&mut self) {
        self.failure = Some((WcStatus::Flushed, 0));
        if self.state != State::Done {
            self.state = State::Active;
        }
        // The check behind an unsignaled WRITE says that nothing of it is under way any more.
        if self.check == Check::Due && self.posts == 0 {
            self.check = Check::None;
        }
    }

    /// The completion; `None` for an unsignaled success.
    pub(super) fn completion(&self, qpn: u32, signal_all: bool) -> Option<Wc> {
        request::completion(&self.wr, self.length, self.failure, self.wc, qpn, signal_all)
    }
}
