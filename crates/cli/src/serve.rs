//! `terrace serve`: a memory node.

use std::io::{self, IsTerminal, Write};
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::Args;
use nix::sys::signal::{SigSet, Signal};
use terrace_faults::FaultPlan;
use terrace_nic::{PathChoice, PortConfig};
use terrace_node::{Metrics, RegionConfig, ServeError, ServeMode, Server, ServerConfig};
use terrace_tier::{FaultModel, size};

use crate::log::{self, LogLevel};

const AFTER_HELP: &str = "\
Examples:
  terrace serve --region table=/data/table.bin:64G --dram 8G
  terrace serve --region a=/data/a.bin --region b=/dev/sdb --dram 8G --listen 192.0.2.7
  terrace stat \"$(pidof terrace)\" --watch

A region is a file, created sparse if it is missing and a size is given, or a block device. Its hottest
parts (in units of 1 MiB) are kept in at most --dram bytes of memory, which all regions share; the rest
is read and written where it lies. What a client has been told is written survives this process; what it
has flushed (`commit`) survives a loss of power.

Clients: Terrace's Rust library (crate terrace-node), by the region's name.

Modes are ways to serve what is not in memory. `term` is the one to use; `wait` is its peer for clients that
know nothing of Terrace. The others are what these are compared with: pin, odp, rpc, rpc-buffer,
rpc-direct, rpc-tiering, rpc-tiering-promote. In odp the time that a page fault takes is modelled: at least 570 us.

--threads is for mode rpc, which copies from the mapping and takes page faults: with one thread everybody waits for each of
them, with N threads up to N wait side by side. The other modes give the disk many requests at once without waiting for
any of them; one thread serves the network in all modes.

--fault-plan is for testing clients: `terrace run --help` has what it may say. Storage is troubled where it is read and
written without page faults, which is in all modes but pin, odp and rpc.";

/// Options of `terrace serve`.
#[derive(Args)]
#[command(after_help = AFTER_HELP)]
pub struct Options {
    /// A region: its name, its file, and its size if it is yet to be created
    #[arg(long = "region", value_name = "NAME=PATH[:SIZE]", required = true)]
    regions: Vec<Region>,
    /// Memory to keep hot data in, over all regions (such as 512M or 8G)
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    dram: u64,
    /// How to serve what is not in memory
    #[arg(long, value_name = "MODE", default_value = "term")]
    mode: ServeMode,
    /// Local address [default: chosen as for `terrace run`]
    #[arg(long, value_name = "ADDRESS", env = "TERRACE_ADDR", hide_env_values = true)]
    listen: Option<IpAddr>,
    /// Largest path MTU in bytes
    #[arg(long, value_name = "BYTES", env = "TERRACE_MTU", hide_env_values = true)]
    mtu: Option<u32>,
    /// How clients on this host may reach regions: auto or local (without packets where possible), or udp
    #[arg(long, value_name = "PATH", env = "TERRACE_PATH", hide_env_values = true, default_value = "auto")]
    path: PathChoice,
    /// What is logged to standard error
    #[arg(long, value_name = "LEVEL", env = "TERRACE_LOG", hide_env_values = true, default_value = "warn")]
    log: LogLevel,
    /// Serve metrics for Prometheus at this address and port
    #[arg(long, value_name = "ADDRESS:PORT")]
    metrics: Option<SocketAddr>,
    /// Threads whose page faults may wait for the disk side by side; matters to mode rpc only
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256))]
    threads: u16,
    /// Inject faults as this file says: in packets, receives and storage
    #[arg(long, value_name = "FILE", env = "TERRACE_FAULT_PLAN", hide_env_values = true, value_parser = checked_plan)]
    fault_plan: Option<PathBuf>,
    /// How often hot data is looked for, in milliseconds
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=60_000))]
    period: Option<u64>,
}

