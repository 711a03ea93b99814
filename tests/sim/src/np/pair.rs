//! A queue pair between the nodes, its initiator and its target, and the program that uses it.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use terrace_access::optimistic::{Config, Initiator, OrderBits, Scratch, Target, TargetConfig};
use terrace_nic::{QueuePair, Wc, WcStatus};

use super::messages::Control;
use super::model::Model;
use super::pages::{PAGE, Pages};
use super::plan::Plan;
use super::side::SCRATCH;
use crate::world::{Checked, ensure};

/// Bytes at the beginning of a pair's local memory for what shared counters return.
pub(super) const SLOTS_BYTES: usize = 256;

/// Longest time that a target lets a peer hold pages, in nanoseconds: longer than any loss of packets lasts.
const HOLD_NS_MAX: u64 = 10_000_000_000;

/// A posted request of the program.
#[derive(Debug)]
pub(super) struct Posted {
    pub number: u32,
    pub is_signaled: bool,
    /// The local memory that it uses, in the pair's.
    pub local: Vec<Range<usize>>,
    /// Of an addition to the shared counter: the summand.
    pub add: Option<u64>,
    /// Whether all later requests follow it.
    pub is_followed: bool,
}

/// A WRITE that ordering bits order behind others.
#[derive(Debug)]
struct Ordered {
    number: u32,
    /// Its first 8 bytes in the pair's remote memory, and what they change from and to.
    offset: usize,
    old: [u8; 8],
    new: [u8; 8],
    /// Whether it follows all earlier requests.
    follows_all: bool,
    /// Single requests that it follows.
    follows: Vec<u32>,
}

/// A message that the peer's program is to receive.
#[derive(Debug)]
pub(super) struct Message {
    pub number: u32,
    /// The data of a SEND.
    pub data: Option<Vec<u8>>,
    pub imm: Option<u32>,
    pub byte_len: u32,
}

pub(super) struct Pair {
    pub qps: [Arc<QueuePair>; 2],
    pub initiator: Initiator,
    pub target: Target,
    pub control: Control,
    /// Requests that are not answered, by id.
    pub unanswered: BTreeMap<u64, Box<[u8]>>,
    /// When the initiator learns about the region.
    pub described_at: u64,
    pub is_described: bool,
    pub budget: u32,
    /// Where the pair's memory begins, locally and remotely, and what it holds.
    pub starts: [usize; 2],
    pub models: [Model; 2],
    pub posted: VecDeque<Posted>,
    ordered: Vec<Ordered>,
    pub next_number: u32,
    pub inbound: VecDeque<Message>,
    /// The receive buffers that are posted.
    pub receives: VecDeque<usize>,
    pub free_receives: Vec<usize>,
    /// What the shared counter returned, and the summand.
    pub returned: Vec<(u64, u64)>,
}

impl Pair {
    pub fn new(
        plan: &Plan,
        index: usize,
        qps: [Arc<QueuePair>; 2],
        control: Control,
        scratch_key: u32,
        areas: [(&Pages, Range<usize>); 2],
        described_at: u64,
    ) -> Pair {
        let slot_bytes = plan.slot_bytes;
        let config = Config {
            qpn: qps[0].qpn(),
            tag: 7 + index as u32,
            request_count_max: 32,
            post_count_max: plan.post_count_max,
            call_count_max: plan.call_count_max,
            mtu_bytes: plan.mtu,
            signal_all: false,
            order: plan.order,
            is_two_sided: plan.is_two_sided,
            inline_bytes_max: plan.inline_bytes_max,
            call_bytes_max: plan.call_bytes_max,
            is_reverse_allowed: plan.is_reverse_allowed,
            unchecked_count_max: plan.unchecked_count_max,
            check_delay_ns: plan.check_delay_ns,
            omits_ack_requests: true,
            version_age_ns: plan.version_age_ns,
            scratch: Scratch {
                addr: SCRATCH + u64::from(slot_bytes * plan.slot_count) * index as u64,
                lkey: scratch_key,
                slot_bytes,
                slot_count: plan.slot_count,
            },
        };
        let content = |(pages, range): &(&Pages, Range<usize>)| {
            let mut bytes = vec![0; range.len()];
            pages.peek(range.start, &mut bytes);
            Model::new(bytes)
        };
        let receives = index * super::setup::RECEIVE_COUNT..(index + 1) * super::setup::RECEIVE_COUNT;
        Pair {
            qps,
            initiator: Initiator::new(config),
            target: Target::new(TargetConfig {
                call_count_max: plan.call_count_max,
                move_bytes_max: plan.call_bytes_max,
                hold_ns_max: HOLD_NS_MAX,
                busy_hold_ns_max: 30 * HOLD_NS_MAX,
            }),
            control,
            unanswered: BTreeMap::new(),
            described_at,
            is_described: false,
            budget: plan.budget,
            starts: [areas[0].1.start, areas[1].1.start],
            models: [content(&areas[0]), content(&areas[1])],
            posted: VecDeque::new(),
            ordered: Vec::new(),
            next_number: 0,
            inbound: VecDeque::new(),
            receives: VecDeque::new(),
            free_receives: receives.collect(),
            returned: Vec::new(),
        }
    }

    /// Notes the order that the bits of a request ask for. `write` has the offset, the old data and the new data of a
    /// WRITE.
    pub fn note_order(&mut self, number: u32, bits: OrderBits, write: Option<(usize, &[u8], &[u8])>) {
        let earlier = self.posted.iter().filter(|posted| posted.is_followed && posted.number < number);
        let follows: Vec<u32> = earlier.map(|posted| posted.number).collect();
        if let Some(posted) = self.posted.back_mut() {
            posted.is_followed = bits.contains(OrderBits::AFTER);
        }
        let follows_all = bits.contains(OrderBits::BEFORE);
        let Some((offset, old, new)) = write.filter(|_| follows_all || !follows.is_empty()) else { return };
        if let (Some(&old), Some(&new)) = (old.first_chunk(), new.first_chunk()) {
            self.ordered.push(Ordered { number, offset, old, new, follows_all, follows });
        }
    }

