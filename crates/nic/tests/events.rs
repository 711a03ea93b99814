//! Completion channels and asynchronous events.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::*;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use terrace_nic::*;

struct Listener {
    node: Node,
    channel: Arc<CompChannel>,
    cq: Arc<Cq>,
}

fn listener() -> Listener {
    let node = Node::udp();
    let channel = node.device.create_channel().expect("a channel");
    let init = CqInit { depth: 64, channel: Some(channel.clone()), cookie: 77 };
    let cq = node.device.create_cq(init).expect("a queue");
    Listener { node, channel, cq }
}

impl Listener {
    fn qp(&self) -> Arc<QueuePair> {
        let init = self.node.init(QpType::Rc);
        self.node.pd.create_qp(QpInit { recv_cq: self.cq.clone(), ..init }).expect("a queue pair")
    }

    /// Connects a new queue pair of `sender` and returns both ends.
    fn pair(&self, sender: &Node) -> (Arc<QueuePair>, Arc<QueuePair>) {
        let (qa, qb) = (sender.qp(QpType::Rc), self.qp());
        connect(&qa, &self.node, qb.qpn(), &Tuning::default());
        connect(&qb, sender, qa.qpn(), &Tuning::default());
        (qa, qb)
    }
}

fn nonblocking(fd: impl std::os::fd::AsFd) {
    fcntl_setfl(&fd, fcntl_getfl(&fd).expect("flags") | OFlags::NONBLOCK).expect("set");
}

#[test]
fn an_event_wakes_a_sleeping_receiver() {
    let a = Node::udp();
    let b = listener();
    let (qa, qb) = b.pair(&a);
    for round in 0..20 {
        qb.post_recv([b.node.recv(round, 0, 64)]).expect("posted");
        b.cq.request_notify(false).expect("armed");
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| b.channel.get_event());
            if round % 2 == 0 {
                std::thread::sleep(Duration::from_millis(2));
            }
            qa.post_send([Ok(a.wr(round, SendOp::Send, 0, 8))]).expect("posted");
            let cq = waiting.join().expect("no panic").expect("an event");
            assert_eq!(cq.cookie(), 77);
            cq.ack_events(1);
        });
        assert_eq!(poll_for(&b.cq, 1)[0].wr_id, round);
        assert_eq!(a.completion().status, WcStatus::Success);
    }
}

#[test]
fn only_solicited_completions_and_errors_are_solicited() {
    let a = Node::udp();
    let b = listener();
    let (qa, qb) = b.pair(&a);
    nonblocking(b.channel.fd());
    qb.post_recv([b.node.recv(1, 0, 64), b.node.recv(2, 0, 64), b.node.recv(3, 0, 64)]).expect("posted");
    b.cq.request_notify(true).expect("armed");
    qa.post_send([Ok(a.wr(1, SendOp::Send, 0, 8))]).expect("posted");
    assert_eq!(a.completion().status, WcStatus::Success);
    assert_eq!(poll_for(&b.cq, 1).len(), 1);
    assert_eq!(b.channel.get_event().map(drop), Err(Error::Again));
    let mut solicited = a.wr(2, SendOp::Send, 0, 8);
    solicited.flags |= SendFlags::SOLICITED;
    qa.post_send([Ok(solicited)]).expect("posted");
    wait_until("the event is there", || b.channel.get_event().map(|cq| cq.ack_events(1)).is_ok());
    assert_eq!(b.channel.get_event().map(drop), Err(Error::Again), "one event for one request");

    b.cq.request_notify(true).expect("armed");
    let error = QpAttr { state: QpState::Err, ..QpAttr::default() };
    qb.modify(&error, QpAttrMask::STATE).expect("ERR");
    assert!(b.channel.get_event().map(|cq| cq.ack_events(1)).is_ok(), "a flushed receive is an error");
}

#[test]
fn arming_raises_an_event_for_completions_since_the_last_one() {
    let a = Node::udp();
    let b = listener();
    let (qa, qb) = b.pair(&a);
    nonblocking(b.channel.fd());
    let event = || b.channel.get_event().map(|cq| cq.ack_events(1));
    let send = |qa: &Arc<QueuePair>, qb: &Arc<QueuePair>, wr_id| {
        qb.post_recv([b.node.recv(wr_id, 0, 64)]).expect("posted");
        qa.post_send([Ok(a.wr(wr_id, SendOp::Send, 0, 8))]).expect("posted");
        assert_eq!(a.completion().status, WcStatus::Success);
        while b.cq.is_empty() {
            b.node.device.progress();
        }
    };
    send(&qa, &qb, 1);
    assert_eq!(event(), Err(Error::Again), "nobody has asked");
    b.cq.request_notify(true).expect("armed");
    assert_eq!(event(), Err(Error::Again), "it is not solicited");
    b.cq.request_notify(false).expect("armed");
    assert_eq!(event(), Ok(()));
    b.cq.request_notify(false).expect("armed");
    assert_eq!(event(), Err(Error::Again), "its event was raised");
    assert_eq!(poll_for(&b.cq, 1)[0].wr_id, 1);
    // Armed, so this completion raises an event; the next one does not, until the queue is armed again.
    send(&qa, &qb, 2);
    assert_eq!(event(), Ok(()));
    assert_eq!(poll_for(&b.cq, 1)[0].wr_id, 2);
    send(&qa, &qb, 3);
    assert_eq!(event(), Err(Error::Again));
    b.cq.request_notify(false).expect("armed");
    assert_eq!(event(), Ok(()));
    // A completion that RESET discards is no longer counted among those that raised an event.
    let reset = QpAttr { state: QpState::Reset, ..QpAttr::default() };
    qb.modify(&reset, QpAttrMask::STATE).expect("reset");
    assert!(b.cq.is_empty());
    let (qa, qb) = b.pair(&a);
    send(&qa, &qb, 4);
    assert_eq!(event(), Err(Error::Again));
    b.cq.request_notify(false).expect("armed");
    assert_eq!(event(), Ok(()));
}

