//! Where the library is: beside this executable, in the layout that the build and the installation share
//! (`bin/terrace`, `lib/terrace/libibverbs.so.1`).

use std::path::{Path, PathBuf};

/// File name of the drop-in; it must be the real library's SONAME, or programs that `dlopen` it get the other one.
const LIBRARY: &str = "libibverbs.so.1";

/// Why there is no library to preload.
#[derive(Debug, thiserror::Error)]
pub enum LibraryError {
    /// The executable's own path is unknown, so there is nothing to search beside.
    #[error("cannot tell where this executable is: {0}")]
    NoExecutable(#[source] std::io::Error),
    /// Nothing at the place where it belongs.
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
