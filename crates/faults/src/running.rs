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
use crate::rule::{Kind, Operations, Rule, StorageError, Ways};
use crate::schedule::Window;

/// Direction of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// To be sent.
    Out,
    /// Received.
    In,
}

/// The faults of one packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PacketFate {
    /// The packet is dropped.
    pub lost: bool,
    /// Number of duplicates.
    pub extra_copies: u32,
    /// Which bit to flip, modulo the packet's length.
    pub spoil: Option<u32>,
    /// It is marked "congestion experienced".
    pub mark: bool,
    /// Its delay; later packets wait, too.
    pub delay_ns: u64,
    /// Further delay of this packet alone, so that others overtake it.
    pub held_back_ns: u64,
}

/// Kind of a storage request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StorageOperation {
    /// Read.
    Read,
    /// Write.
    Write,
    /// Make durable.
    Sync,
    /// Write-back, or its retry: the tier does it on its own, at its own times.
    WriteBack,
}

/// The faults of a storage request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StorageFate {
    /// Additional latency.
    pub delay: Duration,
    /// The errno with which it fails instead of being executed.
    pub error: Option<i32>,
}

/// `EIO` and `ENOSPC`, which are the same on all Linux architectures.
const EIO: i32 = 5;
const ENOSPC: i32 = 28;

/// A plan in force: draws faults, counts them, and logs the begin and end of scheduled faults.
///
/// Any thread may call it. Each fault has its own random source, so its draws do not depend on the others.
#[derive(Debug)]
pub struct Faults {
    plan: FaultPlan,
    /// For messages.
    name: String,
    /// The process in which it is in force: a forked child has a copy that logs nothing.
    pid: u32,
    since: Instant,
    counts: Counts,
    packets: Strikes,
    receives: Strikes,
    storage: Strikes,
    /// Whether any fault strikes received packets.
    is_for_arrivals: bool,
}

/// Faults of the same kind of event.
#[derive(Debug)]
struct Strikes {
    any: bool,
    list: Mutex<Vec<Strike>>,
}

#[derive(Debug)]
struct Strike {
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
        let strikes = |concerns: fn(&Kind) -> bool| {
            let list: Vec<Strike> = (plan.rules.iter().zip(1..))
                .filter(|(rule, _)| concerns(&rule.kind))
                .map(|(rule, number)| Strike::new(rule.clone(), number, plan.seed))
                .collect();
            Strikes { any: !list.is_empty(), list: Mutex::new(list) }
        };
        let arrives =
            |rule: &Rule| matches!(rule.kind, Kind::Loss(ways) | Kind::Blackhole(ways) if ways != Ways::Out);
        Faults {
            packets: strikes(Kind::is_of_packets),
            receives: strikes(|kind| *kind == Kind::Rnr),
            storage: strikes(Kind::is_of_storage),
            is_for_arrivals: plan.rules.iter().any(arrives),
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
        // A parent's entries are not this process's.
        in_force.retain(|(of, _, faults)| *of == pid && faults.strong_count() > 0);
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
            .filter(|(of, _, _)| *of == pid)
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
    pub fn is_for_arrivals(&self) -> bool {
        self.is_for_arrivals
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
        for strike in self.packets.list.lock().iter_mut() {
            if strike.goes(direction) && strike.concerns(peer) && strike.strikes(now_ns) {
                strike.spoil(&mut fate, &self.counts);
            }
        }
        fate
    }

    /// Whether a peer's request that would consume a receive is refused as if none were posted.
    pub fn withholds_receive(&self, peer: IpAddr) -> bool {
        self.receives.any && self.withholds_receive_at(peer, self.now_ns())
    }

    fn withholds_receive_at(&self, peer: IpAddr, now_ns: u64) -> bool {
        let mut withheld = false;
        for strike in self.receives.list.lock().iter_mut() {
            withheld |= strike.concerns(peer) && strike.strikes(now_ns);
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
        for strike in self.storage.list.lock().iter_mut() {
            if !strike.is_for(operation) || !strike.strikes(now_ns) {
                continue;
            }
            match &strike.rule.kind {
                Kind::SlowStorage { ns, .. } => {
                    fate.delay += Duration::from_nanos(draw(&mut strike.rng, ns.clone()));
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

impl Strike {
    fn new(rule: Rule, number: usize, seed: u64) -> Strike {
        // Other seeds than that of the unscheduled faults, which is the plan's seed itself.
        let seed = seed.wrapping_add((number as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        Strike { window: Window::new(rule.schedule), rng: StdRng::seed_from_u64(seed), number, rule }
    }

    /// Whether it strikes packets of this direction.
    fn goes(&self, direction: Direction) -> bool {
        match self.rule.kind {
            Kind::Loss(ways) | Kind::Blackhole(ways) => match ways {
                Ways::Both => true,
                Ways::Out => direction == Direction::Out,
                Ways::In => direction == Direction::In,
            },
            _ => direction == Direction::Out,
        }
    }

    fn concerns(&self, peer: IpAddr) -> bool {
        self.rule.peer.is_none_or(|concerned| concerned.to_canonical() == peer.to_canonical())
    }

    fn is_for(&self, operation: StorageOperation) -> bool {
        let operations = match &self.rule.kind {
            Kind::FailingStorage { error: StorageError::NoSpace, .. } => Operations::Write,
            Kind::FailingStorage { operations, .. } | Kind::SlowStorage { operations, .. } => *operations,
            _ => return false,
        };
        match operations {
            // Otherwise the counts would include more than the peers' requests.
            Operations::Any => operation != StorageOperation::WriteBack,
            Operations::Read => operation == StorageOperation::Read,
            Operations::Write => operation == StorageOperation::Write,
            Operations::Sync => operation == StorageOperation::Sync,
            Operations::WriteBack => operation == StorageOperation::WriteBack,
        }
    }

    /// Counts an event in its scope, and returns whether the fault strikes it.
    fn strikes(&mut self, now_ns: u64) -> bool {
        let admission = self.window.admit(now_ns);
        if admission.changed {
            let what = if admission.open { "begins" } else { "ends" };
            tracing::info!("fault {} ({}) {what}", self.number, self.rule.name);
        }
        let certain = self.rule.probability >= 1.0;
        admission.open && (certain || self.rng.random::<f64>() < self.rule.probability)
    }

    fn spoil(&mut self, fate: &mut PacketFate, counts: &Counts) {
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
                fate.spoil = Some(self.rng.random());
                Injected::PacketCorrupted
            }
            Kind::Reorder { hold_ns_max } => {
                fate.held_back_ns += draw(&mut self.rng, 1..*hold_ns_max + 1);
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
