//! What commands do whose standard output or standard error cannot be written, whose variables are empty, and whose
//! terminal is closed; and what `stat --watch` says of a process that is stopped.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use nix::fcntl::OFlag;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

fn terrace(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_terrace"));
    command.args(arguments);
    command
}

fn full() -> File {
    File::options().write(true).open("/dev/full").expect("a device that is always full")
}

#[test]
fn a_full_standard_output_is_an_error() {
    let output = terrace(&["devices", "--json"]).stdout(full()).stderr(Stdio::piped()).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("cannot write: No space left"), "{output:?}");
}

#[test]
fn a_closed_standard_output_is_none() {
    let mut child = terrace(&["devices"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let Output { status, stderr, .. } = child.wait_with_output().unwrap();
    assert!(status.success() && stderr.is_empty(), "{status}: {}", String::from_utf8_lossy(&stderr));
}

#[test]
fn a_full_standard_error_changes_no_exit_status() {
    let status = terrace(&["stat", "1"]).stderr(full()).status().unwrap();
    assert_eq!(status.code(), Some(1));
}

#[test]
fn a_server_that_fails_does_not_wait_for_the_reader_of_standard_error() {
    let (_reader, writer) = io::pipe().unwrap();
    // Another description, so that the server's is a blocking one.
    let mut filled = File::options()
        .write(true)
        .custom_flags(OFlag::O_NONBLOCK.bits())
        .open(format!("/proc/self/fd/{}", writer.as_raw_fd()))
        .unwrap();
    while filled.write(&[0; 4096]).is_ok() {}
    let refused = [
        "swap-device",
        "--memory-node",
        "127.0.0.1:1",
        "--mirror",
        "2",
        "--size",
        "1M",
        "--socket",
        "/nonexistent",
    ];
    let mut server = terrace(&refused).stderr(writer).spawn().unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    let status = loop {
        match server.try_wait().unwrap() {
            Some(status) => break status.code(),
            None if Instant::now() > deadline => break None,
            None => std::thread::sleep(Duration::from_millis(10)),
        }
    };
    let _ = server.kill();
    assert_eq!(status, Some(2));
}

#[test]
fn empty_variables_count_as_unset() {
    let empty = ["TERRACE_ADDR", "TERRACE_MTU", "TERRACE_DEVICE_NAME"].map(|name| (name, ""));
    let output = terrace(&["devices"]).envs(empty).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let options = [
        "ADDR",
        "MTU",
        "DEVICE_NAME",
        "FAULT_PLAN",
        "PCAP",
        "PATH",
        "DRAM",
        "SWAP",
        "MODE",
        "REMOTE_MEMORY",
        "LOCAL",
    ];
    let others = ["MIRROR", "PREFETCH", "NIC", "NP_ORDER", "NP_REVERSE", "LOG"];
    let empty = options.iter().chain(&others).map(|name| (format!("TERRACE_{name}"), ""));
    let output = terrace(&["run", "--", "/nonexistent/program"]).envs(empty).output().unwrap();
    assert_ne!(output.status.code(), Some(2), "a usage error: {output:?}");
}

/// A server with a NIC, which has printed where it is.
fn export(directory: &std::path::Path) -> Child {
    let listen = ["export", directory.to_str().unwrap(), "--listen", "127.0.0.1:0"];
    let mut child = terrace(&listen).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    assert!(line.starts_with("exporting "), "{line}");
    child
}

fn signal(child: &Child, signal: Signal) {
    kill(Pid::from_raw(child.id() as i32), signal).expect("it is there");
}

#[test]
fn a_server_whose_terminal_is_closed_ends_as_by_sigterm() {
    let directory = tempfile::tempdir().unwrap();
    let mut server = export(directory.path());
    signal(&server, Signal::SIGHUP);
    assert!(server.wait().unwrap().success());
}

#[test]
fn a_server_behind_nohup_goes_on() {
    let directory = tempfile::tempdir().unwrap();
    let script = "trap '' HUP; exec \"$0\" export \"$1\" --listen 127.0.0.1:0";
    let mut server = Command::new("sh")
        .args(["-c", script, env!("CARGO_BIN_EXE_terrace"), directory.path().to_str().unwrap()])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(server.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    assert!(line.starts_with("exporting "), "{line}");
    signal(&server, Signal::SIGHUP);
    // It is asked after the signal, and answers.
    assert!(terrace(&["stat", &server.id().to_string()]).stdout(Stdio::null()).status().unwrap().success());
    signal(&server, Signal::SIGKILL);
    assert_eq!(server.wait().unwrap().signal(), Some(Signal::SIGKILL as i32));
}

#[test]
fn a_stopped_process_is_watched_on() {
    let directory = tempfile::tempdir().unwrap();
    let mut server = export(directory.path());
    let watched = server.id().to_string();
    let mut watch = terrace(&["stat", "--watch=1", "--json", &watched])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut documents = BufReader::new(watch.stdout.take().unwrap());
    let mut remarks = BufReader::new(watch.stderr.take().unwrap());
    let mut line = String::new();
    let mut next = |from: &mut dyn BufRead| {
        line.clear();
        from.read_line(&mut line).unwrap();
        line.clone()
    };
    assert!(next(&mut documents).starts_with('{'));
    signal(&server, Signal::SIGSTOP);
    assert!(next(&mut remarks).contains("it may be stopped"));
    signal(&server, Signal::SIGCONT);
    signal(&server, Signal::SIGTERM);
    server.wait().unwrap();
    let mut rest = String::new();
    remarks.read_to_string(&mut rest).unwrap();
    assert!(rest.ends_with(&format!("process {watched} has ended\n")), "{rest}");
    assert!(watch.wait().unwrap().success());
    let mut rest = String::new();
    documents.read_to_string(&mut rest).unwrap();
    assert!(rest.lines().all(|line| line.starts_with('{')), "{rest}");
}
