//! Several appends in flight.

use std::time::Duration;

use terrace_export::{
    Completed, Completion, ExportError, Pipeline, RemoteFile, ReplicaAppended, ReplicaAppender,
};

use crate::format::LogId;
use crate::{LogError, Position};

/// The end of an append.
#[derive(Debug)]
pub struct Appended {
    /// The tag that the append was given.
    pub tag: u64,
    /// The record's position.
    pub result: Result<Position, LogError>,
}

/// Appends records for one thread: several are in flight, and take their places in the order in which they were begun. `A` is the way to
/// the log's file: [`RemoteAppends`], or [`ReplicaAppender`] for a log on several exports.
pub struct Appender<A = RemoteAppends> {
    appends: A,
    id: LogId,
    data_bytes_max: usize,
    record: Vec<u8>,
}

impl<A: Appends> Appender<A> {
    pub(crate) fn new(appends: A, id: LogId, data_bytes_max: usize) -> Appender<A> {
        Appender { appends, id, data_bytes_max, record: Vec::new() }
    }

    /// Begins to append a record; with `commit` it and all before it are persistent when it ends.
    ///
    /// # Errors
    /// `TooLong`; `Export` or `Replica` with `Full` while the maximum is in flight; others of the file.
    pub fn append(&mut self, data: &[u8], commit: bool, tag: u64) -> Result<(), LogError> {
        if data.len() > self.data_bytes_max {
            return Err(LogError::TooLong);
        }
        self.record.clear();
        self.id.emit_record(data, &mut self.record);
        self.appends.begin(&self.record, commit, tag)
    }

    /// Appends in flight.
    pub fn in_flight(&self) -> usize {
        self.appends.in_flight()
    }

    /// Appends what has ended to `ended`, and waits up to `timeout` for the first. Returns how many.
    pub fn wait(&mut self, ended: &mut Vec<Appended>, timeout: Duration) -> usize {
        self.appends.wait(ended, timeout)
    }
}

/// Appends in flight to a file.
pub trait Appends {
    /// Begins to append a record.
    ///
    /// # Errors
    /// Those of the file.
    fn begin(&mut self, record: &[u8], commit: bool, tag: u64) -> Result<(), LogError>;

    /// How many there are.
    fn in_flight(&self) -> usize;

    /// Appends what has ended to `ended`, and waits up to `timeout` for the first. Returns how many.
    fn wait(&mut self, ended: &mut Vec<Appended>, timeout: Duration) -> usize;
}

/// Appends in flight to a file of one export.
pub struct RemoteAppends {
    file: RemoteFile,
    pipeline: Pipeline,
    done: Vec<Completion>,
}

impl RemoteAppends {
    pub(crate) fn new(file: RemoteFile, pipeline: Pipeline) -> RemoteAppends {
        RemoteAppends { file, pipeline, done: Vec::new() }
    }
}

impl Appends for RemoteAppends {
    fn begin(&mut self, record: &[u8], commit: bool, tag: u64) -> Result<(), LogError> {
        Ok(self.pipeline.append(&self.file, record, commit, tag)?)
    }

    fn in_flight(&self) -> usize {
        self.pipeline.in_flight()
    }

    fn wait(&mut self, ended: &mut Vec<Appended>, timeout: Duration) -> usize {
        self.pipeline.wait(&mut self.done, timeout);
        let count = self.done.len();
        ended.extend(self.done.drain(..).map(|completion| Appended {
            tag: completion.tag,
            result: match completion.result {
                Ok(Completed::Appended(offset)) => Ok(Position(offset)),
                Ok(_) => Err(ExportError::Protocol.into()),
                Err(error) => Err(error.into()),
            },
        }));
        count
    }
}

impl Appends for ReplicaAppender<'_> {
    fn begin(&mut self, record: &[u8], commit: bool, tag: u64) -> Result<(), LogError> {
        Ok(self.append(record, commit, tag)?)
    }

    fn in_flight(&self) -> usize {
        ReplicaAppender::in_flight(self)
    }

    fn wait(&mut self, ended: &mut Vec<Appended>, timeout: Duration) -> usize {
        let mut appended = Vec::new();
        let count = ReplicaAppender::wait(self, &mut appended, timeout);
        ended.extend(appended.into_iter().map(|ReplicaAppended { tag, result }| Appended {
            tag,
            result: result.map(Position).map_err(LogError::from),
        }));
        count
    }
}
