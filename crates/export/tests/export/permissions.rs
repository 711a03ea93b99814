//! What clients may not do (docs/export.md).

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::Path;

use crate::support::{READ_WRITE, connect, errno, serve, wait_until};
use rustix::io::Errno;
use rustix::process::{Gid, Uid, geteuid};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};
use terrace_export::{Client, ExportError, FileId, OpenAccess, Server, SetAttributes};
use terrace_nic::PathChoice;

const OTHER: u32 = 12_345;
const PATHS: [PathChoice; 2] = [PathChoice::Udp, PathChoice::Local];

const ACCESS: i32 = Errno::ACCESS.raw_os_error();
const PERM: i32 = Errno::PERM.raw_os_error();

/// A directory that every user may search, with a file of the given mode.
fn directory(mode: u32) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    fs::set_permissions(directory.path(), Permissions::from_mode(0o777)).unwrap();
    fs::write(directory.path().join("file"), "secret").unwrap();
    fs::set_permissions(directory.path().join("file"), Permissions::from_mode(mode)).unwrap();
    directory
}

/// Calls `act` in a thread of another user, which the kernel names as the peer of sockets that it connects.
fn as_user<T: Send>(uid: u32, act: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let thread = scope.spawn(move || {
            let (user, group) = (Uid::from_raw(uid), Gid::from_raw(uid));
            set_thread_groups(&[]).unwrap();
            set_thread_res_gid(group, group, group).unwrap();
            set_thread_res_uid(user, user, user).unwrap();
            act()
        });
        thread.join().unwrap()
    })
}

fn other_client(server: &Server, path: PathChoice) -> Client {
    let address = server.address();
    as_user(OTHER, move || connect(address, path))
}

fn file(client: &Client) -> FileId {
    client.lookup(client.root(), "file".as_ref()).unwrap().id
}

#[test]
fn another_user_is_refused() {
    if !geteuid().is_root() {
        return;
    }
    let directory = directory(0o640);
    let server = serve(directory.path(), PathChoice::Udp, "root = true");
    let client = other_client(&server, PathChoice::Udp);
    let id = file(&client);
    assert_eq!(errno(client.open(id, OpenAccess::READ)), ACCESS);
    assert_eq!(errno(client.open(id, READ_WRITE)), ACCESS);
    assert_eq!(errno(client.check_access(id, 4)), ACCESS);
    let chmod = SetAttributes { mode: Some(0o777), ..SetAttributes::default() };
    assert_eq!(errno(client.set_attributes(id, &chmod)), PERM);
    let cut = SetAttributes { len: Some(0), ..SetAttributes::default() };
    assert_eq!(errno(client.set_attributes(id, &cut)), ACCESS);
    let take = SetAttributes { uid: Some(OTHER), ..SetAttributes::default() };
    assert_eq!(errno(client.set_attributes(id, &take)), PERM);
    fs::set_permissions(directory.path(), Permissions::from_mode(0o755)).unwrap();
    let root = client.root();
    assert_eq!(errno(client.create(root, "new".as_ref(), 0o644, READ_WRITE, true)), ACCESS);
    assert_eq!(errno(client.unlink(root, "file".as_ref())), ACCESS);
    assert_eq!(errno(client.rename(root, "file".as_ref(), root, "b".as_ref(), Default::default())), ACCESS);
    fs::set_permissions(directory.path(), Permissions::from_mode(0o700)).unwrap();
    assert_eq!(errno(client.lookup(root, "file".as_ref())), ACCESS);
    assert_eq!(errno(client.read_directory(root, 0, false)), ACCESS);
}

