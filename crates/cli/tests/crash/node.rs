//! A memory node as a process: `terrace serve`.
#![allow(dead_code, reason = "each test uses some of it")]

use std::io::{BufRead, BufReader, Read};
use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use terrace_node::{Client, ClientConfig};

use super::REGION_BYTES;

pub const DRAM_BYTES: u64 = 4 << 20;
pub const REGION: &str = "data";
/// The UDP port of instance index 0.
const FIRST_PORT: u32 = 4791;

/// A node, which is killed when this is dropped.
pub struct Node {
    process: Child,
    pub instance: u8,
}

/// The directory of a node's frames, which outlive it if it is killed.
pub struct Frames(tempfile::TempDir);

impl Frames {
    pub fn new() -> Frames {
        Frames(tempfile::tempdir_in("/dev/shm").expect("a directory in memory"))
    }
}

/// Runs `terrace recover` for a region whose node was killed.
pub fn recover(path: &Path, frames: &Frames) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_terrace"));
    command.arg("recover").arg("--frames").arg(frames.0.path()).arg(path);
    let output = command.output().expect("terrace starts");
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
}

/// A loopback address that no concurrent test run uses.
pub fn address() -> IpAddr {
    let pid = std::process::id();
    IpAddr::V4(Ipv4Addr::new(127, 64 + (pid >> 8) as u8 % 128, pid as u8, 77))
}

impl Node {
    /// Starts the node without waiting until it serves.
    pub fn spawn(path: &Path, frames: &Frames) -> Node {
        let region = format!("{REGION}={}:{REGION_BYTES}", path.display());
        Node::spawn_with(&["--region", &region, "--dram", &DRAM_BYTES.to_string()], frames)
    }

    fn spawn_with(arguments: &[&str], frames: &Frames) -> Node {
        let mut command = Command::new(env!("CARGO_BIN_EXE_terrace"));
        command.args(["serve", "--mode", "term", "--listen", &address().to_string()]).args(arguments);
        command.arg("--frames").arg(frames.0.path());
        let process = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("terrace starts");
        Node { process, instance: 0 }
    }

    /// Starts the node and waits until it serves.
    pub fn start(path: &Path, frames: &Frames) -> Node {
        Node::spawn(path, frames).wait_until_serving()
    }

    /// Starts a node with other arguments and waits until it serves.
    pub fn start_with(arguments: &[&str], frames: &Frames) -> Node {
        Node::spawn_with(arguments, frames).wait_until_serving()
    }

    /// Waits until the node serves.
    fn wait_until_serving(self) -> Node {
        let mut node = self;
        let mut line = String::new();
        let output = node.process.stdout.as_mut().expect("it is piped");
        BufReader::new(output).read_line(&mut line).expect("it prints its address");
        let port = line.split_once("UDP port ").and_then(|(_, rest)| rest.split_once(')'));
        let port = port.and_then(|(port, _)| port.parse::<u32>().ok());
        node.instance = port.and_then(|port| u8::try_from(port - FIRST_PORT).ok()).unwrap_or_else(|| {
            panic!("the node does not serve: {line:?}, {}", node.kill_and_read_log());
        });
        node
    }

    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    pub fn connect(&self) -> Client {
        connect(address(), self.instance)
    }

    pub fn is_alive(&mut self) -> bool {
        self.process.try_wait().expect("it is a child").is_none()
    }

    /// Ends the node by SIGTERM, and returns its exit status.
    #[allow(dead_code, reason = "crash tests only kill")]
    pub fn end(&mut self) -> Option<i32> {
        let pid = nix::unistd::Pid::from_raw(self.pid() as i32);
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).expect("it is a child");
        self.process.wait().expect("it is a child").code()
    }

    /// Kills the node and returns its stderr.
    pub fn kill_and_read_log(&mut self) -> String {
        self.kill();
        let mut log = String::new();
        let errors = self.process.stderr.as_mut().expect("it is piped");
        errors.read_to_string(&mut log).expect("it is text");
        log
    }

    /// Kills the node and waits until none of its threads runs.
    pub fn kill(&mut self) {
        self.process.kill().expect("it is a child");
        self.process.wait().expect("it is a child");
    }
}

pub fn connect(address: IpAddr, instance: u8) -> Client {
    Client::connect(&ClientConfig { instance, ..ClientConfig::new(address) }).expect("the node answers")
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        if std::thread::panicking() {
            eprintln!("log of the node: {}", self.kill_and_read_log());
        }
    }
}
