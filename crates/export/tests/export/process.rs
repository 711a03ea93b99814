//! Child processes of a test: the test's program once more, which runs one test that is told what to do by variables.

use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use crate::support::wait_until;

/// The time in which a child says something.
const LINE_TIME: Duration = Duration::from_secs(60);

/// A child process, which is killed at the end.
pub struct Process {
    child: Child,
    /// The lines of its output, of which the last one may be cut.
    output: Receiver<String>,
}

impl Process {
    /// Starts one with these variables.
    pub fn start(test: &str, variables: &[(&str, OsString)]) -> Process {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture"])
            .envs(variables.iter().cloned())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap());
        let (sender, output) = channel();
        std::thread::spawn(move || {
            let mut line = String::new();
            while lines.read_line(&mut line).is_ok_and(|count| count > 0) {
                if sender.send(std::mem::take(&mut line)).is_err() {
                    return;
                }
            }
        });
        Process { child, output }
    }

    /// The next line of its output; `None` if it has ended.
    pub fn next_line(&mut self) -> Option<String> {
        match self.output.recv_timeout(LINE_TIME) {
            Ok(line) => Some(line),
            Err(RecvTimeoutError::Disconnected) => None,
            Err(RecvTimeoutError::Timeout) => panic!("the child says nothing"),
        }
    }

    /// Waits for a line that begins so, and returns the rest.
    pub fn expect(&mut self, start: &str) -> String {
        loop {
            let line = self.next_line().expect("the child has ended");
            // The harness of the tests prints, too, without a newline.
            if let Some((_, rest)) = line.split_once(start) {
                return rest.trim().into();
            }
        }
    }

    /// Sends a signal. A process that is stopped has stopped when this returns.
    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
        if signal == Signal::STOP {
            // Until then it may still answer.
            let path = format!("/proc/{}/stat", self.child.id());
            wait_until("the process is stopped", || std::fs::read_to_string(&path).unwrap().contains(") T "));
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
