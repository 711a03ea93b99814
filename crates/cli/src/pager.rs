//! `terrace pager`: the process that handles the faults of programs whose memory is on memory nodes. `terrace run
//! --remote-memory` starts it; the command is not for users.
//!
//! Two processes are started: the first one starts the second one and ends. So the pager is no child of the program, which
//! may wait for all of its children.

use std::fmt;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use clap::Args;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use rustix::process::{Pid, PidfdFlags};
use terrace_nic::PathChoice;
use terrace_pager::{Pager, Settings, SharedStatus};

use crate::far_memory::{FarMemory, FarMemoryError};
use crate::log::{LogLevel, LogOption};
use crate::temporary::temporary_directory;
use crate::{termination, values};

/// What the pager writes to its standard output when processes may join.
const READY: &str = "ready";
/// The directory of a pager's socket; the number of the program's process follows.
const PREFIX: &str = "terrace-pager-";
/// The socket there.
const SOCKET: &str = "socket";
/// Above programs of the same user: they wait for it.
const NICE: i32 = -10;

/// Options of `terrace pager`.
#[derive(Args)]
pub struct Options {
    /// Process that ends with the pager's work
    #[arg(long)]
    root: i32,
    /// Bytes of memory
    #[arg(long)]
    local: u64,
    /// Where other pages are
    #[arg(long)]
    remote_memory: FarMemory,
    /// Copies of each page
    #[arg(long)]
    mirror: usize,
    /// Whether pages are loaded before they are touched
    #[arg(long, value_parser = values::prefetch())]
    prefetch: Prefetch,
    /// Transport to memory nodes on this host
    #[arg(long, value_parser = values::path())]
    path: PathChoice,
    /// Directory of the socket, to remove at the end
    #[arg(long)]
    directory: PathBuf,
    /// Start the pager, and end
    #[arg(long)]
    detach: bool,
    #[command(flatten)]
    log: LogOption,
}

/// Whether pages are loaded before a thread touches them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prefetch {
    /// If a trend of faults says which.
    On,
    /// Never.
    Off,
}

impl FromStr for Prefetch {
    type Err = String;

    fn from_str(text: &str) -> Result<Prefetch, String> {
        match text {
            "on" => Ok(Prefetch::On),
            "off" => Ok(Prefetch::Off),
            _ => Err(format!("{text:?} is neither on nor off")),
        }
    }
}

impl fmt::Display for Prefetch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if *self == Prefetch::On { "on" } else { "off" })
    }
}

/// Where the memory of a program is.
pub struct RemoteMemory {
    /// Pages that are not here.
    pub nodes: FarMemory,
    /// Bytes that are here.
    pub local_bytes: u64,
    /// Copies of each page on the nodes.
    pub copies: usize,
    /// Whether pages are loaded before they are touched.
    pub prefetch: Prefetch,
    /// The pager's log level, if it is given.
    pub log: Option<LogLevel>,
}

