//! State shared by requester and responder: configuration, attributes, counters and the event queue.

use std::collections::VecDeque;

use terrace_wire::{Bth, Extensions, Opcode, Path, Psn, emit_headers};

use crate::host::Sink;
use crate::types::{QpAttr, QpConfig, QpCounters, QpEvent, QpType, Wc, WcFlags, WcOpcode, WcStatus};

/// The NIC's only partition: full membership of the default one.
pub(crate) const DEFAULT_PKEY: u16 = 0xffff;

#[derive(Debug)]
pub(crate) struct Common {
    pub(crate) config: QpConfig,
    pub(crate) attr: QpAttr,
    pub(crate) events: VecDeque<QpEvent>,
    pub(crate) counters: QpCounters,
}

/// State change of the queue pair that a call into the requester or responder requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(crate) enum Verdict {
    Fine,
    /// The requester completed a request in error: SQE for UC and UD, ERR for RC and XRC.
    RequesterFatal,
    /// The responder found an error that ends the connection.
    ResponderFatal(QpEvent),
}

impl Common {
    /// Most payload bytes in a packet: the path MTU of a connection; UD has no path of its own and uses the port's
    /// limit.
    pub(crate) fn mtu(&self) -> u64 {
        u64::from(if self.is(QpType::Ud) { self.config.mtu_limit } else { self.attr.path_mtu })
    }

    pub(crate) fn bth(&self, opcode: Opcode, psn: Psn) -> Bth {
        Bth {
            opcode,
            solicited: false,
            migrated: true,
            pad: 0,
            pkey: DEFAULT_PKEY,
            fecn: false,
            becn: false,
            qpn: self.attr.dest_qpn,
            ack_request: false,
            psn,
        }
    }

    pub(crate) fn complete_receive(&mut self, wc: Wc) {
        self.events.push_back(QpEvent::RecvComplete(wc));
    }

    pub(crate) fn flushed_receive(&self, wr_id: u64, srqn: u32) -> Wc {
        self.receive_error(wr_id, srqn, WcStatus::Flushed)
    }

    pub(crate) fn receive_error(&self, wr_id: u64, srqn: u32, status: WcStatus) -> Wc {
        Wc {
            wr_id,
            status,
            opcode: WcOpcode::Recv,
            qpn: self.config.qpn,
            srqn,
            flags: WcFlags::empty(),
            solicited: true,
            ..Wc::default()
        }
    }

    pub(crate) fn is(&self, qp_type: QpType) -> bool {
        self.config.qp_type == qp_type
    }

    pub(crate) fn is_reliable(&self) -> bool {
        self.config.qp_type.is_reliable()
    }
}

/// Pushes a packet: headers, then `payload_len` bytes that `fill` writes, then the pad. Returns `Ok(None)` when
/// the sink is full, and cancels the packet when `fill` fails.
#[inline(always)] // As for `emit_headers`.
pub(crate) fn push_packet<E>(
    sink: &mut impl Sink,
    path: &Path,
    mut bth: Bth,
    ext: &Extensions,
    payload_len: usize,
    fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
) -> Result<Option<usize>, E> {
    let header_len = bth.opcode.info().header_len;
    let pad = payload_len.wrapping_neg() & 3;
    bth.pad = pad as u8;
    let len = header_len + payload_len + pad;
    let Some(buf) = sink.push(path, len) else { return Ok(None) };
    let (head, rest) = buf.split_at_mut(header_len);
    emit_headers(&bth, ext, head).expect("the room is exactly the opcode's header length");
    let (payload, padding) = rest.split_at_mut(payload_len);
    padding.fill(0);
    match fill(payload) {
        Ok(()) => Ok(Some(len)),
        Err(error) => {
            sink.cancel();
            Err(error)
        }
    }
}
