//! The directory for temporary files.

use std::path::{Path, PathBuf};

/// That of `TMPDIR`, or the default. It is absolute: other processes find it, too.
pub fn temporary_directory(default: &str) -> PathBuf {
    let chosen = std::env::var_os("TMPDIR").filter(|directory| !directory.is_empty());
    let directory = chosen.map_or_else(|| Path::new(default).to_owned(), PathBuf::from);
    std::path::absolute(&directory).unwrap_or(directory)
}
