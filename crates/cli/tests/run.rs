//! `terrace run`: the environment of the program, and one line of error for each mistake.
//!
//! The library is an empty file at the right path, which the loader skips with a warning.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use rustix::fs::{CWD, FileType, Mode};

/// An installation in a temporary directory, which is removed when this is dropped.
struct Installation(PathBuf);

impl Installation {
    fn new(name: &str) -> Installation {
        let prefix =
            Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("run-{}-{name}", std::process::id()));
        std::fs::create_dir_all(prefix.join("bin")).unwrap();
        std::fs::create_dir_all(prefix.join("lib/terrace")).unwrap();
        // A link, not a copy: executing a copy fails with ETXTBSY if another test's thread forked while it was written.
        std::fs::hard_link(env!("CARGO_BIN_EXE_terrace"), prefix.join("bin/terrace")).unwrap();
        std::fs::write(prefix.join("lib/terrace/libibverbs.so.1"), b"").unwrap();
        Installation(prefix)
    }

    fn file(&self, name: &str, content: &str) -> String {
        let path = self.0.join(name);
        std::fs::write(&path, content).unwrap();
        path.to_str().unwrap().to_owned()
    }

    /// Runs `terrace run` with these arguments, from the installation's directory, in an environment without Terrace.
    fn run(&self, arguments: &[&str]) -> Output {
        Command::new(self.0.join("bin/terrace"))
            .arg("run")
            .args(arguments)
            .current_dir(&self.0)
            .env_clear()
            .env("PATH", "/usr/bin:/bin")
            .output()
            .unwrap()
    }

    fn library(&self) -> String {
        self.0.join("lib/terrace/libibverbs.so.1").to_str().unwrap().to_owned()
    }
}

impl Drop for Installation {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The value of `name` in the output of `env`.
fn variable<'a>(output: &'a str, name: &str) -> Option<&'a str> {
    output.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='))
}

/// Checks that the run failed with `status` and printed exactly one line, which contains `needle`.
fn assert_one_line(output: &Output, status: i32, needle: &str) {
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(status), "{message}");
    assert_eq!(message.lines().count(), 1, "{message}");
    assert!(message.starts_with("terrace: ") && message.contains(needle), "{message}");
}

#[test]
fn the_program_gets_the_library_and_the_options() {
    let installation = Installation::new("options");
    let plan = installation.file("plan.toml", "loss = 0.5\n");
    let arguments = [
        "--addr",
        "127.0.0.1",
        "--mtu",
        "1024",
        "--device-name",
        "mlx5_0",
        "--fault-plan",
        "plan.toml",
        "--pcap",
        "x.pcap",
        "--log",
        "debug",
    ];
    let output = installation.run(&[&arguments[..], &["--", "env"]].concat());
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(variable(&text, "LD_PRELOAD"), Some(installation.library().as_str()));
    assert_eq!(variable(&text, "TERRACE_ADDR"), Some("127.0.0.1"));
    assert_eq!(variable(&text, "TERRACE_MTU"), Some("1024"));
    assert_eq!(variable(&text, "TERRACE_DEVICE_NAME"), Some("mlx5_0"));
    assert_eq!(variable(&text, "TERRACE_FAULT_PLAN"), Some(plan.as_str()));
    assert_eq!(variable(&text, "TERRACE_PCAP").map(Path::new), Some(installation.0.join("x.pcap").as_path()));
    assert_eq!(variable(&text, "TERRACE_LOG"), Some("debug"));
}

#[test]
fn without_options_only_the_library_is_set() {
    let installation = Installation::new("plain");
    let output = installation.run(&["env"]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(variable(&text, "LD_PRELOAD"), Some(installation.library().as_str()));
    assert_eq!(
        variable(&text, "LD_LIBRARY_PATH").map(Path::new),
        Path::new(&installation.library()).parent()
    );
    assert!(!text.contains("TERRACE_"), "{text}");
}

#[test]
fn arguments_and_exit_status_are_the_programs_own() {
    let installation = Installation::new("status");
    let output = installation.run(&["--", "sh", "-c", "echo $0 $1; exit 42", "zero", "--addr"]);
    assert_eq!(output.status.code(), Some(42));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "zero --addr\n");
}

#[test]
fn the_program_is_checked() {
    let installation = Installation::new("program");
    assert_one_line(
        &installation.run(&["--", "no-such-program"]),
        127,
        "no-such-program: no such program in PATH",
    );
    assert_one_line(&installation.run(&["--", "./nothing"]), 127, "./nothing: no such program");
    installation.file("data", "not a program");
    assert_one_line(&installation.run(&["--", "./data"]), 126, "./data: not executable");
}

#[test]
fn the_address_is_checked() {
    let installation = Installation::new("address");
    assert_one_line(
        &installation.run(&["--addr", "nonsense", "--", "env"]),
        2,
        "nonsense: not an IP address",
    );
    // TEST-NET-1 (RFC 5737): no host here has it.
    assert_one_line(
        &installation.run(&["--addr", "192.0.2.77", "--", "env"]),
        125,
        "192.0.2.77 is not an address of this",
    );
    assert_one_line(&installation.run(&["--addr", "224.0.0.1", "--", "env"]), 2, "224.0.0.1");
}

#[test]
fn the_mtu_is_checked() {
    let installation = Installation::new("mtu");
    for mtu in ["0", "1500", "-1", "big"] {
        assert_one_line(&installation.run(&[&format!("--mtu={mtu}"), "--", "env"]), 2, mtu);
    }
}

