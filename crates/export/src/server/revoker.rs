//! The thread that revokes the keys of files whose accesses have not ended: a same-host client may be stopped in the middle of
//! an access, and the disk may be slow. No other thread waits for them longer than a client's close may take.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use terrace_sync::{Condvar, Mutex};

use super::opens::Open;
use crate::ends::Domain;
use crate::proto::FileId;

/// How long a try to revoke a key waits for accesses: keys of other clients wait for the try.
const TRY: Duration = Duration::from_millis(20);
/// The time until a key is tried again whose accesses did not end.
const RETRY: Duration = Duration::from_millis(250);
/// How long a client that closes a file waits for the end of its key.
const CLOSE_WAIT: Duration = Duration::from_millis(500);
/// How long a server that ends waits for accesses that wait for a disk, or for the process behind a file system.
const END_WAIT: Duration = Duration::from_secs(5);

/// Each open file is in one of these.
#[derive(Default)]
struct Queue {
    /// Those that were not tried yet.
    untried: VecDeque<Arc<Open>>,
    /// The one that is being tried.
    current: Option<Arc<Open>>,
    /// Those whose accesses did not end, and when each is tried again; the earliest first.
    retries: VecDeque<(Instant, Arc<Open>)>,
    is_closed: bool,
}

impl Queue {
    fn all(&self) -> impl Iterator<Item = &Arc<Open>> {
        self.untried.iter().chain(&self.current).chain(self.retries.iter().map(|(_, open)| open))
    }

