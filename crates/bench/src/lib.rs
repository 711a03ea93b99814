//! `terrace bench`: measurements of regions larger than memory, modelled on the evaluation of TeRM (FAST'24).
//!
//! | module | contains |
//! |---|---|
//! | `permutation`, `keys` | the sequence of keys |
//! | `application` | the steps of one access: of blocks, of a file system, of a key-value store |
//! | `content`, `ledger` | the expected content and versions |
//! | `target` | connections that execute accesses |
//! | `workload`, `worker`, `measure` | client threads and their results |
//! | `plan`, `ratios` | plans of figures, tables and promised ratios |
//! | `test_harness`, `servers`, `runner`, `session` | servers, points, runs |
//! | `cgroup`, `process`, `storage`, `preload` | the server's limits and process, the region's file, preloading |
//! | `flush` | the time of a FLUSH beside dirty pages that it does not include |
//! | `processors`, `costs`, `disk` | the processors of each end; what an access costs; the disk's own limit |
//! | `results`, `report`, `plot`, `machine`, `progress` | results, plots, progress |
#![forbid(unsafe_code)]
#![warn(missing_docs)]

pub mod application;
pub mod bytes;
pub mod cgroup;
pub mod content;
pub mod costs;
pub mod demo;
pub mod disk;
pub mod flush;
pub mod keys;
pub mod ledger;
pub mod leftovers;
pub mod machine;
pub mod measure;
pub mod permutation;
pub mod plan;
pub mod plot;
pub mod preload;
pub mod process;
pub mod processors;
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
