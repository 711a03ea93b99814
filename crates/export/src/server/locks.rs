//! Locks of whole files.
//!
//! A lock is a `flock(2)` lock of a descriptor of its own, so local programs see it. It ends with its connection, after the
//! client's accesses of the file. A client that connects again takes it over until then. Later it reclaims it, which succeeds
//! only if no other client can have had the file meanwhile:
//!
//! | the client had the lock | it has it again if |
//! |---|---|
//! | at this server, and its socket was closed | no other client has been granted a lock that excludes it since |
//! | at this server, and its lease has ended | never |
//! | at an earlier server | the same, since this server began, which is not longer ago than a lease; the client asks only if its lease had not ended |

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;
use rustix::io::Errno;
use terrace_sync::Mutex;

use super::connection::Connection;
use super::holdings::Holding;
use super::requests::{Outcome, Serving};
use super::tree;
use crate::proto::{Answer, FileId, LockKind, OpenAccess};

/// The most locks of a connection.
const LOCKS_MAX: usize = 4096;
/// The most locks that are remembered of connections that have ended, and of the time after the server began.
const REMEMBERED_MAX: usize = 65_536;

/// A lock that a connection holds.
pub struct HeldLock {
    descriptor: OwnedFd,
    kind: LockKind,
    _holding: Holding,
}

impl HeldLock {
    /// Whether it is at least of this kind.
    pub fn covers(&self, kind: LockKind) -> bool {
        self.kind == kind || self.kind == LockKind::Exclusive
    }
}

/// Names a lock: the client, the file, and the owner that the client has chosen.
type Key = (u64, FileId, u64);

fn excludes(a: LockKind, b: LockKind) -> bool {
    a == LockKind::Exclusive || b == LockKind::Exclusive
}

/// What clients may reclaim.
pub struct LockHistory {
    /// The number of this server, which no other has.
    pub instance: u64,
    lease: Duration,
    began: Instant,
    remembered: Mutex<Remembered>,
}

#[derive(Default)]
struct Remembered {
    /// Locks of connections that have ended, and when.
    released: HashMap<Key, (LockKind, Instant)>,
    /// Locks granted within a lease after the server began.
    early: HashMap<FileId, Vec<(u64, u64, LockKind)>>,
    early_count: usize,
}

impl LockHistory {
    /// That of a server that begins now.
    pub fn new(lease: Duration) -> LockHistory {
        LockHistory { instance: rand::random(), lease, began: Instant::now(), remembered: Mutex::default() }
    }

    fn is_early(&self) -> bool {
        self.began.elapsed() <= self.lease
    }

    /// A lock was granted.
    fn note_granted(&self, (client, id, owner): Key, kind: LockKind) {
        let mut remembered = self.remembered.lock();
        let is_other = |key: &Key| (key.0, key.2) != (client, owner);
        remembered
            .released
            .retain(|key, (released, _)| key.1 != id || (is_other(key) && !excludes(*released, kind)));
        if self.is_early() && remembered.early_count < REMEMBERED_MAX {
            let granted = remembered.early.entry(id).or_default();
            if !granted.contains(&(client, owner, kind)) {
                granted.push((client, owner, kind));
                remembered.early_count += 1;
            }
        }
    }

    /// A lock was released because its connection has ended.
    fn note_released(&self, key: Key, kind: LockKind) {
        let mut remembered = self.remembered.lock();
        if remembered.released.len() < REMEMBERED_MAX {
            remembered.released.insert(key, (kind, Instant::now()));
        }
    }

    /// Forgets what nobody can reclaim any more.
    pub fn forget_old(&self) {
        let mut remembered = self.remembered.lock();
        remembered.released.retain(|_, (_, since)| since.elapsed() <= self.lease);
        if !self.is_early() {
            remembered.early.clear();
        }
    }

    /// Whether a client that had a lock at the server `instance` can be the last one that had it.
    fn may_reclaim(&self, key: Key, kind: LockKind, instance: u64) -> bool {
        let mut remembered = self.remembered.lock();
        if instance == self.instance {
            let released = remembered.released.remove(&key);
            return released.is_some_and(|(released, since)| {
                (released == kind || released == LockKind::Exclusive) && since.elapsed() <= self.lease
            });
        }
        let (client, id, owner) = key;
        let is_excluded =
            remembered.early.get(&id).into_iter().flatten().any(|(other, other_owner, granted)| {
                (*other, *other_owner) != (client, owner) && excludes(*granted, kind)
            });
        self.is_early() && !is_excluded && remembered.early_count < REMEMBERED_MAX
    }
}

/// Releases the locks of a connection that has ended, of the files for which `is_due` says so. Its client may reclaim them, unless its lease has ended: then others
/// have been able to have the files for an unknown time.
pub fn release_locks(history: &LockHistory, connection: &Connection, is_due: impl Fn(FileId) -> bool) {
    for ((id, owner), held) in connection.locks.lock().extract_if(|(id, _), _| is_due(*id)) {
        if !connection.has_lease_ended() {
            history.note_released((connection.client, id, owner), held.kind);
        }
        // Closing the descriptor releases the lock.
        drop(held);
    }
}

