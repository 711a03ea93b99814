//! `terrace mount`: an export as a file system of this host.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::thread;
use std::time::Duration;

use clap::Args;
use nix::sys::signalfd::SignalFd;
use terrace_export::{Client, ClientConfig, ExportError, FileId, FileKind};
use terrace_mount::{MountConfig, mount as mount_export};
use terrace_nic::{PathChoice, PortConfig};

use crate::exit::is_usage_of_port;
use crate::fuse::{self, Obstacle};
use crate::log::LogOption;
use crate::{output, termination, values};

const AFTER_HELP: &str = "\
Examples:
  terrace export /srv/data --listen 192.0.2.7:7447 --rules rules.toml     # on the host 192.0.2.7
  terrace mount 192.0.2.7:/ /mnt                 # on another one
  terrace mount 192.0.2.7:/projects ~/projects   # a directory of the export, as an ordinary user
  fusermount3 -u ~/projects                      # or Ctrl-C, or SIGTERM

The path begins at the exported directory. The command stays in the foreground while the export is
mounted. An ordinary user needs fusermount3 (Debian: package fuse3).

Consistency is close-to-open: a file that one client has closed is what another one finds that opens it
afterwards. Errors of written data are reported by fsync and close. Names and attributes may be --cache
seconds old.

A request waits up to --timeout seconds for a server that does not answer, while the client connects
again, and then fails with \"Input/output error\".";

/// The port of exports.
const PORT: u16 = 7447;

/// Options of `terrace mount`.
#[derive(Args, Clone)]
#[command(after_long_help = AFTER_HELP)]
pub struct Options {
    /// The export's host, and the directory below the exported one
    #[arg(value_name = "HOST:/DIR")]
    source: Source,
    /// Where: an empty directory
    #[arg(value_name = "MOUNTPOINT")]
    mount_point: PathBuf,
    /// The export's port
    #[arg(long, value_name = "PORT", default_value_t = PORT)]
    port: u16,
    /// Local address [default: chosen as for `terrace run`]
    #[arg(long, value_name = "ADDRESS", env = "TERRACE_ADDR", hide_env_values = true)]
    addr: Option<IpAddr>,
    /// Largest path MTU in bytes
    #[arg(long, value_name = "BYTES", env = "TERRACE_MTU", hide_env_values = true)]
    mtu: Option<u32>,
    /// Transport to an export on this host
    #[arg(long, value_name = "PATH", env = "TERRACE_PATH", hide_env_values = true, default_value = "auto", value_parser = values::path())]
    path: PathChoice,
    /// Seconds for which a request waits for the server
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=3600))]
    timeout: u64,
    /// Seconds for which the kernel believes names and attributes, such as 0.5
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = values::seconds)]
    cache: Duration,
    /// Permit no changes
    #[arg(long)]
    read_only: bool,
    /// Serve all users of this host. The kernel checks their rights, and new files are theirs; the export must take root of
    /// this host for root. For an ordinary user /etc/fuse.conf has to permit it
    #[arg(long)]
    allow_other: bool,
    #[command(flatten)]
    log: LogOption,
}

/// `HOST:/DIR`.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Source {
    host: String,
    directory: PathBuf,
}

impl FromStr for Source {
    type Err = String;

    fn from_str(text: &str) -> Result<Source, String> {
        let (host, directory) = text.split_once(":/").ok_or("HOST:/DIR is needed, such as 192.0.2.7:/")?;
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        if host.is_empty() {
            return Err("there is no host before the colon".into());
        }
        Ok(Source { host: host.into(), directory: directory.trim_matches('/').into() })
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Source { host, directory } = self;
        // An IPv6 address stands in brackets.
        match host.contains(':') {
            true => write!(f, "[{host}]:/{}", directory.display()),
            false => write!(f, "{host}:/{}", directory.display()),
        }
    }
}

/// Why nothing is mounted.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// The host has no address.
    #[error("no address of {host}: {reason}")]
    Host {
        /// As given.
        host: String,
        /// The resolver's reason.
        reason: io::Error,
    },
    /// The export's or the port's, for each address of the host.
    #[error("{}", one_after_another(.0))]
    Export(Vec<ExportError>),
    /// The directory below the export cannot be mounted.
    #[error("{} is not a directory of the export: {reason}", .directory.display())]
    Directory {
        /// As given.
        directory: PathBuf,
        /// The server's reason.
        reason: ExportError,
    },
    /// The kernel's or fusermount3's.
    #[error("cannot mount at {}: {reason}", .mount_point.display())]
    Fuse {
        /// As given.
        mount_point: PathBuf,
        /// Their reason.
        reason: io::Error,
    },
    /// Mounting needs what is not here.
    #[error("cannot mount at {}: {obstacle}", .mount_point.display())]
    Obstacle {
        /// As given.
        mount_point: PathBuf,
        /// What is not here.
        obstacle: Obstacle,
    },
    /// The kernel's or fusermount3's, or the server's if bytes are lost.
    #[error("unmounting {}: {reason}", .mount_point.display())]
    Unmount {
        /// As given.
        mount_point: PathBuf,
        /// Their reason.
        reason: io::Error,
    },
    /// The operating system's.
    #[error("{0}")]
    System(#[from] io::Error),
}

