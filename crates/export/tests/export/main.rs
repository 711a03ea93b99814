//! Exported directories, by both transports.

mod basics;
mod model;
mod permissions;
mod processes;
mod support;
