//! An open file.

use std::ffi::OsStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use terrace_nic::WcStatus;
use terrace_sync::Mutex;

use super::buffers::RECORD_BYTES_MAX;
use super::config::text;
use super::data::{self, Access, Bytes, Failure, Span};
use super::interrupt::{self, uninterruptible};
use super::session::{Opening, Session};
use super::shared::Shared;
use crate::error::{AccessKind, ExportError, UNKNOWN_OPEN};
use crate::proto::{
    Answer, Attributes, CONTENT_BYTES_MAX, FileId, Link, LockKind, OpenAccess, Opened, Request, Text,
};

/// How often an access is repeated whose file changes meanwhile.
const REPEATS_MAX: usize = 8;
/// The pauses between attempts to lock a file.
const LOCK_PAUSE_MIN: Duration = Duration::from_millis(1);
const LOCK_PAUSE_MAX: Duration = Duration::from_millis(50);

/// An open file. It may be used by several threads. When it is dropped, the server closes it within some milliseconds.
#[derive(Clone)]
pub struct RemoteFile {
    pub(crate) file: Arc<OpenFile>,
}

/// What clones of a [`RemoteFile`] and accesses in flight share.
pub struct OpenFile {
    shared: Arc<Shared>,
    id: FileId,
    access: OpenAccess,
    /// The attributes when it was opened first.
    opened: Attributes,
    opening: Mutex<Opening>,
    /// The length in bytes as far as it is known.
    len: AtomicU64,
    /// The boot of the server's host ([`SetupAnswer::boot`](crate::proto::SetupAnswer)) in which the first write or append
    /// was acknowledged that is not committed yet; 0 if there is none.
    written: AtomicU64,
}

impl RemoteFile {
    /// Opens a file. The answer has its bytes, too, if they are no more than `content_max`.
    pub(super) fn open(
        shared: &Arc<Shared>,
        id: FileId,
        access: OpenAccess,
        content_max: u16,
    ) -> Result<(RemoteFile, Option<Vec<u8>>), ExportError> {
        let deadline = shared.deadline();
        let (file, content) = RemoteFile::request(shared, access, deadline, |session| {
            shared.call_on(session, Request::Open { id, access, content_max }, deadline)
        })?;
        // Without the lock that it relies on, the program may read nothing.
        Ok((file, content.filter(|_| !shared.has_lost_lock(id))))
    }

    pub(super) fn create(
        shared: &Arc<Shared>,
        parent: FileId,
        name: &OsStr,
        mode: u32,
        access: OpenAccess,
        exclusive: bool,
    ) -> Result<RemoteFile, ExportError> {
        let deadline = shared.deadline();
        let exclusive = exclusive.then(rand::random);
        let request = Request::Create { parent, name: text(name)?, mode, access, exclusive };
        let (made, _) = RemoteFile::request(shared, access, deadline, |session| {
            shared.call_on(session, request.clone(), deadline)
        })?;
        shared.learn(made.id(), parent, name);
        Ok(made)
    }

    fn request(
        shared: &Arc<Shared>,
        access: OpenAccess,
        deadline: Instant,
        open: impl Fn(&Arc<Session>) -> Result<Answer, ExportError>,
    ) -> Result<(RemoteFile, Option<Vec<u8>>), ExportError> {
        loop {
            let session = shared.session(deadline)?;
            let (opened, content) = match open(&session) {
                Ok(Answer::Opened { opened, content }) => (opened, content),
                Ok(_) => return Err(ExportError::Protocol),
                Err(ExportError::Lost) if Instant::now() < deadline => continue,
                Err(error) => return Err(error),
            };
            let Opened { open, key, attributes } = opened;
            let file = OpenFile {
                shared: shared.clone(),
                id: attributes.id,
                access,
                opened: attributes,
                opening: Mutex::new(Opening { session, open, rkey: key.rkey }),
                len: AtomicU64::new(key.len),
                written: AtomicU64::new(0),
            };
            return Ok((RemoteFile { file: Arc::new(file) }, content.map(|content| content.0)));
        }
    }

    /// The file.
    pub fn id(&self) -> FileId {
        self.file.id
    }

    /// What it was opened for.
    pub fn access(&self) -> OpenAccess {
        self.file.access
    }