    /// Checks that what a WRITE follows is there when its data are.
    pub fn check_order(&mut self, pages: [&Pages; 2]) -> Checked {
        let (oldest, mut seen) = (self.posted.front().map(|posted| posted.number), Vec::new());
        let start = self.starts[1];
        self.ordered.retain(|ordered| {
            let mut actual = [0; 8];
            pages[1].peek(start + ordered.offset, &mut actual);
            let is_seen = actual == ordered.new && ordered.old != ordered.new;
            let is_under_way = oldest.is_some_and(|oldest| oldest <= ordered.number);
            if is_seen && is_under_way {
                seen.push((ordered.number, ordered.follows_all, ordered.follows.clone()));
            }
            !is_seen && is_under_way
        });
        for (number, follows_all, follows) in seen {
            for (node, pages) in pages.iter().enumerate() {
                let mut actual = vec![0; self.area_bytes(node)];
                pages.peek(self.starts[node], &mut actual);
                let model = &self.models[node];
                let of_all = number.checked_sub(1).filter(|_| follows_all);
                let wrong = of_all
                    .and_then(|last| model.wrong_byte_until(last, &actual))
                    .or_else(|| follows.iter().find_map(|number| model.wrong_byte_of(*number, 0, &actual)));
                ensure!(
                    wrong.is_none(),
                    "request {number} has passed one that it follows: byte {wrong:?} of node {node}"
                );
            }
        }
        Ok(())
    }

    /// Whether a range of the pair's local memory is used by a posted request.
    pub fn is_used(&self, range: &Range<usize>) -> bool {
        let overlaps = |other: &Range<usize>| other.start < range.end && range.start < other.end;
        self.posted.iter().any(|posted| posted.local.iter().any(overlaps))
    }

    /// Whether everything is done on both sides.
    pub fn is_quiet(&self) -> bool {
        let is_done = self.budget == 0 && self.posted.is_empty() && self.inbound.is_empty();
        is_done && self.control.is_quiet() && self.is_over()
    }

    fn is_over(&self) -> bool {
        self.initiator.is_empty() && self.initiator.calls_in_flight() == 0 && self.target.is_empty()
    }

    /// Checks a completion, which must be that of the oldest signaled request, and all requests that end with it.
    pub fn complete(&mut self, wc: &Wc, local: &Pages) -> Checked {
        ensure!(wc.status == WcStatus::Success, "request {} has failed: {:?}", wc.wr_id, wc.status);
        while let Some(posted) = self.posted.pop_front() {
            let number = posted.number;
            for range in &posted.local {
                let mut actual = vec![0; range.len()];
                local.peek(self.starts[0] + range.start, &mut actual);
                if let Some(add) = posted.add {
                    let value = actual[..].try_into().map(u64::from_ne_bytes).expect("a counter has 8 bytes");
                    self.returned.push((value, add));
                    continue;
                }
                let wrong = self.models[0].wrong_byte_of(number, range.start, &actual);
                ensure!(wrong.is_none(), "request {number} has brought a wrong byte to {wrong:?}");
            }
            if posted.is_signaled {
                ensure!(
                    u64::from(number) == wc.wr_id,
                    "request {} has completed before request {number}",
                    wc.wr_id
                );
                return Ok(());
            }
        }
        Err(crate::world::Failure(format!("a completion of request {}, which is not posted", wc.wr_id)))
    }

    /// Checks a received message: it is the next, and all that was written before it is there.
    pub fn receive(&mut self, wc: &Wc, data: &[u8], remote: &Pages) -> Checked {
        ensure!(wc.status == WcStatus::Success, "a receive has failed: {:?}", wc.status);
        let Some(message) = self.inbound.pop_front() else {
            return Err(crate::world::Failure("a message that was not sent".into()));
        };
        let number = message.number;
        ensure!(wc.byte_len == message.byte_len, "message {number} has {} bytes", wc.byte_len);
        ensure!(message.imm.is_none_or(|imm| imm == wc.imm), "message {number} has another immediate");
        ensure!(
            message.data.is_none_or(|sent| sent == data[..sent.len()]),
            "message {number} has other data"
        );
        let mut actual = vec![0; self.area_bytes(1)];
        remote.peek(self.starts[1], &mut actual);
        let wrong = self.models[1].wrong_byte_until(number, &actual);
        ensure!(wrong.is_none(), "byte {wrong:?} is not there with message {number}");
        Ok(())
    }

    /// The bytes of the pair's memory on a node.
    pub fn area_bytes(&self, node: usize) -> usize {
        self.models[node].len()
    }

    /// Checks all memory of the pair, when nothing is under way.
    pub fn check(&self, pages: [&Pages; 2]) -> Checked {
        for (node, pages) in pages.iter().enumerate() {
            let skipped = if node == 0 { SLOTS_BYTES } else { 0 };
            let mut actual = vec![0; self.area_bytes(node)];
            pages.peek(self.starts[node], &mut actual);
            let wrong = self.models[node].wrong_byte(skipped, &actual[skipped..]);
            let page = wrong.map(|at| (self.starts[node] + at) / PAGE);
            ensure!(wrong.is_none(), "byte {wrong:?} of node {node} is wrong at the end, in page {page:?}");
        }
        Ok(())
    }
}
