//! `terrace export`: a directory whose files peers access one-sidedly.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use rustix::fs::Mode;
use terrace_export::{Rules, RulesError, ServeError, Server, ServerConfig};
use terrace_nic::{PathChoice, PortConfig};

use crate::exit::is_usage_of_port;
use crate::log::LogOption;
use crate::{output, termination, values};

const AFTER_HELP: &str = "\
Examples:
  terrace export /srv/data --listen 192.0.2.7:7447 --rules /etc/terrace/export.toml
  terrace export .                 # for clients on this host

Clients are `terrace mount`, C programs (terrace_export.h), Python (terrace.fsspec), and Terrace's Rust
library (crate terrace-export). They look files up and open them by messages, and READ, WRITE and APPEND
their data one-sidedly. Nothing outside the directory can be reached: `..`, absolute paths, symbolic links
that lead out and other file systems mounted in it are refused.

A client on this host is the user of its process, as the kernel says. Clients of other hosts are
refused without --rules. If this command runs as root, each client's files are accessed as that
client's user, and the kernel checks permissions; otherwise only clients of this command's own user
are served. A file of rules:

  squash = \"nobody\"             # the user of clients that are root; root = true: none
  keep_unlinked = false         # true: clients keep files open that others have unlinked
  [local]                       # clients on this host
  access = \"rw\"                 # or \"ro\", or \"none\"
  [[remote]]                    # the first rule that matches the client's address counts
  from = \"192.0.2.0/24\"
  user = \"alice\"
  access = \"ro\"

The address needs its TCP port for setups, and UDP port 4791 (and those above it that `terrace
devices` shows) for RDMA. A client that is not heard of for the time of a lease loses its
connection, its locks and its keys. SIGINT and SIGTERM end the server; clients connect again to the
next one, and open their files again.";

/// Options of `terrace export`.
#[derive(Args)]
#[command(after_long_help = AFTER_HELP)]
pub struct Options {
    /// The directory
    #[arg(value_name = "DIRECTORY")]
    directory: PathBuf,
    /// Address and TCP port of setups; the NIC has the same address
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:7447")]
    listen: SocketAddr,
    /// Who may do what: a TOML file [default: users of this host, and nobody else]
    #[arg(long, value_name = "FILE")]
    rules: Option<PathBuf>,
    /// Seconds after which a silent client loses its connection, locks and keys
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u16).range(1..=3600))]
    lease: u16,
    /// Largest path MTU in bytes
    #[arg(long, value_name = "BYTES", env = "TERRACE_MTU", hide_env_values = true)]
    mtu: Option<u32>,
    /// Transport to clients on this host
    #[arg(long, value_name = "PATH", env = "TERRACE_PATH", hide_env_values = true, default_value = "auto", value_parser = values::path())]
    path: PathChoice,
    /// Fault plan: a file of faults to inject in packets
    #[arg(long, value_name = "FILE", env = "TERRACE_FAULT_PLAN", hide_env_values = true, value_parser = values::fault_plan)]
    fault_plan: Option<PathBuf>,
    #[command(flatten)]
    log: LogOption,
}

/// An error of `terrace export`.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// The rules.
    #[error("--rules {}: {reason}", path.display())]
    Rules {
        /// Their file.
        path: PathBuf,
        /// What is wrong.
        reason: RulesError,
    },
    /// The server.
    #[error(transparent)]
    Serve(#[from] ServeError),
}

impl ExportError {
    /// Whether the command line is wrong, the rules that it names included.
    pub fn is_usage(&self) -> bool {
        match self {
            ExportError::Rules { .. } => true,
            ExportError::Serve(ServeError::Port(error)) => is_usage_of_port(error),
            ExportError::Serve(_) => false,
        }
    }
}

/// Serves until SIGINT, SIGTERM or SIGHUP.
pub fn export(options: &Options) -> Result<(), ExportError> {
    let termination = termination::block(&[]);
    options.log.install();
    // Clients have umasks of their own.
    rustix::process::umask(Mode::empty());
    let rules = options
        .rules
        .as_ref()
        .map(|path| Rules::load(path).map_err(|reason| ExportError::Rules { path: path.clone(), reason }));
    let rules = rules.transpose()?.unwrap_or_default();
    let server = Server::open(&ServerConfig {
        directory: options.directory.clone(),
        listen: options.listen,
        rules,
        port: PortConfig {
            mtu: options.mtu,
            path: options.path,
            fault_plan: options.fault_plan.clone(),
            ..PortConfig::default()
        },
        lease: Duration::from_secs(options.lease.into()),
    })?;
    announce(&server, options);
    let _ = termination.wait();
    Ok(())
}

/// Prints the address and the directory.
fn announce(server: &Server, options: &Options) {
    let snapshot = server.device().snapshot();
    let lines = format!(
        "exporting {} at {} (UDP port {})\n",
        options.directory.display(),
        server.address(),
        snapshot.udp_port
    );
    output::announce(&lines, "ends the server.");
}
