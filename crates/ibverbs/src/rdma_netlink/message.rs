//! The format of netlink messages: requests that programs send, and answers.

use std::ops::Range;

/// Length of `struct nlmsghdr`.
pub const HEADER_LEN: usize = 16;
/// Length of `struct nlattr` without its value.
const ATTRIBUTE_HEADER_LEN: usize = 4;
/// Headers and attributes begin at multiples of this.
const ALIGNMENT: usize = 4;

const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const NLM_F_REQUEST: u16 = 1;
const NLM_F_MULTI: u16 = 2;
const NLM_F_ACK: u16 = 4;
const NLM_F_DUMP: u16 = 0x300;
/// An error message has only the header of the request.
const NLM_F_CAPPED: u16 = 0x100;

/// A request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request<'a> {
    header: &'a [u8],
    attributes: &'a [u8],
}

impl<'a> Request<'a> {
    /// The requests of a datagram. As in the kernel, a message whose length does not fit ends the datagram.
    pub fn all_in(mut datagram: &'a [u8]) -> impl Iterator<Item = Request<'a>> {
        std::iter::from_fn(move || {
            let len = u32_at(datagram, 0)? as usize;
            let message = datagram.get(..len).filter(|_| len >= HEADER_LEN)?;
            datagram = datagram.get(aligned(len)..).unwrap_or_default();
            let (header, attributes) = message.split_at(HEADER_LEN);
            Some(Request { header, attributes })
        })
    }

    fn u16_at(&self, at: usize) -> u16 {
        u16::from_ne_bytes([self.header[at], self.header[at + 1]])
    }

    /// The type.
    pub fn kind(&self) -> u16 {
        self.u16_at(4)
    }

    fn has(&self, flag: u16) -> bool {
        self.u16_at(6) & flag != 0
    }

    /// Whether the message is a request at all.
    pub fn is_request(&self) -> bool {
        self.has(NLM_F_REQUEST)
    }

    /// Whether the program wants a list instead of one object.
    pub fn is_dump(&self) -> bool {
        self.has(NLM_F_DUMP)
    }

    /// Whether the program wants an answer even if there is only success to report.
    pub fn wants_ack(&self) -> bool {
        self.has(NLM_F_ACK)
    }

    /// The value of an attribute.
    fn attribute(&self, wanted: u16) -> Option<&'a [u8]> {
        let mut rest = self.attributes;
        while let Some(len) = u16_at(rest, 0).map(usize::from) {
            let value = rest.get(ATTRIBUTE_HEADER_LEN..len)?;
            if u16_at(rest, 2)? == wanted {
                return Some(value);
            }
            rest = rest.get(aligned(len)..).unwrap_or_default();
        }
        None
    }

    /// The value of an attribute of 32 bits.
    pub fn number(&self, attribute: u16) -> Option<u32> {
        u32_at(self.attribute(attribute)?, 0)
    }

    /// The value of an attribute that is a text, without its terminator.
    pub fn text(&self, attribute: u16) -> Option<&'a [u8]> {
        self.attribute(attribute)?.split(|byte| *byte == 0).next()
    }
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn aligned(len: usize) -> usize {
    len.next_multiple_of(ALIGNMENT)
}

/// Attributes in the order in which they are added.
#[derive(Clone, Default)]
pub struct Attributes(Vec<u8>);

impl Attributes {
    fn add(mut self, attribute: u16, value: &[u8]) -> Attributes {
        let len = u16::try_from(ATTRIBUTE_HEADER_LEN + value.len()).expect("values are short");
        self.0.extend_from_slice(&len.to_ne_bytes());
        self.0.extend_from_slice(&attribute.to_ne_bytes());
        self.0.extend_from_slice(value);
        self.0.resize(aligned(self.0.len()), 0);
        self
    }

    /// Adds a number of 8 bits.
    pub fn u8(self, attribute: u16, value: u8) -> Attributes {
        self.add(attribute, &[value])
    }

    /// Adds a number of 32 bits.
    pub fn u32(self, attribute: u16, value: u32) -> Attributes {
        self.add(attribute, &value.to_ne_bytes())
    }

    /// Adds a number of 64 bits.
    pub fn u64(self, attribute: u16, value: u64) -> Attributes {
        self.add(attribute, &value.to_ne_bytes())
    }