fn operation(kind: LockKind) -> FlockOperation {
    match kind {
        LockKind::Shared => FlockOperation::NonBlockingLockShared,
        LockKind::Exclusive => FlockOperation::NonBlockingLockExclusive,
        LockKind::Unlock => FlockOperation::NonBlockingUnlock,
    }
}

impl Serving<'_> {
    /// Locks or unlocks a file.
    pub fn lock(&self, id: FileId, owner: u64, kind: LockKind) -> Outcome {
        let key = (id, owner);
        // The client may not have reclaimed it yet, or not know that it has it.
        self.take_earlier_lock(key, None);
        let mut locks = self.connection.locks.lock();
        if kind == LockKind::Unlock {
            drop(locks.remove(&key));
            return Ok(Answer::Done {});
        }
        if let Some(held) = locks.get_mut(&key) {
            if let Err(errno) = rustix::fs::flock(&held.descriptor, operation(kind)) {
                // The kernel releases a lock before it converts it.
                if rustix::fs::flock(&held.descriptor, operation(held.kind)).is_err() {
                    drop(locks.remove(&key));
                    return Err(Errno::NOLCK.into());
                }
                return Err(errno.into());
            }
            held.kind = kind;
        } else {
            if locks.len() >= LOCKS_MAX {
                return Err(Errno::NOLCK.into());
            }
            let holding = self.state.holdings.take(self.connection.holder).ok_or(Errno::NOLCK)?;
            let file = self.file(id)?;
            let descriptor = self.act(|| {
                tree::open(file.as_fd(), OpenAccess::READ)
                    .or_else(|_| tree::open(file.as_fd(), OpenAccess::WRITE))
            })?;
            rustix::fs::flock(&descriptor, operation(kind))?;
            locks.insert(key, HeldLock { descriptor, kind, _holding: holding });
        }
        self.state.lock_history.note_granted((self.connection.client, id, owner), kind);
        // If the connection has ended meanwhile, the lock is released when no request runs any more.
        Ok(Answer::Done {})
    }

    /// Moves a lock of the client from a connection that has ended to this one. Returns whether there was one.
    fn take_earlier_lock(&self, key: (FileId, u64), reclaimed: Option<LockKind>) -> bool {
        let earlier = self.state.take_earlier_lock(self.connection, key, reclaimed);
        let is_found = earlier.is_some();
        if let Some(held) = earlier {
            self.connection.locks.lock().entry(key).or_insert(held);
        }
        is_found
    }

    /// Locks a file for a client that had the lock on an earlier connection: `ENOLCK` if another one may have had it since.
    pub fn reclaim_lock(&self, id: FileId, owner: u64, kind: LockKind, instance: u64) -> Outcome {
        let has_it = self.connection.locks.lock().get(&(id, owner)).is_some_and(|held| held.kind == kind);
        if has_it {
            return Ok(Answer::Done {});
        }
        let key = (self.connection.client, id, owner);
        // The client finds the file by its path first, if the server does not know it.
        self.file(id)?;
        if kind == LockKind::Unlock {
            return Err(Errno::INVAL.into());
        }
        let is_kept = self.take_earlier_lock((id, owner), Some(kind));
        if !is_kept && !self.state.lock_history.may_reclaim(key, kind, instance) {
            return Err(Errno::NOLCK.into());
        }
        self.lock(id, owner, kind)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: FileId = FileId { dev: 1, ino: 2, generation: 3 };
    const LEASE: Duration = Duration::from_secs(10);

    fn key(client: u64) -> Key {
        (client, ID, 7)
    }

    #[test]
    fn a_lock_is_reclaimed_once_and_not_after_another_client_has_had_it() {
        use LockKind::{Exclusive, Shared};
        let history = LockHistory::new(LEASE);
        let own = history.instance;
        assert!(!history.may_reclaim(key(1), Exclusive, own), "it was never released");
        history.note_released(key(1), Exclusive);
        assert!(history.may_reclaim(key(1), Exclusive, own));
        assert!(!history.may_reclaim(key(1), Exclusive, own));
        history.note_released(key(1), Exclusive);
        history.note_granted(key(2), Shared);
        assert!(!history.may_reclaim(key(1), Exclusive, own));
        history.note_released(key(1), Shared);
        history.note_granted(key(2), Shared);
        assert!(history.may_reclaim(key(1), Shared, own));
    }

    #[test]
    fn a_new_server_knows_whom_it_has_granted_locks() {
        use LockKind::{Exclusive, Shared};
        let history = LockHistory::new(LEASE);
        let earlier = history.instance.wrapping_add(1);
        assert!(history.may_reclaim(key(1), Exclusive, earlier));
        history.note_granted(key(2), Shared);
        assert!(!history.may_reclaim(key(1), Exclusive, earlier));
        assert!(history.may_reclaim(key(1), Shared, earlier));
        assert!(history.may_reclaim(key(2), Exclusive, earlier));
        let late = LockHistory { began: Instant::now() - 2 * LEASE, ..LockHistory::new(LEASE) };
        assert!(!late.may_reclaim(key(1), Shared, late.instance.wrapping_add(1)));
    }
}