/// The path of a valid plan, or an empty one: an empty variable counts as unset.
fn checked_plan(text: &str) -> Result<PathBuf, String> {
    if !text.is_empty() {
        FaultPlan::load(text.as_ref()).map_err(|error| error.to_string())?;
    }
    Ok(text.into())
}

/// `NAME=PATH[:SIZE]`.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Region(RegionConfig);

impl FromStr for Region {
    type Err = String;

    fn from_str(text: &str) -> Result<Region, String> {
        let (name, rest) = text.split_once('=').ok_or("it has no `=` between name and path")?;
        if name.is_empty() || rest.is_empty() {
            return Err("name and path are needed, as in table=/data/table.bin:64G".into());
        }
        // A path may contain colons: only a size after the last one counts as the size.
        let (path, size) = match rest.rsplit_once(':') {
            Some((path, size))
                if !path.is_empty() && size.starts_with(|first: char| first.is_ascii_digit()) =>
            {
                (path, Some(size::parse(size).map_err(|error| error.to_string())?))
            }
            _ => (rest, None),
        };
        Ok(Region(RegionConfig { name: name.into(), path: PathBuf::from(path), size }))
    }
}

/// Serves until SIGINT or SIGTERM.
pub fn serve(options: &Options) -> Result<(), ServeError> {
    // Before threads are started, so that none of them receives the signals.
    let ending = SigSet::from_iter([Signal::SIGINT, Signal::SIGTERM]);
    // Blocking existing signals cannot fail.
    let _ = ending.thread_block();
    log::install(options.log);
    let server = Server::open(&ServerConfig {
        regions: options.regions.iter().map(|region| region.0.clone()).collect(),
        dram_bytes: options.dram,
        mode: options.mode,
        threads: options.threads.into(),
        port: PortConfig {
            address: options.listen,
            mtu: options.mtu,
            slot: None,
            fault_plan: options.fault_plan.clone().filter(|path| !path.as_os_str().is_empty()),
            pcap: None,
            path: options.path,
        },
        period: options.period.map(Duration::from_millis),
    })?;
    let _metrics = options.metrics.map(|addr| Metrics::serve(addr, &server)).transpose()?;
    announce(&server, options);
    let _ = ending.wait();
    Ok(())
}

fn announce(server: &Server, options: &Options) {
    let snapshot = server.device().snapshot();
    let mut lines = format!(
        "serving at {} (UDP port {}), mode {}, {} MiB of memory\n",
        snapshot.addresses.first().map_or("?", |address| address),
        snapshot.udp_port,
        options.mode,
        options.dram >> 20
    );
    for (region, stats) in options.regions.iter().zip(&server.stats().regions) {
        lines += &format!("  {}: {} MiB in {}\n", region.0.name, stats.len >> 20, region.0.path.display());
    }
    if options.mode == ServeMode::Odp {
        let fault = FaultModel::default().fault;
        lines += &format!("  page faults are modelled: each takes at least {} us\n", fault.as_micros());
    }
    if io::stdout().is_terminal() {
        lines += "Ctrl-C ends it.\n";
    }
    // The server works without an open standard output, too.
    let _ = io::stdout().write_all(lines.as_bytes()).and_then(|()| io::stdout().flush());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_have_a_name_a_path_and_perhaps_a_size() {
        let parsed = |text: &str| text.parse::<Region>().map(|region| region.0);
        let region =
            |name: &str, path: &str, size| Ok(RegionConfig { name: name.into(), path: path.into(), size });
        assert_eq!(parsed("a=/x/y"), region("a", "/x/y", None));
        assert_eq!(parsed("a=/x/y:2G"), region("a", "/x/y", Some(2 << 30)));
        assert_eq!(parsed("a=/dev/by-id/x:y"), region("a", "/dev/by-id/x:y", None));
        assert_eq!(parsed("a=b=c:4096"), region("a", "b=c", Some(4096)));
        for nonsense in ["", "a", "=x", "a=", "a=/x:2Q", "a=/x:0"] {
            assert!(parsed(nonsense).is_err(), "{nonsense}");
        }
    }
}
