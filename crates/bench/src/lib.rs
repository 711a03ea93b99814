//! `terrace bench`: measures regions larger than memory, as the evaluation of TeRM (FAST'24) does.
//!
//! | module | holds |
//! |---|---|
//! | `permutation`, `keys` | the part of the region for each access |
//! | `content`, `ledger` | the expected content |
//! | `target` | connections that carry out accesses |
//! | `workload`, `worker`, `measure` | client threads and their results |
//! | `plan`, `ratios` | figures, tables and promises as data |
//! | `test_harness`, `servers`, `runner`, `session` | servers, points, whole runs |
//! | `cgroup`, `process`, `storage`, `preload` | the server's limits and process, the region's file, filling memory |
//! | `results`, `report`, `plot`, `machine`, `progress` | output for people |
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
