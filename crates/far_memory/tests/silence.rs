//! Nodes and clients that are stopped for longer than the transport's retries take. None of them has ended, so no page is lost.

mod common;

use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::*;
use rustix::process::{Pid, Signal, kill_process};
use terrace_far_memory::*;
use terrace_nic::{PathChoice, PortConfig};

/// What the child process of a test does: `node SCHEME`, or `client PATH ADDRESS`.
const ROLE: &str = "FAR_MEMORY_TEST_ROLE";
const PAGES: u64 = 64;
/// Longer than the 1.7 seconds after which a queue pair with 7 retries fails.
const STOPPED: Duration = Duration::from_millis(2500);
/// Shorter than that.
const SHORT: Duration = Duration::from_secs(1);

/// The test's program once more, in one role. It is killed at the end.
struct Process {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Process {
    fn start(role: &str) -> Process {
        let mut command = Command::new(std::env::current_exe().expect("it runs"));
        command.args(["--exact", "child", "--nocapture"]).env(ROLE, role).stdout(Stdio::piped());
        let mut child = command.spawn().expect("a process");
        let lines = BufReader::new(child.stdout.take().expect("its output"));
        Process { child, lines }
    }

    /// Waits for a line with these words, and returns the rest of it.
    fn expect(&mut self, words: &str) -> String {
        loop {
            let mut line = String::new();
            assert!(self.lines.read_line(&mut line).expect("its output") > 0, "it ended before {words:?}");
            if let Some((_, rest)) = line.split_once(words) {
                return rest.trim().into();
            }
        }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("it runs");
    }

