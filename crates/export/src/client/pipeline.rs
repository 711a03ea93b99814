//! Many accesses in flight.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use terrace_nic::{SendOp, WcStatus};

use super::buffers::RECORD_BYTES_MAX;
use super::data::Bytes;
use super::file::RemoteFile;
use super::session::{DEPTH, Opening, Session};
use super::shared::Shared;
use super::slots::Slots;
use crate::error::{AccessKind, ExportError};
use crate::proto::{Link, OpenAccess};

/// After an access that needed packets, one in so many is tried without them.
const TRY_EVERY: u32 = 64;

/// What an access has done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Completed {
    /// The bytes that were read, fewer than wanted if the file ends before.
    Read(Vec<u8>),
    /// The bytes were written.
    Written,
    /// The record was appended at this offset.
    Appended(u64),
}

/// The completion of an access.
#[derive(Debug)]
pub struct Completion {
    /// The tag of the access.
    pub tag: u64,
    /// What it has done, or why not.
    pub result: Result<Completed, ExportError>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Read,
    Write,
    Append { commit: bool },
}

/// An access in flight.
struct InFlight {
    tag: u64,
    number: u64,
    slot: usize,
    len: usize,
    kind: Kind,
    /// Where it begins in the file; 0 for a record.
    offset: u64,
    file: RemoteFile,
    opening: Opening,
    /// The generation of the queue pair.
    generation: u64,
}

/// A queue of accesses, for one thread: up to a number are in flight, and each completes with its tag.
///
/// Accesses to the same bytes must not overlap in time. The pipeline's memory belongs to one connection: after the
/// connection was lost, accesses in flight are repeated one by one, as the calls of [`RemoteFile`] are.
pub struct Pipeline {
    shared: Arc<Shared>,
    access_bytes: usize,
    depth: usize,
    /// The memory, and the serial number of its session.
    memory: Option<(u64, Slots)>,
    free: Vec<usize>,
    in_flight: VecDeque<InFlight>,
    ended: Vec<Completion>,
    /// Accesses in a row that were not made at once.
    posted: u32,
}

impl Pipeline {
    pub(super) fn new(
        shared: &Arc<Shared>,
        depth: usize,
        access_bytes: usize,
    ) -> Result<Pipeline, ExportError> {
        if !(1..=DEPTH as usize).contains(&depth) || !(1..=RECORD_BYTES_MAX).contains(&access_bytes) {
            return Err(ExportError::Invalid("a pipeline has 1 to 512 accesses of up to 1 MiB"));
        }
        let mut pipeline = Pipeline {
            shared: shared.clone(),
            access_bytes,
            depth,
            memory: None,
            free: (0..depth).rev().collect(),
            in_flight: VecDeque::new(),
            ended: Vec::new(),
            posted: 0,
        };
        let session = shared.session(shared.deadline())?;
        pipeline.use_session(&session)?;
        Ok(pipeline)
    }

    /// Registers the memory on a session.
    fn use_session(&mut self, session: &Session) -> Result<(), ExportError> {
        if self.memory.as_ref().is_some_and(|(serial, _)| *serial == session.serial) {
            return Ok(());
        }
        // Accesses of the old session use the old memory.
        self.repeat_all();
        let slots = Slots::new(session.domain(), self.depth, self.access_bytes)?;
        self.memory = Some((session.serial, slots));
        Ok(())
    }

    fn slots(&self) -> Result<&Slots, ExportError> {
        self.memory.as_ref().map(|(_, slots)| slots).ok_or(ExportError::Lost)
    }

    /// Begins to read up to `len` bytes from an offset on.
    ///
    /// # Errors
    /// `Full`; `Invalid` for more bytes than an access may have; `NotOpenFor`; `Lost`.
    pub fn read(&mut self, file: &RemoteFile, offset: u64, len: usize, tag: u64) -> Result<(), ExportError> {
        self.check(file, len, OpenAccess::READ)?;
        if file.len().saturating_sub(offset) < len as u64 {
            file.attributes()?;
        }
        let len = file.len().saturating_sub(offset).min(len as u64) as usize;
        if len == 0 {
            self.ended.push(Completion { tag, result: Ok(Completed::Read(Vec::new())) });
            return Ok(());
        }
        self.begin(file, Kind::Read, offset, len, None, tag)
    }

    /// Begins to write bytes from an offset on, within the file: [`RemoteFile::grow`] makes it long enough before.
    ///
    /// # Errors
    /// As for [`Pipeline::read`].
    pub fn write(
        &mut self,
        file: &RemoteFile,
        offset: u64,
        data: &[u8],
        tag: u64,
    ) -> Result<(), ExportError> {
        self.check(file, data.len(), OpenAccess::WRITE)?;
        self.begin(file, Kind::Write, offset, data.len(), Some(data), tag)
    }

