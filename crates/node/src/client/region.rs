//! A region of a server, and the accesses to it.

use terrace_access::proto::Found;
use terrace_access::region::Knowledge;
use terrace_access::signature::PAGE_BYTES;
use terrace_nic::{Buffer, Payload, SendFlags, SendOp, SendWr, SgeList};

use super::{Client, ClientError, RegionAddress};

/// Placement of a FLUSH: persistence (IBTA annex A19).
const PERSISTENT: u8 = 1 << 1;
/// Selectivity of a FLUSH: a range of memory.
const RANGE: u8 = 0;

/// One access of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// First byte within the region.
    pub offset: u64,
    /// First byte within the buffer.
    pub at: usize,
    /// Length in bytes.
    pub len: u32,
    /// The tag of the completion.
    pub tag: u64,
}

/// A region of a server.
pub struct Region<'a> {
    client: &'a Client,
    handle: RegionHandle,
}

/// An open region without its client, for owners of both: [`Client::region`] makes a region of it again.
#[derive(Clone)]
pub struct RegionHandle {
    found: Found,
    known: Knowledge,
}

impl<'a> Region<'a> {
    pub(super) fn new(client: &'a Client, found: Found, known: Knowledge) -> Region<'a> {
        Region { client, handle: RegionHandle { found, known } }
    }

    pub(super) fn of_handle(client: &'a Client, handle: RegionHandle) -> Region<'a> {
        Region { client, handle }
    }

    /// The region without its client.
    pub fn handle(&self) -> RegionHandle {
        self.handle.clone()
    }

    /// The region's address.
    pub fn address(&self) -> RegionAddress {
        RegionAddress::new(&self.handle.found)
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.handle.found.region.layout.length()
    }

    /// Always false: a region has at least one byte.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The signature page, if the server's NIC answers READs of absent pages with it. Reads of data that equals it are
    /// correct, but slower.
    pub fn signature_page(&self) -> Option<&[u8; PAGE_BYTES]> {
        match &self.handle.known {
            Knowledge::Extended(region) => Some(region.signature_page().bytes()),
            _ => None,
        }
    }

    /// Begins to read bytes of the region into a buffer.
    ///
    /// # Errors
    /// `OutOfRange`; `Full`; `Nic` if the connection is unusable.
    pub fn read(&self, offset: u64, into: &Buffer, at: usize, len: u32, tag: u64) -> Result<(), ClientError> {
        self.read_many(into, &[Span { offset, at, len, tag }])
    }

    /// Begins to write bytes of a buffer to the region. After the completion every later read returns the bytes, and they
    /// survive the server's process; [`Region::commit`] guarantees more. The bytes must not change before the completion.
    ///
    /// # Errors
    /// As for [`Region::read`].
    pub fn write(
        &self,
        offset: u64,
        from: &Buffer,
        at: usize,
        len: u32,
        tag: u64,
    ) -> Result<(), ClientError> {
        self.write_many(from, &[Span { offset, at, len, tag }])
    }

    /// Begins several reads. After an error, the reads before the failed one have begun.
    ///
    /// # Errors
    /// As for [`Region::read`].
    pub fn read_many(&self, into: &Buffer, spans: &[Span]) -> Result<(), ClientError> {
        self.begin(into, spans, |va, rkey| SendOp::Read { va, rkey })
    }

    /// Begins several writes. After an error, the writes before the failed one have begun.
    ///
    /// # Errors
    /// As for [`Region::read`].
    pub fn write_many(&self, from: &Buffer, spans: &[Span]) -> Result<(), ClientError> {
        self.begin(from, spans, |va, rkey| SendOp::Write { va, rkey })
    }

    /// Begins to make a range durable. After the completion, accesses that had completed before the call survive a power
    /// failure.
    ///
    /// # Errors
    /// As for [`Region::read`].
    pub fn commit(&self, offset: u64, len: u32, tag: u64) -> Result<(), ClientError> {
        let (va, rkey) = (self.va(offset, len.into())?, self.handle.found.rkey);
        let op = SendOp::Flush { va, rkey, length: len, placement: PERSISTENT, selectivity: RANGE };
        self.client.begin(std::iter::once(Ok(work_request(op, SgeList::new(), tag))), &self.handle.known)
    }

    fn begin(
        &self,
        buffer: &Buffer,
        spans: &[Span],
        op: impl Fn(u64, u32) -> SendOp,
    ) -> Result<(), ClientError> {
        let rkey = self.handle.found.rkey;
        let wrs = spans.iter().map(|span| {
            let va = self.check(buffer, span)?;
            let sges = SgeList::from_slice(&[buffer.sge(span.at, span.len)]);
            Ok(work_request(op(va, rkey), sges, span.tag))
        });
        self.client.begin(wrs, &self.handle.known)
    }

    /// The address of a span's first byte in the region, if the span is within region and buffer.
    fn check(&self, buffer: &Buffer, span: &Span) -> Result<u64, ClientError> {
        let va = self.va(span.offset, span.len.into())?;
        let (offset, len, size) = (span.at as u64, u64::from(span.len), buffer.len() as u64);
        if offset > size || len > size - offset {
            return Err(ClientError::OutOfRange { offset, len, within: "the buffer", size });
        }
        Ok(va)
    }

    fn va(&self, offset: u64, len: u64) -> Result<u64, ClientError> {
        let size = self.len();
        if offset > size || len > size - offset {
            return Err(ClientError::OutOfRange { offset, len, within: "the region", size });
        }
        Ok(self.handle.found.region.layout.base_va() + offset)
    }
}

fn work_request(op: SendOp, sges: SgeList, tag: u64) -> SendWr {
    SendWr { wr_id: tag, op, payload: Payload::Sges(sges), flags: SendFlags::SIGNALED, target: None }
}
