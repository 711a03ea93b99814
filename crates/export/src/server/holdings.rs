//! The descriptors of the server's process that clients hold: one for each open file, and one for each lock; and, counted apart, one for
//! each file that was looked up.
//!
//! A holder takes another one only while it has fewer than are left. So one that takes all that it can leaves as many to the
//! others, the next one leaves half of these, and so on.

use std::collections::HashMap;
use std::sync::Arc;

use terrace_sync::Mutex;

/// Whose descriptors count together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Holder {
    /// A user of this host.
    User(u32),
    /// Another host, by its address.
    Host([u8; 16]),
}

/// What all clients hold.
#[derive(Debug)]
pub struct Holdings {
    max: usize,
    held: Mutex<Held>,
}

#[derive(Debug, Default)]
struct Held {
    by_holder: HashMap<Holder, usize>,
    count: usize,
}

/// A descriptor that counts as held, until this is dropped.
#[derive(Debug)]
pub struct Holding {
    holdings: Arc<Holdings>,
    holder: Holder,
}

impl Holdings {
    /// At most this many.
    pub fn new(max: usize) -> Arc<Holdings> {
        Arc::new(Holdings { max, held: Mutex::default() })
    }

    /// Counts another descriptor; `None` if the holder has as many as it can.
    pub fn take(self: &Arc<Holdings>, holder: Holder) -> Option<Holding> {
        let mut held = self.held.lock();
        let left = self.max - held.count;
        if held.by_holder.get(&holder).copied().unwrap_or(0) >= left {
            return None;
        }
        *held.by_holder.entry(holder).or_default() += 1;
        held.count += 1;
        Some(Holding { holdings: self.clone(), holder })
    }
}

impl Drop for Holding {
    fn drop(&mut self) {
        let mut held = self.holdings.held.lock();
        held.count -= 1;
        if let Some(own) = held.by_holder.get_mut(&self.holder) {
            *own -= 1;
            if *own == 0 {
                held.by_holder.remove(&self.holder);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;
    use terrace_nic::PathChoice;

    use super::*;
    use crate::client::tests::start;
    use crate::error::ExportError;
    use crate::proto::{LockKind, OpenAccess};

    /// Takes as many as a holder can have.
    fn take_all(holdings: &Arc<Holdings>, holder: Holder) -> Vec<Holding> {
        std::iter::from_fn(|| holdings.take(holder)).collect()
    }

    #[test]
    fn each_holder_leaves_as_many_as_it_has() {
        let holdings = Holdings::new(120);
        let host = Holder::Host([1; 16]);
        let all: Vec<_> = (0..3).map(|uid| take_all(&holdings, Holder::User(uid))).collect();
        assert_eq!(all.iter().map(Vec::len).collect::<Vec<_>>(), [60, 30, 15]);
        assert_eq!(take_all(&holdings, host).len(), 8);
        drop(all);
        assert!(holdings.held.lock().by_holder.is_empty());
        assert_eq!(take_all(&holdings, host).len(), 60);
    }

    #[test]
    fn a_user_with_all_its_descriptors_opens_and_locks_nothing_and_another_one_does() {
        let (_directory, server, client, file) = start(PathChoice::Local);
        let holdings = &server.state.holdings;
        let own = server.state.connections()[0].holder;
        let other = take_all(holdings, Holder::User(u32::MAX));
        let open = || client.open(file.id(), OpenAccess::READ);
        let kept = open().unwrap();
        let taken = take_all(holdings, own);
        assert!(matches!(open(), Err(ExportError::Os(errno)) if errno == Errno::NFILE.raw_os_error()));
        let lock = || file.lock(1, LockKind::Shared, std::time::Duration::ZERO);
        assert!(matches!(lock(), Err(ExportError::Os(errno)) if errno == Errno::NOLCK.raw_os_error()));
        drop(kept);
        let kept = open().expect("the descriptor of the file that was closed before");
        drop((taken, other, kept));
        assert!(open().is_ok() && lock().is_ok());
    }
}
