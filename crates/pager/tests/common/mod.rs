//! A pager, and unmodified C programs that run with it.
#![allow(dead_code)] // Every test file uses some of the helpers.

use std::io::{PipeReader, PipeWriter};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::fs::OFlags;
use terrace_pager::{Pager, PagerStatus, Settings, SharedStatus, Statistics};
use terrace_vm::{BackingStore, FileStore};

pub const MIB: u64 = 1 << 20;

/// A pager in a thread of the test.
pub struct TestPager {
    folder: tempfile::TempDir,
    stop: Arc<AtomicBool>,
    status: Arc<SharedStatus>,
    thread: JoinHandle<Statistics>,
}

impl TestPager {
    pub fn start(local_bytes: u64, far_bytes: u64) -> TestPager {
        let store = FileStore::new(tempfile::tempfile().unwrap(), far_bytes / 4096, 256).unwrap();
        TestPager::over(local_bytes, Box::new(store))
    }

    pub fn over(local_bytes: u64, store: Box<dyn BackingStore>) -> TestPager {
        TestPager::with(local_bytes, true, store)
    }

    pub fn with(local_bytes: u64, prefetches: bool, store: Box<dyn BackingStore>) -> TestPager {
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(folder.path().join("socket")).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let status = Arc::new(SharedStatus::default());
        let settings = Settings {
            local_bytes,
            prefetches,
            status: status.clone(),
            listener,
            root: None,
            stop: stop.clone(),
        };
        let thread = std::thread::spawn(move || Pager::new(settings, store).unwrap().run());
        TestPager { folder, stop, status, thread }
    }

    pub fn command(&self, program: impl AsRef<Path>) -> Command {
        preload(program, &self.folder.path().join("socket"))
    }

    /// A connection as of a program that joins.
    pub fn connect(&self) -> UnixStream {
        UnixStream::connect(self.folder.path().join("socket")).unwrap()
    }

    /// The state as of some milliseconds ago.
    pub fn status(&self) -> PagerStatus {
        self.status.get()
    }

    /// Ends the pager, after the processes.
    pub fn finish(self) -> Statistics {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap()
    }
}

/// A program that joins the pager of a socket.
pub fn preload(program: impl AsRef<Path>, socket: &Path) -> Command {
    let mut command = Command::new(program.as_ref());
    command.env("LD_PRELOAD", library()).env("TERRACE_PAGER", socket);
    command
}

/// The library that is preloaded, which Cargo builds beside the test.
fn library() -> PathBuf {
    let folder = std::env::current_exe().unwrap().parent().unwrap().to_owned();
    let library = folder.join("libterrace_pager_preload.so");
    assert!(library.exists(), "{} is built with the tests", library.display());
    library
}

/// Compiles a program of `tests/programs`.
pub fn compile(name: &str) -> PathBuf {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs").join(format!("{name}.c"));
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let program =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}-{number}", std::process::id()));
    let compiled = Command::new("gcc")
        .args(["-O2", "-Wall", "-D_GNU_SOURCE", "-pthread", "-o"])
        .args([&program, &source])
        .status()
        .unwrap();
    assert!(compiled.success());
    program
}

/// A pipe without room.
pub fn full_pipe() -> (PipeReader, PipeWriter) {
    let (reader, writer) = std::io::pipe().unwrap();
    let blocking = rustix::fs::fcntl_getfl(&writer).unwrap();
    rustix::fs::fcntl_setfl(&writer, blocking | OFlags::NONBLOCK).unwrap();
    while rustix::io::write(&writer, &[0; 4096]).is_ok() {}
    rustix::fs::fcntl_setfl(&writer, blocking).unwrap();
    (reader, writer)
}

/// The private memory of a process, in bytes.
pub fn private_bytes(pid: u32) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
    line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1024)
}

/// Waits for the end of a process, and samples its private memory. Returns its output and the maximum.
pub fn sample(mut child: Child, limit: Duration) -> (Output, u64) {
    let (begin, mut most) = (Instant::now(), 0);
    while child.try_wait().unwrap().is_none() {
        most = most.max(private_bytes(child.id()).unwrap_or(0));
        if begin.elapsed() > limit {
            child.kill().unwrap();
            panic!("the program takes longer than {limit:?}: {:?}", child.wait_with_output());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    (child.wait_with_output().unwrap(), most)
}

/// Runs a program that must succeed, and checks what it prints. Returns the most private memory that it had.
pub fn run(command: &mut Command, expected: &str) -> u64 {
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let (output, most) = sample(child, Duration::from_secs(120));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{:?} {errors} {}",
        output.status,
        String::from_utf8_lossy(&output.stdout)
    );
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), expected, "{errors}");
    assert_eq!(errors, "");
    most
}