    /// Takes the next one that is due, and whether it was tried before.
    fn begin(&mut self, now: Instant) -> Option<(Arc<Open>, bool)> {
        let is_retry = self.untried.is_empty();
        let open = match is_retry {
            false => self.untried.pop_front(),
            true if self.retries.front().is_some_and(|(at, _)| *at <= now) => {
                self.retries.pop_front().map(|(_, open)| open)
            }
            true => None,
        };
        self.current.clone_from(&open);
        open.map(|open| (open, is_retry))
    }
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
        self.queue.lock().untried.push_back(open);
        self.changed.notify_one();
    }

    /// Adds an open file as the next one, and waits for [`CLOSE_WAIT`] at most until its key is revoked.
    pub fn revoke(&self, open: Arc<Open>) {
        let mut queue = self.queue.lock();
        queue.untried.push_front(open.clone());
        self.changed.notify_one();
        let deadline = Instant::now() + CLOSE_WAIT;
        while queue.all().any(|other| Arc::ptr_eq(other, &open))
            && !self.tried.wait_until(&mut queue, deadline)
        {}
    }

    /// Revokes keys until closed, and calls `revoked` after each.
    pub fn run(&self, revoked: impl Fn()) {
        let mut queue = self.queue.lock();
        while !queue.is_closed {
            let Some((open, is_retry)) = queue.begin(Instant::now()) else {
                match queue.retries.front().map(|(at, _)| *at) {
                    Some(at) => _ = self.changed.wait_until(&mut queue, at),
                    None => self.changed.wait(&mut queue),
                }
                continue;
            };
            drop(queue);
            let result = open.revoke_within(TRY);
            queue = self.queue.lock();
            queue.current = None;
            self.tried.notify_all();
            match result {
                Ok(()) => {
                    drop(queue);
                    revoked();
                    queue = self.queue.lock();
                }
                Err(error) => {
                    if !is_retry {
                        tracing::warn!(%error, "a key is revoked later");
                    }
                    queue.retries.push_back((Instant::now() + RETRY, open));
                }
            }
        }
    }

    /// The files whose accesses may run by keys of a domain that are to be revoked. Those that same-host clients map are left out if
    /// `is_overdue`.
    pub fn files_with_keys(&self, domain: &Arc<Domain>, is_overdue: bool) -> HashSet<FileId> {
        // First: a key that another thread leaves to the queue is there before its revocation is not under way any more.
        let mut files: HashSet<_> = self.under_way.lock().keys().copied().collect();
        let counts = |open: &&Arc<Open>| open.is_of(domain) && !(is_overdue && open.is_mappable());
        files.extend(self.queue.lock().all().filter(counts).map(|open| open.id));
        files
    }

    /// Ends [`Revoker::run`].
    pub fn close(&self) {
        self.queue.lock().is_closed = true;
        self.changed.notify_all();
    }

    /// Revokes the keys that are left, once the device is closed: no peer accesses anything any more. An access that the disk does
    /// not end in time was not acknowledged.
    pub fn revoke_rest(&self) {
        let queue = std::mem::take(&mut *self.queue.lock());
        let deadline = Instant::now() + END_WAIT;
        let left = queue
            .all()
            .filter(|open| open.revoke_within(deadline.saturating_duration_since(Instant::now())).is_err());
        match left.count() {
            0 => {}
            count => tracing::warn!(count, "the server ends before accesses to files that wait for a disk"),
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

#[cfg(test)]
mod tests {
    use std::sync::RwLock;

    use terrace_memory::{Pager, Waker};
    use terrace_nic::PathChoice;

    use super::*;
    use crate::client::tests::{connect, start};
    use crate::proto::OpenAccess;

    #[test]
    fn a_slow_disk_delays_the_close_of_its_own_client_alone() {
        let (_directory, server, client, file) = start(PathChoice::Local);
        let state = &server.state;
        file.write_at(0, &[1; 4096]).unwrap();
        let connection = state.connections().pop().unwrap();
        let (&number, open) = connection.opens.lock().iter().next().map(|(n, o)| (n, o.clone())).unwrap();
        let disk = Arc::new(RwLock::new(()));
        let occupied = disk.write().unwrap();
        server.occupy_disk(&disk);
        std::thread::scope(|scope| {
            scope.spawn(|| file.commit());
            while open.region.wait_idle_until(Instant::now()) {
                std::thread::sleep(Duration::from_millis(1));
            }
            let slow = scope.spawn(|| {
                connection.opens.lock().remove(&number);
                state.release(&connection, number, open.clone());
            });
            let other = connect(&server, PathChoice::Local);
            let found = other.lookup_path("file".as_ref()).unwrap();
            let mut times: Vec<_> = (0..9)
                .map(|_| {
                    let file = other.open(found.id, OpenAccess::READ | OpenAccess::WRITE).unwrap();
                    let begun = Instant::now();
                    file.close().unwrap();
                    begun.elapsed()
                })
                .collect();
            times.sort();
            assert!(times[4] < CLOSE_WAIT / 2, "{times:?}");
            slow.join().unwrap();
            let has_key = || state.revoker.files_with_keys(&connection.domain, false).contains(&open.id);
            assert!(has_key(), "the commit has not ended");
            drop(occupied);
            while has_key() {
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        drop(client);
    }

    #[test]
    fn a_server_ends_while_a_disk_does_not_answer() {
        let (_directory, server, _client, file) = start(PathChoice::Local);
        file.write_at(0, &[1; 4096]).unwrap();
        let connection = server.state.connections().pop().unwrap();
        let region = connection.opens.lock().values().next().unwrap().region.clone();
        let disk = Arc::new(RwLock::new(()));
        let occupied = disk.write().unwrap();
        server.occupy_disk(&disk);
        let waker: Waker = Arc::new(|| ());
        let flush = region.flush(region.translation().range(), &waker).unwrap();
        drop(server);
        assert!(!region.wait_idle_until(Instant::now()), "the disk has not answered");
        drop((occupied, flush));
    }

    #[test]
    fn a_change_of_rights_ends_a_key_while_it_waits_for_the_accesses_by_another() {
        let (_directory, server, client, file) = start(PathChoice::Local);
        let state = &server.state;
        file.write_at(0, &[1; 4096]).unwrap();
        let other = connect(&server, PathChoice::Local);
        let id = client.lookup_path("file".as_ref()).unwrap().id;
        let opens_of_all = || {
            let connections = state.connections();
            let opens = connections.iter().flat_map(|connection| state.opens_of(connection, id));
            opens.collect::<Vec<_>>()
        };
        let busy = opens_of_all().pop().unwrap();
        other.lookup_path("file".as_ref()).unwrap();
        let _idle_file = other.open(id, OpenAccess::READ | OpenAccess::WRITE).unwrap();
        let idle = opens_of_all().into_iter().find(|open| !Arc::ptr_eq(open, &busy)).unwrap();
        let disk = Arc::new(RwLock::new(()));
        let occupied = disk.write().unwrap();
        server.occupy_disk(&disk);
        std::thread::scope(|scope| {
            scope.spawn(|| file.commit());
            while busy.region.wait_idle_until(Instant::now()) {
                std::thread::sleep(Duration::from_millis(1));
            }
            let (mut occupied, mut ended) = (Some(occupied), Vec::new());
            state.revoke(vec![(busy, "busy"), (idle, "idle")], |key| {
                ended.push(key);
                drop(occupied.take());
            });
            assert_eq!(ended, ["idle", "busy"]);
        });
    }
}
