//! The queue pairs by which a client fetches absent pages: a READ on them waits until the server has the pages in memory.
//!
//! The server's NIC answers the READs of a queue pair in order, and those of the accesses' queue pair with the signature
//! page where a page is absent. So fetches have queue pairs of their own, and several: a fetch then waits for few others.
//! A READ and its response are packets like those of accesses to resident pages, and leave in the same bursts.

use std::collections::VecDeque;
use std::sync::Arc;

use terrace_access::pages::PageBitmap;
use terrace_access::proto::{Read, Status};
use terrace_access::signature::PAGE_BYTES;
use terrace_nic::{
    Error, Payload, QpAttr, QpAttrMask, QpState, QueuePair, SendFlags, SendOp, SendWr, Sge, SgeList, Wc,
    WcStatus,
};

/// Queue pairs for fetches.
pub(super) const PAIR_COUNT: usize = 4;
/// The most READs in flight of each.
pub(super) const PAIR_DEPTH: u32 = 64;

/// A READ of a fetch.
#[derive(Debug)]
struct Posted {
    id: u64,
    /// Whether it is the fetch's last.
    is_last: bool,
}

struct Pair {
    qp: Arc<QueuePair>,
    /// READs that are not on the queue pair yet, and those that are, in order.
    unposted: VecDeque<(Posted, SendWr)>,
    posted: VecDeque<Posted>,
    /// The failure that moved the queue pair to the error state.
    failure: Option<Status>,
}

/// The outcome of a fetch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fetched {
    /// The call with this id has this outcome.
    Done(u64, Status),
    /// The server does not answer.
    Lost,
}

/// Fetches over some queue pairs.
#[derive(Default)]
pub(super) struct Fetches {
    pairs: Vec<Pair>,
    /// Work requests that are being posted.
    batch: Vec<SendWr>,
}

impl Fetches {
    /// Fetches over connected queue pairs, whose READs of absent pages wait.
    pub fn new(qps: Vec<Arc<QueuePair>>) -> Fetches {
        let pair = |qp| Pair { qp, unposted: VecDeque::new(), posted: VecDeque::new(), failure: None };
        Fetches { pairs: qps.into_iter().map(pair).collect(), batch: Vec::new() }
    }

    /// Whether there are queue pairs for fetches.
    pub fn has_pairs(&self) -> bool {
        !self.pairs.is_empty()
    }

    /// Begins a fetch; [`Fetches::post`] posts it.
    pub fn begin(&mut self, id: u64, read: &Read) {
        let load = |pair: &&mut Pair| pair.posted.len() + pair.unposted.len();
        let Some(pair) = self.pairs.iter_mut().min_by_key(load) else { return };
        let mut wrs = work_requests(read).peekable();
        while let Some(wr) = wrs.next() {
            pair.unposted.push_back((Posted { id, is_last: wrs.peek().is_none() }, wr));
        }
    }

    /// Posts READs, as far as the queue pairs have space.
    ///
    /// # Errors
    /// If a queue pair refuses work requests.
    pub fn post(&mut self) -> Result<(), Error> {
        for pair in &mut self.pairs {
            while pair.posted.len() < PAIR_DEPTH as usize
                && let Some((posted, wr)) = pair.unposted.pop_front()
            {
                pair.posted.push_back(posted);
                self.batch.push(wr);
            }
            if !self.batch.is_empty() {
                pair.qp.post_send_batch(&mut self.batch)?;
            }
        }
        Ok(())
    }