impl MountError {
    /// Whether the command line is wrong.
    pub fn is_usage(&self) -> bool {
        let is_usage =
            |error: &ExportError| matches!(error, ExportError::Port(error) if is_usage_of_port(error));
        matches!(self, MountError::Export(errors) if errors.iter().any(is_usage))
    }
}

/// The errors, between semicolons.
fn one_after_another(errors: &[ExportError]) -> String {
    errors.iter().map(ExportError::to_string).collect::<Vec<_>>().join("; ")
}

/// Mounts, and serves the kernel until it is unmounted, SIGINT, SIGTERM or SIGHUP.
pub fn mount(options: &Options) -> Result<(), MountError> {
    let signals = termination::descriptor(&termination::block(&[]))?;
    options.log.install();
    let Some((client, root)) = connect_unless_ended(options, &signals)? else { return Ok(()) };
    let config = MountConfig {
        root,
        mount_point: options.mount_point.clone(),
        source: options.source.to_string(),
        ttl: options.cache,
        serves_others: options.allow_other,
        is_read_only: options.read_only || client.is_read_only(),
    };
    let mount_point = options.mount_point.clone();
    let refused = |reason| match fuse::obstacle() {
        Some(obstacle) => MountError::Obstacle { mount_point, obstacle },
        None => MountError::Fuse { mount_point, reason },
    };
    let mounted = mount_export(client, &config).map_err(refused)?;
    announce(&config);
    termination::wait(&signals, mounted.ended());
    mounted
        .unmount()
        .map_err(|reason| MountError::Unmount { mount_point: options.mount_point.clone(), reason })
}

/// The client, and the directory that is mounted. `None` after a signal: nothing is mounted then. Connecting goes on on its thread.
fn connect_unless_ended(
    options: &Options,
    signals: &SignalFd,
) -> Result<Option<(Client, FileId)>, MountError> {
    let (ended, end) = io::pipe()?;
    let options = options.clone();
    let connect = move || {
        let _end = end;
        let client = connect(&options)?;
        directory(&client, &options.source.directory).map(|root| (client, root))
    };
    let thread = thread::Builder::new().name("terrace-connect".into()).spawn(connect)?;
    if termination::wait(signals, ended.as_fd()).is_some() {
        return Ok(None);
    }
    let connected = thread.join();
    connected.map_err(|_| io::Error::other("the thread that connects has ended"))?.map(Some)
}

/// Connects to the first address of the host at which an export answers.
fn connect(options: &Options) -> Result<Client, MountError> {
    let host = &options.source.host;
    let failed = |reason| MountError::Host { host: host.clone(), reason };
    let mut errors = Vec::new();
    for server in (host.as_str(), options.port).to_socket_addrs().map_err(failed)? {
        match connect_to(server, options) {
            Ok(client) => return Ok(client),
            Err(error) => errors.push(error),
        }
    }
    if errors.is_empty() {
        Err(failed(io::ErrorKind::NotFound.into()))
    } else {
        Err(MountError::Export(errors))
    }
}

fn connect_to(server: SocketAddr, options: &Options) -> Result<Client, ExportError> {
    let defaults = ClientConfig::new(server);
    Client::connect(&ClientConfig {
        port: PortConfig {
            address: options.addr.or(defaults.port.address),
            mtu: options.mtu,
            path: options.path,
            ..defaults.port
        },
        timeout: Duration::from_secs(options.timeout),
        ..defaults
    })
}

/// The directory of the export that is mounted.
fn directory(client: &Client, directory: &Path) -> Result<FileId, MountError> {
    if directory.as_os_str().is_empty() {
        return Ok(client.root());
    }
    let failed = |reason| MountError::Directory { directory: directory.into(), reason };
    let attributes = client.lookup_path(directory).map_err(failed)?;
    match attributes.kind {
        FileKind::Directory => Ok(attributes.id),
        _ => Err(failed(ExportError::Os(nix::errno::Errno::ENOTDIR as i32))),
    }
}

fn announce(config: &MountConfig) {
    let line = format!("{} is mounted at {}\n", config.source, config.mount_point.display());
    output::announce(&line, "unmounts it.");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_have_a_host_and_a_directory_below_the_export() {
        let parsed = |text: &str| text.parse::<Source>();
        let source =
            |host: &str, directory: &str| Ok(Source { host: host.into(), directory: directory.into() });
        assert_eq!(parsed("a:/"), source("a", ""));
        assert_eq!(parsed("192.0.2.7:/x/y/"), source("192.0.2.7", "x/y"));
        assert_eq!(parsed("[2001:db8::1]:/x"), source("2001:db8::1", "x"));
        for text in ["a:/", "192.0.2.7:/x/y", "[2001:db8::1]:/x"] {
            assert_eq!(parsed(text).unwrap().to_string(), text);
        }
        for invalid in ["", "a", "a:x", ":/x", "/x"] {
            assert!(parsed(invalid).is_err(), "{invalid}");
        }
    }
}
