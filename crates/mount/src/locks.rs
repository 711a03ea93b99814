//! Locks of files: `fcntl` and `flock`, among the programs of this mount and between mounts.
//!
//! The server locks whole files. So a mount holds a lock of the file at the server while any program of it holds a lock of any
//! part: shared if all of those are shared, else exclusive. Programs of one mount share the file by ranges, those of two
//! mounts as a whole.
//!
//! A program that waits for a lock has its request kept here, and a thread tries it again. The kernel cannot interrupt a request
//! of this kind, so the thread looks for signals that are pending for the thread that waits.

use std::cell::Cell;
use std::ops::Range;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;
use std::{fs, io};

use fuser::Errno;
use terrace_export::{ExportError, LockKind};
use terrace_sync::{Condvar, Mutex};

use crate::attributes::errno;
use crate::files::OpenFile;
use crate::remote::{Remote, RemoteOpen};
use crate::turns;

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
    /// The process that asks, which `F_GETLK` shows to others.
    pub(crate) pid: u32,
}

/// The locks that programs of this mount hold of one file.
#[derive(Default)]
pub(crate) struct FileLocks {
    /// Those of one owner do not overlap. Their kind is shared or exclusive. They change only while `server` is locked.
    held: Mutex<Vec<LockRequest>>,
    /// What the server holds for the mount. This is locked while the server is asked, and `held` is not.
    server: Mutex<Option<LockKind>>,
}

fn overlaps(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}

fn excludes(a: LockKind, b: LockKind) -> bool {
    a == LockKind::Exclusive || b == LockKind::Exclusive
}

/// The lock of another owner or mount stands in the way.
const CONFLICT: ExportError = ExportError::Os(rustix::io::Errno::AGAIN.raw_os_error());

fn is_conflict(error: &ExportError) -> bool {
    error.errno() == CONFLICT.errno()
}

impl FileLocks {
    /// A lock of another owner that stands in the way.
    pub(crate) fn conflict(&self, request: &LockRequest) -> Option<LockRequest> {
        conflict(&self.held.lock(), request).cloned()
    }

    /// Locks or unlocks. `lock_at_server` changes the mount's lock of the file. Unlocking takes effect among the programs of
    /// this mount also if the server does not do it.
    ///
    /// # Errors
    /// `EAGAIN` if another owner or mount stands in the way; those of `lock_at_server`.
    pub(crate) fn set(
        &self,
        request: &LockRequest,
        lock_at_server: impl Fn(LockKind) -> Result<(), ExportError>,
    ) -> Result<(), ExportError> {
        let mut server = self.server.try_lock().unwrap_or_else(|| {
            // Another thread asks the server.
            turns::pass();
            self.server.lock()
        });
        let held = self.held.lock();
        if request.kind != LockKind::Unlock && conflict(&held, request).is_some() {
            return Err(CONFLICT);
        }
        let replaced = replaced(&held, request);
        drop(held);
        let result = change_server(&mut server, needed(&replaced), &lock_at_server);
        // The kernel forgets a lock that it unlocks, whatever the answer is: nobody would unlock it again.
        if result.is_ok() || request.kind == LockKind::Unlock {
            *self.held.lock() = replaced;
        }
        result
    }

    /// Whether a program of this mount holds a lock, which the server may have lost.
    pub(crate) fn is_any_held(&self) -> bool {
        !self.held.lock().is_empty()
    }

    /// Whether an owner holds a lock.
    pub(crate) fn is_held_by(&self, owner: u64) -> bool {
        self.held.lock().iter().any(|held| held.owner == owner)
    }

    /// The owners that hold locks which they have by an open file.
    pub(crate) fn owners_by(&self, handle: u64) -> Vec<u64> {
        self.held.lock().iter().filter(|held| held.handle == handle).map(|held| held.owner).collect()
    }
}

/// The server's lock that covers these.
fn needed(held: &[LockRequest]) -> Option<LockKind> {
    held.iter().map(|lock| lock.kind).max_by_key(|&kind| kind == LockKind::Exclusive)
}

fn conflict<'a>(held: &'a [LockRequest], request: &LockRequest) -> Option<&'a LockRequest> {
    held.iter().find(|held| {
        held.owner != request.owner
            && overlaps(&held.range, &request.range)
            && excludes(held.kind, request.kind)
    })
}

