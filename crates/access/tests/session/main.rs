//! A session against plain execution in order: random requests, on a peer whose pages come and go between any two steps.

mod reference;
mod rng;
mod scenario;
mod server;
mod world;

use scenario::{Run, Scenario, Trouble};
use terrace_access::proto::Status;
use terrace_transport::WcStatus;

/// How many seeds the loop goes through; `TERRACE_ACCESS_SEEDS=first..end` takes others.
const SEEDS: std::ops::Range<u64> = 0..3000;

fn seeds() -> std::ops::Range<u64> {
    let Ok(text) = std::env::var("TERRACE_ACCESS_SEEDS") else { return SEEDS };
    let (first, end) = text.split_once("..").expect("first..end");
    first.parse().expect("a number")..end.parse().expect("a number")
}

/// Runs a scenario, and says how to run it again if it fails.
fn run(seed: u64, scenario: &Scenario, check: impl Fn(&Run)) -> Run {
    let run = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let run = Run::new(scenario).run(scenario);
        check(&run);
        run
    }));
    run.unwrap_or_else(|panic| {
        eprintln!("seed {seed}: TERRACE_ACCESS_SEEDS={seed}..{} replays it", seed + 1);
        std::panic::resume_unwind(panic)
    })
}

#[test]
fn bytes_and_order_are_those_of_plain_execution() {
    let (mut fetched, mut extended) = (0, 0);
    for seed in seeds() {
        let scenario = Scenario::random(seed);
        let run = run(seed, &scenario, Run::check_success);
        fetched += run.world.server.fetched_pages;
        extended += run.extended_count();
    }
    // The seeds have to be worth something.
    assert!(seeds() != SEEDS || (fetched > 10_000 && extended > 10_000), "{fetched} {extended}");
}

#[test]
fn after_a_failure_everything_is_flushed_in_order() {
    let mut failed = [0; 4];
    for seed in seeds().step_by(4) {
        let kind = (seed / 4 % 4) as usize;
        let at = (seed / 16 % 60) as usize;
        let (trouble, status) = match kind {
            0 => (Trouble::CallFails(at / 4, Status::DeviceError), WcStatus::RemoteOperation),
            1 => (Trouble::PostFails(at / 3, WcStatus::RemoteAccess), WcStatus::RemoteAccess),
            2 => (Trouble::PeerGone(at * 10), WcStatus::RetryExceeded),
            _ => (Trouble::Flush(at * 10), WcStatus::Flushed),
        };
        let scenario = Scenario { trouble, ..Scenario::random(seed) };
        let run = run(seed, &scenario, |run| {
            if run.check_failure().is_some_and(|first| first != status) {
                panic!("the first failure is not {status:?}");
            }
        });
        failed[kind] += usize::from(run.check_failure().is_some());
    }
    assert!(seeds() != SEEDS || failed.iter().all(|&count| count > 30), "{failed:?}");
}
