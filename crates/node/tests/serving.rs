//! A server and its clients on one machine: reads return the written data, whichever tier it is in.

mod common;

use std::net::IpAddr;
use std::time::{Duration, Instant};

use common::*;
use terrace_nic::{PathChoice, PortConfig};
use terrace_node::*;

fn write_and_read_back(mode: ServeMode, dram_bytes: u64) {
    for transport in [PathChoice::Udp, PathChoice::Local] {
        write_and_read_back_over(transport, mode, dram_bytes);
    }
}

fn write_and_read_back_over(transport: PathChoice, mode: ServeMode, dram_bytes: u64) {
    let node = Node::over(transport, &mode.to_string(), mode, 8 * MIB, dram_bytes);
    let client = node.client();
    let region = client.open("data").expect("the region");
    assert_eq!(region.len(), 8 * MIB);
    let buffer = client.buffer(3 << 20).expect("a buffer");
    let accesses: [(u64, u32); 7] = [
        (0, 4096),
        (MIB - 100, 300),
        (3 * MIB + 17, 5000),
        (5 * MIB - 1, 1),
        (6 * MIB, 1 << 20),
        // More than one fetch, even if all of it is present.
        (5 * MIB + 100, 5 << 19),
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
fn a_server_that_is_busy_is_not_one_that_does_not_answer() {
    // Addresses of their own: other tests have the ports of the server's.
    let [own, other] = [1, 2].map(|number| IpAddr::from([127, 77, 3, number]));
    let port = |address| PortConfig { address: Some(address), slot: Some(1), ..PortConfig::default() };
    let node = Node::new("busy", ServeMode::Wait, MIB, MIB);
    let instance = node.server.device().snapshot().slot;
    let config = ClientConfig { instance, port: port(own), ..ClientConfig::new(LOOPBACK) };
    let client = Client::connect(&config).expect("a client");
    // A client has no regions, and answers as a server does that has none yet.
    let of_client = ClientConfig { instance: 1, port: port(other), ..ClientConfig::new(own) };
    let error = Client::connect(&of_client).err().expect("no server");
    assert!(error.to_string().contains("it is busy"), "{error}");
    // One that was busy and is gone does not answer: the last attempt is more than a second after the first.
    let connecting = std::thread::spawn(move || Client::connect(&of_client).err().expect("no server"));
    std::thread::sleep(Duration::from_millis(300));
    drop(client);
    let error = connecting.join().expect("no panic");
    assert!(matches!(error, ClientError::Silent(_)), "{error}");
}

#[test]
fn the_nic_fetches_absent_pages() {
    write_and_read_back(ServeMode::Wait, 2 * MIB);
}

#[test]
fn modelled_page_faults_map_absent_pages() {
    write_and_read_back(ServeMode::Odp, 2 * MIB);
}

#[test]
fn all_pages_are_locked() {
    write_and_read_back(ServeMode::Pin, 8 * MIB);
}

#[test]
fn clients_detect_and_fetch_absent_pages() {
    write_and_read_back(ServeMode::Term, 2 * MIB);
}

#[test]
fn clients_access_pages_by_rpc_of_every_kind() {
    for mode in [ServeMode::Rpc, ServeMode::RpcBuffer, ServeMode::RpcDirect, ServeMode::RpcTiering] {
        write_and_read_back(mode, 2 * MIB);
    }
    write_and_read_back(ServeMode::RpcTieringPromote, 2 * MIB);
}

#[test]
fn unknown_names_are_refused_and_unused_instances_are_silent() {
    let node = Node::new("names", ServeMode::Wait, MIB, MIB);
    let client = node.client();
    assert!(matches!(client.open("nothing"), Err(ClientError::NoRegion(_))));
    assert!(matches!(client.open(""), Err(ClientError::NoRegion(_))));
    let unused = Client::connect(&ClientConfig { instance: 250, ..ClientConfig::new(LOOPBACK) });
    assert!(matches!(unused, Err(ClientError::Silent(_))), "{:?}", unused.err());
}

#[test]
fn addresses_are_requested_without_blocking_and_answered_in_order() {
    let node = Node::new("addresses", ServeMode::Term, MIB, MIB);
    assert!(matches!(node.client().request_address("data"), Err(ClientError::Full)), "none by default");
    let instance = node.server.device().snapshot().slot;
    let config = ClientConfig { instance, address_requests: u16::MAX, ..ClientConfig::new(LOOPBACK) };
    let client = Client::connect(&config).expect("a client");
    let region = client.open("data").expect("the region");
    assert!(matches!(client.request_address(""), Err(ClientError::NoRegion(_))));
    let names = ["data", "nothing"].into_iter().cycle().take(ADDRESS_REQUESTS_MAX.into());
    names.clone().for_each(|name| client.request_address(name).expect("fewer than the maximum"));
    assert!(matches!(client.request_address("data"), Err(ClientError::Full)));
    let (mut done, started) = (Vec::new(), Instant::now());
    for name in names {
        let answer = loop {
            client.poll(&mut done).expect("a healthy connection");
            if let Some(answer) = client.take_address() {
                break answer;
            }
            assert!(started.elapsed() < Duration::from_secs(20), "no answer");
        };
        match name {
            "data" => assert_eq!(answer.expect("the region's address"), region.address()),
            _ => assert!(matches!(answer, Err(ClientError::Refused(_))), "{answer:?}"),
        }
    }
    assert!(client.take_address().is_none());
    client.request_address("data").expect("all are answered");
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
