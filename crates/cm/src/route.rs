//! Routing of datagrams to the processes of a host.
//!
//! Standard peers send every datagram to the address's standard port, and so to the process with instance index 0. A
//! request names a service. A REJ by a client that has had no answer names only the client's ID, and goes where the
//! request with this ID went. All other messages name a connection by its process's communication ID, which begins with
//! the instance index.

use std::collections::VecDeque;
use std::net::SocketAddr;

use terrace_wire::cm::{IP_HEADER_BYTES, IpHeader, Mad, Message};

use crate::ids::ConnId;
use crate::manager::{Cm, FindInstance};

/// The most forwarded requests that are recorded.
const FORWARDED_REQUESTS_MAX: usize = 256;

impl Cm {
    /// The instance index of the process that a datagram belongs to. `None` if it belongs to this process, or if the
    /// process is unknown.
    pub fn instance_of_datagram(
        &mut self,
        from: &terrace_wire::Path,
        bytes: &[u8],
        find_instance: FindInstance<'_>,
    ) -> Option<u8> {
        let id = match Mad::decode(bytes).ok()?.message {
            Message::Req(req) => {
                let request = (from.remote, req.local_comm_id);
                let instance =
                    self.instance_of_request(request, req.service_id, &req.private_data, find_instance)?;
                self.forwarded_requests.record(request, instance);
                return Some(instance);
            }
            // No REJ withdraws it.
            Message::SidrReq(req) => {
                let request = (from.remote, req.request_id);
                return self.instance_of_request(request, req.service_id, &req.private_data, find_instance);
            }
            Message::Mra(mra) => mra.remote_comm_id,
            Message::Rep(rep) => rep.remote_comm_id,
            Message::Rtu(rtu) => rtu.remote_comm_id,
            // A client that gives up before it has had a REP names only its own request.
            Message::Rej(rej) if rej.remote_comm_id == 0 => {
                return self.forwarded_requests.instance_of((from.remote, rej.local_comm_id));
            }
            Message::Rej(rej) => rej.remote_comm_id,
            Message::Dreq(dreq) => dreq.remote_comm_id,
            Message::Drep(drep) => drep.remote_comm_id,
            Message::SidrRep(rep) => rep.request_id,
        };
        let instance = ConnId(id).instance();
        (instance != self.config.instance).then_some(instance)
    }

    fn instance_of_request(
        &mut self,
        request: (SocketAddr, u32),
        service_id: u64,
        private_data: &[u8],
        find_instance: FindInstance<'_>,
    ) -> Option<u8> {
        let header = IpHeader::decode(private_data.get(..IP_HEADER_BYTES)?).ok()?;
        let is_known = self.requests.contains_key(&request);
        if is_known || self.listener_for(service_id, header.destination).is_some() {
            return None;
        }
        find_instance(service_id, header.destination).filter(|instance| *instance != self.config.instance)
    }
}

/// The requests that were forwarded most recently: their peer's address and port and its communication ID, with the
/// instance index of the process that has them.
#[derive(Default)]
pub(crate) struct ForwardedRequests(VecDeque<((SocketAddr, u32), u8)>);

impl ForwardedRequests {
    fn record(&mut self, request: (SocketAddr, u32), instance: u8) {
        self.0.retain(|(known, _)| *known != request);
        if self.0.len() == FORWARDED_REQUESTS_MAX {
            self.0.pop_front();
        }
        self.0.push_back((request, instance));
    }

    fn instance_of(&self, request: (SocketAddr, u32)) -> Option<u8> {
        self.0.iter().find(|(known, _)| *known == request).map(|(_, instance)| *instance)
    }
}