#[test]
fn what_a_user_makes_is_the_users() {
    if !geteuid().is_root() {
        return;
    }
    let directory = directory(0o644);
    let server = serve(directory.path(), PathChoice::Udp, "root = true");
    let client = other_client(&server, PathChoice::Udp);
    let made = client.create(client.root(), "new".as_ref(), 0o600, READ_WRITE, true).unwrap();
    let attributes = made.attributes().unwrap();
    assert_eq!((attributes.uid, attributes.gid, attributes.mode), (OTHER, OTHER, 0o600));
    assert_eq!(client.make_directory(client.root(), "sub".as_ref(), 0o700).unwrap().uid, OTHER);
    // Nobody's rights but its own: root is squashed.
    let squashing = serve(directory.path(), PathChoice::Udp, "");
    let root = connect(squashing.address(), PathChoice::Udp);
    let id = root.lookup(root.root(), "new".as_ref()).unwrap().id;
    assert_eq!(errno(root.open(id, OpenAccess::READ)), ACCESS);
}

#[test]
fn a_read_only_open_does_not_write() {
    for path in PATHS {
        let directory = directory(0o644);
        let server = serve(directory.path(), path, "root = true");
        let client = connect(server.address(), path);
        let file = client.open(file(&client), OpenAccess::READ).unwrap();
        assert!(matches!(file.write_at(0, b"x"), Err(ExportError::NotOpenFor)));
        assert_eq!(errno(file.truncate(0)), Errno::BADF.raw_os_error());
        assert_eq!(errno(file.punch(0, 1)), Errno::BADF.raw_os_error());
        assert!(file.append(b"x").is_err());
        assert_eq!(fs::read(directory.path().join("file")).unwrap(), b"secret");
        let mut text = [0; 6];
        assert_eq!(file.read_at(0, &mut text).unwrap(), 6);
    }
}

#[test]
fn an_open_for_appending_does_not_write_by_offset() {
    for path in PATHS {
        let directory = directory(0o644);
        let server = serve(directory.path(), path, "root = true");
        let client = connect(server.address(), path);
        let file = client.open(file(&client), OpenAccess::APPEND).unwrap();
        assert_eq!(file.append(b"s").unwrap(), 6);
        assert!(matches!(file.write_at(0, b"x"), Err(ExportError::NotOpenFor)));
        assert!(matches!(file.read_at(0, &mut [0]), Err(ExportError::NotOpenFor)));
        assert_eq!(fs::read(directory.path().join("file")).unwrap(), b"secrets");
    }
}

#[test]
fn a_chmod_under_way_revokes_the_key() {
    if !geteuid().is_root() {
        return;
    }
    for (path, is_local) in [(PathChoice::Udp, false), (PathChoice::Udp, true), (PathChoice::Local, true)] {
        let directory = directory(0o644);
        let server = serve(directory.path(), path, "root = true");
        let (owner, other) = (connect(server.address(), path), other_client(&server, path));
        let id = file(&other);
        let file = other.open(id, OpenAccess::READ).unwrap();
        assert_eq!(file.read_at(0, &mut [0; 6]).unwrap(), 6);
        if is_local {
            let path = directory.path().join("file");
            fs::set_permissions(path, Permissions::from_mode(0o600)).unwrap();
            wait_until("the key is revoked", || server.stats().revoked == 1);
        } else {
            let chmod = SetAttributes { mode: Some(0o600), ..SetAttributes::default() };
            owner.lookup(owner.root(), "file".as_ref()).unwrap();
            owner.set_attributes(id, &chmod).unwrap();
        }
        assert!(matches!(file.read_at(0, &mut [0; 6]), Err(ExportError::Revoked)), "{path:?} {is_local}");
        assert_eq!(errno(other.open(id, OpenAccess::READ)), ACCESS);
        assert_eq!(server.stats().open_files, 0);
        // The connection lives on.
        fs::set_permissions(directory.path().join("file"), Permissions::from_mode(0o644)).unwrap();
        assert_eq!(other.open(id, OpenAccess::READ).unwrap().read_at(0, &mut [0; 6]).unwrap(), 6);
    }
}