    /// The length in bytes as far as this client knows it: from opening, from [`RemoteFile::attributes`], and from its own
    /// accesses.
    pub fn len(&self) -> u64 {
        self.file.len.load(Ordering::Relaxed)
    }

    /// Whether the file has no bytes, as far as this client knows.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The attributes when the file was opened, without asking the server.
    pub fn opened_attributes(&self) -> Attributes {
        self.file.opened
    }

    /// The attributes now, also if the file has no name any more.
    ///
    /// # Errors
    /// `Revoked`, `Lost`, and as for other calls of [`Client`](crate::Client).
    pub fn attributes(&self) -> Result<Attributes, ExportError> {
        self.file.change(|open| Request::GetOpenAttributes { open })
    }

    /// Reads bytes from an offset on; fewer if the file ends before. Returns how many.
    ///
    /// # Errors
    /// `NotOpenFor`; `Revoked`; `LockLost`; `Access`, if the server's disk fails; `Lost`.
    pub fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<usize, ExportError> {
        let file = &self.file;
        file.check(OpenAccess::READ)?;
        file.repeat(|opening, deadline| {
            let mut rest = self.len().saturating_sub(offset);
            if rest < into.len() as u64 {
                file.refresh(opening, deadline)?;
                rest = self.len().saturating_sub(offset);
            }
            let count = rest.min(into.len() as u64) as usize;
            data::access(opening, offset, Bytes::Into(&mut into[..count]), deadline)?;
            Ok(count)
        })
    }

    /// Writes bytes from an offset on. A file that ends before becomes longer first.
    ///
    /// # Errors
    /// As for [`RemoteFile::read_at`].
    pub fn write_at(&self, offset: u64, data: &[u8]) -> Result<(), ExportError> {
        self.write_extents(&[(offset, data)])
    }

    /// Writes extents that do not overlap, each an offset and its bytes, in any order and with several in flight. A file that ends
    /// before the last one becomes longer first.
    ///
    /// # Errors
    /// As for [`RemoteFile::read_at`]. Some extents may be written then.
    pub fn write_extents(&self, extents: &[(u64, &[u8])]) -> Result<(), ExportError> {
        let file = &self.file;
        file.check(OpenAccess::WRITE)?;
        let mut end = 0;
        for (offset, data) in extents.iter().filter(|(_, data)| !data.is_empty()) {
            let own_end = offset.checked_add(data.len() as u64);
            end = end.max(own_end.ok_or(ExportError::Invalid("beyond any file"))?);
        }
        if end == 0 {
            return Ok(());
        }
        file.repeat(|opening, deadline| {
            if end > self.len() {
                file.change_on(opening, Request::Grow { open: opening.open, len: end }, deadline)?;
            }
            let spans = extents.iter().map(|&(offset, data)| Span { offset, bytes: Bytes::From(data) });
            Access::begin_all(opening, spans.collect(), deadline)?.finish(deadline)?;
            file.note_written(opening);
            Ok(())
        })
    }

    /// Writes bytes as [`RemoteFile::write_at`] does; a few beyond the end of the file by one message. Returns whether the server
    /// has noted the time of the change, which one-sided writes do late.
    ///
    /// # Errors
    /// As for [`RemoteFile::write_at`].
    pub fn write_short(&self, offset: u64, data: &[u8]) -> Result<bool, ExportError> {
        let is_beyond = offset.saturating_add(data.len() as u64) > self.len();
        let by_message = is_beyond && !data.is_empty() && data.len() <= CONTENT_BYTES_MAX;
        match by_message {
            true => self.write_by_message(offset, data),
            false => self.write_at(offset, data),
        }?;
        Ok(by_message)
    }

    /// Writes up to 8 KiB by a message, beyond the end of the file too. The server's program takes part, and notes the time.
    ///
    /// # Errors
    /// As for [`RemoteFile::write_at`].
    pub fn write_by_message(&self, offset: u64, data: &[u8]) -> Result<(), ExportError> {
        let file = &self.file;
        file.check(OpenAccess::WRITE)?;
        if data.len() > CONTENT_BYTES_MAX || offset.checked_add(data.len() as u64).is_none() {
            return Err(ExportError::Invalid("more than 8 KiB, or beyond any file"));
        }
        file.repeat(|opening, deadline| {
            let request = Request::Write { open: opening.open, offset, data: Text::from(data) };
            file.change_on(opening, request, deadline)?;
            file.note_written(opening);
            Ok(())
        })
    }

