//! Checks a connection manager with arbitrary datagrams, commands and time steps. Its limits hold, and no connection
//! remains at the end.

use arbitrary::{Arbitrary, Unstructured};
use terrace_cm::{
    Accept, Addresses, Cm, Config, ConnId, Connect, Limits, ListenerId, SidrReply, SidrRequest, Timing,
};
use terrace_transport::Time;
use terrace_wire::Path;
use terrace_wire::cm::{CM_CLASS, IpHeader, MAD_BYTES, PortSpace, RejReason, Transport, service_id};

#[derive(Arbitrary, Debug)]
enum Step {
    /// A datagram for one of the connections, from one of two peers.
    Receive {
        attribute: u8,
        conn_index: u8,
        local_id: u8,
        peer: bool,
        body: [u8; 64],
    },
    Connect {
        qpn: u8,
    },
    SendSidrReq,
    Accept(u8),
    SendSidrRep(u8),
    Establish(u8),
    Reject(u8),
    Disconnect(u8),
    NotifyCommEst(u8),
    Destroy(u8),
    AssignRequest(u8),
    Listen(bool),
    AdvanceMs(u16),
}

const LIMITS: Limits = Limits { half_open_max: 8, half_open_per_peer_max: 6, connections_max: 32 };

fn path(peer: bool) -> Path {
    let remote = ([10, 0, 0, 1 + u8::from(peer)], 4791).into();
    Path { remote, source_gid_index: 0, traffic_class: 0, hop_limit: 0, flow_label: 0 }
}

fn header() -> IpHeader {
    IpHeader { source_port: 9, source: [10, 0, 0, 9].into(), destination: [10, 0, 0, 1].into() }
}

fn connect(qpn: u8) -> Connect {
    Connect {
        service_id: service_id(PortSpace::Tcp, 1),
        header: header(),
        path: path(false),
        gids: [[0; 16]; 2],
        transport: Transport::Rc,
        qpn: qpn.into(),
        responder_resources: 1,
        initiator_depth: 1,
        flow_control: false,
        retry_count: 7,
        rnr_retry_count: 7,
        srq: false,
        path_mtu: 3,
        ack_timeout: 16,
        private_data: Vec::new(),
    }
}

struct Runner {
    cm: Cm,
    now: Time,
    conns: Vec<ConnId>,
}

impl Runner {
    fn conn(&self, index: u8) -> ConnId {
        self.conns.get(usize::from(index) % self.conns.len().max(1)).copied().unwrap_or(ConnId(1))
    }

    fn receive(&mut self, attribute: u8, conn_index: u8, local_id: u8, peer: bool, body: &[u8; 64]) {
        let mut bytes = [0; MAD_BYTES];
        bytes[..4].copy_from_slice(&[1, CM_CLASS, 2, 3]);
        bytes[17] = 0x10 + attribute % 10;
        bytes[24..88].copy_from_slice(body);
        // The addresses of a REQ, and the IDs that match a datagram to a connection.
        bytes[164..200].copy_from_slice(&header().encode());
        bytes[40..76].copy_from_slice(&header().encode());
        if attribute % 10 != 7 {
            bytes[24..28].copy_from_slice(&u32::from(local_id).to_be_bytes());
        }
        match attribute % 10 {
            0 => {
                bytes[32..40].copy_from_slice(&service_id(PortSpace::Tcp, 1).to_be_bytes());
                bytes[74] = 0x30;
            }
            7 => bytes[32..40].copy_from_slice(&service_id(PortSpace::Udp, 1).to_be_bytes()),
            8 => bytes[24..28].copy_from_slice(&self.conn(conn_index).0.to_be_bytes()),
            _ => bytes[28..32].copy_from_slice(&self.conn(conn_index).0.to_be_bytes()),
        }
        let find_instance = |_, _| (conn_index > 250).then_some(conn_index);
        assert_ne!(self.cm.instance_of_datagram(&path(peer), &bytes, &find_instance), Some(0));
        self.cm.handle_mad(self.now, &path(peer), &bytes, &find_instance);
    }

    fn run(&mut self, step: &Step) {
        let now = self.now;
        match *step {
            Step::Receive { attribute, conn_index, local_id, peer, ref body } => {
                self.receive(attribute, conn_index, local_id, peer, body);
            }
            Step::Connect { qpn } => self.conns.extend(self.cm.connect(now, 1, &connect(qpn))),
            Step::SendSidrReq => {
                let service_id = service_id(PortSpace::Udp, 1);
                let request =
                    SidrRequest { service_id, header: header(), path: path(false), private_data: Vec::new() };
                self.conns.extend(self.cm.send_sidr_req(now, 1, &request));
            }
            Step::Accept(index) => {
                let accept = Accept {
                    qpn: 5,
                    responder_resources: 1,
                    initiator_depth: 1,
                    flow_control: false,
                    rnr_retry_count: 7,
                    srq: false,
                    private_data: Vec::new(),
                };
                let _ = self.cm.accept(now, self.conn(index), &accept);
            }
            Step::SendSidrRep(index) => {
                let reply = SidrReply { qpn: 1, qkey: 2, private_data: Vec::new() };
                let _ = self.cm.send_sidr_rep(now, self.conn(index), &reply);
            }
            Step::Establish(index) => _ = self.cm.establish(now, self.conn(index)),
            Step::Reject(index) => {
                _ = self.cm.reject(now, self.conn(index), RejReason::CONSUMER_DEFINED, b"no");
            }
            Step::Disconnect(index) => _ = self.cm.disconnect(now, self.conn(index)),
            Step::NotifyCommEst(index) => _ = self.cm.notify_comm_est(now, self.conn(index)),
            Step::Destroy(index) => self.cm.destroy(self.conn(index), now),
            Step::AssignRequest(index) => self.cm.assign_request(self.conn(index), 2),
            Step::Listen(true) => self.listen(),
            Step::Listen(false) => {
                self.cm.stop_listening(ListenerId(0), now);
                self.cm.stop_listening(ListenerId(1), now);
            }
            Step::AdvanceMs(ms) => {
                self.now = now.after_ns(u64::from(ms) * 1_000_000);
                self.cm.handle_timeout(self.now);
            }
        }
        while self.cm.poll_transmit().is_some() {}
        while let Some(event) = self.cm.poll_event() {
            self.conns.push(event.conn);
        }
    }

    fn listen(&mut self) {
        let _ = self.cm.listen(ListenerId(0), service_id(PortSpace::Tcp, 1), Addresses::All, 4);
        let _ = self.cm.listen(ListenerId(1), service_id(PortSpace::Udp, 1), Addresses::All, 4);
    }
}

/// Runs one input.
pub fn check(bytes: &[u8]) {
    let config =
        Config { guid: 1, instance: 0, path_mtu: 5, seed: 1, timing: Timing::default(), limits: LIMITS };
    let mut runner = Runner { cm: Cm::new(config), now: Time(1), conns: Vec::new() };
    runner.listen();
    let mut input = Unstructured::new(bytes);
    while let Ok(step) = Step::arbitrary(&mut input)
        && !input.is_empty()
    {
        runner.run(&step);
        assert!(runner.cm.connection_count() <= LIMITS.connections_max);
    }
    runner.cm.destroy_all(runner.now);
    for _ in 0..64 {
        runner.run(&Step::AdvanceMs(u16::MAX));
    }
    assert_eq!((runner.cm.connection_count(), runner.cm.poll_timeout()), (0, None));
}
