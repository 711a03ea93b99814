//! Grants: the regions for which the server accepts this queue pair's calls, and for which its NIC answers READs of
//! absent pages with the signature page.
//!
//! One message requests both ([`Magic`](crate::proto::Magic)): it states the queue pair through which the client may
//! use the region. The session sends it at the first use of a region. No request waits for the answer: until then
//! READs are executed as on a plain region, but their data is inspected, because the NIC may answer with the signature
//! page at any time.
//!
//! ```text
//!   first use          no unchecked READ in flight              Ok
//!   ----------> Queued -----------------------------> Requested ----> Granted
//!                 ^                                       |
//!                 +----- Busy, AccessDenied: backoff -----+---------> Refused: a plain region
//!                                                          other status
//! ```

use std::sync::Arc;

use terrace_transport::Time;

use crate::proto::Status;
use crate::region::Region;

/// The delay of the first retry in nanoseconds; it doubles with each retry. A server refuses, for example, while its
/// end of the queue pair is not connected.
const RETRY_NS: u64 = 500_000;
/// The most requests for one region. The last one is sent after half a second at the earliest.
const TRIES_MAX: u32 = 11;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Queued,
    Requested,
    Granted,
    Refused,
}

#[derive(Debug)]
struct Grant {
    region: Arc<Region>,
    state: State,
    /// Whether READs may be answered with the signature page.
    may_return_signature: bool,
    /// The earliest time of the next request.
    not_before: Time,
    refusals: u32,
}

/// The result of a request for a grant.
#[derive(Debug)]
pub(super) enum Verdict {
    Granted(Arc<Region>),
    /// The grant will be requested again.
    Retry,
    /// The region is accessed as a plain one. If the knowledge is outdated, the rkey names another region by now.
    Refused {
        is_outdated: bool,
    },
}

/// The grants of a session. Most sessions have one or two.
#[derive(Debug, Default)]
pub(super) struct Grants {
    list: Vec<Grant>,
}

impl Grants {
    fn find(&self, region: &Region) -> Option<&Grant> {
        self.list.iter().find(|grant| is_same_registration(&grant.region, region))
    }

    /// Queues the request for a region's grant, at its first use.
    pub(super) fn queue_request(&mut self, region: &Arc<Region>) {
        if self.find(region).is_none() {
            let (region, not_before) = (Arc::clone(region), Time(0));
            self.list.push(Grant {
                region,
                state: State::Queued,
                may_return_signature: false,
                not_before,
                refusals: 0,
            });
        }
    }

    /// Whether the server accepts calls for a region.
    pub(super) fn is_granted(&self, region: &Region) -> bool {
        self.find(region).is_some_and(|grant| grant.state == State::Granted)
    }

    /// Whether the server refused a region, which is accessed as a plain one then.
    pub(super) fn is_refused(&self, region: &Region) -> bool {
        self.find(region).is_some_and(|grant| grant.state == State::Refused)
    }

    /// Whether a READ of a region may have been answered with the signature page.
    pub(super) fn may_return_signature(&self, region: &Region) -> bool {
        self.find(region).is_some_and(|grant| grant.may_return_signature)
    }

    /// The next region to request. A request that enables the signature page waits for READs whose data is not
    /// inspected.
    pub(super) fn next_request(
        &mut self,
        now: Time,
        signature: bool,
        is_unchecked: impl Fn(u32) -> bool,
    ) -> Option<Arc<Region>> {
        let grant = self.list.iter_mut().find(|grant| {
            let is_due = grant.state == State::Queued && grant.not_before <= now;
            is_due && !(signature && is_unchecked(grant.region.rkey()))
        })?;
        grant.state = State::Requested;
        grant.may_return_signature |= signature;
        Some(Arc::clone(&grant.region))
    }

    /// The time of the next request, except for regions that wait for an event.
    pub(super) fn deadline(&self, is_unchecked: impl Fn(u32) -> bool) -> Option<Time> {
        let wanted = self.list.iter().filter(|grant| grant.state == State::Queued);
        wanted.filter(|grant| !is_unchecked(grant.region.rkey())).map(|grant| grant.not_before).min()
    }

    /// Handles the answer to a request.
    pub(super) fn handle_answer(&mut self, now: Time, rkey: u32, region_id: u64, status: Status) -> Verdict {
        let is_requested =
            |region: &Region| (region.rkey(), region.description().region_id) == (rkey, region_id);
        let Some(grant) =
            self.list.iter_mut().find(|grant| grant.state == State::Requested && is_requested(&grant.region))
        else {
            return Verdict::Retry;
        };
        if status == Status::Ok {
            grant.state = State::Granted;
            return Verdict::Granted(Arc::clone(&grant.region));
        }
        grant.may_return_signature = false;
        if matches!(status, Status::Busy | Status::AccessDenied) && grant.refusals + 1 < TRIES_MAX {
            grant.state = State::Queued;
            grant.not_before = now.after_ns(RETRY_NS << grant.refusals);
            grant.refusals += 1;
            return Verdict::Retry;
        }
        grant.state = State::Refused;
        Verdict::Refused { is_outdated: status == Status::NoSuchRegion }
    }

    /// Queues all requests again, for a new connection or another server. The NIC may still answer with signature
    /// pages.
    pub(super) fn request_again(&mut self) {
        for grant in &mut self.list {
            (grant.state, grant.not_before, grant.refusals) = (State::Queued, Time(0), 0);
        }
    }
}

fn is_same_registration(left: &Arc<Region>, right: &Region) -> bool {
    std::ptr::eq(Arc::as_ptr(left), right)
        || (left.rkey(), left.description().region_id) == (right.rkey(), right.description().region_id)
}
