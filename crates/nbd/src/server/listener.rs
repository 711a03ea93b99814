//! The listening socket.

use std::io;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen as start_listening};

/// Clients that wait to be accepted.
const BACKLOG: i32 = 16;

/// Listens at a path to which only this user may connect.
pub fn listen(path: &Path) -> io::Result<UnixListener> {
    remove_abandoned(path)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    bind(&socket, &SocketAddrUnix::new(path)?)?;
    // Nobody can connect before the socket listens.
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    start_listening(&socket, BACKLOG)?;
    Ok(socket.into())
}

/// Removes a socket that nobody listens at.
fn remove_abandoned(path: &Path) -> io::Result<()> {
    let is_socket = path.symlink_metadata().is_ok_and(|metadata| metadata.file_type().is_socket());
    if is_socket
        && let Err(error) = UnixStream::connect(path)
        && error.kind() == io::ErrorKind::ConnectionRefused
    {
        std::fs::remove_file(path)?;
    }
    Ok(())
}
