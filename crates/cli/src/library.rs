//! Finds the library: beside this executable, in the common layout of the build and the installation (`bin/terrace`,
//! `lib/terrace/libibverbs.so.1`).

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// The drop-in's file name. It must be the real library's SONAME, or programs that `dlopen` that
/// name get the real library.
const LIBRARY: &str = "libibverbs.so.1";

/// An error of preloading the library.
#[derive(Debug, thiserror::Error)]
pub enum LibraryError {
    /// The executable's own path is unknown, and so is the library's.
    #[error("the path of this executable is unknown: {0}")]
    NoExecutable(#[source] std::io::Error),
    /// The library is not at its path.
    #[error("the library is missing: {} (run `make build`, or `make install PREFIX=DIR` and use DIR/bin/terrace)", .0.display())]
    Missing(PathBuf),
    /// The loader splits its variables at this character, which cannot be quoted.
    #[error("the library's path contains `{separator}`, which the loader's variables cannot contain: {}", path.display())]
    Unloadable { path: PathBuf, separator: char },
}

/// The environment by which the loader preloads the library.
#[derive(Debug, PartialEq, Eq)]
pub struct Preload {
    /// The first entry of `LD_PRELOAD`.
    pub entry: OsString,
    /// The first entry of `LD_LIBRARY_PATH`, if the loader has to search for the library.
    pub folder: Option<PathBuf>,
}

/// Finds the library.
pub fn find() -> Result<Preload, LibraryError> {
    let executable =
        std::env::current_exe().and_then(std::fs::canonicalize).map_err(LibraryError::NoExecutable)?;
    preload(find_beside(&executable)?)
}

fn find_beside(executable: &Path) -> Result<PathBuf, LibraryError> {
    let prefix = executable.parent().and_then(Path::parent).unwrap_or(Path::new("/"));
    let library = prefix.join("lib/terrace").join(LIBRARY);
    if !library.is_file() {
        return Err(LibraryError::Missing(library));
    }
    Ok(library)
}

/// `LD_PRELOAD` is split at spaces and colons, `LD_LIBRARY_PATH` at colons and semicolons. So a library whose path has a
/// space is preloaded by its name alone, and the folder is searched for it.
fn preload(library: PathBuf) -> Result<Preload, LibraryError> {
    let text = library.to_string_lossy().into_owned();
    let is_searched = text.contains(' ');
    let separators: &[char] = if is_searched { &[':', ';'] } else { &[':'] };
    if let Some(separator) = text.chars().find(|character| separators.contains(character)) {
        return Err(LibraryError::Unloadable { path: library, separator });
    }
    Ok(match library.parent() {
        Some(folder) if is_searched => Preload { entry: LIBRARY.into(), folder: Some(folder.to_owned()) },
        _ => Preload { entry: library.into(), folder: None },
    })
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
    fn a_path_without_a_space_is_preloaded_itself() {
        let path = "/a;b/lib/terrace/libibverbs.so.1";
        assert_eq!(preload(path.into()).unwrap(), Preload { entry: path.into(), folder: None });
    }

    #[test]
    fn the_folder_is_searched_when_its_path_has_a_space() {
        let expected = Preload { entry: LIBRARY.into(), folder: Some("/a b/lib/terrace".into()) };
        assert_eq!(preload("/a b/lib/terrace/libibverbs.so.1".into()).unwrap(), expected);
    }

    #[test]
    fn a_path_that_the_loader_would_split_is_refused() {
        for (folder, separator) in [("/a:b", ':'), ("/a b:c", ':'), ("/a b;c", ';')] {
            let refused = preload(Path::new(folder).join(LIBRARY));
            assert!(
                matches!(refused, Err(LibraryError::Unloadable { separator: found, .. }) if found == separator),
                "{folder}"
            );
        }
    }
}