    /// Adds a text.
    pub fn text(self, attribute: u16, value: &str) -> Attributes {
        self.add(attribute, &[value.as_bytes(), &[0]].concat())
    }

    /// Adds attributes as the value of an attribute.
    pub fn nested(self, attribute: u16, value: &Attributes) -> Attributes {
        self.add(attribute, &value.0)
    }
}

/// The answer to a request, as the datagrams that the kernel would send.
pub struct Answer {
    /// The port ID of the program's socket.
    port_id: u32,
    datagrams: Vec<Vec<u8>>,
}

impl Answer {
    /// An answer without datagrams, for the socket of that port ID.
    pub fn new(port_id: u32) -> Answer {
        Answer { port_id, datagrams: Vec::new() }
    }

    /// The datagrams.
    pub fn datagrams(&self) -> &[Vec<u8>] {
        &self.datagrams
    }

    fn add(&mut self, request: &Request, kind: u16, flags: u16, payload: &[u8]) {
        const SEQUENCE: Range<usize> = 8..12;
        let len = u32::try_from(HEADER_LEN + payload.len()).expect("answers are short");
        let mut datagram = len.to_ne_bytes().to_vec();
        datagram.extend_from_slice(&kind.to_ne_bytes());
        datagram.extend_from_slice(&flags.to_ne_bytes());
        datagram.extend_from_slice(&request.header[SEQUENCE]);
        datagram.extend_from_slice(&self.port_id.to_ne_bytes());
        datagram.extend_from_slice(payload);
        self.datagrams.push(datagram);
    }

    /// Adds an object.
    pub fn add_object(&mut self, request: &Request, attributes: &Attributes) {
        let flags = if request.is_dump() { NLM_F_MULTI } else { 0 };
        self.add(request, request.kind(), flags, &attributes.0);
    }

    /// Ends a list.
    pub fn add_done(&mut self, request: &Request) {
        self.add(request, NLMSG_DONE, NLM_F_MULTI, &0_i32.to_ne_bytes());
    }

    /// Adds an errno, or 0 for success.
    pub fn add_status(&mut self, request: &Request, errno: i32) {
        let payload = [&(-errno).to_ne_bytes(), request.header].concat();
        self.add(request, NLMSG_ERROR, NLM_F_CAPPED, &payload);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(kind: u16, flags: u16, payload: &[u8]) -> Vec<u8> {
        let len = (HEADER_LEN + payload.len()) as u32;
        let (kind, flags) = (kind.to_ne_bytes(), flags.to_ne_bytes());
        [&len.to_ne_bytes()[..], &kind, &flags, &7_u32.to_ne_bytes(), &[0; 4], payload].concat()
    }

    #[test]
    fn attributes_are_read_as_they_are_written() {
        let written = Attributes::default().u8(1, 3).text(2, "abcd").u32(3, 77).u64(4, u64::MAX);
        let datagram = message(0x1401, NLM_F_REQUEST | NLM_F_ACK, &written.0);
        let requests: Vec<_> = Request::all_in(&datagram).collect();
        let [request] = requests[..] else { panic!("{requests:?}") };
        assert_eq!((request.kind(), request.is_dump()), (0x1401, false));
        assert!(request.is_request() && request.wants_ack());
        assert_eq!((request.number(3), request.text(2)), (Some(77), Some(&b"abcd"[..])));
        assert_eq!(
            (request.number(1), request.number(5), request.attribute(1)),
            (None, None, Some(&[3][..]))
        );
    }

    #[test]
    fn datagrams_end_where_a_length_does_not_fit() {
        let good = message(1, 1, &[]);
        let short = 15_u32.to_ne_bytes();
        for rest in [&[][..], &[0], &short, &[0xff; 16], &good[..15]] {
            let datagram = [&good[..], rest].concat();
            assert_eq!(Request::all_in(&datagram).count(), 1, "{rest:?}");
        }
        assert_eq!(Request::all_in(&[&good[..], &good].concat()).count(), 2);
    }

    #[test]
    fn attributes_whose_length_does_not_fit_are_absent() {
        for payload in [&[][..], &[0, 0, 3, 0], &[3, 0, 3, 0], &[9, 0, 3, 0, 1, 2, 3, 4], &[6, 0, 3, 0, 1, 2]]
        {
            let datagram = message(1, 1, payload);
            assert_eq!(Request::all_in(&datagram).next().and_then(|request| request.number(3)), None);
        }
    }
}
