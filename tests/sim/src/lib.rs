//! A simulation: two devices over a simulated network, in virtual time and in one thread, are checked against a
//! reference model.
//!
//! A seed determines a run: the network's faults, the attributes of devices and programs, the posted work requests, and
//! the times of all steps. The same seed replays the same run.

#![forbid(unsafe_code)]

mod batch;
mod cells;
mod complete;
mod draw;
mod drive;
mod end;
mod log;
mod memory;
mod node;
mod np;
mod paging;
mod plan;
mod port;
mod post;
mod rng;
mod tally;
mod verdict;
mod window;
mod world;

pub use batch::{Batch, FailedSeed, Model, Progress};
pub use tally::Tally;
pub use world::Failure;

use world::World;

/// Runs one seed, optionally with a trace on standard output.
///
/// # Errors
/// When the run deviates from the reference model or the specification.
pub fn run(seed: u64, trace: bool) -> Result<Tally, Failure> {
    let mut world = World::new(seed, trace)?;
    if trace {
        println!("{:#?}", world.plan);
    }
    let result = world.run();
    result.map(|()| std::mem::take(&mut world.tally))
}
