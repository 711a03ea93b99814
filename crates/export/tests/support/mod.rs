//! What the tests share.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::time::{Duration, Instant};

use terrace_export::{Client, ClientConfig, ExportError, OpenAccess, Rules, Server, ServerConfig};
use terrace_nic::{PathChoice, PortConfig};

pub const READ_WRITE: OpenAccess = OpenAccess::READ.union(OpenAccess::WRITE);

/// A port on the loopback interface.
pub fn port(path: PathChoice) -> PortConfig {
    PortConfig { address: Some(Ipv4Addr::LOCALHOST.into()), path, ..PortConfig::default() }
}

/// The configuration of a server of a directory, at any port.
pub fn server_config(directory: &Path, path: PathChoice) -> ServerConfig {
    let listen: SocketAddr = (Ipv4Addr::LOCALHOST, 0).into();
    ServerConfig { port: port(path), ..ServerConfig::new(directory.into(), listen) }
}

/// A server of a directory, with these rules.
pub fn serve(directory: &Path, path: PathChoice, rules: &str) -> Server {
    let rules: Rules = rules.parse().unwrap();
    Server::open(&ServerConfig { rules, ..server_config(directory, path) }).unwrap()
}

/// A client of a server.
pub fn connect(address: SocketAddr, path: PathChoice) -> Client {
    let config =
        ClientConfig { port: port(path), timeout: Duration::from_secs(20), ..ClientConfig::new(address) };
    Client::connect(&config).unwrap()
}

/// The error number of a refusal.
pub fn errno<T>(result: Result<T, ExportError>) -> i32 {
    match result {
        Ok(_) => 0,
        Err(error) => error.errno(),
    }
}

/// Waits until something holds.
pub fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !holds() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