    /// Handles a completion. `None` if the fetch has READs left, or is not one of these queue pairs'.
    pub fn handle_completion(&mut self, wc: &Wc) -> Option<Fetched> {
        let pair = self.pairs.iter_mut().find(|pair| pair.qp.qpn() == wc.qpn)?;
        let posted = pair.posted.pop_front()?;
        let status = match wc.status {
            WcStatus::Success => return posted.is_last.then_some(Fetched::Done(posted.id, Status::Ok)),
            // The READs behind a failed one have its status.
            WcStatus::Flushed => pair.failure,
            WcStatus::RemoteAccess => Some(Status::AccessDenied),
            WcStatus::RemoteOperation => Some(Status::DeviceError),
            WcStatus::LocalProtection => Some(Status::ClientMemory),
            _ => None,
        };
        pair.failure = status;
        Some(status.map_or(Fetched::Lost, |status| Fetched::Done(posted.id, status)))
    }

    /// Ends all fetches: the NIC writes no more of their data into the program's memory.
    pub fn close(&mut self) {
        for pair in self.pairs.drain(..) {
            let error = QpAttr { state: QpState::Err, ..QpAttr::default() };
            // The error state can be reached from every state.
            let _ = pair.qp.modify(&error, QpAttrMask::STATE);
        }
    }
}

/// A READ for each run of a request's pages.
fn work_requests(read: &Read) -> impl Iterator<Item = SendWr> {
    let Read { rkey, va, length, dest_va, dest_rkey, .. } = *read;
    let (lead, pages) = match &read.pages {
        Some(pages) => (u64::from(pages.offset), pages.wanted.clone()),
        None => (0, PageBitmap::full((length as usize).div_ceil(PAGE_BYTES))),
    };
    let runs: Vec<_> = pages.runs().collect();
    runs.into_iter().map(move |run| {
        let from = (run.start * PAGE_BYTES) as u64;
        let from = from.saturating_sub(lead);
        let to = ((run.end * PAGE_BYTES) as u64 - lead).min(length.into());
        let into = Sge { addr: dest_va + from, length: (to - from) as u32, lkey: dest_rkey };
        SendWr {
            wr_id: 0,
            op: SendOp::Read { va: va + from, rkey },
            payload: Payload::Sges(SgeList::from_slice(&[into])),
            flags: SendFlags::SIGNALED,
            target: None,
        }
    })
}

#[cfg(test)]
mod tests {
    use terrace_access::proto::Pages;

    use super::*;

    /// The READs of a request: the offset of each from the request's first byte, and its length.
    fn reads_of(offset: u16, length: u32, pages: Option<&[usize]>) -> Vec<(u64, u32)> {
        let pages = pages.map(|wanted| {
            let page_count = (usize::from(offset) + length as usize).div_ceil(PAGE_BYTES);
            let mut set = PageBitmap::new(page_count);
            wanted.iter().for_each(|&page| set.insert(page));
            Pages { offset, wanted: set }
        });
        let read = Read { rkey: 7, va: 0x10_0000, length, pages, dest_va: 0x50_0000, dest_rkey: 9 };
        work_requests(&read)
            .map(|wr| match (wr.op, wr.payload) {
                (SendOp::Read { va, rkey: 7 }, Payload::Sges(sges)) => {
                    let [Sge { addr, length, lkey: 9 }] = sges[..] else { panic!("one element: {sges:?}") };
                    assert_eq!(va - 0x10_0000, addr - 0x50_0000);
                    (va - 0x10_0000, length)
                }
                other => panic!("{other:?}"),
            })
            .collect()
    }

    #[test]
    fn each_run_of_wanted_pages_is_one_read() {
        assert_eq!(reads_of(0, 4096, Some(&[0])), [(0, 4096)]);
        assert_eq!(reads_of(100, 8, Some(&[0])), [(0, 8)]);
        assert_eq!(reads_of(4000, 5000, Some(&[0, 2])), [(0, 96), (4192, 808)]);
        assert_eq!(reads_of(4000, 5000, Some(&[1, 2])), [(96, 4904)]);
        assert_eq!(reads_of(0, 5 * 4096, Some(&[0, 1, 3])), [(0, 8192), (12288, 4096)]);
        assert_eq!(reads_of(0, 5000, None), [(0, 5000)]);
    }
}
