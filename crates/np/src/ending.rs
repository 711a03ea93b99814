//! The end of memory that a same-host peer may still access: it is waited for by a thread, because a peer that is stopped
//! would keep a session, and with it all callbacks of the device, for as long.

use std::io;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::time::Duration;

use terrace_nic::Mr;
use terrace_sync::without_signals;

/// Has a thread carry out `end`. If there is none, `end` is dropped.
///
/// # Errors
/// When no thread can be started.
pub(crate) fn in_background(end: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let builder = std::thread::Builder::new().name("terrace-np-end".into());
    without_signals(|| builder.spawn(end)).map(drop)
}

/// Ends the registration of a version table, and then drops `pager`, whose memory it is. Does not wait. A table whose registration
/// cannot be ended keeps its pager for ever: its key permits accesses of peers to that memory.
pub(crate) fn end_table<T: ?Sized + Send + Sync + 'static>(mr: Arc<Mr>, pager: Arc<T>) {
    if mr.dereg_within(Duration::ZERO).is_ok() {
        return;
    }
    let pager = ManuallyDrop::new(pager);
    // It is the program's, which may end it as soon as its queue pair has ended.
    mr.release_pd();
    let ended = in_background(move || match mr.dereg() {
        Ok(()) => drop(ManuallyDrop::into_inner(pager)),
        Err(error) => tracing::error!(%error, "a version table cannot be deregistered, and keeps its memory"),
    });
    if let Err(error) = ended {
        tracing::error!(%error, "a version table keeps its memory: no thread to deregister it");
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};
    use std::time::Instant;

    use terrace_fabric::sim::{SimConfig, SimNet};
    use terrace_nic::{Buffer, Device, DeviceConfig, ManualClock};

    use super::*;

    #[test]
    fn the_memory_of_a_table_that_cannot_be_deregistered_stays() {
        let port = SimNet::new(1, SimConfig::default()).port(IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1)));
        let config = DeviceConfig::simulated(Box::new(port), Arc::new(ManualClock::new()), 1);
        let device = Device::open(config).expect("a device");
        let pd = device.alloc_pd().expect("a protection domain");
        for is_ended in [false, true] {
            let table = Buffer::new(&pd, 64, 0).expect("a table");
            let pager = Arc::new(());
            let seen = Arc::downgrade(&pager);
            if is_ended {
                // It cannot be deregistered again.
                table.mr().dereg().expect("nobody uses it");
            }
            let started = Instant::now();
            end_table(table.mr().clone(), pager);
            assert!(started.elapsed() < Duration::from_secs(5), "it does not wait");
            std::thread::sleep(Duration::from_millis(200));
            assert_eq!(seen.upgrade().is_some(), is_ended);
        }
        device.close();
    }
}
