//! Regions for which the server serves this queue pair's calls, and for which its NIC answers with the signature page.
//!
//! One message requests both ([`Magic`](crate::proto::Magic)): it names the queue pair through which the client may
//! use the region. It is sent when a region is first used, and nothing waits for the answer: until then READs are made
//! as of a plain region, but their data is inspected, because the NIC may start to answer with the signature page at
//! any time.
//!
//! ```text
//!   first use          nothing unchecked under way          Ok
//!   ----------> Wanted -----------------------------> Asked ----> Granted
//!                 ^                                     |
//!                 +------- not now: after a while ------+------> Refused: a plain region
//!                                                          never
//! ```

use std::sync::Arc;

use terrace_transport::Time;

use crate::proto::Status;
use crate::region::Region;

/// A server that cannot grant yet is asked again after this long, in nanoseconds, and twice as long each further time:
/// its end of the queue pair may not be connected yet.
const RETRY_NS: u64 = 500_000;
/// How often it is asked in all; the last answer comes after half a second at the soonest.
const TRIES_MAX: u32 = 11;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Wanted,
    Asked,
    Granted,
    Refused,
}

#[derive(Debug)]
struct Grant {
    region: Arc<Region>,
    state: State,
    /// Whether READs may be answered with the signature page.
    may_be_on: bool,
    /// The earliest time of the next request.
    not_before: Time,
    refusals: u32,
}

/// The consequence of an answer.
#[derive(Debug)]
pub(super) enum Verdict {
    Granted(Arc<Region>),
    /// It will be requested again.
    Later,
    /// The region is accessed as a plain one; the rkey may name another one by now.
    Refused {
        is_outdated: bool,
    },
}

/// The grants of a session. Most have one or two.
#[derive(Debug, Default)]
pub(super) struct Grants {
    list: Vec<Grant>,
}

impl Grants {
    fn find(&self, region: &Region) -> Option<&Grant> {
        self.list.iter().find(|grant| is_same(&grant.region, region))
    }

    /// Notes that a region is used.
    pub(super) fn want(&mut self, region: &Arc<Region>) {
        if self.find(region).is_none() {
            let (region, not_before) = (Arc::clone(region), Time(0));
            self.list.push(Grant { region, state: State::Wanted, may_be_on: false, not_before, refusals: 0 });
        }
    }

    /// Whether calls for a region are served.
    pub(super) fn is_granted(&self, region: &Region) -> bool {
        self.find(region).is_some_and(|grant| grant.state == State::Granted)
    }

    /// Whether a region was refused, and so is a plain one.
    pub(super) fn is_refused(&self, region: &Region) -> bool {
        self.find(region).is_some_and(|grant| grant.state == State::Refused)
    }

    /// Whether a READ of a region may have been answered with the signature page.
    pub(super) fn may_be_on(&self, region: &Region) -> bool {
        self.find(region).is_some_and(|grant| grant.may_be_on)
    }

    /// The next region to request, and whether with the signature page. That has to wait for READs whose data is not
    /// inspected.
    pub(super) fn ask(
        &mut self,
        now: Time,
        pattern: bool,
        is_unchecked: impl Fn(u32) -> bool,
    ) -> Option<Arc<Region>> {
        let grant = self.list.iter_mut().find(|grant| {
            let is_due = grant.state == State::Wanted && grant.not_before <= now;
            is_due && !(pattern && is_unchecked(grant.region.rkey()))
        })?;
        grant.state = State::Asked;
        grant.may_be_on |= pattern;
        Some(Arc::clone(&grant.region))
    }

    /// When a region is to be requested again, apart from regions that wait for an event.
    pub(super) fn deadline(&self, is_unchecked: impl Fn(u32) -> bool) -> Option<Time> {
        let wanted = self.list.iter().filter(|grant| grant.state == State::Wanted);
        wanted.filter(|grant| !is_unchecked(grant.region.rkey())).map(|grant| grant.not_before).min()
    }

    /// Handles the answer about a registration.
    pub(super) fn answer(&mut self, now: Time, rkey: u32, region_id: u64, status: Status) -> Verdict {
        let is_it = |region: &Region| (region.rkey(), region.description().region_id) == (rkey, region_id);
        let Some(grant) =
            self.list.iter_mut().find(|grant| grant.state == State::Asked && is_it(&grant.region))
        else {
            return Verdict::Later;
        };
        if status == Status::Ok {
            grant.state = State::Granted;
            return Verdict::Granted(Arc::clone(&grant.region));
        }
        grant.may_be_on = false;
        if matches!(status, Status::Busy | Status::AccessDenied) && grant.refusals + 1 < TRIES_MAX {
            grant.state = State::Wanted;
            grant.not_before = now.after_ns(RETRY_NS << grant.refusals);
            grant.refusals += 1;
            return Verdict::Later;
        }
        grant.state = State::Refused;
        Verdict::Refused { is_outdated: status == Status::NoSuchRegion }
    }

    /// The server, or the connection to it, is another one: all regions have to be requested again. Its NIC may still
    /// answer with signature pages.
    pub(super) fn start_anew(&mut self) {
        for grant in &mut self.list {
            (grant.state, grant.not_before, grant.refusals) = (State::Wanted, Time(0), 0);
        }
    }
}

fn is_same(left: &Arc<Region>, right: &Region) -> bool {
    std::ptr::eq(Arc::as_ptr(left), right)
        || (left.rkey(), left.description().region_id) == (right.rkey(), right.description().region_id)
}
