//! Locks of files: `fcntl` and `flock`, among the programs of this mount and between mounts.
//!
//! The server locks whole files. So a mount holds a lock of the file at the server while any program of it holds a lock of any
//! part: shared if all of those are shared, else exclusive. Programs of one mount share the file by ranges, those of two
//! mounts as a whole.
//!
//! A program that waits for a lock has its request kept here, and a thread tries it again. The kernel cannot interrupt a request
//! of this kind, so the thread looks for signals that are pending for the program.

use std::ops::Range;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;
use std::{fs, io};

use fuser::{Errno, ReplyEmpty};
use terrace_export::LockKind;
use terrace_sync::{Condvar, Mutex};

use crate::attributes::errno;
use crate::files::OpenFile;
use crate::remote::{Remote, RemoteOpen};

/// How often a lock that a program waits for is tried.
const RETRY: Duration = Duration::from_millis(10);

/// What a program asks for. `LockKind::Unlock` unlocks a range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LockRequest {
    /// The kernel's number for the program, or for the open file if it is `flock` or a lock of an open file description.
    pub(crate) owner: u64,
    /// The open file by which it is asked for.
    pub(crate) handle: u64,
    /// The bytes, the last one included in the kernel's terms.
    pub(crate) range: Range<u64>,
    pub(crate) kind: LockKind,
    /// The thread that asks.
    pub(crate) pid: u32,
}

/// The locks that programs of this mount hold of one file.
#[derive(Default)]
pub(crate) struct FileLocks {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Those of one owner do not overlap. Their kind is shared or exclusive.
    held: Vec<LockRequest>,
    /// What the server holds for the mount.
    server: Option<LockKind>,
}

fn overlaps(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}

fn excludes(a: LockKind, b: LockKind) -> bool {
    a == LockKind::Exclusive || b == LockKind::Exclusive
}

impl FileLocks {
    /// A lock of another owner that stands in the way.
    pub(crate) fn conflict(&self, request: &LockRequest) -> Option<LockRequest> {
        self.state.lock().conflict(request).cloned()
    }

    /// Locks or unlocks. `lock_at_server` changes the mount's lock of the file. Unlocking takes effect among the programs of
    /// this mount also if the server does not do it.
    ///
    /// # Errors
    /// `EAGAIN` if another owner or mount stands in the way; those of `lock_at_server`.
    pub(crate) fn set(
        &self,
        request: &LockRequest,
        lock_at_server: impl Fn(LockKind) -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        let mut state = self.state.lock();
        if request.kind != LockKind::Unlock && state.conflict(request).is_some() {
            return Err(Errno::EAGAIN);
        }
        let held = state.replaced(request);
        let result = state.change_server(needed(&held), &lock_at_server);
        // The kernel forgets a lock that it unlocks, whatever the answer is: nobody would unlock it again.
        if result.is_ok() || request.kind == LockKind::Unlock {
            state.held = held;
        }
        result
    }

    /// Whether a program of this mount holds a lock, which the server may have lost.
    pub(crate) fn is_any_held(&self) -> bool {
        !self.state.lock().held.is_empty()
    }

    /// Whether an owner holds a lock.
    pub(crate) fn is_held_by(&self, owner: u64) -> bool {
        self.state.lock().held.iter().any(|held| held.owner == owner)
    }

    /// The owners that hold locks which they have by an open file.
    pub(crate) fn owners_by(&self, handle: u64) -> Vec<u64> {
        let state = self.state.lock();
        state.held.iter().filter(|held| held.handle == handle).map(|held| held.owner).collect()
    }
}

/// The server's lock that covers these.
fn needed(held: &[LockRequest]) -> Option<LockKind> {
    held.iter().map(|lock| lock.kind).max_by_key(|&kind| kind == LockKind::Exclusive)
}

impl State {
    fn conflict(&self, request: &LockRequest) -> Option<&LockRequest> {
        self.held.iter().find(|held| {
            held.owner != request.owner
                && overlaps(&held.range, &request.range)
                && excludes(held.kind, request.kind)
        })
    }

