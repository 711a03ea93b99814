//! A plan in force.

use std::net::IpAddr;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use terrace_sync::Mutex;

use crate::counts::{Counts, Injected};
use crate::error::FaultPlanError;
use crate::plan::FaultPlan;
use crate::rule::{Directions, Kind, Operations, Rule, StorageError};
use crate::schedule::Window;

/// The direction of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// A packet to send.
    Out,
    /// A received packet.
    In,
}

/// The faults of one packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PacketFate {
    /// The packet is dropped.
    pub lost: bool,
    /// Number of duplicates.
    pub extra_copies: u32,
    /// The bit to flip, modulo the packet's length.
    pub corrupt_bit: Option<u32>,
    /// The packet is marked "congestion experienced".
    pub mark: bool,
    /// The packet's delay, which also delays later packets.
    pub delay_ns: u64,
    /// Further delay of only this packet, so that later packets overtake it.
    pub reorder_ns: u64,
}

/// Kind of a storage request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StorageOperation {
    /// Read.
    Read,
    /// Write.
    Write,
    /// Sync: makes writes durable.
    Sync,
    /// Write-back or its retry, which memory starts by itself.
    WriteBack,
}

/// The faults of a storage request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StorageFate {
    /// Additional latency.
    pub delay: Duration,
    /// The errno of the request, which is then not executed.
    pub error: Option<i32>,
}

/// `EIO` and `ENOSPC`, which are the same on all Linux architectures.
const EIO: i32 = 5;
const ENOSPC: i32 = 28;

/// A plan in force: draws faults, counts them, and logs the begin and end of scheduled faults.
///
/// Any thread may call it. Each fault has its own random number generator, so its draws do not depend on other faults.
#[derive(Debug)]
pub struct Faults {
    plan: FaultPlan,
    /// The plan's name in messages.
    name: String,
    /// The process in which the plan is in force. A forked child has a copy that logs nothing.
    pid: u32,
    since: Instant,
    counts: Counts,
    packets: ActiveFaults,
    receives: ActiveFaults,
    storage: ActiveFaults,
    /// Whether any fault applies to received packets.
    has_receive_faults: bool,
}

/// Faults of the same kind of event.
#[derive(Debug)]
struct ActiveFaults {
    any: bool,
    list: Mutex<Vec<ActiveFault>>,
}

#[derive(Debug)]
struct ActiveFault {
    rule: Rule,
    /// Counted from 1, as in messages about the plan.
    number: usize,
    window: Window,
    rng: StdRng,
}

/// The process's plans in force, by file.
static IN_FORCE: Mutex<Vec<(u32, PathBuf, Weak<Faults>)>> = Mutex::new(Vec::new());

impl Faults {
    /// Puts a plan into force.
    pub fn new(plan: FaultPlan, name: impl Into<String>) -> Faults {
        let active_faults = |selects: fn(&Kind) -> bool| {
            let list: Vec<ActiveFault> = (plan.rules.iter().zip(1..))
                .filter(|(rule, _)| selects(&rule.kind))
                .map(|(rule, number)| ActiveFault::new(rule.clone(), number, plan.seed))
                .collect();
            ActiveFaults { any: !list.is_empty(), list: Mutex::new(list) }
        };
        let is_receive_fault = |rule: &Rule| matches!(rule.kind, Kind::Loss(directions) | Kind::Blackhole(directions) if directions != Directions::Out);
        Faults {
            packets: active_faults(Kind::is_packet_fault),
            receives: active_faults(|kind| *kind == Kind::Rnr),
            storage: active_faults(Kind::is_storage_fault),
            has_receive_faults: plan.rules.iter().any(is_receive_fault),
            name: name.into(),
            pid: std::process::id(),
            since: Instant::now(),
            counts: Counts::default(),
            plan,
        }
    }

