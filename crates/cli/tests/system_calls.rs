//! Accesses to pages in memory make no system calls within the host, and none but the network's by UDP: strace counts
//! those of a node and of its client, while the client reads and writes a region that is in memory.
//!
//! Skipped with a line that says so where strace is missing or may not attach.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use terrace_nic::{PathChoice, PortConfig, WcStatus};
use terrace_node::{Client, ClientConfig, Span};

#[path = "crash/node.rs"]
mod node;

use node::{Frames, Node, REGION, address};

const MIB: u64 = 1 << 20;
const REGION_BYTES: u64 = 16 * MIB;
/// The environment variable of the client's process: the node's instance index and the transport.
const CHILD: &str = "TERRACE_SYSTEM_CALLS_CLIENT";
const PAGE: u64 = 4096;
const DEPTH: usize = 16;
/// Accesses while strace counts.
const ACCESSES: u64 = 200_000;
/// What the two ends may call in a second whatever the accesses are: a client pulls the residency bitmap every 20 ms,
/// which is a READ that may wake the node; both look after their timers; and the engine of a client that polls looks
/// every millisecond whether it still does, and is woken to do so.
const BACKGROUND_PER_SECOND: f64 = 2000.0;
/// Calls that send, receive, or wait for packets.
const NETWORK_CALLS: [&str; 11] = [
    "sendmsg",
    "recvmsg",
    "sendmmsg",
    "recvmmsg",
    "sendto",
    "recvfrom",
    "poll",
    "ppoll",
    "epoll_wait",
    "epoll_pwait",
    "epoll_pwait2",
];

/// Not a test: the client. Each line that it gets is a number of accesses, after which it prints a line.
#[test]
fn child() {
    let Ok(child) = std::env::var(CHILD) else { return };
    let (instance, path) = child.split_once(' ').expect("two fields");
    let instance = instance.parse().expect("an instance index");
    let config =
        ClientConfig::new(address_of(&std::env::var("TERRACE_SYSTEM_CALLS_ADDRESS").expect("an address")));
    let path: PathChoice = path.parse().expect("a transport");
    let port = PortConfig { path, ..config.port };
    let client = Client::connect(&ClientConfig { instance, port, ..config }).expect("the node answers");
    let region = client.open(REGION).expect("the region");
    let buffer = client.buffer(DEPTH * PAGE as usize).expect("a buffer");
    let pages = REGION_BYTES / PAGE;
    let (mut random, mut done) = (0x9e37_79b9_7f4a_7c15_u64, Vec::new());
    for line in std::io::stdin().lock().lines() {
        let count: u64 = line.expect("text").parse().expect("a number");
        for batch in 0..count / DEPTH as u64 {
            // The first accesses are to all pages in order, so that they are in memory; the others are random.
            let spans: Vec<Span> = (0..DEPTH)
                .map(|slot| {
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    let next = batch * DEPTH as u64 + slot as u64;
                    let page = if count == pages { next } else { (random >> 33) % pages };
                    Span { offset: page * PAGE, at: slot * PAGE as usize, len: PAGE as u32, tag: slot as u64 }
                })
                .collect();
            // Every fourth batch writes.
            let begun = if batch % 4 == 3 {
                region.write_many(&buffer, &spans)
            } else {
                region.read_many(&buffer, &spans)
            };
            begun.expect("begun");
            let started = Instant::now();
            while done.len() < DEPTH {
                client.poll(&mut done).expect("a healthy connection");
                assert!(started.elapsed() < Duration::from_secs(60), "an access is lost");
            }
            assert!(done.drain(..).all(|completion| completion.status == WcStatus::Success));
        }
        println!("\n{CHILD} has made {count} accesses");
    }
}

fn address_of(text: &str) -> std::net::IpAddr {
    text.parse().expect("an address")
}

