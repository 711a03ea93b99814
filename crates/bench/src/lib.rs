//! `terrace bench`: measures regions larger than memory, as the evaluation of TeRM (FAST'24) does.
//!
//! | module | holds |
//! |---|---|
//! | `permutation`, `keys` | which part of the region an access goes to |
//! | `content`, `ledger` | what its bytes must be |
//! | `target` | what carries accesses out |
//! | `workload`, `worker`, `measure` | client threads and what came out of them |
//! | `plan`, `ratios` | figures, tables and promises as data |
//! | `bed`, `servers`, `runner`, `session` | servers, points, whole runs |
//! | `cgroup`, `process`, `storage`, `preload` | the server's limits, its process, the region's file, and what of it is in memory |
//! | `results`, `report`, `plot`, `machine`, `progress` | what people get to see |
#![forbid(unsafe_code)]
#![warn(missing_docs)]

pub mod bytes;
pub mod cgroup;
pub mod content;
pub mod demo;
pub mod keys;
pub mod ledger;
mod leftovers;
pub mod machine;
pub mod measure;
pub mod permutation;
pub mod plan;
pub mod plot;
pub mod preload;
pub mod process;
pub mod progress;
pub mod ratios;
pub mod report;
pub mod results;
pub mod runner;
pub mod servers;
pub mod session;
pub mod storage;
pub mod target;
pub mod test_harness;
pub mod worker;
pub mod workload;
