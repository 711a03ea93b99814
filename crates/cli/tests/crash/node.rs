//! A memory node as a process: `terrace serve`.
#![allow(dead_code, reason = "not every test uses everything")]

use std::io::{BufRead, BufReader, Read};
use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use terrace_node::{Client, ClientConfig};

use super::REGION_BYTES;

pub const DRAM_BYTES: u64 = 4 << 20;
pub const REGION: &str = "data";
/// The UDP port of slot 0.
const FIRST_PORT: u32 = 4791;

/// A node. Killed when dropped.
pub struct Node {
    process: Child,
    pub slot: u8,
}

/// A loopback address that no other test run uses at the same time: a host of its own.
pub fn address() -> IpAddr {
    let pid = std::process::id();
    IpAddr::V4(Ipv4Addr::new(127, 64 + (pid >> 8) as u8 % 128, pid as u8, 77))
}

impl Node {
    /// Starts the node without waiting until it serves.
    pub fn spawn(path: &Path) -> Node {
        let region = format!("{REGION}={}:{REGION_BYTES}", path.display());
        Node::spawn_with(&["--period", "5", "--region", &region, "--dram", &DRAM_BYTES.to_string()])
    }

    fn spawn_with(arguments: &[&str]) -> Node {
        let mut command = Command::new(env!("CARGO_BIN_EXE_terrace"));
        command.args(["serve", "--mode", "term", "--listen", &address().to_string()]).args(arguments);
        let process = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("terrace starts");
        Node { process, slot: 0 }
    }

    /// Starts the node and waits until it serves.
    pub fn start(path: &Path) -> Node {
        Node::spawn(path).serving()
    }

    /// Starts a node with other arguments and waits until it serves.
    pub fn start_with(arguments: &[&str]) -> Node {
        Node::spawn_with(arguments).serving()
    }

    /// Waits until the node serves.
    fn serving(self) -> Node {
        let mut node = self;
        let mut line = String::new();
        let output = node.process.stdout.as_mut().expect("it is piped");
        BufReader::new(output).read_line(&mut line).expect("it says where it serves");
        let port = line.split_once("UDP port ").and_then(|(_, rest)| rest.split_once(')'));
        let port = port.and_then(|(port, _)| port.parse::<u32>().ok());
        node.slot = port.and_then(|port| u8::try_from(port - FIRST_PORT).ok()).unwrap_or_else(|| {
            panic!("the node does not serve: {line:?}, {}", node.complaints());
        });
        node
    }

    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    pub fn connect(&self) -> Client {
        connect(address(), self.slot)
    }

    pub fn is_alive(&mut self) -> bool {
        self.process.try_wait().expect("it is a child").is_none()
    }

    /// Kills the node and returns its stderr.
    pub fn complaints(&mut self) -> String {
        self.kill();
        let mut said = String::new();
        let errors = self.process.stderr.as_mut().expect("it is piped");
        errors.read_to_string(&mut said).expect("it is text");
        said
    }

    /// Sends SIGKILL; afterwards none of its threads runs.
    pub fn kill(&mut self) {
        self.process.kill().expect("it is a child");
        self.process.wait().expect("it is a child");
    }
}

pub fn connect(address: IpAddr, slot: u8) -> Client {
    Client::connect(&ClientConfig { instance: slot, ..ClientConfig::new(address) }).expect("the node answers")
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        if std::thread::panicking() {
            eprintln!("the node has said: {}", self.complaints());
        }
    }
}
