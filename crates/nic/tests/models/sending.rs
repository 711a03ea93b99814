//! The right to send for a queue pair, the list of pending queue pairs, and units that the network does not take: what
//! a queue pair has to send is sent, by one thread at a time, and a wakeup is handled after it.
//!
//! Mutations that this has found: `TxToken::take` that leaves no note; `TxToken::give_back` that drops it, or is
//! relaxed; `take_into` that keeps the queue pair's mark, or does not ask whether the handled one was woken; a relaxed
//! load of `is_woken`; a relaxed store of `is_pending`; a relaxed store or load of `any` or of `is_blocked`; a unit
//! that does not count as blocked while it is retried.

use std::collections::VecDeque;

use loom::sync::Arc;
use loom::thread;

use crate::sync::{AtomicU32, Mutex, Ordering, model};
use crate::tx::{Pending, TxPool};
use crate::tx_token::TxToken;
use crate::{QueuePair, queue_pair};

/// A queue pair's packets, numbered in the order in which they have to leave.
#[derive(Default)]
struct Sender {
    /// Under the queue pair's lock: packets that were posted, and that were taken into batches.
    posted_taken: Mutex<(u32, u32)>,
    token: TxToken,
    /// Packets that have left. Changed by the thread with the token.
    left: AtomicU32,
}

impl Sender {
    fn post_and_send(&self) {
        self.posted_taken.lock().0 += 1;
        loop {
            let (first, end) = {
                let mut core = self.posted_taken.lock();
                if !self.token.take() {
                    return;
                }
                let (posted, taken) = *core;
                core.1 = posted;
                if posted == taken {
                    // Under the lock nobody can have left a note.
                    assert!(!self.token.give_back());
                    return;
                }
                (taken, posted)
            };
            let before = self.left.load(Ordering::Relaxed);
            assert_eq!(before, first, "packets leave out of order");
            self.left.store(end, Ordering::Relaxed);
            if !self.token.give_back() {
                return;
            }
        }
    }
}

#[test]
fn packets_leave_in_order_and_none_stays() {
    model(4, || {
        let sender = Arc::new(Sender::default());
        let others = [(); 2].map(|()| {
            let sender = sender.clone();
            thread::spawn(move || sender.post_and_send())
        });
        others.into_iter().for_each(|other| other.join().unwrap());
        assert_eq!(sender.left.load(Ordering::Relaxed), 2, "a packet stays behind");
    });
}

/// A queue pair is woken while another thread has just handled it, and takes it off the list.
#[test]
fn a_wakeup_is_handled_after_it() {
    model(4, || {
        let (pending, qp) = (Arc::new(Pending::default()), queue_pair(1));
        pending.add(&qp);
        let waker = {
            let (pending, qp) = (pending.clone(), qp.clone());
            thread::spawn(move || {
                qp.0.wake();
                pending.add(&qp);
            })
        };
        // What `transmit_first` does.
        qp.0.take_woken();
        let mut work = VecDeque::new();
        pending.take_into(&mut work, Some(&qp));
        waker.join().unwrap();
        // The next pass.
        pending.take_into(&mut work, None);
        assert!(!qp.0.is_woken() || !work.is_empty(), "a woken queue pair is forgotten");
    });
}

#[test]
fn each_queue_pair_is_listed_once_until_it_is_taken() {
    model(3, || {
        let (pending, qps) = (Arc::new(Pending::default()), [queue_pair(1), queue_pair(2)]);
        let other = {
            let (pending, qps) = (pending.clone(), qps.clone());
            thread::spawn(move || qps.iter().for_each(|qp| pending.add(qp)))
        };
        let mut work = VecDeque::new();
        pending.add(&qps[0]);
        pending.take_into(&mut work, None);
        other.join().unwrap();
        pending.take_into(&mut work, None);
        assert!(pending.is_empty());
        let count = |qpn| work.iter().filter(|qp| qp.0.qpn == qpn).count();
        assert!((1..=2).contains(&count(1)) && count(2) == 1, "{} and {}", count(1), count(2));
    });
}

/// A thread leaves a queue pair to the pass that finds the network unblocked, while that pass begins.
#[test]
fn what_waits_for_the_network_is_sent_when_it_is_unblocked() {
    model(3, || {
        let pool: Arc<TxPool<QueuePair>> = Arc::default();
        let pending = Arc::new(Pending::default());
        pool.block(pool.take());
        let waiting = {
            let (pool, pending) = (pool.clone(), pending.clone());
            // What `defer_until_unblocked` does: true if it wakes the engine.
            thread::spawn(move || {
                pending.add(&queue_pair(1));
                !pool.is_blocked()
            })
        };
        let unit = pool.take_blocked().expect("a unit is blocked");
        assert!(pool.is_blocked(), "an engine that goes to sleep now waits for the network");
        pool.note_unblocked();
        pool.give_back(unit);
        // What `wants_pass` does.
        let finds_work = !pending.is_empty() && !pool.is_blocked();
        assert!(waiting.join().unwrap() || finds_work, "nobody comes for the queue pair");
    });
}
