//! Replicated files, over exports of this process and of others.

mod admissions;
mod basics;
mod crashes;
mod hosts;
mod load;
mod records;
mod writers;

#[path = "../export/process.rs"]
mod process;
#[path = "../export/support.rs"]
#[allow(dead_code)] // Other tests use the rest.
mod support;
