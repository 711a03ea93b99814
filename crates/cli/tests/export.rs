//! `terrace export`: it serves clients, and ends in order.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use terrace_export::{Client, ClientConfig, OpenAccess};

/// Starts an export. Returns it and its address.
fn export(directory: &Path) -> (Child, SocketAddr) {
    let mut server = Command::new(env!("CARGO_BIN_EXE_terrace"))
        .args(["export", "--listen", "127.0.0.1:0"])
        .arg(directory)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(server.stdout.take().unwrap()).read_line(&mut line).unwrap();
    (server, line.split_whitespace().nth(3).unwrap().parse().unwrap())
}

#[test]
fn a_directory_is_exported_until_sigterm() {
    let directory = tempfile::tempdir().unwrap();
    let (mut server, address) = export(directory.path());
    let client = Client::connect(&ClientConfig::new(address)).unwrap();
    let access = OpenAccess::READ | OpenAccess::WRITE;
    // The mode is the client's, without the server's umask.
    let file = client.create(client.root(), "file".as_ref(), 0o666, access, true).unwrap();
    file.write_at(0, b"data").unwrap();
    kill_process(Pid::from_child(&server), Signal::TERM).unwrap();
    assert!(server.wait().unwrap().success());
    let path = directory.path().join("file");
    assert_eq!(std::fs::read(&path).unwrap(), b"data");
    assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o666);
}

#[test]
fn a_mount_of_an_export_that_is_stopped_ends_by_sigint() {
    let directory = tempfile::tempdir().unwrap();
    let (mut server, address) = export(directory.path());
    kill_process(Pid::from_child(&server), Signal::STOP).unwrap();
    let mut mount = Command::new(env!("CARGO_BIN_EXE_terrace"))
        .args(["mount", "127.0.0.1:/", "--port", &address.port().to_string()])
        .arg(directory.path())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    while !blocks_signals(mount.id()) {
        assert!(mount.try_wait().unwrap().is_none());
        std::thread::sleep(Duration::from_millis(1));
    }
    kill_process(Pid::from_child(&mount), Signal::INT).unwrap();
    let output = mount.wait_with_output().unwrap();
    server.kill().unwrap();
    server.wait().unwrap();
    // Without the signal, it is an error after 5 s that the export does not answer.
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
}

/// Whether the first thread of a process blocks signals.
fn blocks_signals(pid: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    status.lines().any(|line| {
        line.strip_prefix("SigBlk:").is_some_and(|mask| !mask.trim_matches(['0', '\t']).is_empty())
    })
}

#[test]
fn what_cannot_be_exported_is_said() {
    let rules = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(&rules, "unknown = 1").unwrap();
    let error_of = |arguments: &[&str], code| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_terrace"));
        let output = command.args(["export", "--listen", "127.0.0.1:0"]).args(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    assert!(error_of(&["/nonexistent/directory"], 1).contains("cannot export /nonexistent/directory"));
    let missing = error_of(&[".", "--rules", "/nonexistent/rules"], 2);
    assert!(missing.contains("--rules /nonexistent/rules: cannot read the rules"), "{missing}");
    assert!(error_of(&[".", "--rules", rules.path().to_str().unwrap()], 2).contains("unknown field"));
}
