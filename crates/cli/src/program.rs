//! Finds the program to run as a shell does, so that a mistake gives one line of error before the program starts.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// An error of finding the program.
#[derive(Debug, thiserror::Error)]
pub enum ProgramError {
    /// There is no such file, at the path or in `PATH`.
    #[error("{0}: no such program{1}")]
    NotFound(String, &'static str),
    /// A file of that name exists, but cannot be executed.
    #[error("{0}: not executable")]
    NotExecutable(String),
}

/// The path of `program`: itself if it contains a slash, else the first executable of that name in `PATH`.
pub fn find(program: &OsStr) -> Result<PathBuf, ProgramError> {
    let path = std::env::var_os("PATH").unwrap_or_else(|| "/usr/local/bin:/usr/bin:/bin".into());
    find_in(program, &path)
}

fn find_in(program: &OsStr, path: &OsStr) -> Result<PathBuf, ProgramError> {
    let name = program.to_string_lossy().into_owned();
    if program.as_bytes().contains(&b'/') {
        return match classify(Path::new(program)) {
            Candidate::Executable => Ok(program.into()),
            Candidate::NotExecutable => Err(ProgramError::NotExecutable(name)),
            Candidate::Absent => Err(ProgramError::NotFound(name, "")),
        };
    }
    let mut seen_unexecutable = false;
    for directory in std::env::split_paths(path) {
        let candidate = directory.join(program);
        match classify(&candidate) {
            Candidate::Executable if !name.is_empty() => return Ok(candidate),
            Candidate::NotExecutable if !name.is_empty() => seen_unexecutable = true,
            _ => {}
        }
    }
    match seen_unexecutable {
        true => Err(ProgramError::NotExecutable(name)),
        false => Err(ProgramError::NotFound(name, " in PATH")),
    }
}

enum Candidate {
    Executable,
    NotExecutable,
    Absent,
}

fn classify(path: &Path) -> Candidate {
    match std::fs::metadata(path) {
        Ok(metadata) if metadata.is_file() && metadata.permissions().mode() & 0o111 != 0 => {
            Candidate::Executable
        }
        Ok(_) => Candidate::NotExecutable,
        Err(_) => Candidate::Absent,
    }
}

/// Whether the file is a 64-bit ELF executable without a program interpreter (`PT_INTERP`), into which no library can be
/// preloaded. Unreadable files, other formats and scripts count as loadable; the kernel decides about them.
pub fn is_static(path: &Path) -> bool {
    const PROGRAM_HEADER_LEN: usize = 56;
    const PT_INTERP: u32 = 3;
    let Some(head) = read_head(path, 64) else { return false };
    if !head.starts_with(b"\x7fELF\x02\x01") || head.len() < 64 {
        return false;
    }
    let u16_at = |at: usize| u16::from_le_bytes([head[at], head[at + 1]]);
    let table_offset = u64::from_le_bytes(head[32..40].try_into().expect("eight bytes"));
    let (entry_len, entry_count) = (usize::from(u16_at(54)), usize::from(u16_at(56)));
    if entry_len != PROGRAM_HEADER_LEN {
        return false;
    }
    let Some(table) = read_at(path, table_offset, entry_len * entry_count) else { return false };
    !table.chunks_exact(entry_len).any(|entry| entry[..4] == PT_INTERP.to_le_bytes())
}

fn read_head(path: &Path, len: usize) -> Option<Vec<u8>> {
    read_at(path, 0, len)
}

fn read_at(path: &Path, offset: u64, len: usize) -> Option<Vec<u8>> {
    use std::os::unix::fs::FileExt;
    let mut bytes = vec![0; len];
    std::fs::File::open(path).ok()?.read_exact_at(&mut bytes, offset).ok()?;
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_in_the_path_is_found() {
        assert!(find_in(OsStr::new("sh"), OsStr::new("/nonexistent:/bin:/usr/bin")).is_ok());
        assert!(!is_static(Path::new("/bin/sh")));
    }

    #[test]
    fn absent_and_unexecutable_programs_have_different_errors() {
        let path = OsStr::new("/bin:/etc");
        assert!(matches!(find_in(OsStr::new("no-such-program"), path), Err(ProgramError::NotFound(..))));
        assert!(matches!(find_in(OsStr::new("/no/such"), path), Err(ProgramError::NotFound(..))));
        assert!(matches!(find_in(OsStr::new("/etc/passwd"), path), Err(ProgramError::NotExecutable(_))));
        assert!(matches!(
            find_in(OsStr::new("passwd"), OsStr::new("/etc")),
            Err(ProgramError::NotExecutable(_))
        ));
        assert!(matches!(find_in(OsStr::new("/etc"), path), Err(ProgramError::NotExecutable(_))));
        assert!(matches!(find_in(OsStr::new(""), path), Err(ProgramError::NotFound(..))));
    }
}
