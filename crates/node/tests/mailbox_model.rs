//! A mailbox in every interleaving that loom finds: an answer that came before the connection ended is taken before its
//! end is seen.
//!
//! `src/mailbox.rs`, and `backlog.rs` of `terrace-sync`, are compiled here once more with loom's types.
//!
//! Mutations that this has found: the end looked at after the answers are taken, as it once was; a relaxed store in
//! `close`; a relaxed load of `is_closed`.

#[path = "../../sync/src/backlog.rs"]
#[allow(dead_code, reason = "the model uses not all of it")]
mod backlog;
#[path = "../src/mailbox.rs"]
mod mailbox;

#[path = "../../sync/tests/loom_common/platform.rs"]
mod platform;

/// Stands in for `src/sync.rs`.
mod sync {
    pub(crate) use crate::backlog::Backlog;
    pub(crate) use crate::platform::{AtomicBool, Ordering};
}

use loom::sync::Arc;
use loom::thread;
use mailbox::Mailbox;
use terrace_access::proto::Status;

#[test]
fn no_answer_comes_after_the_end() {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(4);
    builder.check(|| {
        let mailbox = Arc::new(Mailbox::default());
        let link = {
            let mailbox = mailbox.clone();
            thread::spawn(move || {
                mailbox.put(1..2, Status::Ok);
                mailbox.put(2..3, Status::Ok);
                mailbox.close();
            })
        };
        let mut taken = 0;
        for _ in 0..2 {
            let (answers, is_closed) = mailbox.take();
            taken += answers.len();
            assert!(!is_closed || taken == 2, "an answer is behind the end");
        }
        link.join().unwrap();
    });
}
