//! Translates the connection manager's events into those of programs.

use terrace_cm::{ConnId, Event, EventKind, ListenerId};
use terrace_wire::Path;
use terrace_wire::cm::{IP_HEADER_BYTES, IpHeader, SidrStatus, Transport};

use super::abi::{Answer, ConnParam, EVENT_BYTES, EventCode, UdParam, gid_of};
use super::clock::now;
use super::id::Request;
use super::resolve::Source;
use super::service::Service;
use crate::abi::{IBV_QPT_RC, IBV_QPT_UC, IBV_QPT_UD, IBV_QPT_XRC_RECV, ibv_qp_type};

impl Service {
    /// Queues an event of the connection manager for the program.
    pub fn report(&mut self, event: Event) {
        let Event { conn, owner, kind } = event;
        let owner = owner.and_then(|owner| u32::try_from(owner).ok());
        match kind {
            EventKind::Request { listener, header, req } => {
                let qp_type = match req.transport {
                    Transport::Uc => IBV_QPT_UC,
                    Transport::Xrc => IBV_QPT_XRC_RECV,
                    _ => IBV_QPT_RC,
                };
                let answer = Answer::event(EventCode::ConnectRequest, 0).with_connection(&ConnParam {
                    qp_num: req.local_qpn,
                    qkey: 0,
                    private_data: req.private_data[IP_HEADER_BYTES..].to_vec(),
                    srq: req.srq,
                    // The peer's initiator depth is our responder resources, and vice versa.
                    responder_resources: req.initiator_depth,
                    initiator_depth: req.responder_resources,
                    flow_control: req.flow_control,
                    retry_count: req.retry_count,
                    rnr_retry_count: req.rnr_retry_count,
                    valid: false,
                });
                self.queue_request(conn, listener, qp_type, &header, answer);
            }
            EventKind::SidrRequest { listener, header, private_data } => {
                let param = UdParam { qp_num: 0, qkey: 0, private_data: &private_data, peer: None };
                let answer = Answer::event(EventCode::ConnectRequest, 0).with_datagrams(&param);
                self.queue_request(conn, listener, IBV_QPT_UD, &header, answer);
            }
            kind => {
                let path = self.cm.agreed(conn).map(|(_, path)| path);
                if let (Some(owner), Some(answer)) = (owner, translate(kind, path)) {
                    self.ids.queue(owner, answer, None);
                }
            }
        }
    }

    /// Queues a request at its listener. A request that cannot be queued, or is for another queue pair type, is
    /// rejected.
    fn queue_request(
        &mut self,
        conn: ConnId,
        listener: ListenerId,
        qp_type: ibv_qp_type,
        header: &IpHeader,
        answer: Answer<EVENT_BYTES>,
    ) {
        let number = self.ids.number_of_listener(listener);
        let number = number.filter(|number| self.ids.find(*number).is_some_and(|id| id.qp_type == qp_type));
        let request = number.and_then(|number| self.describe_request(conn, number, header));
        let is_queued = match (number, request) {
            (Some(number), Some(request)) => self.ids.queue(number, answer, Some(request)),
            _ => false,
        };
        if !is_queued {
            self.cm.destroy(conn, now());
        }
    }

    fn describe_request(&mut self, conn: ConnId, number: u32, header: &IpHeader) -> Option<Request> {
        let (_, path) = self.cm.agreed(conn)?;
        let device = self.device.clone()?;
        let port = self.ids.find(number)?.local?.port();
        let own = device.gids().get(usize::from(path.source_gid_index))?.addr;
        Some(Request {
            conn,
            local: (header.destination, port).into(),
            peer: (header.source, header.source_port).into(),
            source: Source { gid_index: path.source_gid_index, address: own },
        })
    }
}

/// The program's event for an event of the connection manager.
fn translate(kind: EventKind, path: Option<Path>) -> Option<Answer<EVENT_BYTES>> {
    let timed_out = -libc::ETIMEDOUT;
    Some(match kind {
        EventKind::Request { .. } | EventKind::SidrRequest { .. } => return None,
        EventKind::Response(rep) => {
            Answer::event(EventCode::ConnectResponse, 0).with_connection(&ConnParam {
                qp_num: rep.local_qpn,
                qkey: 0,
                private_data: rep.private_data.to_vec(),
                srq: rep.srq,
                responder_resources: rep.initiator_depth,
                initiator_depth: rep.responder_resources,
                flow_control: rep.flow_control,
                retry_count: 0,
                rnr_retry_count: rep.rnr_retry_count,
                valid: false,
            })
        }
        EventKind::Established => Answer::event(EventCode::Established, 0),
        EventKind::Rejected { reason, private_data } => {
            Answer::event(EventCode::Rejected, reason.0.into()).with_private_data(private_data)
        }
        EventKind::Unreachable => Answer::event(EventCode::Unreachable, timed_out),
        EventKind::Disconnected { timed_out: late } => {
            Answer::event(EventCode::Disconnected, if late { timed_out } else { 0 })
        }
        EventKind::TimeWaitExit => Answer::event(EventCode::TimeWaitExit, 0),
        EventKind::SidrResponse(rep) if rep.status != SidrStatus::VALID => {
            Answer::event(EventCode::Unreachable, rep.status.0.into())
        }
        EventKind::SidrResponse(rep) => {
            let path = path?;
            Answer::event(EventCode::Established, 0).with_datagrams(&UdParam {
                qp_num: rep.qpn,
                qkey: rep.qkey,
                private_data: &rep.private_data,
                peer: Some((gid_of(path.remote.ip().to_canonical()), path.source_gid_index)),
            })
        }
    })
}
