//! Programs whose memory is on memory nodes, within the host and by UDP, and nodes that die.

mod common;

use std::process::Stdio;
use std::time::Duration;

use common::{MIB, TestPager, compile, run};
use terrace_far_memory::{ClientConfig, MemoryNode, NodeConfig, Scheme};
use terrace_nic::PathChoice;
use terrace_pager::FarStore;

fn node(path: PathChoice) -> MemoryNode {
    node_of(Scheme::Odrp, path)
}

fn node_of(scheme: Scheme, path: PathChoice) -> MemoryNode {
    let mut config = NodeConfig::new(128 * MIB, "127.0.0.1:0".parse().unwrap());
    (config.scheme, config.port.path) = (scheme, path);
    MemoryNode::open(&config).unwrap()
}

fn pager_over(nodes: &[&MemoryNode], copies: usize, path: PathChoice) -> TestPager {
    let mut config = ClientConfig::new(nodes.iter().map(|node| node.listens_at()).collect(), 1);
    config.port.path = path;
    config.copies = copies;
    config.timeout = Duration::from_secs(1);
    TestPager::over(8 * MIB, Box::new(FarStore::connect(config).unwrap()))
}

#[test]
fn a_program_uses_memory_of_a_node_by_each_scheme_within_the_host_and_by_udp() {
    let program = compile("touch");
    let by_udp = Scheme::ALL.map(|scheme| (scheme, PathChoice::Udp));
    for (scheme, path) in by_udp.into_iter().chain([(Scheme::Odrp, PathChoice::Local)]) {
        let node = node_of(scheme, path);
        let pager = pager_over(&[&node], 1, path);
        let most = run(pager.command(&program).arg("24"), "verified");
        let statistics = pager.finish();
        assert!(most <= 8 * MIB && statistics.loads > 4_000, "{most} bytes, {statistics:?}");
        // The node has all of its pages again.
        let free = (0..100).any(|_| {
            std::thread::sleep(Duration::from_millis(20));
            node.status().free_pages == node.status().page_count
        });
        assert!(free, "{:?}", node.status());
    }
}

#[test]
fn a_program_survives_the_loss_of_a_node_with_mirrors_and_gets_sigbus_without() {
    let program = compile("threads");
    for copies in [2, 1] {
        let (first, second) = (node(PathChoice::Udp), node(PathChoice::Udp));
        let pager = pager_over(&[&first, &second], copies, PathChoice::Udp);
        let mut command = pager.command(&program);
        command.args(["24", "8"]).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = command.spawn().unwrap();
        std::thread::sleep(Duration::from_secs(3));
        drop(first);
        let (output, _) = common::sample(child, Duration::from_secs(120));
        let statistics = pager.finish();
        use std::os::unix::process::ExitStatusExt;
        match copies {
            2 => assert!(output.status.success() && statistics.losses == 0, "{output:?} {statistics:?}"),
            _ => assert_eq!(output.status.signal(), Some(7), "{output:?} {statistics:?}"),
        }
    }
}
