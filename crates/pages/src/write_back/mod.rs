//! Writing dirty pages to their files: before their frames are needed, and for FLUSH.
//!
//! A write-back of a page begins with the change from `Dirty` to `Clean`: later writes make it dirty again, and so are
//! noticed. If a copy may be under way that began before, the page stays `Dirty`, and is only written. A page is written
//! by one thread at a time. The bytes of the frame may change while the device reads them: the page is dirty again then.
//!
//! A page that cannot be written stays dirty and in memory, so each FLUSH that includes it fails until it is written.
//!
//! | module | content |
//! |---|---|
//! | `cleaning` | dirty pages whose frames are needed, or soon will be |
//! | `flush` | making a range durable |
//! | `writing` | the write-back of a page, from its beginning to its end |

mod cleaning;
mod flush;
mod writing;

use crate::engine::Engine;
use crate::write_queue::{Job, PERIOD};

/// A thread's main loop.
pub(crate) fn run(engine: &Engine) {
    let mut is_impatient = false;
    loop {
        match engine.to_write.next(is_impatient) {
            Job::Flush(slot, access) => engine.carry_out_flush(slot, &access),
            Job::Clean => {
                let has_failed = engine.clean_laundry();
                is_impatient = has_failed || engine.has_starved();
                is_impatient |= engine.has_many_dirty() && !engine.clean_ahead();
                if has_failed {
                    std::thread::sleep(PERIOD);
                }
            }
            Job::Stop => return,
        }
    }
}
