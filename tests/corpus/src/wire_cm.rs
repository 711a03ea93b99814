//! Any bytes are rejected, or parse to a CM datagram whose emitted bytes parse to the same datagram.

use terrace_wire::cm::{IpHeader, Mad, Redirect};

/// Checks one input.
pub fn check(bytes: &[u8]) {
    if let Ok(mad) = Mad::decode(bytes) {
        assert_eq!(Mad::decode(&mad.encode()), Ok(mad));
    }
    if let Ok(header) = IpHeader::decode(bytes) {
        assert_eq!(IpHeader::decode(&header.encode()), Ok(header));
    }
    if let Some(redirect) = Redirect::decode(bytes) {
        assert_eq!(Redirect::decode(&redirect.encode()), Some(redirect));
    }
}
