//! Decoding entries of work queues in memory: all peers with access to the memory choose the bytes.

use terrace_transport::wqe_format::{SEGMENT_BYTES, decode_receive, decode_send, encode_send};

/// Any bytes are refused, or they are an entry that is encoded to an equal one.
pub fn check(bytes: &[u8]) {
    if let Ok((control, entry)) = decode_send(bytes) {
        assert!(
            usize::from(control.segments) * SEGMENT_BYTES <= bytes.len(),
            "{entry:?} is longer than its bytes"
        );
        let again = encode_send(&entry, control.flags).expect("decoded entries have a form");
        let (_, decoded) = decode_send(&again).expect("encoded entries are entries");
        assert_eq!(decoded, entry);
    }
    assert!(decode_receive(bytes).len() <= bytes.len() / SEGMENT_BYTES);
}
