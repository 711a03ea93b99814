//! A server and its clients on one machine: what is written is read, wherever it is meanwhile.

use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use terrace_nic::{PortConfig, WcStatus};
use terrace_node::*;

const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
const MIB: u64 = 1 << 20;

struct Node {
    server: Server,
    path: PathBuf,
}

impl Node {
    fn new(name: &str, mode: ServeMode, size: u64, dram_bytes: u64) -> Node {
        let path = std::env::temp_dir().join(format!("terrace-node-{}-{name}", std::process::id()));
        let region = RegionConfig { name: "data".into(), path: path.clone(), size: Some(size) };
        let config = ServerConfig {
            regions: vec![region],
            dram_bytes,
            mode,
            port: PortConfig { address: Some(LOOPBACK), ..PortConfig::default() },
            period: Some(Duration::from_millis(10)),
        };
        let server = Server::open(&config).expect("a server");
        Node { server, path }
    }

    fn client(&self) -> Client {
        let slot = self.server.device().snapshot().slot;
        Client::connect(&ClientConfig { slot, ..ClientConfig::new(LOOPBACK) }).expect("a client")
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

fn wait_for(client: &Client, count: usize) -> Vec<Completion> {
    let (mut done, started) = (Vec::new(), Instant::now());
    while done.len() < count {
        client.poll(&mut done).expect("a healthy connection");
        assert!(started.elapsed() < Duration::from_secs(20), "{} of {count}: {done:?}", done.len());
    }
    assert!(done.iter().all(|completion| completion.status == WcStatus::Success), "{done:?}");
    done
}

/// Content that tells where it belongs.
fn content(offset: u64, len: usize, version: u64) -> Vec<u8> {
    (offset..offset + len as u64)
        .map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(version * 77) >> 32) as u8)
        .collect()
}

fn write_and_read_back(mode: ServeMode, dram_bytes: u64) {
    let node = Node::new(&mode.to_string(), mode, 8 * MIB, dram_bytes);
    let client = node.client();
    let region = client.open("data").expect("the region");
    assert_eq!(region.len(), 8 * MIB);
    let buffer = client.buffer(1 << 20).expect("a buffer");
    let accesses: [(u64, u32); 6] = [
        (0, 4096),
        (MIB - 100, 300),
        (3 * MIB + 17, 5000),
        (5 * MIB - 1, 1),
        (6 * MIB, 1 << 20),
        (8 * MIB - 8, 8),
    ];
    for version in 1..3 {
        for (tag, &(offset, len)) in accesses.iter().enumerate() {
            buffer.write(0, &content(offset, len as usize, version)).expect("within");
            region.write(offset, &buffer, 0, len, tag as u64).expect("begun");
            assert_eq!(wait_for(&client, 1)[0].tag, tag as u64);
            buffer.write(0, &vec![0; len as usize]).expect("within");
            region.read(offset, &buffer, 0, len, 7).expect("begun");
            wait_for(&client, 1);
            let mut read = vec![0; len as usize];
            buffer.read(0, &mut read).expect("within");
            assert!(
                read == content(offset, len as usize, version),
                "{len} bytes at {offset}, version {version}"
            );
        }
        region.commit(0, 1 << 20, 9).expect("begun");
        wait_for(&client, 1);
    }
}

#[test]
fn what_is_written_is_read_when_the_nic_fetches() {
    write_and_read_back(ServeMode::Wait, 2 * MIB);
}

#[test]
fn what_is_written_is_read_from_locked_memory() {
    write_and_read_back(ServeMode::Pin, 8 * MIB);
}

#[test]
fn what_is_written_is_read_when_clients_detect_what_is_absent() {
    write_and_read_back(ServeMode::Term, 2 * MIB);
}

#[test]
fn what_is_written_is_read_by_rpc_of_every_kind() {
    for mode in [ServeMode::Rpc, ServeMode::RpcBuffer, ServeMode::RpcDirect, ServeMode::RpcTiering] {
        write_and_read_back(mode, 2 * MIB);
    }
    write_and_read_back(ServeMode::RpcTieringPromote, 2 * MIB);
}

#[test]
fn names_that_do_not_exist_are_refused_and_nobody_answers_elsewhere() {
    let node = Node::new("names", ServeMode::Wait, MIB, MIB);
    let client = node.client();
    assert!(matches!(client.open("nothing"), Err(ClientError::NoRegion(_))));
    assert!(matches!(client.open(""), Err(ClientError::NoRegion(_))));
    let nobody = Client::connect(&ClientConfig { slot: 250, ..ClientConfig::new(LOOPBACK) });
    assert!(matches!(nobody, Err(ClientError::Silent(_))), "{:?}", nobody.err());
}

#[test]
fn accesses_beyond_the_end_are_refused_before_they_begin() {
    let node = Node::new("bounds", ServeMode::Wait, MIB, MIB);
    let client = node.client();
    let region = client.open("data").expect("the region");
    let buffer = client.buffer(100).expect("a buffer");
    assert!(matches!(region.read(MIB, &buffer, 0, 1, 0), Err(ClientError::OutOfRange { .. })));
    assert!(matches!(region.read(u64::MAX, &buffer, 0, 2, 0), Err(ClientError::OutOfRange { .. })));
    assert!(matches!(region.write(0, &buffer, 99, 2, 0), Err(ClientError::OutOfRange { .. })));
}