    /// Appends a record of up to 1 MiB at the end of the file, as a whole and once, and returns its offset.
    ///
    /// # Errors
    /// As for [`RemoteFile::read_at`]; `Unanswered` if the record may be there or not: its acknowledgement was lost, or
    /// another append of this client failed before it was acknowledged.
    pub fn append(&self, record: &[u8]) -> Result<u64, ExportError> {
        self.append_with(record, false)
    }

    /// Appends a record. It and all before it in the file are persistent when the call returns.
    ///
    /// # Errors
    /// As for [`RemoteFile::append`].
    pub fn append_commit(&self, record: &[u8]) -> Result<u64, ExportError> {
        self.append_with(record, true)
    }

    fn append_with(&self, record: &[u8], commit: bool) -> Result<u64, ExportError> {
        let file = &self.file;
        if record.len() > RECORD_BYTES_MAX {
            return Err(ExportError::Invalid("a record longer than 1 MiB"));
        }
        if !file.access.changes() {
            return Err(ExportError::NotOpenFor);
        }
        let append = |opening: &Opening, deadline| data::append(opening, record, commit, deadline);
        let offset = match commit {
            true => {
                let (offset, lost) = file.commit_by(append)?;
                // It is the next commit's error: this record is there.
                file.note_uncommitted(lost);
                offset
            }
            false => file.repeat(|opening, deadline| {
                let offset = append(opening, deadline)?;
                file.note_written(opening);
                Ok(offset)
            })?,
        };
        file.len.fetch_max(offset + record.len() as u64, Ordering::Relaxed);
        Ok(offset)
    }

    /// Makes all acknowledged writes and appends of the file persistent.
    ///
    /// # Errors
    /// As for [`RemoteFile::read_at`]; `Rebooted`, once, if the server's host has restarted since a write or append by this
    /// opening that was not committed.
    pub fn commit(&self) -> Result<(), ExportError> {
        let file = &self.file;
        match file.commit_by(data::commit)? {
            ((), None) => Ok(()),
            ((), Some(_)) => Err(ExportError::Rebooted),
        }
    }

    /// The run of the server's host ([`Client::boot`](crate::Client::boot)) in which this opening has first written or appended
    /// what it has not committed; `None` if it has committed everything.
    pub fn uncommitted_boot(&self) -> Option<u64> {
        Some(self.file.written.load(Ordering::Relaxed)).filter(|&boot| boot != 0)
    }

    /// Makes the file this many bytes long.
    ///
    /// # Errors
    /// As for [`RemoteFile::attributes`]; `Os` with `EBADF` if it is not open for writing.
    pub fn truncate(&self, len: u64) -> Result<(), ExportError> {
        self.file.change(|open| Request::Truncate { open, len }).map(|_| ())
    }

    /// Makes the file at least this many bytes long. Records that are appended meanwhile stay.
    ///
    /// # Errors
    /// As for [`RemoteFile::truncate`].
    pub fn grow(&self, len: u64) -> Result<(), ExportError> {
        self.file.change(|open| Request::Grow { open, len }).map(|_| ())
    }

    /// Gives the blocks of a range back, which reads as zeros then.
    ///
    /// # Errors
    /// As for [`RemoteFile::truncate`].
    pub fn punch(&self, offset: u64, len: u64) -> Result<(), ExportError> {
        self.file.change(|open| Request::Punch { open, offset, len }).map(|_| ())
    }

    /// Locks the whole file for an owner that the caller chooses, as `flock(2)` does, or unlocks it. The lock is the
    /// client's, not this opening's: it lasts until it is unlocked, or the server does not hear of the client for the time
    /// of a lease. Local programs of the server's host see it.
    ///
    /// # Errors
    /// `Os` with `EWOULDBLOCK` if it cannot be had within the time; zero tries once.
    pub fn lock(&self, owner: u64, kind: LockKind, timeout: Duration) -> Result<(), ExportError> {
        let would_block = Errno::WOULDBLOCK.raw_os_error();
        let deadline = Instant::now() + timeout;
        let mut pause = LOCK_PAUSE_MIN;
        loop {
            match self.file.shared.lock(self.file.id, owner, kind) {
                Err(ExportError::Os(errno)) if errno == would_block && Instant::now() + pause < deadline => {
                    interrupt::sleep(pause)?;
                    pause = (pause * 2).min(LOCK_PAUSE_MAX);
                }
                result => return result,
            }
        }
    }