    /// Begins to append a record; with `commit` it is persistent when it completes. It completes with `Unanswered` if the
    /// record may be in the file or not, as do those behind an append that has failed.
    ///
    /// # Errors
    /// As for [`Pipeline::read`].
    pub fn append(
        &mut self,
        file: &RemoteFile,
        record: &[u8],
        commit: bool,
        tag: u64,
    ) -> Result<(), ExportError> {
        if !file.access().changes() {
            return Err(ExportError::NotOpenFor);
        }
        self.check(file, record.len(), OpenAccess::empty())?;
        self.begin(file, Kind::Append { commit }, 0, record.len(), Some(record), tag)
    }

    fn check(&self, file: &RemoteFile, len: usize, needed: OpenAccess) -> Result<(), ExportError> {
        if len > self.access_bytes {
            return Err(ExportError::Invalid("more bytes than an access of this pipeline may have"));
        }
        if !file.access().contains(needed) {
            return Err(ExportError::NotOpenFor);
        }
        if self.in_flight() < self.depth { Ok(()) } else { Err(ExportError::Full) }
    }

    fn begin(
        &mut self,
        file: &RemoteFile,
        kind: Kind,
        offset: u64,
        len: usize,
        data: Option<&[u8]>,
        tag: u64,
    ) -> Result<(), ExportError> {
        let opening = file.file.current(self.shared.deadline())?;
        self.use_session(&opening.session)?;
        if let Some(result) = self.make_now(file, &opening, kind, offset, len, data)? {
            self.ended.push(Completion { tag, result: Ok(result) });
            return Ok(());
        }
        let slot = self.free.pop().ok_or(ExportError::Full)?;
        let begun = self.post(&opening, kind, offset, slot, len, data);
        match begun {
            Ok((number, generation)) => {
                let file = file.clone();
                self.in_flight.push_back(InFlight {
                    tag,
                    number,
                    slot,
                    len,
                    kind,
                    offset,
                    file,
                    opening,
                    generation,
                });
                Ok(())
            }
            Err(error) => {
                self.free.push(slot);
                Err(error)
            }
        }
    }

    /// Copies from or to a mapping of a same-host server's file, if no access that needs packets is in flight. Where that is never so,
    /// it is tried now and then.
    fn make_now(
        &mut self,
        file: &RemoteFile,
        opening: &Opening,
        kind: Kind,
        offset: u64,
        len: usize,
        data: Option<&[u8]>,
    ) -> Result<Option<Completed>, ExportError> {
        let is_tried = self.posted.is_multiple_of(TRY_EVERY);
        self.posted = self.posted.wrapping_add(1);
        if !is_tried {
            return Ok(None);
        }
        let mut read = Vec::new();
        let (mut bytes, is_read) = match (kind, data) {
            (Kind::Read, _) => {
                read.resize(len, 0);
                (Bytes::Into(&mut read), true)
            }
            (Kind::Write, Some(data)) => (Bytes::From(data), false),
            _ => return Ok(None),
        };
        let (qp, _) = opening.session.pair(Link::Data)?;
        // A queue pair that another thread has destroyed meanwhile is found by the work request.
        if !bytes.access_now(&qp, opening.rkey, offset, 0..len).unwrap_or(false) {
            return Ok(None);
        }
        self.posted = 0;
        if is_read {
            return Ok(Some(Completed::Read(read)));
        }
        file.file.note_written(opening);
        Ok(Some(Completed::Written))
    }

    /// Posts an access. Returns its number, and the generation of its queue pair.
    fn post(
        &self,
        opening: &Opening,
        kind: Kind,
        offset: u64,
        slot: usize,
        len: usize,
        data: Option<&[u8]>,
    ) -> Result<(u64, u64), ExportError> {
        let slots = self.slots()?;
        if let Some(data) = data {
            slots.write(slot, data)?;
        }
        let (rkey, bytes) = (opening.rkey, slots.sge(slot, len));
        let session = &opening.session;
        let link = if matches!(kind, Kind::Append { .. }) { Link::Append } else { Link::Data };
        let (_, generation) = session.pair(link)?;
        let number = match kind {
            Kind::Read => session.begin(link, SendOp::Read { va: offset, rkey }, &[bytes]),
            Kind::Write => session.begin(link, SendOp::Write { va: offset, rkey }, &[bytes]),
            Kind::Append { commit } => {
                session.begin(link, SendOp::Append { rkey, commit }, &[bytes, slots.offset_sge(slot)])
            }
        };
        Ok((number?, generation))
    }

