//! A server whose fault plan fails its storage: clients get errors, and the server continues to serve.

mod common;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use common::*;
use terrace_nic::{PortConfig, WcStatus};
use terrace_node::*;

/// A server with a fault plan.
fn node_under(name: &str, mode: ServeMode, plan: &str) -> (Server, PathBuf) {
    let path = std::env::temp_dir().join(format!("terrace-node-{}-{name}-{mode}", std::process::id()));
    let plan_path = path.with_extension("toml");
    std::fs::write(&plan_path, plan).expect("a file");
    let region = RegionConfig { name: "data".into(), path: path.clone(), size: Some(8 * MIB) };
    let port =
        PortConfig { address: Some(LOOPBACK), fault_plan: Some(plan_path.clone()), ..PortConfig::default() };
    let config = ServerConfig {
        regions: vec![region],
        dram_bytes: MIB,
        mode,
        threads: 1,
        port,
        keeps_frames: false,
        frames_directory: None,
    };
    let server = Server::open(&config).expect("a server");
    std::fs::remove_file(plan_path).expect("the plan exists");
    (server, path)
}

fn client_of(server: &Server) -> Client {
    let instance = server.device().snapshot().slot;
    Client::connect(&ClientConfig { instance, ..ClientConfig::new(LOOPBACK) }).expect("a client")
}

/// The status of a read of one page.
fn read(client: &Client, offset: u64) -> WcStatus {
    let region = client.open("data").expect("the region");
    let buffer = client.buffer(4096).expect("a buffer");
    region.read(offset, &buffer, 0, 4096, 1).expect("begun");
    let (mut done, started) = (Vec::new(), Instant::now());
    while done.is_empty() {
        client.poll(&mut done).expect("a connection");
        assert!(started.elapsed() < Duration::from_secs(20), "the read does not complete");
    }
    done[0].status
}

#[test]
fn a_failed_read_completes_in_error_and_the_next_client_is_served() {
    for mode in [ServeMode::Wait, ServeMode::Term, ServeMode::RpcTiering] {
        let plan = "[[fault]]\nkind = \"failing-storage\"\noperation = \"read\"\nfor_operations = 2";
        let (server, path) = node_under("failing", mode, plan);
        let statuses = [0; 3].map(|_| read(&client_of(&server), 4 * MIB));
        let expected = [WcStatus::RemoteOperation, WcStatus::RemoteOperation, WcStatus::Success];
        assert_eq!(statuses, expected, "{mode}");
        let injected = server.device().snapshot().injected;
        assert_eq!(injected["storage_failed"], 2, "{mode}");
        drop(server);
        let _ = std::fs::remove_file(path);
    }
}

#[test]
fn slow_storage_delays_clients_and_metrics_count_it() {
    for mode in [ServeMode::Wait, ServeMode::Term] {
        let plan = "[[fault]]\nkind = \"slow-storage\"\noperation = \"read\"\ndelay_us_min = 100000";
        let (server, path) = node_under("slow", mode, plan);
        let metrics = Metrics::serve((LOOPBACK, 0).into(), &server).expect("a port");
        let client = client_of(&server);
        let started = Instant::now();
        assert_eq!(read(&client, 4 * MIB), WcStatus::Success);
        assert!(started.elapsed() >= Duration::from_millis(100), "{mode}");
        let text = scrape(&metrics);
        let line =
            text.lines().find(|line| line.starts_with("terrace_injected_total{fault=\"storage_slowed\"}"));
        assert!(line.is_some_and(|line| !line.ends_with(" 0")), "{mode}: {line:?}");
        drop((client, metrics, server));
        let _ = std::fs::remove_file(path);
    }
}

fn scrape(metrics: &Metrics) -> String {
    use std::io::{Read, Write};
    let mut stream = std::net::TcpStream::connect(metrics.addr().expect("an address")).expect("connected");
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").expect("written");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("read");
    text
}
