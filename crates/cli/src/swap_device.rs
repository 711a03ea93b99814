//! `terrace swap-device`: memory nodes as a block device that a kernel swaps to.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use nix::sys::signal::Signal;
use rustix::mm::{MlockAllFlags, mlockall};
use rustix::process::{Resource, configure_io_flusher_behavior, getrlimit};
use terrace_far_memory::{Client, ClientConfig, ConnectError, PAGE_BYTES};
use terrace_nbd::{ClientQueue, Server, ServerError};
use terrace_nic::{PathChoice, PortConfig};
use terrace_node::{Metrics, ServeError};
use terrace_pages::size;

use crate::exit::is_usage_of_port;
use crate::far_memory::resolve;
use crate::log::LogOption;
use crate::{node_states, output, swap_pages, termination, values};

const AFTER_HELP: &str = "\
Examples:
  terrace swap-device --memory-node 192.0.2.7:7474 --size 8G --socket /run/terrace/swap
  terrace swap-device --memory-node 192.0.2.7:7474,192.0.2.8:7474 --mirror 2 --size 8G --socket swap

  On this kernel:
    nbd-client -unix /run/terrace/swap /dev/nbd0 -swap && mkswap /dev/nbd0 && swapon --discard /dev/nbd0
  For a guest of QEMU, where it is /dev/vda (mkswap /dev/vda && swapon --discard /dev/vda):
    -blockdev driver=nbd,node-name=swap,server.type=unix,server.path=/run/terrace/swap,discard=unmap
    -device virtio-blk-pci,drive=swap

Serves the pages of memory nodes (`terrace memory-node`) as a network block device at a unix socket,
which only this user can connect to. A page takes memory of a node from its first write until it is
discarded (TRIM, WRITE_ZEROES). What was never written reads as zeros.

The socket's directory has to exist. `swapon --discard` and `discard=unmap` give the pages back that
the kernel does not need any more; without them a page stays taken.

The pages end with this process: run swapoff, or end the guest, before it. SIGTERM and SIGINT let
requests in flight end, which takes at most ten seconds. SIGUSR1 prints what the device has done.

A request whose memory node is lost fails with EIO, unless --mirror 2 keeps a copy elsewhere. A node
that is started again is used again then, and pages are copied to it. A write fails with ENOSPC when
the nodes have no free page.

All memory of this process is locked, because a kernel that swapped it out could not swap it in.
docs/swap-device.md has the limits of swapping over a network.";

/// Bytes of a path that are a part of the client's name, of which a memory node takes 64.
const PATH_BYTES_MAX: usize = 48;

/// Options of `terrace swap-device`.
#[derive(Args)]
#[command(after_long_help = AFTER_HELP)]
pub struct Options {
    /// Memory nodes over which the pages are spread
    #[arg(long = "memory-node", value_name = "HOST:PORT", value_delimiter = ',', required = true, value_parser = resolve)]
    memory_nodes: Vec<SocketAddr>,
    /// Copies of each page, on different memory nodes
    #[arg(long, value_name = "COPIES", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=2))]
    mirror: u8,
    /// Size of the device (such as 512M or 8G)
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    size: u64,
    /// Path of the unix socket, in a directory that exists
    #[arg(long, value_name = "PATH")]
    socket: PathBuf,
    /// Serve metrics for Prometheus at this address and port
    #[arg(long, value_name = "ADDRESS:PORT")]
    metrics: Option<SocketAddr>,
    /// Local address [default: chosen as for `terrace run`]
    #[arg(long, value_name = "ADDRESS", env = "TERRACE_ADDR", hide_env_values = true)]
    addr: Option<IpAddr>,
    /// Largest path MTU in bytes
    #[arg(long, value_name = "BYTES", env = "TERRACE_MTU", hide_env_values = true)]
    mtu: Option<u32>,
    /// Transport to memory nodes on this host
    #[arg(long, value_name = "PATH", env = "TERRACE_PATH", hide_env_values = true, default_value = "auto", value_parser = values::path())]
    path: PathChoice,
    #[command(flatten)]
    log: LogOption,
}

