//! The process's limit of a file's length, which is the whole process's: the only test of its program.

#[expect(dead_code, reason = "other tests use the rest")]
mod common;

use std::io::ErrorKind;

use common::{DIRECTORIES, TestFile, append, read, region};
use rustix::process::{Resource, Rlimit, setrlimit};
use terrace_files::{Files, FilesConfig, LayoutError};
use terrace_memory::AccessError;

const LIMIT: u64 = 100_000;

/// Beyond the limit the system would end the process by SIGXFSZ.
#[test]
fn a_file_does_not_grow_beyond_the_limit() {
    let files = Files::new(&FilesConfig::default());
    let tested = DIRECTORIES.map(|directory| {
        let (file, longer) = (TestFile::new(directory, 0), TestFile::new(directory, 3 * LIMIT));
        let regions = [&file, &longer].map(|file| region(&files, &file.file));
        (directory, file, longer, regions)
    });
    setrlimit(Resource::Fsize, Rlimit { current: Some(LIMIT), maximum: None }).expect("a lower limit");
    for (directory, file, longer, [region, longer_region]) in tested {
        println!("{directory}");
        assert_eq!(append(&region, &[1; 90_000], false), Ok(0));
        assert_eq!(append(&region, &[2; 20_000], false), Err(AccessError::NoSpace));
        assert_eq!(append(&region, &[3; 10_000], true), Ok(90_000));
        assert_eq!(append(&region, &[4; 1], false), Err(AccessError::NoSpace));
        let beyond = [region.grow(LIMIT + 1), region.truncate(LIMIT + 1), longer_region.grow(3 * LIMIT + 1)];
        for changed in beyond {
            let Err(LayoutError::System(error)) = changed else { panic!("{changed:?}") };
            assert_eq!(error.kind(), ErrorKind::FileTooLarge);
        }
        assert_eq!(file.file.metadata().expect("a file").len(), LIMIT);
        assert_eq!(read(&region, 89_999, 2), Ok(vec![1, 3]));
        // A longer file may become shorter.
        longer_region.truncate(2 * LIMIT).expect("truncated");
        assert_eq!(longer.file.metadata().expect("a file").len(), 2 * LIMIT);
    }
}