/// The locks after a request: it replaces its owner's locks of the range.
fn replaced(held: &[LockRequest], request: &LockRequest) -> Vec<LockRequest> {
    let mut replaced = Vec::with_capacity(held.len() + 2);
    for lock in held {
        if lock.owner != request.owner || !overlaps(&lock.range, &request.range) {
            replaced.push(lock.clone());
            continue;
        }
        let rests = [lock.range.start..request.range.start, request.range.end..lock.range.end];
        replaced.extend(
            rests
                .into_iter()
                .filter(|rest| rest.start < rest.end)
                .map(|range| LockRequest { range, ..lock.clone() }),
        );
    }
    if request.kind != LockKind::Unlock {
        replaced.push(request.clone());
    }
    replaced
}

/// Changes the server's lock. A shared lock that cannot become exclusive may be lost meanwhile, as `flock(2)` has it, so it is
/// taken again; the client does that after a lost connection.
fn change_server(
    server: &mut Option<LockKind>,
    needed: Option<LockKind>,
    lock_at_server: &impl Fn(LockKind) -> Result<(), ExportError>,
) -> Result<(), ExportError> {
    if needed == *server {
        return Ok(());
    }
    let Some(kind) = needed else {
        *server = None;
        return lock_at_server(LockKind::Unlock);
    };
    let result = lock_at_server(kind);
    match (&result, *server) {
        (Ok(()), _) => *server = Some(kind),
        (Err(ExportError::Lost), _) | (Err(_), None) => {}
        (Err(_), Some(before)) => {
            // If that fails, the client fails the accesses of the file until it is unlocked.
            let _ = lock_at_server(before);
        }
    }
    result
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
    /// The thread that waits, in the process name space of this process; 0 if it is in another one.
    thread: u32,
    answer: Box<dyn FnOnce(Result<(), Errno>) + Send>,
}

/// Locks or unlocks a part of an open file. With a lock, what was read of the file before is old: the holder of the lock before may
/// have written it.
///
/// # Errors
/// As for [`FileLocks::set`].
pub(crate) fn set_lock<R: Remote>(file: &OpenFile<R>, request: &LockRequest) -> Result<(), ExportError> {
    set_lock_with(file, request, &Cell::new(false))
}

