//! Finds the library: beside this executable, in the common layout of the build and the installation (`bin/terrace`,
//! `lib/terrace/libibverbs.so.1`).

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// The drop-in's file name. It must be the real library's SONAME, or programs that `dlopen` that name get the real
/// library.
pub const LIBRARY: &str = "libibverbs.so.1";

/// The library of programs whose memory is on memory nodes, in the same folder.
const PAGER_LIBRARY: &str = "libterrace-pager.so";

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

/// The environment by which the loader preloads the library, and finds it by the names that programs `dlopen`.
#[derive(Debug, PartialEq, Eq)]
pub struct Preload {
    /// The first entry of `LD_PRELOAD`.
    pub entry: OsString,
    /// The first entry of `LD_LIBRARY_PATH`. The folder also has `libibverbs.so`, the name without a version.
    pub folder: PathBuf,
}

/// Finds the library.
pub fn find() -> Result<Preload, LibraryError> {
    let executable =
        std::env::current_exe().and_then(std::fs::canonicalize).map_err(LibraryError::NoExecutable)?;
    preload(find_beside(&executable)?)
}

/// Finds the library that has the program's memory paged, for `LD_PRELOAD`.
pub fn find_pager(library: &Preload) -> Result<OsString, LibraryError> {
    let path = library.folder.join(PAGER_LIBRARY);
    if !path.is_file() {
        return Err(LibraryError::Missing(path));
    }
    Ok(preload_entry(&path))
}

/// A library whose path has a space is preloaded by its name alone, and the folder is searched for it.
fn preload_entry(library: &Path) -> OsString {
    let has_space = library.to_string_lossy().contains(' ');
    library.file_name().filter(|_| has_space).unwrap_or(library.as_os_str()).to_owned()
}

fn find_beside(executable: &Path) -> Result<PathBuf, LibraryError> {
    let prefix = executable.parent().and_then(Path::parent).unwrap_or(Path::new("/"));
    let library = prefix.join("lib/terrace").join(LIBRARY);
    if !library.is_file() {
        return Err(LibraryError::Missing(library));
    }
    Ok(library)
}

/// `LD_PRELOAD` is split at spaces and colons, `LD_LIBRARY_PATH` at colons and semicolons.
fn preload(library: PathBuf) -> Result<Preload, LibraryError> {
    let text = library.to_string_lossy();
    if let Some(separator) = text.chars().find(|character| [':', ';'].contains(character)) {
        return Err(LibraryError::Unloadable { path: library, separator });
    }
    let entry = preload_entry(&library);
    let folder = library.parent().unwrap_or(Path::new("/")).to_owned();
    Ok(Preload { entry, folder })
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
    fn a_library_is_preloaded_by_its_path_unless_that_has_a_space() {
        for (folder, entry) in [("/a/lib", "/a/lib/libibverbs.so.1"), ("/a b", LIBRARY)] {
            let expected = Preload { entry: entry.into(), folder: folder.into() };
            assert_eq!(preload(Path::new(folder).join(LIBRARY)).unwrap(), expected);
        }
    }

    #[test]
    fn a_path_that_the_loader_would_split_is_refused() {
        for (folder, separator) in [("/a:b", ':'), ("/a;b", ';'), ("/a b:c", ':')] {
            let refused = preload(Path::new(folder).join(LIBRARY));
            assert!(
                matches!(refused, Err(LibraryError::Unloadable { separator: found, .. }) if found == separator),
                "{folder}"
            );
        }
    }
}