    /// Closes the file, and waits until its key is revoked, if this is the last clone.
    ///
    /// # Errors
    /// As for [`RemoteFile::attributes`]; if the server did not permit one more request in time, it closes the file later.
    pub fn close(self) -> Result<(), ExportError> {
        let Some(file) = Arc::into_inner(self.file) else { return Ok(()) };
        let opening = file.opening.lock().clone();
        let deadline = file.shared.deadline();
        let session = &opening.session;
        let sent = session.send(Request::Close { open: opening.open }, deadline);
        let closed = sent.and_then(|sent| {
            // Dropping it would close it again.
            file.opening.lock().open = 0;
            session.wait_answer(sent, deadline)
        });
        match closed {
            Ok(_) => Ok(()),
            // The server has closed it with the connection.
            Err(ExportError::Lost) if session.is_lost() => Ok(()),
            Err(error) => Err(error),
        }
    }
}

impl OpenFile {
    fn check(&self, needed: OpenAccess) -> Result<(), ExportError> {
        if self.access.contains(needed) { Ok(()) } else { Err(ExportError::NotOpenFor) }
    }

    /// The opening on the current session. Opens the file again if the session is another one.
    ///
    /// # Errors
    /// `Os` if it may not be opened any more, or is gone; `LockLost`; `Lost`.
    pub fn current(&self, deadline: Instant) -> Result<Opening, ExportError> {
        let opening = self.opening.lock().clone();
        // No other session begins before this one is lost.
        let opening = if opening.session.is_lost() { self.reopen(deadline)? } else { opening };
        if self.shared.has_lost_lock(self.id) {
            return Err(ExportError::LockLost);
        }
        Ok(opening)
    }

    /// Opens the file on the current session, unless another call has.
    fn reopen(&self, deadline: Instant) -> Result<Opening, ExportError> {
        let session = self.shared.session(deadline)?;
        let mut opening = self.opening.lock();
        if opening.session.serial != session.serial {
            let access = self.access & !OpenAccess::TRUNCATE;
            let request = Request::Open { id: self.id, access, content_max: 0 };
            // Another call on this thread would wait for the lock.
            match uninterruptible(|| self.shared.call_on(&session, request, deadline))? {
                Answer::Opened { opened: Opened { open, key, .. }, .. } => {
                    self.len.store(key.len, Ordering::Relaxed);
                    *opening = Opening { session, open, rkey: key.rkey };
                }
                _ => return Err(ExportError::Protocol),
            }
        }
        Ok(opening.clone())
    }

    /// Makes an access, and repeats it when the connection was lost or the file changed meanwhile.
    fn repeat<T>(
        &self,
        mut access: impl FnMut(&Opening, Instant) -> Result<T, Failure>,
    ) -> Result<T, ExportError> {
        let deadline = self.shared.deadline();
        let mut repeats = 0;
        loop {
            let opening = match self.current(deadline) {
                Err(ExportError::Lost) if Instant::now() < deadline => continue,
                opening => opening?,
            };
            let (kind, generation, status) = match access(&opening, deadline) {
                Ok(result) => return Ok(result),
                Err(Failure::Error(ExportError::Lost)) if Instant::now() < deadline => {
                    opening.session.lose("an access was not answered");
                    continue;
                }
                Err(Failure::Error(ExportError::Unanswered)) => {
                    // Its queue pair would flush the appends behind it.
                    opening.session.lose("an append was not answered");
                    return Err(ExportError::Unanswered);
                }
                Err(Failure::Error(error)) => return Err(error),
                Err(Failure::Refused { kind, generation, status }) => (kind, generation, status),
            };
            let recovered = self.recover(&opening, kind.link(), generation, deadline);
            if kind == AccessKind::Append && status == WcStatus::Flushed {
                // The one before it may have lost only its acknowledgement, and this one, too.
                return Err(ExportError::Unanswered);
            }
            match recovered {
                Err(ExportError::Lost) if Instant::now() < deadline => continue,
                recovered => recovered?,
            }
            repeats += 1;
            let may_be_repeated = matches!(status, WcStatus::RemoteAccess | WcStatus::Flushed);
            if !may_be_repeated || repeats > REPEATS_MAX {
                return Err(ExportError::Access(kind, status));
            }
        }
    }

