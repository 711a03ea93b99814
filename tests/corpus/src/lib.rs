//! What the fuzz targets check of their inputs. `fuzz/fuzz_targets` hands libFuzzer's inputs to it, and a test of this crate those of
//! `fuzz/corpus`.

use arbitrary::{Arbitrary, Unstructured};

pub mod access_proto;
pub mod cm_manager;
pub mod icrc_verify;
#[path = "../../../crates/transport/tests/support/mod.rs"]
mod support;
pub mod transport_qp;
pub mod wire_cm;
pub mod wire_parse;

/// An input as a value of some type, as libFuzzer's own macro has it. None for one that is too short or decodes to none.
fn decoded<'a, T: Arbitrary<'a>>(bytes: &'a [u8]) -> Option<T> {
    if bytes.len() < T::size_hint(0).0 {
        return None;
    }
    T::arbitrary_take_rest(Unstructured::new(bytes)).ok()
}
