//! A connection manager under arbitrary datagrams, commands and time steps: it keeps within its limits and ends up
//! empty.

use arbitrary::{Arbitrary, Unstructured};
use terrace_cm::{Accept, Answer, Ask, Cm, Config, ConnId, Connect, Limits, ListenerId, Timing};
use terrace_transport::Time;
use terrace_wire::Path;
use terrace_wire::cm::{CM_CLASS, IpHeader, MAD_BYTES, PortSpace, RejReason, Transport, service_id};

#[derive(Arbitrary, Debug)]
enum Step {
    /// A datagram of some kind about one of the connections, from one of two peers.
    Hear {
        attribute: u8,
        about: u8,
        named: u8,
        peer: bool,
        body: [u8; 64],
    },
    Connect {
        qpn: u8,
    },
    Ask,
    Accept(u8),
    Answer(u8),
    Establish(u8),
    Reject(u8),
    Disconnect(u8),
    Traffic(u8),
    Destroy(u8),
    Take(u8),
    Listen(bool),
    Pass(u16),
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

struct Player {
    cm: Cm,
    now: Time,
    conns: Vec<ConnId>,
}

impl Player {
    fn conn(&self, index: u8) -> ConnId {
        self.conns.get(usize::from(index) % self.conns.len().max(1)).copied().unwrap_or(ConnId(1))
    }

    fn hear(&mut self, attribute: u8, about: u8, named: u8, peer: bool, body: &[u8; 64]) {
        let mut bytes = [0; MAD_BYTES];
        bytes[..4].copy_from_slice(&[1, CM_CLASS, 2, 3]);
        bytes[17] = 0x10 + attribute % 10;
        bytes[24..88].copy_from_slice(body);
        // The addresses of a REQ, and the IDs that match a datagram to a connection.
        bytes[164..200].copy_from_slice(&header().encode());
        bytes[40..76].copy_from_slice(&header().encode());
        if attribute % 10 != 7 {
            bytes[24..28].copy_from_slice(&u32::from(named).to_be_bytes());
        }
        match attribute % 10 {
            0 => {
                bytes[32..40].copy_from_slice(&service_id(PortSpace::Tcp, 1).to_be_bytes());
                bytes[74] = 0x30;
            }
            7 => bytes[32..40].copy_from_slice(&service_id(PortSpace::Udp, 1).to_be_bytes()),
            8 => bytes[24..28].copy_from_slice(&self.conn(about).0.to_be_bytes()),
            _ => bytes[28..32].copy_from_slice(&self.conn(about).0.to_be_bytes()),
        }
        let elsewhere = |_, _| (about > 250).then_some(about);
        assert_ne!(self.cm.meant_for(&path(peer), &bytes, &elsewhere), Some(0));
        self.cm.handle_mad(self.now, &path(peer), &bytes, &elsewhere);
    }

    fn play(&mut self, step: &Step) {
        let now = self.now;
        match *step {
            Step::Hear { attribute, about, named, peer, ref body } => {
                self.hear(attribute, about, named, peer, body);
            }
            Step::Connect { qpn } => self.conns.extend(self.cm.connect(now, 1, &connect(qpn))),
            Step::Ask => {
                let service_id = service_id(PortSpace::Udp, 1);
                let ask = Ask { service_id, header: header(), path: path(false), private_data: Vec::new() };
                self.conns.extend(self.cm.ask(now, 1, &ask));
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
            Step::Answer(index) => {
                let answer = Answer { qpn: 1, qkey: 2, private_data: Vec::new() };
                let _ = self.cm.answer(now, self.conn(index), &answer);
            }
            Step::Establish(index) => _ = self.cm.establish(now, self.conn(index)),
            Step::Reject(index) => {
                _ = self.cm.reject(now, self.conn(index), RejReason::CONSUMER_DEFINED, b"no");
            }
            Step::Disconnect(index) => _ = self.cm.disconnect(now, self.conn(index)),
            Step::Traffic(index) => _ = self.cm.note_traffic(now, self.conn(index)),
            Step::Destroy(index) => self.cm.destroy(self.conn(index), now),
            Step::Take(index) => self.cm.take_request(self.conn(index), 2),
            Step::Listen(true) => self.listen(),
            Step::Listen(false) => {
                self.cm.stop_listening(ListenerId(0), now);
                self.cm.stop_listening(ListenerId(1), now);
            }
            Step::Pass(ms) => {
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
        let _ = self.cm.listen(ListenerId(0), service_id(PortSpace::Tcp, 1), None, 4);
        let _ = self.cm.listen(ListenerId(1), service_id(PortSpace::Udp, 1), None, 4);
    }
}

/// Checks it for one input.
pub fn check(bytes: &[u8]) {
    let config = Config { guid: 1, slot: 0, path_mtu: 5, seed: 1, timing: Timing::default(), limits: LIMITS };
    let mut player = Player { cm: Cm::new(config), now: Time(1), conns: Vec::new() };
    player.listen();
    let mut input = Unstructured::new(bytes);
    while let Ok(step) = Step::arbitrary(&mut input)
        && !input.is_empty()
    {
        player.play(&step);
        assert!(player.cm.connection_count() <= LIMITS.connections_max);
    }
    player.cm.destroy_all(player.now);
    for _ in 0..64 {
        player.play(&Step::Pass(u16::MAX));
    }
    assert_eq!((player.cm.connection_count(), player.cm.poll_timeout()), (0, None));
}
