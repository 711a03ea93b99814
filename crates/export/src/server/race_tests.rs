//! Changes by others in moments that the tests choose.

use std::fs::{self, Permissions};
use std::net::Ipv4Addr;
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use rustix::process::{Gid, Uid, geteuid};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};
use terrace_nic::{PathChoice, PortConfig};

use super::connection::Connection;
use super::workers::Job;
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

/// A client of the server's user that has the file open, and its connection.
fn open_file(server: &Server, access: OpenAccess) -> (Client, RemoteFile, Arc<Connection>) {
    let config = ClientConfig { port: port(), ..ClientConfig::new(server.address()) };
    let client = Client::connect(&config).unwrap();
    let id = client.lookup(client.root(), "file".as_ref()).unwrap().id;
    let file = client.open(id, access).unwrap();
    let connection = server.state.connections().pop().unwrap();
    (client, file, connection)
}

#[test]
fn a_request_takes_no_effect_after_its_opening_was_revoked() {
    let directory = directory(0o644);
    let server = serve(directory.path());
    let (_client, file, connection) = open_file(&server, OpenAccess::READ | OpenAccess::WRITE);
    let open = connection.opens.lock().values().next().cloned().unwrap();
    // A request that runs delays the revocation.
    let changing = open.begin_change().unwrap();
    assert!(open.revoke_within(Duration::from_millis(10)).is_err());
    // The key is not valid any more.
    assert!(file.read_at(0, &mut [0; 6]).is_err());
    drop(changing);
    open.revoke_within(Duration::ZERO).unwrap();
    // As if the requests had found the opening before it was revoked.
    for refused in [file.write_by_message(0, b"public"), file.truncate(0), file.punch(0, 1), file.grow(10)] {
        assert!(matches!(refused, Err(ExportError::Revoked)), "{refused:?}");
    }
    assert_eq!(fs::read(directory.path().join("file")).unwrap(), b"secret");
}

#[test]
fn a_connection_that_has_ended_keeps_no_key_whose_right_is_lost() {
    let directory = directory(0o644);
    let server = serve(directory.path());
    let (_client, file, connection) = open_file(&server, OpenAccess::READ);
    let id = file.id();
    // As if all workers waited for a disk: none closes the connection.
    server.state.work.close();
    server.state.end(&connection, "a test ends it");
    fs::remove_file(directory.path().join("file")).unwrap();
    server.state.check_rights(id);
    assert!(connection.opens.lock().is_empty());
    let is_open = || server.state.end_earlier(connection.client, &connection.identity, &connection.gid);
    assert!(is_open());
    server.state.carry_out(Job::End(connection.clone()));
    assert!(!is_open());
}

#[test]
fn a_client_has_no_further_connection_while_a_thread_ends_its_earlier_one() {
    let directory = directory(0o644);
    let server = serve(directory.path());
    let config = ClientConfig { port: port(), ..ClientConfig::new(server.address()) };
    let _client = Client::connect(&config).unwrap();
    let connection = server.state.connections().pop().unwrap();
    // As if another thread had begun to end it, and came no further.
    assert!(connection.begin_end());
    assert!(server.state.end_earlier(connection.client, &connection.identity, &connection.gid));
}

#[test]
fn a_change_of_rights_while_a_file_is_created_takes_effect() {
    if !geteuid().is_root() {
        return;
    }
    let directory = directory(0o644);
    let path = directory.path().join("file");
    let server = serve(directory.path());
    let client = other_client(&server);
    let rounds = 300;
    let barrier = Barrier::new(2);
    std::thread::scope(|scope| {
        let owner = scope.spawn(|| {
            for round in 0..rounds {
                barrier.wait();
                // At different moments of the request.
                let began = Instant::now();
                while began.elapsed() < Duration::from_micros(round * 3) {
                    std::hint::spin_loop();
                }
                set_mode(&path, 0o600);
                barrier.wait();
            }
        });
        for _ in 0..rounds {
            set_mode(&path, 0o644);
            barrier.wait();
            let opened = client.create(client.root(), "file".as_ref(), 0o644, OpenAccess::READ, false);
            barrier.wait();
            if let Ok(opened) = opened {
                wait_until("the key is revoked", || is_revoked(&opened));
            }
        }
        owner.join().unwrap();
    });
}

