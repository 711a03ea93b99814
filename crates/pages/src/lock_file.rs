//! The file beside a region's file that names the pool with its newest bytes, while there may be any.
//!
//! The lock of an open file ends with the process, but dirty frames do not. A server that opens the file with another
//! pool finds this file, and so does a person who looks for the reason why the file has old bytes: the first line is the
//! pool's path, the second one says what to do.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::error::PagesError;

/// The path of the lock file of `path`, which is without links: otherwise the file would have several.
pub(crate) fn path_for(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default();
    let mut hidden = std::ffi::OsString::from(".");
    hidden.push(name);
    hidden.push(".terrace-pages");
    path.with_file_name(hidden)
}

/// Notes that the newest bytes of a file may be in a pool. A lock file that is there is replaced at once: it never lacks
/// its pool, also when the disk is full.
///
/// # Errors
/// When the directory is not writable, or full.
pub(crate) fn write(path: &Path, pool: &Path) -> io::Result<()> {
    let advice = format!(
        "\nThe newest bytes of {path} may be in this pool of pages and not in the file. Read them from the server that has \
         the file, or end it. If it was killed, start it again or run: terrace recover {path}\n",
        path = path.display()
    );
    let content = [pool.as_os_str().as_bytes(), advice.as_bytes()].concat();
    let there = path_for(path);
    if std::fs::read(&there).is_ok_and(|found| found == content) {
        return Ok(());
    }
    let new = there.with_extension("terrace-pages.new");
    // A server that was killed may have left one.
    let _ = std::fs::remove_file(&new);
    // After a power failure it must not be empty under its name.
    let written =
        File::create_new(&new).and_then(|mut file| file.write_all(&content).and_then(|()| file.sync_all()));
    let replaced = written.and_then(|()| std::fs::rename(&new, &there));
    if replaced.is_err() {
        let _ = std::fs::remove_file(&new);
    }
    replaced
}

/// The pool that the lock file of a file names. `None` if there is no lock file.
///
/// # Errors
/// When the lock file cannot be read, or names no pool.
pub(crate) fn read(path: &Path) -> io::Result<Option<PathBuf>> {
    let bytes = match std::fs::read(path_for(path)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other?,
    };
    let first = bytes.split(|byte| *byte == b'\n').next().unwrap_or_default();
    if first.is_empty() {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "it names no pool"));
    }
    Ok(Some(PathBuf::from(std::ffi::OsStr::from_bytes(first))))
}

/// Notes that the file has its newest bytes.
pub(crate) fn remove(path: &Path) {
    // Nothing to remove if the directory is not writable.
    let _ = std::fs::remove_file(path_for(path));
}

/// Whether a file may be served with the pool `own`, which has a slot of the file or not.
///
/// # Errors
/// `Elsewhere` when its newest bytes may be in another pool.
pub(crate) fn check(path: &Path, own: Option<&Path>, has_slot: bool) -> Result<(), PagesError> {
    let elsewhere = |pool| PagesError::Elsewhere { path: path.to_owned(), pool };
    let Some(named) = read(path).map_err(|_| elsewhere(None))? else { return Ok(()) };
    let is_own = Some(&*named) == own;
    // A pool that cannot be looked at, for lack of rights, may have the newest bytes.
    if !is_own && !matches!(named.try_exists(), Ok(false)) {
        return Err(elsewhere(Some(named)));
    }
    if !(is_own && has_slot) {
        // The system was started again: memory did not survive, and what was flushed is in the file.
        tracing::warn!(?path, pool = ?named, "the pool of a file's last server is gone: what was not flushed is lost");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_beside_the_file_and_names_the_pool() {
        let path = std::env::temp_dir().join(format!("terrace-pages-{}-locked", std::process::id()));
        let found = || read(&path).expect("readable");
        assert_eq!(found(), None);
        write(&path, Path::new("/dev/shm/a pool")).expect("written");
        assert_eq!(found(), Some(PathBuf::from("/dev/shm/a pool")));
        let text = std::fs::read_to_string(path_for(&path)).expect("readable");
        assert!(text.contains(&format!("terrace recover {}", path.display())), "{text}");
        remove(&path);
        assert_eq!(found(), None);
    }

    #[test]
    fn a_lock_file_that_cannot_be_replaced_stays() {
        let path = std::env::temp_dir().join(format!("terrace-pages-{}-stays", std::process::id()));
        write(&path, Path::new("/dev/shm/first")).expect("written");
        // A directory of the name of the new file is in the way.
        let obstacle = path_for(&path).with_extension("terrace-pages.new");
        std::fs::create_dir(&obstacle).expect("made");
        write(&path, Path::new("/dev/shm/first")).expect("the same needs no writing");
        assert!(write(&path, Path::new("/dev/shm/second")).is_err());
        assert_eq!(read(&path).expect("readable"), Some(PathBuf::from("/dev/shm/first")));
        std::fs::remove_dir(&obstacle).expect("removed");
        write(&path, Path::new("/dev/shm/second")).expect("written");
        assert_eq!(read(&path).expect("readable"), Some(PathBuf::from("/dev/shm/second")));
        std::fs::write(path_for(&path), "").expect("written");
        assert!(read(&path).is_err());
        remove(&path);
    }

    #[test]
    fn a_pool_that_cannot_be_looked_at_is_not_gone() {
        let path = std::env::temp_dir().join(format!("terrace-pages-{}-unseen", std::process::id()));
        std::fs::write(&path, "").expect("written");
        // Below a file there is nothing, and the system does not say so: as below a directory of another user's.
        write(&path, &path.join("pool")).expect("written");
        let refused = check(&path, None, false);
        assert!(matches!(refused, Err(PagesError::Elsewhere { .. })), "{refused:?}");
        write(&path, Path::new("/dev/shm/terrace-pages-gone")).expect("written");
        assert!(check(&path, None, false).is_ok(), "it is gone");
        remove(&path);
        std::fs::remove_file(&path).expect("removed");
    }
}
