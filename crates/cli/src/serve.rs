//! `terrace serve`: a memory node.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;

use clap::Args;
use terrace_baseline::FaultModel;
use terrace_nic::{PathChoice, PortConfig};
use terrace_node::{Metrics, RegionConfig, ServeError, ServeMode, Server, ServerConfig};
use terrace_pages::size;

use crate::exit::{is_usage_of_port, usage_or_1};
use crate::log::LogOption;
use crate::{output, termination, values};

const AFTER_HELP: &str = "\
Examples:
  terrace serve --region table=/data/table.bin:64G --dram 8G
  terrace serve --region a=/data/a.bin --region b=/dev/sdb --dram 8G --listen 192.0.2.7
  terrace stat --watch \"$(pidof terrace)\"

A region is a file, created sparse if it is missing and a size is given, or a block device. All
regions share the memory budget of --dram bytes, which contains their hottest pages of 4 KiB. Other
pages are only in the files. An acknowledged write survives the end of this process, in memory (a
file in /dev/shm, or in hugetlbfs if huge pages are set aside); flushed bytes (`commit`) survive a
power failure. The next server of the same files takes that memory over, and `terrace recover`
writes it to the files without one. An orderly end writes all pages to the files, and frees the
memory unless --keep-frames is given.

Clients are Terrace's Rust library (crate terrace-node) and its Python module: they open regions by
name. There is no authentication: a host that can send to the UDP port may read and write all regions.
Choose an address that only the clients' hosts reach (--listen; the default is the first interface's),
or have a firewall pass UDP 4791 and the ports after it from them alone.

The mode is the method of access to pages that are not in memory. `term` is recommended; `wait` is
its equivalent for clients that do not implement Terrace. The others are for comparison: pin, odp,
rpc, rpc-buffer, rpc-direct, rpc-tiering, rpc-tiering-promote. In odp the latency of a page fault
is modelled: at least 570 us.

--threads applies to mode rpc, which copies from the mapping with page faults: with one thread all
requests wait for each fault, with N threads up to N faults are served concurrently. The other
modes submit requests to the disk asynchronously. One thread serves the network in all modes.

--fault-plan is for testing clients; `terrace run --help` describes the file. Faults of storage
apply to IO without page faults, in all modes except pin, odp and rpc.";

/// Options of `terrace serve`.
#[derive(Args)]
#[command(after_long_help = AFTER_HELP)]
pub struct Options {
    /// A region: its name, its file, and its size if the file does not exist
    #[arg(long = "region", value_name = "NAME=PATH[:SIZE]", required = true)]
    regions: Vec<Region>,
    /// Memory budget of all regions (such as 512M or 8G)
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    dram: u64,
    /// Method of access to pages that are not in memory
    #[arg(long, value_name = "MODE", default_value = "term", value_parser = values::serve_mode())]
    mode: ServeMode,
    /// Local address [default: chosen as for `terrace run`]
    #[arg(long, value_name = "ADDRESS", env = "TERRACE_ADDR", hide_env_values = true)]
    listen: Option<IpAddr>,
    /// Largest path MTU in bytes
    #[arg(long, value_name = "BYTES", env = "TERRACE_MTU", hide_env_values = true)]
    mtu: Option<u32>,
    /// Transport to clients on this host
    #[arg(long, value_name = "PATH", env = "TERRACE_PATH", hide_env_values = true, default_value = "auto", value_parser = values::path())]
    path: PathChoice,
    #[command(flatten)]
    log: LogOption,
    /// Serve metrics for Prometheus at this address and port
    #[arg(long, value_name = "ADDRESS:PORT")]
    metrics: Option<SocketAddr>,
    /// Threads for page faults of mode rpc
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256))]
    threads: u16,
    /// Fault plan: a file of faults to inject in packets, receives and storage
    #[arg(long, value_name = "FILE", env = "TERRACE_FAULT_PLAN", hide_env_values = true, value_parser = values::fault_plan)]
    fault_plan: Option<PathBuf>,
    /// Directory of the file with the pages in memory [default: hugetlbfs if huge pages are set aside, else /dev/shm]
    #[arg(long, value_name = "DIRECTORY")]
    frames: Option<PathBuf>,
    /// Leave the pages in memory at the end, so that the next server of the same files finds them there
    #[arg(long)]
    keep_frames: bool,
}

/// `NAME=PATH[:SIZE]`.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Region(RegionConfig);

impl FromStr for Region {
    type Err = String;

    fn from_str(text: &str) -> Result<Region, String> {
        let (name, rest) = text.split_once('=').ok_or("it has no `=` between name and path")?;
        if name.is_empty() || rest.is_empty() {
            return Err("name and path are required, as in table=/data/table.bin:64G".into());
        }
        // A path may contain colons. Only a number after the last colon is a size.
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

/// The exit status after an error.
pub fn exit_code(error: &ServeError) -> u8 {
    usage_or_1(match error {
        ServeError::Name(_) => true,
        ServeError::Port(error) => is_usage_of_port(error),
        _ => false,
    })
}

/// Serves until SIGINT, SIGTERM or SIGHUP.
pub fn serve(options: &Options) -> Result<(), ServeError> {
    let termination = termination::block(&[]);
    options.log.install();
    let server = Server::open(&ServerConfig {
        regions: options.regions.iter().map(|region| region.0.clone()).collect(),
        dram_bytes: options.dram,
        mode: options.mode,
        threads: options.threads.into(),
        port: PortConfig {
            address: options.listen,
            mtu: options.mtu,
            slot: None,
            fault_plan: options.fault_plan.clone(),
            pcap: None,
            path: options.path,
            ..PortConfig::default()
        },
        keeps_frames: options.keep_frames,
        frames_directory: options.frames.clone(),
    })?;
    let metrics = options.metrics.map(|addr| Metrics::serve(addr, &server)).transpose()?;
    announce(&server, options);
    let _ = termination.wait();
    drop(metrics);
    server.close()
}

/// Prints the address and the regions.
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
        lines +=
            &format!("  {}: {} MiB in {}\n", region.0.name, stats.len_bytes >> 20, region.0.path.display());
    }
    if options.mode == ServeMode::Odp {
        let fault = FaultModel::default().fault;
        lines +=
            &format!("  page faults are modelled, with a latency of at least {} us\n", fault.as_micros());
    }
    output::announce(&lines, "ends the server.");
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
        for invalid in ["", "a", "=x", "a=", "a=/x:2Q", "a=/x:0"] {
            assert!(parsed(invalid).is_err(), "{invalid}");
        }
    }
}
