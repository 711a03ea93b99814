//! How a kernel reaches a swap device: by a unix socket, or as a file.

use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::SignalFd;
use terrace_far_memory::Client;
use terrace_nbd::{CONNECTIONS_MAX, ClientQueue, Counters, FILE_NAME, FileServer, Server, ServerError};

use crate::swap_device::SwapDeviceError;
use crate::{fuse, termination};

/// Where the device is served.
#[derive(Args, Clone)]
#[group(required = true, multiple = false)]
pub struct Place {
    /// Serve a network block device (NBD) at this unix socket, in a directory that exists
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// Serve a file for a loop device, MOUNTPOINT/swap, for kernels without NBD. The mount point is an empty directory
    #[arg(long, value_name = "MOUNTPOINT")]
    pub mount: Option<PathBuf>,
}

impl Place {
    /// The path of the socket, or of the file.
    pub fn path(&self) -> PathBuf {
        let file = self.mount.as_ref().map(|mount_point| mount_point.join(FILE_NAME));
        // One of them is given.
        file.or_else(|| self.socket.clone()).unwrap_or_default()
    }

    /// Connections of the device.
    pub fn connections(&self) -> usize {
        if self.mount.is_some() { FileServer::CONNECTIONS } else { CONNECTIONS_MAX }
    }
}

/// A device that is served.
pub enum Front {
    /// By NBD.
    Socket(Server),
    /// By FUSE. Signals come by the descriptor.
    File(FileServer, SignalFd),
}

impl Front {
    /// Serves a client's pages.
    ///
    /// # Errors
    /// `Buffer`, `Server`, `Obstacle`.
    pub fn start(
        place: &Place,
        source: &str,
        client: &Arc<Client>,
        signals: &SigSet,
    ) -> Result<Front, SwapDeviceError> {
        let queue = ClientQueue::new(client.clone(), place.connections())?;
        let Some(mount_point) = &place.mount else {
            return Ok(Front::Socket(Server::start(&place.path(), queue)?));
        };
        let refused = |error| match (error, fuse::obstacle()) {
            (ServerError::Mount { mount_point, .. }, Some(obstacle)) => {
                SwapDeviceError::Obstacle { mount_point, obstacle }
            }
            (error, _) => error.into(),
        };
        let signals = termination::descriptor(signals).map_err(ServerError::System)?;
        Ok(Front::File(FileServer::start(mount_point, source, queue).map_err(refused)?, signals))
    }

    /// The device's counters.
    pub fn counters(&self) -> &Arc<Counters> {
        match self {
            Front::Socket(server) => server.counters(),
            Front::File(server, _) => server.counters(),
        }
    }

    /// The next signal. `None` if the file has been unmounted.
    pub fn wait(&self, signals: &SigSet) -> Option<Signal> {
        match self {
            Front::Socket(_) => signals.wait().ok(),
            Front::File(server, received) => termination::wait(received, server.ended()),
        }
    }

    /// Answers requests in flight, and ends the device.
    pub fn stop(self, place: &Place) {
        match self {
            Front::Socket(server) => server.stop(),
            Front::File(server, _) => {
                if server.counters().totals().connections > 0 {
                    let path = place.path();
                    tracing::warn!(
                        "{} is in use, by a loop device perhaps, and its bytes are lost: swapoff and losetup -d come before the end of this process",
                        path.display()
                    );
                }
                server.stop();
            }
        }
    }
}
