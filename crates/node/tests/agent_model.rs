//! The agent's work in every interleaving that loom finds: a job that becomes ready while another thread has the agent's
//! state, to read its counters say, is not left behind.
//!
//! `callback_turn.rs` of `terrace-nic` and `backlog.rs` of `terrace-sync` are compiled here once more with loom's types.
//! What `Agent::advance` does is repeated here, because an agent needs a device.
//!
//! Mutations that this has found: no request when the state is locked, as it once was.

#[path = "../../sync/src/backlog.rs"]
#[allow(dead_code, reason = "the model uses not all of it")]
mod backlog;
#[path = "../../nic/src/callback_turn.rs"]
#[allow(dead_code, reason = "the model uses not all of it")]
mod callback_turn;
/// Stands in for `src/platform.rs` of `terrace-sync`.
mod platform {
    pub(crate) use crate::sync::{AtomicBool, Mutex, Ordering};
}
#[path = "../../nic/tests/models/sync.rs"]
#[allow(dead_code, reason = "the model uses not all of it")]
mod sync;

use backlog::Backlog;
use callback_turn::CallbackTurn;
use loom::sync::{Arc, Mutex};
use loom::thread;
use sync::model;

struct Agent {
    turn: CallbackTurn,
    ready: Backlog<u32>,
    /// How many jobs were advanced.
    state: Mutex<usize>,
}

impl Agent {
    fn advance(&self) -> bool {
        if self.ready.is_empty() {
            return false;
        }
        let Ok(mut state) = self.state.try_lock() else {
            self.turn.request();
            return false;
        };
        *state += self.ready.take().len();
        true
    }
}

#[test]
fn a_job_that_is_ready_while_the_state_is_locked_is_advanced() {
    model(3, || {
        let agent = Arc::new(Agent {
            turn: CallbackTurn::default(),
            ready: Backlog::default(),
            state: Mutex::new(0),
        });
        let waker = {
            let agent = agent.clone();
            thread::spawn(move || {
                agent.ready.add(1);
                agent.turn.request();
                agent.turn.take(|| agent.advance());
            })
        };
        let state = agent.state.lock().unwrap();
        thread::yield_now();
        drop(state);
        waker.join().unwrap();
        // The engine makes another pass only if there is a request.
        if agent.turn.is_requested() {
            agent.turn.take(|| agent.advance());
        }
        assert_eq!(*agent.state.lock().unwrap(), 1, "a ready job is left behind");
    });
}
