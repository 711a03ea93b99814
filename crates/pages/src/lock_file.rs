//! The file beside a region's file that names the pool with its newest bytes, while there may be any.
//!
//! The lock of an open file ends with the process, but dirty frames do not. A server that opens the file with another
//! pool finds this file, and so does a person who looks for the reason why the file has old bytes.

use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

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
    std::fs::write(path_for(path), pool.as_os_str().as_bytes())
}

/// The pool that the lock file of a file names.
pub(crate) fn read(path: &Path) -> Option<PathBuf> {
    let bytes = std::fs::read(path_for(path)).ok()?;
    Some(PathBuf::from(std::ffi::OsStr::from_bytes(&bytes)))
}

/// Notes that the file has its newest bytes.
pub(crate) fn remove(path: &Path) {
    // Nothing to remove if the directory is not writable.
    let _ = std::fs::remove_file(path_for(path));
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
        remove(&path);
        assert_eq!(read(&path), None);
    }
}