#[test]
fn a_queue_without_a_channel_has_no_events() {
    let a = Node::udp();
    a.cq.request_notify(false).expect("arming without a channel is no error");
}

#[test]
fn destroying_a_queue_waits_for_acknowledgements_and_withdraws_events() {
    let a = Node::udp();
    let b = listener();
    let (qa, qb) = b.pair(&a);
    qb.post_recv([b.node.recv(1, 0, 64), b.node.recv(2, 0, 64)]).expect("posted");
    b.cq.request_notify(false).expect("armed");
    qa.post_send([Ok(a.wr(1, SendOp::Send, 0, 8))]).expect("posted");
    let cq = b.channel.get_event().expect("an event");
    b.cq.request_notify(false).expect("armed");
    qa.post_send([Ok(a.wr(2, SendOp::Send, 0, 8))]).expect("posted");
    assert_eq!(a.completions(2).len(), 2);
    assert!(matches!(b.channel.destroy(), Err(Error::Busy(_))));
    assert!(matches!(b.cq.destroy(), Err(Error::Busy(_))), "a queue pair uses it");
    qb.destroy().expect("destroyed");
    let acknowledged = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(20));
            acknowledged.store(true, Ordering::SeqCst);
            cq.ack_events(1);
        });
        b.cq.destroy().expect("destroyed");
        assert!(acknowledged.load(Ordering::SeqCst));
    });
    nonblocking(b.channel.fd());
    assert_eq!(b.channel.get_event().map(drop), Err(Error::Again), "its second event is gone");
    b.channel.destroy().expect("destroyed");
}

#[test]
fn asynchronous_events_wait_for_their_readers() {
    let (a, b) = (Node::udp(), Node::udp());
    nonblocking(b.device.async_fd());
    assert_eq!(b.device.get_async_event().map(drop), Err(Error::Again));
    let (qa, qb) = rc_pair(&a, &b);
    let bad = SendOp::Write { va: 1, rkey: 1 };
    qa.post_send([Ok(a.wr(1, bad, 0, 8))]).expect("posted");
    assert_eq!(a.completion().status, WcStatus::RemoteAccess);
    let event = b.device.get_async_event().expect("an event");
    assert_eq!(event.code(), 3);
    let acknowledged = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(20));
            acknowledged.store(true, Ordering::SeqCst);
            event.ack();
        });
        qb.destroy().expect("destroyed");
        assert!(acknowledged.load(Ordering::SeqCst));
    });
}

#[test]
fn a_queue_pair_that_the_program_knows_nothing_of_raises_no_events() {
    let (a, b) = (Node::udp(), Node::udp());
    nonblocking(b.device.async_fd());
    let silent = QpInit { raises_events: false, ..b.init(QpType::Rc) };
    let (qa, qb) = (a.qp(QpType::Rc), b.pd.create_qp(silent).expect("a queue pair"));
    connect(&qa, &b, qb.qpn(), &Tuning::default());
    connect(&qb, &a, qa.qpn(), &Tuning::default());
    let bad = SendOp::Write { va: 1, rkey: 1 };
    qa.post_send([Ok(a.wr(1, bad, 0, 8))]).expect("posted");
    assert_eq!(a.completion().status, WcStatus::RemoteAccess);
    assert_eq!(qb.state(), QpState::Err);
    assert_eq!(b.device.get_async_event().map(drop), Err(Error::Again));
    qb.destroy().expect("destroyed");
}

#[test]
fn closing_a_device_wakes_threads_that_wait_for_its_events() {
    let a = Node::udp();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| a.device.get_async_event().map(drop));
        std::thread::sleep(Duration::from_millis(5));
        a.device.close();
        assert!(matches!(waiting.join().expect("no panic"), Err(Error::NoDevice(_))));
    });
    assert!(matches!(a.device.alloc_pd().map(drop), Err(Error::NoDevice(_))));
    assert_eq!(a.mr.dereg(), Ok(()));
}
