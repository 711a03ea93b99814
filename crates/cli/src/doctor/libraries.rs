//! The libraries that programs load: Terrace's libibverbs, and the system's librdmacm.
//!
//! A child of this command preloads them as `terrace run` does, and reports what the loader has mapped. The loader says
//! what is wrong with a library that it does not load.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use super::check::Check;
use super::kernel::MOUNT_PROC;
use crate::library::{self, LibraryError, Preload};

const RDMACM: &str = "librdmacm.so.1";

pub fn checks() -> Vec<Check> {
    let preload = library::find();
    let dropin = match &preload {
        Ok(preload) => check_dropin(preload),
        Err(error) => Check::missing(
            "libibverbs",
            format!("{error}; no program gets a device"),
            match error {
                LibraryError::NoExecutable(_) => MOUNT_PROC,
                _ => "install the whole of Terrace",
            },
        ),
    };
    vec![dropin.necessary(), check_rdmacm(preload.ok().as_ref())]
}

fn check_dropin(preload: &Preload) -> Check {
    let path = preload.folder.join(library::LIBRARY);
    let file = path.display();
    match load(Some(preload), None) {
        Ok(loaded) if loaded.paths.contains(&path) => {
            Check::ok("libibverbs", format!("{file} is loaded into programs"))
        }
        Ok(loaded) => Check::missing(
            "libibverbs",
            format!("{file} cannot be loaded: {}", loaded.reason),
            "build Terrace on this system, or install a package for it; glibc 2.34 or newer is needed",
        ),
        Err(error) => Check::missing(
            "libibverbs",
            format!("no process can be started to load it: {error}"),
            "see the limits below",
        ),
    }
}

fn check_rdmacm(preload: Option<&Preload>) -> Check {
    match load(preload, Some(RDMACM)) {
        Ok(loaded) if loaded.paths.iter().any(|path| is_version_of(path, RDMACM)) => {
            Check::ok("librdmacm", "is there: programs connect by IP address (rdma_cm, rsockets)")
        }
        _ => Check::missing(
            "librdmacm",
            format!(
                "{RDMACM} is not there: programs that connect by IP address (rdma_cm, rsockets) do not start"
            ),
            "install it: apt-get install librdmacm1, or dnf install librdmacm",
        ),
    }
}

/// What a process has loaded, and the loader's first complaint.
struct Loaded {
    paths: Vec<PathBuf>,
    reason: String,
}

/// Starts this command with the libraries preloaded.
fn load(preload: Option<&Preload>, other: Option<&str>) -> io::Result<Loaded> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["doctor", "mapped", library::LIBRARY, RDMACM]).env_remove("TERRACE_ADDR");
    let entries: Vec<OsString> =
        preload.map(|preload| preload.entry.clone()).into_iter().chain(other.map(OsString::from)).collect();
    command.env("LD_PRELOAD", entries.join(":".as_ref()));
    if let Some(preload) = preload {
        command.env("LD_LIBRARY_PATH", &preload.folder);
    }
    let output = command.output()?;
    let complaint = String::from_utf8_lossy(&output.stderr);
    let reason = complaint.lines().next().unwrap_or("the loader does not say why").to_owned();
    let paths = String::from_utf8_lossy(&output.stdout).lines().map(PathBuf::from).collect();
    Ok(Loaded { paths, reason })
}

/// Prints the paths of files that are mapped in this process, of those with one of these names.
pub fn print_mapped(names: &[String]) -> io::Result<()> {
    let maps = std::fs::read_to_string("/proc/self/maps")?;
    let paths: BTreeSet<&Path> =
        maps.lines().filter_map(|line| line.find('/').map(|at| Path::new(&line[at..]))).collect();
    let mut out = io::stdout().lock();
    for path in paths.iter().filter(|path| names.iter().any(|name| is_version_of(path, name))) {
        writeln!(out, "{}", path.display())?;
    }
    Ok(())
}

/// Whether a file has a library's name, or that name with further version numbers.
fn is_version_of(path: &Path, name: &str) -> bool {
    path.file_name().and_then(|file| file.to_str()).is_some_and(|file| file.starts_with(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_may_have_further_version_numbers() {
        assert!(is_version_of(Path::new("/usr/lib/librdmacm.so.1.3.44.0"), RDMACM));
        assert!(!is_version_of(Path::new("/usr/lib/librdmacm.so.2"), RDMACM));
    }
}