    /// The number of accesses whose completions were not taken yet.
    pub fn in_flight(&self) -> usize {
        self.in_flight.len() + self.ended.len()
    }

    /// Takes the completions that are there. Only an access that failed is waited for, because it is repeated.
    pub fn poll(&mut self, done: &mut Vec<Completion>) -> usize {
        if let Some(first) = self.in_flight.front() {
            first.opening.session.progress();
        }
        let before = done.len();
        let mut index = 0;
        while index < self.in_flight.len() {
            let access = &self.in_flight[index];
            let status = access.opening.session.take_status(access.number);
            let is_lost = access.opening.session.is_lost();
            match status {
                None if !is_lost => index += 1,
                status => {
                    if let Some(access) = self.in_flight.remove(index) {
                        self.end(access, status);
                    }
                }
            }
        }
        done.append(&mut self.ended);
        done.len() - before
    }

    /// Waits until there is a completion, or for so long. Returns how many there are.
    pub fn wait(&mut self, done: &mut Vec<Completion>, timeout: Duration) -> usize {
        let deadline = Instant::now() + timeout;
        loop {
            let count = self.poll(done);
            let Some(first) = self.in_flight.front().filter(|_| count == 0) else { return count };
            if Instant::now() >= deadline {
                return 0;
            }
            let (session, number) = (first.opening.session.clone(), first.number);
            if session.wait_ended(number, deadline).is_err() {
                return self.poll(done);
            }
        }
    }

    fn end(&mut self, access: InFlight, status: Option<WcStatus>) {
        let result = match status {
            Some(WcStatus::Success) => self.result(&access),
            status => self.repeat(&access, status),
        };
        self.free.push(access.slot);
        self.ended.push(Completion { tag: access.tag, result });
    }

    fn result(&self, access: &InFlight) -> Result<Completed, ExportError> {
        if matches!(access.kind, Kind::Write | Kind::Append { commit: false }) {
            access.file.file.note_written(&access.opening);
        }
        Ok(match access.kind {
            Kind::Read => Completed::Read(self.slots()?.read(access.slot, access.len)?),
            Kind::Write => Completed::Written,
            Kind::Append { .. } => Completed::Appended(self.slots()?.offset(access.slot)?),
        })
    }

    /// Repeats an access that has failed, as far as it may be repeated.
    fn repeat(&self, access: &InFlight, status: Option<WcStatus>) -> Result<Completed, ExportError> {
        let data = || Ok::<_, ExportError>(self.slots()?.read(access.slot, access.len)?);
        match access.kind {
            Kind::Read => {
                let mut bytes = vec![0; access.len];
                let count = access.file.read_at(access.offset, &mut bytes)?;
                bytes.truncate(count);
                Ok(Completed::Read(bytes))
            }
            Kind::Write => {
                access.file.write_at(access.offset, &data()?)?;
                Ok(Completed::Written)
            }
            Kind::Append { commit } => match status {
                Some(status) if !access.opening.session.is_lost() => {
                    recover_append(access, status, self.shared.deadline());
                    match status {
                        // The server has refused it, so it is not in the file.
                        WcStatus::RemoteAccess => {
                            let record = data()?;
                            let append = if commit { RemoteFile::append_commit } else { RemoteFile::append };
                            append(&access.file, &record).map(Completed::Appended)
                        }
                        WcStatus::RemoteOperation => Err(ExportError::Access(AccessKind::Append, status)),
                        _ => Err(ExportError::Unanswered),
                    }
                }
                Some(status @ WcStatus::RemoteOperation) => {
                    Err(ExportError::Access(AccessKind::Append, status))
                }
                _ => Err(ExportError::Unanswered),
            },
        }
    }

    /// Ends all accesses in flight by repeating them: their session is lost.
    fn repeat_all(&mut self) {
        while let Some(access) = self.in_flight.pop_front() {
            let status = access.opening.session.take_status(access.number);
            self.end(access, status);
        }
    }
}

/// Replaces the queue pair of an append that has failed, which would flush the appends behind it.
fn recover_append(access: &InFlight, status: WcStatus, deadline: Instant) {
    let opening = &access.opening;
    match status {
        WcStatus::RetryExceeded | WcStatus::RnrRetryExceeded => {
            opening.session.lose("an append was not answered");
        }
        // What it fails by is the next append's error.
        _ => drop(access.file.file.recover(opening, Link::Append, access.generation, deadline)),
    }
}
