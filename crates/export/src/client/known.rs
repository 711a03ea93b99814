//! The names by which a client has found files, so that it can reclaim them.

use std::collections::{HashMap, VecDeque};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use crate::proto::FileId;

/// The most files whose names are known.
const FILES_MAX: usize = 1 << 20;
/// The most names of a file that are known.
const NAMES_MAX: usize = 8;
/// The most components of a path.
const DEPTH_MAX: usize = 1024;

/// Where a file was found.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Place {
    /// Relative to the exported directory.
    Path(Vec<u8>),
    Child(FileId, OsString),
}

/// A file that a client has found.
#[derive(Debug)]
struct KnownFile {
    /// Its names, the newest last; one at least.
    places: Vec<Place>,
    /// Its number in [`Known::order`].
    number: u64,
    /// It, or a file in it, was found again since it was last considered for removal.
    is_used: bool,
}

/// The files that a client has found. The oldest are forgotten, except those that have been used since (CLOCK), so that
/// directories in use stay known.
#[derive(Debug)]
pub struct Known {
    by_id: HashMap<FileId, KnownFile>,
    files: HashMap<Place, FileId>,
    /// In the order in which they are considered for removal. An entry whose number is not its file's is stale.
    order: VecDeque<(FileId, u64)>,
    next_number: u64,
    max: usize,
}

impl Default for Known {
    fn default() -> Known {
        Known::new(FILES_MAX)
    }
}

impl Known {
    /// Knows at most `max` files.
    fn new(max: usize) -> Known {
        let (by_id, files, order) = (HashMap::new(), HashMap::new(), VecDeque::new());
        Known { by_id, files, order, next_number: 0, max }
    }

    /// A name of a file.
    pub fn learn(&mut self, id: FileId, parent: FileId, name: &OsStr) {
        if let Some(parent) = self.by_id.get_mut(&parent) {
            parent.is_used = true;
        }
        self.insert(id, Place::Child(parent, name.to_owned()));
    }

    /// The file of a name, as far as is known.
    pub fn find(&self, parent: FileId, name: &OsStr) -> Option<FileId> {
        self.files.get(&Place::Child(parent, name.to_owned())).copied()
    }

    /// A path of a file.
    pub fn learn_path(&mut self, id: FileId, path: &Path) {
        self.insert(id, Place::Path(path.as_os_str().as_bytes().to_vec()));
    }

    /// A name was removed.
    pub fn forget(&mut self, parent: FileId, name: &OsStr) {
        self.remove(&Place::Child(parent, name.to_owned()));
    }

    /// A file has another name. With `exchange` the file of that name gets the old one.
    pub fn rename(&mut self, from: (FileId, &OsStr), to: (FileId, &OsStr), exchange: bool) {
        let (from, to) = (Place::Child(from.0, from.1.to_owned()), Place::Child(to.0, to.1.to_owned()));
        let (moved, other) = (self.files.get(&from).copied(), self.files.get(&to).copied());
        if moved.is_some() && moved == other {
            // Both names are of one file, and a rename leaves both.
            return;
        }
        self.remove(&from);
        self.remove(&to);
        if let Some(id) = moved {
            self.insert(id, to);
        }
        if let Some(id) = other.filter(|_| exchange) {
            self.insert(id, from);
        }
    }

    fn insert(&mut self, id: FileId, place: Place) {
        if self.files.get(&place) == Some(&id) {
            if let Some(file) = self.by_id.get_mut(&id) {
                file.is_used = true;
            }
            return;
        }
        self.remove(&place);
        self.files.insert(place.clone(), id);
        match self.by_id.get_mut(&id) {
            Some(file) => {
                file.places.push(place);
                if file.places.len() > NAMES_MAX {
                    let oldest = file.places.remove(0);
                    self.files.remove(&oldest);
                }
            }
            None => {
                self.next_number += 1;
                let number = self.next_number;
                self.by_id.insert(id, KnownFile { places: vec![place], number, is_used: false });
                self.order.push_back((id, number));
            }
        }
        self.forget_old();
    }

    /// Forgets files that have not been used, until there are no more than the maximum.
    fn forget_old(&mut self) {
        while self.by_id.len() > self.max {
            let Some((id, number)) = self.order.pop_front() else { return };
            let Some(file) = self.by_id.get_mut(&id).filter(|file| file.number == number) else { continue };
            if file.is_used {
                file.is_used = false;
                self.order.push_back((id, number));
            } else if let Some(file) = self.by_id.remove(&id) {
                for place in &file.places {
                    self.files.remove(place);
                }
            }
        }
        if self.order.len() > 2 * self.max {
            let by_id = &self.by_id;
            self.order.retain(|(id, number)| by_id.get(id).is_some_and(|file| file.number == *number));
        }
    }

