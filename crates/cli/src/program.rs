//! Finds the program to run as a shell does, so that a mistake gives one line of error before the program starts.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
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
    /// The path cannot be followed: this user may not enter a directory of it, for example.
    #[error("{0}: {1}")]
    Unreachable(String, #[source] io::Error),
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
            Candidate::Unreachable(error) => Err(ProgramError::Unreachable(name, error)),
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
    Unreachable(io::Error),
    Absent,
}

fn classify(path: &Path) -> Candidate {
    match std::fs::metadata(path) {
        Ok(metadata) if metadata.is_file() && metadata.permissions().mode() & 0o111 != 0 => {
            Candidate::Executable
        }
        Ok(_) => Candidate::NotExecutable,
        Err(error) => match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => Candidate::Absent,
            _ => Candidate::Unreachable(error),
        },
    }
}

/// Why a library cannot be preloaded into a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unloadable {
    /// It has no dynamic loader.
    Static,
    /// Its loader is musl's, which ends a program whose preloaded library needs glibc.
    Musl,
    /// It is of another architecture than the library, or of 32 bits.
    Foreign,
    /// It gets rights from its file, and the loader ignores and removes what the user wants preloaded.
    Privileged,
}

impl Unloadable {
    /// The reason, and what follows for the program and for those that it starts.
    pub fn meaning(self) -> &'static str {
        match self {
            Unloadable::Static => {
                "is statically linked, so it sees no RDMA device; programs that it starts do"
            }
            Unloadable::Musl => {
                "is linked with musl, whose loader ends programs with a library that needs glibc: run it where glibc's \
                 build of it is installed"
            }
            Unloadable::Foreign => {
                "is of another architecture than the library, so it sees no RDMA device; programs of the library's that it \
                 starts do"
            }
            Unloadable::Privileged => {
                "gets rights from its file (set-user-ID, set-group-ID or capabilities), so the loader ignores the library: \
                 it sees no RDMA device, nor do programs that it starts"
            }
        }
    }
}

/// Why no library can be preloaded into the program. `None` if one can, and for unreadable files, other formats and scripts: the kernel
/// decides about them.
pub fn unloadable(path: &Path) -> Option<Unloadable> {
    if gets_rights(path) {
        return Some(Unloadable::Privileged);
    }
    let header = read_at(path, 0, HEADER_LEN)?;
    if !header.starts_with(b"\x7fELF") {
        return None;
    }
    let own = read_at(&std::env::current_exe().ok()?, 0, HEADER_LEN)?;
    // Class and byte order, then the machine.
    if (&header[4..6], &header[18..20]) != (&own[4..6], &own[18..20]) {
        return Some(Unloadable::Foreign);
    }
    match interpreter(path, &header)? {
        None => Some(Unloadable::Static),
        Some(name) => contains(&name, b"ld-musl").then_some(Unloadable::Musl),
    }
}

/// The length of a 64-bit ELF file's header.
const HEADER_LEN: usize = 64;

/// The program interpreter (`PT_INTERP`) of a 64-bit ELF file, which is its dynamic loader; `None` for a file that cannot be read.
fn interpreter(path: &Path, header: &[u8]) -> Option<Option<Vec<u8>>> {
    const PROGRAM_HEADER_LEN: usize = 56;
    const PT_INTERP: u32 = 3;
    /// As long as paths may be.
    const NAME_LEN_MAX: usize = 4096;
    let u16_at = |at: usize| u16::from_le_bytes([header[at], header[at + 1]]);
    let u64_at = |bytes: &[u8], at: usize| Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
    let (entry_len, entry_count) = (usize::from(u16_at(54)), usize::from(u16_at(56)));
    if entry_len != PROGRAM_HEADER_LEN {
        return None;
    }
    let table = read_at(path, u64_at(header, 32)?, entry_len * entry_count)?;
    let Some(entry) = table.chunks_exact(entry_len).find(|entry| entry[..4] == PT_INTERP.to_le_bytes())
    else {
        return Some(None);
    };
    let len = usize::try_from(u64_at(entry, 32)?).ok()?.min(NAME_LEN_MAX);
    Some(Some(read_at(path, u64_at(entry, 8)?, len)?))
}

