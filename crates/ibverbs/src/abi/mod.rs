//! The C side of the verbs: types of the installed header, and additions of newer headers.

// The names are C's, and the generated file carries more than this crate uses.
#[allow(non_camel_case_types, non_snake_case, non_upper_case_globals, dead_code, missing_docs)]
#[allow(clippy::all, clippy::undocumented_unsafe_blocks)]
mod bindings;
// The names, and what the fields are, are in the headers.
#[allow(non_camel_case_types, missing_docs)]
pub mod cross_channel;
pub mod newer;
pub mod terrace;

pub use bindings::*;