/// The same. The server is not asked if it is silent, which this notes.
fn set_lock_with<R: Remote>(
    file: &OpenFile<R>,
    request: &LockRequest,
    is_silent: &Cell<bool>,
) -> Result<(), ExportError> {
    file.inode.locks.set(request, |kind| {
        if is_silent.get() {
            return Err(ExportError::Lost);
        }
        let result = file.remote.lock(file.inode.ino, kind, Duration::ZERO);
        is_silent.set(matches!(result, Err(ExportError::Lost)));
        result
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

    /// Locks a part of an open file for a thread, as soon as the lock can be had, and passes the result on.
    pub(crate) fn lock(
        &self,
        file: Arc<OpenFile<R>>,
        request: LockRequest,
        thread: u32,
        answer: impl FnOnce(Result<(), Errno>) + Send + 'static,
    ) {
        match set_lock(&file, &request) {
            Err(error) if is_conflict(&error) => {
                self.wait(Waiter { file, request, thread, answer: Box::new(answer) })
            }
            result => answer(result.map_err(|error| errno(&error))),
        }
    }

    fn wait(&self, waiter: Waiter<R>) {
        self.shared.queue.lock().waiters.push(waiter);
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
            let waiting = attempt(waiters);
            queue = self.queue.lock();
            queue.waiters.extend(waiting);
            self.changed.wait_for(&mut queue, RETRY);
        }
    }
}

/// Tries for the locks. Returns the waiters that go on waiting. A server that does not answer is asked once.
fn attempt<R: Remote>(waiters: Vec<Waiter<R>>) -> Vec<Waiter<R>> {
    let is_silent = Cell::new(false);
    waiters.into_iter().filter_map(|waiter| waiter.attempt(&is_silent)).collect()
}

impl<R: Remote> Waiter<R> {
    /// Tries for the lock. Returns the waiter if it goes on waiting.
    fn attempt(self, is_silent: &Cell<bool>) -> Option<Waiter<R>> {
        match set_lock_with(&self.file, &self.request, is_silent) {
            Err(error) if is_conflict(&error) => match has_signal(self.thread) {
                true => (self.answer)(Err(Errno::EINTR)),
                false => return Some(self),
            },
            result => (self.answer)(result.map_err(|error| errno(&error))),
        }
        None
    }
}

/// Whether a thread has a pending signal that it does not block. `false` if this process may not know: the kernel would not
/// interrupt the program's call then, and fail it with an error that is none of a program's.
fn has_signal(thread: u32) -> bool {
    let Ok(status) = fs::read_to_string(format!("/proc/{thread}/status")) else {
        return false;
    };
    let mask = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
    };
    (mask("SigPnd:") | mask("ShdPnd:")) & !mask("SigBlk:") != 0
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;
    use std::sync::mpsc;

    use rustix::fs::OFlags;

    use super::*;
    use crate::fake::{mount, open};

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
        (result.map_err(|error| error.errno()), asked.into_inner())
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
        assert_eq!(locks.held.lock().len(), 2);
        assert!(locks.is_any_held() && locks.is_held_by(1) && !locks.is_held_by(2));
        assert_eq!(set(&locks, &request(1, 0..10, Unlock)), (Ok(()), vec![Unlock]));
        assert!(!locks.is_any_held());
    }

    #[test]
    fn a_lock_that_the_server_refuses_leaves_the_one_before() {
        let locks = FileLocks::default();
        assert!(set(&locks, &request(1, 0..10, LockKind::Shared)).0.is_ok());
        let refusing = |kind| if kind == LockKind::Exclusive { Err(CONFLICT) } else { Ok(()) };
        assert!(locks.set(&request(1, 0..10, LockKind::Exclusive), refusing).is_err());
        assert_eq!(*locks.server.lock(), Some(LockKind::Shared));
        assert_eq!(*locks.held.lock(), [request(1, 0..10, LockKind::Shared)]);
    }

    #[test]
    fn what_is_unlocked_is_not_held_though_the_server_fails() {
        let locks = FileLocks::default();
        assert!(set(&locks, &request(1, 0..10, LockKind::Exclusive)).0.is_ok());
        assert!(locks.set(&request(1, 0..10, LockKind::Unlock), |_| Err(ExportError::Lost)).is_err());
        assert!(!locks.is_held_by(1));
        assert_eq!(set(&locks, &request(2, 0..10, LockKind::Shared)), (Ok(()), vec![LockKind::Shared]));
    }

    #[test]
    fn a_thread_of_which_nothing_is_known_has_no_signal() {
        for thread in [0, u32::MAX, std::process::id()] {
            assert!(!has_signal(thread), "{thread}");
        }
    }

    #[test]
    fn a_silent_server_is_asked_once_for_all_that_wait() {
        let (mount, server, ino) = mount();
        let handle = open(&mount, ino, OFlags::empty());
        let file = mount.file(handle).map_err(Errno::code).unwrap();
        assert!(set_lock(&file, &request(1, 0..10, LockKind::Shared)).is_ok());
        let (answer, answers) = mpsc::channel();
        let waiter = |owner, range| {
            let answer = answer.clone();
            let request = request(owner, range, LockKind::Exclusive);
            let answer = Box::new(move |result: Result<(), Errno>| {
                _ = answer.send((owner, result.map_err(Errno::code)))
            });
            Waiter { file: file.clone(), request, thread: 0, answer }
        };
        server.is_silent.store(true, Ordering::Relaxed);
        let waiting = attempt(vec![waiter(2, 10..20), waiter(3, 20..30), waiter(4, 0..1)]);
        assert_eq!(server.unanswered.load(Ordering::Relaxed), 1);
        let owners: Vec<u64> = waiting.iter().map(|waiter| waiter.request.owner).collect();
        assert_eq!(owners, [4], "it waits for a program of this mount");
        let lost = Err(Errno::EIO.code());
        assert_eq!(answers.try_iter().collect::<Vec<_>>(), [(2, lost), (3, lost)]);
    }

    #[test]
    fn what_is_held_is_known_while_the_server_is_asked() {
        let locks = Arc::new(FileLocks::default());
        assert!(set(&locks, &request(1, 0..10, LockKind::Shared)).0.is_ok());
        let (asked, is_asked) = mpsc::channel();
        let (end, ended) = mpsc::channel::<()>();
        let asking = {
            let locks = locks.clone();
            thread::spawn(move || {
                let result = locks.set(&request(2, 10..20, LockKind::Exclusive), |_| {
                    asked.send(()).unwrap();
                    let _ = ended.recv();
                    Ok(())
                });
                assert!(result.is_ok());
            })
        };
        is_asked.recv().unwrap();
        let (found, is_found) = mpsc::channel();
        let other = locks.clone();
        thread::spawn(move || found.send((other.is_held_by(1), other.is_held_by(2), other.owners_by(1))));
        assert_eq!(is_found.recv_timeout(Duration::from_secs(10)), Ok((true, false, vec![1])));
        drop(end);
        asking.join().unwrap();
        assert!(locks.is_held_by(2));
    }
}
