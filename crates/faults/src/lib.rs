//! Fault injection: the fault plan in a file, the schedule of each fault, and its scope.
//!
//! [`FaultPlan`] is the checked content of the file. [`Faults`] is a plan in force in a process. It returns the faults
//! of each packet, receive or storage request, and its caller executes them. So this crate depends neither on sockets
//! nor on queue pairs nor on files, and every draw comes from the plan's seed.
//!
//! | caller | event | function |
//! |---|---|---|
//! | `fabric` | each packet, before it is sent or once it was received | [`Faults::packet`] |
//! | `nic` | each request of a peer that would consume a receive | [`Faults::withholds_receive`] |
//! | `pages`, `baseline` | each read, write, sync or write-back of a region's file | [`Faults::storage`], [`Delayed`] |
//!
//! `docs/fault-plan.md` is the reference for users.
#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod active;
mod counts;
mod delayed;
mod error;
mod plan;
mod rule;
mod schedule;

pub use active::{Direction, Faults, PacketFate, StorageFate, StorageOperation};
pub use counts::{Counts, Injected};
pub use delayed::Delayed;
pub use error::FaultPlanError;
pub use plan::FaultPlan;