#[test]
fn what_takes_the_right_from_nobody_revokes_nothing() {
    let directory = directory(0o644);
    let server = serve(directory.path(), PathChoice::Udp, "root = true");
    let client = connect(server.address(), PathChoice::Udp);
    let file = client.open(file(&client), READ_WRITE).unwrap();
    // A client's own chmod does not take its keys, as with local descriptors.
    let chmod = SetAttributes { mode: Some(0), ..SetAttributes::default() };
    client.set_attributes(file.id(), &chmod).unwrap();
    file.write_at(0, b"S").unwrap();
    client.link(file.id(), client.root(), "second".as_ref()).unwrap();
    client.unlink(client.root(), "file".as_ref()).unwrap();
    client.unlink(client.root(), "second".as_ref()).unwrap();
    file.write_at(1, b"E").unwrap();
    let mut text = [0; 6];
    assert_eq!(file.read_at(0, &mut text).unwrap(), 6);
    assert_eq!(&text, b"SEcret");
}

#[test]
fn an_unlink_by_others_revokes_the_key() {
    for path in PATHS {
        let directory = directory(0o644);
        let server = serve(directory.path(), path, "root = true");
        let (one, two) = (connect(server.address(), path), connect(server.address(), path));
        let opened = one.open(file(&one), OpenAccess::READ).unwrap();
        two.unlink(two.root(), "file".as_ref()).unwrap();
        assert!(matches!(opened.read_at(0, &mut [0; 6]), Err(ExportError::Revoked)));
        assert_eq!(errno(one.open(opened.id(), OpenAccess::READ)), Errno::STALE.raw_os_error());
        // By a local program, and with the rule that keeps keys.
        for keeps in [false, true] {
            fs::write(directory.path().join("file"), "secret").unwrap();
            let rules = format!("root = true\nkeep_unlinked = {keeps}");
            let server = serve(directory.path(), path, &rules);
            let client = connect(server.address(), path);
            let opened = client.open(file(&client), OpenAccess::READ).unwrap();
            fs::remove_file(directory.path().join("file")).unwrap();
            if keeps {
                assert_eq!(opened.read_at(0, &mut [0; 6]).unwrap(), 6);
            } else {
                wait_until("the key is revoked", || server.stats().revoked == 1);
                assert!(matches!(opened.read_at(0, &mut [0; 6]), Err(ExportError::Revoked)));
            }
        }
    }
}

#[test]
fn nothing_outside_the_directory_is_found() {
    let outside = tempfile::tempdir().unwrap();
    fs::write(outside.path().join("secret"), "secret").unwrap();
    let directory = directory(0o644);
    symlink(outside.path(), directory.path().join("out")).unwrap();
    symlink("../..", directory.path().join("up")).unwrap();
    symlink("/etc/passwd", directory.path().join("absolute")).unwrap();
    symlink("/proc/self/root", directory.path().join("magic")).unwrap();
    symlink("file", directory.path().join("inside")).unwrap();
    let server = serve(directory.path(), PathChoice::Udp, "root = true");
    let client = connect(server.address(), PathChoice::Udp);
    let root = client.root();
    for path in
        ["..", "../x", "/etc/passwd", "out/secret", "up/etc/passwd", "absolute", "magic/etc", "file/../../x"]
    {
        let found = errno(client.lookup_path(Path::new(path)));
        assert_ne!(found, 0, "{path}");
    }
    for name in ["..", ".", "", "out/secret", "/etc", "a\0b"] {
        assert_eq!(errno(client.lookup(root, name.as_ref())), Errno::INVAL.raw_os_error(), "{name:?}");
        let made = client.create(root, name.as_ref(), 0o644, READ_WRITE, false);
        assert_eq!(errno(made), Errno::INVAL.raw_os_error(), "{name:?}");
    }
    // A symbolic link is a file of its own, and leads nowhere.
    let out = client.lookup(root, "out".as_ref()).unwrap();
    assert_eq!(client.read_link(out.id).unwrap(), outside.path());
    assert_ne!(errno(client.lookup(out.id, "secret".as_ref())), 0);
    assert_ne!(errno(client.read_directory(out.id, 0, true)), 0);
    let absolute = client.lookup(root, "absolute".as_ref()).unwrap();
    assert_ne!(errno(client.open(absolute.id, OpenAccess::READ)), 0);
    assert_ne!(errno(client.create(root, "absolute".as_ref(), 0o644, READ_WRITE, false)), 0);
    let inside = client.lookup_path("inside".as_ref()).unwrap();
    assert_eq!(inside.id, client.lookup(root, "file".as_ref()).unwrap().id);
}

