//! Helpers of the tests: a server with its file, and clients of it.
#![allow(dead_code)] // Every test file uses some of the helpers.

use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use terrace_nic::{PathChoice, PortConfig, WcStatus};
use terrace_node::*;

pub const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
pub const MIB: u64 = 1 << 20;

pub struct Node {
    pub server: Server,
    pub path: PathBuf,
    transport: PathChoice,
}

impl Node {
    /// A server whose clients use UDP.
    pub fn new(name: &str, mode: ServeMode, size: u64, dram_bytes: u64) -> Node {
        Node::over(PathChoice::Udp, name, mode, size, dram_bytes)
    }

    /// A server whose clients use this transport.
    pub fn over(transport: PathChoice, name: &str, mode: ServeMode, size: u64, dram_bytes: u64) -> Node {
        let path =
            std::env::temp_dir().join(format!("terrace-node-{}-{name}-{transport}", std::process::id()));
        let region = RegionConfig { name: "data".into(), path: path.clone(), size: Some(size) };
        let config = ServerConfig {
            regions: vec![region],
            dram_bytes,
            mode,
            threads: if mode == ServeMode::Rpc { 2 } else { 1 },
            port: PortConfig { address: Some(LOOPBACK), path: transport, ..PortConfig::default() },
            keeps_frames: false,
            frames_directory: None,
        };
        let server = Server::open(&config).expect("a server");
        Node { server, path, transport }
    }

    pub fn client(&self) -> Client {
        let instance = self.server.device().snapshot().slot;
        let config = ClientConfig::new(LOOPBACK);
        let port = PortConfig { path: self.transport, ..config.port };
        Client::connect(&ClientConfig { instance, port, ..config }).expect("a client")
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

pub fn wait_for(client: &Client, count: usize) -> Vec<Completion> {
    let (mut done, started) = (Vec::new(), Instant::now());
    while done.len() < count {
        client.poll(&mut done).expect("a healthy connection");
        assert!(started.elapsed() < Duration::from_secs(60), "{} of {count}: {done:?}", done.len());
    }
    assert!(done.iter().all(|completion| completion.status == WcStatus::Success), "{done:?}");
    done
}

/// Content that depends on the offset and the version.
pub fn content(offset: u64, len: usize, version: u64) -> Vec<u8> {
    (offset..offset + len as u64)
        .map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(version * 77) >> 32) as u8)
        .collect()
}
