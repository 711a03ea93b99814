//! The server: `terrace export`.
//!
//! | module | what it knows |
//! |---|---|
//! | `listener` | sockets: setup and end of connections; leases |
//! | `connection`, `nodes` | what a client has looked up, opened, locked; its messages |
//! | `state`, `workers` | what the threads share; who may still access what; the threads |
//! | `requests` | what is done with a request |
//! | `tree`, `identity` | system calls beneath the directory, as the client's user |
//! | `opens`, `unmapped`, `revoker` | files as regions, their keys; the end of keys |
//! | `locks` | locks, and who may have them again |
//! | `holdings` | how many descriptors open files and locks may take, and files that were looked up |
//! | `watches` | changes of files |
//! | `stats` | what `terrace stat` shows |

mod connection;
mod holdings;
mod identity;
mod listener;
mod locks;
mod made;
mod nodes;
mod opens;
#[cfg(test)]
mod race_tests;
mod requests;
mod revoker;
mod state;
mod stats;
mod tree;
mod unmapped;
mod watches;
mod workers;

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
#[cfg(test)]
use terrace_files::FileExtent;
use terrace_files::{Files, FilesConfig};
#[cfg(test)]
use terrace_memory::{Pager, Waker};
use terrace_nic::{CqInit, Device, OpenError, PortConfig};
use terrace_sync::Mutex;

use crate::rules::Rules;
use holdings::Holdings;
use listener::Listener;
pub(crate) use listener::local_name;
use made::MadeFiles;
use state::{NewState, Receiver, State};
pub use stats::{ExportClientStats, ExportStats};
use watches::Watches;

/// Entries of the completion queue, which all connections share.
const CQ_DEPTH: u32 = 1 << 17;
/// Threads for requests.
const WORKERS: usize = 8;
/// How long a server that ends waits for its threads. A disk that does not answer, or the stopped process of a FUSE file system, may hold a
/// worker for ever.
const THREADS_END_WAIT: Duration = Duration::from_secs(5);
/// How often it looks whether they have ended.
const THREADS_POLL: Duration = Duration::from_millis(2);
/// So many eighths of the process's descriptors are for files that clients have looked up, and so many for those that they have
/// open or locked. Two more are for regions ([`FilesConfig`]), and the last one is for sockets and for requests that run.
const NODES_EIGHTHS: u64 = 2;
const HELD_EIGHTHS: u64 = 3;

/// The configuration of a server.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// The directory.
    pub directory: PathBuf,
    /// The address and port of setups. The NIC's address is the same, unless it is unspecified.
    pub listen: SocketAddr,
    /// Who may do what.
    pub rules: Rules,
    /// The configuration of the NIC's port.
    pub port: PortConfig,
    /// A client that sends nothing for so long loses its connection, its keys and its locks.
    pub lease: Duration,
}

impl ServerConfig {
    /// An export with the default rules, and leases of 10 seconds.
    pub fn new(directory: PathBuf, listen: SocketAddr) -> ServerConfig {
        let (rules, port) = (Rules::default(), PortConfig::default());
        ServerConfig { directory, listen, rules, port, lease: Duration::from_secs(10) }
    }
}

