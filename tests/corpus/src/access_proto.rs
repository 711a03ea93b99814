//! Any bytes are rejected, or decode to a control message that encodes to the same bytes.

use terrace_access::proto::{
    Body, DATAGRAM_BYTES, Datagram, HEADER_BYTES, MESSAGE_BYTES_MAX, Message, REQUESTS_MAX, Read, Source,
    ids_of_immediate, immediate_of,
};

/// Checks one input.
pub fn check(bytes: &[u8]) {
    if let Ok(datagram) = Datagram::decode(bytes) {
        assert_eq!(datagram.encode(), bytes);
        let mut short = [0; DATAGRAM_BYTES - 1];
        assert!(datagram.encode_into(&mut short).is_err());
    }

    if let Some(immediate) = bytes.first_chunk().map(|bytes| u32::from_be_bytes(*bytes)) {
        let ids = ids_of_immediate(immediate);
        assert!(immediate_of(ids).is_none_or(|same| same == immediate));
    }

    let Ok(message) = Message::decode(bytes) else { return };
    let mut room = vec![0; MESSAGE_BYTES_MAX];
    let length = message.encode(&mut room).expect("what was decoded fits");
    assert_eq!(&room[..length], bytes);
    assert!(message.encode(&mut room[..length - 1]).is_err());
    match &message.body {
        Body::Read(reads) => {
            assert!((1..=REQUESTS_MAX).contains(&reads.len()));
            let encoded_bytes: usize = reads.iter().map(Read::encoded_bytes).sum();
            assert_eq!(HEADER_BYTES + encoded_bytes, bytes.len());
            reads.iter().for_each(check_read);
        }
        Body::Done(done) => assert!((1..=REQUESTS_MAX).contains(&(done.count as usize))),
        Body::Write(write) => {
            if let Source::Inline(data) = write.source {
                assert_eq!(data.len(), write.length as usize);
            }
        }
        _ => {}
    }
}

fn check_read(read: &Read) {
    assert!(read.length > 0 && read.va.checked_add(u64::from(read.length) - 1).is_some());
    if let Some(pages) = &read.pages {
        let touched = (u64::from(pages.offset) + u64::from(read.length)).div_ceil(4096);
        assert_eq!(pages.wanted.page_count() as u64, touched);
        let wanted: usize = pages.wanted.runs().map(|run| run.len()).sum();
        assert!(wanted > 0 && wanted == pages.wanted.count());
    }
}