    fn remove(&mut self, place: &Place) {
        let Some(id) = self.files.remove(place) else { return };
        let Some(file) = self.by_id.get_mut(&id) else { return };
        file.places.retain(|known| known != place);
        if file.places.is_empty() {
            self.by_id.remove(&id);
        }
    }

    /// The paths of a file relative to the exported directory, the newest first.
    pub fn paths(&self, root: FileId, id: FileId) -> Vec<Vec<u8>> {
        if id == root {
            return vec![Vec::new()];
        }
        let places = self.by_id.get(&id).into_iter().flat_map(|file| file.places.iter().rev());
        places.filter_map(|place| self.path_to(root, place)).collect()
    }

    fn path_to(&self, root: FileId, place: &Place) -> Option<Vec<u8>> {
        let (mut names, mut at) = (Vec::new(), place);
        let mut path = loop {
            match at {
                Place::Path(path) => break path.clone(),
                Place::Child(parent, name) => {
                    names.push(name.as_bytes());
                    if *parent == root {
                        break Vec::new();
                    }
                    at = self.by_id.get(parent)?.places.last()?;
                }
            }
            // Names that were learned at different times may form a circle.
            if names.len() > DEPTH_MAX {
                return None;
            }
        };
        for name in names.iter().rev() {
            if !path.is_empty() {
                path.push(b'/');
            }
            path.extend_from_slice(name);
        }
        Some(path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOT: FileId = id(1);

    const fn id(ino: u64) -> FileId {
        FileId { dev: 1, ino, generation: 0 }
    }

    fn text(known: &Known, file: u64) -> Vec<String> {
        let paths = known.paths(ROOT, id(file)).into_iter();
        paths.map(|path| String::from_utf8(path).unwrap()).collect()
    }

    #[test]
    fn paths_follow_renames() {
        let mut known = Known::default();
        known.learn(id(2), ROOT, "a".as_ref());
        known.learn(id(3), id(2), "b".as_ref());
        assert_eq!(text(&known, 3), ["a/b"]);
        known.rename((ROOT, "a".as_ref()), (ROOT, "c".as_ref()), false);
        assert_eq!(text(&known, 3), ["c/b"]);
        known.learn(id(4), ROOT, "d".as_ref());
        known.rename((ROOT, "c".as_ref()), (ROOT, "d".as_ref()), true);
        assert_eq!((text(&known, 3), text(&known, 4)), (vec!["d/b".into()], vec!["c".into()]));
        known.rename((ROOT, "c".as_ref()), (id(2), "b".as_ref()), false);
        assert_eq!((text(&known, 3), text(&known, 4)), (vec![], vec!["d/b".into()]));
        known.learn_path(id(2), "x/y".as_ref());
        assert_eq!(text(&known, 4), ["x/y/b"]);
        assert_eq!(known.paths(ROOT, ROOT), [b""]);
    }

    #[test]
    fn a_file_may_have_several_names() {
        let mut known = Known::default();
        known.learn(id(2), ROOT, "a".as_ref());
        known.learn(id(2), ROOT, "b".as_ref());
        known.rename((ROOT, "a".as_ref()), (ROOT, "b".as_ref()), false);
        assert_eq!(text(&known, 2), ["b", "a"]);
        known.forget(ROOT, "b".as_ref());
        assert_eq!(text(&known, 2), ["a"]);
        known.learn(id(3), ROOT, "a".as_ref());
        assert_eq!(text(&known, 2), [""; 0]);
    }

    #[test]
    fn directories_in_use_outlive_the_files_in_them() {
        let mut known = Known::new(16);
        known.learn(id(2), ROOT, "directory".as_ref());
        for number in 0..100 {
            known.learn(id(10 + number), id(2), number.to_string().as_ref());
        }
        assert_eq!(text(&known, 109), ["directory/99"]);
        assert_eq!(text(&known, 10), [""; 0]);
        assert_eq!(known.find(id(2), "99".as_ref()), Some(id(109)));
        assert!(known.by_id.len() <= 16 && known.files.len() <= 16);
    }

    #[test]
    fn files_that_come_and_go_take_no_memory() {
        let mut known = Known::new(16);
        known.learn(id(2), ROOT, "stays".as_ref());
        for number in 0..100 {
            known.learn(id(3), ROOT, "comes".as_ref());
            known.learn(id(10 + number), ROOT, "goes".as_ref());
            known.forget(ROOT, "comes".as_ref());
            known.forget(ROOT, "goes".as_ref());
        }
        assert_eq!(text(&known, 2), ["stays"]);
        assert!(known.order.len() <= 32);
        assert_eq!((known.by_id.len(), known.files.len()), (1, 1));
    }

    #[test]
    fn circles_have_no_path() {
        let mut known = Known::default();
        known.learn(id(2), id(3), "a".as_ref());
        known.learn(id(3), id(2), "b".as_ref());
        assert_eq!(text(&known, 3), [""; 0]);
    }
}
