//! Lines for the user.

use std::fmt::Display;

use terrace_sync::write_line_now;

/// Writes a line to standard error, if that has room for it.
pub(crate) fn report(line: impl Display) {
    write_line_now(format!("terrace: {line}\n").as_bytes());
}
