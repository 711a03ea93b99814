//! `terrace memory-node`: a memory node whose NIC allocates pages.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use clap::Args;
use terrace_far_memory::{ConnectError, MemoryNode, NodeConfig, NodeError, PAGE_BYTES, Scheme, node_status};
use terrace_nic::{PathChoice, PortConfig};
use terrace_node::{Metrics, ServeError};
use terrace_pages::{PagesError, check_memory, size};

use crate::exit::is_usage_of_port;
use crate::log::LogOption;
use crate::{json, output, pool, termination, values};

const AFTER_HELP: &str = "\
Examples:
  terrace memory-node --memory 8G --listen 192.0.2.7:7474
  terrace memory-node --memory 8G --listen 192.0.2.7:7474 --clients 8 --budget 2G
  terrace memory-node --status 192.0.2.7:7474
  terrace memory-node --memory 8G --listen 192.0.2.7:7474 --metrics 192.0.2.7:9474

Lends its memory in pages of 4 KiB. Clients store, load and free pages (docs/remote-paging.md); the NIC
allocates, maps and copies them. This process sets a client up, compares counters with budgets, and
frees the pages of clients that have gone.

All schemes but `odrp` are baselines to compare it with, those of the ODRP paper. Clients follow the
scheme of their node.

Pages do not outlive the node, and those of a client do not outlive the client. There is no
authentication: a host that can connect may take pages, up to --budget. It cannot read those of other
clients. The node can read all.";

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
    #[arg(long, value_name = "SIZE", value_parser = values::pages_size)]
    budget: Option<u64>,
    /// How pages are allocated
    #[arg(long, value_name = "SCHEME", default_value = "odrp", value_parser = values::scheme())]
    scheme: Scheme,
    /// Serve metrics for Prometheus at this address and port
    #[arg(long, value_name = "ADDRESS:PORT")]
    metrics: Option<SocketAddr>,
    /// Show the pages of a running memory node, and who has them
    #[arg(long, value_name = "ADDRESS:PORT", conflicts_with_all = ["memory", "listen", "clients", "budget", "scheme", "metrics"])]
    status: Option<SocketAddr>,
    /// Print the status as JSON
    #[arg(long, conflicts_with_all = ["memory", "listen"])]
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
    /// The machine or the control group has less memory.
    #[error("--memory: {0}")]
    Memory(#[from] PagesError),
    /// The node cannot be opened.
    #[error(transparent)]
    Node(#[from] NodeError),
    /// Metrics cannot be served.
    #[error(transparent)]
    Metrics(#[from] ServeError),
    /// A node does not say how it is used.
    #[error(transparent)]
    Status(#[from] ConnectError),
    /// Standard output is closed or full.
    #[error("cannot write: {0}")]
    Output(#[from] io::Error),
}

impl MemoryNodeError {
    /// Whether the command line is wrong.
    pub fn is_usage(&self) -> bool {
        match self {
            MemoryNodeError::Node(NodeError::Port(error)) => is_usage_of_port(error),
            MemoryNodeError::Node(NodeError::Size | NodeError::NoSlab(..)) => true,
            _ => false,
        }
    }
}

/// Serves until SIGINT, SIGTERM or SIGHUP, or shows the status of another node.
pub fn memory_node(options: &Options) -> Result<(), MemoryNodeError> {
    let (Some(memory), Some(listen)) = (options.memory, options.listen) else {
        return options.status.map_or(Ok(()), |address| show_status(address, options.json));
    };
    let termination = termination::block(&[]);
    options.log.install();
    check_memory(memory, 0)?;
    let config = NodeConfig::new(memory, listen);
    let port = PortConfig { mtu: options.mtu, path: options.path, ..config.port.clone() };
    let budget_pages = options.budget.map(|bytes| bytes / PAGE_BYTES as u64);
    let config = NodeConfig {
        clients_max: options.clients.into(),
        budget_pages,
        scheme: options.scheme,
        port,
        ..config
    };
    let node = Arc::new(MemoryNode::open(&config)?);
    let observed = Arc::downgrade(&node);
    let exposition =
        move || observed.upgrade().map_or_else(String::new, |node| pool::exposition(&node.status()));
    let metrics = options.metrics.map(|address| Metrics::serve_text(address, exposition)).transpose()?;
    announce(&node, memory, options.scheme);
    let _ = termination.wait();
    drop(metrics);
    Ok(())
}

fn announce(node: &MemoryNode, memory: u64, scheme: Scheme) {
    let baseline = match scheme {
        Scheme::Odrp => String::new(),
        other => format!(", by {other}, a baseline for comparison"),
    };
    let lines = format!("lending {} MiB at {}{baseline}\n", memory >> 20, node.listens_at());
    output::announce(&lines, "ends the memory node, and the pages with it.");
}

fn show_status(address: SocketAddr, as_json: bool) -> Result<(), MemoryNodeError> {
    let status = node_status(address)?;
    let text = match as_json {
        true => json::document(&status),
        false => pool::text(&status),
    };
    output::print(&text)?;
    Ok(())
}