    /// Stops it, and returns when it has stopped.
    fn stop(&self) {
        self.signal(Signal::STOP);
        let path = format!("/proc/{}/stat", self.child.id());
        let is_stopped = || std::fs::read_to_string(&path).is_ok_and(|stat| stat.contains(") T "));
        wait_until("the process is stopped", is_stopped);
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Not a test: what the child processes do.
#[test]
fn child() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let words: Vec<&str> = role.split(' ').collect();
    match words[..] {
        ["node", scheme] => {
            let change = |config: &mut NodeConfig| config.scheme = scheme.parse().expect("a scheme");
            let node = node_over(PathChoice::Local, 4 * MIB, change);
            println!("node at {}", node.listens_at());
            std::thread::park();
        }
        ["client", path, address] => {
            let client =
                connect(&[address.parse().expect("an address")], path.parse().expect("a path"), |_| ());
            store_all(&client);
            // Replies are on their way whenever the process is stopped.
            let mut turn = Instant::now();
            println!("loading");
            loop {
                load_all(&client);
                let now = Instant::now();
                if now - std::mem::replace(&mut turn, now) > SHORT {
                    break;
                }
            }
            load_all(&client);
            println!("verified");
        }
        _ => panic!("no role: {role:?}"),
    }
}

fn connect(
    nodes: &[std::net::SocketAddr],
    path: PathChoice,
    change: impl FnOnce(&mut ClientConfig),
) -> Client {
    let config = ClientConfig::new(nodes.to_vec(), PAGES);
    let port = PortConfig { path, ..config.port.clone() };
    let mut config = ClientConfig { port, timeout: SHORT, ..config };
    change(&mut config);
    Client::connect(&config).expect("a client")
}

fn store_all(client: &Client) {
    (0..PAGES).for_each(|page| client.store(page, &content(page, 1)).expect("stored"));
}

/// Loads all pages at a time, and checks them.
fn load_all(client: &Client) {
    let buffer = client.buffer(PAGES as usize).expect("a buffer");
    submit_loads(client, &buffer);
    check_loads(client, &buffer);
}

fn submit_loads(client: &Client, buffer: &Arc<PageBuffer>) {
    let load = |page| Request::Load { page, into: (buffer.clone(), page as usize), tag: page };
    assert_eq!(client.submit((0..PAGES).map(load)), Ok(PAGES as usize));
}

fn check_loads(client: &Client, buffer: &Arc<PageBuffer>) {
    let mut done = Vec::new();
    while done.len() < PAGES as usize {
        client.poll(&mut done);
    }
    let mut bytes = [0; PAGE_BYTES];
    for end in done {
        assert_eq!(end.result, Ok(()), "{:?}", client.nodes());
        buffer.read(end.page as usize, &mut bytes).expect("within the buffer");
        assert!(bytes == content(end.page, 1), "{}", end.page);
    }
}

fn node_process(scheme: Scheme) -> (Process, std::net::SocketAddr) {
    let mut node = Process::start(&format!("node {scheme}"));
    let address = node.expect("node at ").parse().expect("an address");
    (node, address)
}

#[test]
fn a_node_that_is_stopped_and_goes_on_has_lost_no_page() {
    std::thread::scope(|scope| {
        for scheme in Scheme::ALL {
            for path in [PathChoice::Local, PathChoice::Udp] {
                scope.spawn(move || {
                    let (node, address) = node_process(scheme);
                    let client = connect(&[address], path, |_| ());
                    store_all(&client);
                    node.stop();
                    let buffer = client.buffer(PAGES as usize).expect("a buffer");
                    submit_loads(&client, &buffer);
                    let (stopped, mut done) = (Instant::now(), Vec::new());
                    // Baselines read memory within the host without their node.
                    while stopped.elapsed() < STOPPED && done.is_empty() {
                        client.poll(&mut done);
                    }
                    assert!(
                        done.iter().all(|end| end.result.is_ok()),
                        "{scheme} {path} {:?}",
                        client.nodes()
                    );
                    node.signal(Signal::CONT);
                    while done.len() < PAGES as usize {
                        client.poll(&mut done);
                    }
                    assert!(
                        done.iter().all(|end| end.result.is_ok()),
                        "{scheme} {path} {:?}",
                        client.nodes()
                    );
                    load_all(&client);
                    assert_eq!(client.nodes()[0].losses, 0);
                });
            }
        }
    });
}

#[test]
fn a_node_that_stays_stopped_is_given_up_sooner_if_others_have_its_pages() {
    for copies in [2, 1] {
        let ((node, address), (_other, second)) = (node_process(Scheme::Odrp), node_process(Scheme::Odrp));
        let client = connect(&[address, second], PathChoice::Udp, |config| {
            (config.copies, config.last_copy_timeout) = (copies, 3 * SHORT);
        });
        store_all(&client);
        node.stop();
        let begun = Instant::now();
        let loaded = client.load(0, &mut [0; PAGE_BYTES]);
        let (is_early, lost) = (begun.elapsed() < 2 * SHORT, client.nodes()[0].lost.clone());
        assert!(lost.is_some_and(|lost| lost.contains("has not answered")), "{:?}", client.nodes());
        match copies {
            2 => assert!(is_early && loaded.is_ok(), "{:?} {loaded:?}", begun.elapsed()),
            _ => assert!(
                !is_early && loaded == Err(PageError::NodeLost(0)),
                "{:?} {loaded:?}",
                begun.elapsed()
            ),
        }
    }
}

#[test]
fn a_silent_node_is_not_given_up_for_one_that_is_silent_too() {
    let ((node, address), (other, second)) = (node_process(Scheme::Odrp), node_process(Scheme::Odrp));
    let client = connect(&[address, second], PathChoice::Udp, |config| config.copies = 2);
    store_all(&client);
    [&node, &other].into_iter().for_each(Process::stop);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(3 * SHORT / 2);
            other.signal(Signal::KILL);
            node.signal(Signal::CONT);
        });
        client.store(0, &content(0, 1)).expect("stored on the one that is left");
    });
    load_all(&client);
    assert_eq!(client.nodes().iter().map(|node| node.losses).collect::<Vec<_>>(), [0, 1]);
}

#[test]
fn a_client_that_is_stopped_and_goes_on_has_its_pages() {
    std::thread::scope(|scope| {
        for scheme in [Scheme::Odrp, Scheme::TwoSided] {
            for path in [PathChoice::Local, PathChoice::Udp] {
                scope.spawn(move || {
                    let node = node_over(PathChoice::Local, 4 * MIB, |config| config.scheme = scheme);
                    let mut client = Process::start(&format!("client {path} {}", node.listens_at()));
                    client.expect("loading");
                    std::thread::sleep(SHORT / 2);
                    client.stop();
                    std::thread::sleep(STOPPED);
                    client.signal(Signal::CONT);
                    client.expect("verified");
                });
            }
        }
    });
}
