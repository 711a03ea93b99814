//! Routing of datagrams to the processes of a host.
//!
//! Standard peers send every datagram to the address's standard port, and so to the process with instance index 0. A
//! request names a service. All other messages name a connection by its process's communication ID, which begins with
//! the instance index.

use terrace_wire::cm::{IP_HEADER_BYTES, IpHeader, Mad, Message};

use crate::ids::ConnId;
use crate::manager::{Cm, FindInstance};

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
                let private_data = &req.private_data;
                return self.instance_of_request(
                    from,
                    req.local_comm_id,
                    req.service_id,
                    private_data,
                    find_instance,
                );
            }
            Message::SidrReq(req) => {
                let private_data = &req.private_data;
                return self.instance_of_request(
                    from,
                    req.request_id,
                    req.service_id,
                    private_data,
                    find_instance,
                );
            }
            Message::Mra(mra) => mra.remote_comm_id,
            Message::Rep(rep) => rep.remote_comm_id,
            Message::Rtu(rtu) => rtu.remote_comm_id,
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
        from: &terrace_wire::Path,
        remote_id: u32,
        service_id: u64,
        private_data: &[u8],
        find_instance: FindInstance<'_>,
    ) -> Option<u8> {
        let header = IpHeader::decode(private_data.get(..IP_HEADER_BYTES)?).ok()?;
        let is_known = self.requests.contains_key(&(from.remote, remote_id));
        if is_known || self.listener_for(service_id, header.destination).is_some() {
            return None;
        }
        find_instance(service_id, header.destination).filter(|instance| *instance != self.config.instance)
    }
}
