//! Runs the simulation with the seeds of every `cargo test`. `make soak` runs more.

use terrace_sim::{Batch, Model};

const SEEDS: u64 = 2000;

/// The events that the seeds must include.
const REQUIRED_EVENTS: &[&str] = &[
    "CNPs",
    "RNR NAKs",
    "completed AtomicWrite Success",
    "completed BindMw Success",
    "completed CompSwap RemoteInvalidRequest",
    "completed CompSwap Success",
    "completed FetchAdd RemoteAccess",
    "completed FetchAdd Success",
    "completed Flush Success",
    "completed LocalInv Success",
    "completed RdmaRead LocalProtection",
    "completed RdmaRead Success",
    "completed RdmaWrite Flushed",
    "completed RdmaWrite Success",
    "completed Send RetryExceeded",
    "completed Send RnrRetryExceeded",
    "completed Send Success",
    "completion events",
    "failed connections",
    "duplicates",
    "error NAKs",
    "fetches of absent memory",
    "packets with a bad ICRC",
    "puts to absent memory",
    "received Rc Recv LocalLength",
    "received Rc RecvRdmaWithImm Success",
    "received Uc Recv Success",
    "received Uc RecvRdmaWithImm Success",
    "received Ud Recv Success",
    "retransmits",
    "send queue drains finished",
    "send queue full",
    "sequence NAKs",
    "solicited events",
    "timeouts",
    "units mapped or unmapped",
];

#[test]
fn devices_agree_with_the_reference_model() {
    let batch = Batch { model: Model::Verbs, first: 0, count: SEEDS, threads: None };
    let tally = match batch.run(|_| {}) {
        Ok(tally) => tally,
        Err(failed) => panic!("{failed}"),
    };
    print!("{tally}");
    for event in REQUIRED_EVENTS {
        assert!(tally.get(event) > 0, "{SEEDS} seeds without: {event}");
    }
}

#[test]
fn a_seed_takes_the_same_path_each_time() {
    for seed in 0..20 {
        let once = terrace_sim::run(seed, false).expect("no failure");
        assert_eq!(once, terrace_sim::run(seed, false).expect("no failure"), "seed {seed}");
    }
}

const NP_SEEDS: u64 = 500;

/// What the seeds of the NP-RDMA protocol must include.
const REQUIRED_OF_NP: &[&str] = &[
    "NP-RDMA CompareSwap",
    "NP-RDMA Count",
    "NP-RDMA FetchAdd",
    "NP-RDMA Read",
    "NP-RDMA Send",
    "NP-RDMA Write",
    "NP-RDMA WriteImm",
    "NP-RDMA answers lost",
    "NP-RDMA calls",
    "NP-RDMA one-sided",
    "NP-RDMA pages known to be absent",
    "NP-RDMA pages that came or went",
    "NP-RDMA ranges held for a peer",
    "NP-RDMA repeated behind a repeated WRITE",
    "NP-RDMA signature pages",
    "NP-RDMA transfers by the peer",
    "NP-RDMA versions changed",
];

#[test]
fn np_rdma_agrees_with_plain_memory() {
    let batch = Batch { model: Model::NpRdma, first: 0, count: NP_SEEDS, threads: None };
    let tally = match batch.run(|_| {}) {
        Ok(tally) => tally,
        Err(failed) => panic!("{failed}"),
    };
    print!("{tally}");
    for event in REQUIRED_OF_NP {
        assert!(tally.get(event) > 0, "{NP_SEEDS} seeds without: {event}");
    }
}
