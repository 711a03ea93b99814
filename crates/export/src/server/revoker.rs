//! The thread that revokes the keys of clients that have gone: a same-host client that is stopped in the middle of an access
//! delays that by seconds, and nobody else waits for it.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use terrace_sync::{Condvar, Mutex};

use super::opens::Open;
use crate::ends::Domain;
use crate::proto::FileId;

/// The time until a key is tried again whose client does not end its access.
const RETRY: Duration = Duration::from_millis(250);
/// How long a client that closes a file waits for the end of its key.
const PATIENCE: Duration = Duration::from_millis(500);

#[derive(Default)]
struct Queue {
    /// The first one is being revoked.
    opens: VecDeque<Arc<Open>>,
    is_closed: bool,
}

/// The open files whose keys are to be revoked.
#[derive(Default)]
pub struct Revoker {
    queue: Mutex<Queue>,
    changed: Condvar,
    /// A key was revoked, or is to be tried again.
    tried: Condvar,
    /// How many keys of a file other threads are revoking.
    under_way: Mutex<HashMap<FileId, usize>>,
    ended: Condvar,
}

impl Revoker {
    /// Adds an open file.
    pub fn add(&self, open: Arc<Open>) {
        self.queue.lock().opens.push_back(open);
        self.changed.notify_one();
    }

    /// Adds an open file, and waits for a short time until its key is revoked. It takes longer only while a same-host client is
    /// stopped in the middle of an access.
    pub fn revoke(&self, open: Arc<Open>) {
        let is_queued = |queue: &Queue| queue.opens.iter().any(|other| Arc::ptr_eq(other, &open));
        self.add(open.clone());
        let deadline = Instant::now() + PATIENCE;
        let mut queue = self.queue.lock();
        while is_queued(&queue) && !self.tried.wait_until(&mut queue, deadline) {}
    }

    /// Revokes keys until closed, and calls `revoked` after each.
    pub fn run(&self, revoked: impl Fn()) {
        let mut queue = self.queue.lock();
        while !queue.is_closed {
            let Some(open) = queue.opens.front().cloned() else {
                self.changed.wait(&mut queue);
                continue;
            };
            drop(queue);
            let result = open.revoke();
            queue = self.queue.lock();
            queue.opens.pop_front();
            self.tried.notify_all();
            if let Err(error) = result {
                tracing::warn!(%error, "a key is revoked later: a client does not end its access");
                queue.opens.push_back(open);
                self.changed.wait_for(&mut queue, RETRY);
            } else {
                drop(queue);
                revoked();
                queue = self.queue.lock();
            }
        }
    }

    /// Whether accesses of a file may run by keys of a domain that are to be revoked. Those of files that same-host clients
    /// map are left out if `is_overdue`.
    pub fn has_keys(&self, domain: &Arc<Domain>, id: FileId, is_overdue: bool) -> bool {
        let counts = |open: &Arc<Open>| !(is_overdue && open.is_mappable());
        let queue = self.queue.lock();
        let is_queued = queue.opens.iter().any(|open| open.id == id && open.is_of(domain) && counts(open));
        drop(queue);
        is_queued || self.under_way.lock().contains_key(&id)
    }

    /// Ends [`Revoker::run`].
    pub fn close(&self) {
        self.queue.lock().is_closed = true;
        self.changed.notify_all();
    }

    /// Revokes the keys that are left, once the device is closed.
    pub fn revoke_rest(&self) {
        let opens = std::mem::take(&mut self.queue.lock().opens);
        for open in opens {
            // Without a device no peer accesses anything.
            let _ = open.revoke();
        }
    }

    /// A thread begins to revoke a key of a file.
    pub fn begin(&self, id: FileId) {
        *self.under_way.lock().entry(id).or_default() += 1;
    }

    /// The thread has revoked it, or has left it to [`Revoker::run`].
    pub fn end(&self, id: FileId) {
        let mut under_way = self.under_way.lock();
        if let Some(count) = under_way.get_mut(&id) {
            *count -= 1;
            if *count == 0 {
                under_way.remove(&id);
                self.ended.notify_all();
            }
        }
    }

    /// Waits until no thread is revoking a key of a file.
    pub fn wait(&self, id: FileId) {
        let mut under_way = self.under_way.lock();
        while under_way.contains_key(&id) {
            self.ended.wait(&mut under_way);
        }
    }
}
