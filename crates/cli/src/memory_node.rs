//! `terrace memory-node`: a memory node whose NIC allocates pages.

use std::io::{self, IsTerminal, Write};
use std::net::SocketAddr;

use clap::Args;
use nix::sys::signal::{SigSet, Signal};
use terrace_far_memory::{
    ConnectError, MemoryNode, NodeConfig, NodeError, NodeStatus, PAGE_BYTES, node_status,
};
use terrace_nic::{OpenError, PathChoice, PortConfig};
use terrace_tier::size;

use crate::log::LogOption;
use crate::{run, table, usage_or_1, values};

const AFTER_HELP: &str = "\
Examples:
  terrace memory-node --memory 8G --listen 192.0.2.7:7474
  terrace memory-node --memory 8G --listen 192.0.2.7:7474 --clients 8 --budget 2G
  terrace memory-node --status 192.0.2.7:7474

Lends its memory in pages of 4 KiB. Clients store, load and free pages (docs/remote-paging.md); the NIC
allocates, maps and copies them. This process sets a client up, compares counters with budgets, and
frees the pages of clients that have gone.

Pages do not outlive the node, and those of a client do not outlive the client.";

/// Options of `terrace memory-node`.
#[derive(Args)]
#[command(after_long_help = AFTER_HELP)]
pub struct Options {
    /// Memory to lend (such as 512M or 8G)
    #[arg(long, value_name = "SIZE", value_parser = size::parse, required_unless_present = "status")]
    memory: Option<u64>,
    /// Address and TCP port at which clients connect; the NIC has the same address
    #[arg(long, value_name = "ADDRESS:PORT", required_unless_present = "status")]
    listen: Option<SocketAddr>,
    /// Clients at most
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=1024))]
    clients: u16,
    /// Memory that one client may have at most [default: all]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    budget: Option<u64>,
    /// Show the pages of a running memory node, and who has them
    #[arg(long, value_name = "ADDRESS:PORT", conflicts_with_all = ["memory", "listen"])]
    status: Option<SocketAddr>,
    /// Print the status as JSON
    #[arg(long, requires = "status")]
    json: bool,
    /// Largest path MTU in bytes
    #[arg(long, value_name = "BYTES", env = "TERRACE_MTU", hide_env_values = true)]
    mtu: Option<u32>,
    /// Transport to clients on this host
    #[arg(long, value_name = "PATH", env = "TERRACE_PATH", hide_env_values = true, default_value = "auto", value_parser = values::path())]
    path: PathChoice,
    #[command(flatten)]
    log: LogOption,
}

/// An error of `terrace memory-node`.
#[derive(Debug, thiserror::Error)]
pub enum MemoryNodeError {
    /// The node cannot be opened.
    #[error(transparent)]
    Node(#[from] NodeError),
    /// A node does not say how it is used.
    #[error(transparent)]
    Status(#[from] ConnectError),
    /// Standard output is closed or full.
    #[error("cannot write: {0}")]
    Output(#[from] io::Error),
}

/// The exit status after an error.
pub fn exit_code(error: &MemoryNodeError) -> u8 {
    usage_or_1(match error {
        MemoryNodeError::Node(NodeError::Size) => true,
        MemoryNodeError::Node(NodeError::Port(OpenError::Udp(error))) => run::is_usage(error),
        _ => false,
    })
}

/// Serves until SIGINT or SIGTERM, or shows the status of another node.
pub fn memory_node(options: &Options) -> Result<(), MemoryNodeError> {
    let (Some(memory), Some(listen)) = (options.memory, options.listen) else {
        return options.status.map_or(Ok(()), |address| show_status(address, options.json));
    };
    // The signals are blocked before threads start, so that no thread receives them.
    let termination = SigSet::from_iter([Signal::SIGINT, Signal::SIGTERM]);
    // Blocking existing signals cannot fail.
    let _ = termination.thread_block();
    options.log.install();
    let config = NodeConfig::new(memory, listen);
    let port = PortConfig { mtu: options.mtu, path: options.path, ..config.port.clone() };
    let budget_pages = options.budget.map(|bytes| bytes / PAGE_BYTES as u64);
    let node =
        MemoryNode::open(&NodeConfig { clients_max: options.clients.into(), budget_pages, port, ..config })?;
    announce(&node, memory);
    let _ = termination.wait();
    Ok(())
}

fn announce(node: &MemoryNode, memory: u64) {
    let mut lines = format!("lending {} MiB at {}\n", memory >> 20, node.listens_at());
    if io::stdout().is_terminal() {
        lines += "Ctrl-C ends the memory node, and the pages with it.\n";
    }
    // The node does not depend on an open standard output.
    let _ = io::stdout().write_all(lines.as_bytes()).and_then(|()| io::stdout().flush());
}

fn show_status(address: SocketAddr, json: bool) -> Result<(), MemoryNodeError> {
    let status = node_status(address)?;
    let text = match json {
        true => serde_json::to_string_pretty(&status).map_err(io::Error::from)? + "\n",
        false => text(&status),
    };
    Ok(io::stdout().write_all(text.as_bytes())?)
}

/// The pool in a line, and a line for each client.
pub fn text(status: &NodeStatus) -> String {
    let mib = |pages: u64| (pages * PAGE_BYTES as u64) >> 20;
    let mut text = format!(
        "\nmemory node: {} of {} pages free ({} of {} MiB), {} repairs\n",
        status.free_pages,
        status.page_count,
        mib(status.free_pages),
        mib(status.page_count),
        status.repairs
    );
    if status.clients.is_empty() {
        return text;
    }
    let header = ["client", "address", "pages", "budget", "space", "loads", "stores", "new pages", "freed"];
    let rows: Vec<Vec<String>> = status
        .clients
        .iter()
        .map(|client| {
            let counts = [
                client.pages,
                status.budget_pages,
                client.page_count,
                client.loads,
                client.mapped_stores,
                client.unmapped_stores,
                client.invalidations,
            ];
            let counts = counts.map(|count| count.to_string());
            [client.name.clone(), client.address.to_string()].into_iter().chain(counts).collect()
        })
        .collect();
    text += &table::render(&header, &rows);
    text
}

#[cfg(test)]
mod tests {
    use terrace_far_memory::ClientPages;

    use super::*;

    #[test]
    fn each_client_has_a_line_with_its_pages() {
        let client = ClientPages {
            name: "db".into(),
            address: [192, 0, 2, 1].into(),
            page_count: 1024,
            pages: 77,
            loads: 1,
            mapped_stores: 2,
            unmapped_stores: 80,
            invalidations: 3,
        };
        let status = NodeStatus {
            page_count: 1024,
            free_pages: 947,
            budget_pages: 512,
            repairs: 0,
            clients: vec![client],
        };
        let text = text(&status);
        assert!(text.contains("947 of 1024 pages free (3 of 4 MiB)"), "{text}");
        let line: Vec<&str> = text.lines().last().expect("a line").split_whitespace().collect();
        assert_eq!(line, ["db", "192.0.2.1", "77", "512", "1024", "1", "2", "80", "3"]);
    }
}
