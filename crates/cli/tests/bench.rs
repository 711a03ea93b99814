//! `terrace bench` against real servers, in short runs on small regions.

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Output};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use terrace_bench::cgroup::Group;

const PLAN: &str = r#"
figure = "small"
title = "a small region"
source = "a test"
kind = "bars"
modes = ["pin", "rpc", "wait"]
[x]
axis = "size"
label = "Size"
values = ["4K", "256"]
[settings]
region = "32M"
write-percent = 30
threads = 2
depth = 4
[short]
warm-up-s = 0.1
rewarm-s = 0.1
measured-s = 0.5
repeats = 1
"#;

fn bench(dir: &Path, arguments: &[&str]) -> Output {
    let plan = dir.join("small.toml");
    std::fs::write(&plan, PLAN).unwrap();
    Command::new(env!("CARGO_BIN_EXE_terrace"))
        .arg("bench")
        .args(["--data".as_ref(), dir, "--out".as_ref(), &dir.join("results"), plan.as_path()])
        .args(arguments)
        .output()
        .unwrap()
}

/// Whether this user may create control groups with memory limits. Otherwise the tests are skipped.
fn can_limit_memory() -> bool {
    let group = Group::new(&format!("terrace-bench-may-{}", std::process::id()), 1 << 20, None);
    group.inspect_err(|error| eprintln!("skipped: {error}")).is_ok()
}

#[test]
fn servers_are_started_measured_and_stopped() {
    if !can_limit_memory() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let output = bench(dir.path(), &["--json"]);
    let log = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{log}");
    let document: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(document["version"], 1);
    let rows = document["figures"][0]["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 6);
    for row in rows {
        assert!(row["ops_per_s"].as_f64().unwrap() > 0.0, "{row}");
        assert!(row["verified_mib"].as_f64().unwrap() > 0.0, "{row}");
        // The limit is the budget (pin: the region) and a headroom of 64 MiB.
        let limit = if row["mode"] == "pin" { 96.0 } else { 80.0 };
        assert!(row["server_peak_mib"].as_f64().is_none_or(|peak| peak <= limit), "{row}");
    }
    let left: Vec<_> =
        std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(left.iter().all(|name| !name.to_string_lossy().contains("terrace-bench")), "{left:?}");
    let results = std::fs::read_dir(dir.path().join("results")).unwrap().next().unwrap().unwrap().path();
    for file in ["small.csv", "small.svg", "small.png", "results.json"] {
        assert!(results.join(file).is_file(), "{file}");
    }
}

/// The names in a directory.
fn names_in(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap();
    entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect()
}

#[test]
fn a_run_that_is_ended_by_a_signal_leaves_no_files() {
    if !can_limit_memory() {
        return;
    }
    let (dir, temporary) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let plan = dir.path().join("small.toml");
    std::fs::write(&plan, PLAN.replace("measured-s = 0.5", "measured-s = 600")).unwrap();
    let mut run = Command::new(env!("CARGO_BIN_EXE_terrace"))
        .args(["bench".as_ref(), "--mode".as_ref(), "wait".as_ref(), "--data".as_ref(), dir.path()])
        .arg("--out")
        .args([dir.path().join("results"), plan])
        .env("TMPDIR", temporary.path())
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let prefix = format!("terrace-bench-{}-", run.id());
    // A server has the file when its lock file is there.
    let has_server = || names_in(dir.path()).iter().any(|name| name.starts_with(&format!(".{prefix}")));
    while !has_server() {
        assert!(run.try_wait().unwrap().is_none(), "it has ended");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    kill(Pid::from_raw(run.id() as i32), Signal::SIGTERM).unwrap();
    assert_eq!(run.wait().unwrap().signal(), Some(Signal::SIGTERM as i32));
    // The server ends by itself, and takes its pages in memory with it.
    let pools = || names_in("/dev/shm".as_ref()).into_iter().filter(|name| name.contains(&prefix)).count();
    while has_server() || pools() > 0 {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    assert_eq!(names_in(temporary.path()), [""; 0]);
    let left = names_in(dir.path());
    assert!(!left.iter().any(|name| name.contains("terrace-bench")), "{left:?}");
}

#[test]
fn a_directory_for_files_is_not_made() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("misspelled");
    let output = Command::new(env!("CARGO_BIN_EXE_terrace"))
        .args(["bench".as_ref(), "flush".as_ref(), "--data".as_ref(), missing.as_path()])
        .output()
        .unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && error.contains("misspelled: no such directory"), "{error}");
    assert!(!missing.exists());
}

#[test]
fn a_rehearsal_needs_no_server() {
    let dir = tempfile::tempdir().unwrap();
    let output = bench(dir.path(), &["--rehearse", "--mode", "pin"]);
    let table = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && table.contains("pin") && !table.contains("wait"), "{table}");
}

#[test]
fn mistakes_get_one_line() {
    let dir = tempfile::tempdir().unwrap();
    let terrace = |arguments: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_terrace")).args(arguments).output().unwrap();
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    assert!(terrace(&["bench"]).contains("no plan"));
    assert!(terrace(&["bench", "/nowhere.toml"]).contains("/nowhere.toml"));
    assert!(terrace(&["bench", "--mode", "magic", "x.toml"]).contains("magic"));
    let wrong = dir.path().join("wrong.toml");
    std::fs::write(&wrong, PLAN.replace("32M", "32Q")).unwrap();
    let message = terrace(&["bench", wrong.to_str().unwrap()]);
    assert!(message.contains("32Q") && message.contains("wrong.toml"), "{message}");
}
