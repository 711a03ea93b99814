//! Seqlock records in every interleaving that loom finds: a record is read whole or not at all, and a version names one
//! content.
//!
//! `src/record.rs` is compiled here once more with loom's atomics. The record is shorter than those of a registry.
//!
//! Mutations that this has found: without `fence(Release)` in `write`; without `fence(Acquire)` in `read`, or its
//! second look at the version; a relaxed last store in `write`; a relaxed first load in `read`.

mod loom_common;
#[path = "../src/record.rs"]
#[allow(dead_code, reason = "the model uses not all of it")]
mod record;
#[path = "loom_common/sync.rs"]
#[allow(dead_code, unused_imports, reason = "the model uses not all of it")]
mod sync;

use loom::sync::Arc;
use loom::thread;
use loom_common::model;
use record::{Version, read, version, write};
use sync::AtomicU64;

type Record = Arc<[AtomicU64; 3]>;

fn content(value: u64) -> record::Content {
    [value; 7]
}

/// Reads the record; the n-th version has the content n twice.
fn check(record: &Record) -> Option<Version> {
    let (version, [one, other, ..]) = read(&record[..])?;
    assert_eq!((one, other), (version.0 / 2, version.0 / 2), "half a record, or another one's");
    Some(version)
}

#[test]
fn a_record_is_read_whole_or_not_at_all() {
    model(5, || {
        let record: Record = Arc::new(std::array::from_fn(|_| AtomicU64::new(0)));
        let writer = {
            let record = record.clone();
            thread::spawn(move || {
                write(&record[..], &content(1));
                write(&record[..], &content(2));
            })
        };
        let first = check(&record);
        let second = check(&record);
        if let (Some(first), Some(second)) = (first, second) {
            assert!(first.0 <= second.0, "an older version after a newer one");
        }
        writer.join().unwrap();
        assert_eq!(check(&record), Some(Version(4)));
    });
}

#[test]
fn a_record_that_was_read_and_has_its_version_still_is_the_same() {
    model(5, || {
        let record: Record = Arc::new(std::array::from_fn(|_| AtomicU64::new(0)));
        write(&record[..], &content(1));
        let writer = {
            let record = record.clone();
            thread::spawn(move || write(&record[..], &content(2)))
        };
        if let Some(seen) = check(&record)
            && version(&record[..]) == seen
        {
            assert!(check(&record).is_none_or(|again| again.0 >= seen.0));
        }
        writer.join().unwrap();
        assert_ne!(version(&record[..]), Version(2), "a changed record has its old version");
    });
}
