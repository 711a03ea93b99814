//! The process's limit of descriptors, which is the whole process's: the only test of its program.

#[expect(dead_code, reason = "other tests use the rest")]
mod common;

use common::{TestFile, region};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use terrace_files::{Files, FilesConfig, LayoutError};

#[test]
fn a_change_of_a_file_that_gets_no_descriptor_says_why() {
    let files = Files::new(&FilesConfig { descriptors_max: 1, ..FilesConfig::default() });
    let tested = [(); 3].map(|()| TestFile::new("/var/tmp", 4096));
    let regions = tested.each_ref().map(|file| region(&files, &file.file));
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(0), ..limit }).expect("a lower limit");
    let changed = regions.map(|region| region.truncate(10));
    // On a system that parks no files, each keeps its descriptor.
    for error in changed.into_iter().filter_map(Result::err) {
        let LayoutError::System(error) = error else { panic!("{error:?}") };
        assert_eq!(Errno::from_io_error(&error), Some(Errno::MFILE));
    }
}
