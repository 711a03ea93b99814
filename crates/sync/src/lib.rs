//! Locks for what one thread uses nearly always, and others now and then.
//!
//! [`LeaningMutex`] is the only one. [`allow_leaning`] has to be called once before any leans.

#![warn(missing_docs)]

mod leaning;
mod platform;

pub use leaning::{Guard, LeaningMutex};
pub use platform::allow_leaning;