fn contains(text: &[u8], part: &[u8]) -> bool {
    text.windows(part.len()).any(|window| window == part)
}

/// Whether the kernel would give a program of this user rights that the user does not have.
fn gets_rights(path: &Path) -> bool {
    const SET_USER_ID: u32 = 0o4000;
    const SET_GROUP_ID: u32 = 0o2000;
    let (user, group) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let Ok(metadata) = std::fs::metadata(path) else { return false };
    let mode = metadata.permissions().mode();
    let changes_user = mode & SET_USER_ID != 0 && metadata.uid() != user;
    let changes_group = mode & SET_GROUP_ID != 0 && metadata.gid() != group;
    // Root has the capabilities anyway.
    let has_capabilities = user != 0
        && rustix::fs::getxattr(path, "security.capability", &mut [0u8; 64][..]).is_ok_and(|len| len > 0);
    changes_user || changes_group || has_capabilities
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
        assert_eq!(unloadable(Path::new("/bin/sh")), None);
        assert_eq!(unloadable(Path::new("/etc/passwd")), None);
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
        // A path that is longer than paths may be.
        let long = "/x".repeat(4096);
        assert!(matches!(find_in(OsStr::new(&long), path), Err(ProgramError::Unreachable(..))));
        assert!(matches!(find_in(OsStr::new(""), path), Err(ProgramError::NotFound(..))));
    }

    /// A file with the header of this test's executable, one program header, and the name of an interpreter.
    fn executable(directory: &Path, change: impl FnOnce(&mut Vec<u8>), interpreter: &[u8]) -> PathBuf {
        let own = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        let mut file = own[..HEADER_LEN].to_vec();
        file[32..40].copy_from_slice(&(HEADER_LEN as u64).to_le_bytes());
        file[56..58].copy_from_slice(&1u16.to_le_bytes());
        const ENTRY_LEN: usize = 56;
        let mut entry = [0u8; ENTRY_LEN];
        entry[0] = if interpreter.is_empty() { 1 } else { 3 };
        entry[8..16].copy_from_slice(&((HEADER_LEN + ENTRY_LEN) as u64).to_le_bytes());
        entry[32..40].copy_from_slice(&(interpreter.len() as u64).to_le_bytes());
        file.extend_from_slice(&entry);
        file.extend_from_slice(interpreter);
        change(&mut file);
        let path = directory.join("program");
        std::fs::write(&path, file).unwrap();
        path
    }

    #[test]
    fn programs_without_the_library_have_a_reason() {
        let directory = tempfile::tempdir().unwrap();
        let of = |change: fn(&mut Vec<u8>), interpreter: &[u8]| {
            unloadable(&executable(directory.path(), change, interpreter))
        };
        assert_eq!(of(|_| (), b"/lib64/ld-linux-x86-64.so.2\0"), None);
        assert_eq!(of(|_| (), b""), Some(Unloadable::Static));
        assert_eq!(of(|_| (), b"/lib/ld-musl-x86_64.so.1\0"), Some(Unloadable::Musl));
        assert_eq!(of(|file| file[4] = 1, b"/lib/ld-linux.so.2\0"), Some(Unloadable::Foreign));
        assert_eq!(of(|file| file[18] ^= 1, b"/lib/ld.so\0"), Some(Unloadable::Foreign));
        assert_eq!(of(|file| file.truncate(70), b"/lib/ld.so\0"), None, "cut off");
        assert_eq!(of(|file| file[96..104].fill(0xff), b"/lib/ld.so\0"), None, "a name that is not there");
    }

    #[test]
    fn rights_of_a_file_have_a_reason() {
        let directory = tempfile::tempdir().unwrap();
        assert!(!gets_rights(&executable(directory.path(), |_| (), b"/lib/ld.so\0")));
        let passwd = Path::new("/usr/bin/passwd");
        let is_root = rustix::process::geteuid().is_root();
        if passwd.exists() {
            assert_eq!(unloadable(passwd), (!is_root).then_some(Unloadable::Privileged));
        }
    }
}
