//! Exports of other processes, which a test kills, stops and starts again; and writers in other processes.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::Signal;
use terrace_export::{ClientConfig, ReplicaConfig, ReplicaError, ReplicatedFile, Server, ServerConfig};
use terrace_nic::PathChoice;

use crate::load::{Load, append_in_flight, make};
use crate::process::Process;
use crate::support::{port, server_config};

/// What a child process does: `serve`; or, as a writer, `create` or `open` and write, `create_and_append`, or `admit`.
const ROLE: &str = "REPLICA_TEST_ROLE";
const DIRECTORY: &str = "REPLICA_TEST_DIRECTORY";
const ADDRESSES: &str = "REPLICA_TEST_ADDRESSES";
const TRANSPORT: &str = "REPLICA_TEST_PATH";
const SEED: &str = "REPLICA_TEST_SEED";

/// The lease of the exports. A writer that is not disturbed keeps it, also on a busy machine.
pub const LEASE: Duration = Duration::from_secs(10);
/// The timeout of the replicated files. Exports that are not disturbed answer within it, also on a busy machine.
pub const TIMEOUT: Duration = Duration::from_secs(10);
/// A call that takes less than so many timeouts has not waited for so many.
pub fn less_than_timeouts(count: u32) -> Duration {
    count * TIMEOUT - Duration::from_secs(1)
}

/// The file.
pub const NAME: &str = "file";
/// Its record.
pub const RECORD: &str = ".file.terrace-replica";

/// The configuration of a replicated file.
pub fn config(addresses: &[SocketAddr], path: PathChoice) -> ReplicaConfig {
    let export = |address: &SocketAddr| ClientConfig { port: port(path), ..ClientConfig::new(*address) };
    ReplicaConfig { timeout: TIMEOUT, ..ReplicaConfig::new(addresses.iter().map(export), NAME) }
}

/// An export in a process of its own.
pub struct Host {
    pub directory: tempfile::TempDir,
    pub address: SocketAddr,
    path: PathChoice,
    process: Option<Process>,
}

impl Host {
    pub fn start(path: PathChoice) -> Host {
        let directory = tempfile::tempdir().unwrap();
        let mut host = Host { directory, address: "127.0.0.1:0".parse().unwrap(), path, process: None };
        host.go_on();
        host
    }

    /// Starts it, or continues it.
    pub fn go_on(&mut self) {
        if let Some(process) = &self.process {
            return process.signal(Signal::CONT);
        }
        let variables = [
            (ROLE, "serve".into()),
            (DIRECTORY, self.directory.path().as_os_str().to_owned()),
            (ADDRESSES, self.address.to_string().into()),
            (TRANSPORT, self.path.to_string().into()),
        ];
        let mut process = Process::start("hosts::child", &variables);
        self.address = process.expect("serving at ").parse().unwrap();
        self.process = Some(process);
    }

    /// Kills or stops it.
    pub fn end(&mut self, signal: Signal) {
        if let Some(process) = &self.process {
            process.signal(signal);
        }
        if signal == Signal::KILL {
            self.process = None;
        }
    }

    pub fn file(&self) -> PathBuf {
        self.directory.path().join(NAME)
    }

    pub fn bytes(&self) -> Vec<u8> {
        std::fs::read(self.file()).unwrap()
    }
}

/// Three exports.
pub fn hosts(path: PathChoice) -> [Host; 3] {
    [(); 3].map(|()| Host::start(path))
}

pub fn addresses(hosts: &[Host]) -> Vec<SocketAddr> {
    hosts.iter().map(|host| host.address).collect()
}

/// Starts a writer in a process of its own.
pub fn start_writer(role: &str, hosts: &[Host], path: PathChoice, seed: u64) -> Process {
    let addresses: Vec<_> = hosts.iter().map(|host| host.address.to_string()).collect();
    let variables: [(&str, OsString); 4] = [
        (ROLE, role.into()),
        (ADDRESSES, addresses.join(",").into()),
        (TRANSPORT, path.to_string().into()),
        (SEED, seed.to_string().into()),
    ];
    Process::start("hosts::child", &variables)
}

/// Not a test: what the child processes do.
#[test]
fn child() {
    let variable = |name| std::env::var(name).unwrap();
    let Ok(role) = std::env::var(ROLE) else { return };
    let addresses = variable(ADDRESSES);
    let addresses: Vec<SocketAddr> = addresses.split(',').map(|address| address.parse().unwrap()).collect();
    let path = variable(TRANSPORT).parse().unwrap();
    if role == "serve" {
        let directory = variable(DIRECTORY);
        let config = server_config(Path::new(&directory), path);
        let config = ServerConfig { listen: addresses[0], lease: LEASE, ..config };
        let server = Server::open(&config).unwrap();
        println!("serving at {}", server.address());
        std::thread::park();
    } else {
        write(&role, &config(&addresses, path), variable(SEED).parse().unwrap());
    }
}

/// Writes to a replicated file until it fails, and says after each change how many were acknowledged.
fn write(role: &str, config: &ReplicaConfig, seed: u64) {
    let mut file = match role {
        "create" | "create_and_append" => ReplicatedFile::create(config, 0o644).unwrap(),
        _ => ReplicatedFile::open(config).unwrap(),
    };
    println!("open {}", file.status().epoch);
    match role {
        "admit" => std::thread::park(),
        "create_and_append" => {
            println!("outcome {}", append_in_flight(&mut file, seed));
            std::thread::park();
        }
        _ => {}
    }
    let mut load = Load::new(seed);
    for done in 1.. {
        let change = load.next();
        match make(&mut file, &change) {
            Ok(()) => println!("done {done}"),
            Err(error) => {
                let outcome =
                    if matches!(error, ReplicaError::NoMember) { "ended".into() } else { error.to_string() };
                println!("outcome {outcome}");
                break;
            }
        }
        load.apply(&change);
    }
    // It does not end before the test has seen what it does now.
    for attempt in 0..3 {
        let written = file.write_at(0, b"zombie");
        println!("attempt {attempt} {}", if written.is_ok() { "written" } else { "refused" });
    }
    std::thread::park();
}