    /// The plan of a file, in force in this process. All devices with the same file share it, from the opening of
    /// the first to the closing of the last.
    ///
    /// # Errors
    /// The file cannot be read, or holds no valid plan.
    pub fn of_process(path: &Path) -> Result<Arc<Faults>, FaultPlanError> {
        let pid = std::process::id();
        let mut in_force = IN_FORCE.lock();
        // Entries of the parent process are removed.
        in_force.retain(|(owner, _, faults)| *owner == pid && faults.strong_count() > 0);
        let known = in_force.iter().find(|(_, known, _)| known == path);
        if let Some(faults) = known.and_then(|(_, _, faults)| faults.upgrade()) {
            return Ok(faults);
        }
        let faults = Arc::new(Faults::new(FaultPlan::load(path)?, path.display().to_string()));
        in_force.push((pid, path.to_owned(), Arc::downgrade(&faults)));
        Ok(faults)
    }

    /// All plans in force in this process.
    pub fn all_of_process() -> Vec<Arc<Faults>> {
        let pid = std::process::id();
        let in_force = IN_FORCE.lock();
        in_force
            .iter()
            .filter(|(owner, _, _)| *owner == pid)
            .filter_map(|(_, _, faults)| faults.upgrade())
            .collect()
    }

    /// The plan.
    pub fn plan(&self) -> &FaultPlan {
        &self.plan
    }

    /// The faults injected so far.
    pub fn counts(&self) -> &Counts {
        &self.counts
    }

    /// One line for users: the plan, and the injected faults.
    pub fn summary(&self) -> String {
        format!("fault plan {} has injected: {}", self.name, self.counts)
    }

    /// Whether received packets must be checked.
    pub fn has_receive_faults(&self) -> bool {
        self.has_receive_faults
    }

    fn now_ns(&self) -> u64 {
        self.since.elapsed().as_nanos() as u64
    }

    /// The faults of a packet to or from a peer, by the plan's scheduled faults. The unscheduled ones are drawn by
    /// the caller.
    pub fn packet(&self, direction: Direction, peer: IpAddr) -> PacketFate {
        if !self.packets.any { PacketFate::default() } else { self.packet_at(direction, peer, self.now_ns()) }
    }

    fn packet_at(&self, direction: Direction, peer: IpAddr, now_ns: u64) -> PacketFate {
        let mut fate = PacketFate::default();
        for fault in self.packets.list.lock().iter_mut() {
            if fault.matches_direction(direction) && fault.matches_peer(peer) && fault.is_drawn(now_ns) {
                fault.apply(&mut fate, &self.counts);
            }
        }
        fate
    }

    /// Whether a peer's request that would consume a receive is answered as if none were posted.
    pub fn withholds_receive(&self, peer: IpAddr) -> bool {
        self.receives.any && self.withholds_receive_at(peer, self.now_ns())
    }

    fn withholds_receive_at(&self, peer: IpAddr, now_ns: u64) -> bool {
        let mut withheld = false;
        for fault in self.receives.list.lock().iter_mut() {
            withheld |= fault.matches_peer(peer) && fault.is_drawn(now_ns);
        }
        if withheld {
            self.counts.add(Injected::RnrNak);
        }
        withheld
    }

    /// The faults of a storage request.
    pub fn storage(&self, operation: StorageOperation) -> StorageFate {
        if !self.storage.any { StorageFate::default() } else { self.storage_at(operation, self.now_ns()) }
    }

    fn storage_at(&self, operation: StorageOperation, now_ns: u64) -> StorageFate {
        let mut fate = StorageFate::default();
        for fault in self.storage.list.lock().iter_mut() {
            if !fault.matches_operation(operation) || !fault.is_drawn(now_ns) {
                continue;
            }
            match &fault.rule.kind {
                Kind::SlowStorage { ns, .. } => {
                    fate.delay += Duration::from_nanos(draw(&mut fault.rng, ns.clone()));
                }
                Kind::FailingStorage { error: StorageError::NoSpace, .. } => fate.error = Some(ENOSPC),
                _ => fate.error = Some(EIO),
            }
        }
        if fate.error.is_some() {
            self.counts.add(Injected::StorageFailed);
        }
        if !fate.delay.is_zero() {
            self.counts.add(Injected::StorageSlowed);
        }
        fate
    }
}