#[test]
fn clearing_set_user_id_bits_undoes_no_change_of_the_mode() {
    if !geteuid().is_root() {
        return;
    }
    let directory = directory(0o777);
    let path = directory.path().join("file");
    let root = tree::open_root(directory.path()).unwrap();
    let file = tree::lookup(root.as_fd(), b"file").unwrap();
    let (count, rounds) = (AtomicU64::new(0), 20_000);
    std::thread::scope(|scope| {
        let owner = scope.spawn(|| {
            for _ in 0..rounds {
                set_mode(&path, 0o6777);
                set_mode(&path, 0o600);
                // A call that begins after that has ended.
                let done = count.load(Ordering::SeqCst) + 2;
                while count.load(Ordering::SeqCst) < done {
                    std::hint::spin_loop();
                }
                assert_eq!(mode(&path), 0o600);
            }
        });
        while !owner.is_finished() {
            tree::drop_privileges(file.as_fd()).unwrap();
            count.fetch_add(1, Ordering::SeqCst);
        }
        owner.join().unwrap();
    });
    // A group's bit without the group's right to execute is mandatory locking, and not cleared by a write either.
    for (before, after) in [(0o6777, 0o777), (0o4700, 0o700), (0o2710, 0o710), (0o2700, 0o2700)] {
        set_mode(&path, before);
        tree::drop_privileges(file.as_fd()).unwrap();
        assert_eq!(mode(&path), after);
    }
}

/// A program that runs with `CAP_NET_RAW`, as `setcap cap_net_raw+ep` makes it.
#[test]
fn a_client_that_writes_clears_capabilities() {
    const NAME: &str = "security.capability";
    const NET_RAW: [u32; 5] = [0x0200_0001, 1 << 13, 0, 0, 0];
    let directory = directory(0o666);
    let path = directory.path().join("file");
    let value: Vec<u8> = NET_RAW.iter().flat_map(|word| word.to_le_bytes()).collect();
    if !geteuid().is_root()
        || rustix::fs::setxattr(&path, NAME, &value, rustix::fs::XattrFlags::empty()).is_err()
    {
        println!("no file gets a capability here: not tested");
        return;
    }
    let server = serve(directory.path());
    let client = other_client(&server);
    let id = client.lookup(client.root(), "file".as_ref()).unwrap().id;
    client.open(id, OpenAccess::READ).unwrap();
    let capabilities = || rustix::fs::getxattr(&path, NAME, &mut [0; 64]);
    assert_eq!(capabilities(), Ok(value.len()));
    client.open(id, OpenAccess::READ | OpenAccess::WRITE).unwrap();
    assert_eq!(capabilities(), Err(rustix::io::Errno::NODATA));
    assert_eq!(mode(&path), 0o666);
}

#[test]
fn a_request_of_an_ended_connection_takes_no_effect_after_a_later_one() {
    let directory = directory(0o644);
    fs::write(directory.path().join("new"), "new").unwrap();
    let server = serve(directory.path());
    let config = ClientConfig { port: port(), ..ClientConfig::new(server.address()) };
    let client = Client::connect(&config).unwrap();
    let root = client.root();
    let id = client.lookup(root, "file".as_ref()).unwrap().id;
    let _opened = client.open(id, OpenAccess::READ).unwrap();
    let session = client.shared.session(client.shared.deadline()).unwrap();
    let answered = || server.stats().clients.first().map_or(0, |stats| stats.requests);
    let before = answered();
    let checking = server.state.checking.lock();
    std::thread::scope(|scope| {
        let unlinking = scope.spawn(|| client.unlink(root, "file".as_ref()));
        let connection = server.state.connections().pop().unwrap();
        wait_until("the request is carried out", || connection.has_running());
        assert_eq!(answered(), before);
        session.lose("a test ends it");
        assert!(matches!(unlinking.join().unwrap(), Err(ExportError::Unanswered)));
        // The next request of the client comes by a new connection, and is carried out after the earlier one.
        let renaming =
            scope.spawn(|| client.rename(root, "new".as_ref(), root, "file".as_ref(), Default::default()));
        std::thread::sleep(Duration::from_millis(500));
        drop(checking);
        renaming.join().unwrap().unwrap();
        wait_until("the request has ended", || !connection.has_running());
    });
    assert_eq!(fs::read(directory.path().join("file")).unwrap(), b"new");
}
