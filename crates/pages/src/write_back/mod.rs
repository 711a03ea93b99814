//! Writing dirty pages to their files: before their frames are needed, and for FLUSH.
//!
//! A write-back of a page begins with the change from `Dirty` to `Clean`: later writes make it dirty again, and so are
//! noticed. If a copy may be under way that began before, the page stays `Dirty`, and is only written. A page is written
//! by one thread at a time. The bytes of the frame may change while the device reads them: the page is dirty again then.
//!
//! A page that cannot be written stays dirty and in memory, so each FLUSH that includes it fails until it is written. It
//! is tried again several times a second, as far as the device's errors permit: after a second of errors a thread leaves the
//! region's other pages for the next attempt, which begins with them. Meanwhile its region accepts no write that would make another page dirty, and
//! an access that finds no frame fails after a second: otherwise one full disk would block all regions. So does an access
//! for which the system has no memory, although the pool has a frame for it.
//!
//! After a failed sync, all pages of the region in memory are dirty again ([`crate::file_syncs`]).
//!
//! | module | content |
//! |---|---|
//! | `cleaning` | dirty pages whose frames are needed, or soon will be |
//! | `flush` | making a range durable |
//! | `writing` | the write-back of a page, from its beginning to its end |

mod cleaning;
mod flush;
mod writing;

use std::time::Duration;

use crate::engine::Engine;
use crate::write_queue::{Job, PERIOD};

/// For how long accesses wait for frames while write-backs fail, or the system has no memory.
const STUCK_PATIENCE: Duration = Duration::from_secs(1);

/// A thread's main loop.
pub(crate) fn run(engine: &Engine) {
    let mut wakes_periodically = false;
    loop {
        match engine.to_write.next(wakes_periodically) {
            // Pages that could not be written are tried again.
            Job::Flush(access) => wakes_periodically |= !engine.carry_out_flush(&access),
            Job::Clean => {
                let is_failing = engine.retry_unwritable() | engine.clean_laundry();
                let has_starved = engine.has_starved();
                wakes_periodically = is_failing || has_starved;
                wakes_periodically |= engine.has_many_dirty() && !engine.clean_ahead();
                if has_starved {
                    engine.fail_starved_of_stuck(STUCK_PATIENCE);
                }
                if is_failing {
                    std::thread::sleep(PERIOD);
                }
            }
            Job::Stop => return,
        }
    }
}