/// An error of `terrace swap-device`.
#[derive(Debug, thiserror::Error)]
pub enum SwapDeviceError {
    /// The size is less than a page.
    #[error("a device has at least one page of {PAGE_BYTES} bytes")]
    Size,
    /// A page cannot have so many copies.
    #[error("--mirror {copies} needs as many memory nodes, and {nodes} is given")]
    Mirror {
        /// Copies of each page.
        copies: u8,
        /// Memory nodes.
        nodes: usize,
    },
    /// The memory nodes cannot be used.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The device has no buffer.
    #[error("no memory for the device's buffer: {0}")]
    Buffer(#[from] terrace_nic::Error),
    /// The device cannot be served.
    #[error(transparent)]
    Server(#[from] ServerError),
    /// Metrics cannot be served.
    #[error(transparent)]
    Metrics(#[from] ServeError),
    /// The process may not lock its memory.
    #[error(
        "cannot lock this process's memory ({error}), and a kernel that swaps it out stops: run as root, grant CAP_IPC_LOCK, or raise the limit (`ulimit -l`, now {limit})"
    )]
    Lock {
        /// The system's error.
        error: io::Error,
        /// The limit of locked memory.
        limit: String,
    },
}

impl SwapDeviceError {
    /// Whether the command line is wrong.
    pub fn is_usage(&self) -> bool {
        match self {
            SwapDeviceError::Connect(ConnectError::Port(error)) => is_usage_of_port(error),
            SwapDeviceError::Connect(ConnectError::SameNode(_)) => true,
            other => matches!(other, SwapDeviceError::Size | SwapDeviceError::Mirror { .. }),
        }
    }
}

/// Serves until SIGINT, SIGTERM or SIGHUP.
pub fn swap_device(options: &Options) -> Result<(), SwapDeviceError> {
    let signals = termination::block(&[Signal::SIGUSR1]);
    options.log.install();
    let config = client_config(options)?;
    // The kernel does not write back pages to satisfy this process, which may be what they are written to. Threads inherit
    // it. An unprivileged process does not have this, and does not serve its own kernel either.
    if let Err(error) = configure_io_flusher_behavior(true) {
        tracing::info!(%error, "not for the swap space of this kernel: PR_SET_IO_FLUSHER needs CAP_SYS_RESOURCE");
    }
    let client = Arc::new(Client::connect(&config)?);
    let server = Server::start(&options.socket, ClientQueue::new(client.clone())?)?;
    client.device().attach(server.counters().clone());
    let metrics = options.metrics.map(|address| serve_metrics(address, &server, &client)).transpose()?;
    lock_memory()?;
    announce(options, &config);
    while let Ok(Signal::SIGUSR1) = signals.wait() {
        print_status(&server, &client);
    }
    drop(metrics);
    server.stop();
    Ok(())
}

fn client_config(options: &Options) -> Result<ClientConfig, SwapDeviceError> {
    let (nodes, copies) = (options.memory_nodes.len(), options.mirror);
    if usize::from(copies) > nodes {
        return Err(SwapDeviceError::Mirror { copies, nodes });
    }
    let page_count = options.size / PAGE_BYTES as u64;
    if page_count == 0 {
        return Err(SwapDeviceError::Size);
    }
    let config = ClientConfig::new(options.memory_nodes.clone(), page_count);
    let port = PortConfig {
        address: options.addr.or(config.port.address),
        mtu: options.mtu,
        path: options.path,
        ..config.port.clone()
    };
    Ok(ClientConfig {
        copies: copies.into(),
        depth: ClientQueue::DEPTH as u32,
        name: client_name(&options.socket),
        port,
        ..config
    })
}

/// The name that memory nodes show: the socket's path, or the end of a path that is longer than a node takes.
fn client_name(socket: &Path) -> String {
    let text = socket.to_string_lossy();
    let path: String = text.chars().map(|letter| if letter.is_control() { '?' } else { letter }).collect();
    let excess = path.len().saturating_sub(PATH_BYTES_MAX);
    let begin = (excess..=path.len()).find(|at| path.is_char_boundary(*at)).unwrap_or(path.len());
    format!("swap device {}", &path[begin..])
}

/// Locks what is mapped and what will be.
fn lock_memory() -> Result<(), SwapDeviceError> {
    mlockall(MlockAllFlags::CURRENT | MlockAllFlags::FUTURE).map_err(|error| {
        let limit = getrlimit(Resource::Memlock).current;
        let limit = limit.map_or("unlimited".into(), |bytes| format!("{} KiB", bytes >> 10));
        SwapDeviceError::Lock { error: error.into(), limit }
    })
}

fn announce(options: &Options, config: &ClientConfig) {
    let nodes: Vec<String> = config.nodes.iter().map(ToString::to_string).collect();
    let copies = if options.mirror == 2 { ", two copies of each page" } else { "" };
    let lines = format!(
        "swap device of {} MiB at {} on {}{copies}\n",
        (config.page_count * PAGE_BYTES as u64) >> 20,
        options.socket.display(),
        nodes.join(", ")
    );
    output::announce(&lines, "ends the device, and its pages with it.");
}

fn serve_metrics(address: SocketAddr, server: &Server, client: &Arc<Client>) -> Result<Metrics, ServeError> {
    let (counters, observed) = (server.counters().clone(), Arc::downgrade(client));
    Metrics::serve_text(address, move || {
        let client = observed.upgrade();
        client.map_or_else(String::new, |client| swap_pages::exposition(&counters.totals(), &client))
    })
}

/// Prints what the device has done and what its memory nodes have.
fn print_status(server: &Server, client: &Client) {
    let totals = server.counters().totals();
    let mut lines = format!(
        "swap device: {} connections, {} requests ({} failed), pages: {} loaded, {} stored, {} freed, {} in use\n",
        totals.connections,
        totals.requests,
        totals.failed_requests,
        totals.loaded_pages,
        totals.stored_pages,
        totals.invalidated_pages,
        client.stored_pages()
    );
    lines += &node_states::lines(&client.nodes());
    // The device does not depend on an open standard output.
    let _ = output::print(&lines);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_clients_fit() {
        assert_eq!(client_name(Path::new("/run/swap")), "swap device /run/swap");
        let name = client_name(Path::new(&format!("/{}/\n\u{fc}/swap", "\u{fc}".repeat(40))));
        assert!(name.len() <= 64 && name.ends_with("/?\u{fc}/swap"), "{name}");
    }
}