#[test]
fn a_read_only_export_changes_nothing() {
    let directory = directory(0o666);
    let server = serve(directory.path(), PathChoice::Udp, "root = true\n[local]\naccess = \"ro\"");
    let client = connect(server.address(), PathChoice::Udp);
    let (root, rofs) = (client.root(), Errno::ROFS.raw_os_error());
    assert!(client.is_read_only());
    let id = file(&client);
    assert_eq!(errno(client.open(id, READ_WRITE)), rofs);
    assert_eq!(errno(client.open(id, OpenAccess::APPEND)), rofs);
    assert_eq!(errno(client.open(id, OpenAccess::READ | OpenAccess::TRUNCATE)), rofs);
    assert_eq!(errno(client.create(root, "b".as_ref(), 0o644, OpenAccess::READ, true)), rofs);
    assert_eq!(errno(client.make_directory(root, "b".as_ref(), 0o755)), rofs);
    assert_eq!(errno(client.symlink(root, "b".as_ref(), "c".as_ref())), rofs);
    assert_eq!(errno(client.link(id, root, "b".as_ref())), rofs);
    assert_eq!(errno(client.unlink(root, "file".as_ref())), rofs);
    assert_eq!(errno(client.rename(root, "file".as_ref(), root, "b".as_ref(), Default::default())), rofs);
    assert_eq!(errno(client.set_attributes(id, &SetAttributes { len: Some(0), ..Default::default() })), rofs);
    assert_eq!(client.open(id, OpenAccess::READ).unwrap().read_at(0, &mut [0; 6]).unwrap(), 6);
}

#[test]
fn refused_clients_do_not_connect() {
    let directory = directory(0o644);
    let server = serve(directory.path(), PathChoice::Udp, "[local]\naccess = \"none\"");
    let config = terrace_export::ClientConfig {
        port: crate::support::port(PathChoice::Udp),
        ..terrace_export::ClientConfig::new(server.address())
    };
    assert!(matches!(terrace_export::Client::connect(&config), Err(ExportError::Refused(ACCESS))));
}

#[test]
fn owners_change_what_is_theirs() {
    if !geteuid().is_root() {
        return;
    }
    let directory = directory(0o600);
    chown(directory.path().join("file"), Some(OTHER), Some(OTHER)).unwrap();
    let server = serve(directory.path(), PathChoice::Udp, "root = true");
    let client = other_client(&server, PathChoice::Udp);
    let id = file(&client);
    let set = SetAttributes { mode: Some(0o4755), ..SetAttributes::default() };
    assert_eq!(client.set_attributes(id, &set).unwrap().mode, 0o4755);
    let give = SetAttributes { uid: Some(0), ..SetAttributes::default() };
    assert_eq!(errno(client.set_attributes(id, &give)), PERM);
}

#[test]
fn a_client_that_writes_clears_the_set_user_id_bits() {
    if !geteuid().is_root() {
        return;
    }
    let directory = directory(0o6777);
    let path = directory.path().join("file");
    let mode = || fs::metadata(&path).unwrap().permissions().mode() & 0o7777;
    let server = serve(directory.path(), PathChoice::Local, "root = true");
    let (root, client) =
        (connect(server.address(), PathChoice::Local), other_client(&server, PathChoice::Local));
    let id = file(&client);
    client.open(id, OpenAccess::READ).unwrap().close().unwrap();
    root.open(file(&root), READ_WRITE).unwrap().close().unwrap();
    assert_eq!(mode(), 0o6777);
    let opened = client.open(id, READ_WRITE).unwrap();
    assert_eq!(mode(), 0o777);
    opened.write_at(0, b"x").unwrap();
    // The file gets such a bit while the client may write it.
    fs::set_permissions(&path, Permissions::from_mode(0o4777)).unwrap();
    wait_until("the key is revoked", || matches!(opened.write_at(0, b"x"), Err(ExportError::Revoked)));
    assert_eq!(mode(), 0o4777);
    let cut = SetAttributes { len: Some(1), ..SetAttributes::default() };
    assert_eq!(client.set_attributes(id, &cut).unwrap().mode, 0o777);
}