impl Drop for Faults {
    /// Logs the summary when the last device with this plan is closed.
    fn drop(&mut self) {
        if self.pid == std::process::id() {
            tracing::warn!("{}", self.summary());
        }
    }
}

impl ActiveFault {
    fn new(rule: Rule, number: usize, seed: u64) -> ActiveFault {
        // The seed differs from that of the unscheduled faults, which is the plan's seed.
        let seed = seed.wrapping_add((number as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        ActiveFault { window: Window::new(rule.schedule), rng: StdRng::seed_from_u64(seed), number, rule }
    }

    /// Whether the fault applies to packets of this direction.
    fn matches_direction(&self, direction: Direction) -> bool {
        match self.rule.kind {
            Kind::Loss(directions) | Kind::Blackhole(directions) => match directions {
                Directions::Both => true,
                Directions::Out => direction == Direction::Out,
                Directions::In => direction == Direction::In,
            },
            _ => direction == Direction::Out,
        }
    }

    fn matches_peer(&self, peer: IpAddr) -> bool {
        self.rule.peer.is_none_or(|matching| matching.to_canonical() == peer.to_canonical())
    }

    fn matches_operation(&self, operation: StorageOperation) -> bool {
        let operations = match &self.rule.kind {
            Kind::FailingStorage { error: StorageError::NoSpace, .. } => Operations::Write,
            Kind::FailingStorage { operations, .. } | Kind::SlowStorage { operations, .. } => *operations,
            _ => return false,
        };
        match operations {
            // Write-back is excluded, so that counts include only the peers' requests.
            Operations::Any => operation != StorageOperation::WriteBack,
            Operations::Read => operation == StorageOperation::Read,
            Operations::Write => operation == StorageOperation::Write,
            Operations::Sync => operation == StorageOperation::Sync,
            Operations::WriteBack => operation == StorageOperation::WriteBack,
        }
    }

    /// Counts an event in the fault's scope, and returns whether the fault applies to it.
    fn is_drawn(&mut self, now_ns: u64) -> bool {
        let admission = self.window.admit(now_ns);
        if admission.changed {
            let change = if admission.open { "begins" } else { "ends" };
            tracing::info!("fault {} ({}) {change}", self.number, self.rule.name);
        }
        let is_certain = self.rule.probability >= 1.0;
        admission.open && (is_certain || self.rng.random::<f64>() < self.rule.probability)
    }

    fn apply(&mut self, fate: &mut PacketFate, counts: &Counts) {
        counts.add(match &self.rule.kind {
            Kind::Loss(_) => {
                fate.lost = true;
                Injected::PacketLost
            }
            Kind::Blackhole(_) => {
                fate.lost = true;
                Injected::PacketBlackholed
            }
            Kind::Duplicate => {
                fate.extra_copies += 1;
                Injected::PacketDuplicated
            }
            Kind::Corrupt => {
                fate.corrupt_bit = Some(self.rng.random());
                Injected::PacketCorrupted
            }
            Kind::Reorder { hold_ns_max } => {
                fate.reorder_ns += draw(&mut self.rng, 1..*hold_ns_max + 1);
                Injected::PacketReordered
            }
            Kind::Delay { ns } => {
                fate.delay_ns += draw(&mut self.rng, ns.clone());
                Injected::PacketDelayed
            }
            _ => {
                fate.mark = true;
                Injected::PacketMarked
            }
        });
    }
}

fn draw(rng: &mut StdRng, range: Range<u64>) -> u64 {
    if range.end - range.start <= 1 { range.start } else { rng.random_range(range) }
}

#[cfg(test)]
mod tests;
