//! The in-flight budget: while bytes are free, no queue pair waits for a grant that nobody gives.
//!
//! Mutations that this has found: no look for grants behind `wait`; a relaxed store or load of `any`; a relaxed change
//! of the bytes; `give_grant` that gives no grant; `mark_waiting` that is always true.

use std::collections::VecDeque;

use loom::sync::Arc;
use loom::thread;

use crate::in_flight::InFlightBudget;
use crate::queue_pair;
use crate::sync::model;

const LIMIT_BYTES: u64 = 4608;

/// One queue pair is blocked by the budget while another one's bytes arrive.
#[test]
fn a_blocked_queue_pair_gets_a_grant_from_one_thread_or_the_other() {
    model(4, || {
        let (budget, qp) = (Arc::new(InFlightBudget::new(LIMIT_BYTES)), queue_pair(1));
        budget.update(0, LIMIT_BYTES);
        let freeing = {
            let budget = budget.clone();
            // What `update_in_flight` and `after_unlock` do: true if it wakes the engine, which gives grants.
            thread::spawn(move || {
                budget.update(LIMIT_BYTES, 0);
                budget.can_grant()
            })
        };
        let mut work = VecDeque::new();
        if !budget.admits(0, 0) {
            budget.wait(&qp);
            // What `flush` does behind its last queue pair.
            budget.give_grants(&mut work);
        } else {
            assert!(qp.0.mark_waiting() && !budget.is_awaited());
        }
        let is_granted = qp.0.take_grant();
        if freeing.join().unwrap() && budget.is_awaited() {
            budget.give_grants(&mut work);
        }
        assert!(!budget.is_awaited(), "a queue pair waits for ever");
        assert!(!is_granted || work.len() == 1);
    });
}

/// Grants are given while a queue pair that has just got one joins again.
#[test]
fn a_queue_pair_waits_once() {
    model(4, || {
        let (budget, qp) = (Arc::new(InFlightBudget::new(LIMIT_BYTES)), queue_pair(1));
        let giving = {
            let budget = budget.clone();
            thread::spawn(move || {
                let mut work = VecDeque::new();
                budget.give_grants(&mut work);
                work.len()
            })
        };
        budget.wait(&qp);
        budget.wait(&qp);
        let mut given = giving.join().unwrap();
        let mut work = VecDeque::new();
        budget.give_grants(&mut work);
        given += work.len();
        assert!((1..=2).contains(&given), "{given} entries");
        assert!(qp.0.take_grant() && !budget.is_awaited());
    });
}
