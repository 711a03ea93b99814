//! `terrace serve`: its options, and its errors for invalid ones.

use std::process::Command;

#[test]
fn a_directory_for_pages_that_is_named_is_used_or_refused() {
    let directory = tempfile::tempdir().unwrap();
    let region = format!("a={}:1M", directory.path().join("region").display());
    let output = Command::new(env!("CARGO_BIN_EXE_terrace"))
        .args(["serve", "--region", &region, "--dram", "4M", "--frames", "/nonexistent/frames"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(error.contains("/nonexistent/frames") && error.contains("No such file"), "{error}");
}

#[test]
fn a_server_that_cannot_start_leaves_no_file() {
    let directory = tempfile::tempdir().unwrap();
    let (there, made) = (directory.path().join("there"), directory.path().join("made"));
    std::fs::write(&there, []).unwrap();
    let region = |path: &std::path::Path, size: &str| format!("{size}={}:{size}", path.display());
    let (good, odd, huge) = (region(&made, "1M"), region(&made, "3"), region(&made, "4194304T"));
    let there_odd = region(&there, "4097");
    for regions in [&[&odd][..], &[&huge], &[&good, &there_odd]] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_terrace"));
        command.args(["serve", "--listen", "127.0.0.1", "--dram", "1M"]);
        regions.iter().for_each(|region| _ = command.args(["--region", region]));
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        assert!(!made.exists(), "{output:?}");
    }
    assert!(there.exists(), "a file that was there stays");
    let left: Vec<_> = directory.path().read_dir().unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["there"]);
}

/// The error for invalid arguments.
fn error_of(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_terrace")).arg("serve").args(arguments).output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn a_number_of_threads_is_1_to_256() {
    for (threads, reason) in [("0", "0 is not in 1..=256"), ("257", "257 is not"), ("two", "invalid digit")] {
        let error = error_of(&["--region", "a=/nowhere/a:1M", "--dram", "1M", "--threads", threads]);
        assert!(error.contains("--threads") && error.contains(reason), "{error}");
    }
}

#[test]
fn a_fault_plan_is_checked() {
    let region = ["--region", "a=/nowhere/a:1M", "--dram", "1M", "--fault-plan"];
    let error = error_of(&[&region[..], &["/nonexistent/plan.toml"]].concat());
    assert!(error.contains("cannot read the fault plan /nonexistent/plan.toml"), "{error}");
    let path = std::env::temp_dir().join(format!("terrace-serve-{}.toml", std::process::id()));
    std::fs::write(&path, "[[fault]]\nkind = \"slow-storage\"\n").unwrap();
    let error = error_of(&[&region[..], &[path.to_str().unwrap()]].concat());
    assert!(error.contains("the fault needs `delay_us_min`"), "{error}");
    std::fs::remove_file(&path).unwrap();
}