/// An error of opening a server.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The directory cannot be exported.
    #[error("cannot export {directory}: {reason}", directory = .directory.display())]
    Directory {
        /// The directory.
        directory: PathBuf,
        /// The reason.
        reason: io::Error,
    },
    /// No port could be opened.
    #[error(transparent)]
    Port(OpenError),
    /// The address cannot be listened at.
    #[error("cannot listen at {address}: {reason}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The reason.
        reason: io::Error,
    },
    /// The system refuses something else.
    #[error("the system refuses: {0}")]
    System(#[from] io::Error),
    /// An error of the NIC.
    #[error("the NIC refuses: {0}")]
    Nic(#[from] terrace_nic::Error),
}

/// An exported directory.
pub struct Server {
    state: Arc<State>,
    address: SocketAddr,
    wake: Arc<OwnedFd>,
    threads: Vec<JoinHandle<()>>,
}

impl Server {
    /// Opens the directory and the port, and starts to serve. As root each client's files are accessed as that client's
    /// user; otherwise only this process's user can be a client. The process's umask applies to files that clients make.
    /// The limit of descriptors is raised as far as the process may.
    ///
    /// # Errors
    /// See [`ServeError`].
    pub fn open(config: &ServerConfig) -> Result<Server, ServeError> {
        let directory = |reason| ServeError::Directory { directory: config.directory.clone(), reason };
        let root = tree::open_root(&config.directory).map_err(directory)?;
        let root_id = tree::attributes(root.as_fd()).map_err(directory)?.id;
        let listen = |reason| ServeError::Listen { address: config.listen, reason };
        let (tcp, unix) = listener::bind(config.listen).map_err(listen)?;
        let address = tcp.local_addr().map_err(listen)?;
        let descriptors = raise_descriptors();
        let mut port = config.port.clone();
        port.address = port.address.or(Some(config.listen.ip()).filter(|ip| !ip.is_unspecified()));
        let device = Device::open(port.device().map_err(ServeError::Port)?)?;
        // Dropping the server closes the device if one of the calls below fails.
        let closing = CloseOnDrop(Some(device.clone()));
        // Peers that know only port 4791 reach the server at any instance index.
        device.join_colocated()?;
        let cq = device.create_cq(CqInit { depth: CQ_DEPTH, channel: None, cookie: 0 })?;
        let state = Arc::new(State::new(NewState {
            device: device.clone(),
            cq,
            files: Files::new(&FilesConfig::default()),
            root,
            root_id,
            rules: config.rules.clone(),
            lease: config.lease,
            looked_up: Holdings::new((descriptors / 8 * NODES_EIGHTHS) as usize),
            holdings: Holdings::new((descriptors / 8 * HELD_EIGHTHS) as usize),
            watches: Watches::new()?,
            made: MadeFiles::of(root_id, address.port()),
        }));
        device.attach(Arc::new(Receiver { state: state.clone(), bytes: Mutex::default() }));
        let weak = Arc::downgrade(&state);
        let files = move || Some(("files".into(), serde_json::to_value(weak.upgrade()?.files.stats()).ok()?));
        device.set_report(Box::new(files));
        let listener = Listener::new(state.clone(), tcp, unix)?;
        let wake = listener.wake_descriptor();
        let mut server = Server { state, address, wake, threads: Vec::new() };
        closing.keep_open();
        server.start(listener)?;
        Ok(server)
    }

    fn start(&mut self, listener: Listener) -> io::Result<()> {
        for _ in 0..WORKERS {
            let state = self.state.clone();
            let serve = move || {
                while let Some(job) = state.work.next(&state.device) {
                    state.carry_out(job);
                }
            };
            self.threads.push(std::thread::Builder::new().name("terrace-export".into()).spawn(serve)?);
        }
        let state = self.state.clone();
        let revoke = move || state.revoker.run(|| state.release_ended_locks());
        self.threads.push(std::thread::Builder::new().name("terrace-revoke".into()).spawn(revoke)?);
        let run = move || listener.run();
        self.threads.push(std::thread::Builder::new().name("terrace-listen".into()).spawn(run)?);
        Ok(())
    }

    /// The address and port of setups.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        &self.state.device
    }

    /// The statistics now.
    pub fn stats(&self) -> ExportStats {
        self.state.stats()
    }

    /// Waits until the threads have ended, for [`THREADS_END_WAIT`] at most. Others end with the request that they carry out.
    fn join_threads(&mut self) {
        let deadline = Instant::now() + THREADS_END_WAIT;
        while Instant::now() < deadline && !self.threads.iter().all(JoinHandle::is_finished) {
            std::thread::sleep(THREADS_POLL);
        }
        let (ended, left): (Vec<_>, Vec<_>) = self.threads.drain(..).partition(JoinHandle::is_finished);
        for thread in ended {
            // A thread that has panicked has said so.
            let _ = thread.join();
        }
        match left.len() {
            0 => {}
            count => tracing::warn!(count, "the server ends before requests that wait for a disk"),
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Cannot fail: the counter does not overflow.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
        self.state.work.close();
        self.state.revoker.close();
        // Closing comes first: afterwards no grace period waits for another process, which may be stopped.
        self.state.device.close();
        self.join_threads();
        for connection in self.state.connections() {
            if connection.begin_end() {
                connection.close();
                self.state.release_all(&connection);
            }
        }
        self.state.revoker.revoke_rest();
        self.state.made.close();
    }
}

/// Closes a device, unless it is to stay open.
struct CloseOnDrop(Option<Arc<Device>>);

impl CloseOnDrop {
    fn keep_open(mut self) {
        self.0 = None;
    }
}

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        if let Some(device) = &self.0 {
            device.close();
        }
    }
}

