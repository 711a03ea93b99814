//! Faults that are wanted: what a person writes in a fault plan, when each fault is in force, and what it strikes.
//!
//! [`FaultPlan`] is the file, checked. [`Faults`] is a plan in force in a process: whoever has a packet, a receive or a
//! request to storage in hand asks it for that one's fate, and carries the fate out. So this crate knows neither sockets
//! nor queue pairs nor files, and every draw comes from the plan's seed.
//!
//! | asks | about | through |
//! |---|---|---|
//! | `fabric` | each packet, before it leaves or once it has arrived | [`Faults::packet`] |
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