    /// The locks after a request: it replaces its owner's locks of the range.
    fn replaced(&self, request: &LockRequest) -> Vec<LockRequest> {
        let mut held = Vec::with_capacity(self.held.len() + 2);
        for lock in &self.held {
            if lock.owner != request.owner || !overlaps(&lock.range, &request.range) {
                held.push(lock.clone());
                continue;
            }
            let rests = [lock.range.start..request.range.start, request.range.end..lock.range.end];
            held.extend(
                rests
                    .into_iter()
                    .filter(|rest| rest.start < rest.end)
                    .map(|range| LockRequest { range, ..lock.clone() }),
            );
        }
        if request.kind != LockKind::Unlock {
            held.push(request.clone());
        }
        held
    }

    /// Changes the server's lock. A shared lock that cannot become exclusive may be lost meanwhile, as `flock(2)` has it, so
    /// it is taken again.
    fn change_server(
        &mut self,
        needed: Option<LockKind>,
        lock_at_server: &impl Fn(LockKind) -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        if needed == self.server {
            return Ok(());
        }
        let Some(kind) = needed else {
            self.server = None;
            return lock_at_server(LockKind::Unlock);
        };
        let result = lock_at_server(kind);
        match (&result, self.server) {
            (Ok(()), _) => self.server = Some(kind),
            (Err(_), Some(before)) => {
                // If that fails, the client fails the accesses of the file until it is unlocked.
                let _ = lock_at_server(before);
            }
            (Err(_), None) => {}
        }
        result
    }
}

/// Programs that wait for locks, and the thread that tries for them.
pub(crate) struct LockWaiters<R: Remote> {
    shared: Arc<Shared<R>>,
    thread: Option<JoinHandle<()>>,
}

struct Shared<R: Remote> {
    queue: Mutex<Queue<R>>,
    changed: Condvar,
}

struct Queue<R: Remote> {
    waiters: Vec<Waiter<R>>,
    has_ended: bool,
}

struct Waiter<R: Remote> {
    file: Arc<OpenFile<R>>,
    request: LockRequest,
    reply: ReplyEmpty,
}

/// Locks or unlocks a part of an open file. With a lock, what was read of the file before is old: the holder of the lock before may
/// have written it.
///
/// # Errors
/// As for [`FileLocks::set`].
pub(crate) fn set_lock<R: Remote>(file: &OpenFile<R>, request: &LockRequest) -> Result<(), Errno> {
    file.inode.locks.set(request, |kind| {
        file.remote.lock(file.inode.ino, kind, Duration::ZERO).map_err(|error| errno(&error))
    })?;
    if request.kind != LockKind::Unlock {
        file.inode.note_change();
    }
    Ok(())
}

impl<R: Remote> LockWaiters<R> {
    /// Starts the thread.
    ///
    /// # Errors
    /// If the system has no more threads.
    pub(crate) fn start() -> io::Result<LockWaiters<R>> {
        let queue = Queue { waiters: Vec::new(), has_ended: false };
        let shared = Arc::new(Shared { queue: Mutex::new(queue), changed: Condvar::default() });
        let thread = {
            let shared = shared.clone();
            thread::Builder::new().name("mount-locks".into()).spawn(move || shared.run())?
        };
        Ok(LockWaiters { shared, thread: Some(thread) })
    }

    /// Keeps a request until its lock can be had.
    pub(crate) fn wait(&self, file: Arc<OpenFile<R>>, request: LockRequest, reply: ReplyEmpty) {
        self.shared.queue.lock().waiters.push(Waiter { file, request, reply });
        self.shared.changed.notify_all();
    }
}

impl<R: Remote> Drop for LockWaiters<R> {
    fn drop(&mut self) {
        self.shared.queue.lock().has_ended = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // A panic of it has been printed.
            let _ = thread.join();
        }
    }
}

impl<R: Remote> Shared<R> {
    fn run(&self) {
        let mut queue = self.queue.lock();
        while !queue.has_ended {
            if queue.waiters.is_empty() {
                self.changed.wait(&mut queue);
                continue;
            }
            let waiters = std::mem::take(&mut queue.waiters);
            drop(queue);
            let waiting: Vec<_> = waiters.into_iter().filter_map(Waiter::attempt).collect();
            queue = self.queue.lock();
            queue.waiters.extend(waiting);
            self.changed.wait_for(&mut queue, RETRY);
        }
    }
}

