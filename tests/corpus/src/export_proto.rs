//! Any bytes are rejected, or decode to a message that encodes to the same bytes.

use terrace_export::proto::setup::{self, SetupAnswer, SetupRequest};
use terrace_export::proto::{MESSAGE_BYTES_MAX, Message};

/// Checks one input.
pub fn check(bytes: &[u8]) {
    if let Ok(request) = setup::decode::<SetupRequest>(bytes) {
        assert_eq!(setup::encode(&request), bytes);
    }
    if let Ok(answer) = setup::decode::<SetupAnswer>(bytes) {
        assert_eq!(setup::encode(&answer), bytes);
    }
    let Ok(message) = Message::decode(bytes) else { return };
    assert!(bytes.len() <= MESSAGE_BYTES_MAX);
    assert_eq!(message.encode().as_deref(), Some(bytes));
}