    /// Remembers that a write or an append was acknowledged.
    pub(super) fn note_written(&self, opening: &Opening) {
        let boot = opening.session.settings.boot;
        // An earlier one counts.
        let _ = self.written.compare_exchange(0, boot, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Notes a boot whose writes are not committed.
    fn note_uncommitted(&self, boot: Option<u64>) {
        if let Some(boot) = boot {
            self.written.store(boot, Ordering::Relaxed);
        }
    }

    /// Makes an access that commits. Returns also the boot whose writes may be lost, if the server's host has restarted since.
    fn commit_by<T>(
        &self,
        mut access: impl FnMut(&Opening, Instant) -> Result<T, Failure>,
    ) -> Result<(T, Option<u64>), ExportError> {
        // What is acknowledged from here on is the next commit's.
        let written = Some(self.written.swap(0, Ordering::Relaxed)).filter(|&boot| boot != 0);
        let result = self.repeat(|opening, deadline| {
            let done = access(opening, deadline)?;
            Ok((done, written.filter(|&boot| boot != opening.session.settings.boot)))
        });
        if result.is_err() {
            self.note_uncommitted(written);
        }
        result
    }

    /// After an access was refused: replaces the queue pair, and learns whether the key is still valid and how long the
    /// file is.
    ///
    /// # Errors
    /// `Revoked`; `Lost`; `Nic`.
    pub(super) fn recover(
        &self,
        opening: &Opening,
        link: Link,
        generation: u64,
        deadline: Instant,
    ) -> Result<(), ExportError> {
        opening.session.repair(link, generation, deadline)?;
        self.refresh(opening, deadline).map(|_| ())
    }

    /// Asks for the length.
    fn refresh(&self, opening: &Opening, deadline: Instant) -> Result<Attributes, ExportError> {
        self.change_on(opening, Request::GetOpenAttributes { open: opening.open }, deadline)
    }

    /// Sends a request about the open file whose answer has its attributes.
    fn change_on(
        &self,
        opening: &Opening,
        request: Request,
        deadline: Instant,
    ) -> Result<Attributes, ExportError> {
        match opening.session.call(request, deadline)? {
            Answer::Attributes { attributes } => {
                self.len.store(attributes.len, Ordering::Relaxed);
                Ok(attributes)
            }
            // The connection is the one that opened it.
            Answer::Failed { errno: UNKNOWN_OPEN } => Err(ExportError::Revoked),
            Answer::Failed { errno } => Err(ExportError::Os(errno.into())),
            _ => Err(ExportError::Protocol),
        }
    }

    fn change(&self, request: impl Fn(u64) -> Request) -> Result<Attributes, ExportError> {
        self.repeat(|opening, deadline| Ok(self.change_on(opening, request(opening.open), deadline)?))
    }
}

impl Drop for OpenFile {
    fn drop(&mut self) {
        let opening = self.opening.lock();
        if opening.open != 0 && !opening.session.is_lost() {
            self.shared.cast(&opening.session, Request::Close { open: opening.open });
        }
    }
}

#[cfg(test)]
mod tests {
    use terrace_nic::PathChoice;

    use super::*;
    use crate::client::tests::start;

    #[test]
    fn a_commit_says_once_that_the_host_has_restarted_since_a_write() {
        let (_directory, _server, _client, file) = start(PathChoice::Local);
        file.write_at(0, b"bytes").unwrap();
        assert!(file.commit().is_ok());
        file.write_at(0, b"lost?").unwrap();
        let boot = file.file.written.swap(1, Ordering::Relaxed);
        assert!(boot > 1);
        assert_eq!(file.append_commit(b"record").unwrap(), 5);
        assert!(matches!(file.commit(), Err(ExportError::Rebooted)));
        assert!(file.commit().is_ok());
    }
}
