//! Both ends of a reliable connection over a link that loses, duplicates, delays and reorders packets: every work
//! request completes once and in order, and memory ends up as after in-order execution.
//!
//! Cases are drawn from a fixed seed, so that a run repeats. `TERRACE_CASES=100000` runs more of them, `TERRACE_SEED=n`
//! others. A failure is shrunk and printed as the plan that replays it.

#[path = "link/model.rs"]
mod model;
#[path = "link/plan.rs"]
mod plan;
#[path = "link/random.rs"]
mod random;
mod support;
#[path = "link/world.rs"]
mod world;

use std::cell::Cell;

use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestRng, TestRunner};
use support::from_env;

const CASES: u32 = 2000;

#[test]
fn all_work_completes_in_order_over_a_bad_link() {
    let cases = from_env("TERRACE_CASES").map_or(CASES, |cases| cases as u32);
    let mut seed = [0; 32];
    seed[..8].copy_from_slice(&from_env("TERRACE_SEED").unwrap_or(0).to_le_bytes());
    let config = Config { cases, max_shrink_iters: 20_000, failure_persistence: None, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &seed));
    let seen = Cell::new(world::Seen::default());
    let outcome = runner.run(&plan::plan(), |plan| {
        let world::Seen { piggybacked_acks, runs } = world::run(&plan).map_err(TestCaseError::fail)?;
        let before = seen.get();
        seen.set(world::Seen {
            piggybacked_acks: before.piggybacked_acks + piggybacked_acks,
            runs: before.runs + runs,
        });
        Ok(())
    });
    if let Err(error) = outcome {
        panic!("{error}");
    }
    let seen = seen.get();
    assert!(seen.piggybacked_acks > 0 && seen.runs > 100, "{seen:?}");
}