#[test]
fn the_fault_plan_is_checked() {
    let installation = Installation::new("plan");
    assert_one_line(
        &installation.run(&["--fault-plan", "none.toml", "--", "env"]),
        2,
        "none.toml: No such file",
    );
    installation.file("bad.toml", "loss = \"much\"\n");
    assert_one_line(&installation.run(&["--fault-plan", "bad.toml", "--", "env"]), 2, "bad.toml");
    installation.file("key.toml", "lost = 0.1\n");
    assert_one_line(&installation.run(&["--fault-plan", "key.toml", "--", "env"]), 2, "lost");
    installation.file("kind.toml", "seed = 1\n[[fault]]\nkind = \"rnr\"\nafter_packets = 1\n");
    let message = "fault 1 (kind = \"rnr\"): `after_packets` is no key of this kind; it has probability";
    assert_one_line(&installation.run(&["--fault-plan", "kind.toml", "--", "env"]), 2, message);
    installation.file("range.toml", "loss = 1.5\n");
    assert_one_line(&installation.run(&["--fault-plan", "range.toml", "--", "env"]), 2, "1.5");
}

#[test]
fn a_plan_with_faults_of_storage_without_dram_gives_a_warning() {
    let installation = Installation::new("storage");
    installation.file("slow.toml", "[[fault]]\nkind = \"slow-storage\"\ndelay_us_min = 100\n");
    let warning = |arguments: &[&str]| {
        let output = installation.run(&[&["--fault-plan", "slow.toml"], arguments, &["--", "env"]].concat());
        assert_eq!(output.status.code(), Some(0));
        String::from_utf8(output.stderr).unwrap()
    };
    assert!(warning(&[]).contains("need --dram"));
    assert!(warning(&["--dram", "1M", "--mode", "odp"]).contains("--mode wait"));
    assert!(!warning(&["--dram", "1M"]).contains("fault plan"));
}

#[test]
fn the_commodity_nic_goes_with_the_default_mode_only() {
    let installation = Installation::new("commodity");
    let run = |mode| installation.run(&["--nic", "commodity", "--dram", "1M", "--mode", mode, "--", "env"]);
    for mode in ["odp", "pin"] {
        assert_one_line(&run(mode), 2, "--nic commodity goes with --mode wait only");
    }
    assert_eq!(run("wait").status.code(), Some(0));
}

#[test]
fn options_without_effect_are_refused() {
    let installation = Installation::new("effect");
    for (arguments, needle) in [
        (&["--local", "1G"][..], "--local needs --remote-memory: add"),
        (&["--mirror", "2"], "--mirror needs --remote-memory"),
        (&["--prefetch", "off"], "--prefetch needs --remote-memory"),
        (&["--remote-memory", "127.0.0.1:1"], "--remote-memory needs --local: add"),
        (&["--remote-memory", "file:/tmp", "--local", "1G", "--mirror", "2"], "--mirror needs memory nodes"),
        (&["--remote-memory", "file:/tmp", "--local", "1"], "--local 1: the least is 2 MiB"),
        (&["--order", "strict"], "--order needs --nic commodity"),
        (&["--np-reverse", "off", "--nic", "terrace"], "--np-reverse needs --nic commodity"),
    ] {
        assert_one_line(&installation.run(&[arguments, &["--", "env"]].concat()), 2, needle);
    }
    assert_eq!(installation.run(&["--mirror", "0", "--", "env"]).status.code(), Some(2));
    let strict = installation.run(&["--order", "strict", "--nic", "commodity", "--", "env"]);
    assert_eq!(variable(&String::from_utf8_lossy(&strict.stdout), "TERRACE_NP_ORDER"), Some("strict"));
}

#[test]
fn the_capture_file_is_checked() {
    let installation = Installation::new("pcap");
    assert_one_line(
        &installation.run(&["--pcap", "/no/such/dir/x.pcap", "--", "env"]),
        125,
        "/no/such/dir/x.pcap: No such",
    );
    // Wireshark begins to read a pipe before the program is run. It must not find the end of its input.
    let pipe = installation.0.join("pipe");
    rustix::fs::mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).expect("a pipe");
    let output = installation.run(&["--pcap", pipe.to_str().unwrap(), "--", "env"]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
}

#[test]
fn a_missing_library_is_named() {
    let installation = Installation::new("library");
    std::fs::remove_file(installation.library()).unwrap();
    assert_one_line(&installation.run(&["--", "env"]), 125, "the library is missing");
}

#[test]
fn an_existing_preload_comes_after_ours() {
    let installation = Installation::new("preload");
    let output = Command::new(installation.0.join("bin/terrace"))
        .args(["run", "--", "env"])
        .env("LD_PRELOAD", "/nonexistent/other.so")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let expected = format!("{}:/nonexistent/other.so", installation.library());
    assert_eq!(variable(&text, "LD_PRELOAD"), Some(expected.as_str()));
}

#[test]
fn a_library_in_a_path_with_a_space_is_searched_for() {
    let installation = Installation::new("a space");
    let output = Command::new(installation.0.join("bin/terrace"))
        .args(["run", "--", "env"])
        .env("LD_LIBRARY_PATH", "/nonexistent")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let folder = installation.0.join("lib/terrace");
    assert_eq!(variable(&text, "LD_PRELOAD"), Some("libibverbs.so.1"));
    assert_eq!(
        variable(&text, "LD_LIBRARY_PATH"),
        Some(format!("{}:/nonexistent", folder.display()).as_str())
    );
}
