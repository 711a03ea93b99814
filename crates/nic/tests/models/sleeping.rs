//! An engine that goes to sleep while another thread adds work: the thread wakes it, or it sees the work.
//!
//! Mutations that this has found: `sleeps_until` not stored before the engine's checks; a relaxed store or load of
//! `sleeps_until`; a relaxed load of `mode`; a relaxed store of the next timer, or of `any` of pending queue pairs.

use std::collections::VecDeque;

use loom::sync::Arc;
use loom::thread;
use terrace_transport::Time;

use crate::announce::{Announced, Mode};
use crate::in_flight::InFlightBudgets;
use crate::queue_pair;
use crate::sync::{AtomicBool, Ordering, model};
use crate::timers::Timers;
use crate::tx::Pending;
use crate::{QueuePair, schedule::NEVER};

struct Device {
    announced: Announced,
    pending: Pending<QueuePair>,
    timers: Timers<QueuePair>,
    in_flight: InFlightBudgets<QueuePair>,
    has_deferred_acks: AtomicBool,
}

impl Device {
    fn new() -> Arc<Device> {
        Arc::new(Device {
            announced: Announced::new(),
            pending: Pending::default(),
            timers: Timers::default(),
            in_flight: InFlightBudgets::new(1),
            has_deferred_acks: AtomicBool::new(false),
        })
    }

    /// What the engine does before it sleeps (`Driver::armed`): until when it then sleeps; `None` if it does not.
    fn fall_asleep(&self) -> Option<Time> {
        let deadline = self.timers.next();
        self.announced.fall_asleep(deadline);
        let wants_pass = !self.pending.is_empty()
            || self.has_deferred_acks.load(Ordering::SeqCst)
            || self.in_flight.can_grant();
        let sleeps = self.timers.next() == deadline && !wants_pass;
        sleeps.then(|| deadline.unwrap_or(NEVER))
    }
}

/// Another thread adds work that is due at `due`, and returns whether it wakes the engine. The engine, which goes to
/// sleep meanwhile, must not sleep longer than that.
fn is_served(due: Time, add: fn(&Device) -> bool) {
    model(4, move || {
        let device = Device::new();
        let adding = {
            let device = device.clone();
            thread::spawn(move || add(&device))
        };
        let sleeps_until = device.fall_asleep();
        let is_woken = adding.join().unwrap();
        assert!(is_woken || sleeps_until.is_none_or(|until| until <= due), "asleep until {sleeps_until:?}");
    });
}

#[test]
fn a_pending_queue_pair_is_served() {
    is_served(Time(0), |device| {
        device.pending.add(&queue_pair(1));
        device.announced.sleeps_past(Time(0))
    });
}

#[test]
fn a_timer_is_served() {
    is_served(Time(7), |device| {
        device.timers.arm(&queue_pair(1), Time(9));
        device.timers.arm(&queue_pair(2), Time(7)) && device.announced.sleeps_past(Time(7))
    });
}

#[test]
fn a_grant_is_given() {
    is_served(Time(0), |device| {
        let budget = device.in_flight.of_peer(([127, 0, 0, 1], 4791).into());
        device.in_flight.update(&budget, 0, 1);
        device.in_flight.wait(&queue_pair(1), &budget);
        device.in_flight.update(&budget, 1, 0);
        device.in_flight.can_grant() && device.announced.sleeps_past(Time(0))
    });
}

/// The program defers an ACK while the engine leaves standby, in which it would send the ACK after a tick.
#[test]
fn a_deferred_ack_is_sent() {
    model(4, || {
        let device = Device::new();
        device.announced.set_mode(Mode::Standby);
        let program = {
            let device = device.clone();
            // What `advance` and `progress_for` do: true if it wakes the engine.
            thread::spawn(move || {
                device.has_deferred_acks.store(true, Ordering::SeqCst);
                !device.announced.is_mode(Mode::Standby)
            })
        };
        device.announced.set_mode(Mode::Armed);
        let sleeps = device.fall_asleep().is_some();
        assert!(program.join().unwrap() || !sleeps, "the ACK stays");
    });
}

/// A thread takes due timers while the queue pair's deadline moves forward: the queue pair is handled now, or has an
/// entry.
#[test]
fn a_deadline_that_moves_while_its_timer_fires_is_not_lost() {
    model(4, || {
        let (timers, qp) = (Arc::new(Timers::default()), queue_pair(1));
        timers.arm(&qp, Time(5));
        let taking = {
            let timers = timers.clone();
            thread::spawn(move || timers.take_due(Time(5)).len())
        };
        timers.arm(&qp, Time(3));
        let is_handled = taking.join().unwrap() > 0;
        assert!(is_handled || timers.take_due(Time(3)).len() == 1, "no timer is left");
    });
}

/// A thread takes due timers while another one arms one.
#[test]
fn the_earliest_timer_is_known_to_those_who_do_not_lock() {
    model(4, || {
        let (timers, qps) = (Arc::new(Timers::default()), [queue_pair(1), queue_pair(2)]);
        timers.arm(&qps[0], Time(3));
        let taking = {
            let timers = timers.clone();
            thread::spawn(move || timers.take_due(Time(5)).len())
        };
        timers.arm(&qps[1], Time(9));
        assert_eq!(taking.join().unwrap(), 1);
        assert_eq!(timers.next(), Some(Time(9)));
        let mut left = VecDeque::from_iter(timers.take_due(Time(9)));
        assert!(left.pop_front().is_some_and(|qp| qp.0.qpn == 2) && left.is_empty());
    });
}