impl<R: Remote> Waiter<R> {
    /// Tries for the lock. Returns the waiter if it goes on waiting.
    fn attempt(self) -> Option<Waiter<R>> {
        match set_lock(&self.file, &self.request) {
            Ok(()) => self.reply.ok(),
            Err(errno) if errno.code() != Errno::EAGAIN.code() => self.reply.error(errno),
            Err(_) if has_signal(self.request.pid) => self.reply.error(Errno::EINTR),
            Err(_) => return Some(self),
        }
        None
    }
}

/// Whether a thread has a pending signal that it does not block, or is gone.
fn has_signal(pid: u32) -> bool {
    let Ok(status) = fs::read_to_string(format!("/proc/{pid}/status")) else {
        return true;
    };
    let mask = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
    };
    (mask("SigPnd:") | mask("ShdPnd:")) & !mask("SigBlk:") != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(owner: u64, range: Range<u64>, kind: LockKind) -> LockRequest {
        LockRequest { owner, handle: 1, range, kind, pid: 1 }
    }

    /// Sets a lock, and returns what the server was asked for.
    fn set(locks: &FileLocks, request: &LockRequest) -> (Result<(), i32>, Vec<LockKind>) {
        let asked = Mutex::new(Vec::new());
        let result = locks.set(request, |kind| {
            asked.lock().push(kind);
            Ok(())
        });
        (result.map_err(|errno| errno.code()), asked.into_inner())
    }

    #[test]
    fn owners_share_a_file_by_ranges_and_the_server_locks_it_as_a_whole() {
        use LockKind::{Exclusive, Shared, Unlock};
        let locks = FileLocks::default();
        assert_eq!(set(&locks, &request(1, 0..10, Shared)), (Ok(()), vec![Shared]));
        assert_eq!(set(&locks, &request(2, 5..20, Shared)), (Ok(()), vec![]));
        assert_eq!(set(&locks, &request(2, 5..20, Exclusive)).0, Err(Errno::EAGAIN.code()));
        assert_eq!(set(&locks, &request(2, 10..20, Exclusive)), (Ok(()), vec![Exclusive]));
        assert_eq!(locks.conflict(&request(1, 0..30, Shared)).map(|held| held.owner), Some(2));
        assert_eq!(set(&locks, &request(2, 0..u64::MAX, Unlock)), (Ok(()), vec![Shared]));
        assert_eq!(set(&locks, &request(1, 3..5, Unlock)), (Ok(()), vec![]));
        assert_eq!(locks.state.lock().held.len(), 2);
        assert!(locks.is_any_held() && locks.is_held_by(1) && !locks.is_held_by(2));
        assert_eq!(set(&locks, &request(1, 0..10, Unlock)), (Ok(()), vec![Unlock]));
        assert!(!locks.is_any_held());
    }

    #[test]
    fn a_lock_that_the_server_refuses_leaves_the_one_before() {
        let locks = FileLocks::default();
        assert!(set(&locks, &request(1, 0..10, LockKind::Shared)).0.is_ok());
        let refusing = |kind| if kind == LockKind::Exclusive { Err(Errno::EAGAIN) } else { Ok(()) };
        assert!(locks.set(&request(1, 0..10, LockKind::Exclusive), refusing).is_err());
        assert_eq!(locks.state.lock().server, Some(LockKind::Shared));
        assert_eq!(locks.state.lock().held, [request(1, 0..10, LockKind::Shared)]);
    }

    #[test]
    fn what_is_unlocked_is_not_held_though_the_server_fails() {
        let locks = FileLocks::default();
        assert!(set(&locks, &request(1, 0..10, LockKind::Exclusive)).0.is_ok());
        assert!(locks.set(&request(1, 0..10, LockKind::Unlock), |_| Err(Errno::EIO)).is_err());
        assert!(!locks.is_held_by(1));
        assert_eq!(set(&locks, &request(2, 0..10, LockKind::Shared)), (Ok(()), vec![LockKind::Shared]));
    }

    #[test]
    fn a_thread_that_is_gone_does_not_wait() {
        assert!(has_signal(u32::MAX));
        assert!(!has_signal(std::process::id()));
    }
}
