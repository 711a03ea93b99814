//! The file beside a region's file that names the pool with its newest bytes, while there may be any.
//!
//! The lock of an open file ends with the process, but dirty frames do not. A server that opens the file with another
//! pool finds this file, and so does a person who looks for the reason why the file has old bytes: the first line is the
//! pool's path, the second one says what to do.

use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::error::PagesError;

/// The path of the lock file of `path`.
pub(crate) fn path_for(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default();
    let mut hidden = std::ffi::OsString::from(".");
    hidden.push(name);
    hidden.push(".terrace-pages");
    path.with_file_name(hidden)
}

/// Notes that the newest bytes of a file may be in a pool.
///
/// # Errors
/// When the directory is not writable.
pub(crate) fn write(path: &Path, pool: &Path) -> io::Result<()> {
    let advice = format!(
        "\nThe newest bytes of {path} may be in this pool of pages and not in the file. Read them from the server that has \
         the file, or end it. If it was killed, start it again or run: terrace recover {path}\n",
        path = path.display()
    );
    std::fs::write(path_for(path), [pool.as_os_str().as_bytes(), advice.as_bytes()].concat())
}

/// The pool that the lock file of a file names.
pub(crate) fn read(path: &Path) -> Option<PathBuf> {
    let bytes = std::fs::read(path_for(path)).ok()?;
    let first = bytes.split(|byte| *byte == b'\n').next().unwrap_or_default();
    Some(PathBuf::from(std::ffi::OsStr::from_bytes(first)))
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
    let Some(named) = read(path) else { return Ok(()) };
    let is_own = Some(&*named) == own;
    if named.exists() && !is_own {
        return Err(PagesError::Elsewhere { path: path.to_owned(), pool: named });
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
        assert_eq!(read(&path), None);
        write(&path, Path::new("/dev/shm/a pool")).expect("written");
        assert_eq!(read(&path), Some(PathBuf::from("/dev/shm/a pool")));
        let text = std::fs::read_to_string(path_for(&path)).expect("readable");
        assert!(text.contains(&format!("terrace recover {}", path.display())), "{text}");
        remove(&path);
        assert_eq!(read(&path), None);
    }
}
