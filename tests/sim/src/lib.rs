//! Simulation: two devices over a simulated network, in virtual time and in one thread, against a reference model.
//!
//! A seed decides everything: what the network does to packets, how the devices and the programs on them are made,
//! what is posted when, when anybody looks. The same seed takes the same path each time.

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
/// When something is not as the reference model or the specification has it.
pub fn run(seed: u64, trace: bool) -> Result<Tally, Failure> {
    let mut world = World::new(seed, trace)?;
    if trace {
        println!("{:#?}", world.plan);
    }
    let result = world.run();
    result.map(|()| std::mem::take(&mut world.tally))
}
