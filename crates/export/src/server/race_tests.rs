//! Changes by others in moments that the tests choose.

use std::fs::{self, Permissions};
use std::net::Ipv4Addr;
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Gid, Uid, geteuid};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};
use terrace_nic::{PathChoice, PortConfig};

use super::{Server, ServerConfig, tree};
use crate::client::{Client, ClientConfig, RemoteFile};
use crate::error::ExportError;
use crate::proto::OpenAccess;

const OTHER: u32 = 12_345;

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o7777
}

/// A directory that every user may change, with a file.
fn directory(file_mode: u32) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    set_mode(directory.path(), 0o777);
    fs::write(directory.path().join("file"), "secret").unwrap();
    set_mode(&directory.path().join("file"), file_mode);
    directory
}

fn port() -> PortConfig {
    PortConfig { address: Some(Ipv4Addr::LOCALHOST.into()), path: PathChoice::Udp, ..PortConfig::default() }
}

fn serve(directory: &Path) -> Server {
    let config = ServerConfig::new(directory.into(), (Ipv4Addr::LOCALHOST, 0).into());
    let rules = "root = true".parse().unwrap();
    Server::open(&ServerConfig { port: port(), rules, ..config }).unwrap()
}

/// A client of another user, who the kernel says a thread is that connects.
fn other_client(server: &Server) -> Client {
    let config = ClientConfig { port: port(), ..ClientConfig::new(server.address()) };
    let connect = move || {
        let (user, group) = (Uid::from_raw(OTHER), Gid::from_raw(OTHER));
        set_thread_groups(&[]).unwrap();
        set_thread_res_gid(group, group, group).unwrap();
        set_thread_res_uid(user, user, user).unwrap();
        Client::connect(&config).unwrap()
    };
    std::thread::spawn(connect).join().unwrap()
}

fn is_revoked(file: &RemoteFile) -> bool {
    matches!(file.read_at(0, &mut [0; 6]), Err(ExportError::Revoked))
}

fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !holds() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_clients_own_unlink_hides_no_change_of_rights() {
    if !geteuid().is_root() {
        return;
    }
    let directory = directory(0o666);
    let server = serve(directory.path());
    let client = other_client(&server);
    let root = client.root();
    let id = client.lookup(root, "file".as_ref()).unwrap().id;
    let opened = client.open(id, OpenAccess::READ).unwrap();
    client.link(id, root, "second".as_ref()).unwrap();
    // As if the system permitted no watch: nobody reports the owner's change.
    server.state.watches.remove(id);
    server.state.watches.end_idle();
    set_mode(&directory.path().join("file"), 0o600);
    assert!(!is_revoked(&opened));
    client.unlink(root, "second".as_ref()).unwrap();
    assert!(is_revoked(&opened));
}
