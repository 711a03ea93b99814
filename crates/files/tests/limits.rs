//! The process's limit of a file's length, which is the whole process's: the only test of its program.

#[expect(dead_code, reason = "other tests use the rest")]
mod common;

use common::{TestFile, append, read, region};
use rustix::process::{Resource, Rlimit, setrlimit};
use terrace_files::{Files, FilesConfig};
use terrace_memory::AccessError;

const LIMIT: u64 = 100_000;

/// Beyond the limit the system would end the process by SIGXFSZ.
#[test]
fn a_record_beyond_the_limit_is_refused_and_leaves_nothing() {
    let files = Files::new(&FilesConfig::default());
    let file = TestFile::new("/var/tmp", 0);
    let region = region(&files, &file.file);
    setrlimit(Resource::Fsize, Rlimit { current: Some(LIMIT), maximum: None }).expect("a lower limit");
    assert_eq!(append(&region, &[1; 90_000], false), Ok(0));
    assert_eq!(append(&region, &[2; 20_000], false), Err(AccessError::NoSpace));
    assert_eq!(append(&region, &[3; 10_000], true), Ok(90_000));
    assert_eq!(append(&region, &[4; 1], false), Err(AccessError::NoSpace));
    assert_eq!(file.file.metadata().expect("a file").len(), LIMIT);
    assert_eq!(read(&region, 89_999, 2), Ok(vec![1, 3]));
}
