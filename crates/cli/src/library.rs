//! Finds the library: beside this executable, in the common layout of the build and the installation (`bin/terrace`,
//! `lib/terrace/libibverbs.so.1`).

use std::path::{Path, PathBuf};

/// The drop-in's file name. It must be the real library's SONAME, or programs that `dlopen` that
/// name get the real library.
const LIBRARY: &str = "libibverbs.so.1";

/// Why the library cannot be preloaded.
#[derive(Debug, thiserror::Error)]
pub enum LibraryError {
    /// The executable's own path is unknown, and with it the library's.
    #[error("cannot tell where this executable is: {0}")]
    NoExecutable(#[source] std::io::Error),
    /// The library is not in its place.
    #[error("the library is missing: {} (run `make build`, or `make install PREFIX=DIR` and use DIR/bin/terrace)", .0.display())]
    Missing(PathBuf),
    /// The loader splits `LD_PRELOAD` at spaces and colons, and offers no way to quote them.
    #[error("the library's path contains a space or a colon, which LD_PRELOAD cannot carry: {}", .0.display())]
    Unloadable(PathBuf),
}

/// The library's absolute path.
pub fn find() -> Result<PathBuf, LibraryError> {
    let executable =
        std::env::current_exe().and_then(std::fs::canonicalize).map_err(LibraryError::NoExecutable)?;
    find_beside(&executable)
}

fn find_beside(executable: &Path) -> Result<PathBuf, LibraryError> {
    let prefix = executable.parent().and_then(Path::parent).unwrap_or(Path::new("/"));
    let library = prefix.join("lib/terrace").join(LIBRARY);
    if !library.is_file() {
        return Err(LibraryError::Missing(library));
    }
    if library.to_string_lossy().contains([' ', ':', '\t', '\n']) {
        return Err(LibraryError::Unloadable(library));
    }
    Ok(library)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(name: &str) -> PathBuf {
        let prefix = std::env::temp_dir().join(format!("terrace-library-{}-{name}", std::process::id()));
        std::fs::create_dir_all(prefix.join("lib/terrace")).unwrap();
        prefix
    }

    #[test]
    fn the_library_is_found_beside_the_executable() {
        let prefix = layout("found");
        let library = prefix.join("lib/terrace/libibverbs.so.1");
        assert!(
            matches!(find_beside(&prefix.join("bin/terrace")), Err(LibraryError::Missing(path)) if path == library)
        );
        std::fs::write(&library, b"").unwrap();
        assert_eq!(find_beside(&prefix.join("bin/terrace")).unwrap(), library);
        std::fs::remove_dir_all(prefix).unwrap();
    }

    #[test]
    fn a_path_that_the_loader_would_split_is_refused() {
        let prefix = layout("with space");
        std::fs::write(prefix.join("lib/terrace/libibverbs.so.1"), b"").unwrap();
        assert!(matches!(find_beside(&prefix.join("bin/terrace")), Err(LibraryError::Unloadable(_))));
        std::fs::remove_dir_all(prefix).unwrap();
    }
}
