//! A queue pair with more to send than one batch holds continues after the batch, though nothing arrives.

mod common;

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use common::*;
use terrace_fabric::sim::{SimConfig, SimNet};
use terrace_nic::*;

/// More than the 128 KiB of a batch.
const LEN: usize = 200_000;

fn nodes(net: &SimNet, clock: &Arc<ManualClock>) -> [Node; 2] {
    [1, 2].map(|last| {
        let port = net.port(IpAddr::V4(Ipv4Addr::new(10, 0, 0, last)));
        Node::with(DeviceConfig::simulated(Box::new(port), clock.clone(), u64::from(last)), 1 << 19)
    })
}

#[test]
fn a_long_unreliable_message_arrives_whole() {
    let net = SimNet::new(1, SimConfig::default());
    let clock = Arc::new(ManualClock::new());
    let [a, b] = nodes(&net, &clock);
    let (qa, _qb) = pair_on(&a, &b, QpType::Uc, &Tuning::default());
    let write = SendOp::Write { va: b.memory.addr(), rkey: b.mr.rkey() };
    qa.post_send([Ok(a.wr(1, write, 0, LEN as u32))]).expect("posted");
    let mut now = Time(net.now());
    a.device.step(now);
    // The rate limit of unreliable services spreads it over more than one burst.
    while let Some(later) = a.device.next_deadline().filter(|later| *later > now) {
        now = later;
        clock.set(now);
        a.device.step(now);
    }
    assert_eq!(a.cq.poll(1, &mut |wc| assert_eq!(wc.status, WcStatus::Success)), Ok(1));
}
