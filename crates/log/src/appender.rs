//! Several appends in flight.

use std::time::Duration;

use terrace_export::{Completed, Completion, ExportError, Pipeline, RemoteFile};

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

/// Appends records for one thread: several are in flight, and take their places in the order in which they were begun.
pub struct Appender {
    file: RemoteFile,
    id: LogId,
    pipeline: Pipeline,
    data_bytes_max: usize,
    record: Vec<u8>,
    done: Vec<Completion>,
}

impl Appender {
    pub(crate) fn new(file: RemoteFile, id: LogId, pipeline: Pipeline, data_bytes_max: usize) -> Appender {
        Appender { file, id, pipeline, data_bytes_max, record: Vec::new(), done: Vec::new() }
    }

    /// Begins to append a record; with `commit` it and all before it are persistent when it ends.
    ///
    /// # Errors
    /// `TooLong`; `Export` with `Full` while the maximum is in flight; others of the export.
    pub fn append(&mut self, data: &[u8], commit: bool, tag: u64) -> Result<(), LogError> {
        if data.len() > self.data_bytes_max {
            return Err(LogError::TooLong);
        }
        self.record.clear();
        self.id.emit_record(data, &mut self.record);
        Ok(self.pipeline.append(&self.file, &self.record, commit, tag)?)
    }

    /// Appends in flight.
    pub fn in_flight(&self) -> usize {
        self.pipeline.in_flight()
    }

    /// Appends what has ended to `ended`, and waits up to `timeout` for the first. Returns how many.
    pub fn wait(&mut self, ended: &mut Vec<Appended>, timeout: Duration) -> usize {
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
