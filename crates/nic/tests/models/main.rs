//! What threads of a device share without a lock, in every interleaving that loom finds. A model is in a file of its
//! own.
//!
//! The files of `src` that are named below are compiled here once more with loom's types. `sync` gives sequentially
//! consistent accesses the meaning that loom does not give them.

#[path = "../../src/ack.rs"]
#[allow(dead_code, reason = "the models use not all of it")]
mod ack;
#[path = "../../src/engine/announce.rs"]
#[allow(dead_code, reason = "the models use not all of it")]
mod announce;
#[path = "../../src/callback_turn.rs"]
#[allow(dead_code, reason = "the models use not all of it")]
mod callback_turn;
#[path = "../../src/in_flight.rs"]
#[allow(dead_code, reason = "the models use not all of it")]
mod in_flight;
#[path = "../../src/engine/pause.rs"]
#[allow(dead_code, reason = "the models use not all of it")]
mod pause;
#[path = "../../src/schedule.rs"]
#[allow(dead_code, reason = "the models use not all of it")]
mod schedule;
#[path = "../../src/timers.rs"]
#[allow(dead_code, reason = "the models use not all of it")]
mod timers;
#[path = "../../src/tx.rs"]
#[allow(dead_code, reason = "the models use not all of it")]
mod tx;
#[path = "../../src/tx_token.rs"]
#[allow(dead_code, reason = "the models use not all of it")]
mod tx_token;
#[path = "../../src/use_count.rs"]
#[allow(dead_code, reason = "the models use not all of it")]
mod use_count;

mod sync;

mod callbacks;
mod grants;
mod parking;
mod sending;
mod sleeping;
mod users;

/// Stands in for `src/error.rs`, whose type is public.
mod error {
    pub(crate) use terrace_nic::Error;
}

/// Stands in for `src/local/`: no model receives.
mod local {
    #[derive(Default)]
    pub(crate) struct PeerRxSet {
        _rings: (),
    }

    impl PeerRxSet {
        pub(crate) fn clear(&mut self) {}
    }
}

use schedule::Schedule;

/// A queue pair, as far as lists know it.
struct QueuePair(Schedule);

impl AsRef<Schedule> for QueuePair {
    fn as_ref(&self) -> &Schedule {
        &self.0
    }
}

fn queue_pair(qpn: u32) -> std::sync::Arc<QueuePair> {
    std::sync::Arc::new(QueuePair(Schedule::new(qpn)))
}
