//! Exported directories, by both transports.

mod basics;
mod model;
mod permissions;
mod process;
mod processes;
mod support;
