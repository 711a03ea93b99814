//! What is known of a directory that this mount has just made: it has no names but those that programs here have made since,
//! and perhaps others of other clients, which may be seen late. So a program that fills a directory asks the server once for
//! each file, not twice.

use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::time::{Duration, Instant};

/// Most names that are remembered.
const NAMES_MAX: usize = 4096;
/// Most bytes of a name that a directory of any file system may lack: longer ones may be an error.
const NAME_BYTES_MAX: usize = 255;

/// The names in a new directory.
#[derive(Debug)]
pub(crate) struct NewDirectory {
    /// It was made after this time.
    since: Instant,
    /// The names that it may have.
    names: HashSet<OsString>,
}

impl NewDirectory {
    /// An empty directory.
    pub(crate) fn new(since: Instant) -> NewDirectory {
        NewDirectory { since, names: HashSet::new() }
    }

    /// Adds a name. False if there are too many.
    pub(crate) fn add(&mut self, name: &OsStr) -> bool {
        self.names.insert(name.into());
        self.names.len() <= NAMES_MAX
    }

    /// Whether it was made longer ago.
    pub(crate) fn is_older_than(&self, age: Duration) -> bool {
        self.since.elapsed() >= age
    }

    /// Whether the directory did not have this name when it was made, and no program here has made it since.
    pub(crate) fn is_absent(&self, name: &OsStr) -> bool {
        name.len() <= NAME_BYTES_MAX && !self.names.contains(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_absent_until_it_may_have_been_made() {
        let mut directory = NewDirectory::new(Instant::now());
        assert!(directory.is_absent("a".as_ref()));
        assert!(directory.add("a".as_ref()));
        assert!(!directory.is_absent("a".as_ref()) && directory.is_absent("b".as_ref()));
    }

    #[test]
    fn a_name_that_may_be_an_error_is_asked_for() {
        let directory = NewDirectory::new(Instant::now());
        assert!(directory.is_absent("n".repeat(NAME_BYTES_MAX).as_ref()));
        assert!(!directory.is_absent("n".repeat(NAME_BYTES_MAX + 1).as_ref()));
    }

    #[test]
    fn only_so_many_names_are_remembered() {
        let mut directory = NewDirectory::new(Instant::now());
        assert!((0..NAMES_MAX).all(|number| directory.add(number.to_string().as_ref())));
        assert!(!directory.add("more".as_ref()));
    }
}
