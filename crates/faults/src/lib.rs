//! Fault injection: the fault plan in a file, the schedule of each fault, and its scope.
//!
//! [`FaultPlan`] is the file, checked. [`Faults`] is a plan in force in a process. A caller asks it for the faults of
//! each packet, receive or storage request, and executes them. So this crate knows neither sockets
//! nor queue pairs nor files, and every draw comes from the plan's seed.
//!
//! | caller | event | function |
//! |---|---|---|
//! | `fabric` | each packet, before it is sent or once it was received | [`Faults::packet`] |
//! | `nic` | each request of a peer that would consume a receive | [`Faults::withholds_receive`] |
//! | `tier` | each read, write, sync or write-back of a region's file | [`Faults::storage`] |
//!
//! `docs/fault-plan.md` is the reference for users.
#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod counts;
mod error;
mod plan;
mod rule;
mod running;
mod schedule;

pub use counts::{Counts, Injected};
pub use error::FaultPlanError;
pub use plan::FaultPlan;
pub use running::{Direction, Faults, PacketFate, StorageFate, StorageOperation};
