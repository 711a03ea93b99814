//! Completion hooks.

mod common;

use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, Mutex, Weak};

use common::*;
use terrace_fabric::sim::{SimConfig, SimNet};
use terrace_nic::*;

/// Forwards completions with their ids doubled, and posts a further request for each, up to a number.
struct Relay {
    qp: Weak<QueuePair>,
    kept: Mutex<Vec<Wc>>,
    more: Mutex<Vec<SendWr>>,
}

impl CompletionHook for Relay {
    fn completed(&self, wc: Wc) {
        self.kept.lock().unwrap().push(wc);
    }
}

impl ProgressCallback for Relay {
    fn advance(&self) -> bool {
        let kept = std::mem::take(&mut *self.kept.lock().unwrap());
        let Some(qp) = self.qp.upgrade() else { return false };
        for wc in &kept {
            qp.complete(Wc { wr_id: wc.wr_id * 2, ..*wc });
            // Verbs may be called here.
            if let Some(wr) = self.more.lock().unwrap().pop() {
                qp.post_send([Ok(wr)]).expect("posted");
            }
        }
        !kept.is_empty()
    }
}

#[test]
fn a_completion_hook_gets_send_completions_and_passes_on_some() {
    let (a, b) = (Node::udp(), Node::udp());
    let (qa, qb) = rc_pair(&a, &b);
    let write = |wr_id| a.wr(wr_id, SendOp::Write { va: b.memory.addr(), rkey: b.mr.rkey() }, 0, 8);
    let more = Mutex::new(vec![write(30), write(20)]);
    let relay = Arc::new(Relay { qp: Arc::downgrade(&qa), kept: Mutex::default(), more });
    a.device.attach(relay.clone());
    qa.set_completion_hook(Some(relay));
    qa.post_send([Ok(write(10))]).expect("posted");
    let ids = a.completions(3).iter().map(|wc| wc.wr_id).collect::<Vec<_>>();
    assert_eq!(ids, [20, 40, 60]);

    // The hook gets no receive completions.
    qa.post_recv([a.recv(5, 0, 8)]).expect("posted");
    qb.post_send([Ok(b.wr(6, SendOp::Send, 0, 8))]).expect("posted");
    assert_eq!(a.completion().wr_id, 5);

    qa.set_completion_hook(None);
    qa.post_send([Ok(write(11))]).expect("posted");
    assert_eq!(a.completion().wr_id, 11);
    a.device.close();
}

#[test]
fn taking_makes_no_progress() {
    let (a, b) = (Node::udp(), Node::udp());
    let (qa, _qb) = rc_pair(&a, &b);
    qa.complete(Wc { wr_id: 3, qpn: qa.qpn(), ..Wc::default() });
    let mut taken = Vec::new();
    assert_eq!(a.cq.take(4, &mut |wc| taken.push(wc.wr_id)), Ok(1));
    assert_eq!(a.cq.take(4, &mut |wc| taken.push(wc.wr_id)), Ok(0));
    assert_eq!(taken, [3]);
    // A completion with the queue pair's number is discarded with the queue pair.
    qa.complete(Wc { wr_id: 4, qpn: qa.qpn(), ..Wc::default() });
    qa.destroy().expect("no events");
    assert_eq!(a.cq.take(4, &mut |_| {}), Ok(0));
}

/// WAITs of work queues in memory rely on the number of completions.
#[test]
fn what_a_hook_gets_is_no_completion_of_the_queue() {
    let (net, clock) = (SimNet::new(1, SimConfig::default()), Arc::new(ManualClock::new()));
    let node = |last| {
        let port = net.port(IpAddr::V4(Ipv4Addr::new(10, 0, 0, last)));
        Node::with(DeviceConfig::simulated(Box::new(port), clock.clone(), last.into()), 1 << 12)
    };
    let (a, b) = (node(1), node(2));
    let (qa, _qb) = rc_pair(&a, &b);
    let relay = Arc::new(Relay { qp: Weak::new(), kept: Mutex::default(), more: Mutex::default() });
    qa.set_completion_hook(Some(relay.clone()));
    let write = SendOp::Write { va: b.memory.addr(), rkey: b.mr.rkey() };
    qa.post_send([Ok(a.wr(1, write, 0, 8))]).expect("posted");
    for _ in 0..1000 {
        let now = net.now() + 1000;
        net.advance_to(now);
        clock.set(Time(now));
        b.device.step(Time(now));
        // The poll makes the progress.
        assert_eq!(a.cq.poll(1, &mut |_| ()), Ok(0));
    }
    assert_eq!(relay.kept.lock().unwrap().len(), 1);
    assert_eq!(a.cq.count(), 0);
}