#[test]
fn clients_have_the_groups_of_their_processes() {
    if !geteuid().is_root() {
        return;
    }
    const GROUP: u32 = 77;
    let directory = directory(0o640);
    chown(directory.path().join("file"), Some(0), Some(GROUP)).unwrap();
    let server = serve(directory.path(), PathChoice::Udp, "root = true");
    let address = server.address();
    // A client with as many groups as a process can have is admitted, too.
    let many: Vec<_> = (GROUP..GROUP + 1000).map(Gid::from_raw).collect();
    for (groups, expected) in [(&many[..0], ACCESS), (&many[..1], 0), (&many[1..], ACCESS), (&many[..], 0)] {
        let client = std::thread::scope(|scope| {
            let connect_as_member = || {
                let (user, group) = (Uid::from_raw(OTHER), Gid::from_raw(OTHER));
                set_thread_groups(groups).unwrap();
                set_thread_res_gid(group, group, group).unwrap();
                set_thread_res_uid(user, user, user).unwrap();
                connect(address, PathChoice::Udp)
            };
            scope.spawn(connect_as_member).join().unwrap()
        });
        assert_eq!(errno(client.open(file(&client), OpenAccess::READ)), expected, "{} groups", groups.len());
    }
}

/// An access control list with an entry for a user, as `setfacl -m u:USER:r` makes it of mode 0640.
fn acl(user: u32) -> Vec<u8> {
    const NOBODY: u32 = u32::MAX;
    let entries: [(u16, u16, u32); 5] =
        [(1, 6, NOBODY), (2, 4, user), (4, 4, NOBODY), (16, 4, NOBODY), (32, 0, NOBODY)];
    let mut bytes = 2_u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in entries {
        bytes.extend(tag.to_le_bytes());
        bytes.extend(permissions.to_le_bytes());
        bytes.extend(id.to_le_bytes());
    }
    bytes
}

#[test]
fn a_client_that_leaves_the_access_control_list_loses_its_key() {
    if !geteuid().is_root() {
        return;
    }
    const ACL: &str = "system.posix_acl_access";
    let directory = directory(0o640);
    let path = directory.path().join("file");
    let set = |user| rustix::fs::setxattr(&path, ACL, &acl(user), rustix::fs::XattrFlags::empty());
    if set(OTHER) == Err(Errno::OPNOTSUPP) {
        println!("the file system has no access control lists: not tested");
        return;
    }
    let server = serve(directory.path(), PathChoice::Udp, "root = true");
    let client = other_client(&server, PathChoice::Udp);
    let opened = client.open(file(&client), OpenAccess::READ).unwrap();
    assert_eq!(opened.read_at(0, &mut [0; 6]).unwrap(), 6);
    // The mode stays the same.
    set(OTHER + 1).unwrap();
    wait_until("the key is revoked", || server.stats().revoked == 1);
    assert!(matches!(opened.read_at(0, &mut [0; 6]), Err(ExportError::Revoked)));
    assert_eq!(errno(client.open(opened.id(), OpenAccess::READ)), ACCESS);
}

#[test]
fn files_that_come_and_go_are_created_or_opened() {
    let directory = directory(0o644);
    let server = serve(directory.path(), PathChoice::Udp, "root = true");
    let (one, two) = (connect(server.address(), PathChoice::Udp), connect(server.address(), PathChoice::Udp));
    std::thread::scope(|scope| {
        let removing = scope.spawn(|| {
            for _ in 0..300 {
                // It may not be there.
                let _ = two.unlink(two.root(), "coming".as_ref());
            }
        });
        while !removing.is_finished() {
            let made = one.create(one.root(), "coming".as_ref(), 0o644, READ_WRITE, false);
            // Also a file that was removed before the answer.
            assert!([0, Errno::STALE.raw_os_error()].contains(&errno(made)));
        }
    });
}
