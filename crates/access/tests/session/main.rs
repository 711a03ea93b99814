//! A session compared with in-order execution: random requests to a peer whose pages are mapped and unmapped between any
//! two steps.

mod failures;
mod harness;
mod reference;
mod rng;
mod rules;
mod scenario;
mod server;
mod world;

use proptest::prelude::*;
use scenario::{Fault, OPERATIONS, Run, Scenario, Spec};
use terrace_access::proto::{Mode, Status};
use terrace_transport::WcStatus;

/// The seeds of the loop; `TERRACE_ACCESS_SEEDS=first..end` takes others.
const SEEDS: std::ops::Range<u64> = 0..2400;

fn seeds() -> std::ops::Range<u64> {
    let Ok(text) = std::env::var("TERRACE_ACCESS_SEEDS") else { return SEEDS };
    let (first, end) = text.split_once("..").expect("first..end");
    first.parse().expect("a number")..end.parse().expect("a number")
}

/// Runs a scenario. A failure prints the seed that replays it.
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
    let (mut fetched, mut extended, mut overtaking) = (0, 0, 0);
    for seed in seeds() {
        let scenario = Scenario::random(seed);
        let run = run(seed, &scenario, Run::check_success);
        fetched += run.world.server.fetched_pages;
        extended += run.extended_count();
        overtaking += run.overtaking_count;
    }
    // The seeds cover the interesting cases.
    let is_covered = fetched > 10_000 && extended > 10_000 && overtaking > 300;
    assert!(seeds() != SEEDS || is_covered, "{fetched} {extended} {overtaking}");
}

#[test]
fn after_a_failure_everything_is_flushed_in_order() {
    let mut failed = [0; 4];
    for seed in seeds().step_by(3) {
        let kind = (seed / 3 % 4) as usize;
        let at = (seed / 12 % 60) as usize;
        let (fault, status) = match kind {
            0 => (Fault::CallFails(at / 10, Status::DeviceError), WcStatus::RemoteOperation),
            1 => (Fault::PostFails(at / 3, WcStatus::RemoteAccess), WcStatus::RemoteAccess),
            2 => (Fault::PeerGone(100 + at * 5), WcStatus::RetryExceeded),
            _ => (Fault::Flush(at * 10), WcStatus::Flushed),
        };
        let scenario = Scenario { fault, ..Scenario::random(seed) };
        let run = run(seed, &scenario, |run| {
            if run.check_failure().is_some_and(|first| first != status) {
                panic!("the first failure is not {status:?}");
            }
        });
        failed[kind] += usize::from(run.check_failure().is_some());
    }
    assert!(seeds() != SEEDS || failed.iter().all(|&count| count >= 30), "{failed:?}");
}

fn specs() -> impl Strategy<Value = Spec> {
    let offset = prop_oneof![0_usize..1 << 18, (0_usize..64).prop_map(|page| page << 12)];
    let length = prop_oneof![1_usize..64, Just(4096_usize), 1_usize..20_000];
    let flags = (any::<bool>(), any::<bool>());
    let operation = prop::sample::select(&OPERATIONS[..]);
    (operation, 0_usize..6, offset, length, 0_usize..30_000, 1_usize..5, flags, 0_u8..4).prop_map(
        |(operation, key, offset, length, local, sge_count, (fence, signaled), content)| Spec {
            operation,
            key,
            offset,
            length,
            local,
            sge_count,
            fence,
            signaled,
            content,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    /// The same as the loop of seeds, but failures are shrunk.
    #[test]
    fn any_requests_have_the_effect_of_plain_execution(
        seed: u64,
        specs in prop::collection::vec(specs(), 1..30),
        mtu in prop::sample::select(vec![256_usize, 1024, 4096]),
        unit_bytes in prop::sample::select(vec![4096_usize, 16384]),
        by_rpc: bool,
        in_order: bool,
    ) {
        let mode = Some(if by_rpc { Mode::RpcOnly } else { Mode::OneSided });
        let scenario = Scenario {
            seed,
            mode,
            mtu,
            memory_bytes: 20 * 4096,
            unit_bytes,
            specs,
            busy_one_in: 5,
            in_order,
            fault: Fault::None,
        };
        Run::new(&scenario).run(&scenario).check_success();
    }
}
