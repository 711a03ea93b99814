//! The checks of the fuzz targets. `fuzz/fuzz_targets` calls them with libFuzzer's inputs, and a test of this crate
//! calls them with the inputs of `fuzz/corpus`.

use arbitrary::{Arbitrary, Unstructured};

pub mod access_proto;
pub mod cm_manager;
pub mod export_proto;
pub mod icrc_verify;
pub mod nbd_device;
#[path = "../../../crates/nbd/tests/common/mod.rs"]
mod nbd_memory;
#[path = "../../../crates/transport/tests/support/mod.rs"]
mod support;
pub mod transport_qp;
pub mod wire_cm;
pub mod wire_parse;
pub mod wqe_format;

/// Decodes an input as libFuzzer's own macro does. Returns `None` if it is too short or does not decode.
fn decoded<'a, T: Arbitrary<'a>>(bytes: &'a [u8]) -> Option<T> {
    if bytes.len() < T::size_hint(0).0 {
        return None;
    }
    T::arbitrary_take_rest(Unstructured::new(bytes)).ok()
}
