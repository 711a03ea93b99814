//! APPEND: a record takes its place at the region's end when its last packet has arrived. Until then its data is kept
//! here, so that a peer that disappears in the middle leaves neither a hole nor a torn record. It is executed once, as
//! atomics are: its responder resource answers duplicates.

use std::fmt;

use terrace_wire::{AppendEth, AppendFlags, OpcodeInfo, Packet};

use super::refusal::{CHANGE_PENDING, INVALID_REQUEST, Refusal, STAGING_FULL};
use super::resource::Outcome;
use super::response::{DeferredOperation, Response, Returns};
use super::{Incoming, Responder, check_payload_len, require};
use crate::access;
use crate::append::{APPEND_LEN_MAX, StagingReservation};
use crate::common::Call;
use crate::data::Data;
use crate::host::{Host, RemoteError};

/// A record of several packets of which some have arrived.
pub(super) struct StagedRecord {
    header: AppendEth,
    bytes: Vec<u8>,
    _reservation: StagingReservation,
}

impl fmt::Debug for StagedRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StagedRecord")
            .field("header", &self.header)
            .field("bytes", &self.bytes.len())
            .finish_non_exhaustive()
    }
}

impl StagedRecord {
    fn new(header: AppendEth, reservation: StagingReservation) -> StagedRecord {
        StagedRecord { header, bytes: Vec::new(), _reservation: reservation }
    }

    /// Adds a packet's data, which the caller has found to fit. Allocates at most twice of what has arrived, and never
    /// more than the reservation.
    fn push(&mut self, host: &impl Host, data: Data<'_>) -> Result<(), RemoteError> {
        let end = self.bytes.len() + data.len() as usize;
        if end > self.bytes.capacity() {
            let capacity = (2 * self.bytes.capacity()).clamp(end, self.header.length as usize);
            self.bytes.reserve_exact(capacity - self.bytes.len());
        }
        copy_to_end(&mut self.bytes, host, data)
    }
}

impl Responder {
    /// Takes a packet or run of an APPEND.
    pub(super) fn receive_append(
        &mut self,
        call: &mut Call<'_, impl Host>,
        packet: &Packet<'_>,
        data: Data<'_>,
        info: &OpcodeInfo,
    ) -> Result<(), Refusal> {
        self.check_order(info)?;
        check_payload_len(call, data, info)?;
        if !info.position.is_first() {
            return self.continue_record(call, packet, data, info);
        }
        let header = accept_append(call, packet)?;
        // The header announces the length; every packet but the last leaves a remainder.
        let len = data.len();
        if len > header.length.into() || info.position.is_last() != (len == header.length.into()) {
            return Err(INVALID_REQUEST);
        }
        let packets = data.packets(call.mtu());
        match data {
            Data::Bytes(record) if info.position.is_last() => self.append(call, header, record, packets),
            // A run is short enough to need no reservation.
            Data::Run(_) if info.position.is_last() => {
                let mut record = Vec::new();
                copy_to_end(&mut record, call.host, data)?;
                self.append(call, header, &record, packets)
            }
            _ => {
                let reservation = call.host.reserve_staging(header.length).ok_or(STAGING_FULL)?;
                let mut record = StagedRecord::new(header, reservation);
                record.push(call.host, data)?;
                self.incoming = Some(Incoming::Append(record));
                self.finish_packet(call, packet, packets, info);
                Ok(())
            }
        }
    }

    fn continue_record(
        &mut self,
        call: &mut Call<'_, impl Host>,
        packet: &Packet<'_>,
        data: Data<'_>,
        info: &OpcodeInfo,
    ) -> Result<(), Refusal> {
        let is_record = |incoming: &mut Incoming| matches!(incoming, Incoming::Append(_));
        let Some(Incoming::Append(mut record)) = self.incoming.take_if(is_record) else {
            return Err(INVALID_REQUEST);
        };
        let start = record.bytes.len();
        let added = self.add_to_record(call, packet, data, info, &mut record);
        if added.is_err() {
            // The peer sends a refused packet again.
            record.bytes.truncate(start);
        }
        if added.is_err() || !info.position.is_last() {
            self.incoming = Some(Incoming::Append(record));
        }
        added
    }

