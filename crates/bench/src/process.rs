//! A server process in a control group.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::cgroup::Group;

/// How long a server may take to end after SIGTERM before it is killed.
const GRACE: Duration = Duration::from_secs(10);

/// Joins the groups (all arguments up to `--`), then executes the program. The program is killed when its parent dies.
const JOIN: &str = "while [ \"$1\" != -- ]; do echo $$ > \"$1\" || exit 97; shift; done; shift; \
    exec setpriv --pdeathsig KILL -- \"$@\"";

/// A running program. Dropping this ends it.
#[derive(Debug)]
pub struct Process {
    child: Child,
    log: PathBuf,
    /// The last field, so that the process has ended when the group is removed.
    group: Group,
}

impl Process {
    /// Starts `program` in the group; its output goes to the file `log`.
    pub fn start(program: &Path, arguments: &[OsString], group: Group, log: &Path) -> io::Result<Process> {
        let output = File::create(log)?;
        let child = Command::new("/bin/sh")
            .args(["-c", JOIN, "sh"])
            .args(group.process_lists())
            .arg("--")
            .arg(program)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .spawn()?;
        Ok(Process { child, log: log.to_owned(), group })
    }

    /// Runs another program to its end in the same group, which is charged for its memory. With version 1 its I/O is
    /// not limited: it joins the memory hierarchy only.
    pub fn run_beside(&self, program: &Path, arguments: &[OsString]) -> io::Result<()> {
        let output = Command::new("/bin/sh")
            .args(["-c", JOIN, "sh"])
            .args(self.group.process_lists().take(1))
            .arg("--")
            .arg(program)
            .args(arguments)
            .stdin(Stdio::null())
            .output()?;
        match output.status.success() {
            true => Ok(()),
            false => {
                let said = String::from_utf8_lossy(&output.stderr);
                Err(io::Error::other(format!(
                    "{}: {}",
                    output.status,
                    last_words(&said).unwrap_or("nothing")
                )))
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

    /// The exit status and the last line of output, once the process has ended.
    pub fn exit_status_text(&mut self) -> Option<String> {
        let status = self.child.try_wait().ok().flatten()?;
        Some(format!("the server has ended: {status}{}", self.last_words()))
    }

    fn last_words(&self) -> String {
        let text = std::fs::read_to_string(&self.log).unwrap_or_default();
        match last_words(&text) {
            Some(line) => format!(": {line}"),
            None => String::new(),
        }
    }

    /// Sends SIGTERM, waits, and kills the process if it does not end.
    fn end(&mut self) -> io::Result<ExitStatus> {
        if let Some(status) = self.child.try_wait()? {
            return Ok(status);
        }
        if let Some(pid) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) {
            kill_process(pid, Signal::TERM)?;
        }
        let deadline = Instant::now() + GRACE;
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

/// The line of a program's output that says why it ended: the last error line, else the last line.
fn last_words(text: &str) -> Option<&str> {
    let lines = || text.lines().rev().filter(|line| !line.trim().is_empty());
    let is_error = |line: &&str| ["error:", "terrace:"].iter().any(|start| line.starts_with(start));
    lines().find(is_error).or_else(|| lines().next())
}

impl Drop for Process {
    fn drop(&mut self) {
        // Ignored: the next server will report what it lacks.
        let _ = self.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A group, or `None` where this user may not create one.
    fn group(name: &str) -> Option<Group> {
        let made = Group::new(&format!("terrace-bench-test-{name}-{}", std::process::id()), 64 << 20, None);
        made.inspect_err(|error| eprintln!("skipped: {error}")).ok()
    }

    fn start(script: &str, group: Group, log: &Path) -> Process {
        let arguments = ["-c", script].map(OsString::from);
        Process::start(Path::new("/bin/sh"), &arguments, group, log).unwrap()
    }

    fn wait_for(mut holds: impl FnMut() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while !holds() {
            assert!(Instant::now() < deadline, "it never came to that");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn the_program_runs_in_its_group_and_ends_when_dropped() {
        let Some(group) = group("in") else { return };
        let list = group.process_lists().next().unwrap();
        let log = tempfile::NamedTempFile::new().unwrap();
        let process = start("echo ready; exec sleep 600", group, log.path());
        wait_for(|| std::fs::read_to_string(log.path()).unwrap().contains("ready"));
        let members = std::fs::read_to_string(&list).unwrap();
        assert_eq!(members.trim(), process.id().to_string());
        drop(process);
        assert!(!list.exists(), "the group is still there");
    }

    #[test]
    fn the_limit_is_real() {
        let Some(group) = group("limit") else { return };
        let log = tempfile::NamedTempFile::new().unwrap();
        // A shell variable of 256 MiB does not fit into 64 MiB.
        let mut process =
            start("x=$(head -c 268435456 /dev/zero | tr '\\0' x); echo done", group, log.path());
        let mut ended = None;
        wait_for(|| {
            ended = process.exit_status_text();
            ended.is_some()
        });
        assert!(!ended.unwrap().contains("done"));
        assert!(process.group().peak_bytes().is_none_or(|peak| peak <= 64 << 20));
    }

    #[test]
    fn the_line_with_the_error_says_most() {
        let clap =
            "error: unexpected argument '--threads' found\n\nUsage: terrace\n\nFor more, try '--help'.\n";
        assert_eq!(last_words(clap), Some("error: unexpected argument '--threads' found"));
        assert_eq!(last_words("serving\nKilled\n\n"), Some("Killed"));
        assert_eq!(last_words("\n"), None);
    }

    #[test]
    fn what_the_server_said_last_is_reported() {
        let Some(group) = group("words") else { return };
        let log = tempfile::NamedTempFile::new().unwrap();
        let mut process = start("echo terrace: the budget is too large >&2; exit 3", group, log.path());
        let mut ended = None;
        wait_for(|| {
            ended = process.exit_status_text();
            ended.is_some()
        });
        let ended = ended.unwrap();
        assert!(ended.contains("exit status: 3") && ended.contains("the budget is too large"), "{ended}");
    }
}
