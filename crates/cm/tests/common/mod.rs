//! Two connection managers and a network between them, whose faults follow from the seed.

#![allow(dead_code)]

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use terrace_cm::*;
use terrace_wire::Path;
use terrace_wire::Time;
use terrace_wire::cm::{IpHeader, PortSpace, Transport, service_id};

pub const SERVICE: u16 = 7174;
pub const SECOND_NS: u64 = 1_000_000_000;

/// Fault rates of the network in percent, and its delay.
#[derive(Clone, Copy, Debug, Default)]
pub struct NetworkFaults {
    pub lost: u32,
    pub duplicated: u32,
    /// The longest delay, in nanoseconds.
    pub delay_ns: u64,
}

pub struct World {
    pub ends: [Cm; 2],
    pub now: Time,
    pub events: [Vec<Event>; 2],
    pub sent: u64,
    faults: NetworkFaults,
    rng: StdRng,
    /// Datagrams in flight, by time of arrival: destination and bytes.
    in_flight: BTreeMap<(Time, u64), (usize, Vec<u8>)>,
}

pub fn address(end: usize) -> IpAddr {
    [10, 0, 0, end as u8 + 1].into()
}

pub fn path_to(end: usize) -> Path {
    let remote = SocketAddr::new(address(end), 4791);
    Path { remote, source_gid_index: 0, traffic_class: 0, hop_limit: 0, flow_label: 0 }
}

pub fn config(seed: u64) -> Config {
    Config {
        guid: seed,
        instance: 0,
        path_mtu: 3,
        seed,
        timing: Timing::default(),
        limits: Limits::default(),
    }
}

pub fn service() -> u64 {
    service_id(PortSpace::Tcp, SERVICE)
}

pub fn connect_from(from: usize, qpn: u32) -> Connect {
    Connect {
        service_id: service(),
        header: IpHeader { source_port: 40000, source: address(from), destination: address(1 - from) },
        path: path_to(1 - from),
        gids: [[1; 16], [2; 16]],
        transport: Transport::Rc,
        qpn,
        responder_resources: 4,
        initiator_depth: 2,
        flow_control: false,
        retry_count: 7,
        rnr_retry_count: 6,
        srq: false,
        path_mtu: 5,
        ack_timeout: 16,
        private_data: b"hello".to_vec(),
    }
}

pub fn accept_with(qpn: u32) -> Accept {
    Accept {
        qpn,
        responder_resources: 2,
        initiator_depth: 3,
        flow_control: false,
        rnr_retry_count: 5,
        srq: true,
        private_data: b"welcome".to_vec(),
    }
}

impl World {
    pub fn new(seed: u64, faults: NetworkFaults) -> World {
        World {
            ends: [Cm::new(config(seed)), Cm::new(config(seed ^ 0xffff))],
            now: Time(1),
            events: [Vec::new(), Vec::new()],
            sent: 0,
            faults,
            rng: StdRng::seed_from_u64(seed),
            in_flight: BTreeMap::new(),
        }
    }

    pub fn set_faults(&mut self, faults: NetworkFaults) {
        self.faults = faults;
    }

    /// Sends an end's datagrams and collects its events.
    fn drain(&mut self, end: usize) {
        while let Some(transmit) = self.ends[end].poll_transmit() {
            // Datagrams for other addresses are dropped.
            let Some(to) = (0..2).find(|&other| address(other) == transmit.path.remote.ip()) else {
                continue;
            };
            let copies = 1 + u32::from(self.rng.random_range(0..100) < self.faults.duplicated);
            for _ in 0..copies {
                self.sent += 1;
                if self.rng.random_range(0..100) >= self.faults.lost {
                    let delay_ns = 1 + self.rng.random_range(0..=self.faults.delay_ns);
                    let key = (self.now.after_ns(delay_ns), self.sent);
                    self.in_flight.insert(key, (to, transmit.bytes.to_vec()));
                }
            }
        }
        while let Some(event) = self.ends[end].poll_event() {
            self.events[end].push(event);
        }
    }

    /// Advances to the next arrival or timer up to `until`. False if there is none.
    pub fn step(&mut self, until: Time) -> bool {
        self.drain(0);
        self.drain(1);
        let arrival = self.in_flight.keys().next().map(|(at, _)| *at);
        let due = [self.ends[0].poll_timeout(), self.ends[1].poll_timeout(), arrival];
        let Some(next) = due.into_iter().flatten().min().filter(|next| *next <= until) else {
            self.now = self.now.max(until);
            return false;
        };
        self.now = self.now.max(next);
        if arrival == Some(next) {
            let (_, (to, bytes)) = self.in_flight.pop_first().expect("just seen");
            self.ends[to].handle_mad(self.now, &path_to(1 - to), &bytes, &|_, _| None);
        } else {
            self.ends.iter_mut().for_each(|end| end.handle_timeout(self.now));
        }
        self.drain(0);
        self.drain(1);
        true
    }

    pub fn run_for(&mut self, ns: u64) {
        let until = self.now.after_ns(ns);
        while self.step(until) {}
    }

    /// Takes an end's events.
    pub fn take_events(&mut self, end: usize) -> Vec<Event> {
        std::mem::take(&mut self.events[end])
    }

    /// Takes an end's only event.
    pub fn take_event(&mut self, end: usize) -> Event {
        let mut events = self.take_events(end);
        assert_eq!(events.len(), 1, "{events:?}");
        events.remove(0)
    }

    /// On a network without faults, end 0 has sent a REQ and received end 1's REP. Returns both ends' IDs of the
    /// connection.
    pub fn accepted(&mut self) -> [ConnId; 2] {
        self.ends[1].listen(ListenerId(self.sent), service(), Addresses::All, 16).expect("free");
        let active = self.ends[0].connect(self.now, 7, &connect_from(0, 11)).expect("sent");
        self.run_for(1000);
        let passive = self.take_event(1).conn;
        self.ends[1].assign_request(passive, 8);
        self.ends[1].accept(self.now, passive, &accept_with(22)).expect("accepted");
        self.run_for(1000);
        assert!(matches!(self.take_event(0).kind, EventKind::Response(_)));
        [active, passive]
    }

    /// As `accepted`; end 0 has also established the connection.
    pub fn connected(&mut self) -> [ConnId; 2] {
        let [active, passive] = self.accepted();
        self.ends[0].establish(self.now, active).expect("established");
        self.run_for(1000);
        assert_eq!(self.take_event(1).kind, EventKind::Established);
        [active, passive]
    }
}
