//! What every command has in common: short and long help, listed values, one exit status for a wrong command line.

use std::process::{Command, Output};

const COMMANDS: [&str; COMMANDS_COUNT] = [
    "run",
    "serve",
    "export",
    "memory-node",
    "swap-device",
    "recover",
    "devices",
    "doctor",
    "stat",
    "top",
    "bench",
];
const COMMANDS_COUNT: usize = 11;

fn terrace(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_terrace"));
    for name in ["TERRACE_ADDR", "TERRACE_LOG", "TERRACE_PATH"] {
        command.env_remove(name);
    }
    command.args(arguments).output().unwrap()
}

fn help(arguments: &[&str]) -> String {
    let output = terrace(arguments);
    assert_eq!(output.status.code(), Some(0), "{arguments:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn short_help_lists_options_and_long_help_has_examples() {
    for command in COMMANDS {
        let (short, long) = (help(&[command, "-h"]), help(&[command, "--help"]));
        assert!(short.contains("--help") && !short.contains("Examples:"), "{command}: {short}");
        assert!(long.contains("Examples:") && long.len() > short.len(), "{command}: {long}");
        assert!(short.lines().count() <= 60, "{command}: a screen or two: {short}");
    }
    let (short, long) = (help(&["-h"]), help(&["--help"]));
    assert!(short.lines().count() < 24 && long.contains("Exit status"), "{short}");
    for command in COMMANDS {
        assert!(short.contains(&format!("\n  {command} ")), "{command} is listed: {short}");
    }
}

#[test]
fn values_are_listed() {
    for (command, values) in [
        ("run", "[possible values: auto, udp, local]"),
        ("run", "[possible values: off, error, warn, info, debug, trace]"),
        ("serve", "[possible values: auto, udp, local]"),
        ("serve", "rpc-tiering-promote, term, wait]"),
        ("bench", "rpc-tiering-promote, term, wait]"),
    ] {
        let short = help(&[command, "-h"]).split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(short.contains(values), "{command}: {short}");
    }
    assert!(help(&["serve", "--help"]).contains("- term:"), "long help explains each");
}

#[test]
fn a_wrong_command_line_has_one_exit_status() {
    for arguments in [
        &["fly"] as &[&str],
        &["run"],
        &["run", "--path", "sky", "--", "true"],
        &["serve", "--region", "a=/nowhere/a:1M", "--dram", "much"],
        &["serve", "--region", "a=/nowhere/a:1M", "--dram", "1M", "--mode", "none"],
        &["serve", "--region", "a=/nowhere/a:1M", "--dram", "1M", "--listen", "224.0.0.1"],
        &["serve", "--region", "a=/nowhere/a:1M", "--dram", "1M", "--mtu", "77"],
        &["export"],
        &["export", ".", "--listen", "nonsense"],
        &["export", ".", "--mtu", "77"],
        &["export", ".", "--fault-plan", "/nonexistent/plan.toml"],
        &["memory-node", "--memory", "1M", "--listen", "127.0.0.1:0", "--mtu", "77"],
        &[
            "swap-device",
            "--memory-node",
            "127.0.0.1:1",
            "--size",
            "1M",
            "--socket",
            "/nowhere",
            "--mtu",
            "77",
        ],
        &["swap-device", "--memory-node", "127.0.0.1:1,127.0.0.1:1", "--size", "1M", "--socket", "/nowhere"],
        &["mount", "127.0.0.1:/", "/nowhere", "--mtu", "77"],
        &["mount", "127.0.0.1:/", "/nowhere", "--cache=-1"],
        &["mount", "127.0.0.1:/", "/nowhere", "--cache", "nan"],
        &["memory-node", "--memory", "1M", "--listen", "127.0.0.1:0", "--json"],
        &["memory-node", "--memory", "1M", "--listen", "127.0.0.1:0", "--budget", "1"],
        &["memory-node", "--status", "127.0.0.1:1", "--budget", "1M"],
        &["top", "--interval", "9223372036854775807"],
        &["recover"],
        &["devices", "--addr", "nonsense"],
        &["devices", "--mtu", "77"],
        &["doctor", "--addr", "nonsense"],
        &["stat", "x"],
        &["stat", "--watch=0"],
        &["bench"],
        &["bench", "/nonexistent/plan.toml"],
        &["bench", "--mode", "none", "plan.toml"],
    ] {
        let output = terrace(arguments);
        assert_eq!(
            output.status.code(),
            Some(2),
            "{arguments:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        assert!(!output.stderr.is_empty() && output.stdout.is_empty(), "{arguments:?}");
    }
}

#[test]
fn a_number_after_watch_is_the_process() {
    let output = terrace(&["stat", "--watch", "1"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("process 1 does not run with Terrace"));
}
