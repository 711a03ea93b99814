//! The process's limit of a file's length, which is the whole process's: the only test of its program.

#[expect(dead_code, reason = "other tests use the rest")]
mod common;

use std::io::ErrorKind;

use common::{TestFile, append, read, region};
use rustix::process::{Resource, Rlimit, setrlimit};
use terrace_files::{Files, FilesConfig, LayoutError};
use terrace_memory::AccessError;

const LIMIT: u64 = 100_000;

/// Beyond the limit the system would end the process by SIGXFSZ.
#[test]
fn a_file_does_not_grow_beyond_the_limit() {
    let files = Files::new(&FilesConfig::default());
    let (file, longer) = (TestFile::new("/var/tmp", 0), TestFile::new("/var/tmp", 3 * LIMIT));
    let (region, longer_region) = (region(&files, &file.file), region(&files, &longer.file));
    setrlimit(Resource::Fsize, Rlimit { current: Some(LIMIT), maximum: None }).expect("a lower limit");
    assert_eq!(append(&region, &[1; 90_000], false), Ok(0));
    assert_eq!(append(&region, &[2; 20_000], false), Err(AccessError::NoSpace));
    assert_eq!(append(&region, &[3; 10_000], true), Ok(90_000));
    assert_eq!(append(&region, &[4; 1], false), Err(AccessError::NoSpace));
    for changed in [region.grow(LIMIT + 1), region.truncate(LIMIT + 1), longer_region.grow(3 * LIMIT + 1)] {
        let Err(LayoutError::System(error)) = changed else { panic!("{changed:?}") };
        assert_eq!(error.kind(), ErrorKind::FileTooLarge);
    }
    assert_eq!(file.file.metadata().expect("a file").len(), LIMIT);
    assert_eq!(read(&region, 89_999, 2), Ok(vec![1, 3]));
    // A longer file may become shorter.
    longer_region.truncate(2 * LIMIT).expect("truncated");
    assert_eq!(longer.file.metadata().expect("a file").len(), 2 * LIMIT);
}
