//! The in-flight budget: while bytes are free, no queue pair waits for a grant that nobody gives.
//!
//! Mutations that this has found: no look for grants behind `wait`; a relaxed store or load of `is_awaited`; a relaxed change
//! of the bytes; `give_grant` that gives no grant; `mark_waiting` that is always true; a grant that is counted twice; a
//! `can_grant` that is cleared last.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use loom::sync::Arc;
use loom::thread;

use crate::in_flight::{GRANT_BYTES_MIN, InFlightBudget, InFlightBudgets};
use crate::sync::model;
use crate::{QueuePair, queue_pair};

/// Room for one grant.
const LIMIT_BYTES: u64 = GRANT_BYTES_MIN;
const PEER: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 4791);

/// What `begin_to_fill` and `publish_state` do of a queue pair that sends nothing. False if it has no grant.
fn returns_grant(budgets: &InFlightBudgets<QueuePair>, budget: &InFlightBudget, qp: &QueuePair) -> bool {
    let granted_bytes = qp.0.take_grant();
    budgets.update(budget, granted_bytes, 0);
    granted_bytes > 0
}

/// One queue pair is blocked by the budget while another one's bytes arrive.
#[test]
fn a_blocked_queue_pair_gets_a_grant_from_one_thread_or_the_other() {
    model(4, || {
        let (budgets, qp) = (Arc::new(InFlightBudgets::new(LIMIT_BYTES)), queue_pair(1));
        let budget = budgets.of_peer(PEER);
        budgets.update(&budget, 0, LIMIT_BYTES);
        let freeing = {
            let (budgets, budget) = (budgets.clone(), budget.clone());
            // What `update_in_flight` and `after_unlock` do: true if it wakes the engine, which gives grants.
            thread::spawn(move || {
                budgets.update(&budget, LIMIT_BYTES, 0);
                budgets.can_grant()
            })
        };
        let mut work = VecDeque::new();
        if budgets.left(&budget, 0, 0) == 0 {
            budgets.wait(&qp, &budget);
            // What `flush` does behind its last queue pair.
            budgets.give_grants(&mut work);
        } else {
            assert!(qp.0.mark_waiting() && !budgets.can_grant());
        }
        let is_granted = returns_grant(&budgets, &budget, &qp);
        if freeing.join().unwrap() {
            budgets.give_grants(&mut work);
        }
        returns_grant(&budgets, &budget, &qp);
        assert!(budgets.left(&budget, 0, 0) > 0, "a queue pair waits for ever");
        assert!(!is_granted || work.len() == 1);
    });
}

/// Grants are given, and bytes are freed, while a queue pair that has just got a grant joins again.
#[test]
fn a_queue_pair_waits_once() {
    model(4, || {
        let (budgets, qp) = (Arc::new(InFlightBudgets::new(2 * LIMIT_BYTES)), queue_pair(1));
        let budget = budgets.of_peer(PEER);
        budgets.update(&budget, 0, LIMIT_BYTES);
        let giving = {
            let (budgets, budget) = (budgets.clone(), budget.clone());
            thread::spawn(move || {
                let mut work = VecDeque::new();
                budgets.give_grants(&mut work);
                budgets.update(&budget, LIMIT_BYTES, 0);
                budgets.give_grants(&mut work);
                work.len()
            })
        };
        budgets.wait(&qp, &budget);
        budgets.wait(&qp, &budget);
        let mut given = giving.join().unwrap();
        let mut work = VecDeque::new();
        budgets.give_grants(&mut work);
        assert!(returns_grant(&budgets, &budget, &qp));
        // It may have joined again, with a grant that it had not taken.
        budgets.give_grants(&mut work);
        given += work.len();
        assert!((1..=2).contains(&given), "{given} entries");
        returns_grant(&budgets, &budget, &qp);
        assert_eq!(budgets.left(&budget, 0, 0), 2 * LIMIT_BYTES);
    });
}

/// A queue pair sends less than its grant permits while grants are given: the next queue pair gets one from either thread.
#[test]
fn what_a_grant_leaves_goes_to_the_next() {
    model(4, || {
        let (budgets, qps) = (Arc::new(InFlightBudgets::new(LIMIT_BYTES)), [1, 2].map(queue_pair));
        let budget = budgets.of_peer(PEER);
        budgets.update(&budget, 0, LIMIT_BYTES);
        qps.iter().for_each(|qp| budgets.wait(qp, &budget));
        budgets.update(&budget, LIMIT_BYTES, 0);
        let returning = {
            let (budgets, budget, qp) = (budgets.clone(), budget.clone(), qps[0].clone());
            thread::spawn(move || returns_grant(&budgets, &budget, &qp) && budgets.can_grant())
        };
        let mut work = VecDeque::new();
        budgets.give_grants(&mut work);
        if returning.join().unwrap() | returns_grant(&budgets, &budget, &qps[0]) {
            budgets.give_grants(&mut work);
        }
        assert!(qps[1].0.take_grant() > 0, "a queue pair waits for ever");
    });
}