/// An error of the pager.
#[derive(Debug, thiserror::Error)]
pub enum PagerError {
    /// A system call failed.
    #[error("cannot {0}: {1}")]
    System(&'static str, #[source] std::io::Error),
    /// The socket, or its directory, cannot be made there.
    #[error("cannot make the pager's socket {}: {reason}; TMPDIR chooses another directory", path.display())]
    Socket {
        /// The socket, or the directory.
        path: PathBuf,
        /// The system's reason.
        reason: std::io::Error,
    },
    /// There is nowhere to put pages.
    #[error(transparent)]
    FarMemory(#[from] FarMemoryError),
    /// The pager wrote this in place of `ready`.
    #[error("{0}")]
    Refused(String),
}

fn system<E: Into<std::io::Error>>(attempt: &'static str) -> impl FnOnce(E) -> PagerError {
    move |error| PagerError::System(attempt, error.into())
}

/// Starts a pager for this process and all that it starts. Returns when processes may join; the path of its socket.
pub fn start(memory: &RemoteMemory, path: PathChoice) -> Result<PathBuf, PagerError> {
    let directory = create_directory()?;
    let started = start_in(&directory, memory, path);
    if started.is_err() {
        let _ = std::fs::remove_dir_all(&directory);
    }
    started
}

fn start_in(directory: &Path, memory: &RemoteMemory, path: PathChoice) -> Result<PathBuf, PagerError> {
    let socket = directory.join(SOCKET);
    let listener =
        UnixListener::bind(&socket).map_err(|reason| PagerError::Socket { path: socket.clone(), reason })?;
    let executable = std::env::current_exe().map_err(system("find this executable"))?;
    let RemoteMemory { nodes, local_bytes, copies, prefetch, log } = memory;
    let log = log.map(|level| format!("--log={}", level.name()));
    let mut launcher = Command::new(executable)
        .args(["pager", "--detach", "--root", &std::process::id().to_string()])
        .args(["--local", &local_bytes.to_string(), "--mirror", &copies.to_string()])
        .args(["--remote-memory", &nodes.to_string(), "--prefetch", &prefetch.to_string()])
        .args(["--path", &path.to_string()])
        .args(log)
        .arg("--directory")
        .arg(directory)
        .stdin(OwnedFd::from(listener))
        .stdout(Stdio::piped())
        .spawn()
        .map_err(system("start the pager"))?;
    let mut answer = String::new();
    if let Some(mut output) = launcher.stdout.take() {
        output.read_to_string(&mut answer).map_err(system("hear from the pager"))?;
    }
    launcher.wait().map_err(system("wait for the pager"))?;
    if answer.trim() == READY {
        return Ok(socket);
    }
    Err(PagerError::Refused(if answer.is_empty() {
        "the pager has ended".into()
    } else {
        answer.trim().into()
    }))
}

/// A directory that no other user can enter.
fn create_directory() -> Result<PathBuf, PagerError> {
    let parent = temporary_directory("/tmp");
    remove_abandoned(&parent);
    let mut number = 0;
    loop {
        let path = parent.join(format!("{PREFIX}{}-{number}", std::process::id()));
        match std::fs::DirBuilder::new().mode(0o700).create(&path) {
            Ok(()) => return Ok(path),
            // Another user has made it, or a process with this number has left it behind.
            Err(reason) if reason.kind() == std::io::ErrorKind::AlreadyExists && number < 1000 => number += 1,
            Err(reason) => return Err(PagerError::Socket { path, reason }),
        }
    }
}

/// Removes this user's directories of pagers that were killed: the program has ended, and nobody listens at the socket.
fn remove_abandoned(parent: &Path) {
    let user = rustix::process::geteuid().as_raw();
    for entry in std::fs::read_dir(parent).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let root = name.to_str().and_then(|name| name.strip_prefix(PREFIX)?.split('-').next()?.parse().ok());
        let Some(root) = root.and_then(Pid::from_raw) else { continue };
        let has_ended = rustix::process::test_kill_process(root) == Err(Errno::SRCH);
        let is_own = entry.metadata().is_ok_and(|metadata| metadata.is_dir() && metadata.uid() == user);
        if has_ended && is_own && refuses_connections(&entry.path().join(SOCKET)) {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

/// Whether nobody listens at a socket. Does not wait for a listener that accepts nothing.
fn refuses_connections(socket: &Path) -> bool {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let probe = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
    let connected = probe.and_then(|probe| connect(&probe, &SocketAddrUnix::new(socket)?));
    connected == Err(Errno::CONNREFUSED)
}

/// Runs the pager.
pub fn serve(options: &Options) -> Result<(), PagerError> {
    if options.detach {
        return detach();
    }
    // It ends with its last program, which needs it: also where both are told to end (`systemctl stop`, `kill 0`).
    let _ = termination::block(&[]);
    options.log.install();
    let result = prepare(options);
    let answer = match &result {
        Ok(_) => READY.to_owned(),
        Err(error) => error.to_string(),
    };
    // Who started it reads until the end of this file.
    let mut output = std::io::stdout();
    let written = writeln!(output, "{answer}").and_then(|()| output.flush());
    rustix::stdio::dup2_stdout(rustix::stdio::stderr()).map_err(system("close the standard output"))?;
    let (Ok(mut pager), Ok(())) = (result, written) else { return Ok(()) };
    pager.run();
    let _ = std::fs::remove_dir_all(&options.directory);
    Ok(())
}

/// Starts this command again, in a session of its own: signals of the terminal are for the program.
fn detach() -> Result<(), PagerError> {
    rustix::process::setsid().map_err(system("leave the terminal"))?;
    let executable = std::env::current_exe().map_err(system("find this executable"))?;
    let arguments = std::env::args_os().skip(1).filter(|argument| argument != "--detach");
    Command::new(executable).args(arguments).spawn().map(drop).map_err(system("start the pager"))
}

fn prepare(options: &Options) -> Result<Pager, PagerError> {
    let root = Pid::from_raw(options.root).ok_or(Errno::SRCH);
    let root = root.and_then(|root| rustix::process::pidfd_open(root, PidfdFlags::empty()));
    let root = root.map_err(system("watch the program"))?;
    let socket = rustix::io::fcntl_dupfd_cloexec(std::io::stdin().as_fd(), 3);
    let listener = UnixListener::from(socket.map_err(system("use the socket"))?);
    // Without the privilege it has the program's priority.
    let _ = rustix::process::setpriority_process(None, NICE);
    let status = Arc::new(SharedStatus::default());
    let store = options.remote_memory.open(options.mirror, options.path, &status)?;
    let settings = Settings {
        local_bytes: options.local,
        prefetches: options.prefetch == Prefetch::On,
        status,
        listener,
        root: Some(root),
        stop: Arc::new(AtomicBool::new(false)),
    };
    Pager::new(settings, store).map_err(system("use the socket"))
}