/// The client's process.
struct Accessor {
    process: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Accessor {
    fn start(node: &Node, path: &str) -> Accessor {
        let mut process = Command::new(std::env::current_exe().expect("it runs"))
            .args(["--exact", "child", "--nocapture"])
            .env(CHILD, format!("{} {path}", node.instance))
            .env("TERRACE_SYSTEM_CALLS_ADDRESS", address().to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("it starts");
        let orders = process.stdin.take().expect("it is piped");
        let answers = BufReader::new(process.stdout.take().expect("it is piped"));
        Accessor { process, orders, answers }
    }

    /// Has the client make accesses, and waits until they have ended.
    fn access(&mut self, count: u64) {
        writeln!(self.orders, "{count}").expect("the client reads");
        let mut line = String::new();
        while !line.starts_with(CHILD) {
            line.clear();
            assert!(self.answers.read_line(&mut line).expect("text") > 0, "the client has ended");
        }
    }
}

impl Drop for Accessor {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// strace, attached to a process.
struct Strace {
    process: Child,
    table: tempfile::NamedTempFile,
}

impl Strace {
    /// Attaches to all threads of a process. The error says why that is not possible.
    fn attach(pid: u32) -> Result<Strace, String> {
        let table = tempfile::NamedTempFile::new().expect("a file");
        let mut process = Command::new("strace")
            .args(["-c", "-f", "-U", "name,calls", "-p", &pid.to_string(), "-o"])
            .arg(table.path())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| format!("strace does not start: {error}"))?;
        let mut line = String::new();
        BufReader::new(process.stderr.as_mut().expect("it is piped")).read_line(&mut line).expect("text");
        if !line.contains("attached") {
            let _ = process.wait();
            return Err(format!("strace cannot attach: {line}"));
        }
        // It attaches to the other threads after the first one.
        std::thread::sleep(Duration::from_millis(200));
        Ok(Strace { process, table })
    }

    /// Detaches, and returns the number of calls by name.
    fn end(mut self) -> BTreeMap<String, u64> {
        let pid = nix::unistd::Pid::from_raw(self.process.id() as i32);
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGINT).expect("it runs");
        self.process.wait().expect("it is a child");
        let table = std::fs::read_to_string(self.table.path()).expect("it writes a table");
        let row = |line: &str| {
            let mut fields = line.split_whitespace();
            let (name, count) = (fields.next()?, fields.next()?.parse().ok()?);
            (name != "total").then(|| (name.to_owned(), count))
        };
        table.lines().filter_map(row).collect()
    }
}

/// Counts the calls of both ends during accesses to pages in memory, less what is allowed of them.
fn calls_of_hits(path: &str, allowed: &[&str]) {
    let scratch = tempfile::tempdir().expect("a directory");
    let region = format!("{REGION}={}:{REGION_BYTES}", scratch.path().join("region").display());
    let frames = Frames::new();
    let node = Node::start_with(&["--region", &region, "--dram", "32M", "--path", path], &frames);
    let mut client = Accessor::start(&node, path);
    client.access(REGION_BYTES / PAGE);
    // The first WRITE to each page, and the client's view of what is in memory.
    client.access(ACCESSES);
    let ends = [("node", node.pid()), ("client", client.process.id())];
    let attached: Result<Vec<_>, String> = ends.iter().map(|(_, pid)| Strace::attach(*pid)).collect();
    let attached = match attached {
        Ok(attached) => attached,
        Err(reason) => return eprintln!("skipped: {}", reason.trim_end()),
    };
    let begun = Instant::now();
    client.access(ACCESSES);
    let seconds = begun.elapsed().as_secs_f64();
    for ((end, _), strace) in ends.iter().zip(attached) {
        let calls = strace.end();
        eprintln!("{path}, {end}: {ACCESSES} accesses in {seconds:.2} s, calls {calls:?}");
        let counted = calls.iter().filter(|(name, _)| !allowed.contains(&name.as_str()));
        let count: u64 = counted.map(|(_, count)| count).sum();
        let limit = BACKGROUND_PER_SECOND * (seconds + 1.0);
        assert!((count as f64) < limit, "{path}, {end}: {count} calls in {seconds:.2} s: {calls:?}");
    }
}

#[test]
fn hits_make_no_system_calls_within_the_host() {
    calls_of_hits("auto", &[]);
}

#[test]
fn hits_make_only_calls_of_the_network_by_udp() {
    calls_of_hits("udp", &NETWORK_CALLS);
}