    fn add_to_record(
        &mut self,
        call: &mut Call<'_, impl Host>,
        packet: &Packet<'_>,
        data: Data<'_>,
        info: &OpcodeInfo,
        record: &mut StagedRecord,
    ) -> Result<(), Refusal> {
        let (end, length) = (record.bytes.len() as u64 + data.len(), u64::from(record.header.length));
        if end > length || info.position.is_last() != (end == length) {
            return Err(INVALID_REQUEST);
        }
        record.push(call.host, data)?;
        let packets = data.packets(call.mtu());
        if info.position.is_last() {
            return self.append(call, record.header, &record.bytes, packets);
        }
        self.finish_packet(call, packet, packets, info);
        Ok(())
    }

    /// Has the host append a whole record, of which the last `packets` have just arrived. The answer is queued: the host
    /// may finish it later.
    fn append(
        &mut self,
        call: &mut Call<'_, impl Host>,
        header: AppendEth,
        record: &[u8],
        packets: u32,
    ) -> Result<(), Refusal> {
        self.require_only_appends(header.rkey)?;
        if self.pending_operations() >= usize::from(call.attr.max_dest_rd_atomic) {
            return Err(INVALID_REQUEST);
        }
        let transfer = call.host.append(header.rkey, record, header.flags.contains(AppendFlags::COMMIT))?;
        self.expected = self.expected.plus(packets - 1);
        let (psn, msn) = (self.expected, (self.msn + 1) & 0xff_ffff);
        let operation = DeferredOperation { psn, msn, rkey: header.rkey, returns: Returns::Offset, transfer };
        self.finish_request(call, 1, Outcome::Pending);
        // A record that is there already keeps no later request waiting.
        match operation.response().filter(|_| !self.has_pending_changes()) {
            Some(Ok(response)) => {
                if let Response::AtomicResult { value, .. } = response {
                    self.record_value(psn, value, msn);
                }
                self.pending.push_back(response);
            }
            _ => self.pending.push_back(Response::Deferred(operation)),
        }
        Ok(())
    }

    /// A record becomes visible with the region's new end, so pending writes must be done before. Pending records of
    /// the same region have their places already.
    fn require_only_appends(&self, rkey: u32) -> Result<(), Refusal> {
        let is_other = |response: &Response| {
            response.is_pending_change()
                && !matches!(response, Response::Deferred(operation)
                    if operation.returns == Returns::Offset && operation.rkey == rkey)
        };
        if self.pending.iter().any(is_other) { Err(CHANGE_PENDING) } else { Ok(()) }
    }

    fn pending_operations(&self) -> usize {
        self.pending.iter().filter(|response| matches!(response, Response::Deferred(_))).count()
    }
}

/// Copies the data of a packet or run behind `bytes`.
fn copy_to_end(bytes: &mut Vec<u8>, host: &impl Host, data: Data<'_>) -> Result<(), RemoteError> {
    match data {
        Data::Bytes(data) => {
            bytes.extend_from_slice(data);
            Ok(())
        }
        Data::Run(len) => {
            let start = bytes.len();
            bytes.resize(start + len as usize, 0);
            host.copy_run(&mut bytes[start..])
        }
    }
}

/// Checks the header of an APPEND's first packet.
fn accept_append(call: &Call<'_, impl Host>, packet: &Packet<'_>) -> Result<AppendEth, Refusal> {
    let header = packet.ext.append.ok_or(INVALID_REQUEST)?;
    require(call, access::REMOTE_WRITE)?;
    let is_known = AppendFlags::all().contains(header.flags);
    if !is_known || header.length > APPEND_LEN_MAX || call.attr.max_dest_rd_atomic == 0 {
        return Err(INVALID_REQUEST);
    }
    call.host.check_append(header.rkey)?;
    Ok(header)
}
