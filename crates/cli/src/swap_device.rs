//! `terrace swap-device`: memory nodes as a block device that a kernel swaps to.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use clap::Args;
use nix::sys::signal::Signal;
use terrace_far_memory::{Client, ClientConfig, ConnectError, PAGE_BYTES};
use terrace_nbd::{Counters, ServerError, slot_count};
use terrace_nic::{PathChoice, PortConfig};
use terrace_node::{Metrics, ServeError};
use terrace_pages::size;

use crate::exit::is_usage_of_port;
use crate::far_memory::resolve;
use crate::fuse::Obstacle;
use crate::log::LogOption;
use crate::swap_front::{Front, Place};
use crate::{node_states, output, swap_pages, swap_process, termination, values};

const AFTER_HELP: &str = "\
Examples:
  terrace swap-device --memory-node 192.0.2.7:7474 --size 8G --socket /run/terrace/swap
  terrace swap-device --memory-node 192.0.2.7:7474,192.0.2.8:7474 --mirror 2 --size 8G --socket swap

  On this kernel:
    nbd-client -unix /run/terrace/swap /dev/nbd0 -swap && mkswap /dev/nbd0 && swapon --discard /dev/nbd0
  For a guest of QEMU, where it is /dev/vda (mkswap /dev/vda && swapon --discard /dev/vda):
    -blockdev driver=nbd,node-name=swap,server.type=unix,server.path=/run/terrace/swap,discard=unmap
    -device virtio-blk-pci,drive=swap
  On this kernel, if it has no NBD, as root:
    terrace swap-device --memory-node 192.0.2.7:7474 --size 8G --mount /run/terrace/disk
    losetup --find --show --direct-io=on /run/terrace/disk/swap       # prints the name: /dev/loop0
    mkswap /dev/loop0 && swapon --discard /dev/loop0

Serves the pages of memory nodes (`terrace memory-node`) as a network block device at a unix socket, or
as a file, which only this user can use. A page takes memory of a node from its first write until it is
discarded (TRIM, WRITE_ZEROES; holes of the file). What was never written reads as zeros.

The socket's directory has to exist. `swapon --discard` and `discard=unmap` give the pages back that
the kernel does not need any more; without them a page stays taken.

The pages end with this process: run swapoff and `losetup -d`, or end the guest, before it. SIGTERM and
SIGINT let requests in flight end, which takes at most ten seconds. SIGUSR1 prints what the device has
done.

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
    #[command(flatten)]
    place: Place,
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
    /// Mounting needs what is not here.
    #[error("cannot mount at {}: {obstacle}", mount_point.display())]
    Obstacle {
        /// The mount point.
        mount_point: PathBuf,
        /// What is not here.
        obstacle: Obstacle,
    },
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
    let refusals = swap_process::protect();
    options.log.install();
    let config = client_config(options)?;
    swap_process::report(&refusals, options.place.mount.is_some());
    let client = Arc::new(Client::connect(&config)?);
    let counters = Arc::default();
    let metrics = options.metrics.map(|address| serve_metrics(address, &counters, &client)).transpose()?;
    // Before the device is served: what a client stores ends with this process. And afterwards for the device's own buffers.
    swap_process::lock_memory()?;
    let front = Front::start(&options.place, &names_of_nodes(&config), &client, &signals)?;
    client.device().attach(front.counters().clone());
    // It is set once.
    let _ = counters.set(front.counters().clone());
    swap_process::lock_memory()?;
    announce(options, &config);
    while let Some(Signal::SIGUSR1) = front.wait(&signals) {
        print_status(&front, &client);
    }
    drop(metrics);
    front.stop(&options.place);
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
        depth: slot_count(options.place.connections()) as u32,
        name: client_name(&options.place.path()),
        port,
        ..config
    })
}

/// The name that memory nodes show: the path of the socket or the file, or the end of a path that is longer than a node takes.
fn client_name(path: &Path) -> String {
    let text = path.to_string_lossy();
    let shown: String = text.chars().map(|letter| if letter.is_control() { '?' } else { letter }).collect();
    let excess = shown.len().saturating_sub(PATH_BYTES_MAX);
    let begin = (excess..=shown.len()).find(|at| shown.is_char_boundary(*at)).unwrap_or(shown.len());
    format!("swap device {}", &shown[begin..])
}

fn names_of_nodes(config: &ClientConfig) -> String {
    config.nodes.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

fn announce(options: &Options, config: &ClientConfig) {
    let copies = if options.mirror == 2 { ", two copies of each page" } else { "" };
    let lines = format!(
        "swap device of {} MiB at {} on {}{copies}\n",
        (config.page_count * PAGE_BYTES as u64) >> 20,
        options.place.path().display(),
        names_of_nodes(config)
    );
    output::announce(&lines, "ends the device, and its pages with it.");
}

/// Serves metrics, which are empty until the device is served.
fn serve_metrics(
    address: SocketAddr,
    counters: &Arc<OnceLock<Arc<Counters>>>,
    client: &Arc<Client>,
) -> Result<Metrics, ServeError> {
    let (counters, observed) = (counters.clone(), Arc::downgrade(client));
    Metrics::serve_text(address, move || match (counters.get(), observed.upgrade()) {
        (Some(counters), Some(client)) => swap_pages::exposition(&counters.totals(), &client),
        _ => String::new(),
    })
}

/// Prints what the device has done and what its memory nodes have.
fn print_status(front: &Front, client: &Client) {
    let totals = front.counters().totals();
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
    output::print_without_waiting(lines);
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
