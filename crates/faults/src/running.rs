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

/// Which way a packet goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// It is about to leave.
    Out,
    /// It has arrived.
    In,
}

/// What is to happen to a packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PacketFate {
    /// It does not go on.
    pub lost: bool,
    /// How often it goes besides.
    pub extra_copies: u32,
    /// Which bit to flip, modulo the packet's length.
    pub spoil: Option<u32>,
    /// It is marked "congestion experienced".
    pub mark: bool,
    /// How long it waits, and what comes after it as well.
    pub delay_ns: u64,
    /// How long it is held back beyond that, while others overtake it.
    pub held_back_ns: u64,
}

/// What is asked of storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StorageOperation {
    /// To read.
    Read,
    /// To write.
    Write,
    /// To make durable.
    Sync,
    /// To write what is in memory back, or to try again to: what the tier does by itself, at times of its own.
    WriteBack,
}

/// What is to happen to a request to storage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StorageFate {
    /// How much longer it takes.
    pub delay: Duration,
    /// The errno with which it fails in place of being carried out.
    pub error: Option<i32>,
}

/// `EIO` and `ENOSPC`, which are the same on every Linux.
const EIO: i32 = 5;
const ENOSPC: i32 = 28;

/// A plan in force: draws what happens, counts it, and says so in the log when a scheduled fault begins and ends.
///
/// Any thread may ask. Each fault has a random source of its own, so what one draws does not depend on the others.
#[derive(Debug)]
pub struct Faults {
    plan: FaultPlan,
    /// For people.
    name: String,
    /// The process that it is in force in: a forked child has a copy, which says nothing.
    pid: u32,
    since: Instant,
    counts: Counts,
    packets: Strikes,
    receives: Strikes,
    storage: Strikes,
    /// Whether any strikes packets that arrive.
    is_for_arrivals: bool,
}

/// Faults that are asked about the same kind of thing.
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

/// The plans in force in this process, by file.
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

    /// The plan of a file, in force in this process: the same one for all devices that name the same file, from when the
    /// first of them is opened to when the last one is gone.
    ///
    /// # Errors
    /// The file cannot be read, or holds no valid plan.
    pub fn of_process(path: &Path) -> Result<Arc<Faults>, FaultPlanError> {
        let pid = std::process::id();
        let mut in_force = IN_FORCE.lock();
        // What a parent has left here is the parent's.
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

    /// What was asked for.
    pub fn plan(&self) -> &FaultPlan {
        &self.plan
    }

    /// What was done so far.
    pub fn counts(&self) -> &Counts {
        &self.counts
    }

    /// One line for people: the plan, and what it has done.
    pub fn summary(&self) -> String {
        format!("fault plan {} has injected: {}", self.name, self.counts)
    }

    /// Whether packets that arrive have to be asked about.
    pub fn is_for_arrivals(&self) -> bool {
        self.is_for_arrivals
    }

    fn now_ns(&self) -> u64 {
        self.since.elapsed().as_nanos() as u64
    }

    /// What happens to a packet to or from a peer, by the plan's faults with a schedule. Those of the whole plan are its
    /// owner's to draw.
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

    /// Whether a peer's request that would consume a receive is to be told that there is none.
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

    /// What happens to a request to storage.
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
    /// The last device that it was in force for is gone.
    fn drop(&mut self) {
        if self.pid == std::process::id() {
            tracing::warn!("{}", self.summary());
        }
    }
}

impl Strike {
    fn new(rule: Rule, number: usize, seed: u64) -> Strike {
        // Other numbers than those of the whole plan's faults, which begin at the seed itself.
        let seed = seed.wrapping_add((number as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        Strike { window: Window::new(rule.schedule), rng: StdRng::seed_from_u64(seed), number, rule }
    }

    /// Whether it is about packets that go this way.
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
            // Counts would not be of what peers ask for.
            Operations::Any => operation != StorageOperation::WriteBack,
            Operations::Read => operation == StorageOperation::Read,
            Operations::Write => operation == StorageOperation::Write,
            Operations::Sync => operation == StorageOperation::Sync,
            Operations::WriteBack => operation == StorageOperation::WriteBack,
        }
    }

    /// An event that it is about: does it strike?
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