/// Raises the limit of descriptors as far as the process may, and returns it.
fn raise_descriptors() -> u64 {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    match setrlimit(Resource::Nofile, raised) {
        Ok(()) => limit.maximum,
        Err(_) => limit.current,
    }
    .unwrap_or(1 << 20)
}

#[cfg(test)]
impl Server {
    /// Keeps all threads busy that wait for the disks of its files, until `disk` is unlocked.
    pub(crate) fn occupy_disk(&self, disk: &Arc<std::sync::RwLock<()>>) {
        for _ in 0..FilesConfig::default().workers_max {
            let file = tempfile::tempfile().unwrap();
            let region = self.state.files.open(file.as_fd(), true, FileExtent::WHOLE).unwrap();
            let disk = disk.clone();
            // The thread calls it when the file is persistent.
            let waker: Waker = Arc::new(move || drop(disk.read()));
            let range = region.translation().range();
            region.flush(range, &waker).unwrap();
        }
    }

    /// Has the threads that wait for disks write `bytes` at the start of all files that are open for writing. Accesses to these bytes wait
    /// for that.
    pub(crate) fn write_by_workers(&self, bytes: &[u8]) {
        let waker: Waker = Arc::new(|| ());
        for connection in self.state.connections() {
            let opens: Vec<_> = connection.opens.lock().values().cloned().collect();
            opens.iter().filter(|open| open.access.changes()).for_each(|open| {
                Pager::write(&*open.region, 0, bytes, &waker).unwrap();
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use terrace_nic::PathChoice;

    use super::*;
    use crate::client::tests::start;
    use crate::client::{Client, ClientConfig};
    use crate::proto::OpenAccess;

    #[test]
    fn the_protection_domain_of_a_connection_ends_with_it() {
        let (_directory, server, client, file) = start(PathChoice::Local);
        let connection = server.state.connections().pop().unwrap();
        let (domain, pd) = (Arc::downgrade(&connection.domain), connection.domain.pd.clone());
        drop((connection, file, client));
        let deadline = Instant::now() + Duration::from_secs(20);
        while domain.strong_count() > 0 {
            assert!(Instant::now() < deadline);
            std::thread::sleep(Duration::from_millis(5));
        }
        // The last reference is gone a moment before its value.
        std::thread::sleep(Duration::from_millis(100));
        assert!(matches!(pd.dealloc(), Err(terrace_nic::Error::Invalid(_))), "it was deallocated before");
    }

    #[test]
    fn a_server_ends_while_a_request_waits_for_a_disk() {
        let (_directory, server, client, _file) = start(PathChoice::Local);
        let config = ClientConfig { timeout: Duration::from_secs(2), ..client.shared.config.clone() };
        let client = Client::connect(&config).unwrap();
        let file = client.lookup_path("file".as_ref()).unwrap();
        let state = server.state.clone();
        // As long as it is locked, opening a file takes its time.
        let disk = state.checking.lock();
        std::thread::scope(|scope| {
            scope.spawn(|| client.open(file.id, OpenAccess::READ));
            while !state.connections().iter().any(|connection| connection.has_running()) {
                std::thread::sleep(THREADS_POLL);
            }
            drop(server);
            drop(disk);
        });
    }
}
