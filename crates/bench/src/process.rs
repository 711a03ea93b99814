//! A server process in a control group.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::cgroup::Group;
use crate::processors::Processors;

/// The time from SIGTERM to SIGKILL.
const TERM_TIMEOUT: Duration = Duration::from_secs(10);

/// Joins the groups (all arguments after the second one, up to `--`), then executes the program on the processors that the
/// first argument lists. The program gets the signal of the second argument when its parent dies.
const JOIN: &str = "on=$1; end=$2; shift 2; while [ \"$1\" != -- ]; do echo $$ > \"$1\" || exit 97; shift; done; shift; \
    exec taskset --cpu-list \"$on\" setpriv --pdeathsig \"$end\" -- \"$@\"";

/// A running program, which is terminated when this is dropped.
#[derive(Debug)]
pub struct Process {
    child: Child,
    log: PathBuf,
    /// The group is the last field, so that the process has ended when the group is removed.
    group: Group,
    processors: Processors,
}

impl Process {
    /// Starts `program` in the group, on the server's processors; its output goes to the file `log`.
    pub fn start(
        program: &Path,
        arguments: &[OsString],
        group: Group,
        processors: &Processors,
        log: &Path,
    ) -> io::Result<Process> {
        let output = File::create(log)?;
        let child = Command::new("/bin/sh")
            // A server that is killed leaves its pages in memory.
            .args(["-c", JOIN, "sh", &processors.server(), "TERM"])
            .args(group.process_lists())
            .arg("--")
            .arg(program)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .spawn()?;
        Ok(Process { child, log: log.to_owned(), group, processors: processors.clone() })
    }

    /// Runs another program in the same group, which is charged for its memory, and waits for it. With version 1 the program
    /// joins only the memory hierarchy, so that its I/O is not limited.
    pub fn run_beside(&self, program: &Path, arguments: &[OsString]) -> io::Result<()> {
        let output = Command::new("/bin/sh")
            .args(["-c", JOIN, "sh", &self.processors.all(), "KILL"])
            .args(self.group.process_lists().take(1))
            .arg("--")
            .arg(program)
            .args(arguments)
            .stdin(Stdio::null())
            .output()?;
        match output.status.success() {
            true => Ok(()),
            false => {
                let log = String::from_utf8_lossy(&output.stderr);
                Err(io::Error::other(format!("{}: {}", output.status, error_line(&log).unwrap_or("nothing"))))
            }
        }
    }

    /// The process ID.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// The process's control group.
    pub fn group(&self) -> &Group {
        &self.group
    }

    /// The exit status and the error line of the output, if the process has ended.
    pub fn exit_status_text(&mut self) -> Option<String> {
        let status = self.child.try_wait().ok().flatten()?;
        Some(format!("the server has ended: {status}{}", self.error_line()))
    }

    fn error_line(&self) -> String {
        let text = std::fs::read_to_string(&self.log).unwrap_or_default();
        match error_line(&text) {
            Some(line) => format!(": {line}"),
            None => String::new(),
        }
    }

    /// Sends SIGTERM, and kills the process if it does not end in time.
    fn terminate(&mut self) -> io::Result<ExitStatus> {
        if let Some(status) = self.child.try_wait()? {
            return Ok(status);
        }
        if let Some(pid) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) {
            kill_process(pid, Signal::TERM)?;
        }
        let deadline = Instant::now() + TERM_TIMEOUT;
        while Instant::now() < deadline {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        self.child.kill()?;
        self.child.wait()
    }
}

/// The line of a program's output that explains its end: the last error line, else the last line.
fn error_line(text: &str) -> Option<&str> {
    let lines = || text.lines().rev().filter(|line| !line.trim().is_empty());
    let is_error = |line: &&str| ["error:", "terrace:"].iter().any(|start| line.starts_with(start));
    lines().find(is_error).or_else(|| lines().next())
}

impl Drop for Process {
    fn drop(&mut self) {
        // An error here has no consequence but that the next server may fail, which is reported.
        let _ = self.terminate();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A group, or `None` where this user may not create one.
    fn group(name: &str) -> Option<Group> {
        let group = Group::new(&format!("terrace-bench-test-{name}-{}", std::process::id()), 64 << 20, None);
        group.inspect_err(|error| eprintln!("skipped: {error}")).ok()
    }

    fn start(script: &str, group: Group, log: &Path) -> Process {
        let arguments = ["-c", script].map(OsString::from);
        Process::start(Path::new("/bin/sh"), &arguments, group, &Processors::divide(), log).unwrap()
    }

    fn wait_until(mut is_true: impl FnMut() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while !is_true() {
            assert!(Instant::now() < deadline, "not true after 20 s");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn the_program_runs_in_its_group_and_ends_when_dropped() {
        let Some(group) = group("in") else { return };
        let list = group.process_lists().next().unwrap();
        let log = tempfile::NamedTempFile::new().unwrap();
        let process = start("echo ready; exec sleep 600", group, log.path());
        wait_until(|| std::fs::read_to_string(log.path()).unwrap().contains("ready"));
        let members = std::fs::read_to_string(&list).unwrap();
        assert_eq!(members.trim(), process.id().to_string());
        drop(process);
        assert!(!list.exists(), "the group still exists");
    }

    #[test]
    fn the_memory_limit_applies() {
        let Some(group) = group("limit") else { return };
        let log = tempfile::NamedTempFile::new().unwrap();
        // A shell variable of 256 MiB does not fit into 64 MiB.
        let mut process =
            start("x=$(head -c 268435456 /dev/zero | tr '\\0' x); echo done", group, log.path());
        let mut exit = None;
        wait_until(|| {
            exit = process.exit_status_text();
            exit.is_some()
        });
        assert!(!exit.unwrap().contains("done"));
        assert!(process.group().peak_bytes().is_none_or(|peak| peak <= 64 << 20));
    }

    #[test]
    fn the_error_line_is_preferred() {
        let clap =
            "error: unexpected argument '--threads' found\n\nUsage: terrace\n\nFor more, try '--help'.\n";
        assert_eq!(error_line(clap), Some("error: unexpected argument '--threads' found"));
        assert_eq!(error_line("serving\nKilled\n\n"), Some("Killed"));
        assert_eq!(error_line("\n"), None);
    }

    #[test]
    fn the_error_line_of_the_server_is_reported() {
        let Some(group) = group("words") else { return };
        let log = tempfile::NamedTempFile::new().unwrap();
        let mut process = start("echo terrace: the budget is too large >&2; exit 3", group, log.path());
        let mut exit = None;
        wait_until(|| {
            exit = process.exit_status_text();
            exit.is_some()
        });
        let exit = exit.unwrap();
        assert!(exit.contains("exit status: 3") && exit.contains("the budget is too large"), "{exit}");
    }
}
