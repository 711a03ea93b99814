//! State shared by requester and responder: configuration, attributes and counters; and a call into the queue pair.

use std::ops::{Deref, DerefMut};

use terrace_wire::{Bth, Extensions, Opcode, Path, Psn, emit_headers};

use crate::host::{Host, Sink};
use crate::types::{QpAttr, QpConfig, QpCounters, QpEvent, QpType, Wc, WcFlags, WcOpcode, WcStatus};

/// The NIC's only partition: full membership of the default one.
pub(crate) const DEFAULT_PKEY: u16 = 0xffff;

#[derive(Debug)]
pub(crate) struct Common {
    pub(crate) config: QpConfig,
    pub(crate) attr: QpAttr,
    pub(crate) counters: QpCounters,
}

/// A call into the queue pair: its common state, and the host that the caller passed in.
pub(crate) struct Call<'a, H> {
    pub(crate) common: &'a mut Common,
    pub(crate) host: &'a H,
}

impl<H> Deref for Call<'_, H> {
    type Target = Common;

    #[inline(always)]
    fn deref(&self) -> &Common {
        self.common
    }
}

impl<H> DerefMut for Call<'_, H> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut Common {
        self.common
    }
}

impl<H: Host> Call<'_, H> {
    /// Completes a receive in error.
    pub(crate) fn fail_receive(&self, wr_id: u64, srqn: u32, status: WcStatus) {
        self.host.withdraw();
        self.host.complete_receive(Wc {
            wr_id,
            status,
            opcode: WcOpcode::Recv,
            qpn: self.config.qpn,
            srqn,
            flags: WcFlags::empty(),
            solicited: true,
            ..Wc::default()
        });
    }
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
