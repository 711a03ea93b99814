//! Simulation: two devices over a simulated network, in virtual time and in one thread, against a reference model.
//!
//! A seed decides everything: the network's faults, the attributes of devices and programs, what is posted when, and
//! when devices and programs poll. The same seed replays the same run.

#![forbid(unsafe_code)]

mod batch;
mod complete;
mod dice;
mod draw;
mod drive;
mod end;
mod memory;
mod node;
mod paging;
mod plan;
mod port;
mod post;
mod tally;
mod verdict;
mod window;
mod world;

pub use batch::{Batch, FailedSeed, Progress};
pub use tally::Tally;
pub use world::Failure;

use world::World;

/// Runs one seed, with a trace on standard output if asked for.
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
