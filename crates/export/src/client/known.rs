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

/// The files that a client has found.
#[derive(Debug, Default)]
pub struct Known {
    /// The names of each file, the newest last.
    places: HashMap<FileId, Vec<Place>>,
    files: HashMap<Place, FileId>,
    order: VecDeque<FileId>,
}

impl Known {
    /// A name of a file.
    pub fn learn(&mut self, id: FileId, parent: FileId, name: &OsStr) {
        self.insert(id, Place::Child(parent, name.to_owned()));
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
        match self.files.get(&place) {
            Some(known) if *known == id => return,
            _ => self.remove(&place),
        }
        self.files.insert(place.clone(), id);
        let places = self.places.entry(id).or_default();
        if places.is_empty() {
            self.order.push_back(id);
        }
        places.push(place);
        if places.len() > NAMES_MAX {
            let oldest = places.remove(0);
            self.files.remove(&oldest);
        }
        while self.order.len() > FILES_MAX {
            let Some(oldest) = self.order.pop_front() else { return };
            for place in self.places.remove(&oldest).unwrap_or_default() {
                self.files.remove(&place);
            }
        }
    }

    fn remove(&mut self, place: &Place) {
        let Some(id) = self.files.remove(place) else { return };
        if let Some(places) = self.places.get_mut(&id) {
            places.retain(|known| known != place);
        }
    }

    /// The paths of a file relative to the exported directory, the newest first.
    pub fn paths(&self, root: FileId, id: FileId) -> Vec<Vec<u8>> {
        if id == root {
            return vec![Vec::new()];
        }
        let places = self.places.get(&id).into_iter().flatten().rev();
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
                    at = self.places.get(parent)?.last()?;
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
    fn circles_have_no_path() {
        let mut known = Known::default();
        known.learn(id(2), id(3), "a".as_ref());
        known.learn(id(3), id(2), "b".as_ref());
        assert_eq!(text(&known, 3), [""; 0]);
    }
}
