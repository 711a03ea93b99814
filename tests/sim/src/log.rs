//! Logs: a region of each node at whose end all connections append records.
//!
//! A record has a head of its number and its length, and random bytes behind it. So the log tells which records are in it,
//! and where.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use terrace_nic::{Error, ManualClock, Mr, MrRequest, Pd};

use crate::memory::{LOCAL_WRITE, REMOTE_WRITE};
use crate::paging::{Pagers, PagingPlan, TestPager};
use crate::rng::{SimRng, Stream, stream_seed};

/// Bytes of a record's head.
pub(crate) const HEAD_BYTES: usize = 12;
/// Words of the region. Records are not a part of its memory.
const WORDS: usize = 512;

/// A record that a program has posted.
struct Record {
    /// The end of the connection that appended it.
    end: usize,
    bytes: Vec<u8>,
    /// The offset that the peer has returned.
    offset: Option<u64>,
}

pub(crate) struct Log {
    pub pagers: Arc<Pagers>,
    pager: Arc<TestPager>,
    mr: Arc<Mr>,
    /// The records of this epoch, and those of earlier ones that are in the log.
    records: BTreeMap<u64, Record>,
    /// The end of the last record that was acknowledged.
    acknowledged_end: u64,
    is_used: bool,
}

impl Log {
    pub fn new(
        pd: &Arc<Pd>,
        clock: &Arc<ManualClock>,
        seed: u64,
        node: u8,
        perfect: bool,
    ) -> Result<Log, Error> {
        let seed = stream_seed(seed, Stream::Log(node));
        let mut rng = SimRng::from_seed(seed);
        let plan = PagingPlan {
            slots: if perfect { usize::MAX } else { rng.pick(&[1, 4, usize::MAX]) },
            access_ns_max: rng.spread(1..=200_000),
            churn: 0.0,
            faulting: 0.0,
            present: 1.0,
        };
        let pagers = Arc::new(Pagers::new(plan, clock, seed, node));
        let cells: Arc<[AtomicU64]> = (0..WORDS).map(|_| AtomicU64::new(0)).collect();
        let (addr, length) = (cells.as_ptr() as u64, WORDS as u64 * 8);
        let (pager, paging) = pagers.add(cells);
        let access = LOCAL_WRITE | REMOTE_WRITE;
        let mr = pd.reg_mr(MrRequest { addr, length, iova: 0, access, paging: Some(paging) })?;
        Ok(Log { pagers, pager, mr, records: BTreeMap::new(), acknowledged_end: 0, is_used: false })
    }

    pub fn rkey(&self) -> u32 {
        self.mr.rkey()
    }

    /// Notes that a request is posted. Returns where its record at least begins.
    pub fn begin(&mut self) -> u64 {
        self.is_used = true;
        self.acknowledged_end
    }

    /// Whether a request was ever posted for it.
    pub fn is_used(&self) -> bool {
        self.is_used
    }

    /// Notes that an end has posted a record.
    pub fn note_posted(&mut self, end: usize, number: u64, bytes: Vec<u8>) {
        self.records.insert(number, Record { end, bytes, offset: None });
    }

    /// Notes that a record was acknowledged.
    pub fn note_acknowledged(&mut self, number: u64, offset: u64) {
        let Some(record) = self.records.get_mut(&number) else { return };
        record.offset = Some(offset);
        self.acknowledged_end = self.acknowledged_end.max(offset + record.bytes.len() as u64);
    }

    /// Checks that the log has whole records without gaps, each once, those of an end in the order of its requests; all that
    /// were acknowledged, at their offsets; and no others but of ends that have failed. Returns the number of records.
    pub fn check(&mut self, has_failed: impl Fn(usize) -> bool) -> Result<u64, String> {
        let log = self.pager.records();
        let mut found: BTreeMap<u64, u64> = BTreeMap::new();
        let mut last: BTreeMap<usize, u64> = BTreeMap::new();
        let mut at = 0;
        while at < log.len() {
            let number = log.get(at..at + 8).and_then(|bytes| bytes.try_into().ok()).map(u64::from_le_bytes);
            let record = number.and_then(|number| Some((number, self.records.get(&number)?)));
            let Some((number, record)) = record else {
                return Err(format!("no record begins at byte {at} of the log"));
            };
            if log.get(at..at + record.bytes.len()) != Some(&record.bytes[..]) {
                return Err(format!("record {number} at byte {at} of the log is torn"));
            }
            if found.insert(number, at as u64).is_some() {
                return Err(format!("record {number} is twice in the log"));
            }
            if last.insert(record.end, number).is_some_and(|earlier| earlier > number) {
                return Err(format!("record {number} of end {} lies behind a later one", record.end));
            }
            at += record.bytes.len();
        }
        for (number, record) in &self.records {
            match (record.offset, found.get(number)) {
                (Some(offset), there) if there != Some(&offset) => {
                    return Err(format!("record {number} was acknowledged at {offset}, but is at {there:?}"));
                }
                (None, _) if !has_failed(record.end) => {
                    return Err(format!("record {number} of end {} was never acknowledged", record.end));
                }
                _ => {}
            }
        }
        // What has not been executed by now never is.
        self.records.retain(|number, record| {
            record.offset = found.get(number).copied();
            record.offset.is_some()
        });
        Ok(found.len() as u64)
    }

    pub fn close(&self) -> Result<(), Error> {
        self.mr.dereg()
    }
}

/// A record with a head.
pub(crate) fn record(number: u64, mut bytes: Vec<u8>) -> Vec<u8> {
    let len = bytes.len() as u32;
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    bytes[8..HEAD_BYTES].copy_from_slice(&len.to_le_bytes());
    bytes
}
