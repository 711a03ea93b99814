//! Completion hooks.

mod common;

use std::sync::{Arc, Mutex, Weak};

use common::*;
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
