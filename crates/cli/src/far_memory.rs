//! `--remote-memory`: where pages are that do not fit into the local memory.

use std::fmt;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use terrace_far_memory::{ClientConfig, ConnectError};
use terrace_nic::{PathChoice, PortConfig};
use terrace_pager::{FarStore, SharedStatus};
use terrace_vm::{BackingStore, FileStore};

/// How long one of several addresses may take to accept a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Buffers of a file store.
const FILE_BUFFERS: usize = 256;
/// The size of a file store's sparse file, in pages.
const FILE_PAGES: u64 = 1 << 26;

/// Where pages are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FarMemory {
    /// Memory nodes by address.
    Nodes(Vec<SocketAddr>),
    /// A file without a name in a directory, for comparison.
    Directory(PathBuf),
}

/// Why pages cannot be put there.
#[derive(Debug, thiserror::Error)]
pub enum FarMemoryError {
    /// The text is neither.
    #[error(
        "{0:?} is not a list of memory nodes that have addresses, such as 192.0.2.1:7471,192.0.2.2:7471: {1}"
    )]
    Syntax(String, String),
    /// More copies than nodes.
    #[error("--mirror {mirror} needs as many memory nodes, and there are {nodes}")]
    Mirror {
        /// Copies of each page.
        mirror: usize,
        /// Memory nodes.
        nodes: usize,
    },
    /// A node cannot be used.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The directory has no room for a file.
    #[error("{}: {error}", path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
        /// The system's error.
        error: std::io::Error,
    },
}

impl FromStr for FarMemory {
    type Err = FarMemoryError;

    fn from_str(text: &str) -> Result<FarMemory, FarMemoryError> {
        if let Some(directory) = text.strip_prefix("file:") {
            return Ok(FarMemory::Directory(directory.into()));
        }
        let nodes: Result<Vec<_>, _> = text.split(',').map(resolve).collect();
        nodes.map(FarMemory::Nodes).map_err(|reason| FarMemoryError::Syntax(text.to_owned(), reason))
    }
}

/// The address of a memory node. Of a name with several addresses, it is the first one that accepts connections, or the last
/// one.
///
/// # Errors
/// The resolver's, as text.
pub fn resolve(text: &str) -> Result<SocketAddr, String> {
    let addresses = text.to_socket_addrs().map_err(|error| format!("{error}; it is given as HOST:PORT"))?;
    choose(&addresses.collect::<Vec<_>>()).ok_or_else(|| "the name has no address".into())
}

fn choose(addresses: &[SocketAddr]) -> Option<SocketAddr> {
    let (last, others) = addresses.split_last()?;
    let accepts = |address: &&SocketAddr| TcpStream::connect_timeout(address, CONNECT_TIMEOUT).is_ok();
    Some(*others.iter().find(accepts).unwrap_or(last))
}

impl fmt::Display for FarMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FarMemory::Nodes(nodes) => {
                let nodes: Vec<_> = nodes.iter().map(SocketAddr::to_string).collect();
                f.write_str(&nodes.join(","))
            }
            FarMemory::Directory(path) => write!(f, "file:{}", path.display()),
        }
    }
}

impl FarMemory {
    /// Connects to the nodes, or creates the file. The device that connects to nodes shows the pager's state in `terrace stat`.
    pub fn open(
        &self,
        mirror: usize,
        path: PathChoice,
        status: &Arc<SharedStatus>,
    ) -> Result<Box<dyn BackingStore>, FarMemoryError> {
        match self {
            FarMemory::Nodes(nodes) if mirror > nodes.len() => {
                Err(FarMemoryError::Mirror { mirror, nodes: nodes.len() })
            }
            FarMemory::Nodes(nodes) => {
                let config = ClientConfig::new(nodes.clone(), 1);
                let port = PortConfig { path, ..config.port.clone() };
                let config = ClientConfig { copies: mirror, port, ..config };
                let store = FarStore::connect(config)?;
                store.device().attach(status.clone());
                Ok(Box::new(store))
            }
            FarMemory::Directory(path) => {
                let file = std::fs::File::options()
                    .read(true)
                    .write(true)
                    .custom_flags(rustix::fs::OFlags::TMPFILE.bits() as i32)
                    .open(path);
                let store = file.and_then(|file| FileStore::new(file, FILE_PAGES, FILE_BUFFERS));
                match store {
                    Ok(store) => Ok(Box::new(store)),
                    Err(error) => Err(FarMemoryError::Directory { path: path.clone(), error }),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn of_several_addresses_the_first_that_accepts_connections_is_used() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let listening = listener.local_addr().unwrap();
        let refusing = SocketAddr::from(([127, 0, 0, 1], 1));
        assert_eq!(choose(&[]), None);
        assert_eq!(choose(&[refusing]), Some(refusing), "one is not tried");
        assert_eq!(choose(&[refusing, listening, refusing]), Some(listening));
        assert_eq!(choose(&[refusing, refusing, listening]), Some(listening));
    }

    #[test]
    fn nodes_have_a_port_each() {
        let nodes = |text: &str| text.parse::<FarMemory>().map(|nodes| nodes.to_string());
        assert_eq!(
            nodes("127.0.0.1:1,192.0.2.1:7471,[::1]:2").unwrap(),
            "127.0.0.1:1,192.0.2.1:7471,[::1]:2"
        );
        assert_eq!(nodes("file:/var/tmp").unwrap(), "file:/var/tmp");
        for wrong in ["", "127.0.0.1", "127.0.0.1:", ":1", "127.0.0.1:70000", "127.0.0.1:1,"] {
            assert!(nodes(wrong).is_err(), "{wrong:?}");
        }
    }
}
